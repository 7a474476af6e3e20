"""The training state: taking modules apart, frozen parameters, random streams."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import INPUTS, TX, Net, Noisy, are_equal, assert_close, batches, plain_loss
from flax import nnx

from trainformer.backends.jax.state import (
    EasyDeLState,
    TrainState,
    combine,
    flat,
    joined,
    partition,
    put_together,
    take_apart,
    variables_of,
)
from trainformer.core.errors import BadArgument

X = batches(1)[0]["x"]


def test_a_module_is_the_same_after_being_taken_apart():
    model = Noisy(nnx.Rngs(0))
    graphdef, params, variables, streams = take_apart(model)
    assert sorted(joined(path) for path, _ in flat(params)) == [
        "inner/kernel", "norm/bias", "norm/scale", "outer/bias", "outer/kernel",
    ]  # fmt: skip
    assert sorted(joined(path) for path, _ in flat(variables)) == ["norm/mean", "norm/var"]
    again = put_together(graphdef, params, variables, streams, jax.random.key(0))
    model.eval(), again.eval()
    assert np.array_equal(model(X), again(X))


def test_a_list_of_layers_keeps_its_places():
    class Listed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Listed(nnx.Rngs(0))
    state = TrainState.create(model, TX)
    assert "layers/10/kernel" in {joined(path) for path, _ in flat(state.params)}
    assert np.array_equal(state.model(jnp.ones((1, 4))), model(jnp.ones((1, 4))))


def test_apply_gradients_is_a_step_of_the_optimizer():
    state = TrainState.create(Net(nnx.Rngs(0)), TX, 1)
    grads = jax.grad(plain_loss)(state.params, batches(1)[0])
    new = state.apply_gradients(grads=grads)
    updates, opt_state = TX.update(grads, TX.init(state.params), state.params)
    assert int(new.step) == 1
    assert are_equal(new.params, optax.apply_updates(state.params, updates))
    assert are_equal(new.opt_state, opt_state)
    assert new.variables == {}
    assert EasyDeLState is TrainState


def test_gradients_may_come_as_nnx_gives_them():
    state = TrainState.create(Net(nnx.Rngs(0)), TX, 1)
    batch = batches(1)[0]
    loss = lambda model: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    grads = nnx.grad(loss)(state.model)
    new = state.apply_gradients(grads=grads)
    assert_close(new.params, state.apply_gradients(grads=grads.to_pure_dict()).params)
    assert float(loss(new.model)) < float(loss(state.model))


def test_frozen_parameters_have_no_moments_and_stay():
    state = TrainState.create(Net(nnx.Rngs(0)), TX, frozen=["inner", "layers/.*"])
    assert state.trainable == ("outer/bias", "outer/kernel")
    assert set(state.opt_state[0].mu) == {"outer"}
    grads = jax.grad(plain_loss)(state.params, batches(1)[0])
    for given in (grads, partition(grads, state.trainable)[0]):
        new = state.apply_gradients(grads=given)
        assert are_equal(new.params["inner"], state.params["inner"])
        assert are_equal(new.params["layers"], state.params["layers"])
        assert not np.array_equal(new.params["outer"]["kernel"], state.params["outer"]["kernel"])


@pytest.mark.parametrize(
    ("frozen", "message"),
    [("iner/kernel", "Did you mean 'inner/kernel'"), (".*", "at least one parameter"), ("a(", "regular expressions")],
)
def test_frozen_patterns_that_cannot_be_are_refused(frozen, message):
    with pytest.raises(BadArgument, match=message):
        TrainState.create(Net(nnx.Rngs(0)), TX, frozen=frozen)


def test_partition_and_combine_undo_each_other():
    params = TrainState.create(Net(nnx.Rngs(0)), TX).params
    first, second = partition(params, ("outer/bias", "layers/kernel"))
    assert {joined(path) for path, _ in flat(first)} == {"outer/bias", "layers/kernel"}
    assert jax.tree.structure(combine(first, second)) == jax.tree.structure(params)
    assert are_equal(combine(first, second), params)


def test_random_streams_begin_anew_from_the_key_given_and_each_for_itself():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    graphdef, params, variables, streams = take_apart(Two(nnx.Rngs(0)))
    draw = lambda seed: put_together(graphdef, params, variables, streams, jax.random.key(seed))(jnp.ones(64))  # noqa: E731
    first, second = draw(1)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, draw(1)[0])
    assert not np.array_equal(first, draw(2)[0])


def test_streams_of_stacked_layers_keep_their_shape():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    make = nnx.vmap(Layer, in_axes=0, out_axes=0)
    model = make(nnx.Rngs(0).fork(split=3))
    graphdef, params, variables, streams = take_apart(model)
    assert [shape for _, shape in streams] == [(3,)]
    again = put_together(graphdef, params, variables, streams, jax.random.key(0))
    keys = jax.random.key_data(again.drop.rngs.key[...])
    assert len({tuple(key) for key in np.array(keys).tolist()}) == 3


def test_what_a_module_notes_on_the_way_is_not_carried():
    class Noting(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(INPUTS, rngs=rngs)

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.norm(x)

    state = TrainState.create(Noting(nnx.Rngs(0)), TX)
    model = state.model
    model(X)
    after = variables_of(model, state.variables)
    assert jax.tree.structure(after) == jax.tree.structure(state.variables)
    assert not are_equal(after, state.variables)


def test_a_seed_an_old_key_and_a_typed_key_are_the_same():
    states = [TrainState.create(Net(nnx.Rngs(0)), TX, rng) for rng in (5, jax.random.PRNGKey(5), jax.random.key(5))]
    assert len({np.array(state.rng).tobytes() for state in states}) == 1


def test_nothing_of_the_backend_imports_torch():
    names = ["mesh", "sharding", "state", "step", "remat", "precision", "placement", "compiling", "orbax_files"]
    lines = [f"import trainformer.backends.jax.{name}" for name in names]
    program = "; ".join([*lines, "import sys", "print([m for m in ('torch', 'transformers') if m in sys.modules])"])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
