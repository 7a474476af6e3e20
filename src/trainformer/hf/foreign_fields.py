"""Fields of HuggingFace's `TrainingArguments` that are not here, with the way to get the same.

A field that is passed with HuggingFace's own default asks for nothing and is accepted; any other value is refused:
to ignore it would be to train something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainformer.core.errors import BadArgument

_FSDP = "Use trainformer.hf.FSDPTrainer, with strategy_options such as {'cpu_offload': True, 'replicas': 2}."
_HUB = "Nothing here talks to the hub. After training: model.push_to_hub(...), or `huggingface-cli upload`."
_CALLBACK = "Pass the callback of transformers for it in `callbacks`; it works here unchanged."

_NOT_REENTRANT: tuple[Any, ...] = (None, {}, {"use_reentrant": False})  # any of these asks for what is done anyway

# name: (HuggingFace's default, what to do instead)
_FOREIGN: dict[str, tuple[Any, str]] = {
    "accelerator_config": (None, "TrainingArguments understand its dispatch_batches."),
    "auto_find_batch_size": (False, "It is not needed: a micro-batch that does not fit is split, with the same loss."),
    "average_tokens_across_devices": (True, "Losses are always divided by the tokens of all processes."),
    "batch_eval_metrics": (False, "Use preprocess_logits_for_metrics to keep less of each batch."),
    "bf16_full_eval": (False, "Evaluation runs in the precision of training: bf16=True."),
    "fp16_full_eval": (False, "Evaluation runs in the precision of training: fp16=True."),
    "data_seed": (None, "The order of the data follows from `seed`."),
    "dataloader_in_order": (True, "Batches always come in order; exact resuming needs it."),
    "dataloader_multiprocessing_context": (None, "Call torch.multiprocessing.set_start_method(...) instead."),
    "ddp_static_graph": ((None, False), "Pass strategy_options={'static_graph': True} to DDPTrainer."),
    "debug": ("", "Use detect_anomaly=True for NaN, and Trainer.check() before a run."),
    "deepspeed": (None, "DeepSpeed does not run here. FSDPTrainer divides a model over processes as ZeRO does."),
    "enable_jit_checkpoint": (False, "A run saves when it gets SIGTERM, always."),
    "eval_accumulation_steps": (None, "Predictions are moved to the host after every batch, always."),
    "eval_do_concat_batches": (True, "compute_metrics gets the whole evaluation in one piece."),
    "eval_use_gather_object": ((False, True), "What processes predict is always gathered."),
    "fsdp": ((None, "", [], False), _FSDP),
    "fsdp_config": ((None, {}), _FSDP),
    "gradient_checkpointing_kwargs": (_NOT_REENTRANT, "Checkpointing is always the variant that is not reentrant."),
    "hub_always_push": (False, _HUB),
    "hub_model_id": (None, _HUB),
    "hub_private_repo": (None, _HUB),
    "hub_revision": (None, _HUB),
    "hub_strategy": ("every_save", _HUB),
    "hub_token": (None, _HUB),
    "push_to_hub": (False, _HUB),
    "ignore_data_skip": (False, "Resuming goes to its place in the data at once; there is nothing to skip."),
    "include_num_input_tokens_seen": ("no", "They are always counted: state.num_input_tokens_seen."),
    "length_column_name": ("length", "Lengths are taken from input_ids."),
    "liger_kernel_config": (None, "Apply Liger's kernels to the model before you pass it."),
    "use_liger_kernel": (False, "Apply Liger's kernels to the model before you pass it."),
    "local_rank": (-1, "Leave it out: the launcher says which process this is."),
    "log_level": ("passive", "Use logging.getLogger('trainformer').setLevel(...)."),
    "log_level_replica": ("warning", "Use logging.getLogger('trainformer').setLevel(...)."),
    "log_on_each_node": (True, "The first process logs."),
    "logging_nan_inf_filter": (True, "A loss that is not finite is an error here, and never hidden."),
    "neftune_noise_alpha": (None, "Add the noise in a forward hook of the model's embeddings."),
    "optim_target_modules": (None, "Pass an optimizer in `optimizers`."),
    "parallelism_config": (None, "Use FSDPTrainer, TPTrainer or PipelineTrainer, with strategy_options."),
    "restore_callback_states_from_checkpoint": (False, "The states of callbacks are always restored."),
    "save_on_each_node": (False, "Each checkpoint is written once, to a disk that all machines have to share."),
    "save_only_model": (False, "A checkpoint that cannot be resumed is no checkpoint. Use save_model() for weights."),
    "skip_memory_metrics": (True, "Pass the callback trainformer.hf.PeakMemory()."),
    "torch_empty_cache_steps": (None, "Call torch.cuda.empty_cache() in a callback's on_step_end."),
    "trackio_bucket_id": (None, _CALLBACK),
    "trackio_space_id": (None, _CALLBACK),
    "trackio_static_space_id": (None, _CALLBACK),
    "use_cache": (False, "Set model.config.use_cache."),
}


def without_foreign_fields(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What was given, less those of HuggingFace's fields that ask for nothing. Those that do ask are refused."""
    for name, value in given.items():
        if name in _FOREIGN and name not in known and not _asks_for_nothing(value, _FOREIGN[name][0]):
            raise BadArgument(
                f"HuggingFace's TrainingArguments have {name}, these have not (received {name}={value!r}). "
                f"{_FOREIGN[name][1]}"
            )
    return {name: value for name, value in given.items() if name not in _FOREIGN or name in known}


def _asks_for_nothing(value: Any, default: Any) -> bool:
    choices = default if isinstance(default, tuple) else (default,)
    return str(getattr(value, "value", value)) in map(str, choices)
