"""Base classes of the self-supervised methods, the view transforms, and the small methods: SimCLR, BYOL and MAE.

A method is a module that holds all its networks and buffers (momentum networks, queues, centers), so a checkpoint of
the model is a checkpoint of the method. `forward` computes a step and changes no persistent state. The state is updated
once per optimizer step in `on_step_end`, from what `collect` gathered. So all micro-batches of a step see the same
queue, center and momentum network, gradient accumulation equals one large batch, and a repeated or skipped step leaves
no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.data.augment.draws import uniforms
from trainformer.losses.contrastive import nt_xent_loss
from trainformer.losses.distillation import byol_loss
from trainformer.models.heads import byol_predictor, byol_projector, simclr_projector, single_sample_batchnorm
from trainformer.models.masked_autoencoder import MaskedAutoencoder
from trainformer.models.momentum import MomentumCopy, cosine_momentum
from trainformer.tasks.vision.batch import Normalize, feature_spread, send

_MASK_STREAM = 1 << 20  # a random stream that no view uses


# -- views -------------------------------------------------------------------------------------------------


class Views(NamedTuple):
    """Views of a batch of images, the largest size first. `noise` selects the masked patches (MAE)."""

    images: list[Tensor]
    noise: Tensor | None = None


class EvalBatch(NamedTuple):
    """Normalised images, and a function that makes views for the validation loss (None: no loss).

    Views are lazy, so embedding images does not pay for ten crops of each.
    """

    images: Tensor
    make_views: Callable[[], Views] | None


class ViewTransform(nn.Module):
    """Make views of a batch, seeded by the keys of its samples.

    `fewest` and `most` (None: unlimited) bound the number of views; `patches` is the number of patches to mask (MAE).
    """

    takes_keys = True

    def __init__(
        self, augment: Callable[..., Any], fewest: int = 1, most: int | None = None, *, patches: int | None = None
    ) -> None:
        super().__init__()
        self.augment = augment
        self.fewest = fewest
        self.most = most
        self.patches = patches

    def forward(self, images: Tensor, keys: Any = None) -> Views:
        """Return the views, and mask noise for MAE."""
        views = self.augment(images, keys) if getattr(self.augment, "takes_keys", False) else self.augment(images)
        if not isinstance(views, list | tuple) or not all(isinstance(view, Tensor) for view in views):
            what = "augment to return a list of views, each a batch of images"
            raise BadArgument(expected(what, type(views).__name__))
        if len(views) < self.fewest or (self.most is not None and len(views) > self.most):
            number = str(self.fewest) if self.fewest == self.most else f"at least {self.fewest}"
            raise BadArgument(expected(f"augment to return {number} view(s) for this method", f"{len(views)} of them"))
        shapes = [tuple(view.shape) for view in views]
        if any(shape[0] != len(images) for shape in shapes):
            raise BadArgument(expected(f"every view to have the {len(images)} images of the batch", shapes))
        if self.patches is None:
            return Views(list(views))
        noise = uniforms(keys, self.patches, _MASK_STREAM, samples=len(images))
        return Views(list(views), send(noise, images.device))


class EvalTransform(nn.Module):
    """Normalise images for evaluation, and make views of them on request if there is a `make_views`."""

    takes_keys = True

    def __init__(self, normalize: Normalize, make_views: ViewTransform | None) -> None:
        super().__init__()
        self.normalize = normalize
        self.make_views = make_views

    def forward(self, images: Tensor, keys: Any = None) -> EvalBatch:
        """Return normalised images with lazy views."""
        make_views = None if self.make_views is None else partial(self.make_views, images, keys)
        return EvalBatch(self.normalize.pixels(images), make_views)


# -- base classes ------------------------------------------------------------------------------------------


class MethodOutput(NamedTuple):
    """A loss per image, detached features (if the method has any), metrics to log, and input for `collect`."""

    losses: Tensor
    features: Tensor | None
    metrics: dict[str, Tensor]
    collected: Any = None


class Tower(nn.Module):
    """A backbone with a head. Returns (features, head output)."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and head output."""
        features = self.backbone(images)
        return features, self.head(features)


class Method(nn.Module):
    """Base class of the methods. Called with `Views` it computes a training step; called with images, features."""

    fewest_views = 2
    most_views: int | None = 2

    def forward(self, inputs: Views | Tensor) -> MethodOutput | Tensor:
        """Compute a step for `Views`, features for a batch of images."""
        if isinstance(inputs, Tensor):
            return self.features(inputs)
        with single_sample_batchnorm(self, size=len(inputs.images[0])):
            return self.step(inputs)

    online: Tower

    @property
    def backbone(self) -> nn.Module:
        """The trained backbone."""
        return self.online.backbone

    @property
    def encoder(self) -> nn.Module:
        """The backbone to use after pretraining."""
        return self.backbone

    def features(self, images: Tensor) -> Tensor:
        """Features (N, D) of images."""
        return self.encoder(images)

    def step(self, views: Views) -> MethodOutput:
        """Compute the losses of a batch."""
        raise NotImplementedError

    def collect(self, output: MethodOutput) -> None:
        """Keep what `on_step_end` needs from a micro-batch."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Update per-epoch schedules."""

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Update state after optimizer step `step` of `max_steps` (0: unknown)."""

    def on_step_skipped(self) -> None:
        """Drop what was collected for a skipped step."""

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """Yield trainable parameters that currently receive no gradient."""
        yield from ()

    def no_weight_decay(self) -> set[str]:
        """Names of the backbone's parameters that should not be decayed, prefixed for this module."""
        own = getattr(self.backbone, "no_weight_decay", None)
        prefix = next(name for name, module in self.named_modules() if module is self.backbone)
        return {f"{prefix}.{name}" for name in own()} if callable(own) else set()


class MomentumMethod(Method):
    """A method with a momentum (EMA) copy of its online network; `momentum` follows a cosine to `momentum_end`."""

    def __init__(self, online: Tower, momentum: float, momentum_end: float) -> None:
        super().__init__()
        self.online = online
        self.target = MomentumCopy(online)
        self.momentum = (momentum, momentum_end)

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Update the momentum network."""
        self.target.update(self.online, scheduled_momentum(self.momentum, step, max_steps))


def forward_views(network: nn.Module, views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Features and outputs of all views in order; consecutive views of one size share a forward pass."""
    groups: list[list[Tensor]] = []
    for view in views:
        if groups and groups[-1][0].shape[-2:] == view.shape[-2:]:
            groups[-1].append(view)
        else:
            groups.append([view])
    parts = [network(torch.cat(group)) for group in groups]
    features, outputs = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(outputs)


def scheduled_momentum(momentum: tuple[float, float], step: int, max_steps: int) -> float:
    """Momentum of the update after step `step` (from 1): a cosine from the first value towards the second.

    The first update uses the first value, and the last one almost the second, as in the authors' code: at 1.0 it would
    do nothing. With an unknown number of steps (0), the first value is used throughout.

    >>> [scheduled_momentum((0.5, 1.0), step, max_steps) for step, max_steps in ((1, 10), (6, 10), (10, 0))]
    [0.5, 0.75, 0.5]
    """
    start, end = momentum
    return start if start == end or max_steps < 1 else cosine_momentum(start, end, step - 1, max_steps)


# -- methods -----------------------------------------------------------------------------------------------


class SimCLR(Method):
    """SimCLR (Chen et al., 2020): NT-Xent between two views, with negatives from all ranks."""

    def __init__(self, backbone: nn.Module, width: int, *, proj_dim: int, hidden_dim: int, temperature: float) -> None:
        super().__init__()
        self.online = Tower(backbone, simclr_projector(width, hidden_dim, proj_dim))
        self.temperature = temperature

    def step(self, views: Views) -> MethodOutput:
        """NT-Xent of two views."""
        features, projections = forward_views(self.online, views.images)
        first, second = projections.chunk(2)
        losses = nt_xent_loss(first, second, self.temperature, reduction="none")
        own = features[: len(first)].detach()
        return MethodOutput(losses, own, {"feature_std": feature_spread(own)})


class BYOL(MomentumMethod):
    """BYOL (Grill et al., 2020): predict the momentum network's projection of the other view; no negatives."""

    def __init__(self, backbone: nn.Module, width: int, *, proj_dim: int, hidden_dim: int, **momentum: float) -> None:
        super().__init__(Tower(backbone, byol_projector(width, hidden_dim, proj_dim)), **momentum)
        self.predictor = byol_predictor(proj_dim, hidden_dim, proj_dim)

    def step(self, views: Views) -> MethodOutput:
        """The symmetric cosine loss: view 1 predicts view 2 and vice versa."""
        features, projections = forward_views(self.online, views.images)
        p1, p2 = self.predictor(projections).chunk(2)
        t1, t2 = forward_views(self.target, views.images)[1].chunk(2)
        losses = byol_loss(p1, t2, reduction="none") + byol_loss(p2, t1, reduction="none")
        own = features[: len(p1)].detach()
        return MethodOutput(losses, own, {"feature_std": feature_spread(own), "target_std": feature_spread(t1)})


class MAE(Method):
    """MAE (He et al., 2022): reconstruct masked patches. Options are those of `MaskedAutoencoder`."""

    fewest_views = most_views = 1

    def __init__(self, backbone: nn.Module, **options: Any) -> None:
        super().__init__()
        self.autoencoder = MaskedAutoencoder(backbone, **options)

    @property
    def backbone(self) -> nn.Module:
        """The encoder."""
        return self.autoencoder.backbone

    def features(self, images: Tensor) -> Tensor:
        """The mean over patch tokens: the loss does not train the class token to represent an image."""
        vit: Any = self.backbone
        if getattr(vit, "global_pool", "token") != "token":
            return vit(images)
        return vit.forward_features(images)[:, vit.num_prefix_tokens :].mean(1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing in encoder and decoder."""
        self.autoencoder.set_grad_checkpointing(enable)

    def step(self, views: Views) -> MethodOutput:
        """Mean squared error of the masked patches, per image. There are no features of whole images."""
        return MethodOutput(self.autoencoder(views.images[0], views.noise).loss, None, {})
