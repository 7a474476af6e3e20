"""What listeners can ask of the loop: to end an epoch, to abort, to call off what is due. What ways in can change."""

import pytest

from engine.fakes import FakeBackend, FakeSource
from engine.test_loop import Run, plan
from trainformer.engine import Cadence, Event, RunState


def at(run, event, step, act):
    """Do something when an event comes after so many steps."""

    def listener(*args):
        if run.state.step == step:
            act(run.control)

    run.bus.add("asker", {event: listener})
    return run


def steps_of(run, event):
    """After which steps an event came; steps end before the events they lead to."""
    found, step = [], 0
    for name, args in run.events:
        step = args[0] if name is Event.STEP_END else step
        if name is event:
            found.append(step)
    return found


EVERY_TWO = Cadence(2, "steps")


def test_what_is_due_stands_in_the_control_when_a_step_ends():
    seen = []
    run = Run(plan(log_every=EVERY_TWO, eval_every=Cadence(3, "steps"), save_every=EVERY_TWO, log_first=False))

    def look(step, loss):
        seen.append((step, run.control.should_log, run.control.should_evaluate, run.control.should_save))

    run.bus.add("looker", {Event.STEP_END: look})
    run.go()
    assert seen == [
        (1, False, False, False), (2, True, False, True), (3, False, True, False),
        (4, True, False, True), (5, False, False, False), (6, True, True, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "event"), [("should_log", Event.LOG), ("should_evaluate", Event.EVAL_END), ("should_save", Event.SAVE)]
)
def test_what_is_due_can_be_called_off(flag, event):
    options = {"log_every": EVERY_TWO, "eval_every": EVERY_TWO, "save_every": EVERY_TWO}
    run = Run(plan(**options, log_first=False))
    at(run, Event.STEP_END, 4, lambda control: setattr(control, flag, False)).go()
    assert steps_of(run, event) == [2, 6]


@pytest.mark.parametrize(
    ("flag", "event"), [("should_log", Event.LOG), ("should_evaluate", Event.EVAL_END), ("should_save", Event.SAVE)]
)
def test_what_is_asked_for_when_an_epoch_ends_is_done_there(flag, event):
    """Also after the last step of the run, where there is no other boundary."""
    run = Run(plan(epochs=2, log_first=False, log_remaining=False), source=FakeSource(3))
    for step in (3, 6):
        at(run, Event.EPOCH_END, step, lambda control: setattr(control, flag, True))
    run.go()
    assert steps_of(run, event) == [3, 6]


def test_a_save_that_is_asked_for_at_an_evaluation_is_made_there():
    run = Run(plan(epochs=2, eval_every=Cadence(1, "epochs")), source=FakeSource(3))
    run.bus.add("asker", {Event.EVAL_END: lambda metrics: setattr(run.control, "should_save", True)})
    run.go()
    assert steps_of(run, Event.SAVE) == [3, 6]
    at_end = Run(plan(eval_at_end=True, max_steps=4))
    at_end.bus.add("asker", {Event.EVAL_END: lambda metrics: setattr(at_end.control, "should_save", True)})
    assert steps_of(at_end.go(), Event.SAVE) == [4]


def test_an_epoch_can_be_cut_short():
    run = at(
        Run(plan(epochs=2), source=FakeSource(4)), Event.STEP_END, 2, lambda c: setattr(c, "should_end_epoch", True)
    )
    run.go()
    assert [w[0] for w in run.backend.windows] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert run.count(Event.EPOCH_END) == 2
    assert (run.state.epoch, run.state.batch, run.state.step) == (2, 0, 6)


@pytest.mark.parametrize("event", [Event.STEP_END, Event.LOG, Event.EVAL_END])
def test_aborting_keeps_nothing_more(event):
    options = {"log_every": EVERY_TWO, "eval_every": EVERY_TWO, "save_every": Cadence(1, "steps")}
    run = Run(plan(**options, save_at_end=True, eval_at_end=True))
    at(run, event, 4, lambda control: control.abort("it diverges", by="me")).go()
    assert steps_of(run, Event.SAVE) == [1, 2, 3]
    assert run.state.step == 4
    assert run.control.stopped_by == "me"
    assert run.names()[-1] == "train_end"


def test_a_stop_can_be_called_off():
    run = Run(plan())
    run.bus.add("first", {Event.STEP_END: lambda step, loss: run.control.stop("enough", by="first")})
    run.bus.add("second", {Event.STEP_END: lambda step, loss: run.control.cancel_stop()})
    run.go()
    assert run.state.step == 6
    assert run.control.stopped_by is None


def test_the_first_and_the_last_records_can_be_left_out():
    usual = Run(plan(log_every=Cadence(4, "steps"))).go()
    spare = Run(plan(log_every=Cadence(4, "steps"), log_first=False, log_remaining=False)).go()
    assert steps_of(usual, Event.LOG) == [1, 4, 6]
    assert steps_of(spare, Event.LOG) == [4]


@pytest.mark.parametrize("rest", [True, False])
def test_the_mean_loss_of_a_run_counts_every_step(rest):
    """The loss of step n is n - 1 on the fake backend."""
    run = Run(plan(log_every=Cadence(4, "steps"), log_remaining=rest)).go()
    assert run.state.loss_sum / run.state.loss_steps == sum(range(6)) / 6
    assert run.state.loss_steps == 6


def test_a_run_that_somebody_stopped_can_be_evaluated_at_its_end():
    for wanted, expected in ((True, [3]), (False, [])):
        run = Run(plan(eval_at_end=True, eval_when_stopped=wanted))
        at(run, Event.STEP_END, 3, lambda control: control.stop("enough", by="me")).go()
        assert steps_of(run, Event.EVAL_END) == expected


def test_a_state_that_is_loaded_when_training_begins_is_where_it_begins():
    run = Run(plan(epochs=2), source=FakeSource(3))
    later = RunState(step=4, epoch=1, batch=1, position=4, samples=16)
    run.bus.add("loader", {Event.TRAIN_BEGIN: lambda: run.state.load_state_dict(later.state_dict())})
    run.go()
    assert [w[0] for w in run.backend.windows] == [(1, 1), (1, 2)]
    assert run.state.step == 6
    assert all(m["train/samples_per_second"] > 0 for name, step, m in run.services.calls if name == "log")


def test_micro_batches_know_whether_more_follow_where_that_matters():
    class Looking(FakeBackend):
        wants_lookahead = True

        def __init__(self):
            super().__init__()
            self.more = []

        def accumulate(self, batch):
            self.more.append(batch.more)
            return super().accumulate(batch)

    run = Run(plan(accumulation=3), source=FakeSource(7), backend=Looking()).go()
    assert run.backend.more == [True, True, False, True, True, False, False]
    assert [len(w) for w in run.backend.windows] == [3, 3, 1]


def test_listeners_may_change_while_an_event_is_delivered():
    run = Run(plan(), listen=())
    heard = []

    def leave(step, loss):
        heard.append(step)
        run.bus.clear()

    run.bus.add("first", {Event.STEP_END: leave})
    run.bus.add("second", {Event.STEP_END: lambda step, loss: heard.append(-step)})
    run.go()
    assert heard == [1, -1]


def test_what_was_pending_when_the_last_step_was_saved_is_logged_by_whoever_goes_on():
    """A signal exactly at the last step, off a log point: the last record is written by the next process."""
    cut = Run(plan(log_every=Cadence(4, "steps"), save_every=Cadence(1, "steps")))

    def leave(step, loss):
        if step == 6:
            cut.control.pending_signal = 15

    cut.bus.add("signal", {Event.STEP_END: leave})
    cut.go()
    assert steps_of(cut, Event.LOG) == [1, 4]
    cut.state.pending = cut.loop.pending_values()
    again = Run(plan(log_every=Cadence(4, "steps")), state=RunState().load_state_dict(cut.state.state_dict())).go()
    records = [metrics for name, step, metrics in again.services.calls if name == "log"]
    assert [record["train/loss"] for record in records] == [4.5]  # of steps 5 and 6
    assert again.backend.windows == []
