"""Any number of rows on any mesh gives the result of one device, with BatchNorm, dropout and accumulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from backend_toys import Noisy, batches, new_state
from hypothesis import given, settings
from hypothesis import strategies as st

from trainformer.backends.jax.compilation import DynamicBatchStep
from trainformer.backends.jax.sharding import data_shards
from trainformer.backends.jax.step import make_eval_step, make_train_step

TX = optax.sgd(0.1)


def mean_loss(model, batch, key):
    """A plain mean over the rows, which knows nothing of padding."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def trained(dims, max_rows, full, last):
    """The result of a full and a smaller batch: outputs, state and evaluation of the smaller one."""
    mesh, state, shardings = new_state(dims, Noisy, TX)
    per_device = max_rows // data_shards(mesh)
    train = DynamicBatchStep(
        lambda n: make_train_step(mean_loss, accumulation=n), mesh, shardings, per_device=per_device, train=True
    )
    evaluate = DynamicBatchStep(
        lambda n: make_eval_step(mean_loss), mesh, shardings, per_device=per_device, train=False
    )
    outputs = []
    for batch in (full, last):
        state, output = train(state, batch)
        outputs.append(output)
    return jax.device_get((outputs, state.params, state.variables, evaluate(state, last)))


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(
    dims=st.sampled_from([(2, 4, 1, 1), (1, 4, 2, 1), (3, 1, 1, 2), (5, 1, 1, 1)]),
    per_device=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    data=st.data(),
)
def test_several_devices_equal_one_for_any_number_of_rows(dims, per_device, accumulation, data):
    max_rows = per_device * dims[0] * dims[1]
    total = max_rows * accumulation
    rows = data.draw(st.integers(2, total), label="rows")
    full, last = *batches(1, rows=total), *batches(1, rows=rows, seed=1)
    several = trained(dims, max_rows, full, last)
    one = trained((1, 1, 1, 1), max_rows, full, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), several, one)


def test_an_odd_batch_keeps_the_statistics_of_all_its_rows(caplog):
    mesh, state, shardings = new_state((1, 8, 1, 1), Noisy, TX)
    step = DynamicBatchStep(
        lambda n: make_train_step(mean_loss, accumulation=n), mesh, shardings, per_device=2, train=True
    )
    evaluate = DynamicBatchStep(lambda n: make_eval_step(mean_loss), mesh, shardings, per_device=2, train=False)
    (batch,) = batches(1, rows=13)
    hidden = batch["x"] @ jax.device_get(state.params["inner"]["kernel"])
    before = jax.device_get(state.variables["norm"])
    state, _ = step(state, batch)
    after = jax.device_get(state.variables["norm"])
    np.testing.assert_allclose(after["var"], 0.99 * before["var"] + 0.01 * hidden.var(0), rtol=1e-5)
    np.testing.assert_allclose(after["mean"], 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    for rows in (16, 13):
        evaluate(state, batches(1, rows=rows)[0])
    assert not caplog.records  # a smaller last evaluation batch is expected
    step(state, jax.tree.map(jnp.asarray, batches(1)[0]))
    assert "Recompiling the train step" in caplog.text
