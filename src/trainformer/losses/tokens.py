"""Token losses of language models: cross-entropy from logits, or fused with the output layer in chunks of tokens.

Returns the sum over supervised tokens, their number, and the number of correct predictions as device tensors, without a
sync. `linear_cross_entropy` and `sequence_log_probs` materialise the logits of a few tokens at a time: for a vocabulary
of 128k and 8k tokens the full logits take 4 GiB in float32, and plain PyTorch keeps three such tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.losses.chunked import Head, PerToken, Rows, Summed, argmax_rows, check_options
from trainformer.losses.numerics import no_autocast, upcast


class TokenLoss(NamedTuple):
    """Sum of the losses of all supervised tokens, their number, and the number of correct predictions.

    Three scalars on the device. `sum` carries the gradient; ``sum / weight`` is the mean loss.
    """

    sum: Tensor
    weight: Tensor
    correct: Tensor


class SequenceTokenLoss(TokenLoss):
    """A `TokenLoss` that also has the loss sum and the number of supervised tokens of each sequence, no gradient."""

    per_sequence: tuple[Tensor, Tensor]

    def __new__(cls, total: TokenLoss, per_sequence: tuple[Tensor, Tensor]) -> SequenceTokenLoss:
        self = super().__new__(cls, *total)
        self.per_sequence = per_sequence
        return self


class SequenceLogProbs(NamedTuple):
    """Per sequence: sum of the log probabilities of its supervised tokens (with gradient), and their number."""

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
    per_sequence: bool = False,
) -> TokenLoss:
    """Cross-entropy of logits (..., T, V) and labels (..., T), summed in float32 (float64 if the logits are).

    With `shift` the logits at a position predict the label at the next one, as in causal models. Labels equal to
    `ignore_index` are not supervised. `z_loss` is the weight of the squared log partition function, which keeps logits
    from drifting (1e-4 in PaLM). `per_sequence` also returns the losses of the sequences.

    >>> logits = torch.tensor([[[4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]])
    >>> token_cross_entropy(logits, torch.tensor([[-100, 0, 1]]))
    TokenLoss(sum=tensor(4.0363), weight=tensor(2), correct=tensor(1))
    """
    check_options(z_loss=z_loss, label_smoothing=label_smoothing)
    check_token_labels(("logits", logits), labels, ignore_index, vocabulary=logits.shape[-1] if logits.ndim else 0)
    shape, labels = labels.shape, next_token_targets(labels, shift, ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    with no_autocast(logits):
        scores = upcast(flat)
        found = F.cross_entropy(
            scores,
            labels,
            ignore_index=ignore_index,
            reduction="none" if per_sequence else "sum",
            label_smoothing=label_smoothing,
        )
        valid = labels != ignore_index
        if z_loss:
            squares = torch.where(valid, scores.logsumexp(-1).square(), 0.0)
            found = found + z_loss * (squares if per_sequence else squares.sum())
    correct = ((argmax_rows(flat.detach()) == labels) & valid).sum()
    if not per_sequence:
        return TokenLoss(found, valid.sum(), correct)
    return SequenceTokenLoss(TokenLoss(found.sum(), valid.sum(), correct), _by_sequence(found, valid, shape))


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
    per_sequence: bool = False,
) -> TokenLoss:
    """`token_cross_entropy` of ``hidden @ weight.T + bias``, with the logits of `chunk_tokens` tokens at a time.

    `hidden` (..., T, D) are the last hidden states, `weight` (V, D) belongs to the output layer (it may be tied to the
    input embedding). The logits are multiplied by `logit_scale` (Cohere, Granite), then bounded to
    ``softcap * tanh(logits / softcap)`` (Gemma). Gradients are computed together with the loss, chunk by chunk: as many
    matrix products as without chunks, and none for a frozen weight. Double backward is not supported.

    On the CPU, unsupervised tokens are dropped; on a GPU that would need a sync, so they are computed with weight zero.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
    >>> labels = torch.randint(0, 100, (2, 5))
    >>> fused = linear_cross_entropy(hidden, weight, labels, chunk_tokens=3)
    >>> torch.testing.assert_close(fused, token_cross_entropy(hidden @ weight.T, labels))
    """
    head = Head.of(
        hidden, weight, chunk_tokens, softcap=softcap, scale=logit_scale, z_loss=z_loss, smoothing=label_smoothing
    )
    check_linear(hidden, weight, bias, labels, ignore_index)
    targets = next_token_targets(labels, shift, ignore_index)
    rows = Rows.of(hidden, targets, ignore_index)
    learn = torch.is_grad_enabled()
    total, correct, losses = Summed.apply(rows.hidden, weight, bias, rows.labels, rows.valid, head, learn)
    found = TokenLoss(total, rows.valid.sum(), correct)
    if not per_sequence:
        return found
    return SequenceTokenLoss(found, _by_sequence(rows.spread(losses), targets != ignore_index, labels.shape))


def _by_sequence(losses: Tensor, valid: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    return losses.detach().view(shape).sum(-1), valid.view(shape).sum(-1)


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
    label_weights: Tensor | None = None,
) -> SequenceLogProbs:
    """Log probability of the labels (..., T) of each sequence, as preference losses (DPO) need it.

    `states` are logits (..., T, V), or, with the `weight` (V, D) of the output layer, hidden states (..., T, D). The
    logits are then computed `chunk_tokens` tokens at a time, and recomputed in the backward pass, because the weights
    of the sequences are not known before. `label_weights` (..., T) weigh the log probability of each label in the sum.
    The other arguments are those of `linear_cross_entropy`.

    >>> found = sequence_log_probs(torch.zeros(2, 3, 4), torch.tensor([[-100, 1, 2], [-100, -100, 3]]))
    >>> found.sum, found.tokens
    (tensor([-2.7726, -1.3863]), tensor([2, 1]))
    """
    if weight is None:
        if bias is not None or softcap is not None or logit_scale != 1.0 or chunk_tokens is not None:
            do = "Pass the output layer's weight too, and hidden states instead of logits."
            raise BadArgument(expected("logits alone", "arguments that belong to an output layer", do))
        check_token_labels(("states", states), labels, ignore_index, vocabulary=states.shape[-1] if states.ndim else 0)
        targets = next_token_targets(labels, shift, ignore_index)
        with no_autocast(states):
            scores = upcast(states.reshape(-1, states.shape[-1]))
            losses = F.cross_entropy(scores, targets, ignore_index=ignore_index, reduction="none")
    else:
        head = Head.of(states, weight, chunk_tokens, softcap=softcap, scale=logit_scale)
        check_linear(states, weight, bias, labels, ignore_index)
        targets = next_token_targets(labels, shift, ignore_index)
        rows = Rows.of(states, targets, ignore_index)
        losses = rows.spread(PerToken.apply(rows.hidden, weight, bias, rows.labels, rows.valid, head))
    tokens = (targets != ignore_index).view(labels.shape).sum(-1)
    losses = losses.view(labels.shape)
    if label_weights is not None:
        losses = losses * (label_weights.roll(-1, -1) if shift else label_weights)  # the last label has no loss then
    return SequenceLogProbs(-losses.sum(-1), tokens)


# -- labels and checks -------------------------------------------------------------------------------------


def next_token_targets(labels: Tensor, shift: bool, ignore_index: int) -> Tensor:
    """Flat labels, one per hidden state. Shifting labels instead of states saves a copy of the states."""
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    return labels.reshape(-1).long()


def check_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> None:
    if weight.ndim != 2 or hidden.ndim < 1 or weight.shape[1] != hidden.shape[-1]:
        shapes = f"weight {tuple(weight.shape)} and hidden {tuple(hidden.shape)}"
        do = "Pass the weight of the output layer (model.get_output_embeddings().weight)."
        raise BadArgument(expected("weight (V, D) and hidden (..., D)", shapes, do))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise BadArgument(expected(f"bias ({len(weight)},), one value per row of the weight", tuple(bias.shape)))
    check_token_labels(("hidden", hidden), labels, ignore_index, vocabulary=len(weight))


def check_token_labels(states: tuple[str, Tensor], labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    """One label per state, from the vocabulary. Values are checked on the CPU only: on a GPU it would cost a sync."""
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
