"""Guards of a run on JAX: non-finite steps, recompilations, and no device sync between log points."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import assert_close, on_host
from flax import nnx
from jax_toys import (
    MeanTrainer,
    Mlp,
    StepsTrainer,
    by_hand,
    in_order,
    logged,
    losses,
    mean_loss,
    mlp_trainer,
    samples,
)

from trainformer.core.errors import NonFiniteError
from trainformer.jax import TrainerConfigureDataloaderOutput

# -- non-finite ----------------------------------------------------------------------------------------------------


def data_with_inf(step=3, size=8):
    """Data with an infinite value in the batch of one (unshuffled) step."""
    data = samples(48)
    data["x"][(step - 1) * size + 5] = np.inf
    return data


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_a_non_finite_step_raises_and_is_skipped(logging_steps, tmp_path):
    """At the next log point or at the end. The weights do not contain that step."""
    trainer = mlp_trainer(data=data_with_inf(), shuffle=False, num_train_epochs=1, logging_steps=logging_steps)
    with pytest.raises(NonFiniteError, match=r"non-finite at step 3\. That update was skipped"):
        trainer.train()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(on_host(trainer.model_state.params)))
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_no_checkpoint_is_written_after_a_non_finite_step():
    trainer = mlp_trainer(data=data_with_inf(), shuffle=False, logging_steps=100, save_steps=2)
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer.train()
    assert [path.name for path in trainer.run_folder.glob("checkpoints/step_*")] == ["step_00000002"]


def test_non_finite_steps_are_skipped_and_counted(caplog):
    data = data_with_inf()
    batches = [batch for batch in in_order(data, 8, 1) if np.isfinite(batch["x"]).all()]
    _, params = by_hand(Mlp(nnx.Rngs(0)), batches, mean_loss, optax.adam(1e-2))
    options = {"shuffle": False, "num_train_epochs": 1, "scheduler": "constant", "max_grad_norm": None}
    trainer = mlp_trainer(data=data, nonfinite="skip", **options)
    with caplog.at_level(logging.WARNING, "trainformer"):
        state = trainer.train()
    assert_close(state.params, params, atol=1e-6)
    assert int(state.step) == trainer.state.step == 6
    assert logged(trainer, "train/skipped_steps") == [1, 1, 1, 1]
    assert "1 steps with a non-finite loss or gradient were skipped (1 in total)" in caplog.text


def test_user_step_functions_are_checked_too(caplog):
    trainer = mlp_trainer(StepsTrainer, data=data_with_inf(), shuffle=False, logging_steps=100)
    with pytest.raises(NonFiniteError, match=r"non-finite at step 3\. It reached the weights"):
        trainer.train()
    again = mlp_trainer(
        StepsTrainer, data=data_with_inf(), shuffle=False, nonfinite="skip", num_train_epochs=1, output_dir="again"
    )
    with caplog.at_level(logging.WARNING, "trainformer"):
        again.train()
    assert logged(again, "train/skipped_steps")[-1] == 4
    assert "were not skipped, since the step function is the user's" in caplog.text


# -- compilations --------------------------------------------------------------------------------------------------


class LoaderTrainer(MeanTrainer):
    """Returns batches of 8, 8 and 4 rows."""

    def configure_dataloaders(self):
        return TrainerConfigureDataloaderOutput(in_order(samples(20), 8, 1))


def test_recompilations_are_logged_and_counted(caplog):
    wanted, _ = by_hand(Mlp(nnx.Rngs(0)), in_order(samples(20), 8, 2), mean_loss, optax.adam(1e-2))
    trainer = mlp_trainer(LoaderTrainer, scheduler="constant", max_grad_norm=None)
    with caplog.at_level(logging.WARNING, "trainformer"):
        trainer.train()
    np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-5)
    assert logged(trainer, "train/recompilations") == [0, 0, 1, 1, 1, 1]
    assert caplog.text.count("Recompiling the train step (compilation 2)") == 1
    assert "[8, 6]" in caplog.text
    assert "[4, 6]" in caplog.text


# -- device syncs --------------------------------------------------------------------------------------------------


def _on_device(tree):
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


class DeviceReads:
    """Counts reads of device arrays from the second step to the last but one."""

    def __init__(self, monkeypatch, last):
        self.last, self.count, self.is_counting = last, 0, False
        kind = type(jnp.zeros(()))
        names = ("__array__", "__float__", "__int__", "__bool__", "item", "tolist", "block_until_ready")
        for place, name in (*((kind, name) for name in names), (jax, "device_get"), (jax, "block_until_ready")):
            monkeypatch.setattr(place, name, self.counted(getattr(place, name)))
        for name in ("asarray", "array"):  # NumPy reads CPU buffers directly
            monkeypatch.setattr(np, name, self.counted(getattr(np, name)))

    def counted(self, really):
        def call(*args, **kwargs):
            # NumPy reads host arrays (batches, shapes) all the time.
            self.count += self.is_counting and _on_device(args[0])
            return really(*args, **kwargs)

        return call

    def on_step_begin(self, trainer, step):
        if step == 1:
            self.is_counting = True

    def on_step_end(self, trainer, step, loss):
        if step == self.last - 1:
            self.is_counting = False


class Reading(MeanTrainer):
    def on_step_end(self, state, metrics, *args):
        float(metrics["loss"])


@pytest.mark.parametrize("kind", [MeanTrainer, StepsTrainer])
def test_there_is_no_device_sync_between_log_points(monkeypatch, kind):
    reads = DeviceReads(monkeypatch, last=12)
    trainer = mlp_trainer(kind, callbacks=[reads], max_steps=12, logging_steps=1000)
    trainer.train()
    assert [record["step"] for record in trainer.state.log_history] == [1, 12]
    assert reads.count == 0


def test_a_hook_that_reads_is_detected(monkeypatch):
    """The test above can fail."""
    reads = DeviceReads(monkeypatch, last=12)
    mlp_trainer(Reading, callbacks=[reads], max_steps=12, logging_steps=1000).train()
    assert reads.count >= 10
