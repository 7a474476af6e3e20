"""The content of a report, read from folders, and the command that writes it."""

import json
import math
import os
import random
import re
import subprocess
import sys

import pytest
import torch
from run_folders import CONFIG, START, everything, happened, resumed_times, training, write_run

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.cli import app
from trainformer.core.errors import BadArgument
from trainformer.loggers import read_jsonl
from trainformer.report import write_report
from trainformer.report.events import collect_events
from trainformer.report.reading import read_run
from trainformer.report.series import downsample, group_plots, read_clock, read_series
from trainformer.sweep import choice, grid, sweep
from trainformer.tasks.classification_report import confusion_record


def content_of(path):
    """The data in a report, as its script reads it."""
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.S)[1])


# -- curves ------------------------------------------------------------------------------------------------


def test_downsampling_loses_no_peak_no_dip_and_no_nan():
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(9_973)]
    values[4_321], values[77], values[8_000], values[8_001] = 50.0, -50.0, math.nan, math.inf
    kept = downsample(values, 1_000)
    assert kept == sorted(set(kept))
    assert len(kept) <= 1_000 + 3
    assert {0, 77, 4_321, 8_000, 9_972} <= set(kept)
    # In every window, the extremes that are drawn are the true ones.
    for begin in range(0, 9_900, 100):
        stretch = [v for v in values[begin : begin + 100] if math.isfinite(v)]
        near = [values[k] for k in kept if begin - 20 <= k < begin + 120 and math.isfinite(values[k])]
        assert max(near) >= max(stretch)
        assert min(near) <= min(stretch)


def test_few_points_are_all_kept():
    assert downsample([3.0, 1.0, 2.0], 3) == [0, 1, 2]


def test_the_last_value_of_a_repeated_step_counts_and_steps_are_sorted():
    records = [{"step": 1, "a": 1.0}, {"step": 3, "a": 3.0}, {"step": 2, "a": 2.0}, {"step": 3, "a": 4.0, "b": "text"}]
    found = read_series(records)
    assert (found["a"].steps, found["a"].values, found.keys()) == ([1, 2, 3], [1.0, 2.0, 4.0], {"a"})


def test_training_time_excludes_pauses_between_processes():
    records = resumed_times(training(40, 10), after=20, pause=1000)
    clock = read_clock(records, [START, START + 1020, START + 1020.1], [START, START + 1020, START + 1020.1])
    assert clock["steps"] == [10, 20, 30, 40]
    # The last sign of the first process was at 20.5, so that 999.5 s and 0.1 s are left out.
    assert clock["seconds"] == pytest.approx([10.5, 20.5, 30.9, 40.9])
    assert clock["epochs"] == [1, 2, 3, 4]


def test_fast_steps_have_separate_times():
    """Two at one time would be one point of the curves over time."""
    records = [{"step": step, "time": START + step / 500, "train/loss": 1.0} for step in range(1, 200)]
    assert len(set(read_clock(records, [], [])["seconds"])) == 199


def test_metrics_are_grouped_by_what_they_measure():
    names = ["train/epoch", "train/lr", "train/grad_norm", "train/tokens_per_second", "train/memory_gb", "val/f1",
             "train/loss", "val/loss", "reward", "train/f1", "train/peak_memory_gb", "val/birds/recall"]  # fmt: skip
    plots = {plot["title"]: (plot["group"], plot["names"]) for plot in group_plots(names)}
    assert plots == {
        "loss": ("Loss", ["train/loss", "val/loss"]),
        "f1": ("Validation", ["train/f1", "val/f1"]),
        "birds/recall": ("Validation", ["val/birds/recall"]),
        "lr": ("Learning rate", ["train/lr"]),
        "grad_norm": ("Gradient norm", ["train/grad_norm"]),
        "tokens_per_second": ("Throughput", ["train/tokens_per_second"]),
        "memory_gb": ("Memory", ["train/memory_gb"]),
        "peak_memory_gb": ("Memory", ["train/peak_memory_gb"]),
        "reward": ("Others", ["reward"]),
    }
    assert next(iter(plots)) == "loss"
    assert list(plots)[-1] == "reward"


# -- runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run with evaluations and checkpoints, and its trainer."""
    folder = tmp_path_factory.mktemp("real") / "tiny"
    trainer = Trainer(
        MeanTask(), classes(), val_data=classes(32, seed=1), epochs=3, batch_size=8, lr=1e-2, log="none", log_every=1,
        monitor_metric="val/accuracy", monitor_mode="max", save_last=2, run_dir=folder, device="cpu",
    )  # fmt: skip
    trainer.fit()
    return trainer, folder


def test_the_content_of_a_real_run(trained):
    trainer, folder = trained
    content = content_of(write_report(folder))
    [run] = content["runs"]
    records = read_jsonl(folder / "metrics.jsonl")
    for name in ("train/loss", "val/loss", "val/accuracy"):
        logged = [(record["step"], record[name]) for record in records if name in record]
        steps, values, total = run["series"][name]
        assert steps == [step for step, _ in logged]
        assert total == len(logged)
        assert values == pytest.approx([value for _, value in logged], rel=1e-6)
    assert (run["status"], run["step"], run["steps_planned"], run["task"]) == ("finished", 24, 24, "MeanTask")
    assert run["best"]["value"] == pytest.approx(trainer.best_metrics["val/accuracy"])
    assert run["config"]["lr"] == {"value": 0.01, "source": "user", "depends_on": []}
    assert run["clock"]["epochs"][-1] == 3
    assert run["error"] is None
    kinds = {event["kind"] for event in run["events"]}
    assert {"began", "evaluated", "saved", "ended"} <= kinds
    saved = run["checkpoints"]
    assert [each["is_last"] for each in saved] == [False] * (len(saved) - 1) + [True]
    [best] = [each for each in saved if each["is_best"]]
    assert best["metrics"]["val/accuracy"] == pytest.approx(trainer.best_metrics["val/accuracy"])
    sizes = sum(file.stat().st_size for file in (folder / "checkpoints" / best["name"]).iterdir())
    assert best["bytes"] == sizes - (folder / "checkpoints" / best["name"] / "manifest.json").stat().st_size


def test_a_failed_run_shows_its_error(tmp_path):
    class Failing:
        def on_epoch_end(self, trainer, epoch, metrics):
            raise RuntimeError("the disk is full")

    trainer = Trainer(
        MeanTask(), classes(), epochs=2, batch_size=8, log="none", run_dir=tmp_path / "bad", callbacks=[Failing()]
    )
    with pytest.raises(RuntimeError, match="disk is full"):
        trainer.fit()
    run = read_run(tmp_path / "bad")
    assert run["status"] == "failed"
    assert "the disk is full" in run["error"]


def test_a_resumed_run_marks_the_step(tmp_path):
    run = read_run(everything(tmp_path / "run"))
    assert {(mark["kind"], mark["step"]) for mark in run["marks"]} == {("split", 20), ("skipped", 31), ("resumed", 100)}
    assert run["command"] == ["train.py", "--lr", "1e-3"]
    assert run["versions"]["torch"] == "2.13.0"


def test_secrets_in_the_files_of_a_run_do_not_reach_its_report(tmp_path):
    """A run of another version, or one that was edited."""
    config = {"task/api_key": ("hunter2", "user"), "lr": (0.1, "user"), "db": ("redis://:swordfish@host", "user")}
    records = [{"time": START, "step": 1, "kind": "began", "command": ["train", "--var", "token=open-sesame"]}]
    folder = write_run(
        tmp_path / "run", [{"step": 1, "train/loss": 0.5}], records, config=config, log="hunter2 was refused"
    )
    text = write_report(folder).read_text()
    assert [secret for secret in ("hunter2", "swordfish", "open-sesame") if secret in text] == []
    assert content_of(folder / "report.html")["runs"][0]["config"]["task/api_key"] == {
        "value": "***masked***", "source": "user", "depends_on": [],
    }  # fmt: skip


def test_an_error_is_shown_until_the_run_starts_again(tmp_path):
    failed = [
        {"time": START, "step": 0, "kind": "began"},
        {"time": START + 9, "step": 9, "kind": "ended", "error": "E: no"},
    ]
    run = read_run(write_run(tmp_path / "failed", list(training(8)), failed))
    assert (run["error"], run["step"]) == ("E: no", 9)  # where it failed, after the last metrics
    again = [
        *failed,
        {"time": START + 20, "step": 4, "kind": "began"},
        {"time": START + 25, "step": 6, "kind": "saved"},
    ]
    run = read_run(write_run(tmp_path / "again", list(training(4)), again))
    assert (run["error"], run["step"]) == (None, 6)


def test_texts_are_shown_once_whether_logged_recorded_or_repeated(tmp_path):
    metrics = [
        {"step": 4, "time": START, "text/free": "hello"},
        {"step": 4, "time": START, "text/story/1": "Once⟶upon"},
    ]
    again = [
        {"kind": "text", "step": step, "key": "story", "samples": [{"prompt": "Once", "text": text}]}
        for step, text in ((2, "a"), (4, "b"), (2, "c"))
    ]
    texts = {group["key"]: group["steps"] for group in read_run(write_run(tmp_path / "run", metrics, again))["texts"]}
    assert {key: [(s["step"], s["samples"][0]["text"]) for s in steps] for key, steps in texts.items()} == {
        "story": [(2, "c"), (4, "b")],
        "free": [(4, "hello")],
    }


def test_routine_events_of_a_long_run_are_dropped_but_no_important_one():
    saves = [{"kind": "saved", "step": step, "time": START + step} for step in range(5_000)]
    saves.insert(2_500, {"kind": "resumed", "step": 2_500, "time": START, "from_step": 2_500})
    shown = collect_events(saves)
    assert shown["event_count"] == 5_001
    assert len(shown["events"]) == 500
    assert [event["step"] for event in shown["events"] if event["kind"] == "resumed"] == [2_500]


def test_with_many_classes_the_most_confused_are_shown():
    size = 200
    matrix = [[50 if row == column else 0 for column in range(size)] for row in range(size)]
    matrix[150][3] = 25
    shown = collect_events([{"kind": "confusion_matrix", "step": 1, "key": "val", "labels": None, "matrix": matrix}])
    [step] = shown["confusion"][0]["steps"]
    place = step["labels"].index("150")
    assert len(step["matrix"]) == 64
    assert step["classes"] == size
    assert (step["totals"][place], step["matrix"][place][place]) == (75, 50)
    assert step["accuracy"] == pytest.approx(10_000 / 10_025)


def test_rates_refer_to_all_classes_even_if_a_task_records_a_subset():
    counts = torch.randint(0, 9, (130, 130), generator=torch.Generator().manual_seed(0))
    record = {**confusion_record(counts, None)["confusion_matrix"], "kind": "confusion_matrix", "step": 1}
    [step] = collect_events([record])["confusion"][0]["steps"]
    assert (len(step["matrix"]), step["classes"]) == (50, 130)
    assert step["accuracy"] == pytest.approx(float(counts.trace() / counts.sum()))
    for place, label in enumerate(map(int, step["labels"])):
        assert step["totals"][place] == sum(counts[label].tolist())
        assert step["predicted"][place] == sum(counts[:, label].tolist())


def test_a_large_run_makes_a_small_file(tmp_path):
    chance = random.Random(0)
    metrics = [
        {
            "step": n,
            "time": START + n / 50,
            "train/epoch": n / 1000,
            **{f"train/m{k}": chance.random() for k in range(5)},
        }
        for n in range(1, 20_001)
    ]
    path = write_report(write_run(tmp_path / "large", metrics))
    [run] = content_of(path)["runs"]
    steps, values, total = run["series"]["train/m0"]
    assert total == 20_000
    assert 4_900 <= len(steps) <= 5_002
    assert max(values) == pytest.approx(max(record["train/m0"] for record in metrics), rel=1e-6)
    assert path.stat().st_size < 1_000_000


# -- which runs, and where the report goes -----------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("calm", "bold"):
        write_run(tmp_path / "runs" / name, list(training(8)), config=CONFIG)
    return tmp_path


def test_the_command_prints_the_path(place, capsys):
    assert app.main(["report", "calm"]) == 0
    assert capsys.readouterr().out.startswith("wrote runs/calm/report.html (0.1 MB)")
    assert app.main(["report", "runs", "--json", "--title", "both"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert message == {"report": "report.html", "bytes": (place / "report.html").stat().st_size}
    content = content_of(place / "report.html")
    assert content["title"] == "both"
    assert [run["name"] for run in content["runs"]] == ["bold", "calm"]
    assert app.main(["report", "runs/calm", "bold", "runs/bold", "--out", "here/"]) == 0
    assert [run["name"] for run in content_of(place / "here" / "report.html")["runs"]] == ["calm", "bold"]


def test_the_report_is_replaced_atomically(place):
    (place / "runs/calm/report.html").write_text("old")
    write_report("calm")
    assert (place / "runs/calm/report.html").read_text().startswith("<!doctype html>")
    assert not list((place / "runs/calm").glob(".*"))


def test_unknown_sources_are_reported(place, capsys):
    assert app.main(["report", "clam"]) == 1
    assert "Did you mean 'calm'?" in " ".join(capsys.readouterr().err.split())
    (place / "nothing").mkdir()
    with pytest.raises(BadArgument, match="neither"):
        write_report("nothing")
    with pytest.raises(BadArgument, match="at least one run"):
        write_report([])
    with pytest.raises(BadArgument, match="0 or more"):
        write_report("calm", top=-1)
    with pytest.raises(SystemExit, match="2"):
        app.main(["report"])


def test_runs_with_the_same_name_get_unique_names(place):
    write_run(place / "other" / "calm", list(training(8)))
    content = content_of(write_report(["calm", "other/calm"]))
    assert [run["name"] for run in content["runs"]] == ["runs/calm", "other/calm"]
    assert content["title"] == "calm and 1 more"
    write_run(place / "other" / "runs" / "calm", list(training(8)))
    names = [run["name"] for run in content_of(write_report(["calm", "bold", "other/runs/calm"]))["runs"]]
    assert names == [f"{place.name}/runs/calm", "bold", "other/runs/calm"]


def test_a_folder_that_contains_a_runs_folder_is_accepted(place):
    """As the `output_dir` of a trainer in HuggingFace's style."""
    write_run(place / "out" / "runs" / "first", list(training(8)))
    assert [run["name"] for run in content_of(write_report("out"))["runs"]] == ["first"]


def test_other_files_are_not_replaced_and_unwritable_paths_are_reported(place, capsys):
    (place / "train.py").write_text("import this")
    assert app.main(["report", "calm", "--out", "train.py"]) == 1
    assert app.main(["report", "calm", "--out", "train.py/report.html"]) == 1
    assert (place / "train.py").read_text() == "import this"
    message = " ".join(capsys.readouterr().err.split())
    assert "an HTML file, or a new file, for the report" in message
    assert "'train.py/report.html'. It cannot be written" in message
    write_report("calm", "page")
    assert write_report("calm", "page", title="new").read_text().count("<title>new</title>") == 1


def test_a_folder_name_that_is_not_valid_text(place):
    run = write_run(place / os.fsdecode(b"caf\xe9"), list(training(8)))
    assert "<title>caf?</title>" in write_report(run).read_text()


def test_a_report_needs_no_torch(place):
    everything(place / "runs" / "rich")
    program = (
        "import sys; from trainformer.cli import app; code = app.main(['report', 'rich', 'calm']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'jax', 'optuna', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=place, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- sweeps ------------------------------------------------------------------------------------------------


@pytest.mark.slow  # importing Optuna
def test_a_real_sweep_with_the_run_of_its_best_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @sweep(lr=choice(0.01), hidden=grid(4, 8))
    def search(lr, hidden):
        if hidden == 4:
            raise RuntimeError("too narrow")
        trainer = Trainer(MeanTask(), classes(), val_data=classes(32, seed=1), epochs=1, lr=lr, log="none", save_last=1)
        trainer.fit()
        return -trainer.best_metrics["val/loss"]

    results = search.run(method="grid", name="tiny", log="none")
    content = content_of(write_report("tiny", top=1))
    [shown] = content["sweeps"]
    assert content["title"] == "tiny"
    assert shown["spaces"] == {"lr": "choice(0.01)", "hidden": "grid(4, 8)"}
    best, failed = shown["trials"]
    assert (best["status"], best["metric"], best["config"]) == ("completed", results[0]["metric"], results[0]["config"])
    assert failed["status"] == "failed"
    assert "too narrow" in failed["error"]
    assert (best["page"], failed["page"]) == (0, None)
    assert content["runs"][0]["best"]["value"] == pytest.approx(-best["metric"])
    assert (tmp_path / "sweeps/tiny/report.html").is_file()
    assert [each["name"] for each in content_of(write_report("sweeps"))["sweeps"]] == ["tiny"]


def test_the_page_knows_every_kind_of_record():
    """A kind that is no longer written, or is spelled differently, would silently be missing."""
    kinds = [record["kind"] for record in happened()]
    shown = collect_events(happened())
    assert [event["kind"] for event in shown["events"]] == [
        kind for kind in kinds if kind not in ("lr_finder", "confusion_matrix", "images", "text")
    ]
    assert all(shown[part] for part in ("confusion", "images", "texts", "lr_finder"))
