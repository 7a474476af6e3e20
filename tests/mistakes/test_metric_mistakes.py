"""What `eval_step`, `on_eval_end`, `derive_metrics` and callbacks return; an evaluation that fails loses nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mistake_table import build, fit, row, text_for

from toys import MeanTask, classes, same, weights
from trainformer import TaskBase, Trainer
from trainformer.core import BadArgument, CheckFailed

loss_of = MeanTask.train_step


def task(**members):
    """A task with these methods or class attributes."""
    return type("Own", (MeanTask,), members)()


def evaluating(step=None, **members):
    """The metrics of one evaluation after an epoch."""
    members |= {"eval_step": step} if step is not None else {}
    trainer = fit(task(**members), val_split=0.25, epochs=1)
    return trainer.evaluate()


def rows(self, batch):
    return {"logits": self.model(batch[0])}


def with_loss(**more):
    return lambda self, batch: {"loss": loss_of(self, batch), **more}


def checked(**members):
    return build(task(**members), val_split=0.25).check()


METRICS = [
    row(
        "derive_metrics returns a tensor",
        lambda: evaluating(derive_metrics=lambda s, m: {"x": torch.tensor(2.0)})["val/x"] == 2,
        "works",
    ),
    row(
        "derive_metrics returns a number of NumPy",
        lambda: evaluating(derive_metrics=lambda s, m: {"x": np.float32(2), "y": np.ones(1)})["val/x"] == 2,
        "works",
    ),
    row("derive_metrics returns nothing", lambda: evaluating(derive_metrics=lambda s, m: None), "works"),
    row(
        "derive_metrics returns a vector",
        lambda: evaluating(derive_metrics=lambda s, m: {"x": torch.ones(3)}),
        BadArgument,
        "Own.derive_metrics to return a number as 'x'",
        "shape (3,)",
        "step_00000006 has what was trained so far",
    ),
    row(
        "derive_metrics returns a word",
        lambda: evaluating(derive_metrics=lambda s, m: {"x": "high"}),
        BadArgument,
        "'str'",
    ),
    row(
        "check() of derive_metrics",
        lambda: checked(derive_metrics=lambda s, m: {"x": "high"}),
        CheckFailed,
        "evaluation",
        "a number as 'x'",
    ),
    row(
        "on_eval_end returns rows",
        lambda: evaluating(rows, on_eval_end=lambda s, r: r),
        BadArgument,
        "Own.on_eval_end to return a number as 'logits'",
        "shape (16, 3)",
    ),
    row(
        "on_eval_end returns a number",
        lambda: evaluating(rows, on_eval_end=lambda s, r: 0.5),
        BadArgument,
        "a dict of metrics",
    ),
    row("on_eval_end returns nothing", lambda: evaluating(rows, on_eval_end=lambda s, r: None), "warns", "no metrics"),
    row(
        "eval_step returns a list",
        lambda: evaluating(lambda s, b: [1.0]),
        BadArgument,
        "a dict of metrics by name",
        "'list'",
    ),
    row(
        "eval_step returns a tensor", lambda: evaluating(loss_of), BadArgument, "a dict of metrics by name", "'Tensor'"
    ),
    row("eval_step returns nothing", lambda: evaluating(lambda s, b: None), BadArgument, "lack a return"),
    row("eval_step returns nothing to average", lambda: evaluating(lambda s, b: {}), "warns", "no metrics"),
    row("eval_step returns arrays of NumPy", lambda: evaluating(with_loss(x=np.float64(2)))["val/x"] == 2, "works"),
    row(
        "eval_step returns a word",
        lambda: evaluating(with_loss(x="high")),
        BadArgument,
        "metric 'x' to be a scalar",
        "'str'",
    ),
    row(
        "eval_step returns too few rows", lambda: evaluating(with_loss(x=torch.ones(3))), BadArgument, "8 rows", "(3,)"
    ),
    row(
        "a number as the name of a metric",
        lambda: evaluating(lambda s, b: {1: loss_of(s, b)}),
        BadArgument,
        "the key 1",
    ),
    row(
        "two names of one metric",
        lambda: evaluating(with_loss(**{"val/loss": 1.0})),
        BadArgument,
        "'loss' and 'val/loss'",
    ),
    row(
        "a name of 300 characters", lambda: evaluating(with_loss(**{"x" * 300: 1.0}))["val/" + "x" * 300] == 1, "works"
    ),
    row("nothing to predict", lambda: fit().predict(classes()), BadArgument, "has no predict_step"),
]


@pytest.mark.parametrize("mistake", METRICS)
def test_mistake(mistake, caplog):
    text = text_for(mistake, caplog)
    assert [words for words in mistake.words if words not in text] == [], text


# -- nothing is lost ---------------------------------------------------------------------------------------


class Broken(TaskBase, MeanTask):
    """Its second evaluation fails."""

    works = False
    evaluations = 0

    def derive_metrics(self, metrics):
        self.evaluations += 1
        return {"x": 1.0 if self.works or self.evaluations < 2 else "broken"}


def trainer_of(broken, folder):
    return Trainer(
        broken, classes(), val_split=0.25, epochs=4, batch_size=8, log="none", run_dir=folder, save_every=None
    )


def evaluations_in(folder):
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["val/loss"]) for record in records if "val/loss" in record]


def test_a_failed_evaluation_loses_nothing():
    whole = Broken()
    whole.works = True
    trainer_of(whole, "whole").fit()
    broken = Broken()
    with pytest.raises(BadArgument, match="a number as 'x'"):
        trainer_of(broken, "cut").fit()
    assert sorted(path.name for path in Path("cut/checkpoints").glob("step_*"))[-1] == "step_00000012"
    mended = Broken()
    mended.works = True
    resumed = trainer_of(mended, "cut")
    resumed.fit()
    assert resumed.state.step == 24
    assert same(weights(whole), weights(mended))
    assert evaluations_in("cut") == evaluations_in("whole")
