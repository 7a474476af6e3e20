"""What the methods of self-supervised learning have in common: views in, losses out, and what happens between steps.

A method is a module that holds everything it trains, remembers and follows (networks, momentum copies, queues,
centres), so that a checkpoint of the model is a checkpoint of the method. All of a step happens in `forward`; nothing
that outlives the step is changed there. That is done once per optimizer step, in `end_step`, from what `remember`
collected: so all micro-batches of a step see the same queue, centre and momentum network, accumulation gives what one
large batch gives, and a step that is repeated or given up leaves no trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.models.heads import single_sample_batchnorm
from trainformer.models.momentum import MomentumCopy, cosine_momentum


class Views(NamedTuple):
    """Views of a batch of images, those of the first size first; `noise` says which patches are hidden (MAE)."""

    images: list[Tensor]
    noise: Tensor | None = None


class Step(NamedTuple):
    """What a method makes of views: a loss per image, features without gradients if it has any, and values to log."""

    losses: Tensor
    features: Tensor | None
    metrics: dict[str, Tensor]
    memory: Any = None  # what `remember` is to keep until the end of the step


class Tower(nn.Module):
    """A backbone and a head on its features."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and what the head makes of them."""
        features = self.backbone(images)
        return features, self.head(features)


class Method(nn.Module):
    """Base of the methods. Called with `Views` it makes a training step, called with images it gives features."""

    fewest_views = 2
    most_views: int | None = 2

    def forward(self, inputs: Views | Tensor) -> Step | Tensor:
        """A step for `Views`, features for a batch of images."""
        if isinstance(inputs, Tensor):
            return self.features(inputs)
        with single_sample_batchnorm(self, size=len(inputs.images[0])):
            return self.step(inputs)

    @property
    def backbone(self) -> nn.Module:
        """The network that is trained."""
        raise NotImplementedError

    @property
    def encoder(self) -> nn.Module:
        """The network to use afterwards."""
        return self.backbone

    def features(self, images: Tensor) -> Tensor:
        """One row of features per image."""
        return self.encoder(images)

    def step(self, views: Views) -> Step:
        """Losses of a batch."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """Schedules that go by epochs."""

    def remember(self, step: Step) -> None:
        """Keep what the end of the optimizer step will need."""

    def end_step(self, step: int, total: int) -> None:
        """After an optimizer step; `step` of `total` are done (0: nobody knows how many there will be)."""

    def drop_step(self) -> None:
        """Forget what was remembered: the step is given up."""

    def no_weight_decay(self) -> set[str]:
        """Parameters the backbone wants left alone, under the names they have here."""
        own = getattr(self.backbone, "no_weight_decay", None)
        prefix = next(name for name, module in self.named_modules() if module is self.backbone)
        return {f"{prefix}.{name}" for name in own()} if callable(own) else set()


class MomentumMethod(Method):
    """A method with a second network that follows the first one slowly.

    `momentum` is what it begins and ends with, along half a cosine.
    """

    def __init__(self, online: Tower, momentum: tuple[float, float]) -> None:
        super().__init__()
        self.online = online
        self.slow = MomentumCopy(online)
        self.momentum = momentum

    @property
    def backbone(self) -> nn.Module:
        """The network that is trained."""
        return self.online.backbone

    def end_step(self, step: int, total: int) -> None:
        """Move the slow network."""
        self.slow.update(self.online, scheduled(self.momentum, step, total))


def in_batches(network: nn.Module, views: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Features and outputs of all views, in their order; views of one size go through the network together."""
    groups: list[list[Tensor]] = []
    for view in views:
        if groups and groups[-1][0].shape[-2:] == view.shape[-2:]:
            groups[-1].append(view)
        else:
            groups.append([view])
    parts = [network(torch.cat(group)) for group in groups]
    features, outputs = zip(*parts, strict=True)
    return torch.cat(features), torch.cat(outputs)


def scheduled(momentum: tuple[float, float], step: int, total: int) -> float:
    """Momentum of the update after step `step` (from 1) of `total`: a cosine from the first value towards the second.

    The first update has the first value, and the last one all but reaches the second, as in the authors' code: with
    the second, 1.0, it would do nothing. Nobody knows the total (0): the first value for good.

    >>> scheduled((0.5, 1.0), 1, 10), scheduled((0.5, 1.0), 6, 10), scheduled((0.5, 1.0), 10, 0)
    (0.5, 0.75, 0.5)
    """
    base, end = momentum
    return base if base == end or total < 1 else cosine_momentum(base, end, step - 1, total)
