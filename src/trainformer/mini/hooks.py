"""Hooks for mini trainers: progress line, logging, GPU memory, EMA of the weights, images, Weights & Biases.

`CheckpointingHook` is in `checkpointing`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from trainformer.callbacks.compat.mini import BaseHook
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.distributed.strategy import upcast_to_fp32
from trainformer.loggers.wandb import WandbLogger
from trainformer.mini.utils import (
    as_numbers,
    check_integer,
    flattened,
    key_average,
    max_over_ranks,
    mean_over_ranks,
    step_values,
)
from trainformer.utils.distributed import local_tensors, rank

#: What the progress line shows by itself, or (retries) only if it is worth a mention.
_OWN = ("loss", "grad_norm", "step_time", "data_time", "records", "non_finite_grad_retry_count")
_CHANNELS = (1, 3, 4)


def in_workspace(trainer: Any, path: Path) -> Path:
    """A path of a hook: relative ones are inside the workspace, unless they begin with it."""
    workspace = trainer.workspace
    if workspace is None or path.is_absolute() or path.is_relative_to(workspace):
        return path
    return Path(workspace) / path


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
    mean seconds since the last line. Learning rates have the names of their parameter groups, or numbers. The ETA
    ignores the first `eta_warmup` steps. With `sync`, values are averaged over ranks. Only rank 0 logs.
    """

    def __init__(
        self,
        interval: int = 10,
        with_records: bool = True,
        sync: bool = False,
        eta_warmup: int = 10,
        show_units: bool = True,
    ) -> None:
        super().__init__(interval)
        self.with_records = with_records
        self.sync = sync
        self.show_units = show_units
        self.eta_warmup = check_integer("ProgressHook's eta_warmup", eta_warmup, minimum=0)
        self._start = self._warm_start = (0.0, 0)
        self._times: list[dict[str, float]] = []

    def on_before_train(self, trainer: Any) -> None:
        self._start = self._warm_start = (time.perf_counter(), trainer.step)
        self._times = []

    def on_after_step(self, trainer: Any) -> None:
        info, step = step_values(trainer.step_info), trainer.step
        self._times.append({name: info[name] for name in ("step_time", "data_time") if name in info})
        if self.is_due(trainer) or step == trainer.max_steps:
            rates = {f"lr_{name}": rate for name, rate in pop_learning_rates(trainer, info).items()}
            self._write(trainer, {**as_numbers(info), **rates, **key_average(self._times)})
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
        unit = "s" if self.show_units else ""
        parts += [f"{n} {values[f'{n}_time']:.4f}{unit}" for n in ("step", "data") if f"{n}_time" in values]
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
    """Calls ``trainer.log({"train": records})`` every `interval` steps, and at the end.

    Records, loss, gradient norm, times and retries are means since the last call, `max_memory` the maximum, and ``lr``
    has the learning rates of the step by the names of their parameter groups (``group_0``, ... without names). With
    `sync`, values are averaged over ranks. Every rank calls `log`; all but rank 0 with ``dry_run=True``.
    """

    def __init__(self, interval: int = 100, sync: bool = True) -> None:
        super().__init__(interval)
        self.sync = sync
        self._steps: list[dict[str, Any]] = []
        self._rates: dict[str, Any] = {}

    def on_after_step(self, trainer: Any) -> None:
        # The values stay on the device until they are logged.
        own = step_values(trainer.step_info)
        self._rates = {
            f"group_{name}" if isinstance(name, int) else name: rate
            for name, rate in pop_learning_rates(trainer, own).items()
        }
        records = own.pop("records")
        names = {*own, "lr"}
        free = {name: value for name, value in records.items() if name not in names}
        taken = {name: value for name, value in records.items() if name in names}  # these stay under ``records``
        self._steps.append({**own, **free, **({"records": taken} if taken else {})})
        if self.is_due(trainer):
            self._log(trainer)

    def on_after_train(self, trainer: Any) -> None:
        # An interrupted run logs the rest after it is resumed.
        if self._steps and not trainer.is_interrupted:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        records = key_average(self._steps)
        peaks = [step["max_memory"] for step in self._steps if "max_memory" in step]
        self._steps = []
        records = mean_over_ranks(records) if self.sync else records
        if peaks:
            records["max_memory"] = max_over_ranks(max(peaks)) if self.sync else max(peaks)
        if self._rates:
            records["lr"] = as_numbers(self._rates)
        trainer.log({"train": records}, dry_run=rank() > 0)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        steps = [as_numbers(step) for step in self._steps]
        state_dict["logging_hook"] = {"steps": steps, "rates": as_numbers(self._rates)}

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state = state_dict.get("logging_hook", {})  # trainloop saves none
        self._steps, self._rates = list(state.get("steps", [])), dict(state.get("rates", {}))


def pop_learning_rates(trainer: Any, values: dict[str, Any]) -> dict[int | str, Any]:
    """Take the learning rates (``lr_0``, ...) out of the values of a step; by the name or number of their group."""
    groups = getattr(trainer.optimizer, "param_groups", [])
    names = dict(enumerate(group.get("name", i) for i, group in enumerate(groups)))
    found = [name for name in values if name.startswith("lr_") and name[3:].isdigit()]
    return {names.get(int(name[3:]), int(name[3:])): values.pop(name) for name in found}


class CudaMaxMemoryHook(BaseHook):
    """Adds ``max_memory`` to `trainer.step_info`: the peak GPU memory allocated by tensors in the step, in GiB.

    Put it before the hooks that use the value. It does nothing on other devices.
    """

    def on_before_step(self, trainer: Any) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

    def on_after_step(self, trainer: Any) -> None:
        if trainer.device.type == "cuda":
            trainer.step_info["max_memory"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30


class EmaHook(BaseHook):
    """Keeps an exponential moving average of the weights in `hook.ema_model`, updated every `update_interval` steps.

    `ema_model` is a torch `AveragedModel` of the unwrapped model, in eval mode, in fp32 or wider, on `device` (None:
    the model's device). The first update copies the weights. Buffers are copied. Its state is ``ema_model`` in
    `trainer.state_dict()`.
    """

    def __init__(
        self, decay: float = 0.9999, update_interval: int = 1, device: torch.device | str | int | None = None
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise BadArgument(expected("EmaHook's decay to be at least 0 and below 1", decay))
        self.decay = decay
        self.update_interval = check_integer("EmaHook's update_interval", update_interval, minimum=1)
        self.device = device
        self.ema_model: AveragedModel | None = None  # None before training

    def on_before_train(self, trainer: Any) -> None:
        self._average(trainer)

    def on_after_step(self, trainer: Any) -> None:
        if trainer.step % self.update_interval == 0:
            self._update(self._average(trainer), trainer.unwrapped_model)

    def on_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["ema_model"] = self._average(trainer).state_dict()

    def on_load_state_dict(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self._average(trainer).load_state_dict(state_dict["ema_model"])

    def _average(self, trainer: Any) -> AveragedModel:
        if self.ema_model is None:
            device = None if self.device is None else torch.device(self.device)
            average = AveragedModel(trainer.unwrapped_model, device, avg_fn=get_ema_avg_fn(self.decay))
            upcast_to_fp32(average.module)
            average.n_averaged = average.n_averaged.cpu()  # read in every update: no device sync
            self.ema_model = average.requires_grad_(False).eval()
        return self.ema_model

    @torch.no_grad()
    def _update(self, average: AveragedModel, model: nn.Module) -> None:
        """As `AveragedModel.update_parameters`, in one kernel and also between devices and dtypes."""
        averages = list(average.module.parameters())
        weights = [p.detach().to(a.device, a.dtype) for a, p in zip(averages, model.parameters(), strict=True)]
        share = 1 - self.decay if average.n_averaged else 1.0
        torch._foreach_lerp_(local_tensors(averages), local_tensors(weights), share)
        for buffer, source in zip(average.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(source)
        average.n_averaged += 1


# -- images ----------------------------------------------------------------------------------------------------------


ImageFormat = str | Callable[[str], str]


class ImageFileLoggerHook(IntervalHook):
    """Writes the images of ``trainer.log_images({"name": image})`` to ``path/name_step_<n>.png``.

    A relative `path` is inside the workspace. Calls between multiples of `interval` steps write nothing. A call writes
    at most `max_images` (None: all). An image is a PIL image, a tensor (channels first) or an array (channels last),
    8-bit or from 0 to 1; images of a list or batch are numbered. `image_format` is a file extension, or a function that
    returns one for the name of an image.
    """

    def __init__(
        self,
        interval: int = 1,
        path: str | os.PathLike[str] = "images",
        max_images: int | None = None,
        image_format: ImageFormat = "png",
    ) -> None:
        super().__init__(interval)
        self.path = Path(path)
        self.max_images = max_images if max_images is None else check_integer("max_images", max_images, minimum=1)
        self.image_format = image_format

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool = False) -> None:
        if dry_run or not self.is_due(trainer):
            return
        folder = in_workspace(trainer, self.path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in list(named_images(records).items())[: self.max_images]:
            suffix = _suffix(self.image_format, name)
            stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
            _writable(image, suffix).save(folder / f"{stem}_step_{trainer.step}.{suffix}")


class WandbHook(BaseHook):
    """Sends the records of ``trainer.log()`` and ``trainer.log_images()`` to Weights & Biases, from rank 0.

    Images are below ``vis``, with their names as captions. A resumed run continues the same wandb run. `config` is a
    dict or a JSON file. `kwargs` are further arguments of `wandb.init`: `entity`, `tags`, `group`, `notes`, `mode` and
    so on.
    """

    def __init__(
        self,
        project: str = "trainformer",
        name: str | None = None,
        config: dict[str, Any] | str | os.PathLike[str] | None = None,
        image_format: ImageFormat = "png",
        **kwargs: Any,
    ) -> None:
        self._logger = _WandbHookLogger(project, name, kwargs)
        self.config = json.loads(Path(config).read_text()) if isinstance(config, (str, os.PathLike)) else config or {}
        self.image_format = image_format
        self._is_open = False

    def on_log(self, trainer: Any, records: dict[str, Any], dry_run: bool = False) -> None:
        if not dry_run:
            self._open()
            self._logger.log(flattened(as_numbers(records), "/"), trainer.step)

    def on_log_images(self, trainer: Any, records: dict[str, Any], dry_run: bool = False) -> None:
        if not dry_run:
            self._open()
            images: dict[str, list[tuple[str, Any, str]]] = {}
            for path, image in named_images({"vis": records}).items():
                key, _, caption = path.rpartition("/")
                suffix = _suffix(self.image_format, caption)
                images.setdefault(key, []).append((caption, _writable(image, suffix), suffix))
            self._logger.log_images(images, trainer.step)

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

    def log_images(self, images: dict[str, list[tuple[str, Any, str]]], step: int) -> None:
        """Log lists of (caption, image, file type) by name."""
        wandb = require("wandb", "wandb", "to log to Weights & Biases")
        made = {
            name: [wandb.Image(image, caption=caption, file_type=suffix) for caption, image, suffix in listed]
            for name, listed in images.items()
        }
        self._log(made, step)

    def _start(self, wandb: Any, config: dict[str, Any], resume_id: str | None) -> Any:
        init = partial(wandb.init, **self._init_kwargs)
        return super()._start(
            SimpleNamespace(init=init, setup=wandb.setup, Settings=wandb.Settings),  # type: ignore[arg-type]
            config,
            resume_id,
        )


def _suffix(image_format: ImageFormat, name: str) -> str:
    return image_format if isinstance(image_format, str) else image_format(name.rpartition("/")[2])


def _writable(image: Any, suffix: str) -> Any:
    """A PIL image in a mode that its file format can store: JPEG has no transparency, which becomes white."""
    if suffix.lower() not in ("jpg", "jpeg") or image.mode in ("RGB", "L"):
        return image
    rgba = image.convert("RGBA")
    white = require("PIL.Image", "vision", "to log images").new("RGBA", image.size, "white")
    white.alpha_composite(rgba)
    return white.convert("RGB")


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
