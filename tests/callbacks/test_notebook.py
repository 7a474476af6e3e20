"""Runs in a notebook: one display that is redrawn and plots the logged metrics. Also in a real kernel."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.callbacks import ProgressBar, notebook
from trainformer.callbacks.notebook import Series, downsample, line_chart, ticks
from trainformer.loggers import ConsoleLogger, read_jsonl

SVG = "{http://www.w3.org/2000/svg}"


def lines_in(html):
    """The polylines of a display by name, as arrays (points, 2). Raises if the XML is not well-formed."""
    (svg,) = re.findall(r"<svg.*?</svg>", html, re.S)
    found = ET.fromstring(svg).iter(f"{SVG}polyline")
    return {one.get("data-name"): np.array([p.split(",") for p in one.get("points").split()], float) for one in found}


def assert_drawn(points, steps, values):
    """Pixels are linear in steps and values (the y axis points down), to a tenth of a pixel."""
    assert len(points) == len(steps)
    for column, wanted in zip(points.T, (steps, values), strict=True):
        slope, shift = np.polyfit(wanted, column, 1)
        assert np.abs(np.polyval((slope, shift), wanted) - column).max() < 0.1
        assert (slope < 0) == (wanted is values)
        assert np.ptp(column) > 100


class Shown(list):
    """A fake frontend that keeps what was published."""

    def __call__(self, bundle):
        self.append(bundle)

    @property
    def html(self):
        return self[-1]["text/html"]


@pytest.fixture
def shown(monkeypatch):
    """Pretend to run in a kernel, and catch displays."""
    caught = Shown()
    monkeypatch.setattr(notebook, "_cell_output", lambda: caught)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: None)
    return caught


def trainer_for(task=None, **options):
    usual = {"val_data": classes(16), "batch_size": 8, "epochs": 3, "log_every": 2, "lr": 1e-2, "run_dir": "run"}
    return Trainer(task or MeanTask(), classes(), **{**usual, **options})


def logged(name):
    found = [(r["step"], r[name]) for r in read_jsonl("run/metrics.jsonl") if name in r]
    return [step for step, _ in found], [value for _, value in found]


# -- display -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("monitor", ["val/loss", "val/accuracy"])
def test_curves_show_the_logged_metrics(shown, monitor):
    trainer_for(monitor_metric=monitor).fit()
    lines = lines_in(shown.html)
    assert_drawn(lines["train/loss"], *logged("train/loss"))
    assert list(lines) == ["train/loss", monitor]
    assert len(lines[monitor]) == 3
    assert "step 24 of 24" in shown.html
    assert "done" in shown[-1]["text/plain"]
    assert "width:100.0%" in shown.html


def test_a_resumed_run_shows_its_whole_curve(shown):
    trainer_for().fit()
    trainer_for(epochs=5).fit()
    assert_drawn(lines_in(shown.html)["train/loss"], *logged("train/loss"))
    assert logged("train/loss")[0][-1] == 40


def test_it_redraws_at_most_twice_a_second(shown, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(notebook.time, "perf_counter", lambda: now[0])
    display = notebook.NotebookDisplay()
    display.begin(0, 1000)
    for step in range(1, 1001):
        now[0] += 0.01
        display.move(step)
        display.log(step, {"train/loss": 1 / step})
    display.end(1000)
    assert 18 <= len(shown) <= 23  # ten seconds, plus start and end


def test_a_failure_is_shown_with_the_last_state(shown):
    class Fails(MeanTask):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            if self.calls > 12:
                raise RuntimeError("no <b>data</b> & no more")
            return super().train_step(batch)

    with pytest.raises(RuntimeError):
        trainer_for(Fails()).fit()
    assert "failed: RuntimeError: no &lt;b&gt;data&lt;/b&gt; &amp; no more" in shown.html
    assert_drawn(lines_in(shown.html)["train/loss"], *logged("train/loss"))
    assert logged("train/loss")[0][-1] == 12


def test_an_interruption_is_not_a_failure(shown):
    class Interrupted:
        def on_step_end(self, trainer, step, loss):
            if step == 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_for(callbacks=[Interrupted()]).fit()
    assert shown[-1]["text/plain"].endswith("  interrupted")
    assert "failed" not in shown.html


def test_the_stop_reason_is_shown(shown):
    class Stops:
        def on_step_end(self, trainer, step, loss):
            if step == 10:
                trainer.stop("enough")

    trainer_for(callbacks=[Stops()]).fit()
    assert "stopped by Stops: enough" in shown.html


def test_non_finite_losses_are_not_plotted(shown):
    display = notebook.NotebookDisplay()
    for step, loss in enumerate([1.0, math.nan, 0.5, math.inf, 0.25]):
        display.log(step, {"train/loss": loss})
    display.end(4)
    assert len(lines_in(shown.html)["train/loss"]) == 3


def test_evaluations_outside_of_training_show_no_display(shown):
    trainer_for().evaluate()
    assert shown == []


def test_there_is_no_display_without_console_or_kernel(shown, monkeypatch):
    trainer_for(log="none").fit()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: False)
    trainer_for(run_dir="other", callbacks=[ProgressBar()]).fit()
    assert shown == []


def test_the_console_logger_prints_no_training_lines_in_a_notebook(monkeypatch, capsys):
    from rich.console import Console

    printed = []
    monkeypatch.setattr(Console, "print", lambda self, text, **options: printed.append(str(text)))
    logger = ConsoleLogger(Console(force_jupyter=True))
    logger.init({})
    logger.log({"train/loss": 0.5}, 1)
    logger.log({"val/loss": 0.5}, 1)
    assert [line.split()[0] for line in printed] == ["val"]


# -- charts --------------------------------------------------------------------------------------------------


def test_downsampling_keeps_extremes():
    values = np.sin(np.arange(20_000) / 3000)
    values[12_345] = 9.0  # a spike of one step
    values[777] = -7.0
    points = [(step, float(value)) for step, value in enumerate(values)]
    few = downsample(points, 300)
    assert len(few) <= 300
    assert few == sorted(few)
    assert set(few) <= set(points)
    assert {points[0], points[-1], points[12_345], points[777]} <= set(few)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 17), (1e-9, 3e-9), (99_999, 100_001), (0.1, 0.10001)])
def test_ticks_are_few_round_numbers(low, high):
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 5
    assert all(low - 1e-12 <= mark <= high + 1e-12 for mark in marks)
    assert np.ptp(np.diff(marks)) <= 1e-6 * (high - low) + 2e-12


@pytest.mark.parametrize("points", [[], [(1, 0.5)], [(1, math.nan), (2, math.nan)]])
def test_nothing_to_draw_yet(points):
    assert line_chart([Series("a", points)]) == ""


def test_a_flat_line_and_a_name_with_special_characters():
    chart = line_chart([Series('<"&>', [(0, 0.0), (10, 0.0)])])
    ((name, points),) = lines_in(chart).items()
    assert name == '<"&>'
    assert np.isfinite(points).all()


# -- a real kernel -------------------------------------------------------------------------------------------

CELL = """
import sys
sys.path.insert(0, {tests!r})
from toys import MeanTask, classes
from trainformer import Trainer
Trainer(MeanTask(), classes(), val_data=classes(16), batch_size=8, epochs=3, log_every=2, lr=1e-2, run_dir="run").fit()
"""


@pytest.mark.slow
def test_in_a_notebook(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cell = nbformat.v4.new_code_cell(CELL.format(tests=str(Path(__file__).parents[1])))
    book = nbformat.v4.new_notebook(cells=[cell])
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources=place).execute()
    pages = [one["data"]["text/html"] for one in cell.outputs if "text/html" in one.get("data", {})]
    (page,) = [page for page in pages if "<svg" in page]  # one display, however often it was redrawn
    assert_drawn(lines_in(page)["train/loss"], *logged("train/loss"))
    assert "step 24 of 24" in page
    assert "done" in page
    texts = "".join(one["data"]["text/plain"] for one in cell.outputs if "data" in one)
    assert "val     24" in texts
    assert "step     2" not in texts  # no training lines from the console logger
