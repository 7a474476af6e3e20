"""Arguments of `Trainer`: names of other libraries, values of other types, folders that cannot be written."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from mistake_table import build, fit, row, text_for

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.callbacks import EMA, EarlyStopping, ModelCheckpoint
from trainformer.core import BadArgument, DataError, UnknownArgument
from trainformer.core.synonyms import SETTINGS

NAMES = {
    "max_epochs": "Write epochs",
    "n_epochs": "Write epochs",
    "num_train_epochs": "Write epochs",
    "learning_rate": "Write lr",
    "per_device_train_batch_size": "Write batch_size",
    "gradient_accumulation_steps": "Write accumulation_steps",
    "accumulate_grad_batches": "Write accumulation_steps",
    "gradient_clip_val": "Write gradient_clip",
    "max_grad_norm": "Write gradient_clip",
    "fp16": "Write precision='fp16'",
    "accelerator": "Write device",
    "devices": "torchrun",
    "logger": "Write log",
    "output_dir": "Write run_dir",
    "train_dataset": "Write data",
    "eval_dataset": "Write val_data",
    "validation_split": "Write val_split",
    "optim": "Write optimizer",
    "lr_scheduler_type": "Write scheduler",
    "metric_for_best_model": "Write monitor_metric",
    "resume_from_checkpoint": "Write resume",
    "early_stopping": "EarlyStopping",
    "shuffle": "training data is shuffled",
    "model_ema_decay": "Write ema",
    "weight_decy": "Did you mean 'weight_decay'?",
    "lerning_rate": "Write lr",
    "batchsize": "Write batch_size",
}

VALUES = [
    ("lr", "1e-4", "lr to be a number", "without quotes; YAML 1.1 reads 1e-4 as a string"),
    ("lr", -1, "lr to be a number of at least 0", "-1"),
    ("lr", float("nan"), "lr to be a number", "nan"),
    ("lr", float("inf"), "lr to be a number", "inf"),
    ("lr", True, "lr to be a number", "True"),
    ("weight_decay", float("nan"), "weight_decay to be a number", "nan"),
    ("epochs", 0, "epochs to be a whole number of at least 1", "0"),
    ("epochs", 1.5, "epochs to be a whole number", "1.5"),
    ("epochs", "3", "epochs to be a whole number", "Pass a number without quotes"),
    ("epochs", True, "epochs to be a whole number", "True"),
    ("max_steps", -1, "max_steps to be a whole number of at least 1", "-1"),
    ("batch_size", 0, "batch_size to be a whole number of at least 1", "0"),
    ("gradient_clip", -1.0, "gradient_clip to be a number of at least 0", "-1.0"),
    ("warmup_ratio", 500, "warmup_ratio to be a number from 0 to 1", "500"),
    ("ema", 99, "ema to be a number from 0 and below 1", "99"),
    ("val_split", "0.2", "val_split to be a share such as 0.1", "'0.2'"),
    ("val_split", 1.0, "val_split to be between 0 and 1", "Pass 0.1 for a tenth"),
    ("val_split", 100, "val_split to leave samples", "100 of 64 samples"),
    ("drop_last", "no", "drop_last to be True or False", "'no'"),
    ("save_async", "false", "save_async to be True or False", "without quotes"),
    ("log_every", "10", "log_every to be a positive number of steps", "'500steps'"),
    ("eval_every", -1, "eval_every to be a positive number of epochs", "-1"),
    ("save_strategy", "epoch", "'steps', 'epochs' or 'seconds'", "'epoch'"),
    ("monitor_mode", "maximize", "monitor_mode to be 'min' or 'max'", "maximize"),
    ("monitor_metric", None, "monitor_metric to be a string", "None"),
    ("precision", "bf16-mixed", "precision to be 'auto'", "'bf16-mixed'"),
    ("device", "gpu", "device to be one this machine has", "device='cpu'"),
    ("strategy", "dpp", "strategy to be one of", "Did you mean 'ddp'"),
    ("scheduler", "cosin", "scheduler to be one of", "'cosine'"),
    ("optimizer", "adamv", "optimizer to be a known name", "'adam'"),
    ("sampler", "balancd", "the name of a sampler", "'balanced'"),
    ("log", "wandbb", "a logger to be one of", "'wandb'"),
    ("name", 3, "name to be a string", "3"),
    ("name", "a" * 300, "name to have at most 200 bytes", "300 characters"),
    ("run_dir", 3, "run_dir to be a path", "3"),
    ("run_dir", "a" * 300, "a folder to write to", "name too long"),
    ("resume", False, "resume to be a path", "None starts from scratch"),
    ("resume", True, "resume to be a path", "'auto' resumes"),
    ("load_components", "model", "load_components to be a list of names", "['model']"),
]


def file_instead_of_folder(path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    return build()


def with_home(function):
    """Call it with the working directory as home."""
    previous = os.environ.get("HOME")
    os.environ["HOME"] = os.getcwd()
    try:
        return function()
    finally:
        os.environ["HOME"] = previous or ""


def in_home():
    fit(run_dir="~/run")
    return Path("run/checkpoints").is_dir() and not Path("~").exists() and build().load("~/run").state.step == 2


def numpy_numbers():
    trainer = build(lr=np.float32(0.1), batch_size=np.int64(4), epochs=np.int64(1))
    return (type(trainer.lr), type(trainer.batch_size)) == (float, int) and trainer.fit()


def own_optimizer(**settings):
    task = MeanTask()
    return build(task, optimizer=torch.optim.SGD(task.model.parameters(), lr=0.1), **settings)


def loader(**options):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*classes()), batch_size=4, **options)


def maximised():
    trainer = build(val_split=0.25, monitor_metric="val/accuracy")
    return trainer.monitor_mode == "max"


ROWS = [
    *(
        row(f"argument-{name}", lambda name=name: build(**{name: 1}), UnknownArgument, "an argument of Trainer", words)
        for name, words in NAMES.items()
    ),
    *(
        row(f"{name}={str(value)[:12]}", lambda name=name, value=value: build(**{name: value}), BadArgument, *words)
        for name, value, *words in VALUES
    ),
    row("a number of NumPy", numpy_numbers, "works"),
    row("an argument that is missing", lambda: Trainer(MeanTask()), TypeError, "data"),
    row("run_dir is a file", lambda: file_instead_of_folder("run"), BadArgument, "'run': it is a file"),
    row("save_dir is a file", lambda: file_instead_of_folder("run/checkpoints"), BadArgument, "is a file"),
    row(
        "run_dir that cannot be made", lambda: fit(run_dir="/proc/x"), BadArgument, "run_dir to be a folder that can be"
    ),
    row("a home folder", lambda: with_home(in_home), "works"),
    row("a checkpoint that is missing", lambda: fit(resume="nowhere"), DataError, "no checkpoint at nowhere"),
    row("val_data and val_split", lambda: build(val_data=classes(), val_split=0.1), BadArgument, "received both"),
    row("lr beside an optimizer", lambda: own_optimizer(lr=0.5), "warns", "lr=0.5 has no effect", "SGD"),
    row(
        "batch_size beside a loader",
        lambda: build(data=loader(), batch_size=16),
        "warns",
        "batch_size=16 has no effect",
    ),
    row("an accuracy is maximised", maximised, "works"),
    row(
        "the lowest accuracy",
        lambda: build(monitor_metric="val/accuracy", monitor_mode="min"),
        "warns",
        "counts the lowest value as the best",
        "monitor_mode='max'",
    ),
    row("the highest loss", lambda: build(monitor_mode="max"), "warns", "counts the highest value as the best"),
    row(
        "EarlyStopping at the highest accuracy",
        lambda: build(callbacks=[EarlyStopping("val/accuracy")], val_split=0.2),
        "warns",
        "EarlyStopping monitors val/accuracy with mode='min'",
        "mode='max'",
    ),
    row(
        "EarlyStopping without validation data",
        lambda: build(callbacks=[EarlyStopping()]),
        "warns",
        "EarlyStopping monitors val/loss, but there is no validation data",
    ),
    row("EarlyStopping with another mode", lambda: EarlyStopping(mode="maximum"), BadArgument, "'min' or 'max'"),
    row("ModelCheckpoint with another mode", lambda: ModelCheckpoint(mode="best"), BadArgument, "'min' or 'max'"),
    row("EarlyStopping after half an evaluation", lambda: EarlyStopping(patience=2.5), BadArgument, "patience", "2.5"),
    row("one file for the best three", lambda: ModelCheckpoint(filename="best.pt"), BadArgument, "save_top_k=1"),
    row(
        "a file name with unknown fields", lambda: ModelCheckpoint(filename="{epok}.pt"), BadArgument, "{epoch}, {step}"
    ),
    row("an EMA of a string", lambda: EMA(decay="0.99"), BadArgument, "EMA's decay", "'0.99'"),
    row("an EMA of 99", lambda: EMA(decay=99), BadArgument, "below 1", "99"),
    row(
        "another model than in the checkpoint",
        lambda: (fit(), fit(MeanTask(torch.nn.Linear(4, 3, dtype=torch.float64)), max_steps=4)),
        DataError,
        "does not fit",
    ),
    row(
        "another batch size than in the checkpoint",
        lambda: (fit(), fit(batch_size=4)),
        BadArgument,
        "batch_size 8 -> 4",
    ),
    row(
        "another optimizer than in the checkpoint",
        lambda: (fit(), fit(optimizer="sgd")),
        BadArgument,
        "optimizer 'adamw' -> 'sgd'",
        "resume=None",
    ),
    row("nothing left to train", lambda: (fit(), fit()), "warns", "2 of 2 steps are done", "Raise the number"),
]


@pytest.mark.parametrize("mistake", ROWS)
def test_mistake(mistake, caplog):
    text = text_for(mistake, caplog)
    assert [words for words in mistake.words if words not in text] == [], text


def test_suggestions_name_settings_that_exist():
    known = {*Trainer.__dataclass_fields__}
    named = {text.partition("=")[0] for text in SETTINGS.values() if not text.endswith(".")}
    assert named <= known
    assert not known & set(SETTINGS)
