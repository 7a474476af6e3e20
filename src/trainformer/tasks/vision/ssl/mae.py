"""MAE (He et al., 2022): rebuild hidden patches from the visible ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainformer.models.masked_autoencoder import MaskedAutoencoder
from trainformer.tasks.vision.ssl.method import Method, Step, Views


class MAE(Method):
    """A masked autoencoder as a method; the options are those of `MaskedAutoencoder`."""

    fewest_views = most_views = 1

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        super().__init__()
        self.autoencoder = MaskedAutoencoder(backbone, **options)

    @property
    def backbone(self) -> nn.Module:
        """The encoder."""
        return self.autoencoder.backbone

    def features(self, images: Tensor) -> Tensor:
        """The mean over the patches: nothing in the loss teaches the class token to stand for an image."""
        vit: Any = self.backbone
        if getattr(vit, "global_pool", "token") != "token":
            return vit(images)
        return vit.forward_features(images)[:, vit.num_prefix_tokens :].mean(1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations, of the decoder too."""
        self.autoencoder.set_grad_checkpointing(enable)

    def step(self, views: Views) -> Step:
        """Mean squared error of the hidden patches, per image. There are no features of whole images here."""
        output = self.autoencoder(views.images[0], views.noise)
        return Step(output.loss, None, {})
