"""The chunked output layer of `losses.tokens`: cross-entropy with the logits of a few tokens at a time.

Owns the autograd functions that turn hidden states into losses and gradients chunk by chunk, and their precision.
`losses.tokens` owns the user-facing arguments, shifting and labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.losses.numerics import check_positive, no_autocast, upcast

# Default chunk: at least this many tokens, more as long as their logits have at most this many elements.
# CPU: 16 MiB, which the allocator reuses without new pages; 0.7 to 0.9 of the time of plain cross-entropy. The weight
# is read, and its gradient written, once per chunk: with a quarter of the tokens it takes 1.5 times as long.
# H200, bf16, 8k tokens: 2,048 take 1.05 of the time and 0.3 to 0.4 of the memory; 1,024 up to 1.19 and 0.2 to 0.3.
_CPU_CHUNK = (128, 2**22)
_GPU_CHUNK = (2048, 2**26)
# Loss scale for float16: logit gradients lie in [-1, 1]; scaled, probabilities down to 7e-9 are normal numbers.
_HALF_GAIN = 2.0**13


@dataclass(frozen=True)
class Head:
    """The settings of the output layer and the loss: everything but the tensors."""

    chunk: int
    dtype: torch.dtype  # of the matrix products
    softcap: float | None = None
    scale: float = 1.0
    z_loss: float = 0.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_options(z_loss=self.z_loss, label_smoothing=self.smoothing)
        if self.softcap is not None:
            check_positive("softcap", self.softcap, "Pass softcap=30.0 as Gemma does, or None for none.")
        check_positive("logit_scale", self.scale)
        check_count("chunk_tokens", self.chunk)

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, chunk: int | None, **settings: Any) -> Head:
        """With these `settings`; the default chunk follows from the vocabulary size, the dtype from autocast."""
        if chunk is None:
            tokens, elements = _CPU_CHUNK if hidden.device.type == "cpu" else _GPU_CHUNK
            chunk = max(tokens, elements // max(1, len(weight)))
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return Head(chunk, dtype, **settings)

    @property
    def gain(self) -> float:
        """Scale of the logit gradients while they are in `dtype`."""
        return _HALF_GAIN if self.dtype is torch.float16 else 1.0

    @property
    def unit(self) -> float:
        """What the gradients of `_sweep` must still be multiplied with."""
        return self.scale / self.gain


class Rows(NamedTuple):
    """Hidden states (N, D), labels, and the supervision mask; `kept`: the original indices, if rows were dropped."""

    hidden: Tensor
    labels: Tensor
    valid: Tensor
    kept: Tensor | None
    size: int

    @staticmethod
    def of(hidden: Tensor, labels: Tensor, ignore_index: int) -> Rows:
        """Flatten; on the CPU drop unsupervised rows (on a GPU, finding them would be a sync)."""
        hidden = hidden.reshape(-1, hidden.shape[-1])
        valid = labels != ignore_index
        size = len(labels)
        kept = None
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            found = valid.nonzero().squeeze(1)
            if len(found) < size:
                kept, hidden, labels, valid = found, hidden[found], labels[found], valid[found]
        return Rows(hidden, torch.where(valid, labels, 0), valid, kept, size)

    def spread(self, values: Tensor) -> Tensor:
        """Scatter per-row values to the original rows, zero elsewhere."""
        return values if self.kept is None else values.new_zeros(self.size).index_copy(0, self.kept, values)


class Gradients(NamedTuple):
    """With respect to hidden states, weight and bias, each if required; to be multiplied by `Head.unit`."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def times(self, factor: Tensor, like: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients times `factor`, in place to avoid a copy as large as the weight.

        Not in place under torch.compile, which plans memory itself and may run the backward pass twice.
        """
        scaled = torch.mul if torch.compiler.is_compiling() else Tensor.mul_
        pairs = zip(self, like, strict=True)
        return tuple(None if g is None or x is None else scaled(g, factor).to(x.dtype) for g, x in pairs)


class _Found(NamedTuple):
    """Per token the loss and whether it was predicted correctly; and gradients."""

    losses: Tensor
    right: Tensor
    gradients: Gradients


def _sweep(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    labels: Tensor,
    head: Head,
    slopes: Tensor | None = None,
    needs: tuple[bool, ...] = (False, False, False),
) -> _Found:
    """Losses of all tokens and, with `slopes` (the weight of each token's loss, at most 1), the required gradients."""
    hidden, weight, bias = tensors
    wide = torch.promote_types(head.dtype, torch.float32)
    size = len(labels)
    losses = hidden.new_empty(size, dtype=wide)
    right = labels.new_empty(size, dtype=torch.bool)
    sums = GradientSums(tensors, head, needs)
    with no_autocast(hidden):
        layer = weight.to(head.dtype)
        offset = None if bias is None else bias.to(head.dtype)
        for begin, end in spans(size, head.chunk):
            part = slice(begin, end)
            states = hidden[part].to(head.dtype)
            logits = head_logits(states, layer, offset, head.scale)
            losses[part], right[part], by_logits = _chunk(logits, labels[part], head, learn=slopes is not None)
            if slopes is not None:
                sums.add(part, by_logits, layer, states, slopes[part].unsqueeze(1))
            del logits, by_logits  # free them before the next chunk is allocated
    return _Found(losses, right, sums.gradients())


class GradientSums:
    """Gradients of hidden states, weight and bias, each if required, from the gradients of the logits of each chunk."""

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor | None], head: Head, needs: tuple[bool, ...]) -> None:
        hidden, weight, _ = tensors
        wide = torch.promote_types(head.dtype, torch.float32)
        self.head = head
        self.hidden = hidden.new_empty(hidden.shape, dtype=_kept_as(hidden, head)) if needs[0] else None
        self.weight = hidden.new_zeros(weight.shape, dtype=wide) if needs[1] else None
        self.bias = hidden.new_zeros((len(weight), 1), dtype=wide) if needs[2] else None
        self._kept = _kept_as(weight, head)

    def add(self, part: slice, by_logits: Tensor, layer: Tensor, states: Tensor, slope: Tensor) -> None:
        """Add a chunk. Row weights (n, 1) are applied to the small matrices, which saves one pass over the logits."""
        if self.hidden is not None:
            self.hidden[part] = _product(by_logits, layer) * slope
        if self.weight is not None:
            _add_product(self.weight, by_logits.T, (states * slope).to(self.head.dtype))
        if self.bias is not None:
            _add_product(self.bias, by_logits.T, slope.to(self.head.dtype))

    def gradients(self) -> Gradients:
        """The sums, in the dtype in which they are kept."""
        weight = None if self.weight is None else self.weight.to(self._kept)
        return Gradients(self.hidden, weight, None if self.bias is None else self.bias.squeeze(1))


def _chunk(logits: Tensor, labels: Tensor, head: Head, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, correctness, and gradients of the unscaled logits times `head.gain`; overwrites the logits."""
    gain, capped = head.gain, None
    if head.softcap is not None:
        capped = upcast(logits).div(head.softcap).tanh_()
        logits = capped * head.softcap
    right = argmax_rows(logits) == labels
    logs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    place = labels.unsqueeze(1)
    log_label = logs.gather(1, place)
    losses = -log_label.squeeze(1)
    if head.smoothing:
        losses = (1 - head.smoothing) * losses - head.smoothing * logs.mean(-1)
    normaliser = None
    if head.z_loss:
        normaliser = upcast(logits.gather(1, place)) - log_label
        losses = losses + head.z_loss * normaliser.squeeze(1).square()
    if not learn:
        return losses, right, logits

    # For a nearly certain token p - 1 is small: computed from p in half precision it would be off by a fifth.
    at_label = log_label.expm1()
    if gain != 1.0:
        logs += math.log(gain)
    slopes = torch.exp(logs, out=logits)  # probabilities, reusing the memory of the logits
    if normaliser is not None:
        pull = 2 * head.z_loss * normaliser
        at_label = at_label * (1 + pull) + pull
        slopes *= 1 + pull
    if head.smoothing:
        share = head.smoothing / logits.shape[1]
        at_label = at_label + (head.smoothing - share)
        slopes -= gain * share
    slopes.scatter_(1, place, (gain * at_label).to(slopes.dtype))
    if capped is not None:
        slopes *= 1 - capped.square_()
    return losses, right, slopes.to(head.dtype)


class Summed(torch.autograd.Function):
    """The sum of the losses, the number of correct predictions, and the losses, of which only the sum has a gradient.

    Gradients are computed in the forward pass; nothing is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        valid: Tensor,
        head: Head,
        learn: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # `needs_input_grad` is also true under `no_grad`: evaluation would compute gradients for nothing.
        needs = ctx.needs_input_grad[:3] if learn else (False, False, False)
        slopes = valid.to(torch.promote_types(head.dtype, torch.float32)) if any(needs) else None
        found = _sweep((hidden, weight, bias), labels, head, slopes, needs)
        ctx.head = head
        ctx.found = found.gradients
        ctx.save_for_backward(hidden, weight, bias, labels, valid)
        losses, correct = torch.where(valid, found.losses, 0.0), (found.right & valid).sum()
        ctx.mark_non_differentiable(correct, losses)
        return losses.sum(), correct, losses

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, weight, bias, labels, valid = ctx.saved_tensors
        found, ctx.found = ctx.found, None
        if found is None:  # second backward (`retain_graph=True`): the first one scaled and consumed the gradients
            slopes = valid.to(slope.dtype)
            found = _sweep((hidden, weight, bias), labels, ctx.head, slopes, ctx.needs_input_grad[:3]).gradients
        return *found.times(slope * ctx.head.unit, (hidden, weight, bias)), None, None, None, None


class PerToken(torch.autograd.Function):
    """One loss per token. Their weights are known in the backward pass only, which recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: Tensor, head: Head
    ) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, labels, valid)
        return torch.where(valid, _sweep((hidden, weight, bias), labels, head).losses, 0.0)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        hidden, weight, bias, labels, valid = ctx.saved_tensors
        slopes = torch.where(valid, slopes, 0.0)
        # A scaled loss would overflow float16: divide by the largest slope and multiply by it at the end.
        largest = torch.linalg.vector_norm(slopes, math.inf)
        slopes = slopes / torch.where(largest > 0, largest, 1.0)
        found = _sweep((hidden, weight, bias), labels, ctx.head, slopes, ctx.needs_input_grad[:3]).gradients
        return *found.times(largest * ctx.head.unit, (hidden, weight, bias)), None, None, None


# -- arithmetic --------------------------------------------------------------------------------------------


def spans(size: int, chunk: int) -> list[tuple[int, int]]:
    """Chunks of about equal size, none longer than `chunk`: a short last one would underuse the device."""
    pieces = -(-size // chunk)
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]


def argmax_rows(logits: Tensor) -> Tensor:
    """argmax of each row (the first of equal ones); on a CPU `max` takes half the time of `argmax`."""
    return logits.max(-1).indices


def head_logits(states: Tensor, layer: Tensor, bias: Tensor | None, scale: float, out: Tensor | None = None) -> Tensor:
    """Scaled logits; the scale is free inside the matrix product."""
    if bias is None:
        bias, beta = states.new_zeros(1), 0.0
    else:
        beta = scale
    return torch.addmm(bias, states, layer.T, beta=beta, alpha=scale, out=out)


def _kept_as(tensor: Tensor, head: Head) -> torch.dtype:
    """dtype in which a gradient is kept until the backward pass: float16 lacks the range for unscaled ones."""
    halved = torch.float16 in (tensor.dtype, head.dtype)
    return torch.promote_types(tensor.dtype, torch.float32) if halved else tensor.dtype


def _accumulates_wide(a: Tensor) -> bool:
    """Whether the device can multiply half precision into float32. CUDA can, at no cost."""
    return a.device.type == "cuda" and torch.version.hip is None and a.dtype in (torch.float16, torch.bfloat16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, in float32 where float16 could overflow."""
    if a.dtype is not torch.float16:
        return a @ b
    if _accumulates_wide(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the precision of `total`."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    elif _accumulates_wide(a):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _product(a, b)


# -- checks ------------------------------------------------------------------------------------------------


def check_options(*, z_loss: float, label_smoothing: float) -> None:
    """Reject invalid z_loss and label smoothing."""
    if not 0 <= z_loss < math.inf:
        raise BadArgument(expected("z_loss to be 0 or a positive number", z_loss, "1e-4 is usual."))
    if not 0 <= label_smoothing < 1:
        raise BadArgument(expected("label_smoothing from 0 to less than 1", label_smoothing, "0.1 is usual."))


def refuse_second_order() -> None:
    # With `create_graph` the gradients would look like constants: a gradient penalty would silently do nothing.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        do = "For gradients of gradients compute the logits and use token_cross_entropy."
        raise BadArgument(expected("a backward pass without create_graph", "create_graph=True", do))
