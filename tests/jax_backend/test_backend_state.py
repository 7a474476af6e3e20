"""The train state: splitting modules, frozen parameters, RNG streams."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import INPUTS, TX, Net, Noisy, are_equal, assert_close, batches, plain_loss
from flax import nnx
from flax.traverse_util import flatten_dict

from trainformer.backends.jax.state import (
    EasyDeLState,
    TrainState,
    combine,
    merge_model,
    partition,
    split_model,
    variables_after,
)
from trainformer.core.errors import BadArgument

X = batches(1)[0]["x"]


def paths(tree):
    return {"/".join(map(str, path)) for path in flatten_dict(tree)}


def test_split_and_merge_give_the_same_module():
    model = Noisy(nnx.Rngs(0))
    graphdef, params, variables, streams = split_model(model)
    assert sorted(paths(params)) == [
        "inner/kernel", "norm/bias", "norm/scale", "outer/bias", "outer/kernel",
    ]  # fmt: skip
    assert sorted(paths(variables)) == ["norm/mean", "norm/var"]
    again = merge_model(graphdef, params, variables, streams, jax.random.key(0))
    model.eval(), again.eval()
    assert np.array_equal(model(X), again(X))


def test_a_list_of_layers_keeps_its_order():
    class Listed(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Listed(nnx.Rngs(0))
    state = TrainState.create(model, TX)
    assert "layers/10/kernel" in paths(state.params)
    assert np.array_equal(state.model(jnp.ones((1, 4))), model(jnp.ones((1, 4))))


def test_apply_gradients_is_one_optax_update():
    state = TrainState.create(Net(nnx.Rngs(0)), TX, 1)
    grads = jax.grad(plain_loss)(state.params, batches(1)[0])
    new = state.apply_gradients(grads=grads)
    updates, opt_state = TX.update(grads, TX.init(state.params), state.params)
    assert int(new.step) == 1
    assert are_equal(new.params, optax.apply_updates(state.params, updates))
    assert are_equal(new.opt_state, opt_state)
    assert new.variables == {}
    assert EasyDeLState is TrainState


def test_apply_gradients_accepts_an_nnx_state():
    state = TrainState.create(Net(nnx.Rngs(0)), TX, 1)
    batch = batches(1)[0]
    loss = lambda model: jnp.mean(model(batch["x"]) ** 2)  # noqa: E731
    grads = nnx.grad(loss)(state.model)
    new = state.apply_gradients(grads=grads)
    assert_close(new.params, state.apply_gradients(grads=grads.to_pure_dict()).params)
    assert float(loss(new.model)) < float(loss(state.model))


def test_frozen_parameters_have_no_moments_and_do_not_change():
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
    [
        ("iner/kernel", "Did you mean 'inner/kernel'"),
        (".*", "at least one trainable parameter"),
        ("a(", "regular expressions"),
    ],
)
def test_invalid_frozen_patterns_are_refused(frozen, message):
    with pytest.raises(BadArgument, match=message):
        TrainState.create(Net(nnx.Rngs(0)), TX, frozen=frozen)


def test_combine_is_the_inverse_of_partition():
    params = TrainState.create(Net(nnx.Rngs(0)), TX).params
    first, second = partition(params, ("outer/bias", "layers/kernel"))
    assert paths(first) == {"outer/bias", "layers/kernel"}
    assert jax.tree.structure(combine(first, second)) == jax.tree.structure(params)
    assert are_equal(combine(first, second), params)


def test_rng_streams_depend_on_the_key_and_differ_from_each_other():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.first(x), self.second(x)

    graphdef, params, variables, streams = split_model(Two(nnx.Rngs(0)))
    draw = lambda seed: merge_model(graphdef, params, variables, streams, jax.random.key(seed))(jnp.ones(64))  # noqa: E731
    first, second = draw(1)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, draw(1)[0])
    assert not np.array_equal(first, draw(2)[0])


def test_rng_streams_of_stacked_layers_keep_their_shape():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    make = nnx.vmap(Layer, in_axes=0, out_axes=0)
    model = make(nnx.Rngs(0).fork(split=3))
    graphdef, params, variables, streams = split_model(model)
    assert [shape for _, shape in streams] == [(3,)]
    again = merge_model(graphdef, params, variables, streams, jax.random.key(0))
    keys = jax.random.key_data(again.drop.rngs.key[...])
    assert len({tuple(key) for key in np.array(keys).tolist()}) == 3


def test_intermediates_of_a_module_are_not_part_of_the_variables():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(INPUTS, rngs=rngs)

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return self.norm(x)

    state = TrainState.create(Sowing(nnx.Rngs(0)), TX)
    model = state.model
    model(X)
    after = variables_after(model, state.variables)
    assert jax.tree.structure(after) == jax.tree.structure(state.variables)
    assert not are_equal(after, state.variables)


def test_a_seed_a_raw_key_and_a_typed_key_are_equivalent():
    states = [TrainState.create(Net(nnx.Rngs(0)), TX, rng) for rng in (5, jax.random.PRNGKey(5), jax.random.key(5))]
    assert len({np.array(state.rng).tobytes() for state in states}) == 1
