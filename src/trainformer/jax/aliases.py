"""Other names for arguments, settings and keywords: those of EasyDeL, HuggingFace and this library's `Trainer`.

An argument that has no counterpart here is accepted if its value matches what happens anyway, and refused otherwise: a
silently ignored argument would change the training.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from trainformer.core.errors import BadArgument, did_you_mean, expected

ALIASES = {
    "accumulation_steps": "gradient_accumulation_steps",
    "clip_grad": "max_grad_norm",
    "custom_scheduler": "scheduler",
    "dataloader_drop_last": "drop_last",
    "epochs": "num_train_epochs",
    "eval_strategy": "evaluation_strategy",
    "evaluation_steps": "eval_steps",
    "extra_optimizer_kwargs": "optimizer_kwargs",
    "frozen_params": "frozen_parameters",
    "gradient_clip": "max_grad_norm",
    "log_every": "logging_steps",
    "log_steps": "logging_steps",
    "lr": "learning_rate",
    "lr_scheduler_kwargs": "scheduler_kwargs",
    "lr_scheduler_type": "scheduler",
    "max_eval_steps": "max_evaluation_steps",
    "max_length": "max_sequence_length",
    "max_seq_length": "max_sequence_length",
    "max_training_steps": "max_steps",
    "num_workers": "dataloader_num_workers",
    "optim": "optimizer",
    "report_to": "log",
    "resume_from_checkpoint": "resume",
    "run_dir": "output_dir",
    "save_directory": "output_dir",
    "save_every": "save_steps",
    "sharding_axis_dims": "sharding_array",
    "shuffle_train_dataset": "shuffle",
    "training_time": "training_time_limit",
    "wandb_name": "run_name",
}

_TEXT_ALIASES = {"lmhead_chunksize": "chunk_tokens"}  # of trainers for language models
_LOGGERS = "report_steps"
_OPTIONAL = ("custom_scheduler", "lmhead_chunksize")  # None leaves the argument at its default

# Arguments that map to other arguments, depending on their value.
_MAPPED: dict[str, dict[Any, dict[str, Any]]] = {
    "bf16": {True: {"dtype": "bf16"}, False: {}},
    "report_metrics": {True: {}, False: {"log": "console"}},
    "resume_if_possible": {True: {"resume": "auto"}, False: {"resume": None}},
    "use_wandb": {True: {"log": ["console", "wandb"]}, False: {}},
}

_MESH = "Use sharding_array=(dp, fsdp, tp, sp) or (dp, fsdp, ep, tp, sp)."
_HUB = "Nothing is uploaded to the hub. After training: trainer.save_pretrained(folder), then `huggingface-cli upload`."
_ALWAYS_SAVED = "A checkpoint always contains everything that resuming needs."
_PREVIEWS = "Previews are greedy; set generation_interval and generation_prompts of SFTConfig, or call generate()."
_BENCHMARKS = "Call your benchmark in a callback, or after training."
_QUANTIZATION = "Quantization-aware training is available with torch: trainformer.Trainer(qat_recipe=...)."
_SHARDS = "Every process reads the rows of its devices."
_USE_HOOK = "Override on_log or on_step_end of the trainer, or pass a callback."

# name: (values that match what happens anyway, what to do instead)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "adam_beta1": ((0.9,), "Use optimizer_kwargs={'betas': (0.9, 0.95)}."),
    "adam_beta2": ((0.999,), "Use optimizer_kwargs={'betas': (0.9, 0.95)}."),
    "adam_epsilon": ((1e-8,), "Use optimizer_kwargs={'eps': 1e-6}."),
    "auto_shard_states": ((True,), "States are always sharded over the mesh, by the partition rules of the model."),
    "aux_loss_enabled": (
        (False,),
        "Set router_aux_loss_coef of SFTConfig or DPOConfig, or add it to the loss in configure_functions.",
    ),
    "backend": ((None,), "Set JAX_PLATFORMS before the program starts."),
    "do_last_save": ((True,), "The final checkpoint is always saved; with save_strategy='no' it is the only one."),
    "do_train": ((True,), "Leave it out, and call train() or not."),
    "eval_on_start": ((False,), "Call trainer.eval(state) before train()."),
    "fp16": ((False,), "Use dtype='bf16': it has the range of float32 and needs no loss scaling."),
    "full_determinism": ((False, True), "Runs are always as deterministic as XLA is."),
    "hub_model_id": ((None,), _HUB),
    "init_tx": ((True,), "The optimizer state is always created with the model."),
    "is_fine_tuning": ((True, False), "Nothing depends on it. Leave it out."),
    "jax_distributed_config": ((None,), "Call jax.distributed.initialize(...) at the start of the program."),
    "load_best_model_at_end": ((False,), "save_best keeps the best checkpoints; load the one you want."),
    "log_all_workers": ((False,), "Only process 0 logs."),
    "log_grad_norms": ((None, True), "The gradient norm is always logged."),
    "logging_first_step": ((False,), "Use logging_steps=1."),
    "logging_strategy": (("steps",), "Use logging_steps, for instance '1epochs'."),
    "loss_config": ((None,), "Write the loss in configure_functions."),
    "low_mem_usage": ((True,), "Nothing unneeded is kept in memory."),
    "merge_lora_rank_parameters": ((True,), "save_pretrained(folder, merge=True) merges the adapter into the weights."),
    "metrics_to_show_in_rich_pbar": ((None,), _USE_HOOK),
    "model_huggingface_repo_id": ((None,), _HUB),
    "offload_dataset": ((False,), "The dataset stays on the host; batches are prefetched to the devices."),
    "optim_args": ((None, ""), "Use optimizer_kwargs={'momentum': 0.9}."),
    "performance_mode": ((False,), "Metrics cost nothing between log points."),
    "process_zero_is_admin": ((True,), "Process 0 writes the files that are written once."),
    "progress_bar_type": ((None, "tqdm", "rich", "json"), "Use log='none' for no output."),
    "pruning_module": ((None,), "Set pruned weights to zero in on_step_end, or mask them in the model."),
    "precompute_ref_log_probs": ((True, False), "The reference is always evaluated once, before training."),
    "push_to_hub": ((False,), _HUB),
    "remove_ckpt_after_load": ((False,), "save_total_limit and save_best decide which checkpoints are kept."),
    "remove_unused_columns": (
        (True,),
        "Non-numeric columns cannot be moved to a device. Change the collate function.",
    ),
    "save_optimizer_state": ((True,), _ALWAYS_SAVED),
    "save_only_model": ((False,), _ALWAYS_SAVED),
    "sparsify_module": ((False,), "Sparse weights are not supported."),
    "step_partition_spec": (
        (None, (("dp", "fsdp"), "sp")),
        "Rows are sharded over dp, fsdp and ep, sequences over sp. " + _MESH,
    ),
    "step_start_point": ((None, 0), "Resuming continues at the step of the checkpoint."),
    "track_memory": ((False, None), "Use jax.profiler.save_device_memory_profile(...)."),
    "truncation_mode": ((None, "keep_end", "keep_start"), "Truncate the texts in the dataset."),
    "use_data_collator": ((True,), "Override create_collect_function."),
    "use_grain": ((True, False, None), "Pass a grain loader as the dataset, or override configure_dataloaders."),
    "verbose": ((True, False), "Use log='none' for no output."),
    "wandb_entity": ((None,), "Set WANDB_ENTITY in the environment."),
    "watchers": ((None, []), _USE_HOOK),
    "weight_distribution_log_steps": ((500, None, 0), _USE_HOOK),
    "weight_distribution_pattern": ((".*", None), _USE_HOOK),
    "benchmark_interval": ((None,), _BENCHMARKS),
    "benchmarks": ((None, []), _BENCHMARKS),
    "dataloader_pin_memory": ((False, None), "Batches are copied to the devices while the step before them runs."),
    "force_step_start_point": ((False,), "Resuming continues at the step of the checkpoint."),
    "generation_config_overrides": ((None, {}), _PREVIEWS),
    "generation_dataset_prompt_field": (("prompt", None), _PREVIEWS),
    "generation_do_sample": ((None, False), _PREVIEWS),
    "generation_extra_kwargs": ((None, {}), _PREVIEWS),
    "generation_frequency_penalty": ((None,), _PREVIEWS),
    "generation_interval": ((None,), _PREVIEWS),
    "generation_log_to_wandb": ((True, False), _PREVIEWS),
    "generation_max_new_tokens": ((None,), _PREVIEWS),
    "generation_num_prompts": ((1, None), _PREVIEWS),
    "generation_num_return_sequences": ((None, 1), _PREVIEWS),
    "generation_presence_penalty": ((None,), _PREVIEWS),
    "generation_preview_print": ((False, True), "Previews are always printed."),
    "generation_prompts": ((None, []), _PREVIEWS),
    "generation_repetition_penalty": ((None,), _PREVIEWS),
    "generation_seed": ((None,), _PREVIEWS),
    "generation_shard_inputs": ((True,), _PREVIEWS),
    "generation_temperature": ((None,), _PREVIEWS),
    "generation_top_k": ((None,), _PREVIEWS),
    "generation_top_p": ((None,), _PREVIEWS),
    "generation_use_train_prompts": ((False,), _PREVIEWS),
    "grain_shard_count": ((None,), _SHARDS),
    "grain_shard_index": ((None,), _SHARDS),
    "lmhead_chunksize": ((None,), "It belongs to trainers of language models: SFTConfig, DPOConfig."),
    "log_training_generations_to_wandb": ((True, False), "No trainer here generates while it trains."),
    "merge_lora_before_save": (
        (True, False),
        "Checkpoints have the adapter; save_pretrained(folder, merge=True) merges it.",
    ),
    "merge_lora_before_tpu_preemption_save": ((False,), "save_pretrained(folder, merge=True) merges the adapter."),
    "model_parameters": ((None, {}), "Configure the model itself."),
    "offload_device_index": ((0,), "The dataset stays on the host."),
    "offload_device_type": (("cpu",), "The dataset stays on the host."),
    "quantization_bits": ((None,), _QUANTIZATION),
    "quantization_block": ((None,), _QUANTIZATION),
    "quantization_group_size": ((None,), _QUANTIZATION),
    "quantization_mode": ((None,), _QUANTIZATION),
    "save_tpu_preemption_checkpoints": ((True,), "On SIGTERM a run always saves a checkpoint."),
    "sparse_module_type": (("bcoo",), "Sparse weights are not supported."),
    "state_apply_fn_kwarguments_to_model": ((None, {}), "Pass them to the model in compute_loss."),
    "straight_through_emulator": ((None,), _QUANTIZATION),
    "tensor_straight_through": ((None,), _QUANTIZATION),
    # of SFTConfig
    "add_special_tokens": ((False, True), "Texts get the special tokens that their tokenizer adds, and EOS."),
    "dataset_batch_size": ((1000, None), "Records are tokenised as fast as the tokenizer allows. Leave it out."),
    "dataset_kwargs": ((None, {}), "Prepare the dataset before you pass it."),
    "dataset_num_proc": ((None, 1), "A fast tokenizer uses all cores by itself. Leave it out."),
    "packing_strategy": (("bfd",), "Whole records are packed, best fit first."),
    # of DPOConfig
    "force_use_ref_model": ((False,), "Use reference_free=False."),
    "generate_during_eval": ((False,), _PREVIEWS),
    "is_encoder_decoder": ((None, False), "Only causal models are supported."),
    "label_pad_token_id": ((-100,), "Padding is masked with -100."),
    "logprob_vocab_chunk_size": ((None,), "Use chunk_tokens: logits are computed in chunks of tokens."),
    "padding_value": ((None,), "Padding is masked, whatever its value."),
    "ref_model_mixup_alpha": ((0.9, 0.6), "The reference does not change: see sync_ref_model."),
    "ref_model_sync_steps": ((64, 512), "The reference does not change: see sync_ref_model."),
    "rpo_alpha": ((None,), "Use loss_type=['sigmoid', 'sft'] with loss_weights=[1.0, rpo_alpha]."),
    "sync_ref_model": (
        (False,),
        "The reference is evaluated once, before training. Train for fewer steps, save the model and start a second "
        "run, whose reference it is.",
    ),
    "tools": ((None,), "Put 'tools' into the records."),
    "use_weighting": ((False,), "All pairs have the same weight."),
}
_ESURGE: dict[str, Any] = {
    "esurge_data_parallelism_axis": None,
    "esurge_enable_prefix_caching": None,
    "esurge_hbm_utilization": 0.45,
    "esurge_max_num_batched_tokens": None,
    "esurge_max_num_seq_buckets": None,
    "esurge_max_num_seqs": None,
    "esurge_min_input_pad": None,
    "esurge_page_size": 32,
    "esurge_runner_verbose": False,
    "esurge_silent_mode": True,
    "esurge_use_tqdm": True,
    "use_esurge_generation": True,
}
_UNSUPPORTED |= {name: ((default,), "There is no such inference engine here.") for name, default in _ESURGE.items()}


def resolve_aliases(given: Mapping[str, Any], known: Collection[str], kind: str) -> dict[str, Any]:
    """Arguments by field name. Two spellings of a field must agree; unknown names are refused."""
    found: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in given.items():
        for field, resolved in _resolve(name, value, known, kind).items():
            if field in found and not _same(found[field], resolved):
                names = f"{source[field]}={given[source[field]]!r} and {name}={value!r}"
                raise BadArgument(f"Expected one value for {field}, received {names}. Keep the one you mean.")
            found[field] = resolved
            source[field] = name
    steps = given.get(_LOGGERS)
    if steps is not None:  # console and loggers share their interval
        both = [steps, found.get("logging_steps", steps)]
        if not all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in both):
            raise BadArgument(expected("report_steps and log_steps to be positive integers", both))
        found["logging_steps"] = min(both)
    return found


def _resolve(name: str, value: Any, known: Collection[str], kind: str) -> dict[str, Any]:
    if name in known:
        return {name: value}
    if name == _LOGGERS:
        return {}
    own = ALIASES.get(name) or _TEXT_ALIASES.get(name)
    if own is not None and own in known:
        return {} if value is None and name in _OPTIONAL else {own: value}
    if name in _MAPPED:
        if not isinstance(value, bool):
            raise BadArgument(expected(f"{name} to be True or False", value))
        return _MAPPED[name][value]
    if name in _UNSUPPORTED:
        accepted, do = _UNSUPPORTED[name]
        if not any(_same(value, each) for each in accepted):
            raise BadArgument(expected(f"{name} to be left out of {kind}", value, do))
        return {}
    hint = did_you_mean(name, [*known, *ALIASES, *_MAPPED])
    raise BadArgument(expected(f"fields of {kind}", name, hint))


def default_of(name: str) -> Any:
    """What happens anyway for an argument that has no counterpart here. Raises KeyError if there is no such argument.

    >>> default_of("esurge_page_size"), default_of("quantization_mode")
    (32, None)
    """
    return _UNSUPPORTED[name][0][0]


def _same(one: Any, other: Any) -> bool:
    """Equality that tells True from 1."""
    one, other = (tuple(v) if isinstance(v, (list, PartitionSpec)) else v for v in (one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


#: The settings of a run (named the same for all entry points), and the argument that decides each.
SETTINGS = {
    "epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "batch_size": "total_batch_size",
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "warmup_ratio": "warmup_ratio",
    "gradient_clip": "max_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "nonfinite": "nonfinite",
    "seed": "seed",
    "precision": "dtype",
    "gradient_checkpointing": "gradient_checkpointing",
    "log": "log",
    "log_every": "logging_steps",
    "name": "model_name",
    "run_dir": "output_dir",
    "save_every": "save_steps",
    "save_last": "save_total_limit",
    "eval_every": "eval_steps",
    "resume": "resume",
}

#: Keywords of trainers in other libraries, and their names here.
_KEYWORDS = {
    "args": "arguments",
    "eval_data": "dataset_eval",
    "model_init": "model",
    "peft_config": "lora",
    "ref_model": "reference_model",
    "student_model": "model",
    "teacher": "teacher_model",
    "tokenizer": "processing_class",
    "train_data": "dataset_train",
}


def settings_passed(passed: Iterable[str], values: Mapping[str, Any]) -> frozenset[str]:
    """Which settings of a run the user chose, from the names of the arguments that were passed."""
    arguments = set(passed)
    return frozenset(name for name, own in SETTINGS.items() if own in arguments and name in values)


def refuse_unknown_keywords(kind: type, unknown: Iterable[str]) -> None:
    """Raise if a trainer received keywords that neither it nor one of its bases has."""
    inits = [init for base in kind.__mro__ if inspect.isfunction(init := vars(base).get("__init__"))]
    parameters = [parameter for init in inits for parameter in inspect.signature(init).parameters.values()]
    known = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - {"self"}
    for name in unknown:
        own = _KEYWORDS.get(name)
        do = f"It is called {own} here." if own in known else did_you_mean(name, sorted(known))
        raise BadArgument(expected(f"keywords of {kind.__name__}", name, do or "Settings of a run go into arguments."))
