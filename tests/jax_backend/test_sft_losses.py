"""Losses on JAX against torch, values and gradients; chunks do not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from trainformer.core.errors import BadArgument
from trainformer.losses import preference as on_torch
from trainformer.losses import tokens as tokens_on_torch
from trainformer.losses.jax.preference import (
    DIVERGENCES,
    KTO_VARIANTS,
    VARIANTS,
    dpo_loss,
    kto_loss,
    orpo_loss,
    preference_rewards,
    reward_model_loss,
    simpo_loss,
)
from trainformer.losses.jax.tokens import row_sums, token_loss

ROWS, LENGTH, WIDTH, WORDS = 3, 7, 5, 11


@pytest.fixture(scope="module")
def made():
    rng = np.random.default_rng(0)
    states = rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    head = rng.standard_normal((WIDTH, WORDS)).astype(np.float32)
    labels = rng.integers(0, WORDS, (ROWS, LENGTH))
    labels[0, :3], labels[2, 4:] = -100, -100
    return states, head, labels


@pytest.mark.parametrize("options", [{}, {"shift": False}, {"z_loss": 0.1, "label_smoothing": 0.2}])
def test_token_loss_matches_torch(made, options):
    states, head, labels = made
    logits = torch.tensor(states @ head, requires_grad=True)
    theirs = tokens_on_torch.token_cross_entropy(logits, torch.as_tensor(labels), **options)
    theirs.sum.backward()

    def loss(logits):
        found = row_sums(logits, jnp.asarray(labels), **options).total()
        return found.sum, found

    (total, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(states @ head)
    assert float(total) == pytest.approx(float(theirs.sum.detach()), rel=1e-5)
    assert (float(found.weight), float(found.metrics["accuracy"][0])) == (float(theirs.weight), float(theirs.correct))
    np.testing.assert_allclose(gradient, logits.grad.numpy(), atol=1e-5)


def _total(*inputs, **options):
    return row_sums(*inputs, **options).total()


@pytest.mark.parametrize("function", [_total, token_loss])
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_change_neither_loss_nor_gradients(made, chunks, function):
    states, head, labels = made

    def loss(states, head, chunks):
        return function(states, jnp.asarray(labels), lambda x: x @ head, chunks=chunks, z_loss=0.1)

    def with_gradients(chunks):
        def total(*given):
            found = loss(*given, chunks)
            return 0.3 * found.sum, (found, found.per_sample)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(states, head)

    whole, pieces = with_gradients(1), with_gradients(chunks)
    for mine, wanted in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)
    assert whole[0][1][0].weight == 13


@pytest.mark.parametrize("function", [_total, token_loss])
def test_chunks_never_materialise_all_logits(made, function):
    """The largest array of the compiled gradient has the logits of a chunk, not of the sequence."""
    states, head, labels = (np.tile(made[0], (1, 8, 1)), made[1], np.tile(made[2], (1, 8)))

    def largest(chunks):
        gradient = jax.grad(
            lambda states, head: function(states, jnp.asarray(labels), lambda x: x @ head, chunks=chunks).sum,
            argnums=(0, 1),
        )
        text = str(jax.make_jaxpr(gradient)(states, head))
        return f"{ROWS},{8 * LENGTH},{WORDS}]" in text, f"{ROWS},{2 * LENGTH},{WORDS}]" in text

    assert largest(1) == (True, False)
    assert largest(4) == (False, True)


def test_logits_of_chunks_are_computed_once(made):
    """Per chunk one matrix product for the logits and, if there is a gradient, two for it."""
    states, head, labels = made

    def products(function, differentiate):
        def loss(states, head):
            return function(states, jnp.asarray(labels), lambda x: x @ head, chunks=2).sum

        function_of_both = jax.grad(loss, argnums=(0, 1)) if differentiate else loss
        return str(jax.make_jaxpr(function_of_both)(states, head)).count("dot_general")

    assert (products(token_loss, False), products(token_loss, True)) == (1, 3)
    assert products(_total, True) == 4


def test_the_weights_of_chunks_are_summed_in_float32():
    """With weights in bf16 the sums of many chunks would lose what they add."""
    rng = np.random.default_rng(3)
    states, head = rng.standard_normal((2, 256, 8)), rng.standard_normal((8, 16)) / 4
    labels = jnp.asarray(rng.integers(0, 16, (2, 256)))

    def gradient(dtype, chunks):
        def loss(head):
            return token_loss(jnp.asarray(states, dtype), labels, lambda x: x @ head, chunks=chunks).sum

        return np.asarray(jax.grad(loss)(jnp.asarray(head, dtype)), np.float32)

    exact = gradient(jnp.float32, 1)
    errors = [np.abs(gradient(jnp.bfloat16, chunks) - exact).max() for chunks in (1, 64)]
    assert errors[1] < 1.5 * errors[0]


def test_invalid_shapes_are_refused(made):
    states, _, labels = made
    with pytest.raises(BadArgument, match=r"\(3, 7, 5\) and \(3, 6\)"):
        row_sums(jnp.asarray(states), jnp.asarray(labels[:, 1:]))
    with pytest.raises(BadArgument, match="chunks"):
        row_sums(jnp.asarray(states), jnp.asarray(labels), chunks=0)


def test_preference_losses_match_torch():
    rng = np.random.default_rng(1)
    values = -rng.uniform(0.01, 6, (4, 16)).astype(np.float32)
    values[:2, 0] = -1e-9  # a certain answer

    options = {
        **{variant: {"variant": variant} for variant in VARIANTS if variant != "exo_pair"},
        "exo_pair": {"variant": "exo_pair", "label_smoothing": 0.01},
        "robust smoothed": {"variant": "robust", "label_smoothing": 0.2},
        "smoothed": {"label_smoothing": 0.2},
        **{divergence: {"f_divergence": divergence} for divergence in DIVERGENCES},
    }
    kinds = {name: (lambda p, r, o=given: dpo_loss(p, r, 0.3, **o)) for name, given in options.items()}
    kinds["orpo"] = lambda p, r: orpo_loss(p, 0.3)
    kinds["simpo"] = lambda p, r: simpo_loss(p, 2.0, 0.7, label_smoothing=0.1)
    theirs = {
        name: (lambda *g, o=given: on_torch.dpo_loss(*g, 0.3, **o, reduction="none")) for name, given in options.items()
    }
    theirs["orpo"] = lambda c, r, *_: on_torch.orpo_loss(c, r, 0.3, reduction="none")
    theirs["simpo"] = lambda c, r, *_: on_torch.simpo_loss(c, r, 2.0, 0.7, label_smoothing=0.1, reduction="none")
    assert kinds.keys() == theirs.keys()
    for name, mine in kinds.items():
        policy = [torch.tensor(row, requires_grad=True) for row in values[:2]]
        wanted = theirs[name](*policy, *map(torch.tensor, values[2:]))
        wanted.sum().backward()
        known = tuple(map(jnp.asarray, values[2:]))

        def total(given, mine=mine, known=known):
            losses = mine(given, known)
            return losses.sum(), losses

        gradients, found = jax.jit(jax.grad(total, has_aux=True))(tuple(map(jnp.asarray, values[:2])))
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
        for gradient, p in zip(gradients, policy, strict=True):
            np.testing.assert_allclose(gradient, p.grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_losses_of_single_answers_and_rewards_match_torch():
    rng = np.random.default_rng(3)
    policy, reference = -rng.uniform(0.01, 60, (2, 16)).astype(np.float32)
    desirable, margin = rng.random(16) < 0.5, rng.random(16).astype(np.float32)
    weights = {"desirable_weight": 0.7, "undesirable_weight": 1.3}
    of_torch = torch.tensor(reference), torch.tensor(desirable), 0.4, 0.3
    pairs = [
        (
            lambda p, v=v: kto_loss(p, reference, desirable, 0.4, 0.3, variant=v, **weights),
            lambda p, v=v: on_torch.kto_loss(p, *of_torch, variant=v, **weights, reduction="none"),
        )
        for v in KTO_VARIANTS
    ]
    given = torch.tensor(reference), torch.tensor(margin)
    pairs.append(
        (
            lambda p: reward_model_loss(p, reference, margin, center=0.1),
            lambda p: on_torch.reward_model_loss(p, *given, center=0.1, reduction="none"),
        )
    )
    for mine, theirs in pairs:
        own = torch.tensor(policy, requires_grad=True)
        wanted = theirs(own)
        wanted.sum().backward()
        np.testing.assert_allclose(mine(policy), wanted.detach().numpy(), rtol=1e-5, atol=1e-5)
        gradient = jax.grad(lambda p, mine=mine: mine(p).sum())(policy)
        np.testing.assert_allclose(gradient, own.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_rewards_match_torch():
    values = np.random.default_rng(2).standard_normal((4, 8)).astype(np.float32)
    values[:, 0] = 0.0  # a tie
    mine = preference_rewards((values[0], values[1]), (values[2], values[3]), 0.3)
    theirs = on_torch.preference_rewards(*map(torch.tensor, values), 0.3)
    for name in ("chosen", "rejected", "margin", "correct"):
        np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name).numpy(), atol=1e-6)
    with pytest.raises(BadArgument, match="sigmoid"):
        dpo_loss((values[0], values[1]), (values[2], values[3]), variant="sigmod")
