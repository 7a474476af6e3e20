"""From a batch of pixels to what a method learns from: views, and for evaluation also the image itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.data.augment.draws import uniforms
from trainformer.tasks.vision.batch import Normalize, send
from trainformer.tasks.vision.ssl.method import Views

_NOISE = 1 << 20  # a stream of random numbers that no view uses


class Shown(NamedTuple):
    """A batch for evaluation: the images as the model takes them, and what makes views for the loss (None: not wanted).

    Views are made when they are asked for: who only embeds images does not pay for ten crops of each.
    """

    images: Tensor
    make_views: Callable[[], Views] | None


class ViewMaker(nn.Module):
    """Views of a batch, by the keys of its samples.

    `fewest` and `most` (None: any number) say how many views there must be of an image, `patches` how many random
    numbers a masked autoencoder needs.
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
        """The views, and noise that decides which patches are hidden."""
        views = self.augment(images, keys) if getattr(self.augment, "takes_keys", False) else self.augment(images)
        if not isinstance(views, list | tuple) or not all(isinstance(view, Tensor) for view in views):
            raise BadArgument(
                expected("augment to return a list of views, each a batch of images", type(views).__name__)
            )
        self._check([tuple(view.shape) for view in views], len(images))
        if self.patches is None:
            return Views(list(views))
        noise = uniforms(keys, self.patches, _NOISE, samples=len(images))
        return Views(list(views), send(noise, images.device))

    def _check(self, shapes: list[tuple[int, ...]], count: int) -> None:
        """Refuse what would be taken for something else: views are told apart by their number and order alone."""
        if len(shapes) < self.fewest or (self.most is not None and len(shapes) > self.most):
            number = str(self.fewest) if self.fewest == self.most else f"at least {self.fewest}"
            raise BadArgument(expected(f"augment to return {number} view(s) for this method", f"{len(shapes)} of them"))
        if any(shape[0] != count for shape in shapes):
            raise BadArgument(expected(f"every view to have the {count} images of the batch", shapes))


class Showing(nn.Module):
    """The evaluation transform: images normalised, and views to be had of them if there is a `make_views`."""

    takes_keys = True

    def __init__(self, normalize: Normalize, make_views: ViewMaker | None) -> None:
        super().__init__()
        self.normalize = normalize
        self.make_views = make_views

    def forward(self, images: Tensor, keys: Any = None) -> Shown:
        """Both."""
        make_views = None if self.make_views is None else partial(self.make_views, images, keys)
        return Shown(self.normalize.pixels(images), make_views)
