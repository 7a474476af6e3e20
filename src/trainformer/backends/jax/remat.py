"""Rematerialisation: which intermediate values are kept for the backward pass, by name.

A model that can be told computes its layers again one by one; for others `step` does it with the whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from trainformer.core.errors import BadArgument, did_you_mean, expected

_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
_ALIASES = {
    "nothing": "nothing_saveable",
    "full": "nothing_saveable",
    "everything": "everything_saveable",
    "dots": "dots_saveable",
    "dots_no_batch": "dots_with_no_batch_dims_saveable",
}
_OFF = ("", "none", "no", "off", "false")


def resolve_remat(policy: Any) -> Callable[..., Any] | None:
    """The policy of `jax.checkpoint` by its name, None where nothing is to be computed again. Functions pass through.

    ``nothing_saveable`` saves most memory, ``dots_saveable`` keeps the results of matrix products. True means the
    former.

    >>> resolve_remat("dots") is jax.checkpoint_policies.dots_saveable, resolve_remat("none")
    (True, None)
    """
    if policy is None or policy is False:
        return None
    if policy is True:
        policy = "nothing_saveable"
    if callable(policy):
        return policy
    word = str(policy).lower()
    if word in _OFF:
        return None
    name = _ALIASES.get(word, word)
    if name not in _POLICIES:
        known = ("none", *_POLICIES, *_ALIASES)
        advice = did_you_mean(word, known) or f"Use one of {', '.join(known)}."
        raise BadArgument(expected("the name of a checkpoint policy", policy, advice))
    return getattr(jax.checkpoint_policies, name)


def configure_model(model: Any, **how: Any) -> bool:
    """Tell a model how to compute (`remat`, `attention`, `unroll`). False: it is not of the kind that can be told.

    Then `make_train_step(..., remat=...)` computes the whole forward pass again instead of single layers.
    """
    configure = getattr(model, "configure", None)
    if configure is None:
        return False
    if "remat" in how:
        how["remat"] = resolve_remat(how["remat"])
    configure(**how)
    return True
