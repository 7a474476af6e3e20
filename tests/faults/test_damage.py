"""Damaged and malicious checkpoints: never a wrong state, never an unexplained crash, no code execution."""

import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import complete, differences, finish, launch, output
from victim import Case, make_trainer

from trainformer.checkpointing import FileRecord, Manifest
from trainformer.core.errors import DataError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FILES = [
    "backend.pt", "callback.EMA.pt", "callback.EarlyStopping.pt", "context.pt", "loggers.json", "manifest.json",
    "model.safetensors", "optimizer.pt", "rng.rank0.pt", "run.json", "schedule.pt",
]  # fmt: skip


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def delete(path):
    path.unlink()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run."""
    return complete(Case(), tmp_path_factory.mktemp("reference"))


def killed_after(step, folder):
    """A run that is killed after a step."""
    case = replace(Case(), signals=((step, signal.SIGKILL),))
    assert finish(launch(case, folder), folder) == -signal.SIGKILL, output(folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Killed in the second epoch; the newest checkpoint is from step 12, and there are older ones."""
    return killed_after(14, tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def killed_early(tmp_path_factory):
    """Killed when there was one checkpoint, from step 4."""
    return killed_after(5, tmp_path_factory.mktemp("killed_early"))


def test_the_list_of_files_is_complete(killed, killed_early):
    for folder in (killed / "run/checkpoints/step_00000012", killed_early / "run/checkpoints/step_00000004"):
        assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "task.json"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, flip, delete])
def test_resume_falls_back_to_the_previous_checkpoint(tmp_path, reference, killed, harm, name):
    folder = Path(shutil.copytree(killed, tmp_path / "copy"))
    harm(folder / "run/checkpoints/step_00000012" / name)
    complete(Case(), folder)
    assert differences(reference, folder) == []
    log = (folder / "run/log.txt").read_text()
    # A folder without a manifest is not a checkpoint at all; otherwise the damaged file is named.
    assert f"step_00000012/{name}" in log or (name, harm) == ("manifest.json", delete)
    assert "step_00000012 is not a complete checkpoint" in log or (name, harm) != ("manifest.json", delete)
    assert "resuming from run/checkpoints/step_00000009" in log


@pytest.mark.parametrize("name", FILES)
def test_without_another_checkpoint_the_run_starts_over(tmp_path, reference, killed_early, name):
    folder = Path(shutil.copytree(killed_early, tmp_path / "copy"))
    flip(folder / "run/checkpoints/step_00000004" / name)
    complete(Case(), folder)
    assert f"step_00000004/{name}" in (folder / "run/log.txt").read_text()
    assert differences(reference, folder) == []


def test_several_damaged_checkpoints_and_stray_files(tmp_path, reference, killed):
    folder = Path(shutil.copytree(killed, tmp_path / "copy"))
    checkpoints = folder / "run/checkpoints"
    flip(checkpoints / "step_00000012" / "model.safetensors")
    delete(checkpoints / "step_00000009" / "rng.rank0.pt")
    (checkpoints / "step_00000099").mkdir()
    (checkpoints / "step_00000098").write_text("not even a folder")
    (checkpoints / "latest").write_text("nowhere")
    complete(Case(), folder)
    assert differences(reference, folder) == []
    assert "resuming from run/checkpoints/step_00000008" in (folder / "run/log.txt").read_text()


# -- attacks -----------------------------------------------------------------------------------------------


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def as_pickle(bomb, path):
    path.write_bytes(pickle.dumps(bomb))


def as_torch_file(bomb, path):
    torch.save({"state": {}, "param_groups": [], "bomb": bomb}, path)


def put_in_place(folder, name, plant, mark):
    """Replace a file of a checkpoint, and update the digests in its manifest."""
    plant(Bomb(mark), folder / name)
    manifest = Manifest.read(folder)
    components = {key: [FileRecord.of(folder, f.name) for f in files] for key, files in manifest.components.items()}
    (folder / "manifest.json").write_bytes(Manifest(**{**vars(manifest), "components": components}).to_bytes())


@pytest.mark.parametrize("plant", [as_pickle, as_torch_file])
@pytest.mark.parametrize("name", ["optimizer.pt", "rng.rank0.pt", "callback.EMA.pt", "model.safetensors"])
def test_a_pickle_bomb_is_refused(tmp_path, killed, name, plant):
    folder = Path(shutil.copytree(killed, tmp_path / "copy"))
    mark = tmp_path / "executed"
    put_in_place(folder / "run/checkpoints/step_00000012", name, plant, mark)
    code = finish(launch(Case(), folder), folder)
    log = output(folder) + (folder / "run/log.txt").read_text()
    assert not mark.exists()
    assert code not in (0, -signal.SIGKILL)
    assert "DataError" in log
    assert f"step_00000012/{name}" in log
    assert "could execute code" in log or name == "model.safetensors"


@pytest.mark.parametrize("plant", [as_pickle, as_torch_file])
def test_a_pickle_bomb_is_refused_by_load(tmp_path, killed, plant):
    folder = Path(shutil.copytree(killed, tmp_path / "copy"))
    mark = tmp_path / "executed"
    put_in_place(folder / "run/checkpoints/step_00000012", "optimizer.pt", plant, mark)
    plant(Bomb(mark), tmp_path / "single.pt")
    trainer = make_trainer(Case())
    weights = {k: v.clone() for k, v in trainer.task.model.state_dict().items()}
    for path in (folder / "run/checkpoints/step_00000012", folder / "run", tmp_path / "single.pt"):
        with pytest.raises(DataError, match="could execute code"):
            trainer.load(path)
    assert not mark.exists()
    assert all(torch.equal(v, weights[k]) for k, v in trainer.task.model.state_dict().items())
