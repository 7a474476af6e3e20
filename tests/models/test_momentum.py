"""The momentum copy against timm's average and a loop by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.utils import ModelEmaV3
from torch import nn

from trainformer.core.errors import BadArgument
from trainformer.models.heads import DINOHead, byol_projector
from trainformer.models.momentum import MomentumCopy, cosine_momentum, disable_dropout

EPS = torch.finfo(torch.float32).eps


class WithBuffer(nn.Module):
    """A convolution, a BatchNorm, a fixed table and a tied weight."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(8)
        self.register_buffer("table", torch.randn(8))
        self.head(torch.zeros(1, 4 * 4 * 4))
        self.again = self.head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images)) + self.table


def shake(module: nn.Module) -> None:
    """A stand-in for an optimizer step."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape), alpha=0.1)


def copies() -> list[tuple[str, Any]]:
    return [
        ("cnn", WithBuffer),
        ("vit", lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)),
        ("weight norm", lambda: nn.Sequential(byol_projector(8, 16, 8), DINOHead(8, 32, 16, 8))),
    ]


@pytest.mark.parametrize(("name", "build"), copies(), ids=[name for name, _ in copies()])
def test_updates_match_timm_and_a_loop(name: str, build: Any) -> None:
    source = build()
    follower = MomentumCopy(source)
    oracle = ModelEmaV3(source, decay=0.9, exclude_buffers=True)
    by_hand = {key: weight.detach().double() for key, weight in source.named_parameters()}
    for _ in range(5):
        shake(source)
        follower.update(source, 0.9)
        oracle.update(source)
        for key, weight in source.named_parameters():
            by_hand[key] = 0.9 * by_hand[key] + 0.1 * weight.detach().double()
    mine = dict(follower.module.named_parameters())
    assert list(mine) == list(by_hand)
    for key, other in oracle.module.named_parameters():
        torch.testing.assert_close(mine[key], other, rtol=4 * EPS, atol=4 * EPS, check_stride=False)
        torch.testing.assert_close(mine[key].double(), by_hand[key], rtol=1e-6, atol=6e-7)


def test_the_copy_is_frozen_and_shares_no_memory() -> None:
    source = WithBuffer()
    follower = MomentumCopy(source)
    assert not any(weight.requires_grad for weight in follower.parameters())
    assert all(weight.requires_grad for weight in source.parameters())
    mine = {weight.data_ptr() for weight in follower.parameters()}
    assert not mine & {weight.data_ptr() for weight in source.parameters()}
    images = torch.randn(2, 3, 6, 6, requires_grad=True)
    got = follower(images)
    assert not got.requires_grad
    assert not got.is_inference()  # an inference tensor could not enter the student's loss
    assert len(list(follower.parameters())) == len(list(source.parameters()))
    assert follower.module.head is follower.module.again


def test_batchnorm_keeps_statistics_of_its_own_and_buffers_are_not_averaged() -> None:
    source = WithBuffer()
    follower = MomentumCopy(source).train()
    alone = WithBuffer()
    alone.load_state_dict(source.state_dict())
    for _ in range(3):
        follower(torch.ones(4, 3, 6, 6) + torch.randn(4, 3, 6, 6))
        source(torch.randn(4, 3, 6, 6))
        source.table.add_(1.0)
        running = follower.module.body[1].running_mean.clone()
        follower.update(source, 0.5)
        assert torch.equal(follower.module.body[1].running_mean, running)
    assert not torch.allclose(running, source.body[1].running_mean)
    assert follower.module.body[1].num_batches_tracked == 3
    assert torch.equal(follower.module.table, alone.table)
    before = running.clone()
    follower.eval()(torch.randn(4, 3, 6, 6))
    assert torch.equal(follower.module.body[1].running_mean, before)


def test_nothing_is_random_in_train_mode() -> None:
    options = {"drop_path_rate": 0.5, "proj_drop_rate": 0.5, "attn_drop_rate": 0.5, "pos_drop_rate": 0.5}
    source = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, num_classes=0, patch_drop_rate=0.5, **options
    ).train()
    images = torch.randn(8, 3, 32, 32)
    follower = MomentumCopy(source).train()
    assert not torch.equal(source(images), source(images))
    assert torch.equal(follower(images), follower(images))
    source.eval()
    torch.testing.assert_close(follower(images), source(images).detach())
    assert any(part.drop_prob > 0 for part in source.modules() if isinstance(part, DropPath))


def test_dropout_inside_layers_of_torch_and_torchvision_is_off() -> None:
    from torchvision.ops import StochasticDepth

    stack = nn.ModuleList(
        [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), nn.LSTM(8, 8, 2, dropout=0.5), StochasticDepth(0.5, "row")]
    ).train()
    disable_dropout(stack)
    rows = torch.randn(5, 4, 8)
    for module in stack:
        one, two = module(rows), module(rows)
        one, two = (one[0], two[0]) if isinstance(one, tuple) else (one, two)
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_source_has_a_float32_copy(dtype: torch.dtype) -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)
    follower = MomentumCopy(source)
    assert all(value.dtype in (torch.float32, torch.int64) for value in follower.state_dict().values())
    rows = torch.randn(6, 8).to(dtype)
    torch.testing.assert_close(follower(rows).float(), source(rows).float(), rtol=0.05, atol=0.05)
    with torch.no_grad():
        source[0].weight.fill_(1.0)
        follower.module[0].weight.fill_(2.0)
    for _ in range(10):
        follower.update(source, 0.999)
    # 2 - 0.001 is 2 in both half precisions: a copy in half precision would never move.
    torch.testing.assert_close(follower.module[0].weight, torch.full((8, 8), 1 + 0.999**10))


def test_a_double_precision_source_stays_double() -> None:
    assert MomentumCopy(nn.Linear(2, 2).double()).module.weight.dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_sources(in_place: bool) -> None:
    source: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    if in_place:
        source.compile(backend="aot_eager")
    else:
        source = torch.compile(source, backend="aot_eager")
    rows = torch.randn(3, 4)
    source(rows).sum().backward()
    follower = MomentumCopy(source)
    assert list(follower.state_dict()) == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
    torch.testing.assert_close(follower(rows), source(rows).detach())
    shake(source)
    follower.update(source, 0.0)
    torch.testing.assert_close(follower(rows), source(rows).detach())


def test_state_round_trip() -> None:
    source = nn.Sequential(byol_projector(8, 16, 8), DINOHead(8, 32, 16, 8))
    follower = MomentumCopy(source)
    shake(source)
    follower.update(source, 0.5)
    follower(torch.randn(8, 8))
    other = MomentumCopy(source)
    other.load_state_dict(follower.state_dict())
    rows = torch.randn(4, 8)
    torch.testing.assert_close(other.eval()(rows), follower.eval()(rows))
    assert not any(weight.requires_grad for weight in other.parameters())


def test_momentum_zero_and_one() -> None:
    source = nn.Linear(3, 3)
    follower = MomentumCopy(source)
    before = follower.module.weight.clone()
    shake(source)
    follower.update(source, 1.0)
    assert torch.equal(follower.module.weight, before)
    follower.update(source, 0.0)
    assert torch.equal(follower.module.weight, source.weight)


def test_cosine_momentum_is_that_of_byol() -> None:
    values = [cosine_momentum(0.996, 1.0, step, 100) for step in range(101)]
    want = [1 - (1 - 0.996) * (math.cos(math.pi * step / 100) + 1) / 2 for step in range(101)]
    assert values == pytest.approx(want, abs=1e-15)
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.996, 1.0)
    assert cosine_momentum(0.9, 0.9, 7, 10) == 0.9
    assert cosine_momentum(0.9, 1.0, 500, 10) == 1.0
    with pytest.raises(BadArgument, match="total to be at least 1"):
        cosine_momentum(0.9, 1.0, 0, 0)


def test_sources_that_do_not_fit_are_rejected() -> None:
    follower = MomentumCopy(nn.Linear(3, 3))
    with pytest.raises(BadArgument, match=r"momentum to be from 0 to 1, received 1\.5"):
        follower.update(nn.Linear(3, 3), 1.5)
    with pytest.raises(BadArgument, match=r"differences in \['bias'\]"):
        follower.update(nn.Linear(3, 3, bias=False), 0.9)
    with pytest.raises(BadArgument, match=r"'weight' of shape \(3, 3\) on cpu, received 'shape \(3, 2\)"):
        follower.update(nn.Linear(2, 3), 0.9)
    with pytest.raises(BadArgument, match=r"on cpu, received .* on meta"):
        follower.update(nn.Linear(3, 3, device="meta"), 0.9)


@pytest.mark.gpu
def test_update_does_not_sync() -> None:
    source = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    follower = MomentumCopy(source).cuda()
    shake(source)
    source.cuda()
    slow = dict(follower.module.named_parameters())
    want = {key: 0.99 * weight + 0.01 * source.get_parameter(key).detach() for key, weight in slow.items()}
    images = torch.randn(2, 3, 32, 32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # or the test would see nothing
            images.sum().item()
        follower.update(source, 0.99)
        got = follower(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.is_cuda
    torch.testing.assert_close(got, follower(images))
    for key, weight in slow.items():
        torch.testing.assert_close(weight, want[key], msg=key)
