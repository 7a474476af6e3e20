"""A sweep whose trials are trained by other processes, to kill: the process of the sweep, or one of its workers.

python sweep_victim.py ray
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainformer import Trainer
from trainformer.sweep import current_trial, read_sweep, sweep, uniform
from trainformer.utils.processes import is_alive

TRIALS = 4


@dataclass(frozen=True)
class SweepCase:
    """Four trials, two at a time, in worker processes or as Ray tasks."""

    backend: str = "ray"  # or "local"
    pause: float = 0.0  # extra seconds per step; the others are not used here
    block_in_save: tuple[int, int] | None = None
    die_at: int | tuple[str, int] | None = None
    ways = ("time",)

    def start(self, folder):
        """A new interpreter, as Ray does not start in a fork of one with threads."""
        from victim import enter

        enter(folder)
        os.environ["BEGAN"] = str(time.monotonic())
        os.execv(sys.executable, [sys.executable, __file__, self.backend, str(self.pause)])

    def kill(self, process, folder):
        """Kill the sweep; the first time that a trial is being trained, its worker too."""
        from file_operations import PHASE

        marker = folder / "worker killed"
        workers = [int(path.read_text()) for path in folder.glob("worker-*") if path.stat().st_size]
        workers = [worker for worker in workers if is_alive(worker)]
        (folder / PHASE).write_text(f"{'step' if workers else 'start-up':<12}{0:>12}\n")
        if workers and not marker.exists():  # a trial is retried once
            marker.touch()
            os.kill(random.Random(len(workers)).choice(workers), signal.SIGKILL)
            time.sleep(1)
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGKILL)

    def differences(self, reference, other):
        """Trials that differ in what was tried, their result, or the weights of their run."""
        from harness import equal

        found = [self._trials(folder) for folder in (reference, other)]
        if len(found[1]) != TRIALS:
            return [f"{len(found[1])} trials"]
        return [f"trial {number}" for number in found[0] if not equal(found[0][number], found[1][number])]

    def _trials(self, folder):
        from trainformer.checkpointing import CheckpointStore
        from trainformer.checkpointing.torch_files import read_component

        trials = read_sweep(folder / "sweeps/noisy", with_importances=False).trials
        states = {}
        for trial in trials:
            (checkpoints,) = (folder / "sweeps/noisy/trials" / f"{trial.number:04}").glob("*/checkpoints")
            newest = CheckpointStore(checkpoints).newest()
            states[trial.number] = read_component(newest.path, ["model.safetensors"], "weights")
        return {trial.number: (trial.status, trial.config, trial.metric, states[trial.number]) for trial in trials}


class Noisy:
    """Regression with dropout."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def train_step(self, batch):
        time.sleep(0.02)
        return self.eval_step(batch)["loss"]

    def eval_step(self, batch):
        x, y = batch
        return {"loss": nn.functional.mse_loss(self.model(x), y)}


@sweep(lr=uniform(0.001, 0.1))
def noisy(lr):
    """Train a run of 40 steps."""
    Path(f"worker-{current_trial().number}").write_text(str(os.getpid()))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    settings = {"epochs": 5, "batch_size": 8, "save_every": 4, "num_workers": 0, "log": "none", "device": "cpu"}
    return Trainer(Noisy(), data, data, lr=lr, **settings).fit().evaluate()["val/loss"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = {"backend": "ray"} if sys.argv[1] == "ray" else {}
    noisy.run(method="random", n_trials=TRIALS, n_parallel=2, direction="minimize", **backend)
    seconds = 2 * (time.monotonic() - float(os.environ["BEGAN"]))  # kills come within half of it
    Path("end.json").write_text(json.dumps({"events": {"operation": 0, "seconds": seconds}}))
