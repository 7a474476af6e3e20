"""The pre-flight: it finds what would go wrong, and leaves everything as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from toys import MeanTask, TokenTask, classes, mlp, same, tokens, weights
from trainformer import Loss, TaskBase, Trainer
from trainformer.callbacks import EarlyStopping
from trainformer.core.errors import CheckFailed


def make(task=None, data=None, **options):
    defaults = {"batch_size": 8, "epochs": 2, "lr": 1e-2, "log": "none", "run_dir": "run"}
    return Trainer(task or MeanTask(), data or classes(), **{**defaults, **options})


def finding(report, question):
    return next(f for f in report.findings if f.question == question)


class Noisy(MeanTask):
    def __init__(self):
        super().__init__(nn.Sequential(mlp(4, 8), nn.BatchNorm1d(8, dtype=torch.float64), nn.Dropout(0.3), mlp(8, 3)))


def test_a_good_run_passes_and_the_report_can_be_read(capsys):
    report = make(val_split=0.25).check()
    printed = capsys.readouterr().out  # in a pipe or a file: a finding is a line, however long, and there is no colour
    assert all(any(f.message in line for line in printed.splitlines()) for f in report.findings)
    assert max(len(f.message) for f in report.findings) > 70
    assert "\x1b" not in printed
    assert report.ok
    assert not report.warnings
    questions = {"arguments", "data", "forward and backward", "gradients", "save and load", "cost", "evaluation"}
    assert {f.question for f in report.findings} == questions
    assert report.seconds_per_step > 0
    assert report.estimated_seconds == pytest.approx(report.seconds_per_step * 12)
    text = str(report)
    assert "val/accuracy" in text
    assert "bitwise the same weights" in text


def test_it_leaves_no_trace():
    def run(checked):
        task = Noisy()
        trainer = make(task, val_split=0.25, run_dir=f"run{checked}")
        trainer.max_steps = 5
        trainer.fit()
        before = task.model.state_dict(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        before = {k: v.clone() for k, v in before[0].items()}, *before[1:]
        position = trainer.state.state_dict()
        moments = {k: v.clone() for s in trainer.active_optimizer.state.values() for k, v in s.items()}
        if checked:
            trainer.check()
            assert same(before[0], task.model.state_dict())
            assert random.getstate() == before[1]
            assert np.random.get_state()[1].tolist() == before[2]
            assert torch.equal(torch.get_rng_state(), before[3])
            assert trainer.state.state_dict() == position
            after = {k: v for s in trainer.active_optimizer.state.values() for k, v in s.items()}
            assert same(moments, after)
            assert all(p.grad is None for p in task.model.parameters())
        trainer.max_steps = 12
        trainer.fit()
        return weights(task)

    assert same(run(True), run(False))


def test_a_check_before_the_first_step_changes_nothing_either():
    plain, checked = Noisy(), Noisy()
    make(plain, run_dir="a").fit()
    trainer = make(checked, run_dir="b")
    trainer.check()
    assert not trainer.active_optimizer.state
    trainer.fit()
    assert same(plain.model.state_dict(), checked.model.state_dict())


def test_parameters_without_gradient_are_named():
    class Forgotten(MeanTask):
        def __init__(self):
            super().__init__()
            self.model.add_module("extra", nn.Identity())
            self.model.extra.lost = nn.Parameter(torch.zeros(3))

    with pytest.raises(CheckFailed, match=r"extra\.lost.*requires_grad=False"):
        make(Forgotten()).check()
    task = Forgotten()
    task.model.extra.lost.requires_grad_(False)
    assert make(task).check().ok


def test_a_loss_that_is_not_finite():
    class Bad(MeanTask):
        def train_step(self, batch):
            return super().train_step(batch) / 0

    report = make(Bad()).check(raise_on_failure=False)
    assert finding(report, "forward and backward").status == "failed"
    assert "inf" in finding(report, "forward and backward").message


def test_problems_the_task_finds_in_a_batch():
    class Picky(MeanTask):
        def check_batch(self, batch):
            return [f"label {batch[1].max().item()} is out of range."]

    with pytest.raises(CheckFailed, match="label 2 is out of range"):
        make(Picky()).check()


def test_labels_that_are_all_masked():
    x, y = tokens(16)
    y[:] = -100
    with pytest.raises(CheckFailed, match="nothing in the first batch is supervised"):
        make(TokenTask(), (x, y)).check()


def test_state_outside_the_state_dict_is_found():
    class Forgetful(MeanTask):
        offset = 0.0

        def train_step(self, batch):
            self.offset += 0.1
            x, y = batch
            return super().train_step((x + self.offset, y))

    with pytest.raises(CheckFailed, match=r"save and load.*0\.weight"):
        make(Forgetful()).check()

    class Remembers(Forgetful, TaskBase):
        def state_dict(self):
            return {"offset": self.offset}

        def load_state_dict(self, state):
            self.offset = state["offset"]

    assert make(Remembers()).check().ok


def test_state_that_cannot_be_saved_safely_is_found():
    class Unsafe(TaskBase, MeanTask):
        def state_dict(self):
            return {"f": lambda: 1}

    with pytest.raises(CheckFailed, match="cannot be saved"):
        make(Unsafe()).check()


def test_a_monitored_metric_that_does_not_exist():
    with pytest.raises(CheckFailed, match=r"EarlyStopping looks for 'val/acc'.*Did you mean 'val/accuracy'"):
        make(val_split=0.25, callbacks=[EarlyStopping(monitor="val/acc")]).check()
    with pytest.raises(CheckFailed, match="monitor_metric"):
        make(val_split=0.25, monitor_metric="val/f1").check()


def test_contradicting_arguments_are_warnings():
    report = make(
        data=classes(6), accumulation_steps=5, callbacks=[EarlyStopping()], save_every=10_000, precision="fp16",
        task=MeanTask(mlp()),
    ).check(raise_on_failure=False)  # fmt: skip
    text = finding(report, "arguments").message
    for part in ("accumulation_steps=5", "batch_size=8", "never act", "save_every=10000", "fp16"):
        assert part in text
    assert finding(report, "arguments").status == "warning"


def test_errors_of_the_task_are_reported_not_raised_midway():
    class Broken(MeanTask):
        def eval_step(self, batch):
            raise KeyError("labels")

        def train_step(self, batch):
            raise RuntimeError("shapes do not match")

    report = make(Broken(), val_split=0.25).check(raise_on_failure=False)
    assert len(report.failures) == 2
    assert "shapes do not match" in finding(report, "forward and backward").message
    assert "labels" in finding(report, "evaluation").message


def test_memory_estimate_counts_parameters_gradients_moments_and_activations():
    task = MeanTask(mlp(256, 256, 256, dtype=torch.float32))
    x, y = torch.randn(64, 256), torch.randint(0, 256, (64,))
    report = make(task, (x, y), batch_size=64).check()
    parameters = 4 * sum(p.numel() for p in task.model.parameters())
    assert 4 * parameters < report.peak_bytes < 4 * parameters + 3_000_000


def test_token_weighted_tasks_pass():
    class Tokens(MeanTask):
        def train_step(self, batch):
            x, y = batch
            total = nn.functional.cross_entropy(
                self.model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
            )
            return Loss(total, (y != -100).sum())

    assert make(Tokens(), tokens()).check().ok
