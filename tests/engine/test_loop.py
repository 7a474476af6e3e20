"""The loop: order and number of events, cadence, stopping, and no look at the device between log points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fakes import CountingScalar, FakeBackend, FakeServices, FakeSource
from trainformer.core import DataError
from trainformer.engine import Cadence, Control, Event, EventBus, Loop, Plan, RunState


class Run:
    """A loop on fakes that records every event."""

    def __init__(self, plan, *, source=None, state=None, services=None, listen=tuple(Event), backend=None):
        self.state = state or RunState()
        self.control = Control()
        self.bus = EventBus()
        self.events = []
        for event in listen:
            self.bus.add("recorder", {event: lambda *args, _e=event: self.events.append((_e, args))})
        self.backend = backend or FakeBackend()
        self.services = services or FakeServices()
        self.loop = Loop(
            plan, self.state, backend=self.backend, source=source or FakeSource(), bus=self.bus,
            control=self.control, services=self.services,
        )  # fmt: skip

    def go(self):
        self.loop.run()
        return self

    def names(self):
        return [event.value for event, _ in self.events]

    def count(self, event):
        return sum(e is event for e, _ in self.events)


def plan(**changes):
    defaults = {
        "max_steps": None,
        "epochs": 1,
        "log_every": Cadence(100, "steps"),
        "eval_at_end": False,
        "save_at_end": False,
    }
    return Plan(**{**defaults, **changes})


def test_events_of_one_epoch_come_in_the_documented_order():
    run = Run(
        plan(accumulation=2, eval_every=Cadence(1, "epochs"), save_every=Cadence(2, "steps")), source=FakeSource(4)
    ).go()
    step = ["step_begin", "substep_end", "substep_end", "before_optimizer_step", "after_optimizer_step", "step_end"]
    assert run.names() == [
        "train_begin", "epoch_begin",
        *step, "log",
        *step, "log", "eval_begin", "eval_end", "epoch_end", "save",
        "train_end",
    ]  # fmt: skip


def test_steps_are_counted_from_one_at_their_end_and_from_zero_at_their_begin():
    run = Run(plan(epochs=2), source=FakeSource(3)).go()
    assert [args[0] for e, args in run.events if e is Event.STEP_BEGIN] == [0, 1, 2, 3, 4, 5]
    assert [args[0] for e, args in run.events if e is Event.STEP_END] == [1, 2, 3, 4, 5, 6]
    assert [args[0] for e, args in run.events if e is Event.EPOCH_END] == [0, 1]


@given(
    batches=st.integers(1, 12), accumulation=st.integers(1, 5), epochs=st.integers(1, 4),
    log=st.integers(1, 7), evaluate=st.integers(1, 7), save=st.integers(1, 7),
)  # fmt: skip
def test_numbers_of_events(batches, accumulation, epochs, log, evaluate, save):
    run = Run(
        plan(
            epochs=epochs, accumulation=accumulation, log_every=Cadence(log, "steps"),
            eval_every=Cadence(evaluate, "steps"), save_every=Cadence(save, "steps"),
        ),
        source=FakeSource(batches),
    ).go()  # fmt: skip
    steps = epochs * -(-batches // accumulation)
    assert run.state.step == steps == run.count(Event.STEP_BEGIN) == run.count(Event.STEP_END)
    assert run.count(Event.SUBSTEP_END) == epochs * batches
    assert run.count(Event.BEFORE_OPTIMIZER_STEP) == run.count(Event.AFTER_OPTIMIZER_STEP) == steps
    assert run.count(Event.EPOCH_BEGIN) == run.count(Event.EPOCH_END) == epochs
    assert run.count(Event.TRAIN_BEGIN) == run.count(Event.TRAIN_END) == 1
    assert run.count(Event.EVAL_END) == run.services.count("evaluate") == steps // evaluate
    assert run.count(Event.SAVE) == run.services.count("save") == steps // save
    logged = {s for s in range(1, steps + 1) if s == 1 or s % log == 0 or s == steps}
    assert [call[1] for call in run.services.calls if call[0] == "log" and "train/loss" in call[2]] == sorted(logged)


@given(batches=st.integers(1, 12), accumulation=st.integers(1, 5), epochs=st.integers(1, 3))
def test_windows_hold_every_batch_once_and_never_reach_into_the_next_epoch(batches, accumulation, epochs):
    run = Run(plan(epochs=epochs, accumulation=accumulation), source=FakeSource(batches)).go()
    assert [b for window in run.backend.windows for b in window] == [
        (e, i) for e in range(epochs) for i in range(batches)
    ]
    assert all(len({epoch for epoch, _ in window}) == 1 for window in run.backend.windows)
    assert all(len(window) <= accumulation for window in run.backend.windows)


def test_nothing_is_read_between_log_points():
    reads_at_step = {}
    run = Run(plan(epochs=3, log_every=Cadence(10, "steps")), source=FakeSource(10), listen=())
    run.bus.add("reads", {Event.STEP_END: lambda step, loss: reads_at_step.__setitem__(step, CountingScalar.reads)})
    CountingScalar.reads = 0
    run.go()
    changes = [s for s in range(2, 31) if reads_at_step[s] != reads_at_step[s - 1]]
    # Reads become visible in the step after a log point: 1, 10, 20.
    assert changes == [2, 11, 21]


def test_the_loss_given_to_step_end_is_read_only_when_used():
    seen = []
    run = Run(plan(log_every=None), listen=())
    run.bus.add("half", {Event.STEP_END: lambda step, loss: seen.append(float(loss)) if step == 3 else None})
    CountingScalar.reads = 0
    run.go()
    assert seen == [2.0]
    assert CountingScalar.reads == 6 + 1  # the one that was looked at, and the final record of all six


def test_logged_loss_is_the_mean_over_the_steps_since_the_last_record():
    run = Run(plan(log_every=Cadence(3, "steps")), source=FakeSource(7)).go()
    losses = [call[2]["train/loss"] for call in run.services.calls if call[0] == "log"]
    assert losses == [0.0, 1.5, 4.0, 6.0]  # steps 1 | 2-3 | 4-6 | 7, where step n has loss n - 1


def test_max_steps_overrides_epochs_and_going_on_continues_in_the_middle():
    run = Run(plan(max_steps=4, epochs=None), source=FakeSource(6)).go()
    assert (run.state.step, run.state.epoch, run.state.batch, run.state.position) == (4, 0, 4, 16)
    assert run.count(Event.EPOCH_END) == 0
    more = Run(plan(max_steps=8, epochs=None), source=FakeSource(6), state=run.state).go()
    assert [b for w in more.backend.windows for b in w] == [(0, 4), (0, 5), (1, 0), (1, 1)]
    assert more.count(Event.EPOCH_END) == 1


def test_max_steps_on_the_last_batch_of_an_epoch_ends_the_epoch():
    run = Run(plan(max_steps=6, epochs=None), source=FakeSource(6)).go()
    assert (run.state.epoch, run.state.batch) == (1, 0)
    assert run.count(Event.EPOCH_END) == 1


def test_a_finished_run_does_nothing_when_run_again():
    run = Run(plan()).go()
    again = Run(plan(), state=run.state).go()
    assert again.names() == ["train_begin", "train_end"]


def test_stop_request_is_honoured_at_the_step_and_names_who_asked():
    run = Run(plan(epochs=5, eval_at_end=True, save_at_end=True))
    run.bus.add(
        "impatient",
        {Event.STEP_END: lambda step, loss: step == 3 and run.control.stop("enough", run.bus.current_listener)},
    )
    run.bus.add(
        "later", {Event.STEP_END: lambda step, loss: step == 3 and run.control.stop("me too", run.bus.current_listener)}
    )
    run.go()
    assert run.state.step == 3
    assert (run.control.stopped_by, run.control.stop_reason) == ("impatient", "enough")
    assert run.services.count("evaluate") == 0
    assert run.services.count("save") == 1
    assert run.names()[-1] == "train_end"


def test_requests_to_log_evaluate_and_save_are_honoured_once():
    run = Run(plan(log_every=None))

    def ask(step, loss):
        if step == 2:
            run.control.should_log = run.control.should_evaluate = run.control.should_save = True

    run.bus.add("asks", {Event.STEP_END: ask})
    run.go()
    assert [call[0] for call in run.services.calls] == ["log", "evaluate", "log", "save", "log"]


def test_an_evaluation_is_not_repeated_at_the_same_step():
    run = Run(plan(eval_every=Cadence(6, "steps"), eval_at_end=True), source=FakeSource(6)).go()
    assert run.services.count("evaluate") == 1


def test_a_good_evaluation_is_saved_even_without_a_save_cadence():
    run = Run(plan(epochs=2, eval_every=Cadence(1, "epochs")), services=FakeServices(keep=True)).go()
    assert run.services.count("save") == 2


def test_best_metrics_follow_the_monitored_metric():
    run = Run(plan(eval_every=Cadence(1, "epochs"), monitor="val/acc", monitor_mode="max"))
    for acc in (0.5, 0.9, 0.7):
        run.services.metrics = {"val/acc": acc, "val/loss": 1 - acc}
        run.loop.state.evaluated_at = -1
        run.loop._evaluate()
    assert run.state.best_metrics == {"val/acc": 0.9, "val/loss": pytest.approx(0.1)}


def test_minutes_as_cadence(monkeypatch):
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr("trainformer.engine.loop.time.perf_counter", lambda: float(next(clock)))
    run = Run(plan(save_every=Cadence.parse("1min", "steps"), log_every=None), source=FakeSource(30), listen=()).go()
    assert 2 <= run.services.count("save") <= 6


class NamedServices(FakeServices):
    """Validation sets with names."""

    def evaluate(self, names=()):
        self.calls.append(("evaluate", *names))
        return {f"val/{name}/loss": 0.5 for name in names}


def test_minutes_as_the_cadence_of_one_validation_set(monkeypatch):
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr("trainformer.engine.loop.time.perf_counter", lambda: float(next(clock)))
    every = {"often": Cadence.parse("1min", "steps"), "rarely": Cadence.parse("4min", "steps")}
    run = Run(plan(eval_every=every, log_every=None), source=FakeSource(60), services=NamedServices(), listen=()).go()
    evaluated = [name for call in run.services.calls if call[0] == "evaluate" for name in call[1:]]
    assert evaluated.count("often") > 2 * evaluated.count("rarely") > 0


@given(
    a=st.integers(1, 7),
    b=st.one_of(st.none(), st.integers(1, 7)),
    per_epoch=st.integers(1, 5),
    epochs=st.integers(1, 4),
)
def test_named_sets_are_evaluated_when_due_and_never_twice_at_a_step(a, b, per_epoch, epochs):
    every = {"a": Cadence(a, "steps"), "b": None if b is None else Cadence(b, "epochs")}
    services, steps = NamedServices(), []
    run = Run(plan(eval_every=every, eval_at_end=True, epochs=epochs), source=FakeSource(per_epoch), services=services,
              listen=())  # fmt: skip
    run.bus.add("steps", {Event.EVAL_END: lambda metrics: steps.append((run.state.step, *sorted(metrics)))})
    run.go()
    total = per_epoch * epochs
    found = {name: [step for step, *names in steps if f"val/{name}/loss" in names] for name in "ab"}
    assert found["a"] == sorted({*range(a, total + 1, a), total})
    due = [] if b is None else sorted({*(n * per_epoch for n in range(b, epochs + 1, b)), total})
    assert found["b"] == due
    assert len(steps) == len({step for step, *_ in steps})


def test_every_step_is_verified_before_it_is_evaluated_or_saved():
    run = Run(plan(save_every=Cadence(2, "steps"), log_every=None), source=FakeSource(4)).go()
    assert run.backend.verified[:2] == [2, 4]


def test_an_empty_epoch_is_an_error_not_an_endless_loop():
    with pytest.raises(DataError, match="no batches"):
        Run(plan(max_steps=5, epochs=None), source=FakeSource(0)).go()


def test_a_stream_without_length():
    run = Run(plan(max_steps=7, epochs=None), source=FakeSource(4, known_length=False)).go()
    assert run.state.step == 7
    assert (run.state.epoch, run.state.batch) == (1, 3)


def test_retry_repeats_the_same_window():
    class Flaky(FakeBackend):
        may_repeat = True
        tries = 0

        def finish(self):
            self.tries += 1
            if self.tries == 2:
                self._window = []
                return False
            return True

    backend = Flaky()
    run = Run(plan(accumulation=2), source=FakeSource(4), backend=backend).go()
    assert backend.windows == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert run.state.batch == 0
    assert run.state.samples == 16


def test_a_callback_that_raises_stops_the_run_and_is_named():
    run = Run(plan(), listen=())

    def broken(step, loss):
        raise RuntimeError("oops")

    run.bus.add("Broken", {Event.STEP_END: broken})
    with pytest.raises(RuntimeError, match="oops") as caught:
        run.go()
    assert any("Broken" in note and "step_end" in note for note in caught.value.__notes__)


def test_a_window_that_did_not_fit_is_begun_again():
    class Tight(FakeBackend):
        may_repeat = True
        refusals = 1

        def accumulate(self, batch):
            if len(self._window) == 1 and self.refusals:
                self.refusals -= 1
                self._window = []
                return False
            return super().accumulate(batch)

    run = Run(plan(accumulation=2), source=FakeSource(4), backend=Tight()).go()
    assert run.backend.windows == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert run.state.samples == 16


def test_a_signal_saves_and_stops_at_the_next_boundary():
    run = Run(plan(epochs=5))
    run.bus.add("kernel", {Event.STEP_END: lambda step, loss: step == 3 and setattr(run.control, "pending_signal", 15)})
    run.go()
    assert run.state.step == 3
    assert run.services.count("save") == 1
    assert run.control.stop_reason == "received SIGTERM"


def test_pending_values_make_the_first_record_after_a_restart_whole():
    def losses(run):
        return [call[2]["train/loss"] for call in run.services.calls if call[0] == "log"]

    whole = Run(plan(log_every=Cadence(4, "steps")), source=FakeSource(8)).go()
    first = Run(plan(max_steps=6, epochs=None, log_every=Cadence(4, "steps")), source=FakeSource(8))
    saved = {}
    first.bus.add(
        "saver",
        {
            Event.STEP_END: lambda step, loss: (
                step == 6 and saved.update(first.state.state_dict(), pending=first.loop.pending_values())
            )
        },
    )
    first.go()
    rest = Run(plan(log_every=Cadence(4, "steps")), source=FakeSource(8), state=RunState().load_state_dict(saved)).go()
    assert losses(rest) == losses(whole)[-1:]
