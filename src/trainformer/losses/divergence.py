"""Token-level knowledge distillation: divergence of a student's next-token distribution from a teacher's.

The divergence is the generalised Jensen-Shannon divergence of GKD: forward KL, reverse KL, or in between. Logits of
student and teacher are computed for a few tokens at a time, and so are the gradients; the logits of a whole batch are
never in memory. The teacher is given by its hidden states and output layer, by logits, or by its `k` most probable
tokens.

Hinton et al., Distilling the Knowledge in a Neural Network, 2015; Agarwal et al., On-Policy Distillation of Language
Models (GKD), 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.losses.chunked import (
    Gradients,
    GradientSums,
    Head,
    Rows,
    argmax_rows,
    head_logits,
    refuse_second_order,
    spans,
)
from trainformer.losses.numerics import check_positive, no_autocast, upcast
from trainformer.losses.tokens import check_linear, check_token_labels, next_token_targets

TAILS = ("bucket", "renormalize")
_LEAST = -1e4  # stands for the log of 0: its exponential is 0, and products with 0 are 0, not NaN
_HALF_GAIN = 2.0**10  # of logit gradients in float16: reverse KL has some beyond 1


class TeacherStates(NamedTuple):
    """A teacher's logits (..., T, V), or with the `weight` (V, D) of its output layer its hidden states (..., T, D)."""

    states: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def vocabulary(self) -> int:
        """The number of tokens that have a logit."""
        return self.states.shape[-1] if self.weight is None else len(self.weight)


class TopLogProbs(NamedTuple):
    """The `k` most probable tokens of a teacher (..., T, k), the most probable first, and their log probabilities.

    `vocabulary` is the number of tokens that the probabilities are normalised over. `tail` says what becomes of all
    other tokens: one event with the rest of the probability (`"bucket"`), or probability 0 (`"renormalize"`).
    """

    ids: Tensor
    log_probs: Tensor
    vocabulary: int
    tail: str = "bucket"


class DistillationLoss(NamedTuple):
    """Sums over the supervised tokens, on the device. `sum` carries the gradient; ``sum / weight`` is the mean loss.

    `divergence` is what `beta` selects, `kl` always the forward KL. `cross_entropy` and `correct` (predictions equal to
    the label) are over the `hard` tokens that have a label; `agree` counts predictions equal to the teacher's.
    `per_token` has the loss of every token, without a gradient.
    """

    sum: Tensor
    weight: Tensor
    divergence: Tensor
    kl: Tensor
    cross_entropy: Tensor
    hard: Tensor
    correct: Tensor
    agree: Tensor
    per_token: Tensor


def distillation_loss(
    states: Tensor,
    labels: Tensor,
    teacher: TeacherStates | TopLogProbs,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    alpha: float = 1.0,
    hard: Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> DistillationLoss:
    """``alpha * divergence + (1 - alpha) * cross_entropy``, summed over the supervised tokens.

    `states` are the student's logits (..., T, V), or with the `weight` (V, D) of its output layer its hidden states
    (..., T, D). Labels (..., T) equal to `ignore_index` are not supervised; with `shift` a position predicts the next
    label. `hard` (..., T), aligned with the labels, is False where a token is compared with the teacher only, such as
    one that the student generated.

    With student p, teacher q and m = beta q + (1 - beta) p, the divergence is KL(q, p) for ``beta=0`` (forward KL),
    KL(p, q) for ``beta=1`` (reverse KL), else beta KL(q, m) + (1 - beta) KL(p, m). Both distributions are
    softmax(logits / temperature); the result is not multiplied by the squared temperature. Cross-entropy has
    temperature 1. If one vocabulary is larger, the divergence is over the tokens that both have.

    >>> logits, labels = torch.randn(2, 5, 8), torch.randint(0, 8, (2, 5))
    >>> found = distillation_loss(logits, labels, TeacherStates(logits))
    >>> bool(found.sum.abs() < 1e-6), found.agree == found.weight
    (True, tensor(True))
    """
    check_divergence(beta, temperature, alpha)
    if weight is None:
        if bias is not None:
            raise BadArgument(expected("logits alone", "a bias", "Pass the weight of the output layer too."))
        check_token_labels(("states", states), labels, ignore_index, vocabulary=states.shape[-1])
    else:
        check_linear(states, weight, bias, labels, ignore_index)
    _check_teacher(teacher, labels, beta)
    targets = next_token_targets(labels, shift, ignore_index)
    rows = Rows.of(states, targets, ignore_index)
    with_label = rows.valid
    if hard is not None:
        wanted = next_token_targets(hard.long(), shift, 0).bool()
        with_label = with_label & (wanted if rows.kept is None else wanted[rows.kept])
    vocabulary = states.shape[-1] if weight is None else len(weight)
    common = min(vocabulary, teacher.vocabulary)
    head = _head(rows.hidden, weight, vocabulary, chunk_tokens)
    settings = _product_dtype(teacher), common, beta, temperature, alpha
    given = _Given(rows.labels, rows.valid, with_label, _select(teacher, rows.kept), *settings)
    learn = torch.is_grad_enabled()
    total, *sums, losses = _Distil.apply(rows.hidden, weight, bias, given, head, learn)
    divergence, kl, ce, correct, agree = sums
    per_token = rows.spread(losses).view(labels.shape)
    return DistillationLoss(
        total, rows.valid.sum(), divergence, kl, ce, with_label.sum(), correct, agree, per_token.detach()
    )


def check_divergence(beta: float, temperature: float, alpha: float) -> None:
    """Reject invalid settings of the divergence."""
    for name, value in (("beta", beta), ("alpha", alpha)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            hint = {
                "beta": "0 is forward KL, 1 is reverse KL.",
                "alpha": "1 is distillation alone, 0 is cross-entropy alone.",
            }
            raise BadArgument(expected(f"{name} to be from 0 to 1", value, hint[name]))
    check_positive("temperature", temperature, "1 is usual; higher ones weigh unlikely tokens more.")


def check_tail(tail: str, beta: float) -> None:
    """Reject a treatment of the tail that is unknown or makes the divergence infinite."""
    check_choice("tail", tail, TAILS)
    if tail == "renormalize" and beta == 1:
        do = "Outside of its top k the teacher has probability 0, and reverse KL is infinite. Pass tail='bucket'."
        raise BadArgument(expected("beta below 1 with tail='renormalize'", beta, do))


@dataclass(frozen=True)
class _Given:
    """What the loss of the supervised rows depends on, besides the student's tensors."""

    labels: Tensor
    valid: Tensor
    hard: Tensor
    teacher: TeacherStates | TopLogProbs
    teacher_dtype: torch.dtype  # of the teacher's matrix product
    common: int  # tokens that both have
    beta: float
    temperature: float
    alpha: float


class _Values(NamedTuple):
    """Per row: loss, divergence, forward KL, cross-entropy; whether prediction and label, or the teacher's, agree."""

    loss: Tensor
    divergence: Tensor
    kl: Tensor
    cross_entropy: Tensor
    correct: Tensor
    agree: Tensor


class _Distil(torch.autograd.Function):
    """The summed loss, sums for metrics, and the loss of each row; only the first has a gradient.

    Gradients are computed in the forward pass; nothing is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor | None, bias: Tensor | None, given: _Given, head: Head, learn: bool
    ) -> tuple[Tensor, ...]:
        # `needs_input_grad` is also true under `no_grad`: evaluation would compute gradients for nothing.
        needs = ctx.needs_input_grad[:3] if learn else (False, False, False)
        values, ctx.found = _sweep((states, weight, bias), given, head, needs)
        ctx.given, ctx.head = given, head
        ctx.save_for_backward(states, weight, bias)
        valid = given.valid
        losses = torch.where(valid, values.loss, 0.0)
        sums = [torch.where(valid, x, 0.0).sum() for x in (values.divergence, values.kl)]
        sums.append(torch.where(given.hard, values.cross_entropy, 0.0).sum())
        sums += [(values.correct & given.hard).sum(), (values.agree & valid).sum()]
        ctx.mark_non_differentiable(*sums, losses)
        return losses.sum(), *sums, losses

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        states, weight, bias = ctx.saved_tensors
        found, ctx.found = ctx.found, None
        if found is None:  # second backward (`retain_graph=True`): the first one scaled and consumed the gradients
            _, found = _sweep((states, weight, bias), ctx.given, ctx.head, ctx.needs_input_grad[:3])
        return *found.times(slope / _gain(ctx.head), (states, weight, bias)), None, None, None


class _Buffers:
    """Matrices (rows, width) that all chunks share.

    Allocated anew for each chunk, on a CPU they would fragment the heap: up to 700 MB instead of 90 in a test with
    chunks of 8 MB.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self.rows, self.like = rows, like
        self._made: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The matrix of that name; its content is that of the last chunk."""
        made = self._made.get(name)
        if made is None or made.numel() < rows * width or made.dtype != dtype:
            made = self._made[name] = self.like.new_empty(max(rows, self.rows) * width, dtype=dtype)
        return made[: rows * width].view(rows, width)


def _sweep(
    tensors: tuple[Tensor, Tensor | None, Tensor | None], given: _Given, head: Head, needs: tuple[bool, ...]
) -> tuple[_Values, Gradients]:
    """The values of all rows, and the required gradients, chunk by chunk."""
    hidden, weight, bias = tensors
    size, learn = len(given.labels), any(needs)
    pieces = spans(size, head.chunk)
    buffers = _Buffers(max((end - begin for begin, end in pieces), default=0), hidden)
    found: list[_Values] = []
    sums = None if weight is None else GradientSums((hidden, weight, bias), head, needs)
    by_states = torch.empty_like(hidden) if weight is None and learn else None
    with no_autocast(hidden), torch.no_grad():
        layer = None if weight is None else weight.to(head.dtype)
        offset = None if bias is None else bias.to(head.dtype)
        project = _projection(given, hidden.device, buffers)
        for begin, end in pieces:
            part = slice(begin, end)
            states = hidden[part].to(head.dtype)
            logits = states
            if layer is not None:
                logits = buffers("logits", end - begin, len(layer), head.dtype)
                head_logits(states, layer, offset, 1.0, out=logits)
            values, by_logits = _chunk(logits, part, given, project, buffers, learn)
            found.append(values)
            if by_logits is not None:
                slope = given.valid[part].unsqueeze(1).to(by_logits.dtype)
                if sums is not None:
                    assert layer is not None
                    scaled = by_logits if _gain(head) == 1 else by_logits.mul_(_gain(head))
                    sums.add(part, scaled.to(head.dtype), layer, states, slope)
                if by_states is not None:
                    by_states[part] = by_logits * slope
    values = _Values(*map(torch.cat, zip(*found, strict=True))) if found else _no_values(hidden, given)
    return values, Gradients(by_states, None, None) if sums is None else sums.gradients()


def _chunk(
    logits: Tensor, part: slice, given: _Given, project: Any, buffers: _Buffers, learn: bool
) -> tuple[_Values, Tensor | None]:
    """Values of some rows and the gradients of their logits, before the weights of the rows."""
    (rows, width), wide = logits.shape, torch.promote_types(logits.dtype, torch.float32)
    place = given.labels[part].unsqueeze(1)
    predicted = argmax_rows(logits)
    plain = given.temperature == 1 and given.common == width
    student = buffers("student", rows, given.common, wide).copy_(logits[:, : given.common])
    student = torch.log_softmax(student.div_(given.temperature), -1, out=student)
    logs = student
    if not plain or given.alpha < 1:
        logs = buffers("labels", rows, width, wide).copy_(logits)
        logs = torch.log_softmax(logs, -1, out=logs)
    cross_entropy = -logs.gather(1, place).squeeze(1)
    if isinstance(given.teacher, TopLogProbs):
        divergence, kl, slopes, best = _against_top(student, given, part, buffers)
    else:
        scores = project(part)[:, : given.common]
        best = argmax_rows(scores)
        teacher = buffers("teacher", rows, given.common, wide).copy_(scores).div_(given.temperature)
        teacher = torch.log_softmax(teacher, -1, out=teacher).clamp_(min=_LEAST)
        divergence, kl, slopes = _divergence(student, teacher, given.beta, buffers)
    hard = given.hard[part]
    loss = given.alpha * divergence + (1 - given.alpha) * torch.where(hard, cross_entropy, 0.0)
    values = _Values(loss, divergence, kl, cross_entropy, predicted == given.labels[part], predicted == best)
    if not learn:
        return values, None
    slopes *= given.alpha / given.temperature
    if given.common < width:
        slopes = torch.nn.functional.pad(slopes, (0, width - given.common))
    if given.alpha < 1:
        by_labels = logs.exp_()
        by_labels.scatter_add_(1, place, by_labels.new_full((), -1.0).expand(place.shape))
        slopes.add_(by_labels.mul_(hard.unsqueeze(1)), alpha=1 - given.alpha)
    return values, slopes


def _divergence(student: Tensor, teacher: Tensor, beta: float, buffers: _Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence and forward KL of rows of log probabilities, and the gradients of the student's logits.

    Overwrites both arguments. With a as the derivatives by the student's log probabilities, and p as its
    probabilities, the gradients of its logits are a - p * a.sum().
    """
    (rows, width), dtype = student.shape, student.dtype
    q = torch.exp(teacher, out=buffers("q", rows, width, dtype))
    if beta == 0:
        kl = teacher.sub_(student).mul_(q).sum(-1)
        return kl, kl, _by_logits(q.neg_(), student.exp_())
    ratio = torch.sub(teacher, student, out=buffers("ratio", rows, width, dtype))
    product = buffers("product", rows, width, dtype)
    kl = torch.mul(q, ratio, out=product).sum(-1)
    if beta == 1:
        p = torch.exp(student, out=q)
        value = torch.mul(p, ratio.neg_(), out=product).sum(-1)
        return value, kl, _by_logits(ratio.add_(1).mul_(p), p)
    mixture = torch.add(student, math.log1p(-beta), out=ratio)
    torch.logaddexp(mixture, teacher.add_(math.log(beta)), out=mixture)
    of_teacher = teacher.sub_(math.log(beta)).sub_(mixture).mul_(q).sum(-1)
    ratio = torch.sub(student, mixture, out=mixture)
    p = torch.exp(student, out=q)
    value = beta * of_teacher + (1 - beta) * torch.mul(p, ratio, out=product).sum(-1)
    return value, kl, _by_logits(ratio.mul_(p).mul_(1 - beta), p)


def _by_logits(slopes: Tensor, p: Tensor) -> Tensor:
    return slopes.addcmul_(p, slopes.sum(-1, keepdim=True), value=-1)


def _against_top(
    student: Tensor, given: _Given, part: slice, buffers: _Buffers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence, KL and gradients with the top k of a teacher; and the teacher's predictions.

    Student and teacher are compared on k + 1 events: the k tokens, and all others together. If the teacher has
    probability 0 there ("renormalize"), that is the divergence over the whole vocabulary.
    """
    teacher = given.teacher
    assert isinstance(teacher, TopLogProbs)
    ids, top = teacher.ids[part].long(), teacher.log_probs[part].to(student.dtype)
    if ids.shape[1] == given.common:
        whole = torch.full_like(student, _LEAST).scatter_(1, ids, top).log_softmax(-1).clamp_(min=_LEAST)
        return *_divergence(student, whole, given.beta, buffers), ids[:, 0]
    rest = (1 - top.exp().sum(-1, keepdim=True)).clamp(min=0)
    rest = rest.log().clamp(min=_LEAST) if teacher.tail == "bucket" else torch.full_like(rest, _LEAST)
    # Rounded to 16 bits, the probabilities do not add up to 1 exactly.
    events = torch.cat([top, rest], 1).log_softmax(-1).clamp_(min=_LEAST)
    own = student.gather(1, ids)
    scratch = buffers("q", len(student), given.common, student.dtype).copy_(student).scatter_(1, ids, -math.inf)
    largest = scratch.amax(-1, keepdim=True)
    others = scratch.sub_(largest).exp_().sum(-1, keepdim=True).log() + largest
    divergence, kl, by_events = _divergence(torch.cat([own, others], 1), events, given.beta, _Buffers(0, student))
    # The gradient of an event's logit is shared among its tokens by their probabilities.
    slopes = torch.sub(student, others, out=scratch).exp_().mul_(by_events[:, -1:])
    return divergence, kl, slopes.scatter_(1, ids, by_events[:, :-1]), ids[:, 0]


def _product_dtype(teacher: TeacherStates | TopLogProbs) -> torch.dtype:
    """As autocast has it, within which the loss is called."""
    if isinstance(teacher, TopLogProbs) or teacher.weight is None:
        return torch.float32
    return Head.of(teacher.states, teacher.weight, 1).dtype


def _projection(given: _Given, device: torch.device, buffers: _Buffers) -> Any:
    """A function from rows to the teacher's logits, computed on its device."""
    if isinstance(given.teacher, TopLogProbs):
        return None
    states, weight, bias = given.teacher
    if weight is None:
        return lambda part: states[part].to(device)
    dtype = given.teacher_dtype
    layer, offset = weight.to(dtype), None if bias is None else bias.to(dtype)

    def logits(part: slice) -> Tensor:
        rows = states[part].to(dtype)
        # The student's logits are not needed any more.
        out = buffers("logits", len(rows), len(layer), dtype) if layer.device == device else None
        return head_logits(rows, layer, offset, 1.0, out=out).to(device)

    return logits


def _head(states: Tensor, weight: Tensor | None, vocabulary: int, chunk: int | None) -> Head:
    like = states.new_empty(vocabulary, 0) if weight is None else weight
    head = Head.of(states, like, chunk)
    if chunk is None:  # twice as many matrices of this size as cross-entropy has: the teacher's, too
        chunk = max(1, head.chunk // 2)
    return Head(chunk, states.dtype if weight is None else head.dtype)


def _gain(head: Head) -> float:
    return _HALF_GAIN if head.dtype is torch.float16 else 1.0


def _select(teacher: TeacherStates | TopLogProbs, kept: Tensor | None) -> TeacherStates | TopLogProbs:
    """Flat rows of the teacher's tensors, without those that are not supervised."""

    def rows(tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        return flat if kept is None else flat[kept.to(flat.device)]

    if isinstance(teacher, TopLogProbs):
        return teacher._replace(ids=rows(teacher.ids), log_probs=rows(teacher.log_probs))
    return teacher._replace(states=rows(teacher.states))


def _no_values(hidden: Tensor, given: _Given) -> _Values:
    """Of a batch in which nothing is supervised."""
    empty = upcast(hidden.new_empty(0))
    return _Values(*([empty] * 4), *([given.valid[:0]] * 2))


def _check_teacher(teacher: TeacherStates | TopLogProbs, labels: Tensor, beta: float) -> None:
    if isinstance(teacher, TopLogProbs):
        check_tail(teacher.tail, beta)
        if teacher.ids.shape != teacher.log_probs.shape or teacher.ids.shape[:-1] != labels.shape:
            shapes = f"{tuple(teacher.ids.shape)} and {tuple(teacher.log_probs.shape)}"
            raise BadArgument(expected(f"ids and log probabilities {(*labels.shape, 'k')}", shapes))
    elif teacher.states.shape[:-1] != labels.shape:
        what = f"states of the teacher {(*labels.shape, 'size')}, like the labels"
        raise BadArgument(expected(what, tuple(teacher.states.shape)))
