"""From a batch of pixels to what a method learns from: views, and for evaluation also the image itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.data.augment.draws import uniforms
from trainformer.tasks.vision.batch import Normalize, send
from trainformer.tasks.vision.ssl.method import Views

_NOISE = 1 << 20  # a stream of random numbers that no view uses


class Shown(NamedTuple):
    """A batch for evaluation: the images as the model takes them, and views for the loss (None: not wanted)."""

    images: Tensor
    views: Views | None


class ViewMaker(nn.Module):
    """Views of a batch, by the keys of its samples. `patches`: how many random numbers a masked autoencoder needs."""

    takes_keys = True

    def __init__(self, augment: Callable[..., Any], patches: int | None = None) -> None:
        super().__init__()
        self.augment = augment
        self.patches = patches

    def forward(self, images: Tensor, keys: Any = None) -> Views:
        """The views, and noise that decides which patches are hidden."""
        views = self.augment(images, keys) if getattr(self.augment, "takes_keys", False) else self.augment(images)
        if not isinstance(views, list | tuple) or not all(isinstance(view, Tensor) for view in views):
            raise BadArgument(
                expected("augment to return a list of views, each a batch of images", type(views).__name__)
            )
        if self.patches is None:
            return Views(list(views))
        noise = uniforms(keys, self.patches, _NOISE, samples=len(images))
        return Views(list(views), send(noise, images.device))


class Showing(nn.Module):
    """The evaluation transform: images normalised, with views beside them if there is a `make_views`."""

    takes_keys = True

    def __init__(self, normalize: Normalize, make_views: ViewMaker | None) -> None:
        super().__init__()
        self.normalize = normalize
        self.make_views = make_views

    def forward(self, images: Tensor, keys: Any = None) -> Shown:
        """Both."""
        views = None if self.make_views is None else self.make_views(images, keys)
        return Shown(self.normalize.pixels(images), views)
