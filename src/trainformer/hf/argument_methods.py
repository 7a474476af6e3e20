"""Properties and methods of `TrainingArguments`: processes, serialisation, and setters of several fields at once."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

import torch

from trainformer.context.jsonable import jsonable
from trainformer.core.secrets import mask
from trainformer.hf.argument_checks import LOG_LEVELS, normalise, validate
from trainformer.hf.distributed import join, run_first, this_process

if TYPE_CHECKING:
    from trainformer.distributed import TorchProcessGroup


class ParallelMode(Enum):
    """Whether a run is distributed, for scripts that print it."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"


class ArgumentMethods:
    """The methods of HF's `TrainingArguments`."""

    # -- processes and devices -----------------------------------------------------------------------------

    train_batch_size = property(lambda self: self.per_device_train_batch_size)
    eval_batch_size = property(lambda self: self.per_device_eval_batch_size)
    process_index = property(lambda self: this_process().rank)
    local_process_index = property(lambda self: this_process().local_rank)
    world_size = property(lambda self: this_process().world_size)
    n_gpu = property(lambda self: int(self.device.type == "cuda"))  # per process
    place_model_on_device = property(lambda self: True)

    @property
    def should_log(self) -> bool:
        """Whether this process logs: the first of each machine, or of all with ``log_on_each_node=False``."""
        process = this_process()
        return (process.local_rank if self.log_on_each_node else process.rank) == 0  # type: ignore[attr-defined]

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return this_process().rank == 0

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        return ParallelMode.DISTRIBUTED if this_process().world_size > 1 else ParallelMode.NOT_PARALLEL

    def get_process_log_level(self) -> int:
        """The log level of this process: `log_level`, or `log_level_replica` on processes that do not log."""
        name = self.log_level if self.should_log else self.log_level_replica  # type: ignore[attr-defined]
        level = LOG_LEVELS[name]
        if level >= 0:
            return level
        theirs = sys.modules.get("transformers.utils.logging")
        return logging.getLogger("trainformer").getEffectiveLevel() if theirs is None else theirs.get_verbosity()

    def main_process_first(self, local: bool = True, desc: str = "work") -> AbstractContextManager[None]:
        """Run a block on the main process of each machine (or of all machines) first, then on the others."""
        process_group = self.join()
        return run_first(process_group, is_first=process_group.local_rank == 0 if local else process_group.is_main)

    def join(self) -> TorchProcessGroup:
        """Join the process group."""
        return join(self)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Warm-up steps of a run with `num_training_steps` steps."""
        steps, ratio = self.warmup_steps, self.warmup_ratio  # type: ignore[attr-defined]
        ratio = ratio or (steps if steps < 1 else 0.0)
        return -int(-num_training_steps * ratio // 1) if ratio else int(steps)

    # -- serialisation -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-serialisable. Tokens are replaced by their names."""
        values = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {k: f"<{k.upper()}>" if k.endswith("_token") else v for k, v in values.items()}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All fields as numbers and strings, for loggers. Secrets are masked."""
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in mask(self.to_dict()).items()}

    def to_json_string(self) -> str:
        """All fields as JSON. Secrets are masked."""
        return json.dumps(mask(self.to_dict()), indent=2)

    def __getstate__(self) -> dict[str, Any]:
        """Without tokens: `training_args.bin` is part of checkpoints."""
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    def __repr__(self) -> str:
        lines = (f"{name}={value},\n" for name, value in sorted(mask(self.to_dict()).items()))
        return f"{type(self).__name__}(\n{''.join(lines)})"

    # -- setters of several fields -------------------------------------------------------------------------

    def _set(self, **values: Any) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        normalise(self)
        validate(self)
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Set the fields of training; returns the arguments."""
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            gradient_checkpointing=gradient_checkpointing,
        )

    def set_evaluate(
        self,
        strategy: str = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set the fields of evaluation; returns the arguments."""
        return self._set(
            eval_strategy=strategy,
            do_eval=str(getattr(strategy, "value", strategy)) != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set the fields of prediction; returns the arguments."""
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self, strategy: str = "steps", steps: int = 500, total_limit: int | None = None, on_each_node: bool = False
    ) -> Self:
        """Set the fields of checkpoints; returns the arguments."""
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self,
        strategy: str = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set the fields of logging; returns the arguments."""
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set the fields of uploads to the hub; returns the arguments."""
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the fields of the optimizer; returns the arguments."""
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the fields of the schedule; returns the arguments."""
        return self._set(
            lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set the fields of the dataloaders; returns the arguments."""
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else jsonable(value)
