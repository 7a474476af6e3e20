"""Every built-in callback on a torch run and on a JAX run of the same network, data and optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flax import nnx
from jax_toys import CLASSES, INPUTS, WIDTH, MeanTrainer, Mlp, mlp_trainer, samples

from trainformer import Trainer
from trainformer.callbacks import (
    EMA,
    CollapseMonitor,
    EarlyStopping,
    GradientMonitor,
    LRMonitor,
    ModelCheckpoint,
    OnlineKNN,
    OnlineLinear,
    Profiler,
    Throughput,
)

STEPS, RATE, CLIP = 8, 0.1, 0.2


class Classifier(MeanTrainer):
    """The same on JAX, with features."""

    num_classes = CLASSES

    def predict_step(self, model, batch):
        return {"embedding": model.inner(batch["x"]), "label": batch["y"], "prediction": model(batch["x"]).argmax(-1)}


class Features:
    def __init__(self, features, labels):
        self.features, self.labels = features, labels


class Task:
    """The same on torch, from the same weights."""

    def __init__(self):
        source = Mlp(nnx.Rngs(0))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(INPUTS, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, CLASSES)
        )
        with torch.no_grad():
            for mine, theirs in ((self.model[0], source.inner), (self.model[2], source.outer)):
                mine.weight.copy_(torch.tensor(np.array(theirs.kernel[...].T)))
                mine.bias.copy_(torch.tensor(np.array(theirs.bias[...])))

    def train_step(self, batch):
        features = self.model[0](batch["x"])
        self.step_features = Features(features, batch["y"])
        return torch.nn.functional.cross_entropy(self.model[1:](features), batch["y"].long())

    def eval_step(self, batch):
        return {"loss": torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"].long())}

    def predict_step(self, batch):
        rows = {"embedding": self.model[0](batch["x"]), "label": batch["y"].long()}
        return {**rows, "prediction": self.model(batch["x"]).argmax(-1)}


TRAIN, VAL = samples(32), samples(13, seed=1)


def rows_of(data):
    return [{name: column[i] for name, column in data.items()} for i in range(len(data["x"]))]


def on_torch(*callbacks, train=TRAIN, val=VAL, **options):
    given = {"batch_size": 8, "epochs": 2, "lr": RATE, "weight_decay": 0.0, "scheduler": "linear", "warmup_ratio": 0.0}
    given |= {"optimizer": {"name": "sgd", "momentum": 0.9}, "gradient_clip": CLIP, "log_every": 1, "log": "none"}
    given |= {"eval_every": "4steps", "precision": "no", "device": "cpu", "run_dir": "torch", "seed": 3}
    trainer = Trainer(Task(), rows_of(train), val_data=rows_of(val), callbacks=list(callbacks), **{**given, **options})
    trainer._run.context.config.set_from_data("num_classes", CLASSES)
    return trainer.fit()


def on_jax(*callbacks, train=TRAIN, val=VAL, **options):
    given = {"optimizer": "sgd", "learning_rate": RATE, "max_grad_norm": CLIP, "eval_steps": 4, "seed": 3}
    trainer = mlp_trainer(Classifier, train, callbacks=list(callbacks), dataset_eval=val, **{**given, **options})
    trainer.train()
    return trainer


# name: two equal callbacks, the names that they log, and those among them that need not be equal
CALLBACKS = {
    "EMA": (lambda: EMA(decay=0.8, compare=True), {"val/loss", "val/without_ema/loss"}, set()),
    "LRMonitor": (LRMonitor, {"train/lr"}, set()),
    "GradientMonitor": (
        lambda: GradientMonitor(log_every=4, clip_percentile=50),
        {"train/grad_norm_max", "train/grad_norm_p50", "train/grad_norm_largest_parameter"},
        set(),
    ),
    "Throughput": (
        lambda: Throughput(peak_flops=1e9),
        {"train/steps_per_second", "train/tflops_per_second", "train/mfu"},
        {"train/steps_per_second", "train/tflops_per_second", "train/mfu"},
    ),
    "OnlineKNN": (lambda: OnlineKNN(k=5), {"val/online_knn"}, set()),
    # On torch the features are those that the loss was computed of; on JAX they are computed after the step.
    "OnlineLinear": (OnlineLinear, {"val/online_linear"}, {"val/online_linear"}),
    "EarlyStopping": (lambda: EarlyStopping(patience=1, min_delta=10.0), {"val/loss"}, set()),
    "ModelCheckpoint": (lambda: ModelCheckpoint(save_top_k=1, save_dir="kept"), {"val/loss"}, set()),
    "CollapseMonitor": (CollapseMonitor, {"train/loss"}, set()),
    "Profiler": (lambda: Profiler(steps=(2, 3)), {"train/loss"}, set()),
}


def records_with(trainer, names):
    return [record for record in trainer.state.log_history if names & record.keys()]


@pytest.mark.parametrize("name", CALLBACKS)
def test_both_log_the_same(name):
    make, names, differing = CALLBACKS[name]
    callbacks = make(), make()
    mine, theirs = (records_with(run, names) for run in (on_jax(callbacks[0]), on_torch(callbacks[1])))
    assert [record["step"] for record in mine] == [record["step"] for record in theirs]
    assert mine
    for record, other in zip(mine, theirs, strict=True):
        assert names & record.keys() == names & other.keys()
        for key in (names & record.keys()) - differing:
            assert record[key] == pytest.approx(other[key], rel=1e-4), key
    if name == "Throughput":
        assert callbacks[0].flops_per_sample == callbacks[1].flops_per_sample > 0
