"""Metric-learning losses by name: margin losses of this package, pair losses and miners of pytorch-metric-learning.

Owns the names, the argument checks, and `PairLoss`, which gives each pair loss the signature of the margin losses,
float32 arithmetic, gathering over ranks, and a cross-batch memory that is saved with the weights. Every loss built here
is called as ``loss(embeddings, labels, reduction="mean")``; its `per_sample` tells whether it has per-sample values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, check_count, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.losses.margin import ArcFaceLoss, CosFaceLoss, NormFaceLoss, SubCenterArcFaceLoss
from trainformer.losses.numerics import Reduction, no_autocast, upcast
from trainformer.utils.distributed import gather_row_counts, gather_rows

_MEMORY_PREFIX = "xbm:"
_MEMORY_SIZE = 1024

_MARGIN_LOSSES: dict[str, type[nn.Module]] = {
    "arcface": ArcFaceLoss,
    "cosface": CosFaceLoss,
    "subcenter": SubCenterArcFaceLoss,
    "softmax": NormFaceLoss,
    "normface": NormFaceLoss,
}


@dataclass(frozen=True)
class _Entry:
    """A loss or miner of pytorch-metric-learning."""

    class_name: str
    has_proxies: bool = False
    preset: dict[str, Any] = field(default_factory=dict)


_PAIR_LOSSES = {
    "triplet": _Entry("TripletMarginLoss"),
    "contrastive": _Entry("ContrastiveLoss"),
    "supcon": _Entry("SupConLoss"),
    "multisimilarity": _Entry("MultiSimilarityLoss"),
    "circle": _Entry("CircleLoss"),
    "ntxent": _Entry("NTXentLoss"),
    "proxy_anchor": _Entry("ProxyAnchorLoss", has_proxies=True),
    "proxy_nca": _Entry("ProxyNCALoss", has_proxies=True),
    "softtriple": _Entry("SoftTripleLoss", has_proxies=True),
}
_MINERS = {
    "multisimilarity": _Entry("MultiSimilarityMiner"),
    "batch_hard": _Entry("BatchHardMiner"),
    "hard": _Entry("BatchHardMiner"),
    "semihard": _Entry("TripletMarginMiner", preset={"type_of_triplets": "semihard"}),
    "triplet_margin": _Entry("TripletMarginMiner"),
    "angular": _Entry("AngularMiner"),
}


def metric_loss_names() -> list[str]:
    """Names that `make_metric_loss` accepts; the prefix "xbm:" adds a cross-batch memory to a pair loss.

    >>> "arcface" in metric_loss_names() and "triplet" in metric_loss_names()
    True
    """
    return sorted([*_MARGIN_LOSSES, *_PAIR_LOSSES])


def pair_loss_names() -> list[str]:
    """Names that `make_pair_loss` accepts.

    >>> pair_loss_names()[:3]
    ['circle', 'contrastive', 'multisimilarity']
    """
    return sorted(_PAIR_LOSSES)


def miner_names() -> list[str]:
    """Names that `make_miner` accepts.

    >>> miner_names()[:3]
    ['angular', 'batch_hard', 'hard']
    """
    return sorted(_MINERS)


def is_pair_loss(name: str) -> bool:
    """Whether `name` is the name of a pair loss, in any spelling.

    >>> is_pair_loss("Multi-Similarity"), is_pair_loss("xbm:triplet"), is_pair_loss("arcface")
    (True, True, False)
    """
    return _plain(name.removeprefix(_MEMORY_PREFIX)) in {_plain(known) for known in _PAIR_LOSSES}


# -- pair losses -------------------------------------------------------------------------------------------


class PairLoss(nn.Module):
    """Wraps any scalar loss called with (embeddings, labels): float32, an optional miner, rows of all ranks.

    `loss` is a module of pytorch-metric-learning or your own; `miner` returns what the loss takes as its third
    argument. A pair loss averages over the active pairs, so "mean" is the only reduction. A batch without valid pairs
    has loss 0, with a graph and zero gradients.

    With `gather` each rank computes the loss over the rows of all ranks. It is the same on each, so any weighted mean
    of the ranks' gradients is the gradient of that loss.
    """

    per_sample = False

    def __init__(self, loss: nn.Module, miner: nn.Module | None = None, *, gather: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner
        self.gather = gather

    def forward(self, embeddings: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of embeddings (B, D) with class indices (B,)."""
        if reduction != "mean":
            do = "A loss over pairs has no values per sample (`per_sample` is False)."
            raise BadArgument(expected("reduction='mean'", reduction, do))
        if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
            received = f"embeddings {tuple(embeddings.shape)} and labels {tuple(labels.shape)}"
            raise BadArgument(expected("embeddings (B, D) and labels (B,)", received))
        with no_autocast(embeddings):
            rows = self._upcast(embeddings)
            if self.gather:
                # Without the rows of padding batches: a cross-batch memory must be the same on all ranks.
                counts = gather_row_counts(rows)
                rows, labels = (gather_rows(part, counts)[: counts.total] for part in (rows, labels))
            value = self._value(rows, labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else value
            raise BadArgument(expected(f"{type(self.loss).__name__} to return a scalar tensor", got))
        return value.reshape(())

    def _value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.miner is None:
            return self.loss(embeddings, labels)
        return self.loss(embeddings, labels, self.miner(embeddings, labels))

    def _upcast(self, embeddings: Tensor) -> Tensor:
        # The dtype of the proxies wins, if there are any: pytorch-metric-learning would cast them in place to the dtype
        # of the embeddings, away from what the optimizer holds.
        for parameter in self.loss.parameters():
            if parameter.is_floating_point():
                return embeddings.to(parameter.dtype)
        return upcast(embeddings)


class MemoryPairLoss(PairLoss):
    """A `PairLoss` with a cross-batch memory (XBM, Wang et al., 2020): batches are also compared with earlier ones.

    The memory and its position are part of the state dict, so a resumed run continues bitwise. In evaluation mode the
    memory is neither read nor filled. With `gather` it holds the rows of all ranks and is the same on each.
    """

    memory_state: Tensor

    def __init__(self, memory: Any, *, gather: bool = True) -> None:
        super().__init__(memory, gather=gather)
        self.register_buffer("memory_state", torch.zeros(2, dtype=torch.int64))
        self.register_load_state_dict_post_hook(_restore_position)

    def _value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        memory: Any = self.loss
        if not self.training:
            mined = None if memory.miner is None else memory.miner(embeddings, labels)
            return memory.loss(embeddings, labels, mined)
        if len(embeddings) > memory.memory_size:
            do = f"Pass memory_size={len(embeddings)} or more."
            raise BadArgument(expected(f"at most {memory.memory_size} embeddings", len(embeddings), do))
        # Autograd keeps the memory for the backward pass, so the next batch is written into a copy.
        before, labels_before = memory.embedding_memory, memory.label_memory.clone()
        memory.embedding_memory = before.clone()
        value = memory(embeddings, labels)
        # A non-finite row would make every later loss NaN, or hide it: such rows keep their previous content.
        finite = memory.embedding_memory.isfinite().all(1)
        memory.embedding_memory = torch.where(finite.unsqueeze(1), memory.embedding_memory, before)
        memory.label_memory.copy_(torch.where(finite, memory.label_memory, labels_before))
        self.memory_state[0].fill_(memory.queue_idx)
        self.memory_state[1].fill_(int(memory.has_been_filled))
        return value


def _restore_position(module: nn.Module, _: object) -> None:
    """Restore the position of the memory, which it keeps in plain attributes, after loading a state dict."""
    assert isinstance(module, MemoryPairLoss)
    memory: Any = module.loss
    position, filled = module.memory_state.tolist()
    memory.queue_idx, memory.has_been_filled = position, bool(filled)


# -- by name -----------------------------------------------------------------------------------------------


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
    """A metric-learning loss, called with (embeddings, labels, reduction="mean").

    `margin` and `scale` default to the loss's own values; `miner` selects pairs, and `options` go to the constructor of
    the loss (`sub_centers`, `temperature`, `memory_size`, ...). Your own module is called with (embeddings, labels),
    plus the miner's output if there is a miner.

    >>> loss = make_metric_loss("cosface", embedding_dim=8, num_classes=3, margin=0.2)
    >>> loss.margin, loss.per_sample
    (0.2, True)
    """
    given = dict(options or {})
    numbers = {name: value for name, value in (("margin", margin), ("scale", scale)) if value is not None}
    if isinstance(loss, nn.Module):
        if numbers or given:
            names = ", ".join(sorted({**numbers, **given}))
            raise BadArgument(expected("no settings for a module", names, "Configure the module when you build it."))
        if not hasattr(loss, "per_sample"):
            return PairLoss(loss, None if miner is None else make_miner(miner))
        if miner is not None:
            raise BadArgument(expected("no miner for a loss that has the signature already", miner))
        return loss
    if not isinstance(loss, str):
        names = ", ".join(metric_loss_names())
        raise BadArgument(expected("the name of a loss, or a module", loss, f"Known are {names}."))
    twice = sorted(set(numbers) & set(given))
    if twice:
        raise BadArgument(expected("each setting once", f"{twice[0]} both as argument and in options"))
    if loss.lower() in _MARGIN_LOSSES:
        name, settings = loss.lower(), {**numbers, **given}
        cls = _MARGIN_LOSSES[name]
        if miner is not None:
            do = f"A margin loss compares with class weights. Losses over pairs are {', '.join(pair_loss_names())}."
            raise BadArgument(expected(f"no miner for {name!r}, which has no pairs to choose from", miner, do))
        _check_options(name, settings, set(inspect.signature(cls).parameters) - {"embedding_dim", "num_classes"})
        return cls(embedding_dim, num_classes, **settings)
    if not is_pair_loss(loss):
        known = metric_loss_names()
        hint = did_you_mean(loss.lower().removeprefix(_MEMORY_PREFIX), known) or f"Known are {', '.join(known)}."
        raise BadArgument(expected("the name of a loss", loss, hint))
    unfit = sorted(set(numbers) - _pair_loss_options(loss))
    if unfit:
        do = f"It takes {', '.join(sorted(_pair_loss_options(loss)))}, as options={{...}}."
        raise BadArgument(expected(f"no {unfit[0]} for {loss!r}, which has none", numbers[unfit[0]], do))
    sizes = {"embedding_dim": embedding_dim, "num_classes": num_classes}
    return make_pair_loss(loss, miner=miner, **{**sizes, **numbers, **given})


def make_pair_loss(
    name: str,
    *,
    embedding_dim: int | None = None,
    num_classes: int | None = None,
    miner: str | nn.Module | None = None,
    memory_size: int | None = None,
    **options: Any,
) -> PairLoss:
    """A loss of pytorch-metric-learning by name; `options` go to its constructor.

    Losses with proxies ("proxy_anchor", "proxy_nca", "softtriple") need `num_classes` and `embedding_dim`. The prefix
    "xbm:", or `memory_size`, adds a cross-batch memory, which needs `embedding_dim` too.

    >>> loss = make_pair_loss("supcon", temperature=0.2)
    >>> loss(torch.randn(4, 8), torch.tensor([0, 0, 1, 1])).shape
    torch.Size([])
    """
    bare = name.removeprefix(_MEMORY_PREFIX)
    if bare != name and memory_size is None:
        memory_size = _MEMORY_SIZE
    key = _known(bare, _PAIR_LOSSES, "a pair loss")
    library = _library("to compute losses over pairs")
    if _PAIR_LOSSES[key].has_proxies:
        for argument, value in {"num_classes": num_classes, "embedding_dim": embedding_dim}.items():
            if value is None:
                raise BadArgument(expected(f"{argument} for the proxies of {key!r}", None, f"Pass {argument}=."))
            check_count(argument, value)
        options = {"num_classes": num_classes, "embedding_size": embedding_dim, **options}
    loss = _built(library.losses, key, _PAIR_LOSSES[key], options)
    chosen = None if miner is None else make_miner(miner)
    if memory_size is None:
        return PairLoss(loss, chosen)
    memory = library.losses.CrossBatchMemory
    check_count("memory_size", memory_size)
    if type(loss).__name__ not in memory.supported_losses():
        able = [n for n, entry in _PAIR_LOSSES.items() if entry.class_name in memory.supported_losses()]
        raise BadArgument(expected("a loss that can use a memory", key, f"These can: {', '.join(able)}."))
    if embedding_dim is None:
        raise BadArgument(expected("embedding_dim for the memory", None, "Pass embedding_dim=."))
    check_count("embedding_dim", embedding_dim)
    return MemoryPairLoss(memory(loss, embedding_dim, memory_size=memory_size, miner=chosen))


def make_miner(name: str | nn.Module, **options: Any) -> nn.Module:
    """A miner of pytorch-metric-learning by name; `options` go to its constructor. A module is returned unchanged.

    >>> make_miner("semihard", margin=0.1).margin
    0.1
    """
    if isinstance(name, nn.Module):
        return name
    key = _known(name, _MINERS, "a miner")
    return _built(_library("to mine pairs").miners, key, _MINERS[key], options)


def _library(why: str) -> ModuleType:
    library = require("pytorch_metric_learning", "metric", why)
    require("pytorch_metric_learning.losses", "metric", why)
    require("pytorch_metric_learning.miners", "metric", why)
    return library


def _plain(name: str) -> str:
    """One spelling for "multi_similarity", "MultiSimilarity" and "multi-similarity"."""
    return "".join(c for c in name.lower() if c.isalnum())


def _known(name: str, table: dict[str, _Entry], what: str) -> str:
    for known in table:
        if _plain(known) == _plain(name):
            return known
    hint = did_you_mean(name.lower(), table) or f"Known are {', '.join(sorted(table))}."
    raise BadArgument(expected(f"the name of {what}", name, hint))


def _built(module: Any, key: str, entry: _Entry, options: dict[str, Any]) -> nn.Module:
    cls = getattr(module, entry.class_name)
    _check_options(key, options, _options_of(cls))
    return cls(**{**entry.preset, **options})


def _check_options(name: str, options: Mapping[str, Any], allowed: set[str]) -> None:
    for option in options:
        if option not in allowed:
            hint = did_you_mean(option, allowed) or f"It takes {', '.join(sorted(allowed))}."
            raise BadArgument(expected(f"an option of {name!r}", option, hint))


def _pair_loss_options(name: str) -> set[str]:
    key = _known(name.removeprefix(_MEMORY_PREFIX), _PAIR_LOSSES, "a pair loss")
    return _options_of(getattr(_library("to compute losses over pairs").losses, _PAIR_LOSSES[key].class_name))


def _options_of(cls: type) -> set[str]:
    """Keyword arguments of a class and its parents: constructors pass on what they do not know."""
    names: set[str] = set()
    for parent in cls.__mro__:
        if parent is nn.Module:
            break
        if "__init__" in vars(parent):
            parameters = inspect.signature(parent.__init__).parameters.values()  # type: ignore[misc]
            names |= {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    return names
