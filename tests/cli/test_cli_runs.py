"""The table of runs, for real runs and for folders in other states."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.checkpointing import CheckpointStore
from trainformer.cli import main
from trainformer.cli.runs import SORTS, best_of


class Other(MeanTask):
    """Another task."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three runs: by their loss, by their accuracy, and without validation data."""
    root = tmp_path_factory.mktemp("trained")
    usual = {"epochs": 3, "batch_size": 8, "lr": 0.05, "log": "none", "log_every": 2}
    for name, task, settings in (
        ("a", MeanTask(), {"val_split": 0.25}),
        ("b", Other(), {"val_split": 0.25, "monitor_metric": "val/accuracy", "monitor_mode": "max", "lr": 0.01}),
        ("c", MeanTask(), {"max_steps": 2, "epochs": 1, "save_dir": "kept"}),
    ):
        torch.manual_seed(0)
        Trainer(task, classes(), run_dir=root / "runs" / name, **usual | settings).fit()
    return root


@pytest.fixture
def runs(trained):
    """A copy of them in this folder."""
    return Path(shutil.copytree(trained / "runs", "runs"))


def answer(capsys, *words):
    assert main(["runs", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def values(path, metric):
    """(value, step) of every evaluation, read the plain way."""
    records = map(json.loads, path.read_text().splitlines())
    return [(record[metric], record["step"]) for record in records if metric in record]


def test_the_facts_about_a_run(runs, capsys):
    a, b, c = sorted(answer(capsys), key=lambda row: row["name"])
    assert [row["task"] for row in (a, b, c)] == ["MeanTask", "Other", "MeanTask"]
    assert (a["best"], a["best_step"]) == min(values(runs / "a" / "metrics.jsonl", "val/loss"))
    found = values(runs / "b" / "metrics.jsonl", "val/accuracy")
    assert b["best"] == max(value for value, _ in found)
    assert b["best_step"] == next(step for value, step in found if value == b["best"])  # of equals the first
    assert (c["best"], c["step"], c["steps"], c["status"]) == (None, 2, 2, "finished")
    for row, place in ((a, "a/checkpoints"), (c, "c/kept")):
        every = [path for path in (runs / place).rglob("*") if path.is_file()]
        assert row["checkpoints_size"] == sum(path.stat().st_size for path in every) > 0
        assert CheckpointStore(runs / place).checkpoints()


def test_the_table_shows_it(runs, capsys):
    assert main(["runs"]) == 0
    heading, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert heading.split() == ["run", "task", "status", "step", "done", "best", "loss", "since", "size"]
    assert [row.split()[:5] for row in rows] == [
        ["a", "MeanTask", "finished", "18", "100%"],
        ["b", "Other", "finished", "18", "100%"],
        ["c", "MeanTask", "finished", "2/2", "100%"],
    ]
    assert f"accuracy {answer(capsys, '--task', 'Other')[0]['best']:.4g}" in rows[1]


def test_sorting_and_filtering(runs, capsys):
    status = json.loads((runs / "b" / "status.json").read_text())
    (runs / "b" / "status.json").write_text(json.dumps(status | {"status": "running", "process": 4_000_000}))
    shutil.copytree(runs / "a", runs / "worse")
    records = [json.loads(line) for line in (runs / "a" / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({k: v + 1 if k == "val/loss" else v for k, v in r.items()}) + "\n" for r in records)
    (runs / "worse" / "metrics.jsonl").write_text(text)

    def names(*words):
        return [row["name"] for row in answer(capsys, *words)]

    assert names("--sort", "best") == ["b", "a", "worse", "c"]  # val/accuracy before val/loss, without any last
    assert names("--sort", "name", "--reverse") == ["worse", "c", "b", "a"]
    assert names("--sort", "step")[0] == "c"
    assert names("--status", "killed") == ["b"]
    assert names("--status", "killed", "--status", "finished", "--task", "Other") == ["b"]
    assert sorted(names(runs / "a", runs / "c")) == ["a", "c"]
    for sort in SORTS:
        assert sorted(names("--sort", sort)) == ["a", "b", "c", "worse"]
    assert main(["runs", "--status", "failed"]) == 0
    assert capsys.readouterr().out == "no such runs in runs (there are 4 others)\n"


def test_folders_in_any_state(runs, capsys):
    """Truncated, damaged or unexpected files do not raise."""
    for name, files in {
        "torn": {"metrics.jsonl": '{"step": 1, "val/loss": 2.0}\n{"step": 2, "val/lo', "config.json": "{"},
        "odd": {"metrics.jsonl": '{"step": 3, "val/loss": "NaN"}\n[1]\n', "config.json": '{"task_type": 3}'},
        "bare": {},
    }.items():
        folder = runs / name
        folder.mkdir()
        now = {"status": "finished", "process": os.getpid(), "identity": None, "time": time.time()}
        (folder / "status.json").write_text(json.dumps(now))
        for file, text in files.items():
            (folder / file).write_text(text)
    found = {row["name"]: row for row in answer(capsys, "--sort", "best")}
    assert {name: found[name]["best"] for name in ("torn", "odd", "bare")} == {"torn": 2.0, "odd": None, "bare": None}
    assert main(["runs"]) == 0


def test_the_best_is_the_minimum_or_the_maximum():
    lines = [f'{{"step": {step}, "val/x": {value}}}' for step, value in enumerate((0.5, 0.9, 0.1, 0.9, 0.1))]
    Path("metrics.jsonl").write_text("\n".join(lines))
    assert best_of(Path("metrics.jsonl"), "val/x", "min") == (2, 0.1)
    assert best_of(Path("metrics.jsonl"), "val/x", "max") == (1, 0.9)
    assert best_of(Path("metrics.jsonl"), "val/y", "min") == (None, None)
    assert best_of(Path("nowhere.jsonl"), "val/loss", "min") == (None, None)


def test_no_runs(capsys):
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"
    assert answer(capsys) == []
    assert main(["runs", "nowhere"]) == 1
