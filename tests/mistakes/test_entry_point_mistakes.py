"""The same mistakes with the other entry points: `trainformer.hf`, `trainformer.mini`, the command line."""

from pathlib import Path

import pytest
import torch
from mistake_table import row, text_for
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainerCallback

from toys import classes
from trainformer import hf, mini
from trainformer.cli.app import main
from trainformer.core import BadArgument, DataError

X, Y = classes(dtype=torch.float32)


def negative(place=5):
    labels = Y.clone()
    labels[place] = -1
    return labels


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def arguments(**options):
    return hf.TrainingArguments(**{"output_dir": "out", "max_steps": 2, "report_to": [], "use_cpu": True, **options})


def train(model=None, labels=Y, args=None, **options):
    data = [{"x": x, "labels": y} for x, y in zip(X, labels, strict=True)]
    return hf.Trainer(model or Model(), args or arguments(), train_dataset=data, **options).train()


class Misspelled(TrainerCallback):
    def on_step_ends(self, args, state, control, **kwargs): ...


HF = [
    row(
        "hf: an optimizer of another model",
        lambda: train(optimizers=(sgd(Model()), None)),
        BadArgument,
        "parameters of the model that is trained",
        "SGD over 2 others",
    ),
    row(
        "hf: an optimizer alone",
        lambda: train(optimizers=sgd(Model())),
        BadArgument,
        "a pair (optimizer, lr_scheduler)",
    ),
    row("hf: lr", lambda: arguments(lr=0.1), BadArgument, "'lr'", "Did you mean 'learning_rate'?"),
    row("hf: epochs", lambda: arguments(epochs=3), BadArgument, "Did you mean 'num_train_epochs'?"),
    row("hf: batch_size", lambda: arguments(batch_size=3), BadArgument, "Did you mean 'per_device_train_batch_size'?"),
    row(
        "hf: learning_rate as a string",
        lambda: train(args=arguments(learning_rate="1e-4")),
        BadArgument,
        "learning_rate",
    ),
    row("hf: output_dir is a file", lambda: (Path("out").touch(), train()), BadArgument, "it is a file"),
    row(
        "hf: a misspelled hook",
        lambda: train(callbacks=[Misspelled()]),
        "warns",
        "Misspelled.on_step_ends",
        "'on_step_end'",
    ),
    row("hf: a single callback", lambda: train(callbacks=TrainerCallback()), "works"),
    row("hf: a model as a class", lambda: train(Model), BadArgument, "model to be a torch Module"),
    row(
        "hf: label -1",
        lambda: train(labels=negative(), args=arguments(max_steps=8)),
        DataError,
        "received -1 in sample 5",
    ),
]


class Mini(mini.BaseTrainer):
    labels = Y

    def build_data_loader(self):
        return DataLoader(TensorDataset(X, self.labels), batch_size=8)

    def build_model(self):
        return nn.Linear(4, 3)

    def build_optimizer(self):
        return sgd(self.model)

    def forward(self, input):
        return F.cross_entropy(self.model(input[0]), input[1]), {}


class MiniHook(mini.BaseHook):
    def on_after_steps(self, trainer): ...


def run_mini(**members):
    trainer = type("Own", (Mini,), members)(max_steps=2, device="cpu")
    trainer.train()
    return trainer


MINI = [
    row(
        "mini: an optimizer of another model",
        lambda: run_mini(build_optimizer=lambda self: sgd(Model())),
        BadArgument,
        "SGD over 2 others",
    ),
    row(
        "mini: a misspelled method",
        lambda: run_mini(build_hook=lambda self: []),
        "warns",
        "Own.build_hook",
        "'build_hooks'",
    ),
    row(
        "mini: a misspelled hook",
        lambda: run_mini(build_hooks=lambda self: [MiniHook()]),
        "warns",
        "MiniHook.on_after_steps is never called",
        "'on_after_step'",
    ),
    row("mini: a loss alone", lambda: run_mini(forward=lambda self, input: 1), BadArgument, "(loss, records)"),
    row("mini: label -1", lambda: run_mini(labels=negative()), DataError, "received -1 in sample 5"),
    row("mini: a number of steps as a string", lambda: Mini(max_steps="3"), BadArgument, "max_steps", "'3'"),
]


@pytest.mark.parametrize("mistake", [*HF, *MINI])
def test_mistake(mistake, caplog):
    text = text_for(mistake, caplog)
    assert [words for words in mistake.words if words not in text] == [], text


COMMANDS = {
    "a misspelled command": (["trian"], "'train'"),
    "a misspelled task": (["train", "--task=ImageClasification", "--data=d"], "'ImageClassification'"),
    "a number that is none": (["train", "--task=ImageClassification", "--data=d", "--lr=abc"], "abc"),
    "half an epoch": (["train", "--task=ImageClassification", "--data=d", "--epochs=1.5"], "1.5"),
    "a run that does not exist": (["report", "nowhere"], "nowhere"),
}


@pytest.mark.parametrize(("command", "words"), COMMANDS.values(), ids=COMMANDS)
def test_command(command, words, capsys):
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    assert status not in (0, None)
    assert words in " ".join(capsys.readouterr())
