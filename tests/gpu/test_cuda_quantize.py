"""fp8 and quantization-aware training on a GPU: real kernels, no device syncs, and the same numbers as emulation."""

import pytest
import torch
from torch import nn

from toys import MeanTask, same, weights
from trainformer import Trainer
from trainformer.backends.torch.quantize import EMULATE, FP8_RECIPES, RECIPES
from trainformer.run import run_of

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao")


def fit(folder, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 5))
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    defaults = {"batch_size": 32, "max_steps": 12, "lr": 1e-2, "log": "none", "save_best": 0, "log_every": 10}
    return Trainer(MeanTask(model), (x, x[:, :5].argmax(-1)), **{**defaults, "run_dir": folder, **options}).fit()


class NoSync:
    """Makes CUDA raise on any synchronisation in the middle of the run."""

    def on_step_begin(self, trainer, step):
        torch.cuda.set_sync_debug_mode("error" if 2 < step < 8 else "default")

    on_train_end = on_error = on_log = lambda self, trainer, *rest: torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_fp8_is_what_it_is_emulated_to_be(recipe, tmp_path, monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 arithmetic")
    trainer = fit(tmp_path / "real", fp8_recipe=recipe, callbacks=[NoSync()])
    assert run_of(trainer).backend.precision.name == "fp8"
    monkeypatch.setenv(EMULATE, "1")
    emulated = fit(tmp_path / "emulated", fp8_recipe=recipe)
    for name, weight in weights(trainer.task).items():
        torch.testing.assert_close(weight, weights(emulated.task)[name], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_qat_never_syncs_and_is_reproducible(name, tmp_path):
    runs = [fit(tmp_path / str(n), qat_recipe=name, callbacks=[NoSync()], precision="bf16") for n in range(2)]
    assert same(weights(runs[0].task), weights(runs[1].task))


def test_fp8_is_refused_on_older_devices(tmp_path, monkeypatch):
    from trainformer.core.errors import BadArgument

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(BadArgument, match=r"which has 8\.0"):
        fit(tmp_path, precision="fp8")
