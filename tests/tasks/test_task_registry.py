"""Tasks are found by name: the built-in ones, and those that an installed package registers as an entry point."""

import subprocess
import sys

import pytest

from trainformer.core import BadArgument, plugins
from trainformer.tasks import SSL, CausalLM, find_task, task_names

PLUGIN = """
import torch
from trainformer.tasks import TaskBase

class Segmentation(TaskBase):
    def __init__(self, width=2):
        self.model = torch.nn.Linear(width, 1)
    def train_step(self, batch):
        return self.model(batch).mean()
    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package on sys.path with metadata that registers two tasks; one of them cannot be imported."""
    metadata = tmp_path / "segmenters-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: segmenters\nVersion: 1.0\n")
    points = "[trainformer.tasks]\nSegmentation = segmenters:Segmentation\nBroken = segmenters:Missing\n"
    (metadata / "entry_points.txt").write_text(points)
    (tmp_path / "segmenters.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._registered.cache_clear()
    yield
    plugins._registered.cache_clear()
    sys.modules.pop("segmenters", None)


def test_built_in_tasks():
    assert find_task("CausalLM") is CausalLM
    assert find_task("SSL.dino") == SSL.dino
    assert {"CLIP", "CausalLM", "SSL", "VLM"} <= set(task_names())
    assert not {"Task", "TaskBase", "Loss", "find_task"} & set(task_names())


def test_a_task_from_another_package(installed):
    assert "Segmentation" in task_names()
    assert "segmenters" not in sys.modules  # listing names imports nothing
    task = find_task("Segmentation")(width=3)
    assert task.model.in_features == 3
    with pytest.raises(BadArgument, match=r"'Broken' \(trainformer.tasks, segmenters:Missing\) cannot be imported"):
        find_task("Broken")


def test_an_unknown_name_lists_close_ones(installed):
    with pytest.raises(BadArgument, match="Did you mean 'Segmentation'"):
        find_task("Segmentatoin")
    with pytest.raises(BadArgument, match=r"the name of a task, received 'SSL\.nothing'"):
        find_task("SSL.nothing")
    with pytest.raises(BadArgument, match="Tasks: CLIP, CPO, CausalLM, DPO"):
        find_task("zzz")


def test_listing_tasks_does_not_import_torch():
    code = "import sys; from trainformer.tasks import task_names; task_names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
