"""`trainformer ckpt` on checkpoints of runs on torch and on JAX, some of them damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.callbacks import EMA
from trainformer.checkpoint import list_checkpoints
from trainformer.cli import main
from trainformer.run import run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints at steps 2, 4 and 6, and the trainer at its end."""
    root = tmp_path_factory.mktemp("trained")
    settings = {"max_steps": 6, "save_every": 2, "save_last": 3, "save_best": 0, "val_split": 0.25, "lr": 0.01}
    trainer = Trainer(
        MeanTask(), classes(), run_dir=root / "a", log="none", batch_size=8, callbacks=[EMA(decay=0.5)], **settings
    )
    return trainer.fit()


@pytest.fixture
def run(trained):
    """A copy of the run, as `a` under runs/."""
    return Path(shutil.copytree(trained.run_folder, "runs/a"))


def answer(capsys, *words, code=0):
    assert main(["ckpt", *map(str, words), "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_list(run, capsys):
    found = answer(capsys, "list", "a")
    assert [row["step"] for row in found] == [2, 4, 6]
    assert found == answer(capsys, "list", run / "checkpoints")
    for row, checkpoint in zip(found, list_checkpoints(run), strict=True):
        assert row["path"] == str(checkpoint.path)
        files = {file.name: file.size for files in checkpoint.manifest.components.values() for file in files}
        assert row["size"] == sum(files.values()) == sum((checkpoint.path / name).stat().st_size for name in files)
        assert row["metrics"] == checkpoint.manifest.metrics
    assert main(["ckpt", "list", "a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/a/checkpoints"
    assert [line.split()[:2] for line in lines if "step_" in line] == [
        ["step_00000002", "2"],
        ["step_00000004", "4"],
        ["step_00000006", "6"],
    ]
    Path("empty").mkdir()
    assert answer(capsys, "list", "empty") == []
    assert main(["ckpt", "list", "empty"]) == 0
    assert capsys.readouterr().out == "no complete checkpoint in empty\n"


def test_inspect(run, trained, capsys):
    found = answer(capsys, "inspect", "a")
    assert (found["step"], found["path"]) == (6, "runs/a/checkpoints/step_00000006")
    assert found["parameters"] == sum(p.numel() for p in trained.task.model.parameters())
    assert found["size"] == sum(part["size"] for part in found["parts"])
    assert main(["ckpt", "inspect", "a"]) == 0
    assert f"{found['parameters']:,} float64" in capsys.readouterr().out


def test_verify_says_what_is_damaged(run, capsys):
    assert answer(capsys, "verify", "a", run) == {"ok": True, "problems": {"a": [], "runs/a": []}}
    assert main(["ckpt", "verify", "a"]) == 0
    assert capsys.readouterr().out == "a: intact\n"
    file = run / "checkpoints" / "step_00000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = answer(capsys, "verify", "a", run / "checkpoints" / "step_00000006", code=1)
    assert not found["ok"]
    assert [len(problems) for problems in found["problems"].values()] == [1, 0]
    assert "step_00000004/model.safetensors" in found["problems"]["a"][0]
    assert main(["ckpt", "verify", "a"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("a: damaged\n  ")
    assert err == ""


def test_compare(run, capsys):
    two, six = (run / "checkpoints" / f"step_{step:08d}" for step in (2, 6))
    same = answer(capsys, "compare", six, "a")
    assert same["equal"]
    found = answer(capsys, "compare", two, six, "--component", "model")
    weights = load_file(two / "model.safetensors"), load_file(six / "model.safetensors")
    gaps = {name: (weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]}
    assert not found["equal"]
    assert {each["name"]: each["largest"] for each in found["parts"]["model"]["differences"]} == gaps
    assert main(["ckpt", "compare", str(two), str(six)]) == 0
    assert capsys.readouterr().out.endswith("they differ\n")
    assert main(["ckpt", "compare", str(two), str(six), "--component", "modle"]) == 1
    assert "Did you mean 'model'" in capsys.readouterr().err


def test_export(run, trained, capsys):
    assert answer(capsys, "export", "a", "w.safetensors")["path"] == "w.safetensors"
    weights, model = load_file("w.safetensors"), trained.task.model.state_dict()
    assert all(torch.equal(weights[name], model[name]) for name in model)
    assert main(["ckpt", "export", "a", "w.safetensors"]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["ckpt", "export", "a", "w.safetensors", "--force", "--ema"]) == 0
    average = run_of(trained).inference_model().state_dict()
    weights = load_file("w.safetensors")
    assert all(torch.equal(weights[name], average[name]) for name in model)
    assert not torch.equal(average["0.weight"], model["0.weight"])


def test_protect_and_unprotect(run, capsys):
    four = run / "checkpoints" / "step_00000004"
    assert answer(capsys, "protect", four) == {"path": str(four), "protected": True}
    assert [each.is_protected for each in list_checkpoints(run)] == [False, True, False]
    assert main(["ckpt", "list", "a"]) == 0
    assert "step_00000004 (protected)" in capsys.readouterr().out
    assert main(["ckpt", "unprotect", str(four)]) == 0
    assert capsys.readouterr().out == f"{four} is not protected any more\n"
    assert not any(each.is_protected for each in list_checkpoints(run))


@pytest.mark.slow
def test_runs_on_jax(capsys, monkeypatch):
    pytest.importorskip("flax", reason="needs trainformer[jax]")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "jax_backend"))
    from jax_toys import mlp_trainer

    state = mlp_trainer(max_steps=2, save_steps=1, output_dir="runs/net").train()
    arrays = {".".join(map(str, place)): np.asarray(leaf) for place, leaf in leaves(state.params)}
    assert [row["step"] for row in answer(capsys, "list", "net")][-1] == 2
    assert answer(capsys, "inspect", "net")["parameters"] == sum(array.size for array in arrays.values())
    assert answer(capsys, "verify", "net")["ok"]
    answer(capsys, "export", "net", "net.safetensors")
    weights = {name.replace("/", "."): tensor.numpy() for name, tensor in load_file("net.safetensors").items()}
    assert sorted(weights) == sorted(arrays)
    assert all(np.array_equal(weights[name], arrays[name]) for name in arrays)
    assert main(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["step"], row["checkpoints_size"] > 0) == ("net", 2, True)


def leaves(params, place=()):
    """Arrays of a tree with the way to each."""
    for key, value in params.items():
        yield from leaves(value, (*place, key)) if hasattr(value, "items") else [((*place, key), value)]
