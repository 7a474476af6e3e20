"""`trainformer sweep SCRIPT` and `trainformer sweep show`, as typed."""

import json
import sys
from pathlib import Path

import pytest

from trainformer.cli import app
from trainformer.sweep import read_sweep

SCRIPT = """
from dataclasses import dataclass
from beside import offset
from trainformer.sweep import choice, sweep, uniform

@dataclass
class Point:
    x: float

def value(x):
    return Point(x).x + offset

@sweep(x=uniform(0, 1), kind=choice("good", "bad"))
def experiment(x, kind):
    print("this is not JSON")
    if kind == "bad":
        raise ValueError("a bad one")
    return value(x)

if __name__ == "__main__":
    raise SystemExit("the script was run")
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder of the script
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    Path("scripts").mkdir()
    Path("scripts/beside.py").write_text("offset = 10\n")
    Path("scripts/search.py").write_text(SCRIPT)
    return "scripts/search.py"


def test_sweep_command_runs_a_script_and_shows_it(script, capsys):
    assert app.main(["sweep", script, "--n-trials", "6", "--n-parallel", "2"]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("trial ")]
    assert len(lines) == 6
    record = read_sweep("experiment")
    assert {trial.status for trial in record.trials} == {"completed", "failed"}
    assert all(10 < trial.metric < 11 for trial in record.trials if trial.status == "completed")
    for trial in record.trials:
        row = next(line for line in captured.out.splitlines() if line.strip().startswith(f"{trial.number} "))
        assert trial.status in row
        assert ("a bad one" in row) == (trial.status == "failed")

    assert app.main(["sweep", script, "--n-trials", "7", "--json"]) == 0
    captured = capsys.readouterr()
    record = read_sweep("experiment")
    assert [row["metric"] for row in json.loads(captured.out)] == [trial.metric for trial in record.trials]
    assert "6 of 7 trials are done" in captured.err

    Path("sweeps/gone").mkdir()
    Path("sweeps/gone/sweep.json").write_text(Path("sweeps/experiment/sweep.json").read_text())
    assert app.main(["sweep", "show"]) == 0
    captured = capsys.readouterr()
    assert "experiment" in captured.out
    assert "sweeps/gone: Expected a sweep with its study.db" in captured.err
    assert not Path("sweeps/gone/study.db").exists()
    assert app.main(["sweep", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["best"] == record.best.metric
    assert app.main(["sweep", "show", "experiment"]) == 0
    shown = capsys.readouterr().out
    assert f"{record.best.metric:.5g} (trial {record.best.number})" in shown
    assert "choice('good', 'bad')" in shown
    assert app.main(["sweep", "show", "sweeps/experiment", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["importances"] == record.importances
    assert [trial["number"] for trial in shown["trials"]] == [trial.number for trial in record.trials]


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("x = 1\n", [], "Decorate a function"),
        ("from trainformer.sweep import sweep\na = sweep()(lambda: 1)\nb = sweep()(lambda: 2)\n", [], "It has a, b"),
        (SCRIPT, ["--function", "experimen"], "Did you mean 'experiment'"),
        (SCRIPT, ["--n-trials", "0"], "n_trials"),
        ("raise RuntimeError('broken')\n", [], "RuntimeError: broken"),
        (None, [], "There is no such file"),
    ],
)
def test_errors_are_reported_in_a_paragraph(script, content, words, message, capsys):
    Path(script).unlink()
    if content is not None:
        Path(script).write_text(content)
    assert app.main(["sweep", script, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in " ".join(error.split())


def test_exit_codes_when_all_trials_fail_and_for_bad_usage(capsys):
    Path("fails.py").write_text(
        "from trainformer.sweep import sweep, grid\n@sweep(x=grid(1, 2))\ndef fails(x):\n    return None\n"
    )
    assert app.main(["sweep", "fails.py", "--method", "grid"]) == 1
    assert "to be a number, received None" in capsys.readouterr().out
    assert app.main(["sweep", "show", "nothing"]) == 1
    assert "trainformer sweep show" in capsys.readouterr().err
    for words in (["sweep"], ["sweep", "fails.py", "--method", "luck"], ["sweep", "show", "a", "b"]):
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        assert ended.value.code == 2
