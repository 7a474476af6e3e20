"""Pair losses, miners and the factory: what is built is the library's, and what goes wrong is said clearly."""

from __future__ import annotations

import pytest
import torch
from loss_tools import HALVES, assert_close, value_and_gradients
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners as pml_miners
from pytorch_metric_learning.distances import DotProductSimilarity
from torch import Tensor, nn

from trainformer.core import BadArgument
from trainformer.losses import (
    ArcFaceLoss,
    NormFaceLoss,
    PairLoss,
    SubCenterArcFaceLoss,
    make_metric_loss,
    make_miner,
    make_pair_loss,
    metric_loss_names,
    miner_names,
    pair_loss_names,
)

WIDTH, CLASSES = 8, 4
SIZES = {"embedding_dim": WIDTH, "num_classes": CLASSES}
ORACLES = {
    "triplet": pml.TripletMarginLoss,
    "contrastive": pml.ContrastiveLoss,
    "supcon": pml.SupConLoss,
    "multisimilarity": pml.MultiSimilarityLoss,
    "circle": pml.CircleLoss,
    "ntxent": pml.NTXentLoss,
    "proxy_anchor": pml.ProxyAnchorLoss,
    "proxy_nca": pml.ProxyNCALoss,
    "softtriple": pml.SoftTripleLoss,
}
WITH_PROXIES = {"proxy_anchor", "proxy_nca", "softtriple"}
MINERS = {
    "multisimilarity": pml_miners.MultiSimilarityMiner(),
    "batch_hard": pml_miners.BatchHardMiner(),
    "hard": pml_miners.BatchHardMiner(),
    "semihard": pml_miners.TripletMarginMiner(type_of_triplets="semihard"),
    "triplet_margin": pml_miners.TripletMarginMiner(),
    "angular": pml_miners.AngularMiner(),
}


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.arange(size) % CLASSES


def oracle(name: str, mine: nn.Module) -> nn.Module:
    if name not in WITH_PROXIES:
        return ORACLES[name]()
    other = ORACLES[name](num_classes=CLASSES, embedding_size=WIDTH)
    other.load_state_dict(mine.loss.state_dict())
    return other


def test_every_name_is_compared_with_the_library() -> None:
    assert sorted(ORACLES) == pair_loss_names()
    assert sorted(MINERS) == miner_names()


@pytest.mark.parametrize("name", ORACLES)
def test_a_name_builds_the_loss_of_the_library(name: str) -> None:
    mine = make_pair_loss(name, **SIZES)
    embeddings, labels = batch()
    other = oracle(name, mine)
    got = value_and_gradients(lambda x: mine(x, labels), embeddings)
    assert_close(got, value_and_gradients(lambda x: other(x, labels), embeddings), relative=1e-6)
    assert got[0] > 0
    assert not mine.per_sample


@pytest.mark.parametrize("miner", MINERS)
def test_a_miner_selects_the_same_pairs_as_the_library(miner: str) -> None:
    mine = make_pair_loss("triplet", miner=miner, margin=0.3)
    embeddings, labels = batch()
    other = pml.TripletMarginLoss(margin=0.3)
    want = other(embeddings, labels, MINERS[miner](embeddings, labels))
    assert mine(embeddings, labels).item() == pytest.approx(want.item())


@pytest.mark.parametrize("labels", [torch.arange(6) % CLASSES, torch.zeros(6).long(), torch.arange(1), torch.arange(3)])
@pytest.mark.parametrize("miner", [None, "multisimilarity", "batch_hard", "semihard"])
@pytest.mark.parametrize("name", [*ORACLES, "xbm:triplet", "xbm:supcon", "xbm:contrastive"])
def test_a_batch_without_pairs_has_a_graph(name: str, miner: str | None, labels: Tensor) -> None:
    """One class only, all classes different, one sample: never a crash, always finite gradients, proxies included."""
    loss = make_pair_loss(name, miner=miner, **SIZES)
    value, gradient = value_and_gradients(lambda x: loss(x, labels), torch.randn(len(labels), WIDTH))
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in loss.parameters())
    if name not in WITH_PROXIES and len(labels) == 1:
        assert value == 0
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ORACLES)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    loss = make_pair_loss(name, **SIZES)
    embeddings, labels = batch()
    embeddings = embeddings.to(dtype)
    embeddings[1] = embeddings[5]  # a distance of zero
    got = value_and_gradients(lambda x: loss(x, labels), embeddings, autocast=dtype)
    want = value_and_gradients(lambda x: loss(x, labels), embeddings.float())
    assert got[0].dtype is torch.float32
    assert_close(got[:1], want[:1], relative=1e-6)
    assert_close(got[1:], want[1:], relative=torch.finfo(dtype).eps)
    assert all(p.dtype is torch.float32 for p in loss.parameters())


def test_float64_embeddings_do_not_cast_the_proxies() -> None:
    loss = make_pair_loss("proxy_anchor", **SIZES)
    embeddings, labels = batch()
    loss(embeddings.double(), labels)
    assert next(loss.parameters()).dtype is torch.float32


class TestMemory:
    def test_it_matches_the_library(self) -> None:
        mine = make_pair_loss("xbm:contrastive", memory_size=20, miner="multisimilarity", **SIZES)
        miner = pml_miners.MultiSimilarityMiner()
        other = pml.CrossBatchMemory(pml.ContrastiveLoss(), WIDTH, memory_size=20, miner=miner)
        for _ in range(4):  # 32 embeddings: the memory wraps around
            embeddings, labels = batch(8)
            got = value_and_gradients(lambda x, y=labels: mine(x, y), embeddings)
            assert_close(got, value_and_gradients(lambda x, y=labels: other(x, y), embeddings))

    def test_earlier_batches_count(self) -> None:
        loss, plain = make_pair_loss("xbm:supcon", **SIZES), make_pair_loss("supcon")
        first, second = batch(), batch()
        assert loss(*first).item() == pytest.approx(plain(*first).item(), rel=1e-5)
        assert loss(*second).item() != pytest.approx(plain(*second).item(), rel=1e-3)

    def test_it_resumes_bitwise(self) -> None:
        """Also with another number of batches seen, and through the wrap-around, whose mark is no tensor."""
        for seen in (1, 2, 5):
            loss, resumed = (make_pair_loss("triplet", memory_size=20, **SIZES) for _ in range(2))
            for _ in range(seen):
                loss(*batch(8))
            resumed.load_state_dict(loss.state_dict())
            for _ in range(3):
                embeddings, labels = batch(8)
                torch.testing.assert_close(resumed(embeddings, labels), loss(embeddings, labels))

    def test_evaluation_does_not_change_the_memory(self) -> None:
        loss = make_pair_loss("xbm:triplet", miner="batch_hard", **SIZES)
        loss(*batch())
        before = {name: value.clone() for name, value in loss.state_dict().items()}
        embeddings, labels = batch()
        got = loss.eval()(embeddings, labels)
        assert got.item() == pytest.approx(make_pair_loss("triplet", miner="batch_hard")(embeddings, labels).item())
        assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())

    def test_two_forward_passes_may_precede_the_backward(self) -> None:
        """With a plain product of embeddings autograd keeps the memory itself, which the next pass writes into."""
        distance = DotProductSimilarity(normalize_embeddings=False)
        loss = make_pair_loss("xbm:supcon", memory_size=20, distance=distance, **SIZES)
        inputs = [(x.requires_grad_(), y) for x, y in (batch(8) for _ in range(4))]
        sum(loss(x, y) for x, y in inputs).backward()
        assert all(x.grad.abs().max() > 0 for x, _ in inputs)

    def test_errors(self) -> None:
        with pytest.raises(BadArgument, match="memory_size=12"):
            make_pair_loss("triplet", memory_size=5, **SIZES)(*batch())
        with pytest.raises(BadArgument, match=r"These can: triplet"):
            make_pair_loss("xbm:proxy_nca", **SIZES)
        with pytest.raises(BadArgument, match="embedding_dim for the memory"):
            make_pair_loss("xbm:triplet")
        with pytest.raises(BadArgument, match="memory_size"):
            make_pair_loss("triplet", memory_size=0, **SIZES)


@pytest.mark.parametrize("name", metric_loss_names())
def test_all_losses_share_one_signature_and_learn(name: str) -> None:
    """A few steps on free embeddings bring the loss down, whatever it is."""
    loss = make_metric_loss(name, **SIZES)
    embeddings, labels = batch(16)
    embeddings.requires_grad_()
    optimizer = torch.optim.Adam([embeddings, *loss.parameters()], lr=0.03)
    before = loss(embeddings, labels, reduction="mean").item()
    for _ in range(30):
        optimizer.zero_grad()
        loss(embeddings, labels, reduction="mean").backward()
        optimizer.step()
    # A mean over the pairs that still violate the margin falls slowly, or to nothing.
    assert loss(embeddings, labels).item() < 0.95 * before
    if loss.per_sample:
        assert loss(embeddings, labels, reduction="none").shape == (16,)
    else:
        with pytest.raises(BadArgument, match="per_sample"):
            loss(embeddings, labels, reduction="sum")


def test_margin_and_scale_reach_the_loss() -> None:
    arc = make_metric_loss("ArcFace", margin=0.2, scale=30.0, **SIZES)
    assert isinstance(arc, ArcFaceLoss)
    assert (arc.margin, arc.scale) == (0.2, 30.0)
    sub = make_metric_loss("subcenter", options={"sub_centers": 5}, **SIZES)
    assert isinstance(sub, SubCenterArcFaceLoss)
    assert sub.weight.shape == (20, WIDTH)
    assert make_metric_loss("cosface", **SIZES).margin == 0.35
    assert isinstance(make_metric_loss("softmax", **SIZES), NormFaceLoss)
    assert make_metric_loss("triplet", margin=0.7, **SIZES).loss.margin == 0.7
    assert make_metric_loss("Multi-Similarity", options={"alpha": 3}, **SIZES).loss.alpha == 3
    assert make_metric_loss("xbm:triplet", options={"memory_size": 64}, **SIZES).loss.memory_size == 64


class Own(nn.Module):
    """A loss somebody wrote: pulls embeddings of a class to its own center."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(CLASSES, WIDTH))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings - self.centers[labels]).square().mean()


def test_a_custom_module() -> None:
    own = Own()
    loss = make_metric_loss(own, **SIZES)
    embeddings, labels = batch()
    torch.testing.assert_close(loss(embeddings, labels), own(embeddings, labels))
    assert [id(p) for p in loss.parameters()] == [id(own.centers)]
    mined = make_metric_loss(pml.TripletMarginLoss(), miner=pml_miners.BatchHardMiner(), **SIZES)
    assert mined(embeddings, labels) == make_pair_loss("triplet", miner="hard")(embeddings, labels)
    arc = ArcFaceLoss(WIDTH, CLASSES)
    assert make_metric_loss(arc, **SIZES) is arc


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_metric_loss("arcfac", **SIZES), "Did you mean 'arcface'"),
        (lambda: make_metric_loss("tripelt", **SIZES), "Did you mean 'triplet'"),
        (lambda: make_metric_loss("zzz", **SIZES), "Known are arcface"),
        (lambda: make_metric_loss(ArcFaceLoss, **SIZES), "or a module"),
        (lambda: make_metric_loss("arcface", miner="hard", **SIZES), "no miner"),
        (lambda: make_metric_loss("arcface", options={"sub_centres": 2}, **SIZES), "an option of 'arcface'"),
        (lambda: make_metric_loss("subcenter", options={"sub_centres": 2}, **SIZES), "sub_centers"),
        (lambda: make_metric_loss("normface", margin=0.1, **SIZES), "an option of 'normface'"),
        (lambda: make_metric_loss("arcface", margin=0.1, options={"margin": 0.2}, **SIZES), "once"),
        (lambda: make_metric_loss("supcon", margin=0.1, **SIZES), "temperature"),
        (lambda: make_metric_loss("triplet", scale=3.0, **SIZES), "no scale"),
        (lambda: make_metric_loss(Own(), margin=0.1, **SIZES), "no settings for a module"),
        (lambda: make_metric_loss(ArcFaceLoss(8, 4), miner="hard", **SIZES), "no miner"),
        (lambda: make_pair_loss("arcface"), "a pair loss"),
        (lambda: make_pair_loss("suponc"), "Did you mean 'supcon'"),
        (lambda: make_pair_loss("triplet", margn=0.1), "Did you mean 'margin'"),
        (lambda: make_pair_loss("softtriple", embedding_dim=8), "num_classes"),
        (lambda: make_pair_loss("softtriple", num_classes=0, embedding_dim=8), "num_classes"),
        (lambda: make_miner("semi_hrad"), "Did you mean 'semihard'"),
        (lambda: make_miner("angular", angel=3), "Did you mean 'angle'"),
        (lambda: make_pair_loss("triplet")(torch.ones(2, 3), torch.ones(3)), "labels"),
        (lambda: PairLoss(nn.PairwiseDistance())(torch.ones(3, 3), torch.ones(3)), "scalar"),
    ],
)
def test_bad_arguments_are_rejected(make: object, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make()
