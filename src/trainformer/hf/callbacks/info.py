"""`InfoCallback`: what is about to be trained, on what and how, said before it begins."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.hf.callbacks.arguments import changed_arguments

logger = logging.getLogger("trainformer")

_LONGEST = 80  # characters of an argument


class InfoCallback(TrainerCallback):
    """Logs a summary when training begins, through the logger "trainformer" (INFO).

    Parameters (all and trained, by dtype), sizes of the data sets, device, steps, effective batch size, and the
    arguments that are not the default.
    """

    sets_control = False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Say it."""
        if not state.is_world_process_zero:
            return
        changed = changed_arguments(args, kwargs.get("trainer"))
        lines = {
            "model": _about_model(model),
            "data": _about_data(kwargs.get("train_dataloader"), kwargs.get("eval_dataloader")),
            "device": _about_device(model, args),
            "steps": _about_steps(args, state, kwargs.get("train_dataloader")),
            "batch": _about_batch(args, kwargs.get("trainer")),
            "arguments": ", ".join(f"{name}={_short(value)}" for name, value in sorted(changed.items())),
        }
        width = max(map(len, lines))
        text = "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items() if line)
        logger.info("training begins\n%s", text)


def _about_model(model: Any) -> str:
    if model is None:
        return ""
    parameters = list(model.parameters())
    total, trained = _count(parameters), _count([p for p in parameters if p.requires_grad])
    kinds = Counter[str]()
    for p in parameters:
        kinds[str(p.dtype).removeprefix("torch.")] += p.numel()
    share = "all trained" if trained == total else f"{trained:,} trained ({trained / max(total, 1):.2%})"
    dtypes = ", ".join(f"{name} {count:,}" if len(kinds) > 1 else name for name, count in kinds.most_common())
    return f"{type(model).__name__}, {total:,} parameters, {share}; {dtypes}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _count(parameters: list[Any]) -> int:
    return sum(p.numel() for p in parameters)


def _about_data(train: Any, evaluation: Any) -> str:
    parts = [f"{name} {_samples(loader)}" for name, loader in (("train", train), ("eval", evaluation)) if loader]
    return ", ".join(parts)


def _samples(loader: Any) -> str:
    try:
        return f"{len(loader.dataset):,} samples"
    except (TypeError, AttributeError):
        return "a stream"


def _about_device(model: Any, args: Any) -> str:
    first = next(iter(model.parameters()), None) if model is not None else None
    device = first.device if first is not None else getattr(args, "device", None)
    if isinstance(device, torch.device) and device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device or "")


def _about_steps(args: Any, state: TrainerState, train: Any) -> str:
    try:
        per_epoch = -(-len(train) // max(1, args.gradient_accumulation_steps))
    except TypeError:
        per_epoch = None
    parts = [f"{per_epoch:,} per epoch"] if per_epoch is not None else []
    if state.max_steps > 0:
        parts.append(f"{state.max_steps:,} in all")
        if per_epoch:
            parts[-1] += f" ({state.max_steps / per_epoch:g} epochs)"
    if state.global_step:
        parts.append(f"going on after {state.global_step:,}")
    return ", ".join(parts)


def _about_batch(args: Any, trainer: Any) -> str:
    size, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    # Processes that hold parts of one model compute the same samples.
    process_group = getattr(trainer, "_process_group", None)
    processes = getattr(args, "world_size", 1) if process_group is None else process_group.dp_world_size
    total = size * accumulated * processes
    return f"{total:,} samples per step: {size} per device x {accumulated} accumulated x {processes} processes"
