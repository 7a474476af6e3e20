"""`check()` on JAX: it finds what would go wrong, and leaves everything as it was."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from text_trainer_toys import devices

from trainformer.callbacks import EarlyStopping
from trainformer.core.errors import CheckFailed
from trainformer.core.types import Loss
from trainformer.jax import BaseTrainer, TrainerConfigureFunctionOutput, TrainingArguments

ROWS = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)
DATA = {"x": ROWS, "y": ROWS[:, :2].argmax(-1)}


class Net(nnx.Module):
    def __init__(self, rngs, spare=False):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.gate = nnx.Param(jnp.zeros(()))  # no gradient at first: what it multiplies starts at zero
        self.branch = nnx.Param(jnp.zeros(()))
        self.outer = nnx.Linear(8, 3, rngs=rngs)
        self.spare = nnx.Linear(2, 2, rngs=rngs) if spare else None

    def __call__(self, x):
        x = self.drop(nnx.relu(self.norm(self.inner(x))))
        return self.outer(x * (1 + self.gate[...] * self.branch[...] + self.branch[...]))


class Classifier(BaseTrainer):
    def compute_loss(self, model, batch, key):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]))


def trainer_of(kind=Classifier, model=None, data=DATA, options=None, **fields):
    defaults = {"total_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2, "log": "none", "dtype": "fp32"}
    arguments = TrainingArguments(**{**defaults, "logging_steps": 2, **fields})
    given = {"dataset_train": data, "mesh": devices(), **(options or {})}
    return kind(arguments, model or (lambda rngs: Net(rngs)), **given)


def finding(report, question):
    return next(f for f in report.findings if f.question == question)


def test_a_good_run_passes(capsys):
    report = trainer_of(options={"dataset_eval": DATA}).check()
    assert str(report).splitlines()[0].strip() == "pre-flight check"
    assert "bitwise the same weights" in capsys.readouterr().out
    assert [(f.question, f.status) for f in report.findings] == [
        (question, "ok")
        for question in (
            *("arguments", "data", "forward and backward", "gradients", "save and load", "cost", "recompilation"),
            "evaluation",
        )
    ]
    assert "all 8 trainable parameters" in finding(report, "gradients").message
    # Arguments, results and temporary buffers: more than the weights and the moments of Adam.
    assert report.peak_bytes > 3 * 4 * (4 * 8 + 8 * 3)
    assert report.estimated_seconds == pytest.approx(report.seconds_per_step * 6)


@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (2, 2, 1, 1)])
def test_it_leaves_no_trace(dims, tmp_path, caplog):
    def run(checked):
        trainer = trainer_of(options={"mesh": devices(dims)}, output_dir=str(tmp_path / f"run{checked}"))
        if checked:
            before = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.model_state)]
            drawn = random.getstate(), np.random.get_state()[1].tolist()
            trainer.check()
            after = jax.tree.leaves(trainer.model_state)
            assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
            assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn
            assert not (tmp_path / f"run{checked}").exists()
        state = trainer.train()
        assert "Recompiling" not in caplog.text
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]

    assert run(True) == run(False)


def test_parameters_without_a_gradient_are_named():
    with pytest.raises(CheckFailed, match=r"2 trainable parameters get no gradient: spare/bias, spare/kernel"):
        trainer_of(model=lambda rngs: Net(rngs, spare=True)).check()
    report = trainer_of(model=lambda rngs: Net(rngs, spare=True), frozen_parameters="^spare/").check()
    assert report.ok


def test_losses_and_data_that_cannot_be_trained_on_are_found():
    class NotFinite(Classifier):
        def compute_loss(self, model, batch, key):
            return super().compute_loss(model, batch, key) + jnp.log(-jnp.ones(()))

    class Unsupervised(Classifier):
        def compute_loss(self, model, batch, key):
            return Loss(super().compute_loss(model, batch, key) * 0, jnp.zeros(()))

    class Failing(Classifier):
        def compute_loss(self, model, batch, key):
            return super().compute_loss(model, {"x": batch["z"]}, key)

    for kind, said in ((NotFinite, "loss of the first batch is nan"), (Unsupervised, "nothing in the first batch")):
        assert said in finding(trainer_of(kind).check(raise_on_failure=False), "forward and backward").message
    assert "'z'" in finding(trainer_of(Failing).check(raise_on_failure=False), "forward and backward").message
    broken = {**DATA, "x": np.where(ROWS > 2, np.nan, ROWS).astype(np.float32)}
    broken["x"][:] = np.nan
    assert "not finite" in finding(trainer_of(data=broken).check(raise_on_failure=False), "data").message


def test_a_monitored_metric_that_does_not_exist_is_found():
    options = {"dataset_eval": DATA, "callbacks": [EarlyStopping("val/acuracy")]}
    report = trainer_of(options=options).check(raise_on_failure=False)
    assert "val/acuracy" in finding(report, "evaluation").message
    report = trainer_of(options={"callbacks": [EarlyStopping("val/loss")]}, save_steps=400).check()
    assert {"arguments"} == {f.question for f in report.warnings}
    assert "it will never act" in finding(report, "arguments").message
    assert "save_every='400steps' is longer" in finding(report, "arguments").message


def test_shapes_that_vary_are_a_hazard():
    class Sums(BaseTrainer):
        def compute_loss(self, model, batch, key):
            return jnp.mean((model(batch["x"].sum(1, keepdims=True)) - 1) ** 2)

    samples = [{"x": np.ones(length, np.float32)} for length in (3, 3, 5, 5, 3, 3, 5, 5)]
    trainer = trainer_of(Sums, lambda rngs: nnx.Linear(1, 1, rngs=rngs), samples, total_batch_size=2, shuffle=False)
    found = finding(trainer.check(), "recompilation")
    assert found.status == "warning"
    assert "rows of x have 2 shapes ([3], [5])" in found.message


def test_own_step_functions_and_states_that_are_not_exact():
    class Own(Classifier):
        calls = 0

        def configure_functions(self):
            def loss_of(params, state, batch):
                model = state.merge(params, state.variables, state.key)
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]))

            def train_step(state, batch):
                Own.calls += 1  # state that no checkpoint has
                loss, grads = jax.value_and_grad(loss_of)(state.params, state, batch)
                return state.apply_gradients(grads=jax.tree.map(lambda g: g * Own.calls, grads)), {"loss": loss}

            return TrainerConfigureFunctionOutput(train_step, None)

    report = trainer_of(Own, optimizer="sgd").check(raise_on_failure=False)
    assert "these differ" in finding(report, "save and load").message
    assert [f.question for f in report.failures] == ["save and load"]
