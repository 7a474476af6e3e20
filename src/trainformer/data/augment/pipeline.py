"""`BatchAugment`: one random view of each image of a batch; `MultiView`: several views of each.

A call has three parts: the host turns random numbers into parameters, all parameters of the batch go to the device in
one copy, and the device runs about two dozen kernels (`ops`) without a sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.augment import ops
from trainformer.data.augment.draws import as_keys, fresh_keys, to_device, uniforms

if TYPE_CHECKING:
    from trainformer.data.augment.draws import Keys

Out = TypeVar("Out")

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# The draws of each operation. Each has its own, used or not: turning one off does not change the others.
_CROP = slice(0, ops.CROP_DRAWS)
_FLIPS, _SHIFT, _JITTER, _FACTORS = slice(22, 24), slice(24, 26), 26, slice(27, 31)
_GREY, _BLUR, _SIGMA, _SOLARISE, _ERASE, _ERASE_BOX = 31, 32, 33, 34, 35, slice(36, 40)
_COUNT = 40
assert _CROP.stop == _FLIPS.start


class BatchAugment(nn.Module):
    """One random view of each image, as a normalised float batch.

    In this order: random resized crop (or, with `crop=False`, the whole image resized, and with `shift` moved by up to
    that share of its sides over black), flips, colour jitter (brightness, contrast, saturation, hue), grey, blur,
    solarise, normalise, erase. Each has its own probability, and each sample its own random numbers: functions of its
    key and the stream, independent of batch and device. Without keys, random ones come from torch's global CPU
    generator.

    Images are (N, C, H, W), uint8 or floats in [0, 1]; uint8 is the cheapest to send to the device. Jitter strengths
    are those of torchvision. Runs without gradients and without autocast.

    >>> view = BatchAugment(24, jitter=(0.4, 0.4, 0.2, 0.1), grey=0.2, blur=0.5)
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
        self.size = _size_pair(size)
        self.scale = _interval("scale", scale, most=1.0)
        self.ratio = _interval("ratio", ratio)
        self.flip, self.vflip = _share("flip", flip), _share("vflip", vflip)
        self.shift = None if shift is None else _share("shift", shift)
        self.jitter = None if jitter is None else _strengths(jitter)
        self.jitter_p, self.grey = _share("jitter_p", jitter_p), _share("grey", grey)
        self.blur, self.blur_sigma = _share("blur", blur), _interval("blur_sigma", blur_sigma)
        self.solarise = _share("solarise", solarise)
        self.solarise_threshold = _share("solarise_threshold", solarise_threshold)
        self.erase = _share("erase", erase)
        self.mean, self.std = _statistics(mean, std)
        self.crop = crop
        if crop and shift is not None:
            raise BadArgument(expected("shift without a random crop", shift, "Pass crop=False with it, or shift=None."))
        if self.blur and min(self.size) < 2:
            raise BadArgument(expected("views of at least 2 x 2 pixels to blur", size, "Pass blur=0.0."))

    def forward(self, images: Tensor, keys: Keys | None = None, stream: int = 0) -> Tensor:
        """Views (N, C, *size) in float32, from one 64-bit key per sample and the number of the view (`stream`)."""
        return _not_compiled(self._view)(images, keys, stream)

    @torch.no_grad()
    def _view(self, images: Tensor, keys: Keys | None, stream: int) -> Tensor:
        _check_images(images)
        draws = uniforms(keys, _COUNT, stream, samples=len(images)).numpy()
        if not len(images):
            return images.new_empty(0, images.shape[1], *self.size, dtype=torch.float32)
        with torch.autocast(images.device.type, enabled=False):
            plan, placement = self._plan(draws, images)
            return self._render(images, to_device(plan, images.device), placement)

    def extra_repr(self) -> str:
        names = ("size", "scale", "flip", "vflip", "shift", "jitter", "grey", "blur", "solarise", "erase", "crop")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def _plan(self, draws: np.ndarray, images: Tensor) -> tuple[dict[str, np.ndarray], ops.Placement | None]:
        """The parameters of all operations that apply to this batch, by name."""
        channels = images.shape[1]
        plan: dict[str, np.ndarray] = {}
        placement = self._place(draws, (images.shape[2], images.shape[3]))
        if placement is not None:
            plan["table"] = placement.table
            if placement.order is not None:
                plan["order"] = placement.order
        if self.jitter is not None or self.grey:
            plan["matrices"], plan["luma"] = self._colours(draws, channels)
        for name, column in (("blur", _BLUR), ("solarise", _SOLARISE), ("erase", _ERASE)):
            rows = np.flatnonzero(draws[:, column] < getattr(self, name))
            if len(rows):
                plan[name] = rows
        if "blur" in plan:
            low, high = self.blur_sigma
            sigma = low + draws[plan["blur"], _SIGMA] * (high - low)
            plan["kernels"] = ops.gaussian_kernels(sigma, ops.blur_size(min(self.size)))
        if "erase" in plan:
            plan["boxes"] = ops.erase_boxes(draws[plan["erase"], _ERASE_BOX], self.size)
        mean, std = np.array(self.mean), np.array(self.std)
        if len(mean) != channels:
            mean, std = mean.mean(keepdims=True), std.mean(keepdims=True)
        plan["gain"] = (1 / std).astype(np.float32).reshape(-1, 1, 1)
        plan["offset"] = (-mean / std).astype(np.float32).reshape(-1, 1, 1)
        return plan, placement

    def _render(self, images: Tensor, plan: dict[str, Tensor], placement: ops.Placement | None) -> Tensor:
        """All operations, in order. After the first copy `views` is modified in place."""
        views = as_floats(images)
        if placement is not None:
            moved = self.shift is not None
            views = ops.resample(views, plan["table"], self.size, placement, order=plan.get("order"), moved=moved)
        elif views is images:
            views = views.clone()
        if "matrices" in plan:
            views = ops.recolour(views, plan["matrices"], plan["luma"])
        if "blur" in plan:
            views = ops.change_rows(views, plan["blur"], lambda part: ops.gaussian_blur(part, plan["kernels"]))
        if "solarise" in plan:
            views = ops.change_rows(views, plan["solarise"], lambda part: ops.solarise(part, self.solarise_threshold))
        views = views.mul_(plan["gain"]).add_(plan["offset"])
        if "erase" in plan:
            views = ops.change_rows(views, plan["erase"], lambda part: ops.erase(part, plan["boxes"]))
        return views

    def _place(self, draws: np.ndarray, image: tuple[int, int]) -> ops.Placement | None:
        """Where the pixels come from; None if they stay in place."""
        if not self.crop and self.shift is None and not self.flip and not self.vflip and image == self.size:
            return None
        if self.crop:
            boxes = ops.crop_boxes(draws[:, _CROP], image, self.scale, self.ratio)
        else:
            boxes = ops.whole_boxes(len(draws), image)
        flips = draws[:, _FLIPS] < np.array([self.vflip, self.flip])
        moves = None if self.shift is None else ops.shifts(draws[:, _SHIFT], self.size, self.shift)
        return ops.place(boxes, image, self.size, flips=flips, moves=moves)

    def _colours(self, draws: np.ndarray, channels: int) -> tuple[np.ndarray, np.ndarray]:
        if channels not in (1, 3):
            what = "images with 1 or 3 channels to change their colours"
            raise DataError(expected(what, channels, "Pass jitter=None, grey=0.0."))
        strengths = np.array(self.jitter or (0.0, 0.0, 0.0, 0.0))
        # As in torchvision: factors from max(0, 1 - strength) to 1 + strength; hue from -strength to strength.
        low = np.array([*np.maximum(1 - strengths[:3], 0), -strengths[3]])
        high = np.array([*(1 + strengths[:3]), strengths[3]])
        values = low + draws[:, _FACTORS] * (high - low)
        values = np.where(draws[:, _JITTER, None] < self.jitter_p, values, np.array([1.0, 1.0, 1.0, 0.0]))
        return ops.colour_maps(values[:, :3], values[:, 3], draws[:, _GREY] < self.grey, channels)


class MultiView(nn.Module):
    """Several views of each image, each with its own random stream: the same pipeline twice gives two different views.

    >>> views = MultiView([BatchAugment(16), BatchAugment(16), BatchAugment(8)])
    >>> [tuple(view.shape) for view in views(torch.rand(2, 3, 32, 32), keys=[5, 6])]
    [(2, 3, 16, 16), (2, 3, 16, 16), (2, 3, 8, 8)]
    """

    takes_keys = True

    def __init__(self, views: Sequence[BatchAugment]) -> None:
        super().__init__()
        if not views or not all(isinstance(view, BatchAugment) for view in views):
            received = [type(view).__name__ for view in views]
            raise BadArgument(expected("a list of BatchAugment, at least one", received))
        self.views = nn.ModuleList(views)

    def __len__(self) -> int:
        return len(self.views)

    def forward(self, images: Tensor, keys: Keys | None = None) -> list[Tensor]:
        """One batch per view, in the order of the views."""
        return _not_compiled(self._all)(images, keys)

    @torch.no_grad()
    def _all(self, images: Tensor, keys: Keys | None) -> list[Tensor]:
        _check_images(images)
        known = fresh_keys(len(images)) if keys is None else as_keys(keys, len(images))
        pixels = as_floats(images)  # once for all views
        return [view(pixels, known, stream=stream) for stream, view in enumerate(self.views)]


def as_floats(images: Tensor) -> Tensor:
    """Pixels in [0, 1], float32: uint8 is divided by 255, floats are unchanged."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def _not_compiled(function: Callable[..., Out]) -> Callable[..., Out]:
    """Exclude a function from `torch.compile`, which cannot trace NumPy's 64-bit keys.

    Only while compiling, since `torch.compiler.disable` takes a second to import.
    """
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise DataError(expected("a batch of images, (N, C, H, W)", tuple(images.shape)))
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise DataError(
            expected("images of dtype uint8, or floats in [0, 1]", str(images.dtype), "Convert with images.byte().")
        )


def _size_pair(size: Any) -> tuple[int, int]:
    sides = _numbers((size, size) if isinstance(size, Integral) else size)
    if len(sides) != 2 or not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise BadArgument(expected("size to be a positive integer or (height, width)", size))
    return int(sides[0]), int(sides[1])


def _share(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        # True would mean 1: flip always, which nobody intends.
        hint = "Pass a number, such as 0.5." if not _is_number(value) else ""
        raise BadArgument(expected(f"{name} to be from 0 to 1", value, hint))
    return float(value)


def _interval(name: str, value: Any, most: float = math.inf) -> tuple[float, float]:
    ends = _numbers(value)
    if len(ends) != 2 or not 0 < ends[0] <= ends[1] <= most or math.isinf(ends[1]):
        limit = f", at most {most:g}" if most < math.inf else ""
        raise BadArgument(expected(f"{name} to be two numbers above 0, the lower one first{limit}", value))
    return float(ends[0]), float(ends[1])


def _strengths(jitter: Any) -> tuple[float, float, float, float]:
    values = _numbers(jitter)
    if len(values) != 4 or not all(0 <= value < math.inf for value in values) or values[3] > 0.5:
        names = "(brightness, contrast, saturation, hue)"
        raise BadArgument(
            expected(f"jitter to be four strengths {names}, none negative, hue at most 0.5", jitter, "Or pass None.")
        )
    return float(values[0]), float(values[1]), float(values[2]), float(values[3])


def _statistics(mean: Any, std: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    means, stds = (tuple(float(value) for value in _numbers(values)) for values in (mean, std))
    if not means or len(means) != len(stds) or not all(math.isfinite(m) for m in means):
        raise BadArgument(expected("mean and std to have one number per channel each", (mean, std)))
    if not all(0 < s < math.inf for s in stds):
        raise BadArgument(expected("std to be above 0", std))
    return means, stds


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _numbers(values: Any) -> tuple[Any, ...]:
    """The values as a tuple; empty if they are not all numbers."""
    found = tuple(values) if isinstance(values, Iterable) else ()
    return found if all(_is_number(value) for value in found) else ()
