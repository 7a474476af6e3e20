"""How often a step is compiled, and what is said when it is again."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import INPUTS, new_state, put

from trainformer.backends.jax.compiling import Compilations
from trainformer.backends.jax.step import jit_train_step, make_train_step
from trainformer.core.errors import BadArgument


def simple_loss(model, batch, key):
    return jnp.mean(model(batch["x"]) ** 2)


@pytest.fixture(scope="module")
def begun():
    mesh, state, shardings = new_state(tx=optax.sgd(0.1))
    step = jit_train_step(make_train_step(simple_loss), mesh, shardings)
    state, _ = step(state, put(mesh, rows(8)))
    return mesh, step, state


def rows(n, dtype=np.float32, **more):
    return {"x": np.ones((n, INPUTS), dtype), **more}


def test_steps_of_one_kind_are_compiled_once_and_others_are_named(begun, caplog):
    mesh, step, state = begun
    for _ in range(3):
        state, _ = step(state, put(mesh, rows(8)))
    assert step.compilations.count == 1
    assert not caplog.records
    said = []
    for batch in (rows(4), rows(4, jnp.bfloat16), rows(8, y=np.ones(8)), rows(4), rows(8)):
        state, _ = step(state, put(mesh, batch))
        said += [record.getMessage() for record in caplog.records]
        caplog.clear()
    assert step.compilations.count == 4  # the last two kinds were there before
    assert len(said) == 3
    assert (
        said[0]
        == f"The train step is compiled again (number 2): x was float32[8, {INPUTS}] and is float32[4, {INPUTS}]."
    )
    assert f"x was float32[4, {INPUTS}] and is bfloat16[4, {INPUTS}]" in said[1]  # compared with the nearest
    assert said[2].endswith("y is new.")
    state, _ = step(state.replace(tx=optax.sgd(0.1)), put(mesh, rows(8)))
    assert "the optimizer is another object" in caplog.records[-1].getMessage()
    with pytest.raises(BadArgument, match="a state with 7 arrays"):
        step(state.replace(opt_state=(), variables={"more": jnp.ones(1)}, tx=optax.sgd(0.1)), put(mesh, rows(8)))


def test_a_number_of_python_in_place_of_an_array_is_named(caplog):
    compilations = Compilations("step")
    step = jax.jit(compilations.watch(lambda state, batch: batch["x"].sum() * state["step"]))
    step({"step": jnp.zeros((), jnp.int32)}, rows(2))
    step({"step": 3}, rows(2))
    assert compilations.count == 2
    assert "step was int32[]" in caplog.records[-1].getMessage()
    assert "of a Python number" in caplog.records[-1].getMessage()


def test_a_function_that_is_jitted_already_can_be_watched(caplog):
    compilations = Compilations("train step")
    inner = jax.jit(lambda state, batch: (state, batch["x"].sum()))
    step = jax.jit(compilations.watch(inner))
    for n in (2, 2, 3):
        step({}, rows(n))
    assert compilations.count == 2
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_compiled_programs_are_kept_on_disk_for_the_next_process(tmp_path):
    folder = tmp_path / "cache"
    program = (
        "import sys, jax, jax.numpy as jnp\n"
        "from trainformer.backends.jax.compiling import enable_compilation_cache\n"
        f"enable_compilation_cache({str(folder)!r}, least_seconds=0.0)\n"
        "jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((8, 8))).block_until_ready()\n"
    )
    environment = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "true", "PATH": ""}
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
        found.append({path.name for path in folder.iterdir() if path.name.endswith("-cache")})
    assert found[0]
    assert found[1] == found[0]  # the second process compiled nothing new
