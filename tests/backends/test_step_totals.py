"""Totals over a whole step, which a task gets before the step: the same however the step is divided."""

import pytest
import torch
from torch import nn

from trainformer import Loss, TaskBase, Trainer


class Centred(TaskBase):
    """A loss that depends on the mean output over the step."""

    wants_window = True

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1).double()
        self.totals = None
        self.seen = []
        self.fails = 0

    def step_totals(self, batch):
        assert not torch.is_grad_enabled()
        outputs = self.model(batch[0])
        return torch.stack([outputs.sum(), torch.tensor(float(len(outputs)), dtype=torch.float64)])

    def use_step_totals(self, totals):
        self.totals = totals
        self.seen.append(None if totals is None else totals.tolist())

    def train_step(self, batch):
        total, count = self.totals.unbind()
        outputs = self.model(batch[0])[:, 0]
        losses = (outputs - total / count - 1).square()
        if self.fails:
            self.fails -= 1
            losses = losses * float("nan")
        return Loss(losses.sum(), len(losses))

    def eval_step(self, batch):
        return {"loss": self.model(batch[0]).mean()}


def run(folder, size, accumulation, fails=0, **options):
    data = (torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)
    task = Centred()
    task.fails = fails
    settings = {"optimizer": "sgd", "lr": 0.1, "epochs": 2, "precision": "no", "num_workers": 0, "log": "none"}
    settings |= {"batch_size": size, "accumulation_steps": accumulation, "run_dir": folder, "resume": None, **options}
    trainer = Trainer(task, data, **settings)
    return trainer, task


def test_the_division_of_a_step_does_not_matter(tmp_path):
    ends = []
    for size, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer, task = run(tmp_path / str(size), size, accumulation)
        trainer.fit()
        assert [count for _, count in task.seen] == [8, 8, 4] * 2
        ends.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=0, atol=1e-12)


def test_a_repeated_step_uses_the_same_totals(tmp_path):
    ends = []
    for fails in (0, 1):
        trainer, task = run(tmp_path / str(fails), 4, 2, fails=fails, nonfinite="retry")
        trainer.fit()
        assert len(task.seen) == 6
        ends.append(task.model.weight.detach())
    assert torch.equal(*ends)


def test_trial_steps_leave_no_totals(tmp_path):
    trainer, task = run(tmp_path, 4, 2)
    assert trainer.check().ok
    assert task.totals is None
    assert task.seen[0][1] == 4
    with pytest.raises(AttributeError):
        task.train_step((torch.zeros(1, 2),))
