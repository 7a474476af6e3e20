"""Runs that block at chosen steps until a number of requests have arrived, so each request is applied at that step."""

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

_TIMEOUT = 300


class Gate:
    """Blocks after each step in `gates` until a number of requests have arrived. `reached.txt` holds the gate."""

    def __init__(self, gates, at_end=0):
        self.gates = dict(gates)
        self.at_end = at_end  # requests to wait for when training has ended

    def on_step_end(self, trainer, step, loss):
        if step in self.gates:
            self._wait(trainer, self.gates[step], str(step))

    def on_train_end(self, trainer):
        if self.at_end:
            self._wait(trainer, self.at_end, "end")

    def _wait(self, trainer, requests, where):
        Path("reached.tmp").write_text(where)
        os.replace("reached.tmp", "reached.txt")
        deadline = time.monotonic() + _TIMEOUT
        while run_of(trainer).live_control._incoming.qsize() < requests:
            assert time.monotonic() < deadline, "no request arrived"
            time.sleep(0.002)


def _start(case, folder, gate):
    really = victim.make_trainer
    victim.make_trainer = lambda case: really(case, [gate])
    victim.start(case, folder)


def launch_gated(case, folder, gates=None, **options):
    """Start a process that trains in a folder; returns when it blocks at its first gate."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reached.txt").unlink(missing_ok=True)
    process = SERVER.Process(target=_start, args=(case, str(folder), Gate(gates or {}, **options)))
    process.start()
    wait_at(process, folder, next(iter(gates)) if gates else "end")
    return process


def wait_at(process, folder, gate):
    """Wait until a process blocks at a gate."""
    reached = folder / "reached.txt"
    arrived = wait_for(lambda: reached.exists() and reached.read_text() == str(gate), process, _TIMEOUT)
    assert arrived, output(folder)


def ctl(folder, *words):
    """Run `trainformer ctl` in a folder, in a separate process."""
    return finish_ctl(start_ctl(folder, *words))


def start_ctl(folder, *words, **options):
    command = [sys.executable, "-m", "trainformer.cli", "ctl", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, **options)


def finish_ctl(process):
    out, err = process.communicate(timeout=_TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.returncode, out, " ".join(err.split()))


def asked(folder, *words):
    """The reply to a request that must succeed."""
    done = ctl(folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def control_file(run):
    return json.loads((run / "control.json").read_text())


def log_of(folder):
    return (folder / "run" / "log.txt").read_text()
