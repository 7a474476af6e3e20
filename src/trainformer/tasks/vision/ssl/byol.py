"""BYOL (Grill et al., 2020): predict what a slowly moving network makes of the other view."""

from __future__ import annotations

from torch import nn

from trainformer.losses.distillation import byol_loss
from trainformer.models.heads import byol_predictor, byol_projector
from trainformer.tasks.vision.features import spread
from trainformer.tasks.vision.ssl.method import MomentumMethod, Step, Tower, Views, in_batches


class BYOL(MomentumMethod):
    """Online network with predictor, momentum target, symmetric cosine loss; no negatives."""

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        proj_dim: int,
        hidden_dim: int,
        momentum: float,
        momentum_end: float,
    ) -> None:
        super().__init__(Tower(backbone, byol_projector(width, hidden_dim, proj_dim)), (momentum, momentum_end))
        self.predictor = byol_predictor(proj_dim, hidden_dim, proj_dim)

    def step(self, views: Views) -> Step:
        """Predict the target's projection of view 2 from view 1, and the other way round; the sum of the two losses."""
        features, projections = in_batches(self.online, views.images)
        p1, p2 = self.predictor(projections).chunk(2)
        t1, t2 = in_batches(self.slow, views.images)[1].chunk(2)
        losses = byol_loss(p1, t2, reduction="none") + byol_loss(p2, t1, reduction="none")
        own = features[: len(p1)].detach()
        return Step(losses, own, {"feature_std": spread(own), "target_std": spread(t1)})
