"""The step against hand-written loops: slicing does not matter, and one micro-batch is bit for bit the plain loop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from toys import MeanTask, TokenTask, classes, largest_difference, mlp, same, tokens, weights
from trainformer import Loss, Trainer
from trainformer.core.errors import BadArgument
from trainformer.run import run_of


def train(task, data, *, batch_size, accumulation=1, **options):
    defaults = {"epochs": 2, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0, "scheduler": "cosine"}
    Trainer(task, data, batch_size=batch_size, accumulation_steps=accumulation, **{**defaults, **options}).fit()
    return weights(task)


@pytest.mark.parametrize(("task", "data"), [(MeanTask, classes), (TokenTask, tokens)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_eight_micro_batches_of_one_equal_one_batch_of_eight(task, data, clip):
    whole = train(task(), data(), batch_size=8, gradient_clip=clip)
    for size in (1, 2, 4):
        sliced = train(task(), data(), batch_size=size, accumulation=8 // size, gradient_clip=clip)
        assert largest_difference(whole, sliced) < 1e-10


@pytest.mark.parametrize(("task", "data"), [(MeanTask, classes), (TokenTask, tokens)])
def test_a_partial_last_window_has_its_true_weight(task, data):
    # 61 samples: seven windows of 8, then one of 5, which is 2 + 2 + 1 or 4 + 1 when sliced.
    whole = train(task(), data(61), batch_size=8)
    for size in (2, 4):
        assert largest_difference(whole, train(task(), data(61), batch_size=size, accumulation=8 // size)) < 1e-10


@settings(max_examples=12, deadline=None)
@given(n=st.integers(3, 40), micro=st.integers(1, 9), accumulation=st.integers(1, 5))
def test_accumulation_is_the_same_as_a_larger_batch_for_any_sizes(n, micro, accumulation):
    whole = train(TokenTask(), tokens(n), batch_size=micro * accumulation, epochs=1)
    sliced = train(TokenTask(), tokens(n), batch_size=micro, accumulation=accumulation, epochs=1)
    assert largest_difference(whole, sliced) < 1e-10


def test_token_weighting_is_not_the_mean_of_means():
    """The naive way must really differ, or the tests above could not fail."""

    class Naive(TokenTask):
        def train_step(self, batch):
            total, weight, _ = super().train_step(batch)
            return total / weight

    right = train(TokenTask(), tokens(), batch_size=2, accumulation=4)
    assert largest_difference(right, train(Naive(), tokens(), batch_size=2, accumulation=4)) > 1e-4


def one_cycle(optimizer, total):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total, pct_start=0.1, cycle_momentum=False)


def reference_loop(task, data, batch_size, steps, total, lr=1e-2, clip=1.0, fused=True):
    """AdamW, clipping and one-cycle schedule, written by hand over the same order of samples."""
    from trainformer.data.order import epoch_order

    x, y = data
    decay = [p for p in task.model.parameters() if p.ndim > 1]
    rest = [p for p in task.model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, fused=fused)
    schedule = one_cycle(optimizer, total)
    done, epoch = 0, 0
    while done < steps:
        order = torch.from_numpy(epoch_order(len(x), 42, epoch, shuffle=True))
        for index in order.split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(task.model(x[index]), y[index]).backward()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), clip)
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps:
                break
        epoch += 1
    return weights(task)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bitwise_equal_to_a_hand_written_loop(dtype):
    data = classes(60, dtype=dtype)
    ours = train(MeanTask(mlp(dtype=dtype)), data, batch_size=8, max_steps=20, scheduler=one_cycle)
    theirs = reference_loop(MeanTask(mlp(dtype=dtype)), data, 8, 20, 20)
    assert same(ours, theirs)


def test_a_loss_with_zero_weight_gives_no_nan():
    x, y = tokens(8)
    y[:4] = -100
    got = train(TokenTask(), (x, y), batch_size=2, accumulation=2, epochs=3)
    assert all(torch.isfinite(w).all() for w in got.values())
    whole = train(TokenTask(), (x, y), batch_size=4, epochs=3)
    assert largest_difference(got, whole) < 1e-10


def test_metrics_of_a_loss_are_logged_with_their_weights():
    class Extra(TokenTask):
        def train_step(self, batch):
            total, weight, _ = super().train_step(batch)
            return Loss(total, weight, {"pair": (total, weight), "mean": torch.tensor(2.0)})

    def losses(size, accumulation):
        trainer = Trainer(Extra(), tokens(), batch_size=size, accumulation_steps=accumulation, epochs=1, log="none",
                          log_every=4, save_best=0)  # fmt: skip
        trainer.fit()
        return trainer.state.log_history

    for coarse, fine in zip(losses(8, 1), losses(2, 4), strict=True):
        assert coarse["train/pair"] == pytest.approx(coarse["train/loss"], rel=1e-12)
        assert fine["train/loss"] == pytest.approx(coarse["train/loss"], rel=1e-10)
        assert fine["train/grad_norm"] == pytest.approx(coarse["train/grad_norm"], rel=1e-8)
        assert fine["train/mean"] == 2.0


def test_the_reported_norm_is_that_before_clipping():
    seen = []

    class Look:
        def on_before_optimizer_step(self, trainer, step):
            clipped = torch.stack([p.grad.norm() for p in trainer.task.model.parameters()]).norm()
            seen.append((float(trainer.grad_norm), float(clipped)))

    train(MeanTask(), classes(), batch_size=8, epochs=1, gradient_clip=0.01, callbacks=[Look()])
    assert all(norm > 0.01 and clipped == pytest.approx(0.01, rel=1e-3) for norm, clipped in seen)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss.detach(), "does not require gradients"),
        (lambda loss: loss.expand(3), r"shape \(3,\)"),
        (lambda loss: {"loss": loss}, "scalar tensor or Loss"),
        (lambda loss: float(loss), "scalar tensor or Loss"),
    ],
)
def test_a_wrong_loss_is_explained(returned, message):
    class Wrong(MeanTask):
        def train_step(self, batch):
            return returned(super().train_step(batch))

    with pytest.raises(BadArgument, match=message):
        train(Wrong(), classes(8), batch_size=4)


def test_parameters_of_the_loss_are_trained_and_named():
    class WithHead(MeanTask):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, 3).double()

        def parameters(self):
            yield from self.model.parameters()
            yield from self.head.parameters()

        def train_step(self, batch):
            x, y = batch
            return F.cross_entropy(self.head(self.model(x)), y)

    task = WithHead()
    before = task.head.weight.detach().clone()
    trainer = Trainer(task, classes(16), epochs=1, lr=1e-2, log="none", save_best=0).fit()
    assert not torch.equal(before, task.head.weight)
    assert "head.weight" in run_of(trainer).backend.names.values()


def test_no_device_sync_between_log_points(monkeypatch):
    """A read is `_local_scalar_dense`; on CUDA it is a synchronisation. Here the CPU is treated as an accelerator."""
    monkeypatch.setattr("trainformer.backends.torch.nonfinite._HOST", ())
    from torch.utils._python_dispatch import TorchDispatchMode

    reads = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "local_scalar_dense" in str(function):
                reads.append(step)
            return function(*args, **(kwargs or {}))

    step = 0

    class Count:
        def on_step_begin(self, trainer, done):
            nonlocal step
            step = done + 1

    x, y = classes(64, dtype=torch.float32)
    trainer = Trainer(MeanTask(mlp(dtype=torch.float32)), (x, y), batch_size=4, epochs=2, log="none", log_every=10,
                      save_best=0, callbacks=[Count()], lr=1e-3)  # fmt: skip
    with Watch():
        trainer.fit()
    assert set(reads) <= {1, 10, 20, 30, 32}, sorted(set(reads))
    assert 10 in reads


def test_sparse_gradients_are_refused_with_advice():
    class Words(MeanTask):
        def __init__(self):
            self.model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 3, sparse=True))

    data = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(BadArgument, match="sparse=False"):
        train(Words(), data, batch_size=4, optimizer="sgd")


def test_an_overflow_of_fp16_is_no_norm_to_log():
    """The scaler begins high on purpose and lowers itself; the record of these steps must not be NaN."""

    class Steep(MeanTask):
        def train_step(self, batch):
            return super().train_step(batch) * 50

    trainer = Trainer(
        Steep(mlp(dtype=torch.float32)), classes(64, dtype=torch.float32), precision="fp16", device="cpu", max_steps=6,
        batch_size=8, log_every=3, log="none", save_best=0,
    ).fit()  # fmt: skip
    assert trainer.active_optimizer.state  # some steps were made
    records = [r for r in trainer.state.log_history if "train/loss" in r]
    assert records[-1]["train/loss_scale"] < 65536  # and some were not
    norms = [r["train/grad_norm"] for r in records if "train/grad_norm" in r]
    assert norms
    assert all(math.isfinite(norm) for norm in norms)
