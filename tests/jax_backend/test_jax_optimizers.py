"""Optimizers on JAX against torch, transformers and hand-written updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers.optimization import Adafactor

from trainformer.backends.jax.optimizers import OPTIMIZERS, decays, in_float32, make_optimizer, uses_muon
from trainformer.core.errors import BadArgument

STEPS = 6
SHAPES = {
    "embed/embedding": (7, 6),
    "layers/0/mlp/kernel": (6, 4),
    "layers/0/mlp/bias": (4,),
    "layers/1/mlp/kernel": (6, 4),
    "layers/1/mlp/bias": (4,),
    "norm/scale": (4,),
    "lm_head/kernel": (4, 7),
}
DECAYED = ("embedding", "kernel")


def rate(step):
    return 0.05 / (1.0 + step)


def arrays(seed, scale=1.0):
    random = np.random.default_rng(seed)
    return {path: (scale * random.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}


def gradients():
    """Gradients of every step, of very different size for the two layers."""
    found = [arrays(100 + step) for step in range(STEPS)]
    return [{path: g * (30.0 if "/1/" in path else 1.0) for path, g in each.items()} for each in found]


def tree_of(flat_arrays):
    return unflatten_dict({path: jnp.asarray(value) for path, value in flat_arrays.items()}, sep="/")


def stacked(each):
    """The parameters with the two layers stacked."""
    found = {path: value for path, value in each.items() if "layers" not in path}
    for name in ("kernel", "bias"):
        found[f"layers/mlp/{name}"] = np.stack([each[f"layers/{layer}/mlp/{name}"] for layer in (0, 1)])
    return found


def trained(tx, start, each_step):
    params = tree_of(start)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grads in each_step:
        updates, state = update(tree_of(grads), state, params)
        params = optax.apply_updates(params, updates)
    return {path: np.asarray(value) for path, value in flatten_dict(params, sep="/").items()}


def trained_by_torch(make, weight_decay):
    """The same start and gradients with a torch optimizer."""
    params = {path: torch.nn.Parameter(torch.from_numpy(value)) for path, value in arrays(0).items()}
    groups = [
        {"params": [p for path, p in params.items() if path.endswith(DECAYED)], "weight_decay": weight_decay},
        {"params": [p for path, p in params.items() if not path.endswith(DECAYED)], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    for step, grads in enumerate(gradients()):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for path, p in params.items():
            p.grad = torch.from_numpy(grads[path])
        optimizer.step()
    return {path: p.detach().numpy() for path, p in params.items()}


def assert_close(found, wanted, atol):
    assert found.keys() == wanted.keys()
    for path in wanted:
        assert np.allclose(found[path], wanted[path], rtol=0, atol=atol), path


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("adamw", {}, lambda groups: torch.optim.AdamW(groups, lr=1.0)),
        (
            "adamw",
            {"betas": (0.8, 0.95), "eps": 1e-5},
            lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-5),
        ),
        ("adam", {}, lambda groups: torch.optim.Adam(groups, lr=1.0)),
        ("sgd", {}, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9)),
        ("sgd", {"momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=1.0)),
        ("sgd", {"nesterov": True}, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)),
    ],
)
def test_weights_match_torch(name, options, theirs):
    found = trained(make_optimizer(name, rate, 0.1, **options), arrays(0), gradients())
    wanted = trained_by_torch(theirs, 0.1)
    largest = max(1.0, *(np.abs(value).max() for value in wanted.values()))
    assert largest < 100
    assert_close(found, wanted, atol=1e-6 * largest)


def test_adafactor_matches_transformers():
    def theirs(groups):
        return Adafactor(groups, lr=1.0, relative_step=False, scale_parameter=True, warmup_init=False)

    found = trained(make_optimizer("adafactor", rate), arrays(0), gradients())
    wanted = trained_by_torch(theirs, 0.0)
    assert max(np.abs(value).max() for value in wanted.values()) < 10
    assert_close(found, wanted, atol=1e-6)


def test_lion_matches_a_hand_written_update():
    found = trained(make_optimizer("lion", rate, 0.1), arrays(0), gradients())
    for path, p in arrays(0).items():
        mu = np.zeros_like(p)
        for step, grads in enumerate(gradients()):
            g = grads[path]
            decay = 0.1 * p if path.endswith(DECAYED) else 0.0
            p = p - rate(step) * (np.sign(0.9 * mu + 0.1 * g) + decay)
            mu = 0.99 * mu + 0.01 * g
        assert np.allclose(found[path], p, rtol=0, atol=1e-6), path


def newton_schulz(x):
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_matches_a_hand_written_update_and_adamw_for_the_rest():
    found = trained(make_optimizer("muon", rate, 0.1), arrays(0), gradients())
    others = trained(make_optimizer("adamw", rate, 0.1), arrays(0), gradients())
    for path, start in arrays(0).items():
        if not path.startswith("layers") or path.endswith("bias"):
            assert np.array_equal(found[path], others[path]), path
            continue
        p, mu = start.astype(np.float64), np.zeros(start.shape)
        for step, grads in enumerate(gradients()):
            g, t = grads[path].astype(np.float64), step + 1
            mu = 0.95 * mu + 0.05 * g
            ahead = 0.95 * mu / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            p = p - rate(step) * (0.2 * np.sqrt(6) * newton_schulz(ahead) + 0.1 * p)
        assert np.allclose(found[path], p, rtol=0, atol=2e-5), path


def test_muon_updates_the_matrices_between_embeddings_and_head():
    leaf = {2: jnp.zeros((4, 4)), 3: jnp.zeros((2, 4, 4)), 4: jnp.zeros((3, 3, 4, 4))}
    assert uses_muon("layers/mlp/up/kernel", leaf[3])
    assert uses_muon("layers/0/mlp/up/kernel", leaf[2])
    assert not uses_muon("patches/kernel", leaf[4])
    assert not uses_muon("conv/kernel", leaf[3])
    assert not uses_muon("embed/embedding", leaf[2])
    assert not uses_muon("lm_head/kernel", leaf[2])
    assert not uses_muon("layers/mlp/up/bias", leaf[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacking_layers_does_not_change_the_update(name):
    tx = make_optimizer(name, rate, 0.1)
    apart = trained(tx, arrays(0), gradients())
    together = trained(tx, stacked(arrays(0)), [stacked(each) for each in gradients()])
    assert together["layers/mlp/kernel"].shape == (2, 6, 4)
    assert_close(together, stacked(apart), atol=2e-6)


def test_muon_does_not_depend_on_the_number_of_layers():
    tx = make_optimizer("muon", rate)
    layer = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    one, many = ({"layers/mlp/kernel": np.stack([layer] * count)} for count in (1, 9))
    found = trained(tx, many, [many])["layers/mlp/kernel"]
    assert np.allclose(found, np.repeat(trained(tx, one, [one])["layers/mlp/kernel"], 9, axis=0), atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_leaves_biases_and_norms_alone(name):
    start = stacked(arrays(0))
    still = [{path: np.zeros_like(value) for path, value in start.items()}]
    found = trained(make_optimizer(name, lambda step: 0.05, 0.1), start, still)
    changed = {path for path in start if not np.array_equal(found[path], start[path])}
    assert changed == {"embed/embedding", "layers/mlp/kernel", "lm_head/kernel"}
    if name != "adam":  # its decay goes through the moments
        for path in changed:
            assert np.allclose(found[path], start[path] * (1 - 0.05 * 0.1), rtol=1e-5), path


@pytest.mark.parametrize(
    ("path", "shape", "wanted"),
    [
        ("layers/mlp/up/lora_a", (2, 8, 4), True),
        ("layers/mlp/up/gain", (2, 8), False),
        ("blocks/0/gain", (8, 8), True),
        ("cls_token", (1, 1, 8), False),
        ("position_embedding", (1, 17, 8), False),
        ("positions", (1, 17, 8), False),
        ("wpe/embedding", (17, 8), True),
        ("gain", (8,), False),
    ],
)
def test_weight_decay_depends_on_name_and_rank(path, shape, wanted):
    assert decays(path, np.zeros(shape)) is wanted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_float32_for_bf16_weights(name):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree_of(stacked(arrays(0))))
    tx = make_optimizer(name, rate, 0.1)
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    for leaf in jax.tree.leaves([state, after, updates]):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(optax.apply_updates(params, updates)))


def test_second_moments_keep_changing_for_bf16_weights():
    """In bf16 a change of a thousandth is rounded away: optax alone keeps the first value."""
    params = {"kernel": jnp.ones((4, 4), jnp.bfloat16)}

    def second_moment(tx):
        state = tx.init(params)
        for step in range(40):
            _, state = tx.update(jax.tree.map(lambda p, s=step: p * (1 if s else 100), params), state, params)
        return float(jnp.mean(state[0].nu["kernel"].astype(jnp.float32)))

    exact = 0.999**39 * 0.001 * 1e4 + 1 - 0.999**39
    assert second_moment(in_float32(optax.adam(0.1))) == pytest.approx(exact, rel=1e-4)
    assert second_moment(optax.adam(0.1)) != pytest.approx(exact, rel=1e-3)


def test_equivalent_optimizer_specs():
    wanted = trained(make_optimizer("adamw", rate, 0.1, betas=(0.8, 0.99)), arrays(0), gradients())
    for spec, options in (
        ({"name": "AdamW", "betas": [0.8, 0.99]}, {}),
        ("adamw", {"b1": 0.8, "b2": 0.99}),
        ("adamw_torch", {"adam_beta1": 0.8, "adam_beta2": 0.99}),
        (optax.adamw, {"b1": 0.8, "b2": 0.99}),
    ):
        assert_close(trained(make_optimizer(spec, rate, 0.1, **options), arrays(0), gradients()), wanted, atol=1e-7)
    ready = optax.adabelief(0.1)
    assert make_optimizer(ready, rate, 0.1) is ready


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("adamx", {}, "Did you mean 'adam' or 'adamw'"),
        ("shampoo", {}, "optimizer=optax.adabelief"),
        ("lion", {"eps": 1e-3}, "options that lion takes, received 'eps'"),
        ("adamw", {"betas": (0.9, 1.0)}, "two numbers of at least 0 and below 1"),
        ("sgd", {"momentum": True}, "momentum of sgd"),
        ({"betas": (0.9, 0.95)}, {}, "to have a 'name'"),
        (lambda learning_rate: 3, {}, "to return an optax GradientTransformation"),
        (optax.adam(0.1), {"b1": 0.5}, "given by name"),
        (3, {}, "a name, a factory or an optax"),
    ],
)
def test_invalid_optimizers_are_refused(spec, options, words):
    with pytest.raises(BadArgument, match=words):
        make_optimizer(spec, rate, **options)


def test_a_torch_optimizer_is_refused():
    with pytest.raises(BadArgument, match=r"an optimizer of optax, received 'torch\.optim\.adamw\.AdamW'"):
        make_optimizer(torch.optim.AdamW, 1e-3)
