"""A process to kill that has several validation sets with their own cadences, and several schedulers."""

import os
import signal
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.callbacks import EarlyStopping


class Kill:
    """SIGKILL after a step, before anything that is due then, or in the middle of the evaluation after it."""

    def __init__(self, step, in_evaluation=False):
        self.step, self.in_evaluation, self.armed = step, in_evaluation, False

    def on_step_end(self, trainer, step, loss):
        self.armed = step == self.step
        if self.armed and not self.in_evaluation:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_end(self, trainer, done, total):
        if self.armed and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, kill=None):
    os.chdir(folder)
    torch.set_num_threads(1)
    sets = {"clean": classes(11, seed=1), "shifted": (classes(9, seed=2)[0] + 0.5, classes(9, seed=2)[1])}
    plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 0.05, "factor": 0.7}
    Trainer(
        MeanTask(),
        TensorDataset(*classes(37)),
        sets,
        epochs=6,
        batch_size=8,
        eval_batch_size=4,
        lr=0.1,
        warmup_ratio=0.2,
        scheduler=[
            "constant",
            {"name": "StepLR", "step_size": 2, "gamma": 0.8, "interval": "epoch"},
            {**plateau, "monitor": "val/shifted/loss"},
            {**plateau, "monitor": "val/clean/accuracy", "mode": "max", "frequency": 2},
        ],
        eval_every={"clean": "3steps", "shifted": "1epochs"},
        monitor_metric="val/shifted/loss",
        save_every=4,
        log_every=1,
        save_best=2,
        run_dir=str(Path(folder, "run")),
        callbacks=[EarlyStopping("val/clean/loss", patience=20), *([Kill(*kill)] if kill else [])],
        log="none",
        device="cpu",
        precision="no",
    ).fit()
