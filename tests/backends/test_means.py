"""`Mean(value, weight)`: losses that are means already, and micro-batches that give none."""

from contextlib import contextmanager

import pytest
import torch

from toys import TokenTask, largest_difference, mlp, same, tokens, weights
from trainformer import Trainer
from trainformer.core.types import Mean


def train(task, data, **options):
    defaults = {"epochs": 2, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0, "gradient_clip": 0.5}
    return Trainer(task, data, **{**defaults, "device": "cpu", **options}).fit()


class MeanOfTokens(TokenTask):
    """The mean over supervised tokens, with their number: a tensor on the device, or a number."""

    as_number = False

    def train_step(self, batch):
        total, weight, _ = super().train_step(batch)
        return Mean(total / weight, int(weight) if self.as_number else weight, {"tokens": (weight, 1)})


@pytest.mark.parametrize("as_number", [True, False])
@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (2, 4), (1, 8)])
def test_a_mean_with_a_weight_is_a_sum_in_other_words(as_number, size, accumulation):
    task, data = MeanOfTokens(), tokens(61)
    task.as_number = as_number
    train(task, data, batch_size=size, accumulation_steps=accumulation)
    expected = TokenTask()
    train(expected, data, batch_size=8)
    assert largest_difference(weights(task), weights(expected)) < 1e-10


class Sometimes(TokenTask):
    """Gives no loss for some batches."""

    def __init__(self, skipped):
        super().__init__(mlp())
        self.skipped, self.seen = skipped, 0

    def train_step(self, batch):
        self.seen += 1
        if self.seen in self.skipped:
            return Mean(None, 0)
        total, weight, _ = super().train_step(batch)
        return Mean(total / weight, weight)


def test_a_micro_batch_without_a_loss_counts_nothing():
    """Half of each window: what is left is trained on as if it were alone, in the order of that epoch."""
    kept = []

    class Watching(Sometimes):
        def train_step(self, batch):
            loss = super().train_step(batch)
            if loss.value is not None:
                kept.append([part.clone() for part in batch])
            return loss

    task = Watching(skipped=range(2, 100, 2))
    trainer = train(task, tokens(32), batch_size=4, accumulation_steps=2, epochs=1, scheduler=None)
    assert trainer.state.step == 4
    expected = TokenTask()
    data = [torch.cat(parts) for parts in zip(*kept, strict=True)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    train(expected, loader, epochs=1, scheduler=None)
    assert largest_difference(weights(task), weights(expected)) < 1e-12


def test_a_step_without_any_loss_changes_nothing_but_is_counted():
    task = Sometimes(skipped=range(1, 1000))
    before = weights(task)
    trainer = train(task, tokens(32), batch_size=4, epochs=1, log_every=1)
    assert trainer.state.step == 8
    assert same(before, weights(task))
    assert not any("train/loss" in record for record in trainer.state.log_history)


def test_a_window_that_ends_without_a_loss_is_not_idle():
    task = Sometimes(skipped={2})
    before = weights(task)
    train(task, tokens(8), batch_size=4, accumulation_steps=2, epochs=1)
    assert not same(before, weights(task))


def test_every_micro_batch_but_the_last_runs_under_no_sync():
    """What processes use to exchange gradients once per step."""
    inside, calls = [], []

    class Apart(TokenTask):
        @contextmanager
        def no_sync(self):
            inside.append(True)
            yield
            inside.pop()

        def train_step(self, batch):
            calls.append(bool(inside))
            return super().train_step(batch)

    plain = TokenTask()
    train(plain, tokens(20), batch_size=4, accumulation_steps=3, epochs=1)
    task = Apart()
    train(task, tokens(20), batch_size=4, accumulation_steps=3, epochs=1)
    assert calls == [True, True, False, True, False]
    assert same(weights(plain), weights(task))
    calls.clear()
    train(Apart(), tokens(20), batch_size=4, epochs=1)
    assert calls == [False] * 5


def test_a_task_that_returns_nothing_gets_an_error():
    class Forgets(TokenTask):
        def train_step(self, batch):
            super().train_step(batch)

    with pytest.raises(ValueError, match="train_step to return"):
        train(Forgets(), tokens(8), batch_size=4)
