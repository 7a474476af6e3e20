"""`Augment`: a batch of images in, one random view of each out; `MultiView`: several views of each.

Owns the order of the operations, which draws they use, and the arguments users see; the operations themselves are in
`geometry`, `colour` and `filters`. A step has three parts: draws become parameters on the host, all parameters of the
batch go to the device in one copy, and the device does the rest in about two dozen kernels without ever being asked
for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.augment import arguments, filters, geometry
from trainformer.data.augment.colour import colour_maps, recolour
from trainformer.data.augment.draws import as_keys, fresh_keys, send, uniforms

if TYPE_CHECKING:
    from trainformer.data.augment.draws import Keys

Out = TypeVar("Out")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Which draws belong to what. Each operation has its own, used or not: turning one off leaves the others as they were.
_CROP = slice(0, geometry.CROP_DRAWS)
_FLIPS, _SHIFT, _JITTER, _FACTORS = slice(22, 24), slice(24, 26), 26, slice(27, 31)
_GREY, _BLUR, _SIGMA, _SOLARISE, _ERASE, _ERASE_BOX = 31, 32, 33, 34, 35, slice(36, 40)
_COUNT = 40
assert _CROP.stop == _FLIPS.start


class Augment(nn.Module):
    """One random view of each image, as a normalised float batch.

    In this order: random resized crop (or, without `crop`, the whole image resized, and with `shift` moved by up to
    that share of its sides over black), flips, colour jitter (brightness, contrast, saturation, hue), grey, blur,
    solarise, normalise, erase. Each has its own probability, and each sample its own draws: functions of its key and
    the stream, whatever the batch, the device and the batch size. Without keys, fresh ones come from torch's global CPU
    generator.

    Images are (N, C, H, W), uint8 or floats in [0, 1]; uint8 views cost the least to send to the device. Jitter
    strengths mean what they do in torchvision. Gradients do not pass, and autocast does not apply.

    >>> view = Augment(24, jitter=(0.4, 0.4, 0.2, 0.1), grey=0.2, blur=0.5)
    >>> images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8).expand(4, -1, -1, -1)
    >>> view(images, keys=[1, 2, 3, 4]).shape
    torch.Size([4, 3, 24, 24])
    """

    takes_keys = True

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        vflip: float = 0.0,
        shift: float | None = None,
        jitter: tuple[float, float, float, float] | None = None,
        jitter_p: float = 0.8,
        grey: float = 0.0,
        blur: float = 0.0,
        blur_sigma: tuple[float, float] = (0.1, 2.0),
        solarise: float = 0.0,
        solarise_threshold: float = 0.5,
        erase: float = 0.0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        crop: bool = True,
    ) -> None:
        super().__init__()
        self.size = arguments.size_pair(size)
        self.scale = arguments.interval("scale", scale, most=1.0)
        self.ratio = arguments.interval("ratio", ratio)
        self.flip, self.vflip = arguments.share("flip", flip), arguments.share("vflip", vflip)
        self.shift = None if shift is None else arguments.share("shift", shift)
        self.jitter = None if jitter is None else arguments.strengths(jitter)
        self.jitter_p, self.grey = arguments.share("jitter_p", jitter_p), arguments.share("grey", grey)
        self.blur, self.blur_sigma = arguments.share("blur", blur), arguments.interval("blur_sigma", blur_sigma)
        self.solarise = arguments.share("solarise", solarise)
        self.solarise_threshold = arguments.share("solarise_threshold", solarise_threshold)
        self.erase = arguments.share("erase", erase)
        self.mean, self.std = arguments.statistics(mean, std)
        self.crop = crop
        if crop and shift is not None:
            raise BadArgument(expected("shift without a random crop", shift, "Pass crop=False with it, or shift=None."))
        if self.blur and min(self.size) < 2:
            raise BadArgument(expected("views of at least 2 x 2 pixels to blur", size, "Pass blur=0.0."))

    def forward(self, images: Tensor, keys: Keys | None = None, stream: int = 0) -> Tensor:
        """Views (N, C, *size) in float32, from one 64-bit key per sample and the number of the view."""
        return _untraced(self._view)(images, keys, stream)

    @torch.no_grad()
    def _view(self, images: Tensor, keys: Keys | None, stream: int) -> Tensor:
        _check_images(images)
        draws = uniforms(keys, _COUNT, stream, samples=len(images)).numpy()
        if not len(images):
            return images.new_empty(0, images.shape[1], *self.size, dtype=torch.float32)
        with torch.autocast(images.device.type, enabled=False):
            plan, placement = self._plan(draws, images)
            return self._render(images, send(plan, images.device), placement)

    def extra_repr(self) -> str:
        """What is done, in the form of the constructor."""
        names = ("size", "scale", "flip", "vflip", "shift", "jitter", "grey", "blur", "solarise", "erase", "crop")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _plan(self, draws: np.ndarray, images: Tensor) -> tuple[dict[str, np.ndarray], geometry.Placement | None]:
        """The parameters of all operations that do anything in this batch, by name."""
        channels = images.shape[1]
        plan: dict[str, np.ndarray] = {}
        placement = self._place(draws, (images.shape[2], images.shape[3]))
        if placement is not None:
            plan["table"] = placement.table
            if placement.order is not None:
                plan["order"] = placement.order
        if self.jitter is not None or self.grey:
            plan["matrices"], plan["luma"] = self._colours(draws, channels)
        for name, column, p in (
            ("blur", _BLUR, self.blur),
            ("solarise", _SOLARISE, self.solarise),
            ("erase", _ERASE, self.erase),
        ):
            rows = np.flatnonzero(draws[:, column] < p)
            if len(rows):
                plan[name] = rows
        if "blur" in plan:
            low, high = self.blur_sigma
            sigma = low + draws[plan["blur"], _SIGMA] * (high - low)
            plan["kernels"] = filters.gaussian_kernels(sigma, filters.blur_size(min(self.size)))
        if "erase" in plan:
            plan["boxes"] = filters.erase_boxes(draws[plan["erase"], _ERASE_BOX], self.size)
        mean, std = self._statistics_for(channels)
        plan["gain"] = (1 / std).astype(np.float32).reshape(-1, 1, 1)
        plan["offset"] = (-mean / std).astype(np.float32).reshape(-1, 1, 1)
        return plan, placement

    def _render(self, images: Tensor, plan: dict[str, Tensor], placement: geometry.Placement | None) -> Tensor:
        """All operations, in order. From the first copy on, `views` is ours, and is changed in place."""
        views = as_floats(images)
        if placement is not None:
            moved = self.shift is not None
            views = geometry.resample(views, plan["table"], self.size, placement, order=plan.get("order"), moved=moved)
        elif views is images:
            views = views.clone()
        if "matrices" in plan:
            views = recolour(views, plan["matrices"], plan["luma"])
        if "blur" in plan:
            views = filters.change_rows(
                views, _some(plan["blur"], views), lambda part: filters.gaussian_blur(part, plan["kernels"])
            )
        if "solarise" in plan:
            views = filters.change_rows(
                views, _some(plan["solarise"], views), lambda part: filters.solarise(part, self.solarise_threshold)
            )
        views = views.mul_(plan["gain"]).add_(plan["offset"])
        if "erase" in plan:
            views = filters.change_rows(
                views, _some(plan["erase"], views), lambda part: filters.erase(part, plan["boxes"])
            )
        return views

    def _place(self, draws: np.ndarray, image: tuple[int, int]) -> geometry.Placement | None:
        """Where the pixels come from; None where every one stays in its place."""
        if not self.crop and self.shift is None and not self.flip and not self.vflip and image == self.size:
            return None
        if self.crop:
            boxes = geometry.crop_boxes(draws[:, _CROP], image, self.scale, self.ratio)
        else:
            boxes = geometry.whole_boxes(len(draws), image)
        flips = draws[:, _FLIPS] < np.array([self.vflip, self.flip])
        moves = None if self.shift is None else geometry.shifts(draws[:, _SHIFT], self.size, self.shift)
        return geometry.place(boxes, image, self.size, flips=flips, moves=moves)

    def _colours(self, draws: np.ndarray, channels: int) -> tuple[np.ndarray, np.ndarray]:
        if channels not in (1, 3):
            raise DataError(
                expected("images with 1 or 3 channels to change their colours", channels, "Pass jitter=None, grey=0.0.")
            )
        strengths = np.array(self.jitter or (0.0, 0.0, 0.0, 0.0))
        # As in torchvision: factors from 1 - strength, but not below 0, to 1 + strength; hue from -strength on.
        low = np.array([*np.maximum(1 - strengths[:3], 0), -strengths[3]])
        high = np.array([*(1 + strengths[:3]), strengths[3]])
        values = low + draws[:, _FACTORS] * (high - low)
        values = np.where(draws[:, _JITTER, None] < self.jitter_p, values, np.array([1.0, 1.0, 1.0, 0.0]))
        return colour_maps(values[:, :3], values[:, 3], draws[:, _GREY] < self.grey, channels)

    def _statistics_for(self, channels: int) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std, averaged where the images have another number of channels."""
        mean, std = np.array(self.mean), np.array(self.std)
        return (mean, std) if len(mean) == channels else (mean.mean(keepdims=True), std.mean(keepdims=True))


class MultiView(nn.Module):
    """Several views of each image, each with a stream of its own: the same pipeline twice gives two different views.

    >>> views = MultiView([Augment(16), Augment(16), Augment(8)])
    >>> [tuple(view.shape) for view in views(torch.rand(2, 3, 32, 32), keys=[5, 6])]
    [(2, 3, 16, 16), (2, 3, 16, 16), (2, 3, 8, 8)]
    """

    takes_keys = True

    def __init__(self, views: Sequence[Augment]) -> None:
        super().__init__()
        if not views or not all(isinstance(view, Augment) for view in views):
            received = [type(view).__name__ for view in views]
            raise BadArgument(expected("a list of Augment, at least one", received))
        self.views = nn.ModuleList(views)

    def __len__(self) -> int:
        return len(self.views)

    def forward(self, images: Tensor, keys: Keys | None = None) -> list[Tensor]:
        """One batch per view, in the order of the views."""
        return _untraced(self._all)(images, keys)

    @torch.no_grad()
    def _all(self, images: Tensor, keys: Keys | None) -> list[Tensor]:
        _check_images(images)
        known = fresh_keys(len(images)) if keys is None else as_keys(keys, len(images))
        pixels = as_floats(images)  # once for all views
        return [view(pixels, known, stream=stream) for stream, view in enumerate(self.views)]


def as_floats(images: Tensor) -> Tensor:
    """Pixels in [0, 1], float32: uint8 is divided by 255, floats are taken as they are."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def _untraced(function: Callable[..., Out]) -> Callable[..., Out]:
    """The function as one that `torch.compile` calls rather than looks into: NumPy's 64-bit keys are beyond it.

    Only where a compiler is at work, as the decorator for it takes a second to import.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def _some(rows: Tensor, images: Tensor) -> Tensor | None:
    return None if len(rows) == len(images) else rows


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise DataError(expected("a batch of images, (N, C, H, W)", tuple(images.shape)))
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise DataError(
            expected("images of dtype uint8, or floats in [0, 1]", str(images.dtype), "Convert with images.byte().")
        )
