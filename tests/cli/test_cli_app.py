"""Exit codes, error paragraphs and tracebacks of all commands, and the imports of --help."""

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainformer.cli import app
from trainformer.cli.output import duration, print_table
from trainformer.utils.known_messages import hide_known_messages

#: Arguments with which each command fails although its usage is right.
FAILING = {
    "train": ["--task=ImageClassification", "--data=nowhere", "--model=no_such_model"],
    "check": ["--task=ImageClassification", "--data=nowhere", "--model=no_such_model"],
    "evaluate": ["nowhere"],
    "predict": ["nowhere", "data"],
    "export": ["nowhere", "out.onnx"],
    "chat": ["nowhere"],
    "generate": ["nowhere", "--prompt=x"],
    "lm-eval": ["nowhere", "--tasks=x"],
    "resume": ["nowhere"],
    "run": ["nowhere.yaml"],
    "launch": ["nowhere.py"],
    "sweep": ["nowhere.py"],
    "tasks": ["Nowhere"],
    "runs": ["nowhere"],
    "report": ["nowhere"],
    "ckpt": ["inspect", "nowhere"],
    "ctl": ["status", "nowhere"],
    "config": ["show", "nowhere.yaml"],
    "finalize": ["nowhere", "out"],
    "teacher-logits": ["./nowhere", "data", "--out", "logits"],
}
NEVER = {"doctor", "completion"}  # fail only where something is broken


@pytest.mark.parametrize("name", app.COMMANDS)
def test_wrong_usage_exits_with_2(name, capsys):
    with pytest.raises(SystemExit) as caught:
        app.main([name, "--no-such-option"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error:" in err.splitlines()[-1] or "error:" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", sorted(app.COMMANDS.keys() - NEVER))
def test_a_failure_is_one_paragraph_and_exit_code_1(name, capsys):
    assert app.main([name, *FAILING[name]]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "\n\n" not in err.strip()
    assert "Traceback" not in err
    assert max(map(len, err.splitlines())) <= 100
    assert os.listdir() == []  # and it leaves nothing


@pytest.mark.parametrize("name", sorted(app.COMMANDS.keys() - NEVER - {"launch"}))  # the words of a program are its
def test_debug_shows_the_traceback(name):
    with pytest.raises(Exception, match=r".+"):
        app.main([name, *FAILING[name], "--debug"])


def test_debug_may_be_anywhere_after_the_command(capsys):
    for words in (["--debug", "status", "nix"], ["status", "--debug", "nix"], ["status", "nix", "--debug"]):
        with pytest.raises(ValueError, match="nix"):
            app.main(["ctl", *words])
    assert app.main(["ctl", "status", "nix"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_options_are_not_abbreviated(capsys):
    """Options that are added later would change their meaning; the same for actions."""
    for words in (["runs", "--rev"], ["ckpt", "list", "runs", "--js"], ["ctl", "list", "--js"]):
        with pytest.raises(SystemExit) as caught:
            app.main(words)
        assert caught.value.code == 2
    assert "unrecognized arguments: --js" in capsys.readouterr().err


def test_without_a_command(capsys):
    assert app.main([]) == 2
    assert app.main(["trian"]) == 2
    err = capsys.readouterr().err
    assert "usage: trainformer" in err
    assert "Did you mean 'train'" in err
    assert app.main(["--debug", "train"]) == app.main(["--hepl"]) == 2
    err = capsys.readouterr().err
    assert "received '--debug'. It stands after the command." in err
    assert "received '--hepl'. `trainformer --help` lists the commands" in err


def test_a_paragraph_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = app.paragraph(ValueError("many words " * 20)).splitlines()
    assert max(map(len, lines)) <= 50
    assert lines[0].startswith("error: ValueError: many words")


def test_every_command_is_in_the_complete_parser_with_debug_everywhere():
    parser = app.complete_parser()
    commands = app.actions_of(parser)
    assert commands.keys() == app.COMMANDS.keys()

    def lacking(name, parser):
        inner = [place for key, each in app.actions_of(parser).items() for place in lacking(f"{name} {key}", each)]
        return inner if "--debug" in parser._option_string_actions else [name, *inner]

    assert [place for name, each in commands.items() for place in lacking(name, each)] == []
    assert isinstance(parser, argparse.ArgumentParser)


HEAVY = ("torch", "jax", "numpy", "rich", "optuna", "ray", "jsonargparse", "transformers", "yaml", "pandas")
HELP = """
import contextlib, io, json, sys
from trainformer.cli import app
found = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try: app.main(words)
        except SystemExit as end: code = end.code
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    found[" ".join(words)] = [code, out.getvalue()[:6], loaded]
print(json.dumps(found))
"""


def test_help_imports_nothing_heavy():
    """All in one process, so an import by one page shows up in all later ones. `train` needs the trainer's options."""
    others = [name for name in app.COMMANDS if name not in ("train", "check")]
    pages = [["--help"], *([name, "--help"] for name in others), ["ckpt", "export", "--help"]]
    words = [sys.executable, "-c", HELP, json.dumps(pages), json.dumps(HEAVY)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {" ".join(page): [0, "usage:", []] for page in pages}


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "ended by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_a_signal_ends_a_command_with_128_and_its_number(number, word):
    """A Python config that sleeps, so that the signal arrives while the command runs."""
    Path("slow.py").write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(120)\nconfig = {}\n")
    words = [sys.executable, "-m", "trainformer.cli", "config", "show", "slow.py"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not Path("begun").exists() and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(number)
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out, err) == (128 + number, "", f"{word}\n")


def test_signal_handlers_are_restored(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert app.main(["ctl", "list"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().out == "no runs in runs\n"


@pytest.mark.parametrize("words", ["completion bash", "ctl list", "tasks"])
def test_a_closed_pipe_is_no_error(words):
    """`trainformer ... | true`: much output, little that is flushed at the end, and tables. As if ended by SIGPIPE."""
    text = f"{sys.executable} -m trainformer.cli {words} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_training_run_whose_output_is_closed_is_interrupted_quietly():
    """`python train.py | head -1`: the next process resumes it."""
    program = (
        "import torch; from toys import MeanTask, classes; from trainformer import Trainer;"
        "Trainer(MeanTask(), classes(), max_steps=500, log_every=1, run_dir='run').fit()"
    )
    text = f'{sys.executable} -c "{program}" | head -1; echo ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[1:] == ["141"]
    assert done.stderr == ""
    assert json.loads(Path("run/status.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("width", [40, 50, 200])
def test_a_table_that_does_not_fit_the_terminal_is_printed_as_paragraphs(capsys, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [["a-rather-long-name", "ImageClassification", "finished", 12.5], ["b", None, "failed", 1]]
    print_table({"run": "left", "task": "left", "status": "left", "step": "right"}, rows)
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= width for line in out.splitlines())
    words = out.split()
    assert [words.count(word) for word in ("a-rather-long-name", "b")] == ([1, 1] if width == 200 else [0, 0])
    assert ("a-rather-long-name: task ImageClassification" in " ".join(words)) == (width < 200)


def test_known_messages_of_other_libraries_are_hidden_and_others_are_not(caplog):
    logger = logging.getLogger("torch.utils._pytree")
    hide_known_messages()
    hide_known_messages()
    logger.warning("<enum 'KernelPreference'> ... Calling register_constant() on Enum subclasses is deprecated")
    logger.warning("something else")
    assert caplog.messages == ["something else"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("doctor --jsn", "Did you mean --json?"),
        ("evaluate run --batch 3", "Here it is --batch-size."),
        ("predict run data --batchsize 3", "Here it is --batch-size."),
        ("resume run --num-epochs 3", "Here it is --epochs."),
        ("launch --nproc-per-node 2 train.py", "Here it is --nproc."),
        ("ckpt list run --jsno", "Did you mean --json?"),
        ("ckpt lst run", "Did you mean 'list'?"),
        ("ctl sav run", "Did you mean 'save'?"),
        ("runs --frobnicate", "`trainformer runs --help` lists the options."),
    ],
)
def test_an_unknown_option_of_any_command_gets_a_hint(capsys, words, hint):
    with pytest.raises(SystemExit) as ended:
        app.main(words.split())
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(89, "89 s"), (3540, "59 min"), (172_000, "47 h 47 min"), (None, "?")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_no_character_ends_a_command(tmp_path):
    """Lone surrogates are in no encoding, and most characters are not in ASCII."""
    Path("c.json").write_text('{"a": "\\ud800 \u00e9"}', encoding="utf-8")
    code = "import sys; from trainformer.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "config", "show", "c.json"]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert found.returncode == 0, found.stderr
    assert "\\xe9" in found.stdout.lower()
