"""One way to every loss of metric learning: by name, or a module of one's own.

Owns the names of the margin losses and the meaning of `margin` and `scale` for each loss. All that comes out is called
``loss(embeddings, labels, reduction="mean")`` and says in `per_sample` whether it has values per sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.losses.margin import ArcFaceLoss, CosFaceLoss, NormFaceLoss, SubCenterArcFaceLoss
from trainformer.losses.pairs import (
    PairLoss,
    is_pair_loss,
    make_miner,
    make_pair_loss,
    pair_loss_names,
    pair_loss_options,
)

_MARGIN_LOSSES: dict[str, type[nn.Module]] = {
    "arcface": ArcFaceLoss,
    "cosface": CosFaceLoss,
    "subcenter": SubCenterArcFaceLoss,
    "softmax": NormFaceLoss,
    "normface": NormFaceLoss,
}


def metric_loss_names() -> list[str]:
    """Names that `make_metric_loss` knows; "xbm:" before the name of a pair loss gives it a memory of earlier batches.

    >>> "arcface" in metric_loss_names() and "triplet" in metric_loss_names()
    True
    """
    return sorted([*_MARGIN_LOSSES, *pair_loss_names()])


def make_metric_loss(
    loss: str | nn.Module,
    *,
    embedding_dim: int,
    num_classes: int,
    margin: float | None = None,
    scale: float | None = None,
    miner: str | nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A loss for metric learning, called with (embeddings, labels, reduction="mean").

    `margin` and `scale` are the loss's own defaults unless given; `miner` chooses pairs, and `options` go to the
    loss's constructor (`sub_centers`, `temperature`, `memory_size`, ...). A module of one's own is called with
    (embeddings, labels), and with what the miner found where there is a miner.

    >>> loss = make_metric_loss("cosface", embedding_dim=8, num_classes=3, margin=0.2)
    >>> loss.margin, loss.per_sample
    (0.2, True)
    """
    given = dict(options or {})
    numbers = {name: value for name, value in (("margin", margin), ("scale", scale)) if value is not None}
    if isinstance(loss, nn.Module):
        return _own(loss, miner, {**numbers, **given})
    if not isinstance(loss, str):
        names = ", ".join(metric_loss_names())
        raise BadArgument(expected("the name of a loss, or a module", loss, f"Known are {names}."))
    twice = sorted(set(numbers) & set(given))
    if twice:
        raise BadArgument(expected("each setting once", f"{twice[0]} both as argument and in options"))
    if loss.lower() in _MARGIN_LOSSES:
        return _margin_loss(loss.lower(), miner, {**numbers, **given}, embedding_dim, num_classes)
    if not is_pair_loss(loss):
        known = metric_loss_names()
        hint = did_you_mean(loss.lower().removeprefix("xbm:"), known) or f"Known are {', '.join(known)}."
        raise BadArgument(expected("the name of a loss", loss, hint))
    unfit = sorted(set(numbers) - pair_loss_options(loss))
    if unfit:
        do = f"It takes {', '.join(sorted(pair_loss_options(loss)))}, as options={{...}}."
        raise BadArgument(expected(f"no {unfit[0]} for {loss!r}, which has none", numbers[unfit[0]], do))
    sizes = {"embedding_dim": embedding_dim, "num_classes": num_classes}
    return make_pair_loss(loss, miner=miner, **{**sizes, **numbers, **given})


def _margin_loss(
    name: str, miner: str | nn.Module | None, settings: dict[str, Any], embedding_dim: int, num_classes: int
) -> nn.Module:
    made = _MARGIN_LOSSES[name]
    if miner is not None:
        do = f"A margin loss compares with class weights. Losses over pairs are {', '.join(pair_loss_names())}."
        raise BadArgument(expected(f"no miner for {name!r}, which has no pairs to choose from", miner, do))
    allowed = set(inspect.signature(made).parameters) - {"embedding_dim", "num_classes"}
    for option in settings:
        if option not in allowed:
            hint = did_you_mean(option, allowed) or f"It takes {', '.join(sorted(allowed))}."
            raise BadArgument(expected(f"an option of {name!r}", option, hint))
    return made(embedding_dim, num_classes, **settings)


def _own(loss: nn.Module, miner: str | nn.Module | None, settings: dict[str, Any]) -> nn.Module:
    """A module of the user's, with the signature of all others."""
    if settings:
        do = "Build the module with the values it shall have."
        raise BadArgument(expected("no settings beside a module", ", ".join(sorted(settings)), do))
    if hasattr(loss, "per_sample"):
        if miner is not None:
            raise BadArgument(expected("no miner for a loss that has the signature already", miner))
        return loss
    return PairLoss(loss, None if miner is None else make_miner(miner))
