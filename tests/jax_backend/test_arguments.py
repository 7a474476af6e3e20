"""TrainingArguments on JAX: names, defaults, batch sizes, JSON, and invalid values."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import trainformer.jax
from trainformer.core.errors import BadArgument, MissingDependency
from trainformer.engine.cadence import Cadence
from trainformer.jax import DPOConfig, SFTConfig, TrainingArguments
from trainformer.jax.aliases import ALIASES
from trainformer.run.jax.run import JaxSettings

DOCUMENT = {
    "model_name": "MyFineTunedModel",
    "num_train_epochs": 3,
    "learning_rate": 2e-5,
    "total_batch_size": 32,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.01,
    "max_steps": -1,
    "gradient_checkpointing": "nothing_saveable",
    "sharding_array": (1, -1, 1, 1),
    "use_fast_kernels": True,
    "logging_steps": 10,
    "save_steps": 100,
    "save_total_limit": 2,
    "evaluation_strategy": "steps",
    "eval_steps": 100,
    "output_dir": "runs/my_model_run",
}


def test_easydel_example():
    args = TrainingArguments(**DOCUMENT)
    assert {name: getattr(args, name) for name in DOCUMENT} == DOCUMENT
    assert args.passed == frozenset(DOCUMENT)
    sizes = args.resolve_on(4)
    assert (sizes.total, sizes.per_device, sizes.accumulation, sizes.evaluation) == (32, 8, 1, 32)
    settings = args.run_settings(sizes)
    assert settings["save_last"] == 2
    assert settings["save_best"] == 0  # "keep only the latest 2"
    assert (settings["epochs"], settings["max_steps"], settings["batch_size"]) == (3, None, 32)
    assert (settings["save_every"], settings["eval_every"], settings["log_every"]) == ("100steps", "100steps", 10)
    assert (settings["run_dir"], settings["name"]) == ("runs/my_model_run", "MyFineTunedModel")


# -- names -------------------------------------------------------------------------------------------------------


def test_every_alias_leads_to_a_field():
    fields = {f.name for f in dataclasses.fields(TrainingArguments)}
    assert set(ALIASES.values()) <= fields
    assert not fields & set(ALIASES)


@pytest.mark.parametrize(
    ("alias", "field", "value"),
    [
        ("log_steps", "logging_steps", 7),
        ("evaluation_steps", "eval_steps", 7),
        ("save_directory", "output_dir", "there"),
        ("max_training_steps", "max_steps", 7),
        ("sharding_axis_dims", "sharding_array", (2, -1, 1, 1)),
        ("eval_strategy", "evaluation_strategy", "epoch"),
        ("clip_grad", "max_grad_norm", 0.5),
        ("lr_scheduler_type", "scheduler", "cosine"),
        ("optim", "optimizer", "lion"),
        ("report_to", "log", "tensorboard"),
    ],
)
def test_an_alias_is_equivalent_and_must_agree(alias, field, value):
    by_alias = TrainingArguments(**{alias: value})
    assert getattr(by_alias, field) == value
    assert by_alias == TrainingArguments(**{field: value}) == TrainingArguments(**{field: value, alias: value})
    assert by_alias.passed == {field}
    default = getattr(TrainingArguments(), field)
    with pytest.raises(BadArgument, match=rf"one value for {field}, received {alias}=.* and {field}="):
        TrainingArguments(**{alias: value, field: default})


def test_arguments_that_map_to_others():
    assert TrainingArguments(bf16=True).dtype == "bf16"
    assert TrainingArguments(bf16=False).dtype == "auto"
    assert TrainingArguments(use_wandb=True).log == ["console", "wandb"]
    assert TrainingArguments(resume_if_possible=False).resume is None
    assert TrainingArguments(sharding_axis_dims=(1, -1, 1, 2, 1)).sharding_array == (1, -1, 2, 1)  # without experts
    with pytest.raises(BadArgument, match="one value for dtype"):
        TrainingArguments(bf16=True, dtype="fp32")


def test_unsupported_arguments_are_accepted_if_they_change_nothing():
    asked = TrainingArguments(
        do_last_save=True, save_optimizer_state=True, push_to_hub=False, watchers=[], backend=None
    )
    assert asked == TrainingArguments()
    assert asked.passed == frozenset()
    for name, value in (("push_to_hub", True), ("sync_ref_model", True), ("esurge_page_size", 64), ("do_train", 1)):
        with pytest.raises(BadArgument, match=f"{name} to be left out"):
            TrainingArguments(**{name: value})


# -- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shards", "wanted"),  # wanted: total, per device, accumulation
    [
        ({}, 4, (32, 8, 1)),
        ({"per_device_train_batch_size": 2}, 4, (8, 2, 1)),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        ({"gradient_accumulation_steps": 2}, 2, (32, 8, 2)),
        ({"total_batch_size": 32}, 8, (32, 4, 1)),
        ({"total_batch_size": 32}, 1, (32, 32, 1)),
        ({"total_batch_size": 32, "gradient_accumulation_steps": 2}, 8, (32, 2, 2)),
        ({"total_batch_size": 32, "per_device_train_batch_size": 2}, 8, (32, 2, 2)),
        ({"total_batch_size": 32, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, (32, 8, 2)),
    ],
)
def test_missing_batch_sizes_follow_from_the_others(given, shards, wanted):
    sizes = TrainingArguments(**given).resolve(shards)
    assert (sizes.total, sizes.per_device, sizes.accumulation) == wanted
    assert sizes.total == sizes.per_device * shards * sizes.accumulation


@pytest.mark.parametrize(
    "array", [(1, -1, 1, 1), (-1, 1, 1, 1), (2, 2, 2, 1), (2, 1, -1, 2), (1, 1, 1, -1), (1, 2, 2, 2, 1)]
)
def test_only_dp_and_fsdp_and_ep_shard_the_data(array):
    dims = [8 // -int(np.prod(array)) if d == -1 else d for d in array]
    sizes = TrainingArguments(sharding_array=array, per_device_train_batch_size=3).resolve_on(8)
    assert sizes.data_shards == np.prod(dims[:-2])
    assert sizes.total == 3 * sizes.data_shards


def test_contradictions_show_the_arithmetic_and_all_fixes():
    with pytest.raises(BadArgument) as caught:
        TrainingArguments(**DOCUMENT).resolve_on(8)
    for part in ("32", "8 * 8 * 1 = 64", "total_batch_size=64", "per_device_train_batch_size=4", "dp * fsdp * ep = 4"):
        assert part in str(caught.value)
    assert "gradient_accumulation_steps=" not in str(caught.value)  # none would do
    for changes in ({"total_batch_size": 64}, {"per_device_train_batch_size": 4}, {"sharding_array": (2, 2, 2, 1)}):
        assert TrainingArguments(**{**DOCUMENT, **changes}).resolve_on(8).data_shards in (4, 8)
    with pytest.raises(BadArgument, match=r"multiple of .*= 1 \* 8 = 8, received 30.*24 or 32"):
        TrainingArguments(total_batch_size=30).resolve(8)
    with pytest.raises(BadArgument, match=r"per_device_train_batch_size .*= 4 \* 4 = 16, received 8.*=16,"):
        TrainingArguments(total_batch_size=8, per_device_train_batch_size=4).resolve(4)


def test_eval_batch_sizes():
    assert TrainingArguments(eval_batch_size=16).resolve(4).evaluation == 16
    assert TrainingArguments(per_device_eval_batch_size=2).resolve(4).evaluation == 8
    with pytest.raises(BadArgument, match=r"2 \* 4 = 8"):
        TrainingArguments(eval_batch_size=16, per_device_eval_batch_size=2).resolve(4)
    with pytest.raises(BadArgument, match="multiple of the 4 data shards"):
        TrainingArguments(eval_batch_size=6).resolve(4)


# -- settings of a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "evaluates", "saves"),
    [
        ({}, None, "500steps"),
        ({"eval_steps": 20}, "20steps", "500steps"),
        ({"evaluation_strategy": "epoch", "eval_steps": 20}, "1epochs", "500steps"),
        ({"evaluation_strategy": "steps", "logging_steps": 30}, "30steps", "500steps"),
        ({"do_eval": True}, "1epochs", "500steps"),
        ({"do_eval": True, "eval_steps": 5}, "5steps", "500steps"),
        ({"evaluation_strategy": False, "eval_steps": 20}, None, "500steps"),
        ({"save_strategy": "no"}, None, None),
        ({"save_strategy": "epoch"}, None, "1epochs"),
        ({"save_steps": None}, None, None),
        ({"save_steps": "10min", "eval_steps": "2epochs"}, "2epochs", "600seconds"),
    ],
)
def test_strategies_and_steps_become_cadences(given, evaluates, saves):
    args = TrainingArguments(**given)
    settings = args.run_settings(args.resolve(1))
    assert (settings["eval_every"], settings["save_every"]) == (evaluates, saves)
    for every in (settings["eval_every"], settings["save_every"], settings["log_every"]):
        Cadence.parse(every, "steps")


def test_settings_have_the_names_of_every_run():
    args = TrainingArguments(max_steps=12, max_grad_norm=0, metric_for_best_model="eval_accuracy", eval_steps=3)
    settings = args.run_settings(args.resolve(1))
    assert settings.keys() <= JaxSettings.defaults().keys()
    JaxSettings(**settings).validate()
    assert (settings["monitor_metric"], settings["monitor_mode"]) == ("val/accuracy", "max")
    assert (settings["save_best"], settings["gradient_clip"], settings["max_steps"]) == (1, None, 12)
    assert settings["save_last"] > 10**6  # all of them


def test_fractional_epochs_are_converted_to_steps():
    args = TrainingArguments(num_train_epochs=2.5)
    assert args.planned_steps(7) == 18
    assert args.run_settings(args.resolve(1), 7)["max_steps"] == 18
    assert TrainingArguments(num_train_epochs=2).run_settings(args.resolve(1), 7)["max_steps"] is None
    assert TrainingArguments(max_steps=5).planned_steps(None) == 5
    with pytest.raises(BadArgument, match=r"an integer num_train_epochs.*max_steps"):
        args.run_settings(args.resolve(1))


def test_the_optimizer_follows_the_schedule():
    args = TrainingArguments(optimizer="sgd", optimizer_kwargs={"momentum": 0.0}, learning_rate=0.5, weight_decay=0.0)
    tx, schedule = args.get_optimizer_and_scheduler(4)
    params = {"kernel": np.zeros((2, 2), np.float32)}
    state = tx.init(params)
    for step in range(4):
        updates, state = tx.update(jax.tree.map(np.ones_like, params), state, params)
        assert np.allclose(updates["kernel"], -schedule(step))
        assert schedule(step) == pytest.approx(0.5 * (1 - step / 4))
    with pytest.raises(BadArgument, match="'linear' schedule needs the number of steps"):
        args.get_optimizer_and_scheduler(None)


# -- JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        DOCUMENT,
        {"eval_steps": 20, "log": ["console", "wandb"], "frozen_parameters": ["embed", "norm$"]},
        {"optimizer": {"name": "adamw", "betas": [0.9, 0.95]}, "scheduler_kwargs": {}, "learning_rate_end": 1e-6},
        {"dtype": "bfloat16", "output_dir": Path("a") / "b", "save_steps": "10min", "do_eval": True},
    ],
)
def test_json_round_trip(given, tmp_path):
    args = TrainingArguments(**given)
    again = TrainingArguments.from_json(args.to_json())
    assert again == args
    assert again.passed == args.passed == frozenset(given)
    assert TrainingArguments.load(args.save(tmp_path)) == TrainingArguments.load(tmp_path) == args
    assert args.save(tmp_path / "new" / "mine.json").name == "mine.json"
    assert TrainingArguments.from_dict(args.to_dict(), lr=0.25).learning_rate == 0.25


def test_hand_written_json_may_use_aliases_and_edited_defaults_count_as_passed():
    assert TrainingArguments.from_json('{"log_steps": 3, "sharding_axis_dims": [1, -1, 2, 1]}') == TrainingArguments(
        logging_steps=3, sharding_array=(1, -1, 2, 1)
    )
    written = json.loads(TrainingArguments(eval_steps=20).to_json())
    again = TrainingArguments.from_dict({**written, "per_device_train_batch_size": 2})
    assert again.passed == {"eval_steps", "per_device_train_batch_size"}
    assert TrainingArguments.from_dict({**written, "evaluation_strategy": "epoch"}).evaluation_strategy == "epoch"


def test_objects_are_described_and_must_be_passed_again():
    def halving(step):
        return 0.5**step

    args = TrainingArguments(optimizer=optax.adam(1e-3), scheduler=halving, num_train_epochs=1)
    text = args.to_json()
    assert "0x" not in text
    with pytest.raises(BadArgument, match=r"halving.*Pass it again: from_json\(text, scheduler=...\)"):
        TrainingArguments.from_json(text, optimizer="adamw")
    again = TrainingArguments.from_json(text, optimizer=args.optimizer, scheduler=halving)
    assert again == args


def test_nothing_in_a_file_is_executed(tmp_path):
    written = tmp_path / "written"
    for value in (f"__import__('os').mkdir({str(written)!r})", {"_target_": "os.mkdir", "path": str(written)}):
        with pytest.raises(BadArgument):
            TrainingArguments.from_json(json.dumps({"optimizer": value}))
    with pytest.raises(BadArgument, match="arguments as JSON"):
        TrainingArguments.from_json("{")
    with pytest.raises(BadArgument, match="as a mapping"):
        TrainingArguments.from_json("[1]")
    with pytest.raises(BadArgument, match="an arguments file"):
        TrainingArguments.load(tmp_path)
    assert not written.exists()


def test_replace_keeps_passed_arguments():
    args = TrainingArguments(total_batch_size=32)
    assert args.replace(lr=0.1).passed == {"total_batch_size", "learning_rate"}
    assert args.replace(lr=0.1).resolve(8).per_device == 4
    assert pickle.loads(pickle.dumps(args)).passed == copy.deepcopy(args).passed == args.passed


def test_a_subclass_with_more_fields():
    @dataclass
    class MoreArguments(TrainingArguments):
        beta: float = 0.1

        def check(self):
            super().check()
            if self.beta < 0:
                raise BadArgument("negative")

    args = MoreArguments(beta=0.5, log_steps=3)
    assert (args.beta, args.logging_steps, args.passed) == (0.5, 3, {"beta", "logging_steps"})
    assert MoreArguments.from_json(args.to_json()) == args
    with pytest.raises(BadArgument, match="negative"):
        MoreArguments(beta=-1.0)
    with pytest.raises(BadArgument, match="fields of MoreArguments, received 'betta'"):
        MoreArguments(betta=1.0)


# -- invalid values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lerning_rate": 1e-3}, "received 'lerning_rate'. Did you mean 'learning_rate'"),
        ({"learning_rate": "1e-3"}, "learning_rate to be a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate to be a positive number"),
        ({"max_steps": 0}, "max_steps to be an integer of at least 1, or -1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps to be an integer"),
        ({"save_total_limit": 0}, "at least 1, or None"),
        ({"packing": "yes"}, "packing to be True or False"),
        ({"sharding_array": (1, -1, -1, 1)}, "at most one -1"),
        ({"sharding_array": (1, -1, 1)}, "dp, fsdp, tp, sp"),
        ({"sharding_array": 4}, "dp, fsdp, tp, sp"),
        ({"dtype": "fp16"}, "'bf16' or 'fp32', received 'float16'"),
        ({"fp16": True}, "Use dtype='bf16'"),
        ({"bf16": "yes"}, "bf16 to be True or False"),
        ({"param_dtype": "auto"}, "param_dtype to be 'bf16' or 'fp32', received 'auto'"),
        ({"gradient_checkpointing": "nothing_savable"}, "Did you mean 'nothing_saveable'"),
        ({"frozen_parameters": "layers/("}, r"regular expressions, received 'layers/\('"),
        ({"frozen_parameters": [3]}, "regular expressions, received 3"),
        ({"optimizer": "adamx"}, "Did you mean 'adam'"),
        ({"optimizer_kwargs": {"momentum": 0.9}}, "options that adamw takes"),
        ({"optimizer": optax.sgd(0.1), "weight_decay": 0.1}, "no weight_decay with an optimizer object"),
        ({"scheduler": "cosin"}, "Did you mean 'cosine'"),
        ({"scheduler": "constant", "learning_rate_end": 0.1}, "has an end"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "received both"),
        ({"nonfinite": "retry"}, "nonfinite to be 'raise' or 'skip'"),
        ({"evaluation_strategy": "steps", "do_eval": False}, "no evaluation with do_eval=False"),
        ({"evaluation_strategy": "no", "do_eval": True}, "Keep one of them"),
        ({"save_strategy": "sometimes"}, "save_strategy to be 'no', 'steps' or 'epoch'"),
        ({"save_strategy": "steps", "save_steps": None}, "save_steps with save_strategy"),
        ({"logging_steps": 0}, "logging_steps to be a positive number of steps"),
        ({"save_steps": "1fortnight"}, "save_steps"),
        ({"metric_for_best_model": "accuracy"}, "an evaluation_strategy with metric_for_best_model"),
        ({"scheduler_kwargs": 3}, "scheduler_kwargs to be a dict, received 3"),
        ({"optimizer_kwargs": "x"}, "optimizer_kwargs to be a dict, received 'x'"),
        ({"ids_to_pop_from_dataset": "x"}, "ids_to_pop_from_dataset to be a list or None, received 'x'"),
        ({"greater_is_better": "yes"}, "greater_is_better to be True, False or None, received 'yes'"),
        ({"project": None}, "project to be a string, received None"),
        ({"frozen_parameters": 3}, "frozen_parameters to be a string, a list or None, received 3"),
        ({"resume": True}, "resume to be a string or None, received True. Pass 'auto'"),
    ],
)
def test_invalid_values_are_refused(given, words):
    with pytest.raises(BadArgument, match=words):
        TrainingArguments(**given)


def test_positional_arguments_are_refused():
    with pytest.raises(BadArgument, match=r"by name, received 'runs'"):
        TrainingArguments("runs")


# -- the package -------------------------------------------------------------------------------------------------


def test_tuples_are_lists():
    losses = DPOConfig(loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.2))
    assert (losses.losses, losses.loss_weights) == (["sigmoid"], (1.0, 0.2))
    assert SFTConfig(generation_interval=1, generation_prompts=("a",)).generation_prompts == ("a",)


@pytest.mark.parametrize("package", ["jax", "flax", "optax"])
def test_a_missing_package_is_named_with_the_pip_command(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"'{package}' is needed.*pip install 'trainformer\[jax\]'"):
        trainformer.jax.__getattr__("TrainingArguments")
    with pytest.raises(AttributeError, match="no_such_name"):
        trainformer.jax.no_such_name  # noqa: B018


def test_secrets_are_not_in_the_json_and_must_be_passed_again():
    args = TrainingArguments(model_name="m", project="https://me:hunter2@host/run")
    text = args.to_json()
    assert "hunter2" not in text
    with pytest.raises(BadArgument, match=r"the secret project.*from_json\(text, project=\.\.\.\)"):
        TrainingArguments.from_json(text)
    assert TrainingArguments.from_json(text, project=args.project).project == args.project
