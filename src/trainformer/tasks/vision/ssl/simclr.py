"""SimCLR (Chen et al., 2020): two views of an image shall be closer than views of different images."""

from __future__ import annotations

from torch import nn

from trainformer.losses.contrastive import nt_xent_loss
from trainformer.models.heads import simclr_projector
from trainformer.tasks.vision.features import spread
from trainformer.tasks.vision.ssl.method import Method, Step, Tower, Views, in_batches


class SimCLR(Method):
    """Backbone, projector with BatchNorm, NT-Xent over both views of all images, those of other ranks included."""

    def __init__(self, backbone: nn.Module, width: int, *, proj_dim: int, hidden_dim: int, temperature: float) -> None:
        super().__init__()
        self.online = Tower(backbone, simclr_projector(width, hidden_dim, proj_dim))
        self.temperature = temperature

    @property
    def backbone(self) -> nn.Module:
        """The network that is trained."""
        return self.online.backbone

    def step(self, views: Views) -> Step:
        """NT-Xent of two views."""
        features, projections = in_batches(self.online, views.images)
        first, second = projections.chunk(2)
        losses = nt_xent_loss(first, second, self.temperature, reduction="none")
        own = features[: len(first)].detach()
        return Step(losses, own, {"feature_std": spread(own)})
