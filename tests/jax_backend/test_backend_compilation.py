"""Counting compilations of a step and explaining recompilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import INPUTS, new_state, put

from trainformer.backends.jax.compilation import Compilations, JittedStep
from trainformer.backends.jax.step import make_train_step
from trainformer.core.errors import BadArgument


def simple_loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2)


@pytest.fixture(scope="module")
def started():
    mesh, state, shardings = new_state(tx=optax.sgd(0.1))
    step = JittedStep(make_train_step(simple_loss), mesh, shardings, train=True)
    state, _ = step(state, put(mesh, rows(8)))
    return mesh, step, state


def rows(n, dtype=np.float32, **more):
    return {"x": np.ones((n, INPUTS), dtype), **more}


def test_equal_steps_are_compiled_once_and_recompilations_are_explained(started, caplog):
    mesh, step, state = started
    for _ in range(3):
        state, _ = step(state, put(mesh, rows(8)))
    assert step.compilations.count == 1
    assert not caplog.records
    messages = []
    for batch in (rows(4), rows(4, jnp.bfloat16), rows(8, y=np.ones(8)), rows(4), rows(8)):
        state, _ = step(state, put(mesh, batch))
        messages += [record.getMessage() for record in caplog.records]
        caplog.clear()
    assert step.compilations.count == 4  # the last two were compiled before
    assert len(messages) == 3
    change = f"x changed from float32[8, {INPUTS}] to float32[4, {INPUTS}]"
    assert messages[0] == f"Recompiling the train step (compilation 2): {change}."
    assert f"x changed from float32[4, {INPUTS}] to bfloat16[4, {INPUTS}]" in messages[1]  # the most similar one
    assert messages[2].endswith("y is new.")
    state, _ = step(state.replace(tx=optax.sgd(0.1)), put(mesh, rows(8)))
    assert "the optimizer is a different object" in caplog.records[-1].getMessage()
    with pytest.raises(BadArgument, match="a state with 7 arrays"):
        step(state.replace(opt_state=(), variables={"more": jnp.ones(1)}, tx=optax.sgd(0.1)), put(mesh, rows(8)))


def test_a_python_number_instead_of_an_array_is_reported(caplog):
    compilations = Compilations("step")
    step = jax.jit(compilations.count_traces(lambda state, batch: batch["x"].sum() * state["step"]))
    step({"step": jnp.zeros((), jnp.int32)}, rows(2))
    step({"step": 3}, rows(2))
    assert compilations.count == 2
    assert "step changed from int32[]" in caplog.records[-1].getMessage()
    assert "a Python number" in caplog.records[-1].getMessage()


def test_a_jitted_function_can_be_counted(caplog):
    compilations = Compilations("train step")
    inner = jax.jit(lambda state, batch: (state, batch["x"].sum()))
    step = jax.jit(compilations.count_traces(inner))
    for n in (2, 2, 3):
        step({}, rows(n))
    assert compilations.count == 2
    assert len(caplog.records) == 1
