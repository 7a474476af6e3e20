"""One array per step says what its scalars say; batches for a jitted step stay on the host until it is called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_toys import MeanTrainer, losses, mesh_on, mlp_trainer, samples

from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.step_metrics import TOLD, Part, added_up, read_parts, telling, told_by
from trainformer.core.types import HostBatch
from trainformer.jax import TrainerConfigureDataloaderOutput


def toy_step(state, batch):
    x = batch["x"]
    metrics = {"z": (x.sum() * 2, 4.0), "a": (x.max(), 2.0)}
    return state + 1, {"loss": (x.sum(), 3.0), "metrics": metrics, "grad_norm": x[0], "finite": jnp.isfinite(x[0])}


@pytest.fixture
def output():
    state, output = jax.jit(telling(toy_step))(0, {"x": jnp.array([5.0, 1.0])})
    assert state == 1
    return output


def test_the_array_says_what_the_scalars_say(output):
    finite, norm, pairs = told_by(output)
    assert all(isinstance(part, Part) for part in (finite, norm, *pairs["a"]))
    assert {name: tuple(read_parts(pair)) for name, pair in pairs.items()} == {
        "loss": (6.0, 3.0),
        "a": (5.0, 2.0),
        "z": (12.0, 4.0),
    }
    assert read_parts([finite, norm, 7, jnp.float32(0.5), norm]) == [1.0, 5.0, 7.0, 0.5, 5.0]
    without = {name: value for name, value in output.items() if name != TOLD}
    plain = told_by(without)
    assert read_parts([*plain[:2], *plain[2]["z"]]) == [1.0, 5.0, 12.0, 4.0]


def test_many_arrays_are_read_as_one_and_each_has_its_own_values():
    arrays = [jnp.array([number, 2.0 * number]) for number in range(71)]
    parts = [Part(array, place) for array in arrays for place in (0, 1)]
    others = [jnp.float32(100 + number) for number in range(40)]
    expected = [float(value) for number in range(71) for value in (number, 2 * number)]
    assert read_parts([*parts, *others, 0.25]) == [*expected, *map(float, range(100, 140)), 0.25]


def test_a_step_that_was_not_finite_is_told():
    _, output = jax.jit(telling(toy_step))(0, {"x": jnp.array([jnp.nan, 1.0])})
    assert read_parts(told_by(output)[:1]) == [0.0]


def test_parts_and_scalars_add_up_on_the_device(output):
    _, norm, pairs = told_by(output)
    assert float(added_up([norm, norm, pairs["z"][0], jnp.float32(1.5), 2])) == 5 + 5 + 12 + 1.5 + 2
    assert float(norm * 3) == 15.0


def test_a_batch_for_a_jitted_step_stays_on_the_host_and_none_is_taken_ahead():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield HostBatch({"x": np.full((8, 2), number)}, 8)

    placer = Placer(mesh_on((1, 4, 1, 1)), on_host=True)
    first = next(placer.feed(source()))
    assert isinstance(first.data["x"], np.ndarray)
    assert taken == [0]
    assert placer.waiting == 0


def test_data_that_fill_one_buffer_again_and_again_are_trained_on_as_they_were_given():
    """As readers do that save memory: what was trained on is what the buffer held then."""
    whole = samples(16)

    class Refilled:
        def __iter__(self):
            buffer = {name: np.empty_like(column[:8]) for name, column in whole.items()}
            for start in (0, 8):
                for name, column in whole.items():
                    buffer[name][...] = column[start : start + 8]
                yield buffer

    class RefillTrainer(MeanTrainer):
        def configure_dataloaders(self):
            return TrainerConfigureDataloaderOutput(Refilled(), None, 2)

    trainer = mlp_trainer(RefillTrainer, data=whole)
    trainer.train()
    reference = mlp_trainer(data=whole, shuffle=False, max_steps=2, output_dir="plain")
    reference.train()
    np.testing.assert_allclose(losses(trainer), losses(reference), rtol=1e-6)
