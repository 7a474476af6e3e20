"""BatchNorm over ranks is BatchNorm of the whole batch; a layer stays the layer it was."""

from __future__ import annotations

import copy
import logging
import pickle

import batchnorm_ranks
import pytest
import torch
from batchnorm_ranks import BATCH, LAYERS, STEPS, images, network
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ranks import on_ranks, share_of
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.models.heads import BNNeck

# -- over ranks --------------------------------------------------------------------------------------------


STARTS = [2, pytest.param(4, marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=STARTS)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """The results of all ranks: of two or four on the CPU, or of two on one GPU."""
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "cuda":
        return on_ranks(batchnorm_ranks.results_on_cuda, 2, folder)
    return on_ranks(batchnorm_ranks.results, request.param, folder)


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The results of one process, with torch's own layers."""
    return batchnorm_ranks.results(0, 1)


def assert_same(found: Tensor, want: Tensor, name: str) -> None:
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_gradients_and_statistics_match_the_global_batch(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor], layer: str
) -> None:
    by_rows = [name for name in alone if name.startswith(f"rows.{layer}.")]
    for name in by_rows:
        for rank, result in enumerate(together):
            assert_same(result[name], alone[name][share_of(BATCH, rank, len(together))], name)
    others = [name for name in alone if name.startswith(f"{layer}.")]
    for name in others:
        for result in together:
            assert_same(result[name], alone[name], name)
    assert len(by_rows) == (layer != "untracked") + STEPS * (1 if layer == "follower" else 2)
    assert len(others) == {"3d": 3, "untracked": 4, "follower": 5, "frozen": 5, "neck": 6}.get(layer, 7)


@pytest.mark.parametrize("case", ["ddp", "padded", "single"])
def test_networks_train_like_one_process(
    together: list[dict[str, Tensor]], alone: dict[str, Tensor], case: str
) -> None:
    """In torch's DDP with accumulation, with padding on the last rank, and with one sample on all ranks together."""
    on_cuda = "kind" in together[0]
    if on_cuda and case == "single":
        assert all(result["kind"] and result["finite"] for result in together)  # the least that torch's layer gives
        return
    names = [name for name in alone if name.startswith(f"{case}.")]
    for name in names:
        for result in together:
            assert_same(result[name], alone[name], name)
    assert len(names) >= 14


def test_a_sample_on_each_rank_makes_a_batch(together: list[dict[str, Tensor]]) -> None:
    if "several" not in together[0]:
        pytest.skip("not computed on a GPU")
    model = network()
    model(images(8, 5))
    want = model(images(len(together), 5, seed=6)).detach()
    assert_same(torch.cat([result["several"] for result in together]), want, "output")


# -- the change of a layer ---------------------------------------------------------------------------------


def test_a_converted_layer_keeps_its_attributes() -> None:
    layer = nn.BatchNorm2d(4, eps=0.01, momentum=None, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Sequential(BNNeck(4)).eval())
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    assert convert_sync_batchnorm(model) == 2
    assert convert_sync_batchnorm(model) == 2  # again: nothing more to do
    assert model[1] is layer
    assert isinstance(layer, nn.BatchNorm2d)
    assert (layer.eps, layer.momentum, layer.training, model[2][0].training) == (0.01, None, True, False)
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    assert isinstance(model[2][0], BNNeck)
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(torch.ones(2, 4, dtype=torch.float64))
    layer(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    assert seen == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), AveragedModel])
def test_converted_layers_can_be_copied_and_pickled(copied: object) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), BNNeck(3))
    convert_sync_batchnorm(model)
    model(images(4, 3).float())
    twin = copied(model)  # type: ignore[operator]
    inner = twin.module if isinstance(twin, AveragedModel) else twin
    assert [type(part) for part in inner] == [type(part) for part in model]
    for key, value in model.state_dict().items():
        assert torch.equal(inner.state_dict()[key], value)
        assert inner.state_dict()[key].data_ptr() != value.data_ptr()


def test_one_process_computes_the_same_as_before() -> None:
    for made in (lambda: nn.BatchNorm2d(4), lambda: BatchNormAct2d(4)):
        plain, shared = made(), made()
        convert_sync_batchnorm(shared)
        rows = images(6, 4, 2, 2).float()
        assert torch.equal(shared(rows), plain(rows))
        assert torch.equal(shared.eval()(rows), plain.eval()(rows))
        assert torch.equal(shared.running_var, plain.running_var)


class Louder(nn.BatchNorm1d):
    """Does something more."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Own(nn.BatchNorm1d):
    """Does something else."""

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


def test_user_defined_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Louder(3), Own(3))
    rows = images(4, 3).float()
    want = model(rows)
    model = nn.Sequential(Louder(3), Own(3))
    with caplog.at_level(logging.WARNING, "trainformer"):
        assert convert_sync_batchnorm(model) == 1
    assert "Own does not call the BatchNorm it derives from" in caplog.text
    assert "Louder" not in caplog.text
    assert torch.equal(model(rows), want)
