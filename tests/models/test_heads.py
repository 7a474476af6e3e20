"""Heads against lightly's, BatchNorm with one sample, and poolers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from lightly.models.modules import heads as lightly_heads
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.embedding import AvgPool, ClassToken, GeM, MaxPool, make_pooler
from trainformer.models.heads import (
    BNNeck,
    ClassificationHead,
    DINOHead,
    MLPHead,
    byol_predictor,
    byol_projector,
    moco_projector,
    moco_v3_predictor,
    moco_v3_projector,
    simclr_projector,
    single_sample_batchnorm,
)

IN, HIDDEN, OUT = 12, 20, 6


def v3_predictor_of_lightly() -> nn.Module:
    return lightly_heads.ProjectionHead(
        [
            (IN, HIDDEN, nn.BatchNorm1d(HIDDEN), nn.ReLU()),
            (HIDDEN, OUT, nn.BatchNorm1d(OUT, affine=False), None),
        ]
    )


def v3_resnet_predictor_of_lightly() -> nn.Module:
    blocks = [(IN, HIDDEN, nn.BatchNorm1d(HIDDEN), nn.ReLU(), False), (HIDDEN, OUT, None, None, False)]
    return lightly_heads.ProjectionHead(blocks)


HEADS: list[tuple[Any, Any]] = [
    (simclr_projector, lambda: lightly_heads.SimCLRProjectionHead(IN, HIDDEN, OUT)),
    (lambda *w: simclr_projector(*w, layers=3), lambda: lightly_heads.SimCLRProjectionHead(IN, HIDDEN, OUT, 3)),
    (moco_projector, lambda: lightly_heads.MoCoProjectionHead(IN, HIDDEN, OUT)),
    # SimSiam's projector is MoCo v3's: BatchNorm everywhere, the last without scale and shift.
    (moco_v3_projector, lambda: lightly_heads.SimSiamProjectionHead(IN, HIDDEN, OUT)),
    (moco_v3_predictor, v3_predictor_of_lightly),
    (lambda *w: moco_v3_predictor(*w, last_norm=False), v3_resnet_predictor_of_lightly),
    (byol_projector, lambda: lightly_heads.BYOLProjectionHead(IN, HIDDEN, OUT)),
    (byol_predictor, lambda: lightly_heads.BYOLPredictionHead(IN, HIDDEN, OUT)),
]


@pytest.mark.parametrize(("ours", "theirs"), HEADS, ids=[str(i) for i in range(len(HEADS))])
def test_projectors_match_lightly(ours: Any, theirs: Any) -> None:
    """The same layers with the same names, hence the same outputs, statistics and gradients."""
    mine, oracle = ours(IN, HIDDEN, OUT), theirs()
    for weight in oracle.parameters():
        nn.init.normal_(weight)
    mine.load_state_dict(oracle.layers.state_dict())
    for _ in range(2):
        rows = torch.randn(16, IN)
        want, got = oracle(rows), mine(rows)
        assert torch.equal(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
    for one, other in zip(mine.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(mine.eval()(rows), oracle.eval()(rows))


def test_bias_can_be_set_for_all_layers() -> None:
    assert all(layer.bias is not None for layer in MLPHead([4, 4, 4], bias=True) if isinstance(layer, nn.Linear))
    assert all(layer.bias is None for layer in MLPHead([4, 4, 4], bias=False) if isinstance(layer, nn.Linear))


@pytest.mark.parametrize("dims", [[], [4], [4, 0]])
def test_bad_widths_are_rejected(dims: list[int]) -> None:
    with pytest.raises(BadArgument, match="at least two positive widths"):
        MLPHead(dims)


# --- DINO


def dino_pair(batch_norm: bool = False, norm_last_layer: bool = True) -> tuple[DINOHead, Any]:
    """Our head with the weights of lightly's, both far from their beginnings."""
    theirs = lightly_heads.DINOProjectionHead(IN, HIDDEN, 8, 32, batch_norm=batch_norm, norm_last_layer=norm_last_layer)
    ours = DINOHead(IN, 32, HIDDEN, 8, norm_last_layer=norm_last_layer, batch_norm=batch_norm)
    for weight in theirs.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight)
    ours.mlp.load_state_dict(theirs.layers.state_dict())
    originals = ours.last_layer.parametrizations.weight
    with torch.no_grad():
        originals.original0.copy_(theirs.last_layer.weight_g)
        originals.original1.copy_(theirs.last_layer.weight_v)
    return ours, theirs


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("norm_last_layer", [False, True])
def test_dino_head_matches_lightly(batch_norm: bool, norm_last_layer: bool) -> None:
    ours, theirs = dino_pair(batch_norm, norm_last_layer)
    rows = torch.randn(10, IN)
    got, want = ours(rows), theirs(rows)
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    originals = ours.last_layer.parametrizations.weight
    torch.testing.assert_close(originals.original1.grad, theirs.last_layer.weight_v.grad)
    assert (originals.original0.grad is None) == norm_last_layer
    if not norm_last_layer:
        torch.testing.assert_close(originals.original0.grad, theirs.last_layer.weight_g.grad)
    for one, other in zip(ours.mlp.parameters(), theirs.layers.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_dino_head_is_initialised_as_in_the_paper() -> None:
    head = DINOHead(256, 512, hidden_dim=256, bottleneck_dim=64)
    for layer in head.mlp:
        if isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert (layer.bias == 0).all()
    torch.testing.assert_close(head.last_layer.weight.norm(dim=1), torch.ones(512))
    assert not head.last_layer.parametrizations.weight.original0.requires_grad
    assert len([layer for layer in DINOHead(8, 8, 8, 8, layers=1).mlp if isinstance(layer, nn.Linear)]) == 1


def test_frozen_last_layer_gets_no_gradient_and_what_is_below_does() -> None:
    head = DINOHead(IN, 32, HIDDEN, 8, norm_last_layer=False)
    rows = torch.randn(10, IN)
    weights = list(head.mlp.parameters())
    free = head(rows)
    want = torch.autograd.grad(free.square().sum(), weights)
    head.last_layer_frozen = True
    frozen = head(rows)
    assert torch.equal(free, frozen)
    frozen.square().sum().backward()
    assert all(weight.grad is None for weight in head.last_layer.parameters())
    for weight, gradient in zip(weights, want, strict=True):
        torch.testing.assert_close(weight.grad, gradient)
    head.last_layer_frozen = False
    head(rows).square().sum().backward()
    assert all(weight.grad is not None for weight in head.last_layer.parameters())


def test_dino_head_can_be_copied_and_saved() -> None:
    head = DINOHead(IN, 32, HIDDEN, 8)
    rows = torch.randn(4, IN)
    twin = copy.deepcopy(head)
    other = DINOHead(IN, 32, HIDDEN, 8)
    assert not torch.equal(other(rows), head(rows))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other(rows), head(rows))
    assert torch.equal(twin(rows), head(rows))
    with torch.no_grad():
        head.last_layer.parametrizations.weight.original1.mul_(-1)
    assert not torch.equal(twin(rows), head(rows))
    assert not twin.last_layer.parametrizations.weight.original0.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dino_head_normalises_in_fp32_under_autocast(dtype: torch.dtype) -> None:
    """Features from 0 to 6e4: in fp16 the first have no length to divide by, and the length of the last is infinite."""
    head = DINOHead(IN, 32, HIDDEN, 16, layers=1)
    nn.init.eye_(head.mlp[0].weight)
    sizes = torch.tensor([0.0, 1e-3, 1.0, 5e4]).unsqueeze(1)
    rows = (sizes * (1 + 0.2 * torch.rand(4, IN))).requires_grad_()
    want = head(rows)
    with torch.autocast("cpu", dtype=dtype):
        got = head(rows)
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0.03)
    assert want[1:].abs().amax(1).min() > 0.1
    (gradient,) = torch.autograd.grad(got.float()[1:].square().sum(), rows)
    assert torch.isfinite(gradient).all()


def test_dino_head_in_half_precision_and_bad_arguments() -> None:
    assert DINOHead(IN, 32, HIDDEN, 8).bfloat16()(torch.randn(4, IN).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(BadArgument, match="layers to be at least 1"):
        DINOHead(IN, layers=0)
    with pytest.raises(BadArgument, match="positive widths"):
        DINOHead(IN, hidden_dim=0)


# --- classifier and neck


def test_classification_head() -> None:
    head = ClassificationHead(64, 10, dropout=0.5, batch_norm=True)
    rows = 100 * torch.rand(256, 64) ** 4 + 7
    labels = torch.randint(0, 10, (256,))
    assert nn.functional.cross_entropy(head(rows), labels).item() == pytest.approx(math.log(10), abs=0.05)
    by_hand = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-6).sqrt()
    plain = ClassificationHead(64, 10)
    normed = ClassificationHead(64, 10, batch_norm=True)
    normed[1].load_state_dict(plain[0].state_dict())
    torch.testing.assert_close(normed(rows), plain(by_hand), rtol=1e-4, atol=1e-4)
    assert [name for name, _ in normed.named_parameters()] == ["1.weight", "1.bias"]  # the BatchNorm learns nothing
    with pytest.raises(BadArgument, match="num_classes"):
        ClassificationHead(8, 0)
    with pytest.raises(BadArgument, match="dropout"):
        ClassificationHead(8, 2, dropout=1.0)


def test_bnneck_never_shifts() -> None:
    neck = BNNeck(8)
    optimizer = torch.optim.SGD([weight for weight in neck.parameters() if weight.requires_grad], lr=0.1)
    for _ in range(3):
        neck(torch.randn(16, 8) + 3).pow(3).sum().backward()
        optimizer.step()
    assert (neck.bias == 0).all()
    assert (neck.weight != 1).all()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(BNNeck(8))
    assert not converted.bias.requires_grad


# --- a batch of one


def test_one_sample_passes_batchnorm_with_running_statistics() -> None:
    first, second = MLPHead([4, 8, 2]), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    with torch.no_grad():
        first(torch.randn(32, 4))
    second[0].eval()  # frozen on purpose: it must not wake up
    row = torch.randn(1, 4)
    with pytest.raises(ValueError, match="more than 1 value"):
        first(row)
    state = copy.deepcopy(first.state_dict())
    with single_sample_batchnorm(first, second, size=1):
        got = first(row)
        assert second[1].training
    torch.testing.assert_close(got, copy.deepcopy(first).eval()(row))
    assert all(torch.equal(value, state[name]) for name, value in first.state_dict().items())
    assert first[1].training
    assert not second[0].training


def test_train_mode_is_restored_after_an_error() -> None:
    head = MLPHead([4, 8, 2])
    with pytest.raises(RuntimeError, match="shapes"), single_sample_batchnorm(head, size=1):
        head(torch.randn(1, 5))
    assert head[1].training


def test_other_sizes_are_left_alone() -> None:
    head, other = MLPHead([4, 8, 2]), MLPHead([4, 8, 2])
    other.load_state_dict(head.state_dict())
    rows = torch.randn(2, 4)
    with single_sample_batchnorm(head, size=2):
        assert torch.equal(head(rows), other(rows))
    assert torch.equal(head[1].running_mean, other[1].running_mean)


# --- poolers


@pytest.mark.parametrize("power", [1.0, 3.0, 5.5])
def test_gem_matches_its_formula_and_gradient(power: float) -> None:
    """In double precision, and without any of the tricks."""
    pooler = GeM(power)
    features = torch.rand(3, 5, 4, 6) + 0.05
    mine, plain = features.clone().requires_grad_(), features.double().requires_grad_()
    exponent = torch.tensor(power, dtype=torch.double, requires_grad=True)
    want = plain.pow(exponent).mean((2, 3)).pow(1 / exponent)
    got = pooler(mine)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(mine.grad.double(), plain.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(pooler.p.grad.double(), exponent.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("power", [3.0, 12.0])
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gem_is_finite_for_zeros_negatives_and_large_values(power: float, scale: float, dtype: torch.dtype) -> None:
    pooler = GeM(power)
    features = (scale * torch.rand(2, 3, 4, 4)).to(dtype).requires_grad_()
    got = pooler(features)
    assert got.dtype == dtype
    got.float().sum().backward()
    assert torch.isfinite(got).all()
    assert torch.isfinite(features.grad).all()
    assert torch.isfinite(pooler.p.grad)
    assert got.float().max() <= max(features.float().max().item(), 1e-6) * 1.02  # 1e-6 is 1.013e-6 in fp16


def test_gem_lies_between_mean_and_maximum() -> None:
    features = torch.rand(2, 3, 4, 4)
    mean, highest = AvgPool()(features), MaxPool()(features)
    torch.testing.assert_close(GeM(1.0)(features), mean)
    torch.testing.assert_close(GeM(300.0)(features), highest, rtol=0.02, atol=0)
    assert ((GeM()(features) > mean) & (GeM()(features) < highest)).all()
    assert [name for name, _ in GeM().named_parameters()] == ["p"]
    fixed = GeM(trainable=False)
    assert not list(fixed.parameters())
    assert "p" in fixed.state_dict()


@pytest.mark.parametrize("name", ["avg", "max", "gem"])
def test_tokens_are_pooled_like_the_map_they_come_from(name: str) -> None:
    feature_map = torch.rand(2, 8, 3, 4)
    patches = feature_map.flatten(2).transpose(1, 2)
    tokens = torch.cat([torch.full((2, 2, 8), 99.0), patches], dim=1)
    want: Tensor = make_pooler(name)(feature_map)
    torch.testing.assert_close(make_pooler(name, prefix_tokens=2)(tokens), want)
    assert not torch.allclose(make_pooler(name)(tokens), want)


def test_class_token_and_modules() -> None:
    tokens = torch.rand(2, 5, 8)
    assert torch.equal(make_pooler("token", prefix_tokens=1)(tokens), tokens[:, 0])
    module = nn.Flatten()
    assert make_pooler(module) is module


def test_bad_poolers_and_features() -> None:
    with pytest.raises(BadArgument, match="Did you mean 'gem'"):
        make_pooler("gemm")
    with pytest.raises(BadArgument, match="p to be above 0"):
        GeM(0.0)
    with pytest.raises(BadArgument, match="eps to be above 0"):
        GeM(eps=0.0)
    with pytest.raises(BadArgument, match="prefix_tokens"):
        AvgPool(-1)
    with pytest.raises(DataError, match=r"received \(2, 8\)"):
        AvgPool()(torch.rand(2, 8))
    with pytest.raises(DataError, match="no class token"):
        ClassToken()(torch.rand(2, 8, 3, 3))
