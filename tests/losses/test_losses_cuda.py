"""Losses on a GPU: the numbers of the CPU, under autocast, and the host never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from loss_tools import assert_close, value_and_gradients, waits_are_errors
from torch import Tensor

from trainformer.losses import (
    ArcFaceLoss,
    Center,
    CosFaceLoss,
    NormFaceLoss,
    SubCenterArcFaceLoss,
    byol_loss,
    dino_kl,
    dino_loss,
    infonce_with_queue,
    koleo_loss,
    make_pair_loss,
    moco_v3_loss,
    nt_xent_loss,
    teacher_entropy,
)

pytestmark = pytest.mark.gpu

LABELS = torch.arange(16) % 5
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "ntxent": lambda x, others: nt_xent_loss(x, others[0]),
    "queue": lambda x, others: infonce_with_queue(x, others[0], F.normalize(others[1])),
    "moco_v3": lambda x, others: moco_v3_loss(x, others[0], others[1], others[2]),
    "dino": lambda x, others: dino_loss([x, *others[:2]], others[1:], others[0][:1]),
    "kl": lambda x, others: x.sum() + dino_kl([x, *others[:2]], others[1:], others[0][:1]),
    "entropy": lambda x, others: x.sum() + teacher_entropy(others[0], 0.04, others[1][:1]),
    "koleo": lambda x, _: koleo_loss(x),
    "byol": lambda x, others: byol_loss(x, others[0]),
}


def test_a_sync_is_detected() -> None:
    one = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), waits_are_errors():
        one.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(16, 24) for _ in range(4)]
    want = value_and_gradients(lambda x: FUNCTIONS[name](x, inputs[1:]), inputs[0])
    moved = [x.cuda() for x in inputs]
    with waits_are_errors():
        got = value_and_gradients(lambda x: FUNCTIONS[name](x, moved[1:]), moved[0], autocast=dtype)
    assert_close([x.cpu() for x in got], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [ArcFaceLoss, CosFaceLoss, SubCenterArcFaceLoss, NormFaceLoss])
def test_margin_losses(made: type, dtype: torch.dtype) -> None:
    loss, embeddings = made(24, 5), torch.randn(16, 24)
    want = value_and_gradients(lambda x: loss(x, LABELS), embeddings)
    weight = loss.weight.grad
    loss.zero_grad()
    loss.cuda()
    embeddings, labels = embeddings.cuda(), LABELS.cuda()
    with waits_are_errors():
        got = value_and_gradients(lambda x: loss(x, labels), embeddings, autocast=dtype)
    assert_close([x.cpu() for x in [*got, loss.weight.grad]], [*want, weight])


@pytest.mark.parametrize("made", [ArcFaceLoss, SubCenterArcFaceLoss])
def test_gradients_are_finite_at_extreme_cosines(made: type) -> None:
    loss = made(4, 3).cuda()
    loss.weight.data.copy_(torch.tensor([1.0, 0, 0, 0]))
    rows = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [0.0, 0, 0, 0]], device="cuda", dtype=torch.float16)
    value, gradient = value_and_gradients(lambda x: loss(x, torch.arange(3, device="cuda")), rows)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert torch.isfinite(loss.weight.grad).all()


def test_the_compiled_loss_is_the_same() -> None:
    loss = ArcFaceLoss(24, 5).cuda()
    embeddings, labels = torch.randn(16, 24, device="cuda"), LABELS.cuda()
    compiled = torch.compile(loss, fullgraph=True)
    got = value_and_gradients(lambda x: compiled(x, labels), embeddings)
    assert_close(got, value_and_gradients(lambda x: loss(x, labels), embeddings))


def test_the_center_moves_to_the_device() -> None:
    center, other, rows = Center(8), Center(8), torch.randn(5, 8)
    center.add(rows)
    center.cuda()
    moved = rows.cuda()
    center.add(moved)  # what was collected before is carried over
    with waits_are_errors():
        center.add([moved, moved])
        center.commit()
    other.add([rows] * 4)
    other.commit()
    torch.testing.assert_close(center.center.cpu(), other.center)


@pytest.mark.parametrize("name", ["triplet", "proxy_nca", "xbm:supcon"])
def test_pair_losses(name: str) -> None:
    pytest.importorskip("pytorch_metric_learning")
    loss = make_pair_loss(name, embedding_dim=24, num_classes=5)
    moved = make_pair_loss(name, embedding_dim=24, num_classes=5)
    moved.load_state_dict(loss.state_dict())
    moved.cuda()
    embeddings = torch.randn(16, 24)
    want = value_and_gradients(lambda x: loss(x, LABELS), embeddings)
    labels = LABELS.cuda()
    got = value_and_gradients(lambda x: moved(x, labels), embeddings.cuda(), autocast=torch.float16)
    assert_close([x.cpu() for x in got], want)
    resumed = make_pair_loss(name, embedding_dim=24, num_classes=5).cuda()
    resumed.load_state_dict(moved.state_dict())
    embeddings = embeddings.cuda().flip(0)
    assert torch.equal(resumed(embeddings, labels), moved(embeddings, labels))
