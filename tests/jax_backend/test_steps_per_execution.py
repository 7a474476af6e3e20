"""Steps that are executed together give the results of single steps, whoever looks at them in between."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_toys import (
    CLASSES,
    INPUTS,
    MeanTrainer,
    Mlp,
    StepsTrainer,
    TokenTrainer,
    llama,
    logged,
    losses,
    mesh_on,
    mlp_trainer,
    samples,
    texts,
)

from trainformer.backends.jax.step_metrics import (
    PackedScalar,
    QueuedArray,
    QueuedSteps,
    read_scalars,
    start_reading,
    sum_scalars,
)
from trainformer.callbacks import EMA, Callback, GradientMonitor
from trainformer.core.errors import BadArgument, NonFiniteError
from trainformer.jax import SFTConfig
from trainformer.run import run_of


class Normed(nnx.Module):
    """With batch statistics and dropout."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(INPUTS, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


def trained(together, kind=MeanTrainer, **options):
    """A trained trainer and its state on the host."""
    trainer = mlp_trainer(kind, steps_per_execution=together, resume=None, **options)
    return trainer, jax.device_get(trainer.train())


def leaves(state):
    return jax.tree.leaves((state.step, state.params, state.variables, state.opt_state))


def assert_same(one, other, **tolerance):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize(
    ("dims", "devices", "accumulation"), [((1, 1, 1, 1), 1, 1), ((1, 4, 1, 1), 4, 3), ((2, 1, 2, 1), 4, 1)]
)
def test_results_do_not_depend_on_the_grouping(dims, devices, accumulation):
    """37 rows in batches of 12: the last batch of an epoch has one row, which divides over nothing."""
    options = {
        "model": Normed(nnx.Rngs(0)), "data": samples(37), "mesh": mesh_on(dims, devices), "num_train_epochs": 4,
        "total_batch_size": 12, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    single, expected = trained(1, **options, logging_steps=5)
    three, found = trained(3, **options, logging_steps=5)
    eight, other = trained(8, **options, logging_steps=7)
    assert int(expected.step) == 16
    assert_same(found, other)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)
    assert losses(three) == pytest.approx(losses(single), rel=1e-5)
    assert logged(three, "train/grad_norm") == pytest.approx(logged(single, "train/grad_norm"), rel=1e-4)
    assert eight.train_step_fn.loop_compilations.count == 2  # 12 rows and one row
    assert float(eight.grad_norm) == pytest.approx(float(single.grad_norm), rel=1e-4)


def test_a_language_model_on_a_mesh():
    options = {"model": llama(nnx.Rngs(0)), "data": texts(), "mesh": mesh_on((1, 2, 2, 1)), "kind": TokenTrainer}
    options |= {"gradient_checkpointing": "dots_saveable", "logging_steps": 4}
    single, expected = trained(1, **options)
    together, found = trained(4, **options)
    assert_same(found, expected, rtol=1e-4, atol=1e-5)
    assert losses(together) == pytest.approx(losses(single), rel=1e-5)


class Fail(Callback):
    """Saves after step 6 and fails after step 7: in the middle of an execution each."""

    def on_step_end(self, trainer, step, loss):
        trainer.control.should_save |= step == 6
        if step == 7:
            raise RuntimeError("enough")


def test_a_run_that_failed_between_executions_resumes_bitwise():
    options = {"steps_per_execution": 4, "max_steps": 11, "save_steps": 10, "logging_steps": 3}
    expected = mlp_trainer(output_dir="whole", **options).train()
    with pytest.raises(RuntimeError, match="enough"):
        mlp_trainer(output_dir="halves", callbacks=[Fail()], **options).train()
    again = mlp_trainer(output_dir="halves", **options)
    assert_same(*jax.device_get((again.train(), expected)))
    assert again.state.log_history[-1]["step"] == 11
    assert json.loads(Path("halves/checkpoints/step_00000006/manifest.json").read_text())["step"] == 6


class Reads(Callback):
    """Reads what is on the devices, at some steps."""

    def __init__(self):
        self.found = {}

    def on_step_end(self, trainer, step, loss):
        if step in (2, 3, 7):
            kernel = np.asarray(trainer.model_state.params["inner"]["kernel"])
            self.found[step] = float(loss), float(trainer.grad_norm), int(trainer.model_state.step), kernel


def test_callbacks_see_the_state_of_their_step():
    once, many = Reads(), Reads()
    trained(1, callbacks=[once])
    trained(4, callbacks=[many], logging_steps=100)
    assert list(many.found) == [2, 3, 7]
    for step, (loss, norm, count, kernel) in many.found.items():
        assert count == step
        assert (loss, norm) == pytest.approx(once.found[step][:2], rel=1e-5)
        np.testing.assert_allclose(kernel, once.found[step][3], rtol=1e-5, atol=1e-6)


def test_averages_and_gradient_norms(caplog):
    """They look at every step, so that none waits. That is said."""
    caplog.set_level(logging.INFO, "trainformer")
    found = {}
    for together in (1, 4):
        average = EMA(decay=0.9)
        trained(together, callbacks=[average], num_train_epochs=10)
        found[together] = jax.device_get(average.state_dict())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[1], found[4])
    assert "steps_per_execution=4 has no effect" in caplog.text
    caplog.clear()
    single, together = (
        trained(n, callbacks=[GradientMonitor(log_every=8)], num_train_epochs=10, logging_steps=8)[0] for n in (1, 4)
    )
    for name in ("train/grad_norm_max", "train/grad_norm_p99", "train/grad_norm_largest_parameter"):
        assert len(logged(single, name)) == 5
        assert logged(together, name) == pytest.approx(logged(single, name), rel=1e-4)
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_the_step_that_is_not_finite_is_named(nonfinite):
    data = samples(64)
    data["x"][data["index"] == 41] = np.nan
    options = {"data": data, "shuffle": False, "num_train_epochs": 1, "nonfinite": nonfinite, "logging_steps": 100}
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="at step 6"):
            trained(4, **options)
        return
    _, expected = trained(1, **options)
    trainer, found = trained(4, **options)
    assert logged(trainer, "train/skipped_steps") == [1]
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


class Hooked(MeanTrainer):
    def on_step_end(self, state, metrics, *args, **kwargs):
        return None


@pytest.mark.parametrize(
    ("kind", "received"),
    [(Hooked, "the hook on_step_end of Hooked"), (StepsTrainer, "a train_step_fn of your own")],
)
def test_what_needs_single_steps_is_refused(kind, received):
    with pytest.raises(BadArgument, match=rf"Expected steps_per_execution=1, received '?4 with {received}"):
        mlp_trainer(kind, steps_per_execution=4).train()


@pytest.mark.parametrize("value", [0, 1.5, "many"])
def test_other_values_are_refused(value):
    with pytest.raises(BadArgument, match="steps_per_execution to be an integer of at least 1"):
        SFTConfig(steps_per_execution=value)


def test_finite_flags_that_are_read_without_a_log_record():
    """That happens every 512 steps, here while two of them wait."""
    options = {"max_steps": 520, "logging_steps": 1000}
    assert_same(trained(10, **options)[1], trained(1, **options)[1], rtol=1e-5, atol=1e-6)


class ReadsInAThread(Callback):
    def __init__(self):
        self.found = []
        self.executor = ThreadPoolExecutor(1)

    def on_step_end(self, trainer, step, loss):
        if step % 3 == 0:
            self.found.append(self.executor.submit(float, loss))


def test_losses_may_be_read_in_another_thread():
    single, together = ReadsInAThread(), ReadsInAThread()
    _, expected = trained(1, callbacks=[single], max_steps=300, logging_steps=100)
    _, found = trained(10, callbacks=[together], max_steps=300, logging_steps=100)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)
    losses = [[future.result() for future in callback.found] for callback in (single, together)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class ScaledTrainer(MeanTrainer):
    def compute_loss(self, model, batch, key):
        return super().compute_loss(model, batch, key) * batch["scale"]


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_batches_with_scalars_and_device_arrays(together, convert):
    def collate(rows):
        columns = {name: np.stack([row[name] for row in rows]) for name in ("x", "y")}
        return {name: convert(column) for name, column in {**columns, "scale": np.float64(len(rows) / 8)}.items()}

    rows = [dict(zip("xy", row, strict=True)) for row in zip(*[samples(29)[name] for name in "xy"], strict=True)]
    options = {"data": rows, "num_train_epochs": 3, "data_collator": collate, "gradient_accumulation_steps": 2}
    _, found = trained(together, ScaledTrainer, mesh=mesh_on((1, 4, 1, 1)), **options)
    _, expected = trained(1, ScaledTrainer, **options)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


def test_a_check_is_no_recompilation(caplog):
    trainer = mlp_trainer(steps_per_execution=4)
    trainer.check()
    trainer.train()
    assert "Recompiling" not in caplog.text
    assert set(logged(trainer, "train/recompilations")) == {0}


# -- scalars of steps that wait --------------------------------------------------------------------------------------


def queued(rows=3):
    """Steps whose packed arrays are [10 row, 10 row + 1], and the scalars of all of them."""
    executions = []

    def execute():
        executions.append(1)
        steps.arrays = {"packed": jnp.arange(2.0) + 10 * jnp.arange(rows)[:, None]}

    steps = QueuedSteps(execute)
    scalars = [PackedScalar(QueuedArray(steps, "packed", row), position) for row in range(rows) for position in (0, 1)]
    return steps, scalars, executions


def test_reading_executes_the_steps_and_polling_does_not():
    steps, scalars, executions = queued()
    poll = start_reading([*scalars, 5])
    assert poll() is None
    assert not executions
    assert read_scalars([scalars[3], 7, scalars[0]]) == [11.0, 7.0, 0.0]
    assert executions == [1]
    jax.block_until_ready(steps["packed"])
    assert poll() == [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 5.0]
    assert float(scalars[5] * 2) == 42.0


def test_sums_of_many_executions():
    groups = [queued(2) for _ in range(40)]
    columns = [scalar for _, scalars, _ in groups for scalar in scalars[1::2]]
    assert float(sum_scalars([*columns, 3])) == 40 * (1 + 11) + 3


def test_steps_that_failed_have_no_values():
    scalar = PackedScalar(QueuedArray(QueuedSteps(lambda: None), "packed", 0), 0)
    with pytest.raises(RuntimeError, match="an earlier one has failed"):
        read_scalars([scalar])


def test_no_loop_is_compiled_without_the_argument():
    trainer = mlp_trainer(model=Mlp(nnx.Rngs(0)))
    trainer.train()
    assert not trainer.train_step_fn._loops
    assert run_of(trainer).backend._queue is None
