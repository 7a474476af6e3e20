"""Token losses: equal to plain cross-entropy in value and gradient, in the memory of a few tokens' logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_tools import HALVES, assert_close, value_and_gradients, waits_are_errors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from trainformer.core.errors import BadArgument, DataError
from trainformer.losses.tokens import TokenLoss, linear_cross_entropy, sequence_log_probs, token_cross_entropy

BATCH, LENGTH, WIDTH, WORDS = 3, 17, 16, 53
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shift": False},
    {"softcap": 4.0},
    {"logit_scale": 0.3},
    {"z_loss": 0.1},
    {"label_smoothing": 0.2},
    {"softcap": 4.0, "logit_scale": 1.7, "z_loss": 0.05, "label_smoothing": 0.1},
]


def case(words: int = WORDS, supervised: float = 0.7, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states, weight, bias and labels."""
    hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    weight, bias = torch.randn(words, WIDTH, dtype=dtype) * 0.5, torch.randn(words, dtype=dtype)
    labels = torch.randint(0, words, (BATCH, LENGTH))
    return hidden, weight, bias, labels.masked_fill(torch.rand(BATCH, LENGTH) > supervised, -100)


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shift: bool = True,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Written out: all logits, then the definition, with autograd for the gradients."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    supervised = labels != -100
    logits, labels = logits[supervised], labels[supervised]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    normaliser = logits.exp().sum(-1).log()
    wanted = F.one_hot(labels, logits.shape[-1]) * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    losses = -(wanted * (logits - normaliser[:, None])).sum(-1) + z_loss * normaliser**2
    return losses.sum(), supervised.sum(), (logits.argmax(-1) == labels).sum()


# -- logits ------------------------------------------------------------------------------------------------


def test_transformers_agrees() -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    hidden, weight, _, labels = case()
    logits = hidden @ weight.T
    mine = token_cross_entropy(logits, labels)
    torch.testing.assert_close(mine.sum / mine.weight, loss_utils.ForCausalLMLoss(logits, labels, WORDS))
    masked = token_cross_entropy(logits, labels, shift=False)
    torch.testing.assert_close(masked.sum / masked.weight, loss_utils.ForMaskedLMLoss(logits, labels, WORDS))


@pytest.mark.parametrize("options", [{}, {"shift": False}, {"z_loss": 0.1}, {"label_smoothing": 0.2}])
def test_token_cross_entropy_matches_its_definition(options: dict[str, Any]) -> None:
    hidden, weight, bias, labels = case()
    total, count, correct = plain(hidden, weight, labels, bias=bias, **options)
    mine = token_cross_entropy(F.linear(hidden, weight, bias), labels, **options)
    torch.testing.assert_close(mine.sum, total)
    assert (mine.weight, mine.correct) == (count, correct)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, labels = torch.randn(4, 500, 40, dtype=torch.bfloat16), torch.randint(0, 40, (4, 500))
    found = token_cross_entropy(logits, labels)
    assert found.sum.dtype is torch.float32
    torch.testing.assert_close(found.sum, token_cross_entropy(logits.double(), labels).sum.float())


# -- without all logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1000, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks_match_plain_cross_entropy(options: dict[str, Any], chunk: int | None) -> None:
    hidden, weight, bias, labels = case()
    mine = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=chunk, **options)
    _, count, correct = plain(hidden, weight, labels, bias=bias, **options)
    assert (mine.weight, mine.correct) == (count, correct)

    def ours(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return 3 * linear_cross_entropy(h, w, labels, bias=b, chunk_tokens=chunk, **options).sum

    def theirs(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return 3 * plain(h, w, labels, bias=b, **options)[0]

    # The reference is in float64: two float32 results differ from each other by both their roundings.
    wide = [x.double() for x in (hidden, weight, bias)]
    assert_close(value_and_gradients(ours, hidden, weight, bias), _single(value_and_gradients(theirs, *wide)), 1e-6)


def _single(tensors: list[Tensor]) -> list[Tensor]:
    return [x.float() for x in tensors]


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    hidden, weight, bias, labels = case(words=5, dtype=torch.float64)
    leaves = [x[..., :4].clone().requires_grad_() for x in (hidden[:2, :5], weight)]
    leaves.append(bias.requires_grad_())
    labels = labels[:2, :5]

    def total(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, bias=b, chunk_tokens=3, **options).sum

    def per_sequence(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return sequence_log_probs(h, labels, weight=w, bias=b, chunk_tokens=3, softcap=options.get("softcap")).sum

    assert torch.autograd.gradcheck(total, leaves)
    assert torch.autograd.gradcheck(per_sequence, leaves)


def test_tied_weights() -> None:
    table, labels = torch.randn(WORDS, WIDTH), case()[-1]
    ids = torch.randint(0, WORDS, (BATCH, LENGTH))

    def ours(w: Tensor) -> Tensor:
        return linear_cross_entropy(F.embedding(ids, w).tanh(), w, labels, chunk_tokens=7).sum

    assert_close(
        value_and_gradients(ours, table),
        value_and_gradients(lambda w: plain(F.embedding(ids, w).tanh(), w, labels)[0], table),
        2e-6,
    )


def test_a_second_backward_pass_gives_the_same_gradients() -> None:
    hidden, weight, bias, labels = case()
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    total = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=7).sum
    first = torch.autograd.grad(total * 5, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(total * 10, leaves)
    assert_close([g / 2 for g in second], kept, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)), "the first gradients were overwritten"


def test_a_second_derivative_is_rejected() -> None:
    hidden, weight, _, labels = case()
    hidden.requires_grad_()
    for total in (
        linear_cross_entropy(hidden, weight, labels).sum,
        sequence_log_probs(hidden, labels, weight=weight).sum.sum(),
    ):
        with pytest.raises(BadArgument, match="create_graph"):
            torch.autograd.grad(total, hidden, create_graph=True)


@pytest.mark.parametrize("own", [False, True], ids=["float32 weights", "half weights"])
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_is_as_accurate_as_plain_cross_entropy(dtype: torch.dtype, own: bool) -> None:
    hidden, weight, bias, labels = case(words=2000)
    weight = weight.to(dtype) if own else weight
    wide = [hidden.double(), weight.double(), bias.double()]
    right = value_and_gradients(lambda h, w, b: 64 * plain(h, w, labels, bias=b)[0], *wide)

    def error(found: list[Tensor]) -> list[float]:
        return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, right, strict=True)]

    def ours(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found = linear_cross_entropy(h, w, labels, bias=b, chunk_tokens=7)
        assert found.sum.dtype is torch.float32
        return 64 * found.sum

    mine = value_and_gradients(ours, hidden, weight, bias, autocast=dtype)
    theirs = value_and_gradients(
        lambda h, w, b: 64 * plain(h, w, labels, bias=b)[0], hidden, weight, bias, autocast=dtype
    )
    assert [x.dtype for x in mine[1:]] == [hidden.dtype, weight.dtype, bias.dtype]
    for a, b in zip(error(mine), error(theirs), strict=True):
        assert a < 1.5 * b + 1e-5, "further from the truth than plain cross-entropy"


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_nearly_certain_tokens_are_accurate(dtype: torch.dtype) -> None:
    """p = 0.995, which bfloat16 rounds to 0.996: p - 1 must not be computed from that. The logits are exact."""
    hidden, weight, labels = 6 * torch.eye(3), torch.eye(3), torch.arange(3)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, shift=False).sum

    mine = value_and_gradients(ours, hidden, weight, autocast=dtype)
    theirs = value_and_gradients(lambda h, w: plain(h[None], w, labels[None], shift=False)[0], hidden, weight)
    assert_close(mine, theirs, 0.01)


def test_float16_keeps_small_gradients_and_large_ones() -> None:
    """Probabilities of 1e-5, a loss scale of 65536, and a sum of 200 states that float16 cannot hold."""
    words, tokens = 100_000, 200
    hidden, weight = torch.full((1, tokens, 2), 400.0), torch.zeros(words, 2)
    labels = torch.zeros(1, tokens, dtype=torch.long)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, shift=False).sum / tokens * 65536

    _, _, by_weight = value_and_gradients(ours, hidden, weight, autocast=torch.float16)
    share = 400.0 * 65536 / words
    torch.testing.assert_close(by_weight[1:] / share, torch.ones(words - 1, 2), rtol=0, atol=1e-3)
    torch.testing.assert_close(by_weight[0], torch.full((2,), -400.0 * 65536), rtol=1e-3, atol=0)


def test_float16_states() -> None:
    """Gradients by states in float16 wait for the loss scale in float32: before it they are in no range of float16."""
    hidden, weight, _, labels = case()
    hidden, weight = hidden.half(), weight * 50

    def ours(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, chunk_tokens=7).sum

    want = value_and_gradients(lambda h, w: plain(h, w, labels)[0], hidden.double(), weight.half().double())
    assert_close(value_and_gradients(ours, hidden, weight, autocast=torch.float16), want, 0.03)


def test_without_supervised_tokens_everything_is_zero() -> None:
    hidden, weight, bias, labels = case(supervised=0.0)
    found = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert (found.sum, found.weight, found.correct) == (0, 0, 0)
    assert token_cross_entropy(hidden @ weight.T, labels, z_loss=0.1).sum == 0
    gradients = value_and_gradients(
        lambda h, w, b: linear_cross_entropy(h, w, labels, bias=b).sum, hidden, weight, bias
    )
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_sums_do_not_depend_on_the_batch_size() -> None:
    hidden, weight, _, labels = case()
    whole = linear_cross_entropy(hidden, weight, labels)
    parts = [linear_cross_entropy(hidden[i : i + 1], weight, labels[i : i + 1]) for i in range(BATCH)]
    for together, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.stack(pieces).sum(), together)


def test_other_modes() -> None:
    hidden, weight, _, labels = case()
    want = linear_cross_entropy(hidden, weight, labels)
    with torch.inference_mode():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight.requires_grad_(), labels), want)
    # A weight in half precision without autocast is lifted, not rejected; its gradient is in its own precision.
    half = weight.detach().bfloat16()
    found = value_and_gradients(lambda h, w: linear_cross_entropy(h, w, labels).sum, hidden, half)
    lifted = value_and_gradients(lambda h, w: plain(h, w, labels)[0], hidden, half.float())
    assert found[2].dtype is torch.bfloat16
    assert_close(found[:2], lifted[:2])
    assert_close(found[2:], lifted[2:], 0.005)


def test_odd_inputs() -> None:
    hidden, weight, _, labels = case()
    want = linear_cross_entropy(hidden, weight, labels, shift=False)
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    flat = linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), shift=False)
    other = labels.masked_fill(labels == -100, -1).int()
    for found in (
        linear_cross_entropy(strided, weight.T.contiguous().T, labels, shift=False),
        flat,
        linear_cross_entropy(hidden, weight, other, shift=False, ignore_index=-1),
        token_cross_entropy(hidden @ weight.T, other, shift=False, ignore_index=-1),
    ):
        torch.testing.assert_close(found, want)


# -- what it costs -----------------------------------------------------------------------------------------


def flops(work: Callable[[], Any]) -> int:
    def in_place(_: Any, a: Any, b: Any, **__: Any) -> int:  # which the counter leaves out
        return 2 * a[0] * a[1] * b[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        work()
    return counter.get_total_flops()


def test_the_number_of_matrix_products_is_minimal() -> None:
    hidden, weight, _, labels = case(supervised=1.0)
    one = 2 * BATCH * LENGTH * WIDTH * WORDS
    hidden.requires_grad_()

    def total(w: Tensor, y: Tensor = labels) -> Tensor:
        return linear_cross_entropy(hidden, w, y, shift=False, chunk_tokens=20).sum

    frozen, learned = weight, weight.clone().requires_grad_()
    with torch.no_grad():
        assert flops(lambda: total(learned)) == one, "an evaluation computes no gradients"
    assert flops(lambda: total(frozen).backward()) == 2 * one, "a frozen weight costs nothing"
    assert flops(lambda: total(learned).backward()) == 3 * one, "as many as plain cross-entropy"
    few = labels.clone()
    few[1:] = -100
    assert flops(lambda: total(learned, few).backward()) == one, "unsupervised tokens cost nothing on the CPU"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_the_full_logits_are_never_materialised() -> None:
    tokens, words, chunk = 600, 700, 20
    hidden, weight = torch.randn(1, tokens, WIDTH, requires_grad=True), torch.randn(words, WIDTH, requires_grad=True)
    labels = torch.randint(0, words, (1, tokens))
    allowed = max(chunk * words, words * WIDTH, tokens * WIDTH)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, z_loss=1e-4, softcap=30.0).sum.backward()
        sequence_log_probs(hidden, labels, weight=weight, chunk_tokens=chunk).sum.sum().backward()
    assert largest.size == allowed
    with Largest() as largest:
        token_cross_entropy(hidden @ weight.T, labels).sum.backward()
    assert largest.size == tokens * words, "the measurement sees all logits where there are any"


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled(backend: str) -> None:
    hidden, weight, bias, labels = case()

    def total(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        preferred = sequence_log_probs(h, labels, weight=w, bias=b, chunk_tokens=20).sum
        return linear_cross_entropy(h, w, labels, bias=b, chunk_tokens=20).sum + preferred.sigmoid().sum()

    compiled = torch.compile(total, backend=backend, fullgraph=True)
    want = value_and_gradients(total, hidden, weight, bias)
    assert_close(value_and_gradients(compiled, hidden, weight, bias), want)
    if backend == "aot_eager":
        return  # which says itself that what it compiled runs backwards once
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    value = compiled(*leaves)
    torch.autograd.grad(value * 5, leaves, retain_graph=True)
    assert_close(list(torch.autograd.grad(value, leaves)), want[1:])


# -- sequences ---------------------------------------------------------------------------------------------


def preference(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss that weighs sequences by what they are, as DPO does."""
    return lambda *tensors: -F.logsigmoid(0.1 * of(*tensors) * torch.tensor([1.0, -1.0, 2.0])).sum() * 1000


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_sequence_log_probs_match_plain_log_softmax(chunk: int | None) -> None:
    hidden, weight, bias, labels = case()

    def theirs(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        logs = F.linear(h, w, b).log_softmax(-1)
        wanted = [[(i, t) for t in range(LENGTH - 1) if labels[i, t + 1] != -100] for i in range(BATCH)]
        return torch.stack([sum((logs[i, t, labels[i, t + 1]] for i, t in row), h.new_zeros(())) for row in wanted])

    def from_states(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return sequence_log_probs(h, labels, weight=w, bias=b, chunk_tokens=chunk).sum

    def from_logits(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return sequence_log_probs(F.linear(h, w, b), labels).sum

    want = value_and_gradients(preference(theirs), hidden, weight, bias)
    for ours in (from_states, from_logits):
        torch.testing.assert_close(ours(hidden, weight, bias), theirs(hidden, weight, bias))
        assert_close(value_and_gradients(preference(ours), hidden, weight, bias), want, 5e-6)
    assert torch.equal(sequence_log_probs(hidden @ weight.T, labels).tokens, (labels[:, 1:] != -100).sum(-1))


@pytest.mark.slow
def test_sequence_log_probs_match_trl() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    hidden, weight, _, labels = case()
    picked = utils.selective_log_softmax((hidden @ weight.T)[:, :-1], labels[:, 1:].clamp(min=0))
    want = (picked * (labels[:, 1:] != -100)).sum(-1)
    torch.testing.assert_close(sequence_log_probs(hidden, labels, weight=weight).sum, want)


def test_sequence_options() -> None:
    hidden, weight, bias, labels = case()
    found = sequence_log_probs(hidden, labels, weight=weight, bias=bias, shift=False, softcap=4.0, logit_scale=1.7)
    total, count, _ = plain(hidden, weight, labels, bias=bias, shift=False, softcap=4.0, logit_scale=1.7)
    torch.testing.assert_close(found.sum.sum(), -total)
    assert found.tokens.sum() == count


@pytest.mark.parametrize("dtype", HALVES)
def test_scaled_sequences_under_autocast(dtype: torch.dtype) -> None:
    """A loss scale of 65536 makes slopes that float16 could not multiply with."""
    hidden, weight, bias, labels = case()

    def scaled(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return sequence_log_probs(h * 8, labels, weight=w, bias=b, chunk_tokens=7).sum.sum() * 65536

    want = value_and_gradients(scaled, hidden.double(), weight.double(), bias.double())
    assert_close(value_and_gradients(scaled, hidden, weight, bias, autocast=dtype), want, 0.02)


# -- models ------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "gemma 2": ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 8}, {"softcap": 3.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """The sum and every parameter's gradient are those of the model's own logits."""
    transformers = pytest.importorskip("transformers")
    family, extra, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.3,
        **extra,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(1, 97, (2, 12))
    labels = ids.masked_fill(torch.rand(2, 12) < 0.3, -100)
    logits = model(ids).logits
    want = token_cross_entropy(logits, labels)
    want.sum.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    hidden = model.model(ids).last_hidden_state
    found = linear_cross_entropy(hidden, model.get_output_embeddings().weight, labels, chunk_tokens=5, **options)
    found.sum.backward()
    torch.testing.assert_close(found, want)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[key], rtol=1e-4, atol=1e-5, msg=key)


# -- errors ------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight": torch.randn(WORDS, WIDTH + 1)}, r"weight \(V, D\) and hidden"),
    ({"bias": torch.randn(WORDS + 1)}, r"bias \(53,\)"),
    ({"labels": torch.zeros(BATCH, LENGTH - 1, dtype=torch.long)}, "unshifted"),
    ({"labels": torch.zeros(BATCH, LENGTH)}, "token ids"),
    ({"chunk_tokens": 0}, "chunk_tokens"),
    ({"softcap": 0.0}, "softcap"),
    ({"logit_scale": -1.0}, "logit_scale"),
    ({"z_loss": -1e-4}, "z_loss"),
    ({"label_smoothing": 1.0}, "label_smoothing"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    hidden, weight, _, labels = case()
    given = {"hidden": hidden, "weight": weight, "labels": labels, **change}
    with pytest.raises(BadArgument, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_labels_beyond_the_vocabulary(wrong: int) -> None:
    hidden, weight, _, labels = case()
    labels[0, 3] = wrong
    with pytest.raises(DataError, match=rf"labels from 0 to 52, or -100, received {wrong}.*resize_token_embeddings"):
        linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(DataError, match="labels from 0 to 52"):
        token_cross_entropy(hidden @ weight.T, labels)


def test_logits_take_no_layer_arguments() -> None:
    with pytest.raises(BadArgument, match="output layer"):
        sequence_log_probs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), softcap=30.0)


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["float32 weights", "half weights"])
@pytest.mark.parametrize("dtype", [None, *HALVES], ids=str)
def test_cuda_without_a_sync(dtype: torch.dtype | None, own: bool) -> None:
    hidden, weight, bias, labels = case(words=2000)
    weight = weight.to(dtype) if own and dtype else weight
    moved, there = [x.cuda() for x in (hidden, weight, bias)], labels.cuda()

    def total(y: Tensor) -> Callable[..., Tensor]:
        def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
            found = linear_cross_entropy(h, w, y, bias=b, chunk_tokens=7, z_loss=1e-3)
            return 2 * (found.sum + sequence_log_probs(h, y, weight=w, bias=b, chunk_tokens=7).sum.square().mean())

        return loss

    want = value_and_gradients(total(labels), hidden.double(), weight.double(), bias.double())
    value_and_gradients(total(there), *moved, autocast=dtype)  # handles and workspaces are made here
    with waits_are_errors():
        got = value_and_gradients(total(there), *moved, autocast=dtype)
    assert_close([x.cpu() for x in got], want, {None: 2e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype])
    assert linear_cross_entropy(moved[0], moved[1].float(), there).correct.device.type == "cuda"


@pytest.mark.gpu
def test_cuda_memory() -> None:
    tokens, words, width = 4096, 32_000, 256
    hidden = torch.randn(1, tokens, width, device="cuda", requires_grad=True)
    weight = (torch.randn(words, width, device="cuda") * 0.05).requires_grad_()
    labels = torch.randint(0, words, (1, tokens), device="cuda")

    def peak(work: Callable[[], TokenLoss]) -> int:
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work().sum.backward()
        return torch.cuda.max_memory_allocated() - before

    chunked = peak(lambda: linear_cross_entropy(hidden, weight, labels, chunk_tokens=256))
    everything = peak(lambda: token_cross_entropy(hidden @ weight.T, labels))
    assert everything > 2 * math.prod((tokens, words, 4))
    assert chunked < everything / 8
