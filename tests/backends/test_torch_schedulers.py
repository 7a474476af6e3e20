"""Schedulers of torch in runs, against hand-written loops over the same scheduler objects."""

import functools
import re

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.backends.torch.schedules import make_schedule
from trainformer.callbacks import EarlyStopping, LRFinder, ModelCheckpoint
from trainformer.core.errors import BadArgument, DataError
from trainformer.tasks import TaskBase

EPOCHS, STEPS = 6, 4  # steps per epoch
TRAIN, VAL = TensorDataset(*classes(30)), classes(12, seed=1)
QUIET = {"log": "none", "device": "cpu", "precision": "no", "gradient_clip": None, "num_workers": 0}
QUIET |= {"save_every": None, "log_every": 1}


def batches():
    return DataLoader(TRAIN, batch_size=8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


class Rates:
    def __init__(self):
        self.seen = []

    def on_log(self, trainer, metrics):
        self.seen.append(metrics["train/lr"])  # that of the step


def plateau(optimizer, **options):
    """Reduces the rate often, so that a missed or repeated step shows."""
    return schedulers.ReduceLROnPlateau(optimizer, **{"patience": 0, "factor": 0.5, "threshold": 0.2, **options})


def chained(optimizer):
    return schedulers.ChainedScheduler([schedulers.LinearLR(optimizer, 0.5, total_iters=3),
                                        schedulers.ExponentialLR(optimizer, 0.9)])  # fmt: skip


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.CosineAnnealingLR(optimizer, 15)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5])


def warmup(optimizer):
    return schedulers.LinearLR(optimizer, 0.1, total_iters=6)


# The declaration, and the same for the hand-written loop: functions that make schedulers, by when they are stepped.
CASES = {
    "step": (lambda o: schedulers.ExponentialLR(o, 0.9), {"step": [lambda o: schedulers.ExponentialLR(o, 0.9)]}),
    "every third step": (
        {"name": "ExponentialLR", "gamma": 0.5, "interval": "step", "frequency": 3},
        {"step": [lambda o: schedulers.ExponentialLR(o, 0.5)], "every": 3},
    ),
    "sequential": (sequential, {"step": [sequential]}),
    "one cycle with momentum": (
        lambda o, total: schedulers.OneCycleLR(o, 0.4, total_steps=total),
        {"step": [lambda o: schedulers.OneCycleLR(o, 0.4, total_steps=EPOCHS * STEPS)]},
    ),
    "epoch": (
        {"scheduler": functools.partial(schedulers.StepLR, step_size=2), "interval": "epoch"},
        {"epoch": [lambda o: schedulers.StepLR(o, 2)]},
    ),
    "chained, every second epoch": (
        {"scheduler": chained, "interval": "epoch", "frequency": 2},
        {"epoch": [chained], "every": 2},
    ),
    "milestones": (
        {"name": "MultiStepLR", "milestones": [1, 3], "gamma": 0.3, "interval": "epoch"},
        {"epoch": [lambda o: schedulers.MultiStepLR(o, [1, 3], 0.3)]},
    ),
    "plateau by name": (
        {"name": "reduce_lr_on_plateau", "patience": 0, "factor": 0.5, "threshold": 0.2},
        {"eval": [plateau]},
    ),
    "plateau each epoch": ({"scheduler": plateau, "interval": "epoch", "monitor": "val/loss"}, {"eval": [plateau]}),
    "warm-up, plateau": ([warmup, plateau], {"step": [warmup], "eval": [plateau]}),
    "warm-up, epochs, plateau": (
        [warmup, {"name": "StepLR", "step_size": 3, "interval": "epoch"}, {"scheduler": plateau, "frequency": 1}],
        {"step": [warmup], "epoch": [lambda o: schedulers.StepLR(o, 3)], "eval": [plateau]},
    ),
}  # fmt: skip


def by_hand(step=(), epoch=(), eval=(), every=1):
    """The weights and the rates of a plain torch loop."""
    model = mlp()
    optimizer = sgd(model)
    per_step, per_epoch, per_eval = ([make(optimizer) for make in kind] for kind in (step, epoch, eval))
    rates, done = [], 0
    for number in range(1, EPOCHS + 1):
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            done += 1
            for one in per_step if done % every == 0 else ():
                one.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(VAL[0]), VAL[1]).item()
        for one in per_eval:
            one.step(loss)
        for one in per_epoch if number % every == 0 else ():
            one.step()
    return {name: p.detach() for name, p in model.named_parameters()}, rates


def in_run(spec, **options):
    task, rates = MeanTask(), Rates()
    callbacks = [rates, *options.pop("callbacks", [])]
    trainer = Trainer(
        task, batches(), VAL, optimizer=sgd(task.model), scheduler=spec, callbacks=callbacks, eval_batch_size=12,
        **{"epochs": EPOCHS, **QUIET, **options},
    )  # fmt: skip
    return trainer, rates


@pytest.mark.parametrize("case", CASES)
def test_the_run_is_a_plain_loop_with_the_same_schedulers(case):
    spec, plain = CASES[case]
    trainer, rates = in_run(spec, save_best=0)
    trainer.fit()
    expected, expected_rates = by_hand(**plain)
    assert rates.seen == expected_rates
    assert len(set(rates.seen)) > 1
    assert same(weights(trainer.task), expected)


@pytest.mark.parametrize("case", CASES)
def test_resumed_anywhere_it_ends_bitwise_the_same(case, tmp_path):
    """A save in mid-epoch and one at the end of an epoch, each continued by new objects."""
    whole, rates = in_run(CASES[case][0], save_best=0, run_dir=tmp_path / "whole")
    whole.fit()

    class Stop:
        def __init__(self, at):
            self.at = at

        def on_step_end(self, trainer, step, loss):
            if step == self.at:
                trainer.control.signal = 15  # saves, and ends the process rather than the run

    seen = []
    for at in (6, 12, None):
        part, some = in_run(
            CASES[case][0], run_dir=tmp_path / "parts", save_best=0, exit_on_signal=False, callbacks=[Stop(at)]
        )
        part.fit()
        seen += some.seen
    assert seen == rates.seen
    assert same(weights(part.task), weights(whole.task))
    assert part.active_optimizer.state_dict()["param_groups"] == whole.active_optimizer.state_dict()["param_groups"]


def test_an_instance_is_used_as_it_is():
    task = MeanTask()
    optimizer = sgd(task.model)
    given = schedulers.StepLR(optimizer, 2)
    trainer = Trainer(task, batches(), optimizer=optimizer, scheduler={"scheduler": given, "interval": "epoch"},
                      epochs=3, **QUIET)  # fmt: skip
    trainer.fit()
    assert trainer.active_scheduler.scheduler is given
    assert given.last_epoch == 3


def test_a_file_saved_before_the_epoch_ended_for_the_scheduler_has_its_step(tmp_path):
    """`ModelCheckpoint` saves after the evaluation: the epoch is counted, but its end has not been handled."""
    spec = {"name": "StepLR", "step_size": 1, "gamma": 0.5, "interval": "epoch"}
    whole, rates = in_run(spec, run_dir=tmp_path / "whole")
    whole.fit()
    first, _ = in_run(spec, epochs=2, run_dir=tmp_path / "first",
                      callbacks=[saver := ModelCheckpoint(save_dir=str(tmp_path / "files"))])  # fmt: skip
    first.fit()
    files = sorted((path for _, path in saver._best_scores), key=lambda path: path.stat().st_mtime)
    other, some = in_run(spec, run_dir=tmp_path / "other", resume=str(files[-1]))
    other.fit()
    assert some.seen == rates.seen[2 * STEPS :]
    assert same(weights(other.task), weights(whole.task))


def test_our_schedules_multiply_what_the_others_set():
    """Warm-up and cosine per step times the plateau, whose own rate does not depend on them."""

    class Losses:
        def __init__(self):
            self.seen = []

        def on_validation_end(self, trainer, metrics):
            self.seen.append(metrics["val/loss"])

    losses = Losses()
    trainer, rates = in_run(["cosine", plateau], warmup_ratio=0.25, callbacks=[losses], save_best=0)
    trainer.fit()
    reference = sgd(mlp())
    stepped = plateau(reference)
    factor = make_schedule("cosine", torch.optim.SGD(mlp().parameters(), lr=1.0), EPOCHS * STEPS, 0.25)
    expected = []
    for step in range(EPOCHS * STEPS):
        expected.append(reference.param_groups[0]["lr"] * factor.apply(step))
        if (step + 1) % STEPS == 0:
            stepped.step(losses.seen[step // STEPS])
    assert rates.seen == pytest.approx(expected, rel=1e-15)
    assert reference.param_groups[0]["lr"] < 0.3


def test_other_lengths_fit_our_schedule_and_keep_the_others():
    trainer, rates = in_run(["linear", {"name": "StepLR", "step_size": 4, "interval": "epoch"}], warmup_ratio=0.0)
    scheduler = trainer.active_scheduler.stepped[0].scheduler
    trainer.fit()
    trainer.epochs = 2 * EPOCHS
    trainer.fit()
    assert trainer.active_scheduler.stepped[0].scheduler is scheduler
    assert scheduler.last_epoch == 2 * EPOCHS
    assert rates.seen[EPOCHS * STEPS] == pytest.approx(0.03 * 0.5)  # half of the new length, a tenth by StepLR


def test_plateau_by_name_has_the_mode_of_the_monitored_metric():
    trainer, _ = in_run("ReduceLROnPlateau", monitor_metric="val/accuracy", monitor_mode="max")
    assert trainer.active_scheduler.scheduler.mode == "max"
    trainer, _ = in_run({"name": "plateau", "monitor": "val/accuracy", "mode": "max"})
    assert trainer.active_scheduler.scheduler.mode == "max"


def test_schedulers_from_a_task():
    class Own(MeanTask, TaskBase):
        def training_defaults(self, settings, chosen):
            return {"scheduler": {"name": "StepLR", "step_size": 1, "gamma": 0.5, "interval": "epoch"}}

    trainer = Trainer(Own(), TRAIN, epochs=3, lr=0.4, **QUIET)
    trainer.fit()
    assert trainer.active_optimizer.param_groups[0]["lr"] == 0.05


def test_learning_rates_are_logged():
    trainer, _ = in_run({"name": "StepLR", "step_size": 1, "gamma": 0.5, "interval": "epoch"})
    trainer.fit()
    logged = [record["train/lr"] for record in trainer.state.log_history if "train/lr" in record]
    assert logged == [0.3 * 0.5**epoch for epoch in range(EPOCHS) for _ in range(STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_the_check_passes_and_leaves_no_trace(case, capsys):
    trainer, rates = in_run(CASES[case][0], save_best=0)
    assert trainer.check().ok
    trainer.fit()
    assert rates.seen[-EPOCHS * STEPS :] == by_hand(**CASES[case][1])[1]


@pytest.mark.parametrize("make", [sequential, chained, plateau, lambda o: schedulers.OneCycleLR(o, 0.3, 10),
                                  lambda o: schedulers.CyclicLR(o, 0.1, 0.3, 2)])  # fmt: skip
def test_another_learning_rate_scales_the_whole_schedule(make):
    def rates(ratio):
        optimizer = sgd(mlp())
        schedule, seen = make_schedule(make, optimizer, 10, 0.0), []
        if ratio is not None:
            schedule.rescale(optimizer.param_groups[0].get("initial_lr", 0.3) * ratio)
        for step in range(9):
            seen.append(schedule.apply(step))
            optimizer.step()
            schedule.advance()
            schedule.observe({"val/loss": 1.0}, "val/loss")
        return seen

    assert rates(0.5) == pytest.approx([0.5 * rate for rate in rates(None)], rel=1e-12)


def test_lr_finder_works_with_several():
    trainer, rates = in_run([warmup, plateau], callbacks=[finder := LRFinder(num_steps=10)])
    trainer.fit()
    assert finder.suggested_lr is not None
    assert len(rates.seen) >= EPOCHS * STEPS


# -- what is refused ------------------------------------------------------------------------------------------------


def step_lr(optimizer):
    return schedulers.StepLR(optimizer, 3)


REFUSED = {
    "a typo in the name": ("ReduceLROnPlatau", {}, "Did you mean 'ReduceLROnPlateau'|Did you mean 'reducelronplateau'"),
    "a typo in the interval": ({"scheduler": step_lr, "interval": "epochs"}, {}, "Did you mean 'epoch'"),
    "a typo in a key": ({"scheduler": step_lr, "intervall": "epoch"}, {}, "Did you mean 'interval'"),
    "an option for a scheduler that is made": ({"scheduler": step_lr, "gamma": 0.1}, {}, "gamma"),
    "no interval": ({"scheduler": step_lr}, {}, "'interval': 'epoch'"),
    "a frequency of 0": ({"scheduler": step_lr, "interval": "epoch", "frequency": 0}, {}, "at least 1"),
    "a frequency of True": ({"scheduler": step_lr, "interval": "epoch", "frequency": True}, {}, "whole number"),
    "no scheduler": ({"interval": "epoch"}, {}, "'scheduler' or a 'name'"),
    "an empty list": ([], {}, "at least one"),
    "None in a list": ([None], {}, "a name, a factory"),
    "a number": (3, {}, "a name, a factory"),
    "a missing option": ("StepLR", {}, "step_size"),
    "an unknown option": ({"name": "StepLR", "size": 2, "interval": "epoch"}, {}, "step_size, gamma"),
    "an impossible option": ({"name": "plateau", "factor": 2.0}, {}, "Factor"),
    "a class that needs more": (schedulers.StepLR, {}, "lambda optimizer: StepLR"),
    "a class whose second argument is no total": (schedulers.ExponentialLR, {}, "gamma"),
    "a factory of three": (lambda o, warm, total: None, {}, "the optimizer and the number of steps"),
    "a factory of nothing": (lambda o: 3, {}, "LRScheduler"),
    "made of others, by name": ("SequentialLR", {}, "function of the optimizer"),
    "a plateau per step": ({"scheduler": plateau, "interval": "step"}, {}, "'eval'"),
    "evaluations without a metric": ({"scheduler": step_lr, "interval": "eval"}, {}, "'step' or 'epoch'"),
    "a monitor without a metric": (
        {"scheduler": step_lr, "interval": "epoch", "monitor": "val/loss"}, {}, "takes no metric",
    ),
    "a monitor of training": ({"scheduler": plateau, "monitor": "train/loss"}, {}, "validation metric"),
    "two of ours": (["cosine", "linear"], {}, "at most one"),
    "ours by epoch": ({"scheduler": "cosine", "interval": "epoch"}, {}, "function of the optimizer step"),
    "ours with options": ({"name": "cosine", "eta_min": 0.1}, {}, "eta_min"),
    "a plateau that is undone": ([lambda o: schedulers.LambdaLR(o, lambda s: 1.0), plateau], {}, "would undo"),
    "no validation data": (plateau, {"val_data": None}, "validation data for ReduceLROnPlateau"),
    "no evaluations": (plateau, {"eval_every": None}, "evaluations during training"),
    "another direction": (plateau, {"monitor_metric": "val/accuracy", "monitor_mode": "max"}, "mode='min'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_before_training(case):
    spec, options, message = REFUSED[case]
    with pytest.raises(BadArgument, match=message):
        Trainer(MeanTask(), TRAIN, **{"val_data": VAL, "scheduler": spec, "epochs": 1, **QUIET, **options})


def test_a_metric_that_never_appears_is_refused_before_the_first_step(tmp_path):
    trainer, rates = in_run({"scheduler": plateau, "monitor": "val/los"}, run_dir=tmp_path / "run")
    with pytest.raises(BadArgument, match=re.escape("['val/accuracy', 'val/loss']. Did you mean 'val/loss'?")):
        trainer.fit()
    assert rates.seen == []
    assert not (tmp_path / "run").exists()
    assert not trainer.check(raise_on_failure=False).ok
    other, _ = in_run(None, callbacks=[EarlyStopping("val/acuracy")])
    with pytest.raises(BadArgument, match="EarlyStopping looks for 'val/acuracy'"):
        other.fit()


def test_the_scheduler_of_another_optimizer_is_refused():
    other = sgd(mlp())
    for scheduler in (schedulers.StepLR(other, 2), {"scheduler": plateau(other)}, [sequential(other)]):
        with pytest.raises(BadArgument, match="over another optimizer"):
            Trainer(MeanTask(), TRAIN, VAL, scheduler=scheduler, epochs=1, **QUIET)
    with pytest.raises(BadArgument, match="over another optimizer"):
        Trainer(MeanTask(), TRAIN, VAL, scheduler=lambda optimizer: step_lr(other), epochs=1, **QUIET)


def test_the_same_scheduler_twice_is_refused():
    task = MeanTask()
    optimizer = sgd(task.model)
    one = plateau(optimizer)
    with pytest.raises(BadArgument, match="twice"):
        Trainer(task, TRAIN, VAL, optimizer=optimizer, scheduler=[one, one], epochs=1, **QUIET)


def test_the_state_of_other_schedulers_is_refused():
    kinds = {"several": [warmup, plateau], "others": [warmup, step_lr], "one": step_lr, "ours": "cosine"}
    made = {name: make_schedule(spec, sgd(mlp()), 10, 0.0) for name, spec in kinds.items()}
    for name, schedule in made.items():
        schedule.check_state(schedule.state_dict())
        for other in made.keys() - {name}:
            with pytest.raises(DataError, match="another kind of scheduler"):
                made[other].check_state(schedule.state_dict())


def test_a_checkpoint_of_another_scheduler_changes_nothing(tmp_path):
    first, _ = in_run([warmup, plateau], epochs=1, run_dir=tmp_path / "first")
    first.fit()
    first.save(tmp_path / "file.pt")
    other, _ = in_run("cosine", epochs=1)
    before = weights(other.task)
    with pytest.raises(DataError, match="Nothing was loaded"):
        other.load(tmp_path / "file.pt")
    assert same(weights(other.task), before)
    other.load(tmp_path / "file.pt", components=["model"])
    assert same(weights(other.task), weights(first.task))
