"""Linear probe: the accuracy of a linear classifier on frozen embeddings, with all labels or a few per class.

Fits multinomial logistic regression to its optimum, without a learning rate or a seed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.eval.neighbours import check_embeddings, check_labels, true_float32

logger = logging.getLogger(__name__)

# Separates this random stream from others with the same seed.
_STREAM = 0x9B0BE

# Up to 512 MB of training embeddings in float64, above that in float32.
_DOUBLE_CELLS = 2**26


@dataclass(frozen=True)
class ProbeResult:
    """A fitted linear classifier for raw embeddings: standardisation is folded into `weight` and `bias`.

    `classes` are the labels in the order of the rows of `weight`. `loss` is the training objective per sample.
    """

    accuracy: float
    train_accuracy: float
    loss: float
    weight: Tensor
    bias: Tensor
    classes: Tensor
    iterations: int
    converged: bool

    def scores(self, embeddings: Tensor) -> Tensor:
        """The logits (N, classes)."""
        rows = check_embeddings(embeddings).to(self.weight)
        return torch.addmm(self.bias, rows, self.weight.T)

    def predict(self, embeddings: Tensor) -> Tensor:
        """The label of each row."""
        return self.classes[self.scores(embeddings).argmax(1)]


def linear_probe(
    train_embeddings: Tensor,
    train_labels: Tensor,
    test_embeddings: Tensor,
    test_labels: Tensor,
    *,
    l2: float = 1.0,
    standardize: bool = True,
    max_iter: int = 1000,
) -> ProbeResult:
    """Fit logistic regression on the training embeddings and evaluate it on the test embeddings.

    Minimises the summed cross-entropy + l2 / 2 * |W|^2; the bias is not penalised. ``l2=1`` is ``C=1`` in scikit-learn.
    `standardize` scales every dimension to mean 0 and standard deviation 1 over the training set. Deterministic: the
    problem is convex, and L-BFGS starts at 0. A test label that is not in the training set counts as wrong.

    >>> train, test = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([[0.4], [4.4]])
    >>> linear_probe(train, torch.tensor([3, 3, 8, 8]), test, torch.tensor([3, 8])).accuracy
    1.0
    """
    train = check_embeddings(train_embeddings, "train_embeddings")
    test = check_embeddings(test_embeddings, "test_embeddings")
    labels = check_labels(train_labels, len(train), "train_labels").to(train.device)
    wanted = check_labels(test_labels, len(test), "test_labels").to(train.device)
    _check_arguments(train, test, l2, max_iter)
    classes, targets = labels.unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError(expected("train_labels of at least 2 classes", f"{len(classes)} class"))

    precise = train.numel() <= _DOUBLE_CELLS and train.device.type != "mps"
    train = train.to(torch.float64 if precise else torch.float32)
    mean, scale = train.mean(0), train.std(0, correction=0)
    # A constant dimension carries no information: do not amplify its rounding errors.
    scale = scale.masked_fill(scale <= 1e-6 * train.abs().amax(0), 1)
    if not standardize:
        # Centering changes only the bias, and a common scale is undone in the penalty: the same minimum in far fewer
        # steps.
        scale = (train - mean).square().mean().sqrt().clamp(min=torch.finfo(train.dtype).tiny).expand_as(mean)
        l2 = l2 / scale[0].item() ** 2
    # Evaluation runs in inference mode, whose tensors cannot require gradients: leave it for the fit.
    with true_float32(train.device), torch.inference_mode(False), torch.enable_grad():
        fit = _fit((train - mean) / scale, targets.clone(), len(classes), l2, max_iter)
    weight, bias, loss, iterations, converged = fit
    weight = weight / scale
    found = ProbeResult(0.0, 0.0, loss, weight, bias - weight @ mean, classes, iterations, converged)
    with true_float32(train.device):
        accuracy = (found.predict(test.to(train.device)) == wanted).double().mean().item()
        train_accuracy = (found.predict(train) == labels).double().mean().item()
    return replace(found, accuracy=accuracy, train_accuracy=train_accuracy)


def label_subset(labels: Tensor, per_class: int, seed: int = 0) -> Tensor:
    """Sorted indices of `per_class` random samples of every class.

    The same seed gives the same subset; a larger `per_class` gives a superset.

    >>> labels = torch.tensor([0, 1, 0, 1, 0, 1])
    >>> labels[label_subset(labels, 2)].bincount()
    tensor([2, 2])
    """
    check_count("per_class", per_class, do="Pass per_class=10.")
    values = check_labels(labels, len(labels)).cpu().numpy()
    if len(values) == 0:
        raise DataError(expected("at least 1 label", 0))
    names, classes, counts = np.unique(values, return_inverse=True, return_counts=True)
    if counts.min() < per_class:
        rare = int(counts.argmin())
        received = f"{int(counts[rare])} of class {int(names[rare])}"
        do = f"Pass per_class={int(counts[rare])}, or leave that class out."
        raise DataError(expected(f"at least {per_class} samples of every class", received, do))
    order = np.random.default_rng([seed, _STREAM]).permutation(len(values))
    order = order[np.argsort(classes[order], kind="stable")]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.sort(order[rank < per_class])).to(labels.device)


def _fit(
    rows: Tensor, targets: Tensor, classes: int, l2: float, max_iter: int
) -> tuple[Tensor, Tensor, float, int, bool]:
    """Minimise mean cross-entropy + l2 / (2 N) |W|^2. Returns weight, bias, loss, iterations, and convergence."""
    weight = rows.new_zeros(classes, rows.shape[1]).requires_grad_()
    bias = rows.new_zeros(classes).requires_grad_()
    limit = 1e-8 if rows.dtype == torch.float64 else 1e-5
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iter,
        max_eval=2 * max_iter,
        tolerance_grad=limit,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = l2 / (2 * len(rows)) * weight.square().sum()
        loss = F.cross_entropy(torch.addmm(bias, rows, weight.T), targets) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    loss = closure().item()
    assert weight.grad is not None
    assert bias.grad is not None
    gradient = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    iterations = int(optimizer.state[weight]["n_iter"])
    # Due to rounding, the line search can stall a little above the limit.
    converged = gradient <= 10 * limit
    if not converged:
        logger.warning(
            "The linear probe stopped after %d iterations with a gradient of %.1e. Raise max_iter (now %d) or l2.",
            iterations,
            gradient,
            max_iter,
        )
    return weight.detach(), bias.detach(), loss, iterations, converged


def _check_arguments(train: Tensor, test: Tensor, l2: float, max_iter: int) -> None:
    if train.shape[1] != test.shape[1]:
        widths = f"{train.shape[1]} and {test.shape[1]}"
        raise BadArgument(expected("train_embeddings and test_embeddings of one width", widths))
    if not 0 <= l2 < float("inf"):
        raise BadArgument(expected("l2 to be 0 or a positive number", l2, "Pass l2=1.0."))
    check_count("max_iter", max_iter, do="Pass max_iter=1000.")
