"""`trainformer.checkpoint` on checkpoints of real runs, against safetensors, torch and differences made by hand."""

import importlib
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from toys import MeanTask, classes, mlp, same
from trainformer import Trainer
from trainformer.callbacks import EMA
from trainformer.checkpoint import (
    InvalidCheckpoint,
    compare,
    export_weights,
    inspect,
    list_checkpoints,
    protect,
    unprotect,
    verify,
)
from trainformer.core import BadArgument, DataError

EVERY_COMPONENT = ["model", "optimizer", "schedule", "backend", "run", "context", "loggers", "rng", "callback.EMA"]


def train(run_dir="runs/a", steps=6, task=None, **options):
    options = {"save_every": 2, "save_last": 3, "save_best": 0, "val_split": 0.25, **options}
    callbacks = options.pop("callbacks", None) or [EMA(decay=0.5)]
    task = task or MeanTask()
    return Trainer(
        task, classes(), max_steps=steps, lr=0.01, run_dir=run_dir, log="none", callbacks=callbacks, **options
    )


@pytest.fixture
def trainer():
    return train().fit()


@pytest.fixture
def folder(trainer):
    return trainer.run_folder / "checkpoints" / "step_00000006"


def rewritten(folder, name, change):
    """A copy of a checkpoint in which a tensor file was changed, without a manifest that says so."""
    copy = Path("copy") / folder.name
    shutil.copytree(folder, copy)
    content = load_file(copy / name)
    change(content)
    save_file(content, copy / name)
    return copy


def test_the_surface_and_what_importing_it_costs():
    package = importlib.import_module("trainformer.checkpoint")
    names = (
        "Checkpoint Comparison Difference Finalized InvalidCheckpoint Part PartComparison Summary compare "
        "export_weights finalize inspect"
    )
    assert package.__all__ == sorted([*names.split(), "list_checkpoints", "protect", "unprotect", "verify"])
    for name in ("compare", "inspect", "verify"):
        assert callable(getattr(package, name))


def test_looking_needs_no_torch(folder):
    code = (
        "import sys; from trainformer.checkpoint import inspect, list_checkpoints, protect, verify;"
        f"a = list_checkpoints('runs/a'), inspect('{folder}'), verify('{folder}'), protect('{folder}');"
        "print(len(a[0]), a[2], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["3", "[]", "False"]


# -- list ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["runs/a", "runs/a/checkpoints"])
@pytest.mark.usefixtures("trainer")
def test_listing_a_run_or_its_checkpoints_folder(path):
    assert [c.step for c in list_checkpoints(path)] == [2, 4, 6]


def test_listing_one_checkpoint_or_a_run_without_any(folder):
    assert [c.path for c in list_checkpoints(folder)] == [folder]
    Path("empty").mkdir()
    assert list_checkpoints("empty") == []


def test_a_run_that_keeps_its_checkpoints_elsewhere(tmp_path):
    train("runs/b", steps=2, save_dir="kept").fit()
    train("runs/c", steps=2, save_dir=str(tmp_path / "far")).fit()
    assert list_checkpoints("runs/b")[0].path == Path("runs/b/kept/step_00000002")
    assert list_checkpoints("runs/c")[0].path == tmp_path / "far/step_00000002"
    assert inspect("runs/c").step == 2


def test_drafts_and_damaged_manifests_are_not_listed(folder, caplog):
    (folder.parent / ".writing-step_00000008-1").mkdir()
    (folder / "manifest.json").write_text("{")
    assert [c.step for c in list_checkpoints("runs/a")] == [2, 4]
    assert "step_00000006" in caplog.text


# -- inspect ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["runs/a", "runs/a/checkpoints", "runs/a/checkpoints/step_00000006"])
def test_inspecting_a_checkpoint(trainer, path):
    found = inspect(path)
    assert found.path == Path("runs/a/checkpoints/step_00000006")
    assert (found.step, found.epoch, found.world_size, found.is_protected) == (6, 3, 1, False)
    assert found.metrics == {k: v for k, v in trainer.state.log_history[-1].items() if k not in ("step", "epoch")}
    assert found.versions["torch"] == torch.__version__
    assert abs(found.time - found.path.stat().st_mtime) < 60
    assert [part.key for part in found.parts] == [*EVERY_COMPONENT, "assets"]
    sizes = {name: (found.path / name).stat().st_size for part in found.parts for name in part.files}
    assert found.size == sum(sizes.values())
    assert set(sizes) | {"manifest.json"} == {p.name for p in found.path.iterdir()}
    assert found.parameters == sum(t.numel() for t in trainer.task.model.state_dict().values())
    assert found.dtypes == {"float64": found.parameters}


@pytest.mark.usefixtures("trainer")
def test_the_summary_as_text():
    text = str(inspect("runs/a"))
    for word in ("step_00000006", "val/accuracy", "67 float64", "model.safetensors", "callback.EMA", torch.__version__):
        assert word in text
    assert "protected" not in text
    protect("runs/a")
    assert "protected" in str(inspect("runs/a"))


class Mixed(nn.Module):
    """Tied weights, a buffer that counts, and layers in two types."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.norm(self.tied(self.first(x.float()))).double())


def test_types_are_counted_and_tied_weights_once():
    trainer = train("runs/m", steps=2, task=MeanTask(Mixed()), callbacks=[EMA()]).fit()
    counts = {"float32": 16 + 4 * 4, "float64": 15, "int64": 1}
    for path in ("runs/m", trainer.save("m.pt")):
        assert inspect(path).dtypes == counts
        assert inspect(path).parameters == sum(counts.values())


def test_inspecting_single_files(trainer):
    found = inspect(trainer.save("x.pt"))
    assert (found.step, found.epoch, found.world_size) == (6, 3, None)
    assert found.metrics == inspect("runs/a").metrics
    assert [part.key for part in found.parts] == EVERY_COMPONENT
    assert found.parts[0].size == 67 * 8
    weights = inspect(export_weights("runs/a", "w.safetensors"))
    assert (weights.step, weights.parameters, [part.key for part in weights.parts]) == (None, 67, ["model"])
    assert "67 float64" in str(weights)


# -- verify ----------------------------------------------------------------------------------------------------


def test_verifying_what_is_well(trainer, folder):
    for path in (folder, folder.parent, "runs/a", trainer.save("x.pt"), export_weights("runs/a", "w.safetensors")):
        assert verify(path) == []


def test_every_damaged_file_is_named(folder):
    names = sorted(p.name for p in folder.iterdir() if p.name != "manifest.json")
    for number, name in enumerate(names):
        path = folder / name
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            path.write_bytes(content[:-1])
        elif number % 3 == 1:
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        else:
            path.unlink()
    problems = verify(folder)
    assert len(problems) == len(names)
    assert all(sum(name in problem for problem in problems) == 1 for name in names)
    assert {"missing", "bytes", "digest"} == {
        w for w in ("missing", "bytes", "digest") if any(w in p for p in problems)
    }


def test_all_checkpoints_of_a_run_are_verified(folder):
    (folder.parent / "step_00000002" / "rng.rank0.pt").unlink()
    (folder.parent / "step_00000004" / "manifest.json").unlink()
    first, second = verify("runs/a")
    assert "step_00000002/rng.rank0.pt is missing" in first
    assert "step_00000004 is not a complete checkpoint" in second
    assert verify(folder) == []


def test_a_manifest_that_was_edited(folder):
    content = json.loads((folder / "manifest.json").read_text())
    content["step"] = 7
    (folder / "manifest.json").write_text(json.dumps(content))
    (problem,) = verify(folder)
    assert "manifest.json is damaged" in problem
    with pytest.raises(InvalidCheckpoint, match=r"manifest\.json is damaged"):
        inspect(folder)


@pytest.mark.parametrize("where", [0.25, 0.5, 0.75])
def test_a_flipped_byte_in_a_single_file(trainer, where):
    path = Path(trainer.save("x.pt"))
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 0xFF
    path.write_bytes(content)
    (problem,) = verify(path)
    assert "x.pt" in problem
    assert "damaged" in problem


def test_single_files_that_are_cut_short_or_something_else(trainer):
    path = Path(trainer.save("x.pt"))
    path.write_bytes(path.read_bytes()[:-500])
    Path("notes.pt").write_text("not a checkpoint")
    Path("w.safetensors").write_bytes(b"\0" * 100)
    torch.save([1, 2], "list.pt")
    for name in ("x.pt", "notes.pt", "w.safetensors", "list.pt"):
        (problem,) = verify(name)
        assert name in problem


def test_nothing_that_is_read_is_executed(folder):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (Path("boom"),)

    with open("bomb.pt", "wb") as file:
        pickle.dump({"components": {"model": Bomb()}, "format": 2}, file, protocol=2)
    torch.save({"components": {"model": Bomb()}, "format": 2}, "torch-bomb.pt")
    for name in ("bomb.pt", "torch-bomb.pt"):
        assert len(verify(name)) == 1
        for look in (inspect, lambda path: compare(path, folder), lambda path: export_weights(path, "w.pt")):
            with pytest.raises(DataError, match="bomb"):
                look(name)
    assert not Path("boom").exists()


# -- compare ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_equals_itself_and_the_single_file(trainer, folder):
    for other in (folder, "runs/a", trainer.save("x.pt")):
        found = compare(folder, other)
        assert found.equal
        assert list(found.parts) == EVERY_COMPONENT
        assert all(part.equal and part.same > 0 and part.largest == 0 for part in found.parts.values())


def test_two_steps_differ_by_what_torch_says(folder):
    before = folder.parent / "step_00000004"
    found = compare(before, folder)
    a, b = (load_file(path / "model.safetensors") for path in (before, folder))
    part = found.parts["model"]
    assert not found.equal
    assert {d.name: d.largest for d in part.differences} == {n: (a[n] - b[n]).abs().max().item() for n in a}
    assert {d.name: d.count for d in part.differences} == {n: int((a[n] != b[n]).sum()) for n in a}
    steps = {d.name: (d.a, d.b, d.largest) for d in found.parts["run"].differences}["step"]
    assert steps == ("4", "6", 2.0)
    assert "log_history.3.step" in found.parts["run"].only_b
    moments = {d.name for d in found.parts["optimizer"].differences}
    assert {"state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step"} <= moments
    text = str(found)
    for word in ("step_00000004", "step_00000006", "step: 4 against 6", "0.weight: by up to", "in 32 of 32"):
        assert word in text


def test_differences_made_by_hand():
    a = {
        "same": torch.tensor([1.0, float("nan"), float("inf")]),
        "one": torch.zeros(5),
        "nan": torch.zeros(2),
        "shape": torch.zeros(2, 3),
        "type": torch.ones(3),
        "big": torch.tensor([2**60]),
        "flag": torch.tensor([True, False]),
        "only a": torch.zeros(1),
    }
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["one"][3] = -0.5
    b["nan"][0] = float("nan")
    b["shape"] = torch.zeros(3, 2)
    b["type"] = b["type"].bfloat16()
    b["big"] += 1  # too small for a float64 to see
    b["flag"][1] = True
    b["only b"] = b.pop("only a")
    save_file(a, "a.safetensors")
    torch.save(b, "b.pt")
    part = compare("a.safetensors", "b.pt").parts["model"]
    found = {d.name: (d.largest, d.count, d.total) for d in part.differences}
    assert found == {
        "one": (0.5, 1, 5),
        "nan": (float("inf"), 1, 2),
        "shape": (None, 6, 6),
        "type": (0.0, 0, 3),
        "big": (1.0, 1, 1),
        "flag": (1.0, 1, 2),
    }
    assert (part.same, part.only_a, part.only_b, part.largest) == (1, ("only a",), ("only b",), float("inf"))
    text = str(compare("a.safetensors", "b.pt"))
    assert "float32 (2, 3) against float32 (3, 2)" in text
    assert "float32 (3,) against bfloat16 (3,)" in text
    assert "only b: only in b" in text


def test_components_that_only_one_side_has_and_choosing_some(folder):
    Trainer(MeanTask(), classes(), max_steps=2, run_dir="runs/plain", log="none").fit()
    found = compare(folder, "runs/plain")
    assert (found.only_a, found.only_b) == (("callback.EMA",), ())
    assert "only in a" in str(found)
    assert list(compare(folder, "runs/plain", components=["model"]).parts) == ["model"]
    with pytest.raises(BadArgument, match="Did you mean 'model'"):
        compare(folder, "runs/plain", components=["modell"])


def test_a_damaged_component_is_not_compared(folder):
    copy = rewritten(folder, "model.safetensors", lambda tensors: tensors["0.bias"].add_(1))
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged"):
        compare(copy, folder)
    assert compare(copy, folder, components=["optimizer"]).equal


# -- export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["runs/a", "runs/a/checkpoints/step_00000006", "x.pt"])
def test_exported_weights_are_the_models(trainer, source):
    trainer.save("x.pt")
    out = export_weights(source, "out/deep/w.safetensors")
    assert out == Path("out/deep/w.safetensors")
    assert same(load_file(out), trainer.task.model.state_dict())
    state = torch.load(export_weights(source, "w.pt"), weights_only=True)
    assert same(state, trainer.task.model.state_dict())
    mlp().load_state_dict(state)
    assert sorted(p.name for p in out.parent.iterdir()) == ["w.safetensors"]


def test_exporting_the_average(trainer):
    average = trainer._callbacks.callbacks[0].model.state_dict()
    assert not same(average, trainer.task.model.state_dict())
    trainer.save("x.pt")
    for source in ("runs/a", "x.pt"):
        assert same(load_file(export_weights(source, "w.safetensors", ema=True)), average)
        assert same(torch.load(export_weights(source, "w.pt", ema=True), weights_only=True), average)


def test_which_average():
    trainer = train("runs/two", steps=2, callbacks=[EMA(decay=0.5), EMA(decay=0.9, warmup=False)]).fit()
    with pytest.raises(DataError, match=r"callback\.EMA, callback\.EMA-2.*Pass the key"):
        export_weights("runs/two", "w.pt", ema=True)
    second = torch.load(export_weights("runs/two", "w.pt", ema="callback.EMA-2"), weights_only=True)
    assert same(second, trainer._callbacks.callbacks[1].model.state_dict())
    Trainer(MeanTask(), classes(), max_steps=1, run_dir="runs/none", log="none").fit()
    with pytest.raises(DataError, match="Was the run trained with the EMA callback"):
        export_weights("runs/none", "w.pt", ema=True)


def test_tied_weights_are_exported_under_all_their_names():
    trainer = train("runs/m", steps=2, task=MeanTask(Mixed())).fit()
    for name, read in (("w.safetensors", load_file), ("w.pt", torch.load)):
        state = read(export_weights("runs/m", name))
        assert same(state, trainer.task.model.state_dict())
        Mixed().load_state_dict(state)


def test_damaged_weights_are_not_exported(folder):
    Path("w.pt").write_text("as it was")
    copy = rewritten(folder, "model.safetensors", lambda tensors: tensors["0.bias"].add_(1))
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged"):
        export_weights(copy, "w.pt")
    assert Path("w.pt").read_text() == "as it was"
    with pytest.raises(BadArgument, match=r"\.safetensors or \.pt.*w\.bin"):
        export_weights(folder, "w.bin")


# -- protect ---------------------------------------------------------------------------------------------------


def test_a_protected_checkpoint_outlives_the_rules():
    first = train(steps=2, save_last=1).fit()
    assert protect("runs/a").step == 2
    train(steps=4, save_last=1).fit()
    kept = list_checkpoints("runs/a")
    assert [(c.step, c.is_protected) for c in kept] == [(2, True), (4, False)]
    assert unprotect(kept[0].path).is_protected is False
    train(steps=6, save_last=1).fit()
    assert [c.step for c in list_checkpoints("runs/a")] == [6]
    with pytest.raises(BadArgument, match="Expected the folder of a checkpoint"):
        protect(first.save("x.pt"))


def test_protecting_changes_nothing_else(folder):
    protect(folder)
    assert verify(folder) == []
    assert compare(folder, folder).equal


# -- wrong paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        list_checkpoints,
        inspect,
        verify,
        protect,
        unprotect,
        lambda p: compare(p, p),
        lambda p: export_weights(p, "w.pt"),
    ],
)
def test_a_path_with_nothing_there(look):
    with pytest.raises(DataError, match=r"received 'runs/none'\. There is nothing at this path"):
        look("runs/none")


@pytest.mark.parametrize("look", [inspect, protect, lambda p: compare(p, p), lambda p: export_weights(p, "w.pt")])
def test_a_folder_without_a_complete_checkpoint(look, folder):
    Path("empty").mkdir()
    with pytest.raises(DataError, match=r"received 'empty'\. There is no complete checkpoint"):
        look("empty")
    assert verify("empty") == ["There is no complete checkpoint in empty."]
    (folder / "manifest.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"step_00000006 is not a complete checkpoint"):
        look(folder)


def test_listing_a_file_is_refused(trainer):
    with pytest.raises(BadArgument, match="This is a file"):
        list_checkpoints(trainer.save("x.pt"))


def test_weights_missing_from_a_checkpoint_that_is_inspected(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is missing"):
        inspect(folder)
