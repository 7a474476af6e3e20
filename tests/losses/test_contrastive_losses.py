"""Contrastive losses against lightly, pytorch-metric-learning and loops written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import NTXentLoss as LightlyNTXent
from loss_tools import HALVES, assert_close, value_and_gradients
from pytorch_metric_learning import losses as pml
from torch import Tensor

from trainformer.core import BadArgument
from trainformer.losses import NTXentLoss, infonce_with_queue, moco_v3_loss, nt_xent_loss


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return 3 * torch.randn(*shape, dtype=dtype)


def every_loss(*inputs: Tensor, reduction: str = "mean") -> dict[str, Tensor]:
    """All losses of the module, from four matrices and a queue."""
    a, b, c, d, queue = inputs
    return {
        "ntxent": nt_xent_loss(a, b, 0.2, reduction=reduction),
        "queue": infonce_with_queue(a, b, queue, 0.2, reduction=reduction),
        "moco_v3": moco_v3_loss(a, b, c, d, 0.2, reduction=reduction),
    }


@pytest.mark.parametrize("size", [2, 16, 33])
@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.5])
def test_nt_xent_matches_two_libraries(temperature: float, size: int) -> None:
    z1, z2 = rows(size, 24), rows(size, 24)
    mine = value_and_gradients(lambda a, b: nt_xent_loss(a, b, temperature), z1, z2)
    assert_close(mine, value_and_gradients(LightlyNTXent(temperature), z1, z2))
    other = pml.SelfSupervisedLoss(pml.NTXentLoss(temperature))
    assert_close(mine, value_and_gradients(lambda a, b: other(a, b), z1, z2))


def test_the_rows_of_nt_xent_are_those_of_a_loop() -> None:
    z1, z2 = rows(5, 8, dtype=torch.float64), rows(5, 8, dtype=torch.float64)
    every = F.normalize(torch.cat([z1, z2]))
    want = torch.zeros(5, dtype=torch.float64)
    for i in range(10):
        others = [math.exp(every[i] @ every[j] / 0.3) for j in range(10) if j != i]
        want[i % 5] -= math.log(math.exp(every[i] @ every[(i + 5) % 10] / 0.3) / sum(others)) / 2
    torch.testing.assert_close(nt_xent_loss(z1, z2, 0.3, reduction="none"), want)


def test_a_single_image_has_no_loss_and_no_gradient() -> None:
    value, *gradients = value_and_gradients(nt_xent_loss, rows(1, 8), rows(1, 8))
    assert value == 0
    assert all(torch.equal(g, torch.zeros(1, 8)) for g in gradients)


def test_the_module_matches_the_function() -> None:
    z1, z2 = rows(6, 8), rows(6, 8)
    torch.testing.assert_close(NTXentLoss(0.3)(z1, z2, reduction="none"), nt_xent_loss(z1, z2, 0.3, reduction="none"))


@pytest.mark.parametrize("temperature", [0.07, 0.2])
def test_the_queue_matches_the_memory_bank_of_lightly(temperature: float) -> None:
    """Over several steps, so that keys of earlier batches are negatives; lightly needs K to be a multiple of B."""
    bank = LightlyNTXent(temperature, memory_bank_size=(32, 12))
    queue = bank.memory_bank.bank.clone()
    for step in range(6):
        queries, keys = rows(8, 12), rows(8, 12)
        mine = value_and_gradients(lambda q, k=keys: infonce_with_queue(q, k, queue, temperature), queries)
        assert_close(mine, value_and_gradients(lambda q, k=keys: bank(q, k), queries))
        at = step * 8 % 32
        queue[at : at + 8] = F.normalize(keys)
        torch.testing.assert_close(queue, bank.memory_bank.bank)


def test_the_queue_may_change_before_the_backward_pass() -> None:
    queries, keys, queue = rows(4, 8).requires_grad_(), rows(4, 8).requires_grad_(), F.normalize(rows(16, 8))
    (want,) = torch.autograd.grad(infonce_with_queue(queries, keys, queue), queries)
    value = infonce_with_queue(queries, keys, queue)
    queue[:4] = F.normalize(rows(4, 8))
    value.backward()
    torch.testing.assert_close(queries.grad, want)
    assert keys.grad is None


def test_a_far_away_positive_keeps_its_gradient() -> None:
    """At a low temperature the exponentials overflow single precision unless they are shifted."""
    query, key, queue = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    value, gradient = value_and_gradients(lambda q: infonce_with_queue(q, key, queue, 0.001), query)
    assert value.item() == pytest.approx(2000)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("temperature", [0.1, 0.2, 1.0])
def test_moco_v3_matches_the_library(temperature: float) -> None:
    q1, q2, k1, k2 = (rows(9, 16) for _ in range(4))
    other = pml.SelfSupervisedLoss(pml.NTXentLoss(temperature), symmetric=False)
    mine = value_and_gradients(lambda a, b: moco_v3_loss(a, b, k1, k2, temperature), q1, q2)

    def theirs(a: Tensor, b: Tensor) -> Tensor:
        # The library's NT-Xent takes queries of one view against keys of the other; the factor is the paper's.
        return 2 * temperature * (other(a, k2) + other(b, k1))

    assert_close(mine, value_and_gradients(theirs, q1, q2))


def test_moco_v3_matches_the_pseudocode_of_the_paper() -> None:
    q1, q2, k1, k2 = (rows(6, 8, dtype=torch.float64) for _ in range(4))

    def contrast(q: Tensor, k: Tensor) -> Tensor:
        logits = torch.einsum("nc,mc->nm", F.normalize(q), F.normalize(k)) / 0.2
        return F.cross_entropy(logits, torch.arange(6)) * 2 * 0.2

    torch.testing.assert_close(moco_v3_loss(q1, q2, k1, k2, 0.2), contrast(q1, k2) + contrast(q2, k1))


def test_keys_of_moco_v3_get_no_gradient() -> None:
    inputs = [rows(4, 8).requires_grad_() for _ in range(4)]
    moco_v3_loss(*inputs).backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert inputs[2].grad is None
    assert inputs[3].grad is None


@pytest.mark.parametrize("name", ["ntxent", "queue", "moco_v3"])
def test_reductions_are_consistent(name: str) -> None:
    inputs = [rows(6, 8) for _ in range(4)] + [F.normalize(rows(10, 8))]
    each, total, mean = (every_loss(*inputs, reduction=r)[name] for r in ("none", "sum", "mean"))
    assert each.shape == (6,)
    torch.testing.assert_close(total, each.sum())
    torch.testing.assert_close(mean, each.mean())


@pytest.mark.parametrize("name", ["ntxent", "queue", "moco_v3"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    fixed = [rows(3, 4, dtype=torch.float64) for _ in range(2)] + [F.normalize(rows(5, 4, dtype=torch.float64))]
    a = rows(3, 4, dtype=torch.float64).requires_grad_()
    b = rows(3, 4, dtype=torch.float64).requires_grad_(name != "queue")
    assert torch.autograd.gradcheck(lambda x, y: every_loss(x, y, *fixed)[name], (a, b))


@pytest.mark.parametrize("name", ["ntxent", "queue", "moco_v3"])
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_does_not_reduce_precision(name: str, dtype: torch.dtype) -> None:
    inputs = [rows(6, 8).to(dtype) for _ in range(4)] + [F.normalize(rows(10, 8))]
    inputs[0][0] = inputs[1][0]  # a pair that is one already
    inputs[0][1] = -inputs[1][1]  # and one that could not be farther apart
    inputs[0][2] = 0
    low = value_and_gradients(lambda a, b: every_loss(a, b, *inputs[2:])[name], *inputs[:2], autocast=dtype)
    exact = [x.float() for x in inputs]
    want = value_and_gradients(lambda a, b: every_loss(a, b, *exact[2:])[name], *exact[:2])
    assert low[0].dtype is torch.float32
    torch.testing.assert_close(low[0], want[0])
    assert all(torch.isfinite(g).all() for g in low[1:])
    assert_close(low[1:], want[1:], relative=torch.finfo(dtype).eps)


def test_it_compiles_without_graph_breaks() -> None:
    inputs = [rows(6, 8) for _ in range(4)] + [F.normalize(rows(10, 8))]
    torch.compiler.reset()
    got = torch.compile(every_loss, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(got, every_loss(*inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z: nt_xent_loss(z, z, temperature=0), "temperature"),
        (lambda z: NTXentLoss(-1.0), "temperature"),
        (lambda z: nt_xent_loss(z, z[:2]), r"z1 \(4, 8\) and z2 \(2, 8\)"),
        (lambda z: nt_xent_loss(z, z, reduction="avg"), "reduction"),
        (lambda z: infonce_with_queue(z, z, z.T), r"\(K, 8\)"),
        (lambda z: infonce_with_queue(z, z[:, :3], z), "keys"),
        (lambda z: moco_v3_loss(z, z, z, z[:3]), "k2"),
    ],
)
def test_bad_arguments_are_rejected(make: object, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make(torch.randn(4, 8))
