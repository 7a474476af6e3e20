"""Self-distillation losses: DINO with its center, KoLeo, and the cosine losses of BYOL and SimSiam.

Owns the losses, the center, and the metrics that reveal a collapse (entropy of the teacher, divergence from it). Tasks
own the networks, the views, and the schedules of temperature and momentum.

Caron et al., DINO, 2021; Grill et al., BYOL, 2020; Chen and He, SimSiam, 2021; Sablayrolles et al., KoLeo, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.losses.numerics import (
    Reduction,
    check_positive,
    check_rows,
    l2_normalize,
    no_autocast,
    reduce_loss,
    upcast,
)
from trainformer.utils.distributed import RowCounts, all_reduce_sum, gather_row_counts, gather_rows, is_padding


class Center(nn.Module):
    """DINO's center: a running mean of the teacher's raw outputs, subtracted so that no single output dominates.

    `add` accumulates outputs without changing the center; `commit` updates it once per step. So all micro-batches of a
    step see the same center, and gradient accumulation equals one large batch. Call `commit` on all ranks or on none.
    Outputs of padding batches are ignored.

    >>> center = Center(2, momentum=0.5)
    >>> center.add(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    >>> center.center
    tensor([[0., 0.]])
    >>> center.commit()
    >>> center.center
    tensor([[1., 2.]])
    """

    center: Tensor

    def __init__(self, dim: int, momentum: float = 0.9) -> None:
        super().__init__()
        check_count("dim", dim)
        if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum <= 1:
            raise BadArgument(expected("momentum to be from 0 to 1", momentum, "0.9 is usual."))
        self.momentum = float(momentum)
        self.register_buffer("center", torch.zeros(1, dim))
        # Sums per output, then the number of rows. Not a buffer: DDP broadcasts the buffers of rank 0 before each
        # forward pass, which would overwrite what the other ranks have accumulated.
        self._pending = torch.zeros(dim + 1)

    @torch.no_grad()
    def add(self, logits: Tensor | Sequence[Tensor]) -> None:
        """Accumulate raw outputs (..., dim) of the teacher. Non-finite rows are skipped."""
        pending = self._pending_here()
        if is_padding():
            return
        for part in [logits] if isinstance(logits, Tensor) else logits:
            if part.shape[-1] != self.center.shape[1]:
                raise BadArgument(expected(f"outputs of width {self.center.shape[1]}", tuple(part.shape)))
            rows = upcast(part.reshape(-1, part.shape[-1]))
            finite = rows.isfinite().all(1, keepdim=True)
            pending[:-1] += torch.where(finite, rows, 0.0).sum(0)
            pending[-1] += finite.sum()

    @torch.no_grad()
    def commit(self) -> None:
        """Move the center towards the mean over all ranks since the last commit; without new outputs it stays."""
        total = all_reduce_sum(self._pending_here())
        count = total[-1]
        old = upcast(self.center)
        new = old * self.momentum + (total[:-1] / count.clamp(min=1)) * (1 - self.momentum)
        self.center.copy_(torch.where(count > 0, new, old))
        self.discard()

    def discard(self) -> None:
        """Drop the accumulated outputs, after a skipped step."""
        self._pending_here().zero_()

    def extra_repr(self) -> str:
        return f"dim={self.center.shape[1]}, momentum={self.momentum:g}"

    def _pending_here(self) -> Tensor:
        if self._pending.device != self.center.device or self._pending.dtype != upcast(self.center).dtype:
            self._pending = self._pending.to(upcast(self.center))
        return self._pending


def dino_loss(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy of the student's views with the teacher's, over all pairs of two different views.

    Views are raw outputs (B, K); the student's first views are the teacher's views, in the same order. The teacher's
    outputs are centered and sharpened, and get no gradient. `reduction="none"` returns one value per image.

    >>> views = [torch.eye(4), torch.eye(4)]
    >>> dino_loss(views, views, torch.zeros(1, 4))
    tensor(0.0001)
    """
    check_positive("student_temp", student_temp)
    check_positive("teacher_temp", teacher_temp)
    students, teachers = _stacked(student, "student"), _stacked(teacher, "teacher")
    if len(teachers) > len(students) or len(students) < 2 or teachers.shape[1:] != students.shape[1:]:
        received = f"{tuple(teachers.shape)} from the teacher and {tuple(students.shape)} from the student"
        do = "The student sees all views of the teacher, first, and at least two views in all."
        raise BadArgument(expected("views of one shape, no more of the teacher than of the student", received, do))
    with no_autocast(students):
        target = _sharpened(teachers, center, teacher_temp).softmax(-1)
        log_student = (upcast(students) / student_temp).log_softmax(-1)
        # The sum over all pairs is a product of two sums, minus the pairs of a view with itself.
        both = (target.sum(0) * log_student.sum(0)).sum(-1)
        same = (target * log_student[: len(target)]).sum((0, -1))
        pairs = len(teachers) * len(students) - len(teachers)
        return reduce_loss((same - both) / pairs, reduction)


@torch.no_grad()
def dino_kl(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    center: Tensor,
    student_temp: float = 0.1,
    teacher_temp: float | Tensor = 0.04,
    reduction: Reduction = "mean",
) -> Tensor:
    """KL divergence of the student from the teacher: `dino_loss` minus the teacher's entropy.

    A metric without a gradient. Zero means that nothing is left to learn: a sign of collapse.

    >>> views = [torch.randn(4, 8)] * 2
    >>> bool(dino_kl(views, views, torch.zeros(1, 8), student_temp=0.1, teacher_temp=0.1).abs() < 1e-6)
    True
    """
    cross = dino_loss(student, teacher, center, student_temp, teacher_temp, "none")
    entropy = teacher_entropy(_stacked(teacher, "teacher"), teacher_temp, center, reduction="none").mean(0)
    return reduce_loss(cross - entropy, reduction)


@torch.no_grad()
def teacher_entropy(
    logits: Tensor, temperature: float | Tensor, center: Tensor | None = None, *, reduction: Reduction = "mean"
) -> Tensor:
    """Entropy, in nats, of the teacher's outputs (..., K). Collapse shows as log K (uniform) or 0 (constant).

    >>> teacher_entropy(torch.zeros(2, 8), 0.04)  # log 8
    tensor(2.0794)
    """
    check_positive("temperature", temperature)
    with no_autocast(logits):
        log_target = _sharpened(logits, center, temperature).log_softmax(-1)
        # `entr` is -p log p, and 0 for an output so unlikely that p is 0: no 0 * -inf.
        return reduce_loss(torch.special.entr(log_target.exp()).sum(-1), reduction)


def koleo_loss(features: Tensor, eps: float = 1e-8, *, reduction: Reduction = "mean", gather: bool = True) -> Tensor:
    """KoLeo: minus the log distance of each row to its nearest neighbour, which spreads out features (B, D).

    With `gather` neighbours may be on other ranks. A single row has no neighbour: its loss is 0.

    >>> koleo_loss(torch.eye(3))  # all distances are sqrt(2)
    tensor(-0.3466)
    """
    check_positive("eps", eps)
    if features.ndim != 2:
        raise BadArgument(expected("features of shape (B, D)", tuple(features.shape)))
    with no_autocast(features):
        rows = l2_normalize(features, eps)
        counts = gather_row_counts(rows) if gather else RowCounts((len(rows),), 0)
        every = gather_rows(rows, counts) if gather else rows
        if len(every) < 2:
            return reduce_loss(upcast(features).sum(1) * 0, reduction)
        with torch.no_grad():
            cosines = rows @ every.T
            cosines.diagonal(counts.first).fill_(-2)
            nearest = cosines.argmax(1)
        distance = F.pairwise_distance(rows, every.index_select(0, nearest), eps=eps)
        return reduce_loss(-(distance + eps).log(), reduction)


def negative_cosine(p: Tensor, z: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """Minus the cosine of the rows of two matrices (B, D). SimSiam calls it with ``z.detach()``.

    >>> negative_cosine(torch.eye(2), torch.eye(2))
    tensor(-1.)
    """
    check_rows(("p", p), ("z", z))
    with no_autocast(p):
        return reduce_loss(-(l2_normalize(p) * l2_normalize(z)).sum(1), reduction)


def byol_loss(p: Tensor, z: Tensor, *, reduction: Reduction = "mean") -> Tensor:
    """BYOL: 2 - 2 cos of predictions and targets (B, D), the squared distance of the normalised rows.

    Targets get no gradient. BYOL adds the losses of both directions.

    >>> byol_loss(torch.eye(2), -torch.eye(2))
    tensor(4.)
    """
    return reduce_loss(2 + 2 * negative_cosine(p, z.detach(), reduction="none"), reduction)


def _stacked(views: Sequence[Tensor] | Tensor, whose: str) -> Tensor:
    if not isinstance(views, Tensor):
        shapes = [tuple(view.shape) for view in views]
        if not shapes or len(set(shapes)) > 1 or len(shapes[0]) != 2:
            raise BadArgument(expected(f"views of the {whose} of one shape (B, K)", shapes))
        return torch.stack(list(views))
    if views.ndim != 3:
        raise BadArgument(expected(f"views of the {whose} as a list of (B, K), or (V, B, K)", tuple(views.shape)))
    return views


def _sharpened(logits: Tensor, center: Tensor | None, temperature: float | Tensor) -> Tensor:
    rows = upcast(logits.detach())
    return (rows if center is None else rows - center.detach()) / temperature
