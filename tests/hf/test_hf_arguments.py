"""TrainingArguments: HF's names and defaults, and the errors for wrong or unsupported ones."""

import dataclasses
import json
import re

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend
from transformers import HfArgumentParser

from trainformer import hf
from trainformer.core.errors import BadArgument
from trainformer.hf.arguments import UNSUPPORTED_FIELDS
from trainformer.hf.settings import optimizer_spec, settings_of

THEIRS = {f.name: f for f in dataclasses.fields(transformers.TrainingArguments)}
WANT_METRICS = ("reduce_lr_on_plateau", "greedy")
OURS = {f.name: f for f in dataclasses.fields(hf.TrainingArguments)}


def test_every_hf_field_is_supported_or_has_a_replacement():
    assert THEIRS.keys() - OURS.keys() == set(UNSUPPORTED_FIELDS)
    assert all(len(pointer) > 20 for _, pointer in UNSUPPORTED_FIELDS.values())


def test_shared_defaults_match_hf():
    plain, ours = transformers.TrainingArguments("out", use_cpu=True), hf.TrainingArguments("out", use_cpu=True)

    def value(args, name):
        found = getattr(args, name) or ""
        return str(getattr(found, "value", found))

    differing = {name for name in THEIRS.keys() & OURS.keys() if value(plain, name) != value(ours, name)}
    # `adamw_torch` is fused where it can be; their bars are off in a test, and so is pinned memory on a CPU.
    assert differing <= {"optim", "disable_tqdm", "report_to", "dataloader_pin_memory"}
    assert plain.optim.value == "adamw_torch_fused"
    assert plain.report_to == [] or plain.report_to == "none"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_unsupported_fields_are_errors_unless_they_have_their_default(name):
    default = THEIRS[name].default
    if default is dataclasses.MISSING:
        default = THEIRS[name].default_factory()
    assert hf.TrainingArguments("out", **{name: default}).output_dir == "out"
    with pytest.raises(BadArgument, match=f"does not support the argument {name} of HF"):
        hf.TrainingArguments("out", **{name: "something else"})


def test_secrets_are_masked_in_errors_and_in_json():
    with pytest.raises(BadArgument, match="hub_token of HF") as caught:
        hf.TrainingArguments("out", hub_token="hunter2")
    assert "hunter2" not in str(caught.value)
    args = hf.TrainingArguments("out", strategy_options={"api_key": "hunter2", "url": "redis://:swordfish@host"})
    for text in (args.to_json_string(), str(args.to_sanitized_dict())):
        assert "hunter2" not in text
        assert "swordfish" not in text
    assert args.to_dict()["strategy_options"]["api_key"] == "hunter2"


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
        ({"learning_rate": "1e-4"}, "learning_rate to be a positive number"),
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
    assert args.torch_compile_backend is None  # the mode does not overwrite the backend
    assert args.logging_dir.startswith(str(tmp_path / "runs"))
    assert args.lr_scheduler_kwargs == {}
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
    with pytest.raises(BadArgument, match="deepspeed"):
        Mine(output_dir="out", deepspeed="ds.json")


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
    ("options", "expected"),
    [
        ({}, {"name": "adamw_torch", "betas": (0.9, 0.999), "eps": 1e-8}),
        ({"optim": "sgd"}, {"name": "sgd", "momentum": 0.0}),
        ({"optim": "sgd", "optim_args": "momentum=0.9, a=True"}, {"name": "sgd", "momentum": 0.9, "a": True}),
        ({"optim": "lion_8bit", "adam_beta2": 0.99}, {"name": "lion_8bit", "betas": (0.9, 0.99)}),
        ({"optim": "adafactor"}, {"name": "adafactor"}),
    ],
)  # fmt: skip
def test_optimizers(options, expected):
    assert optimizer_spec(hf.TrainingArguments("out", **options)) == expected


@pytest.mark.parametrize("name", [n.value for n in transformers.SchedulerType if n.value not in WANT_METRICS])
def test_schedulers_match_transformers(name):
    more = {
        "warmup_stable_decay": {"num_decay_steps": 4},
        "cosine_with_min_lr": {"min_lr": 1e-5},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    }.get(name, {})
    made = []
    for use in (0, 1):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        if use == 0:
            schedule = settings(lr_scheduler_type=name, lr_scheduler_kwargs=more, warmup_steps=3).scheduler(
                optimizer, 20
            )
        else:
            schedule = transformers.get_scheduler(name, optimizer, 3, 20, scheduler_specific_kwargs=more)
        rates = []
        for _ in range(20):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        made.append(rates)
    assert made[0] == made[1]
    assert len(set(made[0])) > 1 or name == "constant"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_type": "linearly"}, "lr_scheduler_type to be one of linear"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "depends on the step only"),
        ({"report_to": "comet_ml"}, "pass the callback of transformers"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args like"),
    ],
)
def test_settings_that_cannot_work_are_explained(options, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        settings(**options)
    assert settings(report_to=["tensorboard", "none"]).log == ["tensorboard"]


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"torch_compile": True}, "compile", True),
        ({"torch_compile_mode": "default"}, "compile", {"mode": "default"}),
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
    ],
)
def test_translation_to_settings(options, field, expected):
    assert getattr(settings(**options), field) == expected
