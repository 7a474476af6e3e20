"""Shared by the sweep tests: sweeps to interrupt, a script that runs them, and a reader. Without torch, for speed."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from trainformer.sweep import choice, current_trial, log_uniform, read_sweep, sweep, uniform

QUIET = {"log": "none"}

# Without `if __name__ == "__main__"`, as most users write it.
SCRIPT = """
import json, sys
from pathlib import Path
with Path("starts").open("a") as file:
    file.write("x")
from sweep_victims import victim
victim.run(**json.loads(sys.argv[1]))
Path("ended").touch()
"""


@sweep(x=uniform(-1, 1), rate=log_uniform(1e-4, 1), kind=choice("a", "b", "c"))
def victim(x, rate, kind):
    """Writes its process id to begun-NUMBER-ATTEMPT, then blocks while a file hold-NUMBER exists."""
    trial = current_trial()
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGTERM, lambda *_: Path(f"sigterm-{trial.number}").touch() or os._exit(1))
    Path(f"begun-{trial.number}-{trial.attempt}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 300
    while Path(f"hold-{trial.number}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return rate - x**2 + len(kind) * (kind == "b")


@sweep(x=choice(*range(7)))
def accidents(x):
    """Ends in a different way for each x."""
    trial = current_trial()
    with Path("attempts.txt").open("a") as file:
        file.write(f"{x} {trial.attempt} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\n")
    print("this is trial", x)
    if x == 1 and trial.attempt == 1:
        os.kill(os.getpid(), 9)
    if x == 2:
        os._exit(0)
    if x == 3:
        raise KeyError("three")
    if x == 4:
        sys.exit("four")
    trial.report(-x)
    return 10 * x


def trials_of(name, storage=None):
    """The trials of a sweep, read from its folder; without importances, which take long."""
    return read_sweep(name, storage, with_importances=False).trials
