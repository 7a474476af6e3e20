"""Hooks that bring metrics and images elsewhere: to files, and to Weights & Biases."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.loggers.wandb import WandbLogger
from trainformer.mini.hooks.intervals import IntervalHook, whole_number
from trainformer.mini.utils import as_numbers, flattened

_CHANNELS = (1, 3, 4)


class ImageFileLoggerHook(IntervalHook):
    """Writes images of ``trainer.log_images({"name": image})`` to ``path/name_step_<n>.png``.

    `interval` is in steps: calls at other steps write nothing. A call writes `max_images` at most (None: all). An image
    is a PIL image, a tensor (channels first) or an array (channels last), of 8 bits or from 0 to 1; those of a list or
    a batch are numbered.
    """

    def __init__(
        self, interval: int = 100, path: str | os.PathLike[str] = "images", max_images: int | None = 8
    ) -> None:
        super().__init__(interval)
        self.path = Path(path)
        self.max_images = max_images if max_images is None else whole_number("max_images", max_images, least=1)

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """Write them."""
        if dry_run or not self.is_time(trainer):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for name, image in list(named_images(records).items())[: self.max_images]:
            image.save(self.path / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}_step_{trainer.step}.png")


class WandbHook(BaseHook):
    """Sends what ``trainer.log()`` and ``trainer.log_images()`` are given to Weights & Biases, from the first rank.

    A run that is taken up from a checkpoint goes on in the same run there. `kwargs` are further arguments of
    `wandb.init`: `entity`, `tags`, `group`, `notes`, `mode` and so on.
    """

    def __init__(
        self, project: str = "trainformer", name: str | None = None, config: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._logger = _WandbRun(project, name, kwargs)
        self.config = config or {}
        self._is_open = False

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """Send metrics, with nested names joined by slashes."""
        if not dry_run:
            self._open()
            self._logger.log(flattened(as_numbers(records), "/"), trainer.step)

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        """Send images."""
        if not dry_run:
            self._open()
            self._logger.log_images(named_images(records), trainer.step)

    def on_after_train(self, trainer: Any) -> None:
        """Close the run there."""
        self._logger.finish("interrupted" if trainer.is_interrupted else "finished")
        self._is_open = False

    def _open(self) -> None:
        if not self._is_open:
            self._logger.init(self.config)
            self._is_open = True

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Which run it is."""
        state_dict.update(self._logger.state_dict())

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        """Go on in that run."""
        self._logger.load_state_dict(state_dict)


class _WandbRun(WandbLogger):
    """The library's own logger, for runs that are started with any further arguments."""

    def __init__(self, project: str, name: str | None, options: dict[str, Any]) -> None:
        known = {key: value for key, value in options.items() if key in ("entity", "tags", "dir", "mode")}
        super().__init__(project=project, name=name, **known)
        self._further = {key: value for key, value in options.items() if key not in known}

    def log_images(self, images: dict[str, Any], step: int) -> None:
        """Send images, by name."""
        wandb = require("wandb", "wandb", "to log to Weights & Biases")
        self._log({name: wandb.Image(image) for name, image in images.items()}, step)

    def _start(self, wandb: Any, config: dict[str, Any], resume_id: str | None) -> Any:
        init = partial(wandb.init, **self._further)
        return super()._start(
            SimpleNamespace(init=init, setup=wandb.setup, Settings=wandb.Settings),  # type: ignore[arg-type]
            config,
            resume_id,
        )


def named_images(records: dict[str, Any]) -> dict[str, Any]:
    """PIL images by name; those of a list or a batch are numbered."""
    found: dict[str, Any] = {}
    for name, value in flattened(records, "/").items():
        several = isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim == 4)
        for number, image in enumerate(value if several else [value]):
            found[f"{name}_{number}" if several else name] = as_image(image, name)
    return found


def as_image(image: Any, name: str = "image") -> Any:
    """A PIL image of an array or tensor."""
    pil = require("PIL.Image", "vision", "to log images")
    if isinstance(image, pil.Image):
        return image
    pixels = image.detach().cpu().float().numpy() if isinstance(image, Tensor) else image
    if isinstance(image, Tensor) and not image.is_floating_point():
        pixels = image.detach().cpu().numpy()
    if not isinstance(pixels, np.ndarray) or pixels.ndim not in (2, 3):
        what = f"an array of shape {pixels.shape}" if isinstance(pixels, np.ndarray) else type(image).__name__
        raise BadArgument(expected(f"the image {name!r} to be a PIL image, or an array with 2 or 3 dimensions", what))
    if pixels.ndim == 3 and _has_channels_first(pixels, likely=isinstance(image, Tensor)):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round()
    return pil.fromarray(np.ascontiguousarray(pixels.astype(np.uint8)))


def _has_channels_first(pixels: np.ndarray, likely: bool) -> bool:
    """Where the channels of an image are; `likely` decides where both places would do."""
    first, last = pixels.shape[0] in _CHANNELS, pixels.shape[-1] in _CHANNELS
    return first and (likely or not last)
