"""Token-level distillation: equal to TRL's GKD and to full logits, in chunks, with any part of the vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from trl.experimental.gkd import GKDTrainer

from trainformer.core.errors import BadArgument
from trainformer.losses.divergence import TeacherStates, TopLogProbs, distillation_loss

BETAS = [0.0, 0.3, 0.5, 1.0]
# Reverse KL is infinite where the teacher has probability 0.
TAILS = [*((beta, "bucket") for beta in BETAS), *((beta, "renormalize") for beta in BETAS[:-1])]
WIDTH, VOCABULARY = 12, 40


def toys(dtype=torch.float64, vocabulary=VOCABULARY, teacher_vocabulary=VOCABULARY):
    """Student (hidden, weight, bias), teacher (hidden, weight, bias), labels with gaps."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = [normal(2, 9, WIDTH), normal(vocabulary, WIDTH), normal(vocabulary)]
    teacher = [normal(2, 9, 7), normal(teacher_vocabulary, 7), normal(teacher_vocabulary)]
    labels = torch.randint(0, min(vocabulary, teacher_vocabulary), (2, 9), generator=generator)
    labels[0, :4] = labels[1, 7:] = -100
    return [x.to(dtype).requires_grad_() for x in student], [x.to(dtype) for x in teacher], labels


def logits_of(hidden, weight, bias):
    return hidden @ weight.T + bias


def jsd(student, teacher, beta):
    """The divergence of rows of logits, from its definition with probabilities."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    if beta in (0, 1):
        a, b = (q, p) if beta == 0 else (p, q)
        return (a * (a / b).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


def gradients(value, tensors):
    value.backward()
    found = [x.grad.clone() for x in tensors]
    for x in tensors:
        x.grad = None
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_that_of_gkd(beta, temperature):
    student, teacher, labels = toys(torch.float32)
    theirs = GKDTrainer.generalized_jsd_loss(
        logits_of(*student)[:, :-1], logits_of(*teacher)[:, :-1], labels[:, 1:], beta=beta, temperature=temperature,
        reduction="sum",
    )  # fmt: skip
    wanted = gradients(theirs, student)
    for chunk in (3, 1000):
        options = {"beta": beta, "temperature": temperature, "chunk_tokens": chunk}
        found = distillation_loss(
            student[0], labels, TeacherStates(*teacher), weight=student[1], bias=student[2], **options
        )
        torch.testing.assert_close(found.sum, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.divergence, theirs.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(found.sum, student), wanted, rtol=1e-4, atol=1e-5)
        plain = distillation_loss(logits_of(*student), labels, TeacherStates(logits_of(*teacher)), **options)
        torch.testing.assert_close(gradients(plain.sum, student), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_are_those_of_full_logits(beta):
    """With cross-entropy, tokens without a label, and a teacher with more or fewer rows than the student."""
    hard = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    for sizes in ((VOCABULARY, VOCABULARY), (VOCABULARY, VOCABULARY + 8), (VOCABULARY + 8, VOCABULARY)):
        student, teacher, labels = toys(vocabulary=sizes[0], teacher_vocabulary=sizes[1])
        options = {"weight": student[1], "bias": student[2], "beta": beta, "temperature": 1.5, "alpha": 0.7}
        found = distillation_loss(student[0], labels, TeacherStates(*teacher), hard=hard, chunk_tokens=4, **options)
        mine = gradients(3 * found.sum, student)
        own, other = logits_of(*student)[:, :-1], logits_of(*teacher)[:, :-1]
        valid, common = labels[:, 1:] != -100, min(sizes)
        divergence = jsd(own[..., :common] / 1.5, other[..., :common] / 1.5, beta)[valid].sum()
        losses = F.cross_entropy(own.flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(2, 8)
        counted = valid & hard[:, 1:]
        torch.testing.assert_close(found.divergence, divergence.detach())
        torch.testing.assert_close(found.cross_entropy, losses[counted].sum().detach())
        assert (found.weight, found.hard) == (valid.sum(), counted.sum())
        assert found.correct == (counted & (own.argmax(-1) == labels[:, 1:])).sum()
        agree = own.argmax(-1) == other[..., :common].argmax(-1)
        assert found.agree == (valid & agree).sum()
        torch.testing.assert_close(found.per_token.sum(), found.sum.detach())
        wanted = gradients(3 * (0.7 * divergence + 0.3 * losses[counted].sum()), student)
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_tokens_are_never_in_memory(beta, dtype):
    hidden = torch.randn(2, 32, 4, requires_grad=True)
    weight, labels = torch.randn(500, 4, requires_grad=True), torch.randint(0, 500, (2, 32))
    states = TeacherStates(torch.randn(2, 32, 6), torch.randn(500, 6))
    sizes = {}
    for chunk in (4, 64):
        with Largest() as largest, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            found = distillation_loss(
                hidden, labels, states, weight=weight, beta=beta, alpha=0.5, temperature=2.0, chunk_tokens=chunk
            )
            found.sum.backward()
        sizes[chunk] = largest.elements
    assert sizes[4] <= max(4 * 500, 500 * 6)  # the logits of a chunk, or the output layer itself
    assert sizes[64] >= 62 * 500


def test_a_second_backward_pass_gives_the_same_gradients():
    student, teacher, labels = toys()
    found = distillation_loss(student[0], labels, TeacherStates(*teacher), weight=student[1], bias=student[2])
    found.sum.backward(retain_graph=True)
    first = [x.grad.clone() for x in student]
    found.sum.backward()
    torch.testing.assert_close([x.grad for x in student], [2 * x for x in first])


def top(teacher, k, tail, temperature=1.0):
    values, ids = (logits_of(*teacher) / temperature).log_softmax(-1).topk(k, -1)
    return TopLogProbs(ids, values, len(teacher[1]), tail)


@pytest.mark.parametrize(("beta", "tail"), TAILS)
def test_all_tokens_as_the_top_k_are_the_full_vocabulary(beta, tail):
    student, teacher, labels = toys()
    layer = {"weight": student[1], "bias": student[2], "beta": beta, "temperature": 2.0, "alpha": 0.8}
    full = distillation_loss(student[0], labels, TeacherStates(*teacher), **layer)
    wanted = gradients(full.sum, student)
    found = distillation_loss(student[0], labels, top(teacher, VOCABULARY, tail, 2.0), chunk_tokens=3, **layer)
    torch.testing.assert_close(gradients(found.sum, student), wanted, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found[:8], full[:8], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("beta", "tail"), TAILS)
def test_the_tail_of_the_teacher(beta, tail):
    """Against the definition on k + 1 events (bucket), or on the whole vocabulary with zeros (renormalize)."""
    student, teacher, labels = toys()
    known = top(teacher, 5, tail)
    found = distillation_loss(student[0], labels, known, weight=student[1], bias=student[2], beta=beta, chunk_tokens=4)
    mine = gradients(found.sum, student)
    p = logits_of(*student).softmax(-1)[:, :-1]
    ids, q = known.ids[:, :-1], known.log_probs[:, :-1].exp()
    if tail == "bucket":
        pair = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p.gather(-1, ids), q)]
    else:
        pair = [p, torch.zeros_like(p).scatter(-1, ids, q / q.sum(-1, keepdim=True)) + 1e-300]
    wanted = jsd(pair[0].log(), pair[1].log(), beta)[labels[:, 1:] != -100].sum()
    torch.testing.assert_close(found.sum, wanted)
    torch.testing.assert_close(mine, gradients(wanted, student), rtol=1e-8, atol=1e-10)
    if tail == "bucket" and beta == 0:  # events together tell less than events apart
        full = distillation_loss(student[0], labels, TeacherStates(*teacher), weight=student[1], bias=student[2])
        assert found.sum < full.sum


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_half_precision_stays_close(beta, dtype):
    student, teacher, labels = toys(torch.float32)
    layer = {"weight": student[1], "bias": student[2], "beta": beta, "alpha": 0.5}
    exact = distillation_loss(student[0], labels, TeacherStates(*teacher), **layer)
    wanted = gradients(exact.sum, student)
    with torch.autocast("cpu", dtype=dtype):
        found = distillation_loss(student[0], labels, TeacherStates(*teacher), chunk_tokens=4, **layer)
    tolerance = 4 * torch.finfo(dtype).eps
    assert found.sum.dtype is torch.float32
    torch.testing.assert_close(found.sum, exact.sum, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(gradients(found.sum, student), wanted, strict=True):
        assert mine.dtype is torch.float32
        assert (mine - theirs).norm() < 4 * tolerance * theirs.norm()


def test_extreme_logits_and_empty_batches_are_finite():
    student, teacher, labels = toys(torch.float32)
    for beta in BETAS:
        for factor in (1.0, 300.0):
            near = [teacher[0] * factor, *teacher[1:]]
            for known in (TeacherStates(*near), top(near, 3, "bucket")):
                found = distillation_loss(
                    student[0] * factor, labels, known, weight=student[1], bias=student[2], beta=beta
                )
                assert found.sum.isfinite()
                assert all(x.isfinite().all() for x in gradients(found.sum, student))
    nothing = distillation_loss(student[0], torch.full_like(labels, -100), TeacherStates(*teacher), weight=student[1])
    nothing.sum.backward()
    assert (nothing.sum, nothing.weight) == (0, 0)
    assert not student[0].grad.any()


def test_wrong_arguments():
    student, teacher, labels = toys()
    states = TeacherStates(*teacher)
    for options, message in [
        ({"beta": 1.5}, "beta to be from 0 to 1"),
        ({"alpha": -0.1}, "alpha to be from 0 to 1"),
        ({"temperature": 0}, "temperature to be a positive number"),
        ({"bias": student[2]}, "the weight of the output layer too"),
    ]:
        with pytest.raises(BadArgument, match=message):
            distillation_loss(logits_of(*student), labels, states, **options)
    with pytest.raises(BadArgument, match="states of the teacher"):
        distillation_loss(logits_of(*student), labels, TeacherStates(teacher[0][:, 1:], *teacher[1:]))
    with pytest.raises(BadArgument, match="reverse KL is infinite"):
        distillation_loss(logits_of(*student), labels, top(teacher, 3, "renormalize"), beta=1.0)
    with pytest.raises(BadArgument, match="Did you mean 'bucket'"):
        distillation_loss(logits_of(*student), labels, top(teacher, 3, "buckets"))
