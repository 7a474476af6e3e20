"""Samplers by name: what `Trainer(sampler=...)` takes, and what makes it wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.data.samplers import (
    REPEATS,
    ClassBalancedSampler,
    EpochSampler,
    ListedSampler,
    PKSampler,
    RepeatedAugmentSampler,
    known_labels,
    known_size,
)

_K = 4  # samples per class of "pk", where the word is all that is said
_FORMS = {
    "balanced": "'balanced'",
    "length": "'length'",
    "pk": "'pk', 'pk:K' (K samples per class)",
    "repeated": "'repeated', 'repeated:N' (N times each)",
}


def make_sampler(spec: Any, dataset: Any, *, batch_size: int, seed: int, accumulation: int = 1) -> Any:
    """The sampler that `spec` describes, or None for None. What comes back has `order(epoch, seed)` and a length.

    `spec` is `"balanced"`, `"pk"` or `"pk:K"` (batches of `batch_size // K` classes with K samples each; left out, K is
    at least 4 and such that there are enough classes), `"repeated"` or `"repeated:N"`, `"length"` (batches of tokenised
    sequences of like lengths), a sampler of this package or of torch, or a function of the data set that returns one.

    >>> sampler = make_sampler("pk:2", [(x, x % 3) for x in range(12)], batch_size=4, seed=0)
    >>> sampler.p, sampler.k
    (2, 2)
    """
    if spec is None:
        return None
    if isinstance(spec, str):
        if spec == "length":
            from trainformer.data.text.batches import LengthGroupedSampler

            # By optimizer steps: what one holds does not depend on the micro-batches it is computed in.
            return LengthGroupedSampler(dataset, batch_size * accumulation, seed=seed, num_replicas=1, rank=0)
        return _named(spec, dataset, batch_size, seed)
    if hasattr(spec, "order") and not isinstance(spec, type):
        if isinstance(spec, PKSampler) and spec.batch_size != batch_size:
            raise BadArgument(
                expected(
                    f"batch_size={spec.batch_size}, for a PKSampler of p={spec.p} classes with k={spec.k} samples each",
                    batch_size,
                    f"Pass batch_size={spec.batch_size}, or sampler='pk:{spec.k}', which chooses p by the batch size.",
                )
            )
        return spec.whole() if isinstance(spec, EpochSampler) else spec
    if isinstance(spec, Iterable) and not isinstance(spec, type) and hasattr(spec, "__len__"):
        return ListedSampler(spec, known_size(dataset), seed=seed, num_replicas=1, rank=0)
    if callable(spec):
        return _made_by(spec, dataset, batch_size, seed)
    raise BadArgument(
        expected(
            f"sampler to be one of {', '.join(map(repr, _FORMS))}, a sampler with a length, or a function of the data",
            type(spec).__name__,
        )
    )


def _named(spec: str, dataset: Any, batch_size: int, seed: int) -> EpochSampler:
    word, _, number = spec.partition(":")
    if word not in _FORMS or (number and word in ("balanced", "length")):
        forms = f"{did_you_mean(word, _FORMS)} Known: {', '.join(_FORMS.values())}."
        raise BadArgument(expected("the name of a sampler", spec, forms.strip()))
    if number and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise BadArgument(expected(f"a whole number from 1 in '{word}:N'", spec, f"Pass '{word}:4', for instance."))
    if word == "balanced":
        return ClassBalancedSampler(dataset, seed=seed, num_replicas=1, rank=0)
    if word == "repeated":
        repeats = int(number) if number else REPEATS
        return RepeatedAugmentSampler(known_size(dataset), repeats, seed=seed, num_replicas=1, rank=0)
    classes = len(np.unique(known_labels(dataset, "PKSampler")))
    k = int(number) if number else _suitable_k(batch_size, classes)
    if batch_size % k:
        raise BadArgument(
            expected(
                f"batch_size to be a multiple of {k}, the number of samples per class of sampler={spec!r}",
                batch_size,
                f"Pass batch_size={max(1, batch_size // k) * k}, for instance.",
            )
        )
    if batch_size // k > classes:
        raise BadArgument(
            expected(
                f"at least {batch_size // k} classes for sampler={spec!r} with batch_size={batch_size}",
                classes,
                f"Pass sampler='pk:{_suitable_k(batch_size, classes)}', or batch_size={classes * k}.",
            )
        )
    return PKSampler(dataset, batch_size // k, k, seed=seed, num_replicas=1, rank=0)


def _suitable_k(batch_size: int, classes: int) -> int:
    """The smallest number of samples per class from 4 on that divides the batch, if not the largest below that.

    A batch has at least two classes: with one there would be nothing to tell apart.
    """
    fitting = [k for k in range(2, batch_size) if batch_size % k == 0 and 2 <= batch_size // k <= classes]
    return min((k for k in fitting if k >= _K), default=max(fitting, default=_K))


def _made_by(spec: Callable[[Any], Any], dataset: Any, batch_size: int, seed: int) -> Any:
    made = spec(dataset)
    if made is None or isinstance(made, str) or (callable(made) and not hasattr(made, "__iter__")):
        name = getattr(spec, "__name__", type(spec).__name__)
        raise BadArgument(expected(f"{name}(dataset) to return a sampler", made))
    return make_sampler(made, dataset, batch_size=batch_size, seed=seed)
