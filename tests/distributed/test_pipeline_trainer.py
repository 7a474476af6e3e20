"""`Trainer(strategy="pipeline")` against the same run in one process."""

from __future__ import annotations

import json
from functools import partial

import pipeline_trainer_runs as runs
import pytest
from safetensors.torch import load_file

from ranks import named, on_ranks
from toys import largest_difference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    """Of one process."""
    return runs.samples(folder / "one", "single")


@pytest.fixture(scope="module")
def two(folder, one):
    """Of two, one of them going on from the checkpoint of one process."""
    (folder / "ranks").mkdir()
    return on_ranks(partial(runs.results, folder), 2, folder / "ranks")


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "train/grad_norm", "train/accuracy", "val/loss", "val/accuracy", "train/epoch")
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.mark.parametrize("label", ["straight", "from one"])
def test_weights_match_one_process(one, two, label):
    assert largest_difference(named(two[0], f"{label}: "), one) < 1e-10


def test_logs_match_one_process(folder, two):
    pairs = list(zip(records(folder / "straight"), records(folder / "one"), strict=True))
    assert len(pairs) > 2
    for here, there in pairs:
        assert here == pytest.approx(there, rel=1e-10)


def test_one_process_resumes_from_a_pipeline_checkpoint(folder, one, two):
    assert largest_difference(runs.samples(folder / "back", "single", folder / "straight"), one) < 1e-10


@pytest.mark.parametrize("packing", [False, True])
def test_a_language_task_needs_no_changes(folder, two, packing):
    wanted = runs.texts(folder / f"alone{packing}", "single", packing)
    found = named(two[0], f"packing {packing}: ")
    assert largest_difference(found, wanted) < 1e-5
    newest = max((folder / f"texts{packing}" / "checkpoints").glob("step_*"))
    assert largest_difference(load_file(newest / "model.safetensors"), wanted) < 1e-5
    for here, there in zip(records(folder / f"texts{packing}"), records(folder / f"alone{packing}"), strict=True):
        assert here == pytest.approx(there, rel=1e-4)
