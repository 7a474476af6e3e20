"""What only a GPU shows of optimizers: pages, bitsandbytes' own kernels, steps skipped on the device, memory."""

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("bitsandbytes")

from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.backends.torch import master_weights
from trainformer.backends.torch.optimizer_names import BITSANDBYTES_OPTIMIZERS
from trainformer.core.errors import NonFiniteError

pytestmark = pytest.mark.gpu

WIDE = 512  # 512 x 512 weights are above the 100,000 from which bitsandbytes pages


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3)).to(dtype)


def make(task, **options):
    dtype = next(task.model.parameters()).dtype
    defaults = {"batch_size": 8, "max_steps": 12, "lr": 1e-3, "log": "none", "save_best": 0, "precision": "no"}
    return Trainer(task, classes(96, 8, dtype=dtype), **{**defaults, **options})


def moments(trainer):
    return trainer.active_optimizer.state[trainer.task.model[2].weight]


class Bad(MeanTask):
    """The loss is NaN in the sixth step."""

    calls = 0

    def train_step(self, batch):
        self.calls += 1
        return super().train_step(batch) * (float("nan") if self.calls == 6 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*BITSANDBYTES_OPTIMIZERS, "adamw", "adafactor", "lion"])
def test_every_name_trains_and_resumes_bit_for_bit(name, dtype, tmp_path):
    whole, again = MeanTask(net(dtype)), MeanTask(net(dtype))
    trainer = make(whole, optimizer=name, run_dir="whole")
    start = weights(whole)
    trainer.fit()
    assert not same(start, weights(whole))

    class SaveAt:
        def on_step_end(self, trainer, step, loss):
            if step == 5:
                trainer.save(tmp_path / "five.pt")

    make(MeanTask(net(dtype)), optimizer=name, run_dir="cut", callbacks=[SaveAt()]).fit()
    trainer = make(again, optimizer=name, run_dir="again").load(tmp_path / "five.pt")
    trainer.fit()
    assert same(weights(whole), weights(again))


@pytest.mark.parametrize("name", [name for name in BITSANDBYTES_OPTIMIZERS if name.startswith("paged")])
def test_paged_state_is_paged_also_after_loading_and_pages_are_used_again(name, tmp_path):
    from bitsandbytes.functional import GlobalPageManager

    pages = GlobalPageManager.get_instance().paged_tensors
    before = len(pages)
    trainer = make(MeanTask(net()), optimizer=name)
    trainer.check()
    trainer.fit()
    kept = [value for key, value in moments(trainer).items() if key in ("state1", "state2")]
    assert all(getattr(value, "is_paged", False) for value in kept)
    trainer.save(tmp_path / "run.pt")
    trainer.load(tmp_path / "run.pt")
    loaded = [value for key, value in moments(trainer).items() if key in ("state1", "state2")]
    assert all(value.is_paged and value.count_nonzero() for value in loaded)
    assert {value.data_ptr() for value in kept} == {value.data_ptr() for value in loaded}
    assert len(pages) - before == len(kept)
    assert moments(trainer).get("absmax1", trainer.task.model[2].weight).is_cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "paged_adamw_8bit"])
def test_a_bad_step_reaches_neither_weights_nor_copies(name, dtype):
    good, bad = MeanTask(net(dtype)), Bad(net(dtype))
    make(good, optimizer=name, max_steps=5, scheduler=None, run_dir="good").fit()
    trainer = make(bad, optimizer=name, scheduler=None, run_dir="bad")
    with pytest.raises(NonFiniteError, match="step 6"):
        trainer.fit()
    assert same(weights(good), weights(bad))
    copy = moments(trainer).get("master")
    assert (copy is None) == (dtype == torch.float32)
    if copy is not None:
        assert torch.equal(copy.to(dtype), bad.model[2].weight)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_master_weights_do_not_synchronise(nonfinite):
    class Quiet:
        def on_step_begin(self, trainer, step):
            torch.cuda.set_sync_debug_mode("error" if 1 < step < 9 else "default")

        on_train_end = on_error = lambda self, trainer, *rest: torch.cuda.set_sync_debug_mode("default")

    task = MeanTask(net(torch.bfloat16))
    trainer = make(task, optimizer="adamw", nonfinite=nonfinite, log_every=10, callbacks=[Quiet()])
    trainer.fit()
    assert trainer.state.step == 12
    assert moments(trainer)["master"].dtype == torch.float32


def peak_of_a_step(dtype, **options):
    """Bytes per parameter at most during a step of a stack of large layers, activations aside."""
    gc.collect()  # trainers refer to themselves
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))).to(dtype)
    data = classes(16, 2048, 2048, dtype=dtype)
    trainer = Trainer(
        MeanTask(model), data, batch_size=2, max_steps=4, log="none", precision="no", save_best=0, optimizer=options,
        save_every=None, save_last=0,
    )  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trainer.fit()
    peak = torch.cuda.max_memory_allocated() - before
    del trainer, model
    return peak / (16 * 2048 * 2048)


def test_memory_of_a_step(monkeypatch):
    monkeypatch.setattr(master_weights, "MAX_CHUNK", 2 * 2048 * 2048)
    full = peak_of_a_step(torch.float32, name="adamw")
    masters = peak_of_a_step(torch.bfloat16, name="adamw")
    short = peak_of_a_step(torch.bfloat16, name="adamw", master_weights=False)
    eight = peak_of_a_step(torch.float32, name="adamw_8bit")
    least = peak_of_a_step(torch.bfloat16, name="adafactor", master_weights=False)
    print(f"bytes per parameter: {full:.1f} {masters:.1f} {short:.1f} {eight:.1f} {least:.1f}")
    assert 15.9 < full < 17.5
    assert 15.9 < masters < 17.5  # gradients become fp32 piece by piece, not 4 bytes for every parameter
    assert 7.9 < short < 9.5
    assert 9.9 < eight < 11.5
    assert 3.9 < least < 6.0
