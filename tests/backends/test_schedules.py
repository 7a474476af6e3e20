"""Schedules against torch's and against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.backends.torch.schedules import SCHEDULES, Schedule, make_schedule
from trainformer.core.errors import BadArgument


def optimizer(lr=0.5, groups=1):
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr * (i + 1)} for i in range(groups)]
    )


@pytest.mark.parametrize(("total", "pct"), [(100, 0.1), (37, 0.3), (10, 0.25), (1000, 0.05), (64, 0.5)])
def test_onecycle_is_that_of_torch(total, pct):
    ours, theirs = optimizer(), optimizer()
    schedule = make_schedule("onecycle", ours, total, pct)
    reference = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.5, total_steps=total, pct_start=pct, cycle_momentum=False)
    for step in range(total):
        assert schedule.apply(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9, abs=1e-15)
        theirs.step()
        if step < total - 1:
            reference.step()


def test_cosine_after_warmup_is_that_of_torch():
    total, warmup = 50, 10
    schedule = make_schedule("cosine", optimizer(), total, warmup / total)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs := optimizer(), T_max=total - warmup)
    for step in range(warmup, total):
        assert schedule.apply(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        theirs.step()
        reference.step()


@given(name=st.sampled_from(sorted(SCHEDULES)), total=st.integers(1, 300), ratio=st.floats(0, 1))
def test_every_schedule_stays_between_zero_and_one_and_peaks(name, total, ratio):
    schedule = make_schedule(name, optimizer(1.0), total, ratio)
    factors = [schedule.apply(step) for step in range(total)]
    assert all(-1e-12 <= f <= 1 + 1e-12 for f in factors)
    assert all(math.isfinite(f) for f in factors)
    if int(ratio * total) >= 1 and name != "onecycle":
        assert max(factors) == pytest.approx(1.0)
        assert factors[0] > 0  # the first step is not wasted


def test_groups_keep_their_proportion_whatever_was_loaded_in_between():
    o = optimizer(0.1, groups=2)
    schedule = make_schedule("linear", o, 10, 0.0)
    saved = o.state_dict()
    for step in range(10):
        schedule.apply(step)
        assert o.param_groups[1]["lr"] == pytest.approx(2 * o.param_groups[0]["lr"])
        o.load_state_dict(saved)
    assert schedule.apply(5) == pytest.approx(0.05)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4), (3, 3)])
def test_the_schedule_runs_out_exactly_at_the_end_also_when_accumulating(batch, accumulation):
    rates = []

    class Look:
        def on_step_end(self, trainer, step, loss):
            rates.append(trainer.active_optimizer.param_groups[0]["lr"])

    trainer = Trainer(MeanTask(), classes(61), batch_size=batch, accumulation_steps=accumulation, epochs=3, lr=0.1,
                      log="none", save_best=0, callbacks=[Look()])  # fmt: skip
    trainer.fit()
    batches = math.ceil(61 / batch)
    assert len(rates) == trainer.state.step == trainer.total_steps == 3 * math.ceil(batches / accumulation)
    assert max(rates) <= 0.1
    assert max(rates) > 0.09
    assert rates[-1] == pytest.approx(0.1 / 25e4, rel=1e-3)


def test_a_scheduler_of_torch_as_factory_or_instance():
    def rates(**options):
        seen = []

        class Look:
            def on_before_optimizer_step(self, trainer, step):
                pass

            def on_after_optimizer_step(self, trainer, step):
                seen.append(trainer.active_optimizer.param_groups[0]["lr"])

        task = options.pop("task", None) or MeanTask()
        Trainer(
            task, classes(32), batch_size=8, epochs=2, lr=0.1, log="none", save_best=0, callbacks=[Look()], **options
        ).fit()
        return seen

    def factory(o):
        return torch.optim.lr_scheduler.ExponentialLR(o, 0.5)

    assert rates(scheduler=factory)[:3] == pytest.approx([0.05, 0.025, 0.0125])
    with_total = rates(scheduler=lambda o, total: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total))
    assert with_total[-1] == pytest.approx(0.0, abs=1e-12)
    task = MeanTask()
    o = torch.optim.SGD(task.model.parameters(), lr=0.1)
    assert rates(task=task, optimizer=o, scheduler=factory(o))[:2] == pytest.approx([0.05, 0.025])


def test_found_learning_rates_survive_a_restart_unless_the_settings_change():
    schedule = Schedule(optimizer(0.1), lambda step: 1.0)
    schedule.rescale(0.03)
    saved = schedule.state_dict()
    same, other = Schedule(optimizer(0.1), lambda step: 1.0), Schedule(optimizer(0.2), lambda step: 1.0)
    same.load_state_dict(saved)
    other.load_state_dict(saved)
    assert same.apply(0) == pytest.approx(0.03)
    assert other.apply(0) == pytest.approx(0.2)


def test_bad_schedules_are_explained():
    with pytest.raises(BadArgument, match="Did you mean 'cosine'"):
        make_schedule("cosin", optimizer(), 10, 0.1)
    with pytest.raises(BadArgument, match="max_steps"):
        make_schedule("cosine", optimizer(), None, 0.1)
    with pytest.raises(BadArgument, match="LRScheduler"):
        make_schedule(lambda o: 3, optimizer(), 10, 0.1)
    with pytest.raises(BadArgument, match="name, a factory"):
        make_schedule(3, optimizer(), 10, 0.1)
