"""DINO (Caron et al., 2021): a student learns what a slowly moving teacher says of other crops of the image."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.distillation import Center, dino_loss, koleo_loss, teacher_entropy
from trainformer.models.heads import DINOHead
from trainformer.tasks.vision.features import spread
from trainformer.tasks.vision.ssl.method import MomentumMethod, Step, Tower, Views, in_batches

_GLOBAL_VIEWS = 2


class DINO(MomentumMethod):
    """Student and teacher with prototype heads, multi-crop, centring and sharpening, optional KoLeo.

    The teacher sees the two global views, the student all. The teacher is the network to keep.
    """

    most_views = None
    teacher_temp: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        head: DINOHead,
        momentum: tuple[float, float],
        student_temp: float,
        teacher_temps: tuple[float, float],
        warmup_epochs: int,
        center_momentum: float,
        freeze_last_layer: int,
        koleo: float,
    ) -> None:
        super().__init__(Tower(backbone, head), momentum)
        self.center = Center(head.last_layer.out_features, center_momentum)
        self.student_temp = student_temp
        self.teacher_temps = teacher_temps
        self.warmup_epochs = warmup_epochs
        self.freeze_last_layer = freeze_last_layer
        self.koleo = koleo
        # A tensor, as a number that changes by epoch would make torch.compile begin anew each time; and saved, so that
        # a checkpoint that is only evaluated has the loss it had when it was written.
        self.register_buffer("teacher_temp", torch.tensor(teacher_temps[0]))
        self.begin_epoch(0)

    @property
    def encoder(self) -> nn.Module:
        """The teacher's backbone."""
        tower = self.slow.module
        assert isinstance(tower, Tower)
        return tower.backbone

    @property
    def head(self) -> DINOHead:
        """The student's head."""
        head = self.online.head
        assert isinstance(head, DINOHead)
        return head

    def begin_epoch(self, epoch: int) -> None:
        """Warm the teacher's temperature up, and free the last layer after its first epochs."""
        start, end = self.teacher_temps
        # As the authors' linspace: the last epoch of the warm-up has the final value already.
        share = min(epoch / max(self.warmup_epochs - 1, 1), 1.0) if self.warmup_epochs else 1.0
        self.teacher_temp.fill_(start + (end - start) * share)
        self.head.last_layer_frozen = epoch < self.freeze_last_layer

    def resting(self) -> Iterator[nn.Parameter]:
        """What gets no gradient while the last layer is frozen."""
        if self.head.last_layer_frozen:
            yield from (p for p in self.head.last_layer.parameters() if p.requires_grad)

    def step(self, views: Views) -> Step:
        """Cross-entropy of all pairs of a teacher's and another student's view."""
        count = len(views.images[0])
        features, outputs = in_batches(self.online, views.images)
        kept, raw = in_batches(self.slow, views.images[:_GLOBAL_VIEWS])
        student, teacher = outputs.split(count), raw.split(count)
        centre, temperature = self.center.center, self.teacher_temp
        losses = dino_loss(student, teacher, centre, self.student_temp, temperature, reduction="none")
        if self.koleo:
            crops = features.split(count)[:_GLOBAL_VIEWS]
            losses = losses + self.koleo * sum(koleo_loss(crop, reduction="none") for crop in crops)
        metrics = {
            "feature_std": spread(features[:count]),
            "teacher_entropy": teacher_entropy(raw, temperature, centre),
        }
        return Step(losses, kept[:count], metrics, raw)

    def remember(self, step: Step) -> None:
        """Raw outputs of the teacher, for the centre."""
        self.center.add(step.memory)

    def end_step(self, step: int, total: int) -> None:
        """Move centre and teacher."""
        self.center.commit()
        super().end_step(step, total)

    def drop_step(self) -> None:
        """Forget outputs of a step that is given up."""
        self.center.discard()


def check_local_size(backbone: nn.Module, size: int) -> None:
    """Refuse small crops that a transformer cannot take, in which every step would fail."""
    patches = getattr(backbone, "patch_embed", None)
    patch = getattr(patches, "patch_size", None)
    if patch is not None and any(size % side for side in patch) and not getattr(patches, "dynamic_img_pad", False):
        do = "Leave it out for 3/7 of the image, or pass num_local=0 for no small crops."
        raise BadArgument(expected(f"local_size to be a multiple of the backbone's patch {tuple(patch)}", size, do))


def check_takes_crops(backbone: nn.Module) -> None:
    """Refuse a module that was built for images of one size: it cannot take small crops."""
    if getattr(getattr(backbone, "patch_embed", None), "strict_img_size", False):
        do = "Build it with dynamic_img_size=True, or pass num_local=0 for no small crops."
        raise BadArgument(expected("a backbone that takes crops of several sizes", "one that takes one size", do))
