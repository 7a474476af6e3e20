"""Out of memory: the same data in smaller pieces, the same weighted gradient."""

import logging

import pytest
import torch

from toys import MeanTask, TokenTask, classes, largest_difference, mlp, same, tokens, weights
from trainformer import Trainer
from trainformer.backends.torch.accumulation import MemorySplitter
from trainformer.core.types import DeviceBatch
from trainformer.data.sharding import slice_batch
from trainformer.run import run_of


def small_memory(task_class, limit):
    """A task on a device that holds `limit` samples; more raise what CUDA raises."""

    class Tight(task_class):
        def train_step(self, batch):
            self.sizes.append(len(batch[0]))
            if len(batch[0]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().train_step(batch)

    Tight.sizes = []
    return Tight


def fit(task, data, monkeypatch, **options):
    defaults = {"batch_size": 8, "epochs": 2, "lr": 1e-2, "log": "none", "save_best": 0, "run_dir": None}
    trainer = Trainer(task, data, **{**defaults, **options})
    # On the CPU windows are not kept, since memory never runs out there this way; here it does.
    monkeypatch.setattr(type(run_of(trainer).backend), "may_repeat", True)
    return trainer.fit()


@pytest.mark.parametrize(("task", "data"), [(MeanTask, classes), (TokenTask, tokens)])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_split_steps_equal_unsplit_ones(task, data, accumulation, limit, monkeypatch, caplog):
    whole, tight = task(), small_memory(task, limit)()
    fit(whole, data(61), monkeypatch, accumulation_steps=accumulation)
    with caplog.at_level(logging.WARNING):
        trainer = fit(tight, data(61), monkeypatch, accumulation_steps=accumulation)
    assert largest_difference(weights(whole), weights(tight)) < 1e-10
    assert "out of memory with 8 samples" in caplog.text
    # The smaller size is kept: after the first window nothing is tried in vain again.
    late = tight.sizes[len(tight.sizes) // 2 :]
    assert max(late) <= limit
    assert trainer.state.samples == 122


def test_the_warning_names_what_splitting_changes(monkeypatch, caplog):
    norm, dropout = torch.nn.BatchNorm1d(8, dtype=torch.float64), torch.nn.Dropout(0.1)
    task = small_memory(MeanTask, 4)(torch.nn.Sequential(mlp(4, 8), norm, dropout, mlp(8, 3)))
    fit(task, classes(16), monkeypatch, epochs=1)
    assert "BatchNorm statistics" in caplog.text
    assert "dropout masks" in caplog.text


def test_a_single_sample_that_does_not_fit_is_an_error(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        fit(small_memory(MeanTask, 0)(), classes(16), monkeypatch)


def test_raise_does_not_split(monkeypatch):
    task = small_memory(MeanTask, 4)()
    before = weights(task)
    with pytest.raises(torch.OutOfMemoryError):
        fit(task, classes(16), monkeypatch, oom="raise")
    assert same(before, weights(task))
    assert all(p.grad is None for p in task.model.parameters())


def test_pieces_are_remembered_in_a_checkpoint(monkeypatch):
    trainer = fit(small_memory(MeanTask, 4)(), classes(16), monkeypatch, max_steps=1)
    trainer.save("x.pt")
    other = Trainer(MeanTask(), classes(16), batch_size=8, log="none").load("x.pt")
    assert run_of(other).backend.splitter.pieces == 2


def test_splitting_keeps_every_sample_in_order():
    splitter = MemorySplitter("split")
    splitter.pieces = 4
    batch = DeviceBatch(
        {"x": torch.arange(10), "names": list("abcdefghij"), "flag": 3, "pair": (torch.arange(10), "text")},
        10,
        20,
        bad=1,
    )
    parts = splitter.split(batch)
    assert torch.equal(torch.cat([p.data["x"] for p in parts]), torch.arange(10))
    assert "".join("".join(p.data["names"]) for p in parts) == "abcdefghij"
    assert [p.size for p in parts] == [2, 3, 2, 3]
    assert sum(p.tokens for p in parts) == 20
    assert sum(p.bad for p in parts) == 1
    assert all(p.data["flag"] == 3 and p.data["pair"][1] == "text" for p in parts)
    assert slice_batch(torch.zeros(3), 0, 1, 10).shape == (3,)
