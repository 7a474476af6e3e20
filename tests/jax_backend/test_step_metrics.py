"""Packed step metrics; batches for a jitted step stay on the host until it is called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_toys import MeanTrainer, losses, mesh_on, mlp_trainer, samples

from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.step_metrics import (
    PACKED,
    PackedScalar,
    pack_metrics,
    read_scalars,
    sum_scalars,
    unpack_metrics,
)
from trainformer.core.types import HostBatch
from trainformer.jax import TrainerConfigureDataloaderOutput


def toy_step(state, batch):
    x = batch["x"]
    metrics = {"z": (x.sum() * 2, 4.0), "a": (x.max(), 2.0)}
    return state + 1, {"loss": (x.sum(), 3.0), "metrics": metrics, "grad_norm": x[0], "finite": jnp.isfinite(x[0])}


@pytest.fixture
def output():
    state, output = jax.jit(pack_metrics(toy_step))(0, {"x": jnp.array([5.0, 1.0])})
    assert state == 1
    return output


def test_the_packed_array_has_the_values_of_the_scalars(output):
    finite, norm, pairs = unpack_metrics(output)
    assert all(isinstance(scalar, PackedScalar) for scalar in (finite, norm, *pairs["a"]))
    assert {name: tuple(read_scalars(pair)) for name, pair in pairs.items()} == {
        "loss": (6.0, 3.0),
        "a": (5.0, 2.0),
        "z": (12.0, 4.0),
    }
    assert read_scalars([finite, norm, 7, jnp.float32(0.5), norm]) == [1.0, 5.0, 7.0, 0.5, 5.0]
    without = {name: value for name, value in output.items() if name != PACKED}
    plain = unpack_metrics(without)
    assert read_scalars([*plain[:2], *plain[2]["z"]]) == [1.0, 5.0, 12.0, 4.0]


def test_many_arrays_are_stacked_for_one_transfer():
    arrays = [jnp.array([number, 2.0 * number]) for number in range(71)]
    packed = [PackedScalar(array, position) for array in arrays for position in (0, 1)]
    others = [jnp.float32(100 + number) for number in range(40)]
    expected = [float(value) for number in range(71) for value in (number, 2 * number)]
    assert read_scalars([*packed, *others, 0.25]) == [*expected, *map(float, range(100, 140)), 0.25]


def test_the_finite_flag_is_packed():
    _, output = jax.jit(pack_metrics(toy_step))(0, {"x": jnp.array([jnp.nan, 1.0])})
    assert read_scalars(unpack_metrics(output)[:1]) == [0.0]


def test_packed_and_plain_scalars_are_summed_on_the_device(output):
    _, norm, pairs = unpack_metrics(output)
    assert float(sum_scalars([norm, norm, pairs["z"][0], jnp.float32(1.5), 2])) == 5 + 5 + 12 + 1.5 + 2
    assert float(norm * 3) == 15.0


def test_sums_of_more_scalars_than_fit_into_one_stack():
    arrays = [jnp.array([number, 2.0 * number]) for number in range(71)]
    packed = [PackedScalar(array, position) for array in arrays for position in (0, 1)]
    assert float(sum_scalars([*packed, *range(71)])) == 4 * sum(range(71))
    assert float(sum_scalars([1] * 100)) == 100.0


def test_a_batch_for_a_jitted_step_stays_on_the_host_and_none_is_prefetched():
    taken = []

    def source():
        for number in range(3):
            taken.append(number)
            yield HostBatch({"x": np.full((8, 2), number)}, 8)

    placer = Placer(mesh_on((1, 4, 1, 1)), keep_on_host=True)
    first = next(placer.feed(source()))
    assert isinstance(first.data["x"], np.ndarray)
    assert taken == [0]
    assert placer.pending == 0


def test_a_loader_may_reuse_one_buffer_for_all_batches():
    whole = samples(16)

    class ReusedBuffer:
        def __iter__(self):
            buffer = {name: np.empty_like(column[:8]) for name, column in whole.items()}
            for start in (0, 8):
                for name, column in whole.items():
                    buffer[name][...] = column[start : start + 8]
                yield buffer

    class BufferTrainer(MeanTrainer):
        def configure_dataloaders(self):
            return TrainerConfigureDataloaderOutput(ReusedBuffer(), None, 2)

    trainer = mlp_trainer(BufferTrainer, data=whole)
    trainer.train()
    reference = mlp_trainer(data=whole, shuffle=False, max_steps=2, output_dir="plain")
    reference.train()
    np.testing.assert_allclose(losses(trainer), losses(reference), rtol=1e-6)
