"""Several optimizers on a GPU: no synchronisation between log points, loss scaling, compiled models, exact resume."""

import math

import pytest
import torch
from torch import nn

from several_optimizers import several_optimizers
from trainformer import OptimizerConfig, Trainer
from trainformer.run import run_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

QUIET = {"log": "none", "device": "cuda", "resume": None, "save_every": None, "num_workers": 0, "epochs": 4}


class NoSync:
    """Makes CUDA raise on any synchronisation inside a step that is not a log point."""

    def on_step_begin(self, trainer, step):
        torch.cuda.set_sync_debug_mode("error" if step > 2 and (step + 1) % 10 else "default")

    def on_step_end(self, trainer, step, loss):
        torch.cuda.set_sync_debug_mode("default")

    on_train_end = on_error = lambda self, trainer, *rest: torch.cuda.set_sync_debug_mode("default")


def trainer(name, dtype=torch.float32, **settings):
    task, data = several_optimizers(name)
    for module in vars(task).values():
        if isinstance(module, nn.Module):
            module.to(dtype)
    data = getattr(data, "dataset", data)
    for attribute in ("dtype", "images", "tensors"):
        value = getattr(data, attribute, None)
        if isinstance(value, torch.dtype):
            setattr(data, attribute, dtype)
        elif isinstance(value, torch.Tensor):
            setattr(data, attribute, value[:48].to(dtype))
        elif value is not None:
            data.tensors = tuple(v[:48].to(dtype) if v.is_floating_point() else v[:48] for v in value)
    return Trainer(task, data, **{**QUIET, "batch_size": 8, "lr": 0.01, "log_every": 10, **settings})


def weights(made):
    return [p.detach().clone() for p in run_of(made).backend.parameters]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("name", ["gan", "distillation"])
def test_no_synchronisation_between_log_points(name, precision, nonfinite):
    made = trainer(name, precision=precision, nonfinite=nonfinite, callbacks=[NoSync()])
    made.fit()
    assert all(torch.isfinite(p).all() for p in weights(made))


@pytest.mark.parametrize("name", ["gan", "ppo", "distillation"])
def test_the_gpu_gives_the_numbers_of_the_cpu(name):
    ends = []
    for device in ("cuda", "cpu"):
        made = trainer(name, torch.float64, device=device, precision="no", epochs=2)
        made.fit()
        ends.append([p.cpu() for p in weights(made)])
    assert max((a - b).abs().max().item() for a, b in zip(*ends, strict=True)) < 1e-9


@pytest.mark.parametrize("name", ["gan", "ppo", "distillation"])
def test_a_resumed_run_ends_bitwise_the_same(tmp_path, name):
    class Crash:
        def on_step_begin(self, trainer, step):
            if step == 5:
                raise KeyError("crashed")

    options = {"save_every": 2, "epochs": 2, "precision": "fp16" if name == "gan" else "no"}
    whole = trainer(name, **options, run_dir=str(tmp_path / "whole"))
    whole.fit()
    with pytest.raises(KeyError):
        trainer(name, **options, run_dir=str(tmp_path / "cut"), callbacks=[Crash()]).fit()
    resumed = trainer(name, **options, run_dir=str(tmp_path / "cut"), resume="auto")
    resumed.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))


def test_a_non_finite_update_is_skipped_on_the_device():
    made = trainer("distillation", nonfinite="skip", precision="no", epochs=1)
    step = made.task.student_step
    calls = []

    def broken(batch):
        calls.append(1)
        loss = step(batch)
        return loss._replace(sum=loss.sum * math.nan) if len(calls) == 2 else loss

    run_of(made).backend._functions["student"] = broken
    made.fit()
    assert run_of(made).backend.guard.skipped == 1
    assert all(torch.isfinite(p).all() for p in weights(made))


def test_compiled_models():
    made = trainer("distillation", compile=True, epochs=1, precision="no")
    plain = trainer("distillation", epochs=1, precision="no")
    for one in (made, plain):
        one.fit()
    assert max((a - b).abs().max().item() for a, b in zip(weights(made), weights(plain), strict=True)) < 1e-3


class Manual:
    """Two optimizers stepped by hand, with BatchNorm and one loss that is not finite."""

    def __init__(self, bad=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        self.calls, self.bad = 0, bad

    def configure_optimizers(self):
        return {"model": OptimizerConfig(params=self.model), "head": OptimizerConfig(params=self.head)}

    def manual_step(self, batch, optimizers):
        for name in optimizers:
            self.calls += 1
            x = batch[0] * (math.nan if self.calls == self.bad else 1.0)
            optimizers[name].backward(self.head(self.model(x)).square().mean())
            optimizers[name].step()
        return {"mean": batch[0].mean()}

    def eval_step(self, batch):
        return {"loss": self.head(self.model(batch[0])).square().mean()}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [None, 13])
def test_manual_optimization_does_not_synchronise(precision, bad):
    options = {**QUIET, "batch_size": 8, "log_every": 10, "max_steps": 24, "nonfinite": "skip", "precision": precision}
    made = Trainer(Manual(bad), (torch.randn(64, 4),), callbacks=[NoSync()], **options)
    made.fit()
    state = {**made.task.model.state_dict(), **made.task.head.state_dict()}
    assert all(torch.isfinite(value).all() for value in state.values())
    assert run_of(made).backend.guard.skipped == (bad is not None)
