"""`trainformer tasks` compared with the classes and tables that it lists."""

import inspect
import json

import pytest
import torch

from trainformer import adapters, callbacks, loggers, tasks
from trainformer.backends.torch.optimizer_names import BITSANDBYTES_OPTIMIZERS, TORCH_OPTIMIZERS
from trainformer.backends.torch.schedules import SCHEDULES
from trainformer.cli import app
from trainformer.cli.components import KINDS

PACKAGES = {"tasks": tasks, "adapters": adapters, "callbacks": callbacks, "loggers": loggers}


def listed(capsys, *words):
    assert app.main(["tasks", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_has_every_public_class(capsys):
    found = listed(capsys)
    assert list(found) == list(KINDS)
    for kind, package in PACKAGES.items():
        classes = {name for name in package.__all__ if inspect.isclass(getattr(package, name))}
        of_others = {name for name in classes if getattr(package, name).__module__.endswith((".base", ".core.types"))}
        of_others |= {"DatasetInfo"} & classes
        names = {entry["name"].partition(".")[0] for entry in found[kind]}
        assert names == classes - of_others
    assert [entry["name"] for entry in found["tasks"] if entry["name"].startswith("SSL")] == [
        f"SSL.{method}" for method in ("byol", "dino", "mae", "moco", "simclr")
    ]
    schedulers = [entry["name"] for entry in found["schedulers"]]
    assert schedulers[: len(SCHEDULES)] == list(SCHEDULES)
    assert {"ReduceLROnPlateau", "StepLR"} < set(schedulers[len(SCHEDULES) :])
    assert all(entry["summary"] for entries in found.values() for entry in entries)
    stopping = next(entry for entry in found["callbacks"] if entry["name"] == "EarlyStopping")
    first = inspect.getdoc(callbacks.EarlyStopping).split(".")[0].replace("`", "")
    assert stopping["summary"] == " ".join(first.split())


def test_the_list_has_every_optimizer(capsys):
    found = {entry["name"]: entry["summary"] for entry in listed(capsys)["optimizers"]}
    assert list(found) == [*TORCH_OPTIMIZERS, *BITSANDBYTES_OPTIMIZERS]
    for name, (made, _) in TORCH_OPTIMIZERS.items():
        assert getattr(torch.optim, found[name].removeprefix("torch.optim.")) is made
    assert found["paged_adamw"] == f"bitsandbytes.optim.{BITSANDBYTES_OPTIMIZERS['paged_adamw'][0]}"


def test_one_of_them_with_its_fields(capsys):
    shown = listed(capsys, "LoRA")
    assert (shown["kind"], shown["name"]) == ("adapters", "LoRA")
    assert [field["name"] for field in shown["fields"]] == list(inspect.signature(adapters.LoRA).parameters)
    assert shown["fields"][0] == {
        "name": "r",
        "annotation": "int",
        "default": "8",
        "about": "Rank. Each adapted layer of size (n, m) gets r * (n + m) parameters.",
    }
    dino = {field["name"]: field["default"] for field in listed(capsys, "SSL.dino")["fields"]}
    assert (dino["backbone"], dino["out_dim"]) == ("'vit_small_patch16_224'", "65536")
    assert "mask_ratio" not in dino
    assert app.main(["tasks", "CausalLM"]) == 0
    text = capsys.readouterr().out
    assert "packing" in text
    assert "trainformer train --task=CausalLM --help" in text


def test_an_unknown_name(capsys):
    assert app.main(["tasks", "CausalLLM"]) == 1
    assert "Did you mean 'CausalLM'?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_without_a_task_fits_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as caught:
        app.main(["train", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert max(map(len, text.splitlines())) <= width
    squeezed = " ".join(text.split())
    assert "SSL.dino" in squeezed
    assert "--batch-size N of all processes together (int; default: 32)" in squeezed
