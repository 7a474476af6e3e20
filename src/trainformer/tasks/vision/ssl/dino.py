"""DINO (Caron et al., 2021): a student predicts a momentum teacher's output for other crops of the image."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.distillation import Center, dino_loss, koleo_loss, teacher_entropy
from trainformer.models.heads import DINOHead
from trainformer.tasks.vision.batch import feature_spread
from trainformer.tasks.vision.ssl.methods import MethodOutput, MomentumMethod, Tower, Views, forward_views

_GLOBAL_VIEWS = 2


class DINO(MomentumMethod):
    """Student and teacher with prototype heads, multi-crop, centering and sharpening, optional KoLeo.

    The teacher sees the two global views, the student all views. The teacher's backbone is the result.
    """

    most_views = None
    teacher_temp: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        out_dim: int,
        hidden_dim: int,
        bottleneck_dim: int,
        norm_last_layer: bool,
        student_temp: float,
        teacher_temp: float,
        warmup_teacher_temp: float,
        warmup_teacher_temp_epochs: int,
        center_momentum: float,
        freeze_last_layer: int,
        koleo: float,
        **momentum: float,
    ) -> None:
        head = DINOHead(width, out_dim, hidden_dim, bottleneck_dim, norm_last_layer=norm_last_layer)
        super().__init__(Tower(backbone, head), **momentum)
        self.center = Center(out_dim, center_momentum)
        self.student_temp = student_temp
        self.teacher_temps = (warmup_teacher_temp, teacher_temp)
        self.warmup_epochs = warmup_teacher_temp_epochs
        self.freeze_last_layer = freeze_last_layer
        self.koleo = koleo
        # A tensor, since torch.compile would recompile for a number that changes each epoch; persistent, so that
        # evaluating a checkpoint gives the loss it had when it was saved.
        self.register_buffer("teacher_temp", torch.tensor(warmup_teacher_temp))
        self.on_epoch_begin(0)

    @property
    def encoder(self) -> nn.Module:
        """The teacher's backbone."""
        tower = self.target.module
        assert isinstance(tower, Tower)
        return tower.backbone

    @property
    def head(self) -> DINOHead:
        """The student's head."""
        head = self.online.head
        assert isinstance(head, DINOHead)
        return head

    def on_epoch_begin(self, epoch: int) -> None:
        """Warm up the teacher temperature, and unfreeze the last layer after the first epochs."""
        start, end = self.teacher_temps
        # As the authors' linspace: the last warm-up epoch already has the final value.
        share = min(epoch / max(self.warmup_epochs - 1, 1), 1.0) if self.warmup_epochs else 1.0
        self.teacher_temp.fill_(start + (end - start) * share)
        self.head.last_layer_frozen = epoch < self.freeze_last_layer

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """The last layer while it is frozen."""
        if self.head.last_layer_frozen:
            yield from (p for p in self.head.last_layer.parameters() if p.requires_grad)

    def step(self, views: Views) -> MethodOutput:
        """Cross-entropy between each teacher view and all other student views."""
        count = len(views.images[0])
        features, outputs = forward_views(self.online, views.images)
        teacher_features, raw = forward_views(self.target, views.images[:_GLOBAL_VIEWS])
        student, teacher = outputs.split(count), raw.split(count)
        center, temperature = self.center.center, self.teacher_temp
        losses = dino_loss(student, teacher, center, self.student_temp, temperature, reduction="none")
        if self.koleo:
            crops = features.split(count)[:_GLOBAL_VIEWS]
            losses = losses + self.koleo * sum(koleo_loss(crop, reduction="none") for crop in crops)
        metrics = {
            "feature_std": feature_spread(features[:count]),
            "teacher_entropy": teacher_entropy(raw, temperature, center),
        }
        return MethodOutput(losses, teacher_features[:count], metrics, raw)

    def collect(self, output: MethodOutput) -> None:
        """Add the teacher's raw outputs to the center's pending ones."""
        self.center.add(output.collected)

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Update center and teacher."""
        self.center.commit()
        super().on_step_end(step, max_steps)

    def on_step_skipped(self) -> None:
        """Drop pending outputs."""
        self.center.discard()


def check_crops(backbone: nn.Module, size: int | None) -> None:
    """Check that a backbone is not built for a single image size, and that local crops fit a transformer's patches."""
    patches = getattr(backbone, "patch_embed", None)
    if getattr(patches, "strict_img_size", False):
        do = "Build it with dynamic_img_size=True, or pass num_local=0 for no local crops."
        raise BadArgument(expected("a backbone that takes crops of several sizes", "one that takes one size", do))
    patch = getattr(patches, "patch_size", None)
    padded = getattr(patches, "dynamic_img_pad", False)
    if size is not None and patch is not None and any(size % side for side in patch) and not padded:
        do = "Leave it out for 3/7 of the image, or pass num_local=0 for no local crops."
        raise BadArgument(expected(f"local_size to be a multiple of the backbone's patch {tuple(patch)}", size, do))
