"""Runs with several validation sets and schedulers, killed and resumed by the same command."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from scheduled_victim import train

from forking import SERVER

_SPEED = ("time", "train/samples_per_second", "train/memory_gb", "train/save_seconds")


def run(folder, kill=None):
    process = SERVER.Process(target=train, args=(str(folder), kill))
    process.start()
    process.join(280)
    assert process.exitcode == (0 if kill is None else -signal.SIGKILL)


def result(folder):
    """Records, weights and the whole schedule of a finished run."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    last = max((folder / "run/checkpoints").glob("step_*"))
    states = {name: torch.load(last / f"{name}.pt", weights_only=True) for name in ("schedule",)}
    progress = json.loads((last / "run.json").read_text())
    kept = {path.name: json.loads((path / "manifest.json").read_text())["metrics"]
            for path in sorted((folder / "run/checkpoints").glob("step_*"))}  # fmt: skip
    return {
        "records": [{name: value for name, value in line.items() if name not in _SPEED} for line in lines],
        "schedule": states["schedule"],
        "best": (progress["best_metrics"], progress["best_step"], progress["evaluated_sets"]),
        "kept": kept,
    }, load_file(last / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return result(folder)


@pytest.mark.parametrize(
    "kills",
    [[(6, True), (13,)], [(5,), (10, True), (30,)], [(21, True), (27,)]],
    ids=["in an evaluation", "at the ends of epochs", "late"],
)
def test_killed_anywhere_it_ends_bitwise_the_same(kills, whole, tmp_path):
    for kill in kills:
        run(tmp_path, kill)
    run(tmp_path)
    found, weights = result(tmp_path)
    assert found == whole[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole[1].items())
    rates = [line["train/lr"] for line in found["records"] if "train/lr" in line]
    assert len(rates) == 30
    assert len(set(rates)) > 8
