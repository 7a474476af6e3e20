"""Losses over pairs and triplets, and miners that choose them, by name: those of pytorch-metric-learning.

Owns the names, the checks, and `PairLoss`, which gives every one of them the signature of this package, float32
arithmetic, and a memory of earlier batches that is saved and restored with the weights. The losses themselves are
pytorch-metric-learning's, imported when first asked for. Which embeddings are compared is the task's business.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.losses.numerics import Reduction, check_count, full, full_precision
from trainformer.utils.distributed import gather_row_counts, gather_rows

_MEMORY_PREFIX = "xbm:"
_MEMORY_SIZE = 1024


@dataclass(frozen=True)
class _Entry:
    """Where a loss or miner is found in pytorch-metric-learning."""

    class_name: str
    has_classes: bool = False
    preset: dict[str, Any] = field(default_factory=dict)


_LOSSES = {
    "triplet": _Entry("TripletMarginLoss"),
    "contrastive": _Entry("ContrastiveLoss"),
    "supcon": _Entry("SupConLoss"),
    "multisimilarity": _Entry("MultiSimilarityLoss"),
    "circle": _Entry("CircleLoss"),
    "ntxent": _Entry("NTXentLoss"),
    "proxy_anchor": _Entry("ProxyAnchorLoss", has_classes=True),
    "proxy_nca": _Entry("ProxyNCALoss", has_classes=True),
    "softtriple": _Entry("SoftTripleLoss", has_classes=True),
}
_MINERS = {
    "multisimilarity": _Entry("MultiSimilarityMiner"),
    "batch_hard": _Entry("BatchHardMiner"),
    "hard": _Entry("BatchHardMiner"),
    "semihard": _Entry("TripletMarginMiner", preset={"type_of_triplets": "semihard"}),
    "triplet_margin": _Entry("TripletMarginMiner"),
    "angular": _Entry("AngularMiner"),
}


def pair_loss_names() -> list[str]:
    """Names that `make_pair_loss` knows.

    >>> pair_loss_names()[:3]
    ['circle', 'contrastive', 'multisimilarity']
    """
    return sorted(_LOSSES)


def miner_names() -> list[str]:
    """Names that `make_miner` knows.

    >>> miner_names()[:3]
    ['angular', 'batch_hard', 'hard']
    """
    return sorted(_MINERS)


class PairLoss(nn.Module):
    """Any loss called with (embeddings, labels), in full precision, with a miner or a memory where they are wanted.

    `loss` is a module of pytorch-metric-learning, or one's own, that returns a scalar; `miner` returns what the loss
    takes as its third argument. Losses over pairs are means over the pairs that matter: "mean" is the only reduction.
    A batch in which no pair is valid has the loss 0, with a graph and gradients of zero.

    With `gather` each rank computes the loss of the rows of all ranks. It is the same on all of them, so however much
    weight each rank has, the weighted mean of their gradients is the gradient of that loss.
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
        with full_precision(embeddings):
            rows = self._in_full(embeddings)
            if self.gather:
                rows, labels = _of_all_ranks(rows, labels)
            value = self._value(rows, labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else value
            raise BadArgument(expected(f"{type(self.loss).__name__} to return a scalar tensor", got))
        return value.reshape(())

    def _value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.miner is None:
            return self.loss(embeddings, labels)
        return self.loss(embeddings, labels, self.miner(embeddings, labels))

    def _in_full(self, embeddings: Tensor) -> Tensor:
        # Proxies decide the type where there are any: pytorch-metric-learning would cast them, in place, to the type
        # of the embeddings, away from what the optimizer holds.
        for parameter in self.loss.parameters():
            if parameter.is_floating_point():
                return embeddings.to(parameter.dtype)
        return full(embeddings)


def _of_all_ranks(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and labels of all ranks, without those of padding: a memory must be the same everywhere."""
    shares = gather_row_counts(rows)
    return gather_rows(rows, shares)[: shares.total], gather_rows(labels, shares)[: shares.total]


class MemoryPairLoss(PairLoss):
    """A `PairLoss` whose batches are compared with earlier ones too (cross-batch memory, Wang et al., 2020).

    The memory is saved with the weights, its position included, so that a resumed run goes on bitwise. In evaluation
    mode it is neither read nor filled. With `gather` it holds the rows of all ranks, and is the same on each.
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
        # Autograd keeps the memory for the backward pass, and the next batch is written into it: into a copy, rather.
        before, labels_before = memory.embedding_memory, memory.label_memory.clone()
        memory.embedding_memory = before.clone()
        value = memory(embeddings, labels)
        # What is not finite would make every later loss NaN, or hide it: such rows stay what they were.
        finite = memory.embedding_memory.isfinite().all(1)
        memory.embedding_memory = torch.where(finite.unsqueeze(1), memory.embedding_memory, before)
        memory.label_memory.copy_(torch.where(finite, memory.label_memory, labels_before))
        self.memory_state[0].fill_(memory.queue_idx)
        self.memory_state[1].fill_(int(memory.has_been_filled))
        return value


def _restore_position(module: nn.Module, _: object) -> None:
    """Give the memory its position back, which it keeps in plain attributes, after a checkpoint is loaded."""
    assert isinstance(module, MemoryPairLoss)
    memory: Any = module.loss
    position, filled = module.memory_state.tolist()
    memory.queue_idx, memory.has_been_filled = position, bool(filled)


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

    Losses with proxies ("proxy_anchor", "proxy_nca", "softtriple") need `num_classes` and `embedding_dim`. "xbm:"
    before a name, or `memory_size`, compares each batch with a memory of earlier ones, which needs `embedding_dim` too.

    >>> loss = make_pair_loss("supcon", temperature=0.2)
    >>> loss(torch.randn(4, 8), torch.tensor([0, 0, 1, 1])).shape
    torch.Size([])
    """
    bare = name.removeprefix(_MEMORY_PREFIX)
    if bare != name and memory_size is None:
        memory_size = _MEMORY_SIZE
    key = _known(bare, _LOSSES, "a pair loss")
    library = _library("to compute losses over pairs")
    if _LOSSES[key].has_classes:
        sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
        for argument, value in sizes.items():
            if value is None:
                raise BadArgument(expected(f"{argument} for the proxies of {key!r}", None, f"Pass {argument}=."))
            check_count(argument, value)
        options = {"num_classes": num_classes, "embedding_size": embedding_dim, **options}
    loss = _built(library.losses, key, _LOSSES[key], options)
    chosen = make_miner(miner) if isinstance(miner, str) else miner
    if memory_size is None:
        return PairLoss(loss, chosen)
    memory = library.losses.CrossBatchMemory
    check_count("memory_size", memory_size)
    if type(loss).__name__ not in memory.supported_losses():
        able = [n for n, entry in _LOSSES.items() if entry.class_name in memory.supported_losses()]
        raise BadArgument(expected("a loss that can use a memory", key, f"These can: {', '.join(able)}."))
    if embedding_dim is None:
        raise BadArgument(expected("embedding_dim for the memory", None, "Pass embedding_dim=."))
    check_count("embedding_dim", embedding_dim)
    return MemoryPairLoss(memory(loss, embedding_dim, memory_size=memory_size, miner=chosen))


def make_miner(name: str | nn.Module, **options: Any) -> nn.Module:
    """A miner of pytorch-metric-learning by name; `options` go to its constructor. A module is given back as it is.

    >>> make_miner("semihard", margin=0.1).margin
    0.1
    """
    if isinstance(name, nn.Module):
        return name
    key = _known(name, _MINERS, "a miner")
    return _built(_library("to mine pairs").miners, key, _MINERS[key], options)


def pair_loss_options(name: str) -> set[str]:
    """Names of the options that the loss `name` takes."""
    key = _known(name.removeprefix(_MEMORY_PREFIX), _LOSSES, "a pair loss")
    return _options_of(getattr(_library("to compute losses over pairs").losses, _LOSSES[key].class_name))


def is_pair_loss(name: str) -> bool:
    """Whether `name` is the name of a pair loss, in any spelling of it.

    >>> is_pair_loss("Multi-Similarity"), is_pair_loss("xbm:triplet"), is_pair_loss("arcface")
    (True, True, False)
    """
    return _plain(name.removeprefix(_MEMORY_PREFIX)) in {_plain(known) for known in _LOSSES}


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


def _built(home: Any, key: str, entry: _Entry, options: dict[str, Any]) -> nn.Module:
    made = getattr(home, entry.class_name)
    allowed = _options_of(made)
    for option in options:
        if option not in allowed:
            hint = did_you_mean(option, allowed) or f"It takes {', '.join(sorted(allowed))}."
            raise BadArgument(expected(f"an option of {key!r}", option, hint))
    return made(**{**entry.preset, **options})


def _options_of(made: type) -> set[str]:
    """Names of the keyword arguments of a class: its constructors pass on what they do not know to their parents'."""
    names: set[str] = set()
    for parent in made.__mro__:
        if parent is nn.Module:
            break
        if "__init__" in vars(parent):
            parameters = inspect.signature(parent.__init__).parameters.values()  # type: ignore[misc]
            names |= {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}
    return names
