"""`trainformer launch`: a program in several processes, with its exit code, restarts and words for what went wrong."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trainformer.cli import main

PROGRAM = """
import os, pathlib, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
pathlib.Path(f"seen-{rank}-of-{world}").write_text(" ".join(sys.argv[1:]) + "|" + os.environ["OMP_NUM_THREADS"])
if "fail" in sys.argv and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(7)
if "wait" in sys.argv:
    time.sleep(600)
"""

TRAINING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainformer import Trainer
from toys import MeanTask, classes, mlp

def train():
    Trainer(MeanTask(mlp()), TensorDataset(*classes(16)), epochs=1, batch_size=8, log="none", device="cpu",
            run_dir="out", num_workers=0).fit()
"""


def launch(folder, *words, **options):
    tests = os.path.join(os.path.dirname(__file__), "..")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.abspath(tests)}
    command = [sys.executable, "-m", "trainformer.cli", "launch", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **options)


def ended(process):
    _, said = process.communicate(timeout=600)
    return process.returncode, said


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def seen(folder):
    return {path.name: path.read_text() for path in folder.glob("seen-*")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_runs_in_several_processes_with_its_own_arguments(program):
    assert ended(launch(program, "--nproc", "2", "program.py", "--nproc", "9", "--n", "-m", "x"))[0] == 0
    assert seen(program) == {f"seen-{rank}-of-2": "--nproc 9 --n -m x|1" for rank in (0, 1)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_exit_code_is_that_of_the_process_that_failed(program):
    code, said = ended(launch(program, "--nproc", "2", "-m", "program", "fail"))
    assert code == 7
    assert "error: Rank 1 of 2" in said
    assert "exited with code 7" in said
    assert "Traceback" not in said
    assert ended(launch(program, "--nproc", "2", "--max-restarts", "1", "program.py", "fail"))[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_reaches_the_processes_and_is_the_exit_code(program):
    process = launch(program, "--nproc", "2", "program.py", "wait")
    deadline = time.monotonic() + 600
    while len(seen(program)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_our_own_commands_can_be_launched(tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "config.yaml").write_text("main: !partial:training:train {}\n")
    code, said = ended(launch(tmp_path, "--nproc", "2", "run", "config.yaml", "--trust", "training"))
    assert code == 0, said
    manifests = list((tmp_path / "out/checkpoints").glob("step_*/manifest.json"))
    assert manifests
    assert '"world_size": 2' in manifests[0].read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Expected a script"),
        (["missing.py"], "received 'missing.py'. Commands that can be launched are train,"),
        (["rum", "config.yaml"], "Did you mean 'run'"),
        (["launch", "x.py"], "received 'launch'"),
        (["--nnodes", "2", "x.py"], "--node-rank and --master-addr with --nnodes 2"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "host", "x.py"], "below --nnodes"),
    ],
)
def test_launch_errors_are_one_paragraph(words, said, capsys):
    assert main(["launch", *words]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.startswith("error: ")
    assert said in shown


def test_machines_and_processes_are_counted_from_one(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--nproc", "0", "x.py"])
    assert ended.value.code == 2
    assert "at least 1" in capsys.readouterr().err
