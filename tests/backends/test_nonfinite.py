"""A bad step never reaches the weights, whatever the policy, the optimizer and the precision."""

import pytest
import torch

from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.core.errors import BadArgument, NonFiniteError


class Poisoned(MeanTask):
    """The loss is bad in given steps: of the loss itself, or of the gradient alone."""

    def __init__(self, bad_steps, kind="nan", times=10**9):
        super().__init__(mlp(dtype=torch.float32))
        self.bad_steps, self.kind, self.times = set(bad_steps), kind, times
        self.step, self.calls = 0, 0

    def train_step(self, batch):
        loss = super().train_step(batch)
        self.calls += 1
        if self.step in self.bad_steps and self.times > 0:
            self.times -= 1
            if self.kind == "gradient":
                loss.register_hook(lambda g: g * float("inf"))
            else:
                loss = loss * float(self.kind)
        return loss

    def on_step_end(self, step, max_steps):
        self.step = step


@pytest.fixture(autouse=True, params=["host", "accelerator"])
def _both_ways_of_looking(request, monkeypatch):
    """On an accelerator the flag stays on the device; that path runs on the CPU just as well."""
    if request.param == "accelerator":
        monkeypatch.setattr("trainformer.backends.torch.nonfinite._HOST", ())


def make(task, **options):
    defaults = {"batch_size": 8, "max_steps": 8, "lr": 1e-2, "log": "none", "log_every": 4, "save_best": 0}
    return Trainer(task, classes(64, dtype=torch.float32), **{**defaults, **options})


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "nadam"])
def test_raise_names_the_step_and_leaves_the_weights_of_the_last_good_one(kind, optimizer):
    good = make(Poisoned([]), optimizer=optimizer, max_steps=2, scheduler=None)
    good.fit()
    bad = make(Poisoned([2], kind), optimizer=optimizer, scheduler=None)
    with pytest.raises(NonFiniteError, match=r"at step 3\..*after step 2"):
        bad.fit()
    assert same(weights(good.task), weights(bad.task))


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_skip_drops_the_step_and_counts_it(optimizer, caplog):
    # Without the bad step the run is one step shorter; with a constant rate the rest must be equal.
    task = Poisoned([3])
    trainer = make(task, nonfinite="skip", optimizer=optimizer, scheduler=None)
    trainer.fit()

    class WithoutBatch(MeanTask):
        seen = 0

        def train_step(self, batch):
            self.seen += 1
            if self.seen == 4:
                return sum(p.sum() for p in self.model.parameters()) * float("nan")
            return super().train_step(batch)

    other = WithoutBatch(mlp(dtype=torch.float32))
    make(other, nonfinite="skip", optimizer=optimizer, scheduler=None).fit()
    assert same(weights(task), weights(other))
    assert trainer.state.log_history[1]["train/skipped_steps"] == 1.0
    assert trainer.state.step == 8
    assert "1 steps with a non-finite" in caplog.text
    assert all(torch.isfinite(p).all() for p in task.model.parameters())


def test_a_skipped_step_leaves_optimizer_state_alone():
    states = []

    class Look:
        def on_step_end(self, trainer, step, loss):
            states.append({k: v.clone() for k, v in next(iter(trainer.active_optimizer.state.values())).items()})

    make(Poisoned([3]), nonfinite="skip", callbacks=[Look()]).fit()
    assert all(torch.equal(states[2][k], states[3][k]) for k in states[2])
    assert not torch.equal(states[3]["exp_avg"], states[4]["exp_avg"])


def test_retry_repeats_the_window_and_continues():
    clean, flaky = Poisoned([]), Poisoned([3], times=2)
    make(clean).fit()
    trainer = make(flaky, nonfinite="retry")
    trainer.fit()
    assert flaky.calls == clean.calls + 2
    assert same(weights(clean), weights(flaky))


def test_retry_gives_up_after_its_number_of_attempts():
    task = Poisoned([3])
    with pytest.raises(NonFiniteError, match="3 attempts"):
        make(task, nonfinite="retry:2").fit()
    good = make(Poisoned([]), max_steps=3, scheduler=None)
    good.fit()
    bad = Poisoned([3])
    with pytest.raises(NonFiniteError):
        make(bad, nonfinite="retry:2", scheduler=None).fit()
    assert same(weights(good.task), weights(bad))


def test_retry_draws_new_random_numbers():
    class Dice(MeanTask):
        def __init__(self, model):
            super().__init__(model)
            self.draws = []

        def train_step(self, batch):
            draw = torch.rand(()).item()
            self.draws.append(draw)
            return super().train_step(batch) * (float("nan") if len(self.draws) == 2 else 1.0)

    task = Dice(mlp(dtype=torch.float32))
    make(task, nonfinite="retry").fit()
    assert task.draws[1] != task.draws[2]


def test_fp16_overflow_is_skipped_by_the_scale_and_a_nan_loss_is_an_error():
    trainer = make(Poisoned([]), precision="fp16", max_steps=30)
    before = weights(trainer.task)
    trainer.fit()
    assert not same(before, weights(trainer.task))
    assert trainer.state.log_history[-1]["train/loss_scale"] > 0
    with pytest.raises(NonFiniteError, match="step 3"):
        make(Poisoned([2]), precision="fp16").fit()


def test_a_failed_run_can_resume():
    task = Poisoned([2], times=6)
    trainer = make(task)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    trainer.fit()
    assert trainer.state.step == 8


@pytest.mark.parametrize("policy", ["ignore", "retry:0", "skip:2", ""])
def test_unknown_policies_are_refused(policy):
    with pytest.raises(BadArgument, match="nonfinite"):
        make(Poisoned([]), nonfinite=policy)


@pytest.mark.parametrize("policy", ["skip", "retry:1"])
def test_running_statistics_ignore_skipped_steps(policy):
    """One NaN in BatchNorm's statistics would stay for good, and spoil every evaluation after it."""

    def task():
        torch.manual_seed(3)
        return MeanTask(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)).double()
        )

    x, y = classes(32)
    spoilt = x.clone()
    spoilt[8:16] = float("nan")

    class InOrder:
        def __init__(self, *parts):
            self.parts = parts

        def __iter__(self):
            return iter(self.parts)

        def __len__(self):
            return len(self.parts)

    good = [(x[i : i + 8], y[i : i + 8]) for i in (0, 16, 24)]
    options = {"max_steps": 3, "lr": 1e-2, "scheduler": None, "log": "none", "save_best": 0, "optimizer": "sgd"}
    clean = task()
    Trainer(clean, InOrder(*good), **options).fit()
    other = task()
    bad = (spoilt[8:16], y[8:16])
    run = Trainer(other, InOrder(good[0], bad, *good[1:]), **{**options, "max_steps": 4}, nonfinite=policy)
    if policy == "skip":
        run.fit()
        for name, value in clean.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name
    else:
        with pytest.raises(NonFiniteError):
            run.fit()
        assert all(torch.isfinite(v).all() for v in other.model.state_dict().values())
