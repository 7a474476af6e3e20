"""Runs that wait at chosen steps until so many requests have come in: what is asked for lands at just that step."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import victim
from harness import output, wait_for

from forking import SERVER
from trainformer.run import run_of

_MOST_SECONDS = 60


class Gate:
    """After each step of `gates` waits for a number of requests. `reached.txt` says at which step it stands."""

    def __init__(self, gates, last_words=0):
        self.gates = dict(gates)
        self.last_words = last_words  # requests to wait for when training has ended

    def on_step_end(self, trainer, step, loss):
        if step in self.gates:
            self._wait(trainer, self.gates[step], str(step))

    def on_train_end(self, trainer):
        if self.last_words:
            self._wait(trainer, self.last_words, "end")

    def _wait(self, trainer, requests, where):
        Path("reached.tmp").write_text(where)
        os.replace("reached.tmp", "reached.txt")
        until = time.monotonic() + _MOST_SECONDS
        while run_of(trainer).live_control._incoming.qsize() < requests:
            assert time.monotonic() < until, "nobody asked for anything"
            time.sleep(0.002)


def _start(case, folder, gate):
    really = victim.make_trainer
    victim.make_trainer = lambda case: really(case, [gate])
    victim.start(case, folder)


def launch_gated(case, folder, gates=None, **options):
    """Start a process that trains in a folder and stops at gates; comes back when it has reached the first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reached.txt").unlink(missing_ok=True)
    process = SERVER.Process(target=_start, args=(case, str(folder), Gate(gates or {}, **options)))
    process.start()
    wait_at(process, folder, next(iter(gates)) if gates else "end")
    return process


def wait_at(process, folder, gate):
    """Wait until a process stands at a gate."""
    reached = folder / "reached.txt"
    arrived = wait_for(lambda: reached.exists() and reached.read_text() == str(gate), process, _MOST_SECONDS)
    assert arrived, output(folder)


def ctl(folder, *words):
    """What `trainformer ctl` does in a folder, in a process of its own."""
    return finish_ctl(start_ctl(folder, *words))


def start_ctl(folder, *words, **options):
    command = [sys.executable, "-m", "trainformer.cli", "ctl", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, **options)


def finish_ctl(process):
    out, err = process.communicate(timeout=_MOST_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, " ".join(err.split()))


def asked(folder, *words):
    """The answer to a request that must succeed."""
    done = ctl(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def control_file(run):
    return json.loads((run / "control.json").read_text())


def log_of(folder):
    return (folder / "run" / "log.txt").read_text()
