"""Losses of language models: cross-entropy over supervised tokens, from logits or without ever making all of them.

Owns the sums over tokens, their number, and how many were predicted right: tensors on the device, which nothing here
waits for. From `linear_cross_entropy` on, logits exist for a few tokens at a time only: with 128k words and 8k tokens
all of them take 4 GiB in float32, and plain PyTorch keeps three such tensors. Which tokens are supervised is the
business of the data, what is done with the sums that of the task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.losses.numerics import check_count, check_positive, full, full_precision

# The default chunk: at least so many tokens, more while their logits are no more than so many elements.
# CPU: 16 MiB, which the allocator hands out again without new pages; 0.7 to 0.9 of the time of plain cross-entropy.
# The weight is read, and its gradient written, once per chunk: a quarter of the tokens takes half as long again.
# H200, bf16, 8k tokens: 2,048 take 1.05 of the time and 0.3 to 0.4 of the memory; 1,024 up to 1.19 and 0.2 to 0.3.
_CPU_CHUNK = (128, 2**22)
_GPU_CHUNK = (2048, 2**26)
# Gradients by the logits lie between -1 and 1; times this, probabilities down to 7e-9 are normal numbers in float16.
_HALF_GAIN = 2.0**13


class TokenLoss(NamedTuple):
    """Sum of the losses of all supervised tokens, how many these are, and how many of them were predicted right.

    Three scalars on the device. `sum` carries the gradient; ``sum / weight`` is the mean loss.
    """

    sum: Tensor
    weight: Tensor
    correct: Tensor


class SequenceLogProbs(NamedTuple):
    """Per sequence: sum of its supervised tokens' log probabilities (it carries the gradient), and their number."""

    sum: Tensor
    tokens: Tensor


def token_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLoss:
    """Cross-entropy of logits (..., T, V) and labels (..., T), summed in float32 (float64 if the logits are).

    With `shift` the logits at a position predict the label at the next one, as in causal models. Labels equal to
    `ignore_index` are not supervised. `z_loss` adds that much of the squared log of the softmax's denominator, which
    keeps logits from drifting (1e-4 in PaLM).

    >>> logits = torch.tensor([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]])
    >>> token_cross_entropy(logits, torch.tensor([[-100, 0, 1]]))
    TokenLoss(sum=tensor(4.0363), weight=tensor(2), correct=tensor(1))
    """
    _check_options(z_loss=z_loss, label_smoothing=label_smoothing)
    _check_labels(("logits", logits), labels, ignore_index, vocabulary=logits.shape[-1] if logits.ndim else 0)
    labels = _targets(labels, shift, ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    with full_precision(logits):
        scores = full(flat)
        total = F.cross_entropy(
            scores, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
        valid = labels != ignore_index
        if z_loss:
            total = total + z_loss * torch.where(valid, scores.logsumexp(-1).square(), 0.0).sum()
    return TokenLoss(total, valid.sum(), ((_likeliest(flat.detach()) == labels) & valid).sum())


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLoss:
    """`token_cross_entropy` of ``hidden @ weight.T + bias``, with the logits of `chunk_tokens` tokens at a time.

    `hidden` (..., T, D) are the states before the output layer, `weight` (V, D) is that layer's (perhaps the input
    embedding's, too). The logits are multiplied by `logit_scale` (Cohere, Granite), then bounded to
    ``softcap * tanh(logits / softcap)`` (Gemma). Gradients are computed with the loss, chunk by chunk: as many matrix
    products as without chunks, and a weight that needs no gradient costs none. They cannot be differentiated again.

    On the CPU, tokens without supervision are left out; on a GPU that would mean waiting for it, so they are computed
    and count nothing.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
    >>> labels = torch.randint(0, 100, (2, 5))
    >>> mine = linear_cross_entropy(hidden, weight, labels, chunk_tokens=3)
    >>> torch.testing.assert_close(mine, token_cross_entropy(hidden @ weight.T, labels))
    """
    head = _Head.of(
        hidden, weight, chunk_tokens, softcap=softcap, scale=logit_scale, z_loss=z_loss, smoothing=label_smoothing
    )
    _check_linear(hidden, weight, bias, labels, ignore_index)
    rows = _Rows.of(hidden, _targets(labels, shift, ignore_index), ignore_index)
    total, correct = _Summed.apply(rows.hidden, weight, bias, rows.labels, rows.valid, head, torch.is_grad_enabled())
    return TokenLoss(total, rows.valid.sum(), correct)


def sequence_log_probs(
    states: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> SequenceLogProbs:
    """Log probability of the labels (..., T) of each sequence, as preference losses (DPO) need it.

    `states` are logits (..., T, V), or, with the output layer's `weight` (V, D), hidden states (..., T, D); the
    logits are then made `chunk_tokens` tokens at a time, and again for the gradient, whose weights are only known
    then. The other arguments are those of `linear_cross_entropy`.

    >>> found = sequence_log_probs(torch.zeros(2, 3, 4), torch.tensor([[-100, 1, 2], [-100, -100, 3]]))
    >>> found.sum, found.tokens
    (tensor([-2.7726, -1.3863]), tensor([2, 1]))
    """
    if weight is None:
        if bias is not None or softcap is not None or logit_scale != 1.0 or chunk_tokens is not None:
            do = "Pass the output layer's weight too, and hidden states instead of logits."
            raise BadArgument(expected("logits alone", "arguments that belong to an output layer", do))
        _check_labels(("states", states), labels, ignore_index, vocabulary=states.shape[-1] if states.ndim else 0)
        targets = _targets(labels, shift, ignore_index)
        with full_precision(states):
            scores = full(states.reshape(-1, states.shape[-1]))
            losses = F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="none")
    else:
        head = _Head.of(states, weight, chunk_tokens, softcap=softcap, scale=logit_scale)
        _check_linear(states, weight, bias, labels, ignore_index)
        targets = _targets(labels, shift, ignore_index)
        rows = _Rows.of(states, targets, ignore_index)
        losses = rows.spread(_PerToken.apply(rows.hidden, weight, bias, rows.labels, rows.valid, head))
    tokens = (targets != ignore_index).view(labels.shape).sum(-1)
    return SequenceLogProbs(-losses.view(labels.shape).sum(-1), tokens)


# -- the work, chunk by chunk ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """How hidden states become losses: everything but the tensors."""

    chunk: int
    dtype: torch.dtype  # that of the matrix products
    softcap: float | None = None
    scale: float = 1.0
    z_loss: float = 0.0
    smoothing: float = 0.0

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        chunk: int | None,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        z_loss: float = 0.0,
        smoothing: float = 0.0,
    ) -> _Head:
        """Checked, with the chunk chosen by the size of the vocabulary and the precision by autocast."""
        _check_options(z_loss=z_loss, label_smoothing=smoothing)
        if softcap is not None:
            check_positive("softcap", softcap, "Pass softcap=30.0 as Gemma does, or None for none.")
        check_positive("logit_scale", scale)
        if chunk is None:
            tokens, elements = _CPU_CHUNK if hidden.device.type == "cpu" else _GPU_CHUNK
            chunk = max(tokens, elements // max(1, len(weight)))
        check_count("chunk_tokens", chunk)
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        return _Head(chunk, dtype, softcap, scale, z_loss, smoothing)

    @property
    def gain(self) -> float:
        """What gradients by the logits are multiplied with while they are in the precision of the products."""
        return _HALF_GAIN if self.dtype is torch.float16 else 1.0

    @property
    def unit(self) -> float:
        """What gradients found by `_sweep` are yet to be multiplied with."""
        return self.scale / self.gain


class _Rows(NamedTuple):
    """Hidden states (N, D), their labels, and which are supervised; `kept`: their places, if some were dropped."""

    hidden: Tensor
    labels: Tensor
    valid: Tensor
    kept: Tensor | None
    size: int

    @staticmethod
    def of(hidden: Tensor, labels: Tensor, ignore_index: int) -> _Rows:
        """Flat; on the CPU only what is supervised (looking for it on a GPU would wait for it)."""
        hidden = hidden.reshape(-1, hidden.shape[-1])
        valid = labels != ignore_index
        size = len(labels)
        kept = None
        if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
            found = valid.nonzero().squeeze(1)
            if len(found) < size:
                kept, hidden, labels, valid = found, hidden[found], labels[found], valid[found]
        return _Rows(hidden, torch.where(valid, labels, 0), valid, kept, size)

    def spread(self, values: Tensor) -> Tensor:
        """Values of these rows, at their places among all, zero elsewhere."""
        return values if self.kept is None else values.new_zeros(self.size).index_copy(0, self.kept, values)


class _Gradients(NamedTuple):
    """By hidden states, weight and bias, each if wanted; to be multiplied by `_Head.unit`."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def times(self, factor: Tensor, like: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients times `factor`, in place: a copy of the weight's would be as large as the weight.

        A compiled backward pass plans its memory itself, and may run twice on what it was given.
        """
        scaled = torch.mul if torch.compiler.is_compiling() else Tensor.mul_
        pairs = zip(self, like, strict=True)
        return tuple(None if g is None or x is None else scaled(g, factor).to(x.dtype) for g, x in pairs)


class _Found(NamedTuple):
    """Per token the loss and whether it was predicted right; and gradients."""

    losses: Tensor
    right: Tensor
    gradients: _Gradients


def _sweep(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    labels: Tensor,
    head: _Head,
    slopes: Tensor | None = None,
    needs: tuple[bool, ...] = (False, False, False),
) -> _Found:
    """Losses of all tokens and, with `slopes` (what each token's loss counts, at most 1), the gradients asked for."""
    hidden, weight, bias = tensors
    wide = torch.promote_types(head.dtype, torch.float32)
    size = len(labels)
    losses = hidden.new_empty(size, dtype=wide)
    right = labels.new_empty(size, dtype=torch.bool)
    by_hidden = hidden.new_empty(hidden.shape, dtype=_kept_as(hidden, head)) if needs[0] else None
    by_weight = hidden.new_zeros(weight.shape, dtype=wide) if needs[1] else None
    by_bias = hidden.new_zeros((len(weight), 1), dtype=wide) if needs[2] else None
    with full_precision(hidden):
        layer = weight.to(head.dtype)
        offset = None if bias is None else bias.to(head.dtype)
        for begin, end in _spans(size, head.chunk):
            part = slice(begin, end)
            states = hidden[part].to(head.dtype)
            logits = _logits(states, layer, offset, head.scale)
            losses[part], right[part], by_logits = _chunk(logits, labels[part], head, learn=slopes is not None)
            if slopes is not None:
                # What a row counts is put on the small matrices: one pass less over all logits.
                slope = slopes[part].unsqueeze(1)
                if by_hidden is not None:
                    by_hidden[part] = _product(by_logits, layer) * slope
                if by_weight is not None:
                    _add_product(by_weight, by_logits.T, (states * slope).to(head.dtype))
                if by_bias is not None:
                    _add_product(by_bias, by_logits.T, slope.to(head.dtype))
            del logits, by_logits  # or the next chunk's would be made while these exist
    if by_weight is not None:
        by_weight = by_weight.to(_kept_as(weight, head))
    return _Found(losses, right, _Gradients(by_hidden, by_weight, None if by_bias is None else by_bias.squeeze(1)))


def _chunk(logits: Tensor, labels: Tensor, head: _Head, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, whether right, and gradients by the unscaled logits times `head.gain`; overwrites the logits."""
    gain, capped = head.gain, None
    if head.softcap is not None:
        capped = full(logits).div(head.softcap).tanh_()
        logits = capped * head.softcap
    right = _likeliest(logits) == labels
    logs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    place = labels.unsqueeze(1)
    log_label = logs.gather(1, place)
    losses = -log_label.squeeze(1)
    if head.smoothing:
        losses = (1 - head.smoothing) * losses - head.smoothing * logs.mean(-1)
    normaliser = None
    if head.z_loss:
        normaliser = full(logits.gather(1, place)) - log_label
        losses = losses + head.z_loss * normaliser.squeeze(1).square()
    if not learn:
        return losses, right, logits

    # Of a token that is nearly certain, p - 1 is small: taken from a p in half precision it would be off by a fifth.
    at_label = log_label.expm1()
    if gain != 1.0:
        logs += math.log(gain)
    slopes = torch.exp(logs, out=logits)  # as probabilities, in the memory of the logits
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


class _Summed(torch.autograd.Function):
    """The sum of the losses, with the gradients computed on the way: nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        valid: Tensor,
        head: _Head,
        learn: bool,
    ) -> tuple[Tensor, Tensor]:
        # `needs_input_grad` is true under `no_grad`, too: an evaluation would compute gradients for nothing.
        needs = ctx.needs_input_grad[:3] if learn else (False, False, False)
        slopes = valid.to(torch.promote_types(head.dtype, torch.float32)) if any(needs) else None
        found = _sweep((hidden, weight, bias), labels, head, slopes, needs)
        ctx.head = head
        ctx.found = found.gradients
        ctx.save_for_backward(hidden, weight, bias, labels, valid)
        total, correct = torch.where(valid, found.losses, 0.0).sum(), (found.right & valid).sum()
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, labels, valid = ctx.saved_tensors
        found, ctx.found = ctx.found, None
        if found is None:  # a second pass (`retain_graph=True`): the first one's were scaled in place, and given away
            slopes = valid.to(slope.dtype)
            found = _sweep((hidden, weight, bias), labels, ctx.head, slopes, ctx.needs_input_grad[:3]).gradients
        return *found.times(slope * ctx.head.unit, (hidden, weight, bias)), None, None, None, None


class _PerToken(torch.autograd.Function):
    """One loss per token. What each counts is known in the backward pass only, which makes the logits anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, valid: Tensor, head: _Head
    ) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, labels, valid)
        return torch.where(valid, _sweep((hidden, weight, bias), labels, head).losses, 0.0)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_order()
        hidden, weight, bias, labels, valid = ctx.saved_tensors
        slopes = torch.where(valid, slopes, 0.0)
        # A scaled loss would leave the range of float16: the largest slope is taken out, and put back at the end.
        largest = torch.linalg.vector_norm(slopes, math.inf)
        slopes = slopes / torch.where(largest > 0, largest, 1.0)
        found = _sweep((hidden, weight, bias), labels, ctx.head, slopes, ctx.needs_input_grad[:3]).gradients
        return *found.times(largest * ctx.head.unit, (hidden, weight, bias)), None, None, None


# -- arithmetic --------------------------------------------------------------------------------------------


def _spans(size: int, chunk: int) -> list[tuple[int, int]]:
    """Pieces of about equal size, none longer than `chunk`: a short last one would use the device badly."""
    pieces = -(-size // chunk)
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row; on a CPU `max` takes half the time of `argmax`."""
    return logits.max(-1).indices


def _logits(states: Tensor, layer: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Scaled logits; the scale costs nothing inside the matrix product."""
    if bias is None:
        bias, beta = states.new_zeros(1), 0.0
    else:
        beta = scale
    return torch.addmm(bias, states, layer.T, beta=beta, alpha=scale)


def _kept_as(tensor: Tensor, head: _Head) -> torch.dtype:
    """The precision in which a gradient waits for the backward pass. float16 has too little range for unscaled ones."""
    halved = torch.float16 in (tensor.dtype, head.dtype)
    return torch.promote_types(tensor.dtype, torch.float32) if halved else tensor.dtype


def _accumulates_wide(a: Tensor) -> bool:
    """Whether the device multiplies half precision into single precision. CUDA does, and it costs nothing there."""
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


def _targets(labels: Tensor, shift: bool, ignore_index: int) -> Tensor:
    """Flat labels, one per hidden state. Moving labels instead of states spares a copy of the states."""
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return labels.reshape(-1).long()


def _refuse_second_order() -> None:
    """With `create_graph` the gradients would look like constants: a penalty on them would do nothing, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        do = "For gradients of gradients make the logits and use token_cross_entropy."
        raise BadArgument(expected("a backward pass without create_graph", "create_graph=True", do))


def _check_options(*, z_loss: float, label_smoothing: float) -> None:
    if not 0 <= z_loss < math.inf:
        raise BadArgument(expected("z_loss to be 0 or a positive number", z_loss, "1e-4 is usual."))
    if not 0 <= label_smoothing < 1:
        raise BadArgument(expected("label_smoothing from 0 to less than 1", label_smoothing, "0.1 is usual."))


def _check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or weight.shape[1] != hidden.shape[-1]:
        shapes = f"weight {tuple(weight.shape)} and hidden {tuple(hidden.shape)}"
        do = "Pass the weight of the output layer (model.get_output_embeddings().weight)."
        raise BadArgument(expected("weight (V, D) and hidden (..., D)", shapes, do))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadArgument(expected(f"bias ({len(weight)},), one value per row of the weight", tuple(bias.shape)))
    _check_labels(("hidden", hidden), labels, ignore_index, vocabulary=len(weight))


def _check_labels(states: tuple[str, Tensor], labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    """One label per state, from the vocabulary. Their values are looked at where that costs no wait: on the CPU."""
    name, tensor = states
    if labels.ndim < 1 or tensor.shape[:-1] != labels.shape:
        shapes = f"{name} {tuple(tensor.shape)} and labels {tuple(labels.shape)}"
        do = "With shift=True both are given unshifted."
        raise BadArgument(expected(f"{name} (..., T, size) and labels (..., T)", shapes, do))
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise BadArgument(expected("labels to be token ids, integers", labels.dtype))
    if labels.device.type != "cpu" or torch.compiler.is_compiling() or labels.numel() == 0:
        return
    lowest, highest = (int(v) for v in torch.where(labels == ignore_index, 0, labels).aminmax())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        do = "Has the tokenizer more tokens than the model? Then model.resize_token_embeddings(len(tokenizer))."
        raise DataError(expected(f"labels from 0 to {vocabulary - 1}, or {ignore_index}", wrong, do))
