"""Token-level distillation on JAX: divergence of a student's predictions from a teacher's. Never imports torch.

The divergence is the generalised Jensen-Shannon divergence of GKD, as in `losses.divergence`. With `chunks` only the
logits of a part of the sequence exist at a time, those of the student and of the teacher, and are recomputed for the
gradient. The teacher is given by its hidden states and head, by logits, or by its `k` most probable tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_softmax

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.losses.jax.tokens import IGNORE_INDEX, Head, strided_chunks

TAILS = ("bucket", "renormalize")
_LEAST = -1e4  # stands for the log of 0: its exponential is 0, and products with 0 are 0, not NaN


class TeacherStates(NamedTuple):
    """A teacher's logits (rows, T, V), or with a `head` its hidden states."""

    states: jax.Array
    head: Head | None = None


class TopLogProbs(NamedTuple):
    """The `k` most probable tokens of a teacher (rows, T, k), the most probable first, and their log probabilities.

    `vocabulary` is the number of tokens that the probabilities are normalised over. `tail` says what becomes of all
    other tokens: one event with the rest of the probability (`"bucket"`), or probability 0 (`"renormalize"`).
    """

    ids: jax.Array
    log_probs: jax.Array
    vocabulary: int
    tail: str = "bucket"


class DistillationSums(NamedTuple):
    """Sums over the supervised tokens of each sequence (rows,). Only `loss` has a gradient.

    `divergence` is what `beta` selects, `kl` always the forward KL. `correct` counts predictions equal to the label,
    `agree` those equal to the teacher's.
    """

    loss: jax.Array
    tokens: jax.Array
    divergence: jax.Array
    kl: jax.Array
    cross_entropy: jax.Array
    correct: jax.Array
    agree: jax.Array


def distillation_sums(
    states: jax.Array,
    labels: jax.Array,
    teacher: TeacherStates | TopLogProbs,
    head: Head | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    alpha: float = 1.0,
    chunks: int = 1,
) -> DistillationSums:
    """``alpha * divergence + (1 - alpha) * cross_entropy``, summed over the supervised tokens of each sequence.

    `states` are the student's logits (rows, T, V), or its hidden states if there is a `head`. A position predicts the
    label of the next one; labels of -100 are not supervised.

    With student p, teacher q and m = beta q + (1 - beta) p, the divergence is KL(q, p) for ``beta=0`` (forward KL),
    KL(p, q) for ``beta=1`` (reverse KL), else beta KL(q, m) + (1 - beta) KL(p, m). Both distributions are
    softmax(logits / temperature); the result is not multiplied by the squared temperature. Cross-entropy has
    temperature 1. If one vocabulary is larger, the divergence is over the tokens that both have.

    >>> logits, labels = jax.random.normal(jax.random.key(0), (2, 5, 8)), jnp.ones((2, 5), int)
    >>> found = distillation_sums(logits, labels, TeacherStates(logits))
    >>> bool(abs(found.loss.sum()) < 1e-5), found.agree.tolist()
    (True, [4.0, 4.0])
    """
    labels = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    arrays: tuple[jax.Array, ...]
    arrays = (teacher.ids, teacher.log_probs) if isinstance(teacher, TopLogProbs) else (teacher.states,)

    def sums(states: jax.Array, labels: jax.Array, *arrays: jax.Array) -> DistillationSums:
        part: TeacherStates | TopLogProbs
        if isinstance(teacher, TopLogProbs):
            part = TopLogProbs(arrays[0], arrays[1], teacher.vocabulary, teacher.tail)
        else:
            part = TeacherStates(arrays[0] if teacher.head is None else teacher.head(arrays[0]))
        return _sums(states if head is None else head(states), labels, part, beta, temperature, alpha)

    arrays = jax.lax.stop_gradient(arrays)
    if chunks == 1:
        return sums(states, labels, *arrays)
    pieces = strided_chunks(states, chunks), strided_chunks(labels, chunks, IGNORE_INDEX)
    chunked = *pieces, *(strided_chunks(array, chunks) for array in arrays)

    def body(carry: DistillationSums, chunk: tuple[jax.Array, ...]) -> tuple[DistillationSums, None]:
        return jax.tree.map(jnp.add, carry, jax.checkpoint(sums)(*chunk)), None

    zeros = jnp.zeros(labels.shape[0], jnp.float32)
    total, _ = jax.lax.scan(body, DistillationSums(*[zeros] * 7), chunked)
    return total


def check_divergence(beta: float, temperature: float, alpha: float) -> None:
    """Reject invalid settings of the divergence."""
    for name, value, do in (
        ("beta", beta, "0 is forward KL, 1 is reverse KL."),
        ("alpha", alpha, "1 is distillation alone, 0 is cross-entropy alone."),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise BadArgument(expected(f"{name} to be from 0 to 1", value, do))
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        do = "1 is usual; higher ones weigh unlikely tokens more."
        raise BadArgument(expected("temperature to be a positive number", temperature, do))


def check_tail(tail: str, beta: float) -> None:
    """Reject a treatment of the tail that is unknown or makes the divergence infinite."""
    check_choice("tail", tail, TAILS)
    if tail == "renormalize" and beta == 1:
        do = "Outside of its top k the teacher has probability 0, and reverse KL is infinite. Pass tail='bucket'."
        raise BadArgument(expected("beta below 1 with tail='renormalize'", beta, do))


def _sums(
    logits: jax.Array,
    labels: jax.Array,
    teacher: TeacherStates | TopLogProbs,
    beta: float,
    temperature: float,
    alpha: float,
) -> DistillationSums:
    scores, valid = logits.astype(jnp.float32), labels != IGNORE_INDEX
    whole = log_softmax(scores)
    # Not a gather, whose gradient is a scatter, also with the vocabulary sharded over devices.
    is_label = labels[..., None] == jnp.arange(scores.shape[-1], dtype=labels.dtype)
    cross_entropy = -jnp.sum(jnp.where(is_label, whole, 0.0), axis=-1)
    width = teacher.vocabulary if isinstance(teacher, TopLogProbs) else teacher.states.shape[-1]
    common = min(scores.shape[-1], width)
    plain = temperature == 1 and common == scores.shape[-1]
    student = whole if plain else log_softmax(scores[..., :common] / temperature)
    if isinstance(teacher, TopLogProbs):
        divergence, kl, best = _against_top(student, teacher, beta)
    else:
        theirs = teacher.states[..., :common].astype(jnp.float32)
        best = jnp.argmax(theirs, axis=-1)
        divergence, kl = _divergence(student, jnp.maximum(log_softmax(theirs / temperature), _LEAST), beta)
    predicted = jnp.argmax(logits, axis=-1)
    values = (
        alpha * divergence + (1 - alpha) * cross_entropy,
        jnp.ones_like(kl),
        *jax.lax.stop_gradient((divergence, kl, cross_entropy)),
        predicted == labels,
        predicted == best,
    )
    return DistillationSums(*(jnp.sum(jnp.where(valid, value, 0.0), axis=-1, dtype=jnp.float32) for value in values))


def _divergence(student: jax.Array, teacher: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """Divergence and forward KL of log probabilities."""
    q = jnp.exp(teacher)
    kl = jnp.sum(q * (teacher - student), axis=-1)
    if beta == 0:
        return kl, kl
    p = jnp.exp(student)
    if beta == 1:
        return jnp.sum(p * (student - teacher), axis=-1), kl
    mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    of_teacher = jnp.sum(q * (teacher - mixture), axis=-1)
    return beta * of_teacher + (1 - beta) * jnp.sum(p * (student - mixture), axis=-1), kl


def _against_top(student: jax.Array, teacher: TopLogProbs, beta: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divergence and KL with the top k of a teacher, and the teacher's predictions.

    Student and teacher are compared on k + 1 events: the k tokens, and all others together. If the teacher has
    probability 0 there ("renormalize"), that is the divergence over the whole vocabulary.
    """
    ids, top = teacher.ids, teacher.log_probs.astype(jnp.float32)
    if ids.shape[-1] == student.shape[-1]:
        whole = jnp.put_along_axis(jnp.full_like(student, _LEAST), ids, top, axis=-1, inplace=False)
        whole = jnp.maximum(log_softmax(whole), _LEAST)
        return *_divergence(student, jax.lax.stop_gradient(whole), beta), ids[..., 0]
    rest = jnp.full_like(top[..., :1], _LEAST)
    if teacher.tail == "bucket":
        rest = jnp.maximum(jnp.log(jnp.maximum(1 - jnp.sum(jnp.exp(top), axis=-1, keepdims=True), 0.0)), _LEAST)
    # Rounded to 16 bits, the probabilities do not add up to 1 exactly.
    events = jnp.maximum(log_softmax(jnp.concatenate([top, rest], axis=-1)), _LEAST)
    own = jnp.take_along_axis(student, ids, axis=-1)
    others = jnp.put_along_axis(student, ids, -jnp.inf, axis=-1, inplace=False)
    others = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return *_divergence(jnp.concatenate([own, others], axis=-1), jax.lax.stop_gradient(events), beta), ids[..., 0]
