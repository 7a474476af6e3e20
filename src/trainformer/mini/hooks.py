"""Hooks for mini trainers: progress line, logging, GPU memory, EMA of the weights, images, Weights & Biases.

`CheckpointingHook` is in `checkpointing`.
"""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.callbacks.ema import EMA
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.distributed import Strategy
from trainformer.loggers.wandb import WandbLogger
from trainformer.mini.utils import as_numbers, check_integer, flattened, key_average, mean_over_ranks
from trainformer.utils.distributed import rank

_OWN = ("loss", "grad_norm", "step_time", "data_time", "records")
_CHANNELS = (1, 3, 4)


class IntervalHook(BaseHook):
    """A hook that acts every `interval` steps."""

    def __init__(self, interval: int) -> None:
        self.interval = check_integer(f"{type(self).__name__}'s interval", interval, minimum=1)

    def is_due(self, trainer: Any) -> bool:
        """Whether the hook acts after the current step."""
        return trainer.step % self.interval == 0


class ProgressHook(IntervalHook):
    """Logs a line to `trainer.logger` every `interval` steps, and at the last one.

    Loss, gradient norm, learning rates and (with `with_records`) records are those of the step; `step` and `data` are
    mean seconds since the last line. The ETA ignores the first `eta_warmup` steps. With `sync`, values are averaged
    over ranks. Only rank 0 logs.
    """

    def __init__(self, interval: int = 10, with_records: bool = True, sync: bool = False, eta_warmup: int = 10) -> None:
        super().__init__(interval)
        self.with_records = with_records
        self.sync = sync
        self.eta_warmup = check_integer("ProgressHook's eta_warmup", eta_warmup, minimum=0)
        self._start = self._warm_start = (0.0, 0)
        self._times: list[dict[str, float]] = []

    def on_before_train(self, trainer: Any) -> None:
        self._start = self._warm_start = (time.perf_counter(), trainer.step)
        self._times = []

    def on_after_step(self, trainer: Any) -> None:
        info, step = trainer.step_info, trainer.step
        self._times.append({name: info[name] for name in ("step_time", "data_time") if name in info})
        if self.is_due(trainer) or step == trainer.max_steps:
            self._write(trainer, {**as_numbers(info), **key_average(self._times)})
            self._times = []
        if step - self._start[1] == self.eta_warmup:
            self._warm_start = time.perf_counter(), step

    def _write(self, trainer: Any, values: dict[str, Any]) -> None:
        if self.sync:
            values = mean_over_ranks(values)
        if rank() == 0:
            trainer.logger.info("%s", self.line(trainer.step, trainer.max_steps, values))

    def line(self, step: int, max_steps: int | None, values: dict[str, Any]) -> str:
        """The text of the progress line."""
        width = len(str(max_steps)) if max_steps is not None else 1
        parts = [f"Step {step:{width}d}/{max_steps if max_steps is not None else '?'}:"]
        parts += [f"{n} {values[f'{n}_time']:.4f}s" for n in ("step", "data") if f"{n}_time" in values]
        if max_steps is not None:
            parts.append(f"eta {self.eta(step, max_steps)}")
        parts += [f"{name} {values[name]:.4f}" for name in ("loss", "grad_norm") if name in values]
        parts += [f"{name} {value:.2e}" for name, value in values.items() if name.startswith("lr_")]
        if self.with_records:
            extra = {name: v for name, v in values.items() if name not in _OWN and not name.startswith("lr_")}
            shown = flattened(values.get("records", {})) | flattened(extra)
            parts += [f"{name} {value:.4f}" for name, value in shown.items()]
        return " ".join(parts)

    def eta(self, step: int, max_steps: int) -> str:
        """The estimated time to the last step, as h:mm:ss."""
        then, first = self._warm_start if step > self._warm_start[1] else self._start
        per_step = (time.perf_counter() - then) / max(step - first, 1)
        minutes, seconds = divmod(round(per_step * (max_steps - step)), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class LoggingHook(IntervalHook):
    """Calls ``trainer.log(records)`` every `interval` steps with the means since the last call, and at the end.

    With `sync`, values are averaged over ranks. Every rank calls `log`; all but rank 0 with ``dry_run=True``.
    """

    def __init__(self, interval: int = 100, sync: bool = True) -> None:
        super().__init__(interval)
        self.sync = sync
        self._steps: list[dict[str, Any]] = []

    def on_after_step(self, trainer: Any) -> None:
        # The values stay on the device until they are logged.
        own = {name: value for name, value in trainer.step_info.items() if name != "records"}
        records = trainer.step_info.get("records", {})
        free = {name: value for name, value in records.items() if name not in own}
        taken = {name: value for name, value in records.items() if name in own}  # these stay under ``records``
        self._steps.append({**own, **free, **({"records": taken} if taken else {})})
        if self.is_due(trainer):
            self._log(trainer)

    def on_after_train(self, trainer: Any) -> None:
        # An interrupted run logs the rest after it is resumed.
        if self._steps and not trainer.is_interrupted:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        records = key_average(self._steps)
        self._steps = []
        trainer.log(mean_over_ranks(records) if self.sync else records, dry_run=rank() > 0)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["steps"] = [as_numbers(step) for step in self._steps]

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])


class CudaMaxMemoryHook(BaseHook):
    """Adds ``max_memory`` to `trainer.step_info`: the peak GPU memory allocated by tensors so far, in GiB.

    Put it before the hooks that use the value. It does nothing on other devices.
    """

    def on_after_step(self, trainer: Any) -> None:
        if trainer.device.type == "cuda":
            trainer.step_info["max_memory"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30


class EmaHook(BaseHook):
    """Keeps an exponential moving average of the weights in `hook.ema_model`, updated every `update_interval` steps.

    The average is a separate, unwrapped model in eval mode on `device` (None: the model's device). Running statistics
    are averaged as well, other buffers copied.
    """

    def __init__(
        self, decay: float = 0.9999, update_interval: int = 1, device: torch.device | str | int | None = None
    ) -> None:
        self._average = _DeviceEMA(decay=decay, update_every=update_interval, warmup=False, evaluate=False)
        self.device = device

    @property
    def ema_model(self) -> nn.Module | None:
        """The averaged model; None before training."""
        return self._average.model

    def on_before_train(self, trainer: Any) -> None:
        self._initialize(trainer)

    def on_after_step(self, trainer: Any) -> None:
        self._average.on_step_end(trainer, trainer.step, None)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._initialize(trainer)
        state_dict.update(self._average.state_dict())

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._initialize(trainer)
        self._average.load_state_dict(state_dict)

    def _initialize(self, trainer: Any) -> None:
        if self._average.model is None:
            single = Strategy()  # of the unwrapped model
            single.task = SimpleNamespace(model=trainer.unwrapped_model)
            self._average.attach(single)  # type: ignore[arg-type]
            if self.device is not None:
                self._average.move(self.device)


class _DeviceEMA(EMA):
    """An EMA that may be on another device than the weights."""

    def move(self, device: torch.device | str | int) -> None:
        assert self.model is not None
        self.model.to(device)
        averages = [*self.model.parameters(), *self.model.buffers()]
        self._pairs = [(average, source) for average, (_, source) in zip(averages, self._pairs, strict=True)]

    def _update(self, weight: float) -> None:
        pairs = self._pairs
        self._pairs = [(a, w if w.device == a.device else w.detach().to(a.device)) for a, w in pairs]
        try:
            super()._update(weight)
        finally:
            self._pairs = pairs


# -- images ----------------------------------------------------------------------------------------------------------


class ImageFileLoggerHook(IntervalHook):
    """Writes the images of ``trainer.log_images({"name": image})`` to ``path/name_step_<n>.png``.

    Calls between multiples of `interval` steps write nothing. A call writes at most `max_images` (None: all). An image
    is a PIL image, a tensor (channels first) or an array (channels last), 8-bit or from 0 to 1; images of a list or
    batch are numbered.
    """

    def __init__(
        self, interval: int = 100, path: str | os.PathLike[str] = "images", max_images: int | None = 8
    ) -> None:
        super().__init__(interval)
        self.path = Path(path)
        self.max_images = max_images if max_images is None else check_integer("max_images", max_images, minimum=1)

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        if dry_run or not self.is_due(trainer):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        for name, image in list(named_images(records).items())[: self.max_images]:
            image.save(self.path / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}_step_{trainer.step}.png")


class WandbHook(BaseHook):
    """Sends the records of ``trainer.log()`` and ``trainer.log_images()`` to Weights & Biases, from rank 0.

    A resumed run continues the same wandb run. `kwargs` are further arguments of `wandb.init`: `entity`, `tags`,
    `group`, `notes`, `mode` and so on.
    """

    def __init__(
        self, project: str = "trainformer", name: str | None = None, config: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._logger = _WandbHookLogger(project, name, kwargs)
        self.config = config or {}
        self._is_open = False

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        if not dry_run:
            self._open()
            self._logger.log(flattened(as_numbers(records), "/"), trainer.step)

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool) -> None:
        if not dry_run:
            self._open()
            self._logger.log_images(named_images(records), trainer.step)

    def on_after_train(self, trainer: Any) -> None:
        self._logger.finish("interrupted" if trainer.is_interrupted else "finished")
        self._is_open = False

    def _open(self) -> None:
        if not self._is_open:
            self._logger.init(self.config)
            self._is_open = True

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict.update(self._logger.state_dict())

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._logger.load_state_dict(state_dict)


class _WandbHookLogger(WandbLogger):
    """The native wandb logger with further arguments for `wandb.init`."""

    def __init__(self, project: str, name: str | None, options: dict[str, Any]) -> None:
        known = {key: value for key, value in options.items() if key in ("entity", "tags", "dir", "mode")}
        super().__init__(project=project, name=name, **known)
        self._init_kwargs = {key: value for key, value in options.items() if key not in known}

    def log_images(self, images: dict[str, Any], step: int) -> None:
        wandb = require("wandb", "wandb", "to log to Weights & Biases")
        self._log({name: wandb.Image(image) for name, image in images.items()}, step)

    def _start(self, wandb: Any, config: dict[str, Any], resume_id: str | None) -> Any:
        init = partial(wandb.init, **self._init_kwargs)
        return super()._start(
            SimpleNamespace(init=init, setup=wandb.setup, Settings=wandb.Settings),  # type: ignore[arg-type]
            config,
            resume_id,
        )


def named_images(records: dict[str, Any]) -> dict[str, Any]:
    """PIL images by name; images of a list or batch are numbered."""
    found: dict[str, Any] = {}
    for name, value in flattened(records, "/").items():
        is_batch = isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim == 4)
        for number, image in enumerate(value if is_batch else [value]):
            found[f"{name}_{number}" if is_batch else name] = as_image(image, name)
    return found


def as_image(image: Any, name: str = "image") -> Any:
    """An array or tensor as a PIL image."""
    pil = require("PIL.Image", "vision", "to log images")
    if isinstance(image, pil.Image):
        return image
    pixels = image.detach().cpu().float().numpy() if isinstance(image, Tensor) else image
    if isinstance(image, Tensor) and not image.is_floating_point():
        pixels = image.detach().cpu().numpy()
    if not isinstance(pixels, np.ndarray) or pixels.ndim not in (2, 3):
        what = f"an array of shape {pixels.shape}" if isinstance(pixels, np.ndarray) else type(image).__name__
        raise BadArgument(expected(f"the image {name!r} to be a PIL image, or an array with 2 or 3 dimensions", what))
    first, last = pixels.shape[0] in _CHANNELS, pixels.shape[-1] in _CHANNELS
    if pixels.ndim == 3 and first and (isinstance(image, Tensor) or not last):  # a tensor if both are possible
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round()
    return pil.fromarray(np.ascontiguousarray(pixels.astype(np.uint8)))
