"""Optimizers, schedules, hyperparameter search and the hub, against those of transformers."""

import json
from pathlib import Path

import datasets
import optuna
import pytest
import torch
import transformers
from hf_toys import Classifier, examples
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import trainformer
from toys import MeanTask, classes
from trainformer import hf
from trainformer.core.errors import BadArgument
from trainformer.hf.hub import HubUnavailable
from trainformer.hf.optimizers import decay_parameter_names
from trainformer.run import run_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def trainer(tmp_path, model=None, optimizers=(None, None), callbacks=None, library=hf, **options):
    options = {"max_steps": 6, "save_strategy": "no", "use_cpu": True, "report_to": "none", **options}
    return library.Trainer(
        model or Classifier(),
        library.TrainingArguments(str(tmp_path), **options),
        train_dataset=examples(24),
        eval_dataset=examples(8),
        optimizers=optimizers,
        callbacks=callbacks,
    )


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=2, **SIZES))


# -- optimizers ------------------------------------------------------------------------------------------------


def test_groups_are_those_of_transformers(tmp_path):
    groups = []
    for library in (transformers, hf):
        model = bert()
        made = trainer(tmp_path, model, library=library, weight_decay=0.1).create_optimizer()
        names = {id(p): name for name, p in model.named_parameters()}
        groups.append([([names[id(p)] for p in g["params"]], g["weight_decay"]) for g in made.param_groups])
    assert groups[0] == groups[1]
    assert all(groups[1][i][0] for i in (0, 1))
    assert decay_parameter_names(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))) == ["0.weight", "1.weight"]


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop"])
def test_classes_and_options_are_those_of_transformers(name):
    options = {"optim": name, "adam_beta2": 0.99, "learning_rate": 0.3, "use_cpu": True}
    (kind, mine), (theirs, wanted) = (
        library.Trainer.get_optimizer_cls_and_kwargs(library.TrainingArguments("out", **options))
        for library in (hf, transformers)
    )
    assert kind is theirs
    # AdamW is fused here in any case: same update, one kernel.
    assert {k: v for k, v in mine.items() if k != "fused"} == {k: v for k, v in wanted.items() if k != "fused"}


def test_own_class_and_options(tmp_path):
    args = hf.TrainingArguments(str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True)
    mine = hf.Trainer(
        Classifier(), args, train_dataset=examples(), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5})
    )
    mine.train()
    assert isinstance(mine.optimizer, torch.optim.SGD)

    class NoDecay(hf.Trainer):
        def get_decay_parameter_names(self, model):
            return []

    assert NoDecay(Classifier(), args).create_optimizer().param_groups[0]["params"] == []


def test_an_optimizer_created_before_training_is_used(tmp_path):
    mine = trainer(tmp_path)
    with pytest.raises(BadArgument, match="Call create_optimizer"):
        mine.get_learning_rates()
    optimizer = mine.create_optimizer()
    mine.create_scheduler(num_training_steps=6)
    assert mine.get_learning_rates() == [5e-5, 5e-5]
    parameter = next(mine.model.parameters())
    assert any(p is parameter for p in mine.get_optimizer_group(parameter)["params"])
    assert len(mine.get_optimizer_group()) == 2
    mine.train()
    assert mine.optimizer is optimizer
    assert mine.get_learning_rates() == [0.0, 0.0]


def test_learning_rate_zero(tmp_path):
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer(tmp_path, model, learning_rate=0.0).train()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_learning_rate_zero_in_the_native_trainer():
    task, data = MeanTask(), classes(8)
    before = task.model[0].weight.detach().clone()
    native = trainformer.Trainer(task, data, lr=0.0, weight_decay=0.0, epochs=1, log="none", device="cpu")
    native.fit()
    assert torch.equal(task.model[0].weight, before)
    with pytest.raises(BadArgument, match="lr to be a number of at least 0"):
        trainformer.Trainer(task, data, lr=-1.0)


# -- schedules -------------------------------------------------------------------------------------------------

MORE = {
    "warmup_stable_decay": {"num_decay_steps": 4},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
}


@pytest.mark.parametrize("name", [name.value for name in transformers.SchedulerType])
def test_schedules_are_those_of_transformers(name, tmp_path):
    logs = []
    for library in (transformers, hf):
        options = {
            "lr_scheduler_type": name, "lr_scheduler_kwargs": MORE.get(name), "warmup_steps": 2, "learning_rate": 1e-2,
            "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 8, "disable_tqdm": True,
        }  # fmt: skip
        torch.manual_seed(0)
        done = trainer(tmp_path / library.__name__, library=library, **options)
        done.train()
        logs.append([r["learning_rate"] for r in done.state.log_history if "loss" in r])
    assert logs[1] == pytest.approx(logs[0])
    assert len(logs[1]) == 8


def test_plateau_follows_the_metric_and_is_resumed(tmp_path):
    class Stuck(hf.Trainer):
        def evaluate(self, *args, **kwargs):
            return {"eval_loss": 1.0}

    def run(resume=None, steps=8):
        args = hf.TrainingArguments(
            str(tmp_path), lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
            eval_strategy="steps", eval_steps=2, save_steps=4, max_steps=steps, learning_rate=1.0, use_cpu=True,
        )  # fmt: skip
        stuck = Stuck(Classifier(), args, train_dataset=examples(24), eval_dataset=examples(8))
        stuck.train(resume_from_checkpoint=resume)
        return stuck

    whole = run()
    assert isinstance(whole.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert whole.get_learning_rates() == [0.125, 0.125]  # halved by all evaluations but the first
    assert run(resume=str(tmp_path / "checkpoint-4")).get_learning_rates() == [0.125, 0.125]


def test_plateau_in_the_native_trainer():
    task, data = MeanTask(), classes(8)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    native = trainformer.Trainer(
        task, data, val_data=data, optimizer=optimizer, scheduler=plateau, epochs=4, log="none", device="cpu",
        monitor_mode="max",
    )  # fmt: skip
    native.fit()  # the loss falls, but the scheduler wants it to rise
    assert run_of(native).backend.optimizer.param_groups[0]["lr"] == 0.125


# -- other arguments -------------------------------------------------------------------------------------------


def test_data_seed_changes_the_order_only(tmp_path):
    orders = {}
    for seed in (None, 1, 2):
        seen = []

        class Watching(hf.Trainer):
            def compute_loss(self, model, inputs, *args, seen=seen, **kwargs):
                seen.append(inputs["x"].flatten()[0].item())
                return super().compute_loss(model, inputs, *args, **kwargs)

        args = hf.TrainingArguments(str(tmp_path), max_steps=3, save_strategy="no", use_cpu=True, data_seed=seed)
        Watching(Classifier(), args, train_dataset=examples(24)).train()
        orders[seed] = seen
    assert orders[1] != orders[2]
    assert orders[None] != orders[1]


def test_neftune_adds_noise_to_the_embeddings_while_training(tmp_path):
    rows = torch.randint(2, 32, (8, 6))
    data = [{"input_ids": row, "labels": torch.tensor(1)} for row in rows]
    losses = {}
    for alpha in (None, 100.0):
        args = hf.TrainingArguments(
            str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, logging_steps=1, neftune_noise_alpha=alpha
        )
        mine = hf.Trainer(bert(), args, train_dataset=data, eval_dataset=data)
        before = mine.evaluate()["eval_loss"]
        mine.train()
        losses[alpha] = before, mine.state.log_history[1]["loss"]
        assert not mine.model.get_input_embeddings()._forward_hooks
    assert losses[None][0] == losses[100.0][0]
    assert losses[None][1] != losses[100.0][1]


def test_label_smoothing_is_switched_off_for_several_labels(tmp_path):
    model = bert()
    model.config.problem_type = "multi_label_classification"
    with pytest.warns(UserWarning, match="not compatible with multi-label"):
        mine = trainer(tmp_path, model, label_smoothing_factor=0.1)
    assert mine.args.label_smoothing_factor == 0.0
    assert mine.label_smoother is None


def test_memory_metrics(tmp_path):
    assert "train_mem_cpu_alloc_delta" in trainer(tmp_path, skip_memory_metrics=False).train().metrics
    assert "train_mem_cpu_alloc_delta" not in trainer(tmp_path).train().metrics


def test_tokens_are_logged_on_request(tmp_path):
    data = [{"input_ids": torch.arange(2, 8), "labels": torch.tensor(1)} for _ in range(8)]
    args = hf.TrainingArguments(
        str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, logging_steps=1,
        include_num_input_tokens_seen=True,
    )  # fmt: skip
    mine = hf.Trainer(bert(), args, train_dataset=data)
    mine.train()
    assert mine.state.log_history[0]["num_input_tokens_seen"] == 48


def test_padding_counts_as_tokens_on_request(tmp_path):
    data = [
        {"input_ids": torch.arange(2, 8), "attention_mask": torch.tensor([1, 1, 1, 0, 0, 0]), "labels": torch.tensor(1)}
    ]
    seen = {}
    for kind in ("all", "non_padding"):
        args = hf.TrainingArguments(
            str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, include_num_input_tokens_seen=kind
        )
        mine = hf.Trainer(bert(), args, train_dataset=data * 8)
        mine.train()
        seen[kind] = mine.state.num_input_tokens_seen
    assert seen == {"all": 48, "non_padding": 24}


def test_lengths_come_from_their_column(tmp_path):
    table = datasets.Dataset.from_dict(
        {"x": [[float(i)] * 4 for i in range(16)], "labels": [0] * 16, "size": list(range(16))}
    )
    seen = []

    class Watching(hf.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(sorted(inputs["x"][:, 0].tolist()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = hf.TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, save_strategy="no", use_cpu=True,
        train_sampling_strategy="group_by_length", length_column_name="size",
    )  # fmt: skip
    Watching(Classifier(), args, train_dataset=table).train()
    assert all(batch[-1] - batch[0] == 3 for batch in seen)  # neighbours by size


def test_full_evaluation_in_bf16(tmp_path):
    data = [{"input_ids": torch.arange(2, 8), "labels": torch.tensor(1)} for _ in range(8)]
    args = hf.TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, bf16_full_eval=True)
    mine = hf.Trainer(bert(), args, train_dataset=data, eval_dataset=data)
    mine.train()
    assert {p.dtype for p in mine.model.parameters()} == {torch.float32}
    mine.evaluate()
    assert {p.dtype for p in mine.model.parameters()} == {torch.bfloat16}


# -- search ----------------------------------------------------------------------------------------------------


def test_hyperparameter_search_finds_the_best_rate(tmp_path):
    made = []

    def model_init(trial):
        made.append(None if trial is None else trial.number)
        torch.manual_seed(0)
        return Classifier()

    args = hf.TrainingArguments(
        str(tmp_path), max_steps=8, eval_strategy="steps", eval_steps=4, save_steps=8, use_cpu=True, disable_tqdm=True
    )
    mine = hf.Trainer(model_init=model_init, args=args, train_dataset=examples(24), eval_dataset=examples(24))
    best = mine.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 1e-1])},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=2,
        direction="minimize",
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-6, 1e-1]}, seed=0),
    )
    assert best.hyperparameters == {"learning_rate": 1e-1}
    assert made[-2:] == [0, 1]
    assert (args.learning_rate, args.output_dir) == (5e-5, str(tmp_path))
    assert (tmp_path / "run-1/checkpoint-8/model.safetensors").exists()
    state = json.loads((tmp_path / "run-1/checkpoint-8/trainer_state.json").read_text())
    assert state["is_hyper_param_search"]
    assert state["trial_params"]["learning_rate"] in (1e-6, 1e-1)
    with pytest.raises(BadArgument, match="arguments of the trainer"):
        mine.hyperparameter_search(hp_space=lambda trial: {"learning_speed": 1}, n_trials=1)
    with pytest.raises(BadArgument, match="backend to be 'optuna'"):
        mine.hyperparameter_search(backend="wandb")
    with pytest.raises(BadArgument, match="model_init for a hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()


# -- hub -------------------------------------------------------------------------------------------------------


def test_without_the_hub_the_files_and_the_card_are_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mine = trainer(tmp_path, bert(), max_steps=1)
    mine.train_dataset = [{"input_ids": torch.arange(2, 8), "labels": torch.tensor(1)}] * 8
    mine.train()
    with pytest.raises(HubUnavailable, match="Nothing was uploaded"):
        mine.push_to_hub(tags=["toy"])
    card = Path(tmp_path, "README.md").read_text()
    assert "toy" in card
    assert "learning_rate: 5e-05" in card
    assert (tmp_path / "model.safetensors").exists()
    with pytest.raises(HubUnavailable):
        trainer(tmp_path, push_to_hub=True)
