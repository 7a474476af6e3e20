"""Margin losses against pytorch-metric-learning, finite differences, and at the edges of the sphere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from loss_tools import HALVES, assert_close, value_and_gradients
from pytorch_metric_learning import losses as pml
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.losses import ArcFaceLoss, CosFaceLoss, NormFaceLoss, SubCenterArcFaceLoss

CLASSES, WIDTH = 7, 16
KINDS = [ArcFaceLoss, CosFaceLoss, SubCenterArcFaceLoss, NormFaceLoss]


def oracle(loss: torch.nn.Module) -> torch.nn.Module:
    """The same loss in pytorch-metric-learning, with the same weights."""
    sizes = {"num_classes": CLASSES, "embedding_size": WIDTH}
    if isinstance(loss, SubCenterArcFaceLoss):
        degrees = math.degrees(loss.margin)
        made = pml.SubCenterArcFaceLoss(margin=degrees, scale=loss.scale, sub_centers=loss.sub_centers, **sizes)
    elif isinstance(loss, ArcFaceLoss):
        made = pml.ArcFaceLoss(margin=math.degrees(loss.margin), scale=loss.scale, **sizes)
    elif isinstance(loss, CosFaceLoss):
        made = pml.CosFaceLoss(margin=loss.margin, scale=loss.scale, **sizes)
    else:
        made = pml.CosFaceLoss(margin=0.0, scale=loss.scale, **sizes)
    made.W.data = loss.weight.detach().T.clone()
    return made


def batch(loss: torch.nn.Module, kind: str) -> tuple[Tensor, Tensor]:
    """Embeddings of lengths far from one, and labels; "opposed" ones lie beyond theta + margin = pi."""
    labels = torch.arange(12) % CLASSES
    embeddings = 5 * torch.randn(12, WIDTH)
    if kind == "opposed":
        centers = loss.weight.detach().view(CLASSES, -1, WIDTH).mean(1)
        embeddings = -3 * F.normalize(centers[labels]) + 0.02 * torch.randn(12, WIDTH)
        if isinstance(loss, SubCenterArcFaceLoss):  # one direction per class, or the nearest center is never opposed
            loss.weight.data = (centers.unsqueeze(1) + 0.01 * torch.randn(CLASSES, 3, WIDTH)).flatten(0, 1)
        cosines = loss.logits(embeddings).gather(1, labels.unsqueeze(1)) / loss.scale
        assert (cosines < -math.cos(0.5)).all()
    return embeddings, labels


@pytest.mark.parametrize("kind", ["random", "opposed"])
@pytest.mark.parametrize("scale", [16.0, 64.0])
@pytest.mark.parametrize("made", KINDS)
def test_loss_and_gradients_match_the_library(made: type, scale: float, kind: str) -> None:
    loss = made(WIDTH, CLASSES, scale=scale)
    embeddings, labels = batch(loss, kind)
    other = oracle(loss)
    mine = value_and_gradients(lambda x: loss(x, labels), embeddings)
    theirs = value_and_gradients(lambda x: other(x, labels), embeddings)
    assert_close([*mine, loss.weight.grad], [*theirs, other.W.grad.T])
    assert mine[0] > 0
    assert mine[1].abs().max() > 0


@pytest.mark.parametrize("made", KINDS)
def test_float64_matches_the_library_to_the_last_digits(made: type) -> None:
    loss = made(WIDTH, CLASSES).double()
    embeddings, labels = batch(loss, "random")
    other = oracle(loss)
    mine = value_and_gradients(lambda x: loss(x, labels), embeddings.double())
    theirs = value_and_gradients(lambda x: other(x, labels), embeddings.double())
    assert_close([*mine, loss.weight.grad], [*theirs, other.W.grad.T], relative=1e-12)


@pytest.mark.parametrize("made", KINDS)
def test_gradients_are_those_of_finite_differences(made: type) -> None:
    loss = made(5, 3, scale=4.0).double()
    labels = torch.tensor([0, 2, 1])
    embeddings = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def value(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(loss, {"weight": weight}, (x, labels))

    assert torch.autograd.gradcheck(value, (embeddings, loss.weight.detach().requires_grad_()))


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.2, math.pi / 2])
def test_the_margin_never_rewards_a_larger_angle(margin: float) -> None:
    """All the way from 0 to pi the logit of the true class falls: a hand-made sweep over the circle."""
    loss = ArcFaceLoss(2, 2, margin=margin).double()
    loss.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    angles = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    got = loss._with_margin(angles.cos())
    assert (got.diff() < 1e-12).all()
    inside = angles < math.pi - margin
    torch.testing.assert_close(got[inside], (angles[inside] + margin).cos(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("made", KINDS)
def test_gradients_are_finite_at_extreme_cosines(made: type, dtype: torch.dtype) -> None:
    """Cosines of exactly 1 and -1, one step of rounding from them, and an embedding of zeros."""
    loss = made(4, 3)
    loss.weight.data.zero_()
    loss.weight.data[:, 0] = 1
    rows = torch.zeros(6, 4)
    rows[:4, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    rows[2:4, 1] = 3e-4
    rows[4, :] = 1e4
    embeddings = rows.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        value = loss(embeddings, torch.tensor([0, 1, 2, 0, 1, 2]))
    value.backward()
    assert value.dtype is torch.float32
    assert embeddings.grad.dtype is dtype
    assert torch.isfinite(value)
    assert torch.isfinite(embeddings.grad).all()
    assert torch.isfinite(loss.weight.grad).all()


def test_at_a_cosine_of_one_the_value_is_exact() -> None:
    loss = ArcFaceLoss(2, 2, margin=0.5, scale=1.0)
    loss.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    want = F.cross_entropy(torch.tensor([[math.cos(0.5), 0.0]]), torch.tensor([0]))
    got = loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    torch.testing.assert_close(got, want, rtol=8 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_changes_nothing_but_the_rounding_of_the_input(dtype: torch.dtype) -> None:
    loss = ArcFaceLoss(WIDTH, CLASSES)
    embeddings, labels = torch.randn(12, WIDTH).to(dtype), torch.arange(12) % CLASSES
    with torch.autocast("cpu", dtype=dtype):
        got, logits = loss(embeddings, labels), loss.logits(embeddings)
    torch.testing.assert_close(got, loss(embeddings.float(), labels))
    torch.testing.assert_close(logits, loss.logits(embeddings.float()))


@pytest.mark.parametrize("made", KINDS)
def test_reductions_are_consistent(made: type) -> None:
    loss = made(WIDTH, CLASSES)
    embeddings, labels = batch(loss, "random")
    rows = loss(embeddings, labels, reduction="none")
    assert rows.shape == (12,)
    assert loss.per_sample
    assert loss(embeddings, labels, reduction="sum").item() == pytest.approx(rows.sum().item(), rel=1e-6)
    assert loss(embeddings, labels).item() == pytest.approx(rows.mean().item(), rel=1e-6)
    one = torch.stack([loss(embeddings[i : i + 1], labels[i : i + 1]) for i in range(12)])
    torch.testing.assert_close(rows, one)


def test_logits_are_cosines_and_the_nearest_center_counts() -> None:
    loss = SubCenterArcFaceLoss(4, 3, sub_centers=2, scale=10.0)
    embeddings = torch.randn(5, 4)
    want = torch.empty(5, 3)
    for i in range(5):
        for c in range(3):
            pair = loss.weight[2 * c : 2 * c + 2]
            want[i, c] = 10 * F.cosine_similarity(embeddings[i : i + 1], pair).max()
    torch.testing.assert_close(loss.logits(embeddings), want)


def test_a_margin_increases_the_loss() -> None:
    plain, arc, cos = NormFaceLoss(WIDTH, CLASSES), ArcFaceLoss(WIDTH, CLASSES), CosFaceLoss(WIDTH, CLASSES)
    arc.weight.data = cos.weight.data = plain.weight.data
    embeddings, labels = batch(plain, "random")
    assert plain(embeddings, labels) < cos(embeddings, labels)
    assert plain(embeddings, labels) < arc(embeddings, labels)
    for loss in (arc, cos):
        loss.margin = 0.0
        torch.testing.assert_close(loss(embeddings, labels), plain(embeddings, labels))


def test_weights_are_saved_and_copied() -> None:
    loss = SubCenterArcFaceLoss(4, 3)
    other = SubCenterArcFaceLoss(4, 3)
    assert list(loss.state_dict()) == ["weight"]
    other.load_state_dict(loss.state_dict())
    assert torch.equal(copy.deepcopy(other).weight, loss.weight)
    bound = math.sqrt(6 / (9 + 4))
    assert 0.8 * bound < loss.weight.abs().max() <= bound


@pytest.mark.parametrize("made", KINDS)
def test_it_compiles_without_graph_breaks(made: type) -> None:
    loss = made(WIDTH, CLASSES)
    embeddings, labels = batch(loss, "random")
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(embeddings, labels), loss(embeddings, labels))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArcFaceLoss(4, 3, margin=28.6), "radians"),
        (lambda: ArcFaceLoss(4, 3, margin=-0.1), "margin"),
        (lambda: ArcFaceLoss(4, 3, margin=math.nan), "margin"),
        (lambda: CosFaceLoss(4, 3, margin=1.5), "0.35"),
        (lambda: ArcFaceLoss(4, 3, scale=0), "scale"),
        (lambda: ArcFaceLoss(4, 3, scale=math.inf), "scale"),
        (lambda: ArcFaceLoss(0, 3), "embedding_dim"),
        (lambda: ArcFaceLoss(4, 2.5), "num_classes"),
        (lambda: SubCenterArcFaceLoss(4, 3, sub_centers=0), "sub_centers"),
        (lambda: ArcFaceLoss(4, 3)(torch.ones(2, 5), torch.zeros(2).long()), r"\(B, 4\)"),
        (lambda: ArcFaceLoss(4, 3)(torch.ones(2, 4), torch.zeros(2, 3)), "2 class indices"),
        (lambda: ArcFaceLoss(4, 3)(torch.ones(2, 4), torch.zeros(3).long()), "2 class indices"),
        (lambda: ArcFaceLoss(4, 3)(torch.ones(2, 4), torch.zeros(2).long(), reduction="men"), "mean"),
    ],
)
def test_bad_arguments_are_rejected(make: object, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make()


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_in_the_error(label: int) -> None:
    with pytest.raises(DataError, match=f"from 0 to 2, received {label}"):
        ArcFaceLoss(4, 3)(torch.ones(2, 4), torch.tensor([0, label]))
