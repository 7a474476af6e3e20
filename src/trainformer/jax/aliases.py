"""Other names for the arguments: EasyDeL's own, HuggingFace's, and those of this library's `Trainer`.

A field of theirs that is not here is accepted where it asks for what happens anyway. Any other value is refused: to
ignore it would be to train something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected

ALIASES = {
    "accumulation_steps": "gradient_accumulation_steps",
    "clip_grad": "max_grad_norm",
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
    "wandb_name": "run_name",
}

# Names that say the same in another way: what they come to, by their value.
_TRANSLATED: dict[str, dict[Any, dict[str, Any]]] = {
    "bf16": {True: {"dtype": "bf16"}, False: {}},
    "resume_if_possible": {True: {"resume": "auto"}, False: {"resume": None}},
    "use_wandb": {True: {"log": ["console", "wandb"]}, False: {}},
}

_MESH = "Use sharding_array=(dp, fsdp, tp, sp)."
_HUB = "Nothing here talks to the hub. After training: trainer.save_pretrained(folder), then `huggingface-cli upload`."
_ALWAYS_SAVED = "A checkpoint always holds everything that resuming needs."
_LOOK = "Override the hook on_log or on_step_end of the trainer, or pass a callback."

# name: (values that ask for what happens anyway, what to do instead)
_FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "adam_beta1": ((0.9,), "Use optimizer_kwargs={'betas': (0.9, 0.95)}."),
    "adam_beta2": ((0.999,), "Use optimizer_kwargs={'betas': (0.9, 0.95)}."),
    "adam_epsilon": ((1e-8,), "Use optimizer_kwargs={'eps': 1e-6}."),
    "auto_shard_states": ((True,), "States are always divided over the mesh, by the rules of the model."),
    "aux_loss_enabled": ((False,), "Add it to the loss in configure_functions."),
    "backend": ((None,), "Set JAX_PLATFORMS before the program starts."),
    "custom_scheduler": ((None,), "Pass scheduler=function_of_the_step."),
    "do_last_save": ((True,), "The end of a run is always saved; save_strategy='no' keeps that one only."),
    "do_train": ((True,), "Leave it out, and call train() or not."),
    "eval_on_start": ((False,), "Call trainer.eval(state) before train()."),
    "fp16": ((False,), "Use dtype='bf16': it has the range of float32, so no loss has to be scaled."),
    "full_determinism": ((False, True), "Runs are deterministic as far as XLA is; nothing has to be asked for."),
    "hub_model_id": ((None,), _HUB),
    "init_tx": ((True,), "The optimizer's state is always made with the model's."),
    "is_fine_tuning": ((True, False), "Nothing depends on it. Leave it out."),
    "jax_distributed_config": ((None,), "Call jax.distributed.initialize(...) before anything else."),
    "load_best_model_at_end": ((False,), "The best checkpoints are kept by save_best; load the one you want."),
    "log_all_workers": ((False,), "The first process logs."),
    "log_grad_norms": ((None, True), "The norm of the gradients is always logged."),
    "logging_first_step": ((False,), "Use logging_steps=1."),
    "logging_strategy": (("steps",), "Use logging_steps, for instance '1epochs'."),
    "loss_config": ((None,), "Write the loss in configure_functions."),
    "low_mem_usage": ((True,), "Nothing is kept that is not needed."),
    "max_eval_steps": ((None, -1), "Pass a smaller evaluation data set."),
    "max_evaluation_steps": ((None, -1), "Pass a smaller evaluation data set."),
    "merge_lora_rank_parameters": ((True,), "Adapters are merged when a model is saved for others."),
    "metrics_to_show_in_rich_pbar": ((None,), _LOOK),
    "model_huggingface_repo_id": ((None,), _HUB),
    "offload_dataset": ((False,), "Data stay on the host, and a batch is sent ahead of its step."),
    "optim_args": ((None, ""), "Use optimizer_kwargs={'momentum': 0.9}."),
    "performance_mode": ((False,), "Nothing is computed for metrics that nobody reads."),
    "process_zero_is_admin": ((True,), "The first process writes what is written once."),
    "progress_bar_type": ((None, "tqdm", "rich"), "Use log='none' to see nothing."),
    "pruning_module": ((None,), "Set pruned weights to zero in on_step_end, or mask them in the model."),
    "precompute_ref_log_probs": ((True, False), "The reference is always asked once, before training."),
    "push_to_hub": ((False,), _HUB),
    "remove_ckpt_after_load": ((False,), "What is kept is said by save_total_limit and save_best."),
    "remove_unused_columns": (
        (True,),
        "Columns that are no numbers cannot go to a device. Change the collect function.",
    ),
    "report_steps": ((None,), "Loggers and console get the same records: use logging_steps."),
    "save_optimizer_state": ((True,), _ALWAYS_SAVED),
    "save_only_model": ((False,), _ALWAYS_SAVED),
    "sparsify_module": ((False,), "Sparse weights are not trained here."),
    "step_partition_spec": ((None,), "Rows are divided over dp and fsdp, sequences over sp. " + _MESH),
    "step_start_point": ((None, 0), "Resuming goes on where the checkpoint ended."),
    "track_memory": ((False, None), "Use jax.profiler.save_device_memory_profile(...)."),
    "training_time": ((None,), "Use max_steps; a run that gets SIGTERM saves and can be resumed."),
    "training_time_limit": ((None,), "Use max_steps; a run that gets SIGTERM saves and can be resumed."),
    "truncation_mode": ((None, "keep_end", "keep_start"), "Cut the texts in the data."),
    "use_data_collator": ((True,), "Override create_collect_function."),
    "use_grain": ((False, None), "Pass a grain loader as the data, or override configure_dataloaders."),
    "verbose": ((True, False), "Use log='none' to see nothing."),
    "wandb_entity": ((None,), "Set WANDB_ENTITY in the environment."),
    "watchers": ((None, []), _LOOK),
    "weight_distribution_log_steps": ((None, 0), _LOOK),
}


def in_own_words(given: Mapping[str, Any], known: Collection[str], kind: str) -> dict[str, Any]:
    """What was given by the names of the fields; two spellings must agree, and unknown names are refused."""
    found: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for name, value in given.items():
        for field, said in _meant(name, value, known, kind).items():
            if field in found and not _same(found[field], said):
                names = f"{said_by[field]}={given[said_by[field]]!r} and {name}={value!r}"
                raise BadArgument(f"Expected one value for {field}, received {names}. Keep the one you mean.")
            found[field] = said
            said_by[field] = name
    return found


def _meant(name: str, value: Any, known: Collection[str], kind: str) -> dict[str, Any]:
    if name in known:
        return {name: value}
    if name in ALIASES:
        return {ALIASES[name]: value}
    if name in _TRANSLATED:
        if not isinstance(value, bool):
            raise BadArgument(expected(f"{name} to be True or False", value))
        return _TRANSLATED[name][value]
    if name in _FOREIGN:
        fine, do = _FOREIGN[name]
        if not any(_same(value, each) for each in fine):
            raise BadArgument(expected(f"{name} to be left out of {kind}", value, do))
        return {}
    hint = did_you_mean(name, [*known, *ALIASES, *_TRANSLATED])
    raise BadArgument(expected(f"fields of {kind}", name, hint))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of a kind: True is not 1."""
    one, other = (tuple(v) if isinstance(v, list) else v for v in (one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
