"""TrainingArguments: HF's names and defaults, and the errors for wrong or unsupported ones."""

import dataclasses
import json
import logging
import os
import re

import pytest
import torch
import transformers
from hf_toys import Classifier, examples
from torch.nn.attention import SDPBackend
from transformers import HfArgumentParser

from trainformer import hf
from trainformer.core.errors import BadArgument
from trainformer.hf.settings import settings_of


def value(args, name):
    found = getattr(args, name)
    if hasattr(found, "to_dict"):  # transformers removes one option when it reads them
        found = sorted((k, v) for k, v in found.to_dict().items() if k != "use_configured_state")
    return str(getattr(found, "value", found))


@pytest.mark.parametrize("kind", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_every_field_of_transformers_reads_as_its_default(kind):
    theirs, ours = (getattr(library, kind)("out", use_cpu=True) for library in (transformers, hf))
    names = {f.name for f in dataclasses.fields(theirs)}
    assert names <= {f.name for f in dataclasses.fields(ours)}
    # Their progress bars are off in a test.
    assert {name for name in names if value(theirs, name) != value(ours, name)} <= {"disable_tqdm"}


@pytest.mark.parametrize("kind", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_every_field_is_accepted_at_its_default(kind):
    defaults = {}
    for field in dataclasses.fields(getattr(transformers, kind)):
        missing = field.default is dataclasses.MISSING
        defaults[field.name] = field.default_factory() if missing else field.default
    assert getattr(hf, kind)(**defaults).output_dir == "trainer_output"


#: Values other than the defaults, for the fields that used to be refused.
OTHERS = {
    "auto_find_batch_size": True, "average_tokens_across_devices": False, "batch_eval_metrics": True,
    "bf16_full_eval": True, "data_seed": 3, "dataloader_in_order": False, "dataloader_multiprocessing_context": "spawn",
    "ddp_static_graph": True, "debug": "underflow_overflow", "enable_jit_checkpoint": True,
    "eval_accumulation_steps": 2, "eval_do_concat_batches": False, "eval_use_gather_object": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True}, "hub_always_push": True, "hub_model_id": "me/model",
    "hub_private_repo": True, "hub_revision": "v1", "hub_strategy": "end", "hub_token": "hunter2",
    "ignore_data_skip": True, "include_num_input_tokens_seen": True, "length_column_name": "size",
    "log_level": "error", "log_level_replica": "info", "log_on_each_node": False, "logging_nan_inf_filter": False,
    "neftune_noise_alpha": 5.0, "optim_target_modules": ["attn"], "push_to_hub": True,
    "restore_callback_states_from_checkpoint": True, "save_on_each_node": True, "save_only_model": True,
    "skip_memory_metrics": False, "torch_empty_cache_steps": 3, "trackio_space_id": "me/space", "use_cache": True,
    "use_liger_kernel": True, "learning_rate": 0.0, "local_rank": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_accepted(name):
    assert hf.TrainingArguments("out", **{name: OTHERS[name]}).output_dir == "out"


@pytest.mark.parametrize(
    "options",
    [{"deepspeed": "ds.json"}, {"fsdp": "full_shard"}, {"fsdp_config": {"a": 1}}, {"debug": "tpu_metrics_debug"}],
)
def test_what_cannot_be_done_is_refused_by_the_trainer(options):
    (name,) = options
    with pytest.raises(BadArgument, match=f"does not support the argument {name} of HF"):
        hf.Trainer(torch.nn.Linear(1, 1), hf.TrainingArguments("out", **options))


def test_paths_devices_and_texts():
    args = hf.TrainingArguments("~/out", lr_scheduler_kwargs='{"num_cycles": 2}', eval_strategy="epoch")
    assert args.output_dir == os.path.expanduser("~/out")
    assert hf.TrainingArguments(output_dir=None).output_dir == "trainer_output"
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert args.do_eval
    assert not hf.TrainingArguments("out").do_eval
    cpu = hf.TrainingArguments("out", use_cpu=True)
    assert (cpu.device, cpu.n_gpu, cpu.dataloader_pin_memory) == (torch.device("cpu"), 0, False)
    assert torch.nn.Linear(1, 1).to(args.device) is not None
    assert hf.TrainingArguments("out", device="meta").device == torch.device("meta")
    with pytest.raises(BadArgument, match="a JSON object"):
        hf.TrainingArguments("out", lr_scheduler_kwargs="{num_cycles: 2}")


def test_setters_match_transformers():
    calls = {
        "set_training": {"learning_rate": 1e-4, "batch_size": 32, "num_epochs": 2},
        "set_evaluate": {"strategy": "steps", "steps": 100, "accumulation_steps": 2, "delay": 0},
        "set_testing": {"batch_size": 16},
        "set_save": {"strategy": "steps", "steps": 100, "total_limit": 2},
        "set_logging": {"strategy": "steps", "steps": 100, "level": "info"},
        "set_push_to_hub": {"model_id": "me/model", "strategy": "end"},
        "set_optimizer": {"name": "adamw_torch", "beta1": 0.8, "epsilon": 1e-6},
        "set_lr_scheduler": {"name": "cosine", "warmup_steps": 0.05},
        "set_dataloader": {"train_batch_size": 16, "eval_batch_size": 64, "drop_last": True},
    }
    theirs, ours = (library.TrainingArguments("out", use_cpu=True) for library in (transformers, hf))
    for method, options in calls.items():
        assert getattr(ours, method)(**options) is ours
        getattr(theirs, method)(**options)
    names = [f.name for f in dataclasses.fields(theirs)]
    differing = {name for name in names if value(theirs, name) != value(ours, name)}
    assert differing <= {"disable_tqdm", "dataloader_pin_memory", "report_to"}


def test_log_levels():
    assert hf.TrainingArguments("out", log_level="error").get_process_log_level() == logging.ERROR
    theirs = transformers.TrainingArguments("out", use_cpu=True)
    assert hf.TrainingArguments("out").get_process_log_level() == theirs.get_process_log_level()
    with pytest.raises(BadArgument, match="log_level to be one of"):
        hf.TrainingArguments("out", log_level="loud")


def test_old_names_say_what_replaces_them():
    with pytest.raises(BadArgument, match="Use eval_strategy"):
        hf.TrainingArguments("out", evaluation_strategy="epoch")


def test_secrets_are_masked():
    args = hf.TrainingArguments(
        "out", hub_token="hunter2", strategy_options={"api_key": "hunter2", "url": "redis://:swordfish@host"}
    )
    for text in (args.to_json_string(), str(args.to_sanitized_dict()), repr(args)):
        assert "hunter2" not in text
        assert "swordfish" not in text
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert args.to_dict()["strategy_options"]["api_key"] == "hunter2"
    torch.save(args, "args.bin")
    assert torch.load("args.bin", weights_only=False).hub_token is None


def test_every_field_of_forgather_is_supported():
    words = """default_dtype max_eval_steps preserve_best_model best_model_metric best_model_greater_is_better
    preserve_n_best eval_on_save enable_activation_offloading detect_anomaly sdpa_backend sdpa_set_priority
    float32_matmul_precision dynamo_recompile_limit mixed_precision fp8_recipe fp8_dim_alignment qat_recipe"""
    names = words.split()
    base = {f.name: f.default for f in dataclasses.fields(hf.BaseTrainingArguments)}
    minimal = {f.name for f in dataclasses.fields(hf.MinimalTrainingArguments)}
    assert set(names) <= base.keys()
    assert not set(names) & minimal
    assert (base["max_eval_steps"], base["best_model_metric"], base["preserve_n_best"]) == (-1, "loss", 1)
    assert (base["fp8_dim_alignment"], base["mixed_precision"]) == (16, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp32"}, "mixed_precision to be None, 'no', 'bf16' or 'fp16'"),
        ({"bf16": True, "fp16": True}, "bf16 or fp16, received both"),
        ({"bf16": True, "mixed_precision": "fp16"}, "one precision"),
        ({"fp8_recipe": "fast"}, "fp8_recipe"),
        ({"qat_recipe": "int3"}, "qat_recipe"),
        ({"fp8_recipe": "rowwise", "qat_recipe": "int8-weight-only"}, "fp8 or qat_recipe, received both"),
        ({"sdpa_backend": "fast"}, "sdpa_backend to be among"),
        ({"float32_matmul_precision": "low"}, "float32_matmul_precision"),
        ({"tf32": True, "float32_matmul_precision": "high"}, "received both"),
        ({"default_dtype": "float33"}, "default_dtype"),
        ({"eval_strategy": "sometimes"}, "eval_strategy to be 'no', 'steps', 'epoch'"),
        ({"save_strategy": "sometimes"}, "'epoch', 'best'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps to be a whole number"),
        ({"per_device_train_batch_size": 2.5}, "per_device_train_batch_size"),
        ({"per_device_eval_batch_size": True}, "per_device_eval_batch_size"),
        ({"learning_rate": "1e-4"}, "learning_rate to be a number of at least 0"),
        ({"learning_rate": -1.0}, "learning_rate to be a number of at least 0"),
        ({"logging_steps": 10.5}, "logging_steps to be a whole number"),
        ({"torch_empty_cache_steps": 1.0}, "torch_empty_cache_steps"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "an eval_strategy with lr_scheduler_type"),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, "metric_for_best_model"),
        ({"hub_strategy": "sometimes"}, "hub_strategy to be one of 'end'"),
        ({"debug": "everything"}, "debug to be 'underflow_overflow'"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"max_steps": 0}, "max_steps"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "warmup_steps or warmup_ratio"),
        ({"load_best_model_at_end": True}, "an eval_strategy with load_best_model_at_end"),
        ({"save_strategy": "best"}, "an eval_strategy with save_strategy='best'"),
        ({"save_total_limit": 0}, "save_total_limit"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor with workers"),
        ({"train_sampling_strategy": "sorted"}, "train_sampling_strategy"),
        ({"max_eval_steps": 0}, "max_eval_steps"),
        ({"preserve_n_best": 0}, "preserve_n_best"),
        ({"learning_rat": 1}, "Did you mean 'learning_rate'"),
    ],
)
def test_mistakes_are_explained(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        hf.TrainingArguments("out", **options)
    assert isinstance(caught.value, BadArgument)


def test_derived_fields(tmp_path):
    args = hf.TrainingArguments(str(tmp_path), mixed_precision="no", torch_compile_mode="max-autotune")
    assert args.mixed_precision is None
    assert args.torch_compile
    assert (args.torch_compile_backend, args.torch_compile_mode) == ("inductor", "max-autotune")
    assert args.logging_dir is None
    logged = hf.TrainingArguments(str(tmp_path), report_to="tensorboard")
    assert logged.logging_dir.startswith(str(tmp_path / "runs"))
    best = hf.TrainingArguments("out", eval_strategy="epoch", load_best_model_at_end=True)
    assert (best.metric_for_best_model, best.greater_is_better) == ("loss", False)
    assert hf.TrainingArguments("out", metric_for_best_model="accuracy").greater_is_better is True
    assert hf.TrainingArguments("out", eval_strategy="steps", logging_steps=7).eval_steps == 7
    assert hf.TrainingArguments("out", sdpa_backend=SDPBackend.MATH).sdpa_backend is SDPBackend.MATH
    assert hf.TrainingArguments("out", eval_strategy=transformers.IntervalStrategy.EPOCH).eval_strategy == "epoch"


@pytest.mark.parametrize("options", [{}, {"warmup_steps": 7}, {"warmup_steps": 0.07}, {"warmup_steps": 0.5}])
def test_warmup_steps_match_transformers(options):
    ours, theirs = (
        hf.TrainingArguments("out", **options),
        transformers.TrainingArguments("out", use_cpu=True, **options),
    )
    totals = (1, 10, 99, 100, 101)
    assert [ours.get_warmup_steps(n) for n in totals] == [theirs.get_warmup_steps(n) for n in totals]


def test_warmup_ratio():
    assert hf.TrainingArguments("out", warmup_ratio=0.25).get_warmup_steps(100) == 25


def test_hf_argument_parser():
    words = "--output_dir out --learning_rate 1e-3 --bf16 --eval_strategy steps --eval_steps 20 --sdpa_backend flash"
    (args,) = HfArgumentParser(hf.TrainingArguments).parse_args_into_dataclasses(words.split())
    assert (args.learning_rate, args.mixed_precision, args.eval_steps, args.sdpa_backend) == (1e-3, "bf16", 20, "flash")


def test_hf_argument_parser_with_many_fields():
    words = """--output_dir out --do_train --do_eval --eval_strategy epoch --optim adafactor --lr_scheduler_type cosine
    --lr_scheduler_kwargs {"num_cycles":2} --gradient_checkpointing_kwargs {"use_reentrant":false} --report_to none
    --label_names a b --push_to_hub False --neftune_noise_alpha 5 --save_total_limit 2 --data_seed 3 --log_level info
    --include_for_metrics loss --predict_with_generate --generation_max_length 7 --fsdp full_shard
    --debug underflow_overflow --dataloader_pin_memory False --warmup_steps 0.1
    --accelerator_config {"split_batches":true} --hub_strategy end"""
    (args,) = HfArgumentParser(hf.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words.split())
    (theirs,) = HfArgumentParser(transformers.Seq2SeqTrainingArguments).parse_args_into_dataclasses(
        [word for word in words.split() if word not in ("--fsdp", "full_shard")]
    )
    names = [f.name for f in dataclasses.fields(theirs)]
    assert {n for n in names if value(theirs, n) != value(args, n)} <= {"disable_tqdm", "fsdp", "debug", "report_to"}
    assert args.debug == theirs.debug
    (args,) = HfArgumentParser(hf.TrainingArguments).parse_dict({"output_dir": "out", "learning_rate": 0.5})
    assert args.learning_rate == 0.5


def test_serialisation():
    args = hf.TrainingArguments("out", eval_strategy="epoch", sdpa_backend=["math"])
    written = json.loads(args.to_json_string())
    assert written["eval_strategy"] == "epoch"
    assert written["sdpa_backend"] == ["math"]
    assert written.keys() == {f.name for f in dataclasses.fields(hf.TrainingArguments)}
    assert all(isinstance(v, (bool, int, float, str)) for v in args.to_sanitized_dict().values())


def test_user_defined_subclass():
    @dataclasses.dataclass(kw_only=True)
    class Mine(hf.TrainingArguments):
        temperature: float = 1.0

    args = Mine(output_dir="out", temperature=0.5, max_steps=3)
    assert (args.temperature, args.max_steps) == (0.5, 3)


def test_subclass_of_the_arguments_of_transformers(tmp_path):
    @dataclasses.dataclass
    class Mine(transformers.TrainingArguments):
        temperature: float = 1.0

    args = Mine(str(tmp_path), temperature=0.5, use_cpu=True, max_steps=3, save_strategy="no", report_to="none")
    trainer = hf.Trainer(Classifier(), args, train_dataset=examples())
    assert trainer.args is args
    assert trainer.args.temperature == 0.5
    assert trainer.train().global_step == 3
    refused = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    refused.deepspeed = {"stage": 2}
    with pytest.raises(BadArgument, match="deepspeed"):
        hf.Trainer(Classifier(), refused)


# -- settings ----------------------------------------------------------------------------------------------


def settings(batches=10, **options):
    return settings_of(hf.TrainingArguments("out", **options), batches, None)


def test_steps_epochs_and_fractions():
    assert (settings(num_train_epochs=2).epochs, settings(num_train_epochs=2).max_steps) == (2, None)
    assert settings(num_train_epochs=1.25).max_steps == 13
    assert settings(num_train_epochs=1.25, gradient_accumulation_steps=3).max_steps == 5
    assert settings(max_steps=7).max_steps == 7
    cadences = settings(logging_steps=0.1, eval_strategy="epoch", save_strategy="no", num_train_epochs=2)
    assert (cadences.log_every, cadences.eval_every, cadences.save_every) == ("2steps", "1epochs", None)
    with pytest.raises(BadArgument, match="a number of steps for data without a length"):
        settings(batches=None, logging_steps=0.1)


def test_which_checkpoint_is_best():
    plain = settings()
    assert (plain.save_best, plain.save_last) == (0, 10**9)
    theirs = settings(eval_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="eval_accuracy")
    assert (theirs.save_best, theirs.monitor_metric, theirs.monitor_mode) == (1, "val/accuracy", "max")
    forgather = settings(
        preserve_best_model=True, best_model_metric="perplexity", preserve_n_best=3, save_total_limit=2
    )
    assert (forgather.save_best, forgather.monitor_metric, forgather.monitor_mode) == (3, "val/perplexity", "min")
    assert forgather.save_last == 2
    explicit = settings(preserve_best_model=True, best_model_metric="loss", best_model_greater_is_better=True)
    assert explicit.monitor_mode == "max"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_type": "linearly"}, "lr_scheduler_type to be one of linear"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args like"),
    ],
)
def test_names_that_do_not_exist_are_explained(options, message):
    trainer = hf.Trainer(Classifier(), hf.TrainingArguments("out", **options))
    with pytest.raises(BadArgument, match=re.escape(message)):
        trainer.create_optimizer_and_scheduler(10)


def test_loggers():
    assert settings(report_to=["tensorboard", "none"]).log == ["tensorboard"]
    assert settings(report_to="none").log == "none"
    assert "tensorboard" in hf.TrainingArguments("out", report_to="all").report_to


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"torch_compile": True}, "compile", {"backend": "inductor"}),
        ({"torch_compile_mode": "default"}, "compile", {"backend": "inductor", "mode": "default"}),
        ({"torch_compile_backend": "eager"}, "compile", {"backend": "eager"}),
        ({"tf32": True}, "matmul_precision", "high"),
        ({"tf32": False}, "matmul_precision", "highest"),
        ({"bf16": True}, "precision", "bf16"),
        ({}, "precision", "no"),
        ({"use_cpu": True}, "device", "cpu"),
        ({"max_grad_norm": 0}, "gradient_clip", None),
        ({"enable_activation_offloading": True}, "activation_offload", True),
        ({"dataloader_pin_memory": False}, "pin_memory", False),
        ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4}, "prefetch_factor", 4),
        ({"fp8_recipe": "rowwise", "fp8_dim_alignment": 32}, "fp8_dim_alignment", 32),
        ({"eval_on_save": True}, "eval_on_save", True),
        ({"dataloader_multiprocessing_context": "spawn"}, "worker_context", "spawn"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches", True),
    ],
)
def test_translation_to_settings(options, field, expected):
    assert getattr(settings(**options), field) == expected
