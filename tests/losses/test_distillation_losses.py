"""Losses of teacher and student against lightly, and the centre's bookkeeping."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import DINOLoss, KoLeoLoss, NegativeCosineSimilarity
from loss_tools import HALVES, assert_close, value_and_gradients
from torch import Tensor

from trainformer.core import BadArgument
from trainformer.losses import (
    Center,
    byol_loss,
    dino_kl,
    dino_loss,
    koleo_loss,
    negative_cosine,
    teacher_entropy,
)


def views(count: int, size: int = 6, width: int = 20, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size, width, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize(("of_teacher", "of_student"), [(2, 2), (2, 5), (1, 3), (3, 4)])
def test_dino_over_several_steps_matches_lightly(of_teacher: int, of_student: int) -> None:
    """The centre moves at each step, so a wrong one shows in the next loss."""
    other, center = DINOLoss(20, teacher_temp=0.07, center_momentum=0.8), Center(20, momentum=0.8)
    for _ in range(4):
        teacher, student = [v + 1.5 for v in views(of_teacher)], views(of_student)
        mine = value_and_gradients(lambda *s, t=teacher: dino_loss(s, t, center.center, 0.1, 0.07), *student)
        theirs = value_and_gradients(lambda *s, t=teacher: other(t, list(s), teacher_temp=0.07), *student)
        assert_close(mine, theirs)
        center.add(teacher)
        center.commit()
        torch.testing.assert_close(center.center, other.center[0], rtol=1e-6, atol=1e-6)
    assert center.center.mean() > 0.5


def test_dino_pairs_are_those_of_a_loop() -> None:
    teacher, student = views(2, dtype=torch.float64), views(4, dtype=torch.float64)
    center = torch.randn(1, 20, dtype=torch.float64)
    want = torch.zeros(6, dtype=torch.float64)
    for t in range(2):
        for s in range(4):
            if s != t:
                target = ((teacher[t] - center) / 0.04).softmax(1)
                want += F.cross_entropy(student[s] / 0.1, target, reduction="none") / 6
    torch.testing.assert_close(dino_loss(student, teacher, center, reduction="none"), want)
    torch.testing.assert_close(dino_loss(torch.stack(student), torch.stack(teacher), center), want.mean())
    torch.testing.assert_close(dino_loss(student, teacher, center, reduction="sum"), want.sum())


def test_the_temperature_of_the_teacher_may_be_a_tensor() -> None:
    teacher, student, center = views(2), views(3), torch.zeros(1, 20)
    got = dino_loss(student, teacher, center, 0.1, torch.tensor(0.05))
    torch.testing.assert_close(got, dino_loss(student, teacher, center, 0.1, 0.05))


def test_the_teacher_gets_no_gradient() -> None:
    teacher = [v.requires_grad_() for v in views(2)]
    student = [v.requires_grad_() for v in views(3)]
    dino_loss(student, teacher, torch.zeros(1, 20)).backward()
    assert all(v.grad is None for v in teacher)
    assert all(v.grad.abs().max() > 0 for v in student)


def test_dino_gradients_are_those_of_finite_differences() -> None:
    teacher = views(2, 2, 5, torch.float64)
    student = [v.requires_grad_() for v in views(3, 2, 5, torch.float64)]
    assert torch.autograd.gradcheck(lambda *s: dino_loss(s, teacher, torch.zeros(1, 5), 0.5, 0.3), student)


@pytest.mark.parametrize("dtype", HALVES)
def test_dino_in_half_precision_is_finite_and_exact(dtype: torch.dtype) -> None:
    """Outputs over temperature reach 1e5 here, more than float16 holds."""
    teacher, student = [4000 * v.to(dtype) for v in views(2)], [4000 * v.to(dtype) for v in views(3)]
    low = value_and_gradients(lambda *s: dino_loss(s, teacher, torch.zeros(1, 20)), *student, autocast=dtype)
    exact = [t.float() for t in teacher]
    want = value_and_gradients(lambda *s: dino_loss(s, exact, torch.zeros(1, 20)), *(s.float() for s in student))
    torch.testing.assert_close(low[0], want[0])
    assert_close(low[1:], want[1:], relative=torch.finfo(dtype).eps)


class TestCenter:
    def test_add_does_not_change_the_center_before_commit(self) -> None:
        center, rows = Center(4), torch.randn(6, 4)
        center.add(rows)
        assert torch.equal(center.center, torch.zeros(1, 4))
        center.commit()
        torch.testing.assert_close(center.center, 0.1 * rows.mean(0, keepdim=True))

    def test_micro_batches_of_any_size_give_one_update(self) -> None:
        whole, parts, rows = Center(4), Center(4), torch.randn(12, 4)
        whole.add(rows)
        for part in (rows[:1], rows[1:8].view(7, 1, 4), rows[8:]):
            parts.add(part)
        parts.add([])
        whole.commit()
        parts.commit()
        torch.testing.assert_close(parts.center, whole.center)

    def test_a_commit_uses_outputs_since_the_last_one(self) -> None:
        center = Center(4, momentum=0.0)
        for _ in range(3):
            rows = torch.randn(5, 4)
            center.add(rows)
            center.commit()
            torch.testing.assert_close(center.center, rows.mean(0, keepdim=True))

    def test_without_new_outputs_the_center_does_not_change(self) -> None:
        center = Center(4)
        center.add(torch.ones(3, 4))
        center.commit()
        before = center.center.clone()
        center.commit()
        assert torch.equal(center.center, before)
        center.add(torch.full((3, 4), 100.0))
        center.discard()
        center.commit()
        assert torch.equal(center.center, before)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_rows_are_skipped(self, bad: float) -> None:
        rows = torch.randn(5, 4)
        broken = rows.clone()
        broken[2, 1] = bad
        center, clean = Center(4), Center(4)
        center.add(broken)
        clean.add(rows[[0, 1, 3, 4]])
        center.commit()
        clean.commit()
        torch.testing.assert_close(center.center, clean.center)
        center.add(torch.full((3, 4), bad))
        center.commit()
        torch.testing.assert_close(center.center, clean.center)

    def test_half_precision_outputs_are_summed_in_float32(self) -> None:
        """The sum of 4096 times 100 overflows float16."""
        center = Center(2, momentum=0.0)
        center.add(torch.full((4096, 2), 100.0, dtype=torch.float16))
        center.commit()
        assert center.center.tolist() == [[100.0, 100.0]]

    def test_only_the_center_is_saved_and_copies_are_independent(self) -> None:
        center = Center(3)
        assert list(center.state_dict()) == ["center"]
        assert [name for name, _ in center.named_buffers()] == ["center"]
        twin = copy.deepcopy(center)
        twin.add(torch.ones(2, 3))
        center.commit()
        assert torch.equal(center.center, torch.zeros(1, 3))

    def test_outputs_do_not_keep_a_graph(self) -> None:
        center = Center(3)
        center.add(torch.ones(2, 3, requires_grad=True))
        center.commit()
        assert not center.center.requires_grad

    def test_bad_arguments_are_rejected(self) -> None:
        with pytest.raises(BadArgument, match="momentum"):
            Center(3, momentum=1.5)
        with pytest.raises(BadArgument, match="dim"):
            Center(0)
        with pytest.raises(BadArgument, match="width 3"):
            Center(3).add(torch.ones(2, 4))


@pytest.mark.parametrize("size", [2, 9])
def test_koleo_matches_lightly(size: int) -> None:
    features = 4 * torch.randn(size, 12)
    assert_close(value_and_gradients(koleo_loss, features), value_and_gradients(KoLeoLoss(), features))


def test_koleo_gradients_and_rows() -> None:
    features = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(koleo_loss, (features,))
    rows = koleo_loss(features, reduction="none")
    unit = F.normalize(features)
    nearest = torch.stack([min((unit[i] - unit[j]).norm() for j in range(6) if j != i) for i in range(6)])
    torch.testing.assert_close(rows, -nearest.log(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(koleo_loss(features, reduction="sum"), rows.sum())


def test_koleo_of_a_single_row_is_zero() -> None:
    value, gradient = value_and_gradients(koleo_loss, torch.randn(1, 4))
    assert value == 0
    assert torch.equal(gradient, torch.zeros(1, 4))


def test_koleo_of_equal_rows_is_finite() -> None:
    value, gradient = value_and_gradients(koleo_loss, torch.ones(4, 8))
    assert value > 10
    assert torch.isfinite(gradient).all()


def test_cosine_losses_match_lightly() -> None:
    p, z = 3 * torch.randn(7, 12), 5 * torch.randn(7, 12)
    other = NegativeCosineSimilarity()
    assert_close(value_and_gradients(negative_cosine, p, z), value_and_gradients(other, p, z))
    mine = value_and_gradients(lambda x: byol_loss(x, z), p)
    assert_close(mine, value_and_gradients(lambda x: 2 + 2 * other(x, z), p))
    distance = (F.normalize(p) - F.normalize(z)).square().sum(1)
    torch.testing.assert_close(byol_loss(p, z, reduction="none"), distance)
    torch.testing.assert_close(byol_loss(p, z, reduction="sum").div(7), byol_loss(p, z))


def test_targets_of_byol_get_no_gradient() -> None:
    p, z = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    byol_loss(p, z).backward()
    assert z.grad is None
    assert p.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_cosines_and_koleo_are_finite_in_half_precision(dtype: torch.dtype) -> None:
    """Equal, opposed, huge and zero rows."""
    p = torch.randn(5, 8)
    z = torch.stack([p[0], -p[1], 1000 * p[2], p[3], p[4]])
    p[4] = 0
    for loss in (lambda x: byol_loss(x, z.to(dtype)), koleo_loss):
        value, gradient = value_and_gradients(loss, p.to(dtype), autocast=dtype)
        assert value.dtype is torch.float32
        assert torch.isfinite(gradient).all()


def test_entropy_is_that_of_torch() -> None:
    logits, center = torch.randn(6, 9), torch.randn(1, 9)
    want = torch.distributions.Categorical(logits=(logits - center) / 0.3).entropy()
    torch.testing.assert_close(teacher_entropy(logits, 0.3, center, reduction="none"), want)
    torch.testing.assert_close(teacher_entropy(logits, 0.3, center), want.mean())


def test_entropy_shows_both_kinds_of_collapse() -> None:
    same = torch.zeros(4, 50)
    assert teacher_entropy(same, 0.04).item() == pytest.approx(math.log(50), rel=1e-6)
    one = F.one_hot(torch.zeros(4, dtype=torch.long), 50) * 1e4
    assert teacher_entropy(one, 0.04).item() == 0


def test_divergence_is_that_of_torch() -> None:
    teacher, student, center = views(2), views(4), torch.randn(1, 20)
    pairs = [(t, s) for t in range(2) for s in range(4) if s != t]
    want = torch.zeros(())
    for t, s in pairs:
        target = ((teacher[t] - center) / 0.04).log_softmax(1)
        log_student = (student[s] / 0.1).log_softmax(1)
        want += F.kl_div(log_student, target, log_target=True, reduction="batchmean") / len(pairs)
    torch.testing.assert_close(dino_kl(student, teacher, center), want, rtol=1e-5, atol=1e-5)


def test_it_compiles_without_graph_breaks() -> None:
    def every(student: list[Tensor], teacher: list[Tensor], center: Tensor) -> list[Tensor]:
        entropy = teacher_entropy(teacher[0], 0.04, center)
        pair = (student[0], teacher[0])
        return [dino_loss(student, teacher, center), entropy, koleo_loss(student[0]), byol_loss(*pair)]

    inputs = views(3), views(2), torch.zeros(1, 20)
    torch.compiler.reset()
    got = torch.compile(every, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(got, every(*inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: dino_loss(v[:1], v[:1], v[0][:1]), "at least two views"),
        (lambda v: dino_loss(v[:1], v, v[0][:1]), "no more of the teacher"),
        (lambda v: dino_loss([], v, v[0][:1]), "student"),
        (lambda v: dino_loss([v[0], v[1][:1]], v, v[0][:1]), "student of one shape"),
        (lambda v: dino_loss(v[0], v, v[0][:1]), r"\(V, B, K\)"),
        (lambda v: dino_loss(v, v, v[0][:1], student_temp=0), "student_temp"),
        (lambda v: dino_loss(v, v, v[0][:1], teacher_temp=-1.0), "teacher_temp"),
        (lambda v: dino_loss(v, v, v[0][:1], reduction="all"), "reduction"),
        (lambda v: koleo_loss(v[0][0]), "features"),
        (lambda v: byol_loss(v[0], v[1][:, :2]), "p and z"),
        (lambda v: teacher_entropy(v[0], 0.0), "temperature"),
    ],
)
def test_bad_arguments_are_rejected(make: object, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make(views(2))
