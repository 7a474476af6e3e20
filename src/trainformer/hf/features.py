"""What single arguments of HF switch on: NEFTune, memory metrics, log levels, reports of other packages, and more."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainformer.callbacks.compat.huggingface_types import TrainerCallback
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.hf.argument_checks import LOG_LEVELS, LOGGERS
from trainformer.hf.collate import inner_model
from trainformer.models.neftune import EmbeddingNoise, input_embeddings
from trainformer.utils.processes import resident_bytes


def set_log_level(args: Any) -> None:
    """Apply `log_level` and `log_level_replica` to trainformer and, where it is loaded, to transformers."""
    name = args.log_level if args.should_log else args.log_level_replica
    if name == "passive" or (not args.should_log and name == "warning"):
        return
    logging.getLogger("trainformer").setLevel(LOG_LEVELS[name])
    theirs = sys.modules.get("transformers.utils.logging")
    if theirs is not None:
        theirs.set_verbosity(LOG_LEVELS[name])


def callbacks_of(args: Any) -> list[Any]:
    """The callbacks that arguments ask for."""
    found: list[Any] = []
    others = [name for name in args.report_to or () if name not in LOGGERS]
    if others:
        integrations = require("transformers.integrations", "hf", f"for report_to={others[0]!r}")
        found += [kind() for kind in integrations.get_reporting_integration_callbacks(others)]
    if args.torch_empty_cache_steps is not None:
        found.append(EmptyCache(args.torch_empty_cache_steps))
    return found


class EmptyCache(TrainerCallback):
    """Releases unused memory of the device every `steps` steps."""

    sets_control = False

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0 and torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


def prepare_model(model: nn.Module, args: Any) -> None:
    """Change a model as the arguments say before it is trained."""
    config: Any = getattr(inner_model(model), "config", None)
    if hasattr(config, "to_dict"):
        config.use_cache = args.use_cache
    if args.label_smoothing_factor and getattr(config, "problem_type", None) == "multi_label_classification":
        warnings.warn(
            "Label smoothing is not compatible with multi-label classification; label_smoothing_factor is set to 0.",
            stacklevel=3,
        )
        args.label_smoothing_factor = 0.0


@contextmanager
def training_features(model: nn.Module, args: Any) -> Iterator[None]:
    """Liger's kernels, noise on the embeddings, and detection of overflows, during training."""
    handles = []
    if args.gradient_checkpointing and args.gradient_checkpointing_kwargs:
        inner: Any = inner_model(model)
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(args.gradient_checkpointing_kwargs))
    if args.use_liger_kernel:
        liger = require("transformers.integrations.liger", "hf", "for use_liger_kernel")
        liger.apply_liger_kernel(model, args.liger_kernel_config)
    if args.neftune_noise_alpha is not None:
        handles.append(_embeddings(model).register_forward_hook(EmbeddingNoise(args.neftune_noise_alpha)))
    if "underflow_overflow" in [str(getattr(option, "value", option)) for option in args.debug]:
        require("transformers.debug_utils", "hf", "for debug").DebugUnderflowOverflow(inner_model(model))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embeddings(model: nn.Module) -> nn.Module:
    inner = inner_model(model)
    found = input_embeddings(inner)
    if found is None:
        do = "Leave it out, or define get_input_embeddings()."
        what = "a model with input embeddings for neftune_noise_alpha"
        raise BadArgument(expected(what, type(inner).__name__, do))
    return found


def cast_for_evaluation(model: nn.Module, args: Any) -> None:
    """Outside training, `fp16_full_eval` and `bf16_full_eval` convert the model itself, which halves its memory."""
    if args.fp16_full_eval or args.bf16_full_eval:
        model.to(torch.float16 if args.fp16_full_eval else torch.bfloat16)


class MemoryMetrics:
    """Memory that a stage allocated, for ``skip_memory_metrics=False``; in bytes."""

    def __init__(self, args: Any, stage: str) -> None:
        self._is_on = not args.skip_memory_metrics
        self._stage = stage
        self._device = args.device if args.device.type == "cuda" else None
        self._before = self._now()
        if self._is_on and self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _now(self) -> tuple[int, int]:
        if not self._is_on:
            return 0, 0
        return int(resident_bytes()), 0 if self._device is None else torch.cuda.memory_allocated(self._device)

    def collect(self) -> dict[str, int]:
        """How much memory was allocated since, and on a GPU how much more at the peak."""
        if not self._is_on:
            return {}
        host, device = self._now()
        found = {f"{self._stage}_mem_cpu_alloc_delta": host - self._before[0]}
        if self._device is not None:
            peak = torch.cuda.max_memory_allocated(self._device)
            found[f"{self._stage}_mem_gpu_alloc_delta"] = device - self._before[1]
            found[f"{self._stage}_mem_gpu_peaked_delta"] = max(0, peak - device)
        return found
