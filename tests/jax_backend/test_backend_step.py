"""The step against a hand-written loop on one device, over meshes, micro-batches and dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import (
    ROWS,
    WIDTH,
    Net,
    Noisy,
    are_equal,
    assert_close,
    batches,
    loss,
    mean_losses,
    new_state,
    on_host,
    plain_training,
    put,
    train,
)

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.sharding import copy_to_mesh
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step import make_eval_step, make_train_step
from trainformer.core.errors import BadArgument
from trainformer.core.types import Loss, Mean

DATA = batches()


@pytest.fixture(scope="module")
def by_hand():
    _, state, _ = new_state()
    losses, norms, params = plain_training(state.params, DATA)
    return losses, norms, on_host(params)


@pytest.mark.parametrize(
    ("dims", "accumulation", "part"),
    [
        ((1, 1, 1, 1), 4, (2, WIDTH, WIDTH)),
        ((1, 4, 1, 1), 1, (2, WIDTH // 4, WIDTH)),
        ((2, 2, 2, 1), 2, (2, WIDTH // 2, WIDTH // 2)),
    ],
)
def test_every_mesh_and_accumulation_matches_the_hand_written_loop(by_hand, dims, accumulation, part):
    losses, outputs, state = train(dims, DATA, accumulation=accumulation)
    np.testing.assert_allclose(losses, by_hand[0], rtol=1e-5)
    np.testing.assert_allclose([float(o["grad_norm"]) for o in outputs], by_hand[1], rtol=1e-4)
    assert_close(state.params, by_hand[2], atol=2e-5)
    for tree in (state.params, state.opt_state[0].mu):
        assert {s.data.shape for s in tree["layers"]["kernel"].addressable_shards} == {part}
    assert int(state.step) == len(DATA)


def test_metrics_are_sums_and_weights_over_all_micro_batches():
    _, whole, _ = train((1, 1, 1, 1), DATA[:1])
    _, pieces, _ = train((1, 1, 1, 1), DATA[:1], accumulation=4)
    for output in (whole[0], pieces[0]):
        assert set(output) == {"loss", "metrics", "grad_norm", "finite"}
        assert float(output["metrics"]["right"][1]) == float(output["metrics"]["mean"][1]) == ROWS
        assert float(output["loss"][1]) == pytest.approx(DATA[0]["w"].sum(), rel=1e-6)
    assert_close(whole[0]["metrics"], pieces[0]["metrics"], rtol=1e-5)


def test_clipping_applies_to_the_mean_gradient_of_the_whole_step():
    tx = optax.sgd(0.1)
    _, state, _ = new_state(tx=tx)
    _, norms, expected = plain_training(state.params, DATA, optax.chain(optax.clip_by_global_norm(0.5), tx))
    assert min(norms) > 0.5
    _, outputs, clipped = train((1, 2, 1, 1), DATA, tx=tx, accumulation=2, clip=0.5)
    np.testing.assert_allclose([float(o["grad_norm"]) for o in outputs], norms, rtol=1e-4)  # the norm before clipping
    assert_close(clipped.params, expected, atol=1e-5)


def test_a_gradient_below_the_clip_is_unchanged():
    _, _, free = train((1, 1, 1, 1), DATA[:1])
    _, _, clipped = train((1, 1, 1, 1), DATA[:1], clip=1e6)
    assert are_equal(free.params, clipped.params)


def test_frozen_parameters_do_not_change_and_are_not_in_the_norm():
    _, outputs, state = train((1, 2, 1, 1), DATA[:1], frozen="layers|inner", accumulation=2)
    _, before, _ = new_state()
    assert are_equal(state.params["layers"], before.params["layers"])
    assert are_equal(state.params["inner"], before.params["inner"])
    rest = before.params

    def of_outer(outer):
        x = DATA[0]["x"] @ rest["inner"]["kernel"] + rest["inner"]["bias"]
        for kernel in rest["layers"]["kernel"]:
            x = x + jnp.tanh(x @ kernel)
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ outer["kernel"] + outer["bias"], DATA[0]["y"])
        return jnp.sum(losses * DATA[0]["w"]) / jnp.sum(DATA[0]["w"])

    norm = optax.global_norm(jax.jit(jax.grad(of_outer))(rest["outer"]))
    assert float(outputs[0]["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    assert not are_equal(state.params["outer"], before.params["outer"])


def test_bf16_computes_and_float32_weights_are_kept(by_hand):
    seen = []

    def recording(model, batch, key):
        seen.append((model.outer.kernel.dtype.name, model(batch["x"]).dtype.name))
        return loss(model, batch, key)

    mesh, state, shardings = new_state()
    step = JittedStep(
        make_train_step(recording, compute_dtype=jnp.bfloat16, accumulation=2), mesh, shardings, train=True
    )
    outputs = []
    for batch in DATA:
        state, output = step(state, put(mesh, batch))
        outputs.append(output)
    assert set(seen) == {("bfloat16", "bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {np.dtype("float32")}
    losses = mean_losses(outputs)
    np.testing.assert_allclose(losses, by_hand[0], rtol=3e-2)
    assert losses != pytest.approx(by_hand[0], rel=1e-5)  # it did compute in bf16


def test_gradients_are_accumulated_in_float32():
    """512 equal gradients of a bf16 parameter: in bf16 their sum would stall at half its value."""

    def by_product(model, batch, key):
        return Loss(jnp.sum(batch["x"] * model.outer.bias[0]), batch["x"].shape[0])

    mesh, state, shardings = new_state(tx=optax.sgd(1.0))
    state = copy_to_mesh(state.replace(params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)), shardings)
    step = JittedStep(make_train_step(by_product, accumulation=512), mesh, shardings, train=True)
    state, output = step(state, {"x": jnp.ones(512, jnp.bfloat16)})
    assert float(output["grad_norm"]) == 1.0
    assert float(state.params["outer"]["bias"][0]) == -1.0  # it started at 0


def test_bf16_weights_stay_bf16():
    mesh, state, shardings = new_state()
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)
    state = copy_to_mesh(state.replace(params=narrow, opt_state=state.tx.init(narrow)), shardings)
    step = JittedStep(make_train_step(loss, accumulation=2), mesh, shardings, train=True)
    for batch in DATA:
        state, _ = step(state, put(mesh, batch))
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {np.dtype(jnp.bfloat16)}
    assert step.compilations.count == 1


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped_and_counted(poison):
    def poisoned(model, batch, key):
        output, bias = loss(model, batch, key), model.outer.bias[0]
        if poison == "loss":
            return output._replace(sum=output.sum / jnp.min(batch["fine"]))
        # sqrt(0) is finite, its gradient is not.
        root = jnp.sqrt(bias - jax.lax.stop_gradient(bias) + jnp.min(batch["fine"]))
        return output._replace(sum=output.sum + root)

    mesh, state, shardings = new_state((1, 2, 1, 1), Noisy)
    step = JittedStep(make_train_step(poisoned, accumulation=2), mesh, shardings, train=True)
    fine = np.ones(ROWS, np.float32)
    broken = fine.copy()
    broken[5] = 0.0
    state, first = step(state, put(mesh, {**DATA[0], "fine": fine}))
    kept = on_host((state.params, state.opt_state, state.variables))
    state, second = step(state, put(mesh, {**DATA[1], "fine": broken}))
    assert bool(first["finite"])
    assert not bool(second["finite"])
    assert np.isfinite(float(second["loss"][0])) == (poison == "gradient")
    assert are_equal((state.params, state.opt_state, state.variables), kept)
    assert int(state.step) == 2


def test_a_step_of_weight_zero_changes_nothing():
    nothing = {**DATA[0], "w": np.zeros(ROWS, np.float32)}
    _, outputs, state = train((1, 1, 1, 1), [nothing], accumulation=2)
    _, before, _ = new_state()
    assert bool(outputs[0]["finite"])
    assert float(outputs[0]["grad_norm"]) == 0.0
    assert are_equal(state.params, before.params)
    assert int(state.step) == 1


# -- PRNG keys and batch statistics ---------------------------------------------------------------------------------


def test_every_step_and_micro_batch_has_its_own_reproducible_key():
    def drawing(model, batch, key):
        return Loss(jax.random.uniform(key) + 0.0 * jnp.sum(model.outer.bias[...]), 1.0)

    mesh, state, shardings = new_state()
    rng = jnp.copy(state.rng)
    step = JittedStep(make_train_step(drawing, accumulation=2), mesh, shardings, train=True)
    sums = []
    for batch in DATA:
        state, output = step(state, put(mesh, batch))
        sums.append(float(output["loss"][0]))
    fold = jax.random.fold_in
    expected = [sum(float(jax.random.uniform(fold(fold(rng, n), i))) for i in range(2)) for n in range(len(DATA))]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert len(set(sums)) == len(DATA)


def test_dropout_differs_between_steps_and_repeats_with_the_seed():
    tx = optax.sgd(0.0)  # constant weights: only dropout changes the loss
    data = [DATA[0]] * 3
    first, _, _ = train((1, 1, 1, 1), data, Noisy, tx)
    again, _, _ = train((1, 2, 2, 1), data, Noisy, tx)
    assert len(set(first)) == 3
    np.testing.assert_allclose(first, again, rtol=1e-5)  # also on another mesh


def test_batch_statistics_are_carried_from_micro_batch_to_micro_batch():
    tx = optax.sgd(0.0)
    _, _, state = train((1, 2, 1, 1), DATA[:2], Noisy, tx, accumulation=2)
    _, start, _ = new_state(build=Noisy, tx=tx)
    mean = np.zeros(WIDTH)
    for batch in DATA[:2]:
        hidden = batch["x"] @ np.array(start.params["inner"]["kernel"])
        for piece in (hidden[0::2], hidden[1::2]):
            mean = 0.99 * mean + 0.01 * piece.mean(0)
    np.testing.assert_allclose(state.variables["norm"]["mean"], mean, atol=1e-6)


# -- remat and evaluation ------------------------------------------------------------------------------------------


def test_remat_does_not_change_the_results():
    off, _, kept = train((1, 1, 1, 1), DATA, Noisy)
    again, _, computed = train((1, 1, 1, 1), DATA, Noisy, remat="nothing_saveable")
    np.testing.assert_allclose(off, again, rtol=1e-6)
    assert_close(kept.params, computed.params, atol=1e-5)


def test_remat_is_in_the_traced_program():
    def text(**options):
        _, state, _ = new_state()
        return str(jax.make_jaxpr(make_train_step(loss, **options))(state, DATA[0]))

    assert "policy=" not in text()
    assert "policy=" in text(remat="nothing_saveable")


def test_evaluation_is_deterministic_changes_nothing_and_sums_exactly():
    mesh, state, shardings = new_state((1, 2, 1, 1), Noisy)
    evaluate = JittedStep(make_eval_step(loss), mesh, shardings, train=False)
    before = on_host((state.params, state.variables))
    whole, again = evaluate(state, put(mesh, DATA[0])), evaluate(state, put(mesh, DATA[0]))
    halves = [
        evaluate(state, put(mesh, {k: v[part] for k, v in DATA[0].items()})) for part in (slice(0, 8), slice(8, 16))
    ]
    assert float(whole["loss"][0]) == float(again["loss"][0])
    summed = jax.tree.map(lambda a, b: a + b, *halves)
    assert_close(whole, summed, rtol=1e-5)
    assert are_equal((state.params, state.variables), before)


# -- return values of loss functions --------------------------------------------------------------------------------


def outcome(function, batch=DATA[0], **options):
    _, state, _ = new_state()
    return jax.jit(make_train_step(function, **options))(state, batch)


def test_a_scalar_is_a_mean_over_rows_and_a_mean_has_its_own_weight():
    bias = lambda model: jnp.sum(model.outer.bias[...])  # noqa: E731
    _, plain = outcome(lambda model, batch, key: bias(model) + batch["w"].mean(), accumulation=2)
    assert float(plain["loss"][0] / plain["loss"][1]) == pytest.approx(DATA[0]["w"].mean(), rel=1e-5)
    assert float(plain["loss"][1]) == ROWS
    _, mean = outcome(lambda model, batch, key: Mean(bias(model) + 2.0, 3.0))
    assert (float(mean["loss"][0]), float(mean["loss"][1])) == (6.0, 3.0)
    _, none = outcome(lambda model, batch, key: Mean(None, 0))
    assert (float(none["loss"][0]), float(none["loss"][1]), bool(none["finite"])) == (0.0, 0.0, True)


def test_padding_rows_do_not_count():
    batch = {**DATA[0], "_valid": np.arange(ROWS) < 11}
    valid_mean = lambda model, batch, key: (  # noqa: E731
        jnp.sum(batch["w"] * batch["_valid"]) / jnp.maximum(batch["_valid"].sum(), 1) + 0 * model.outer.bias[0]
    )
    _, output = outcome(valid_mean, batch, accumulation=4)
    assert float(output["loss"][1]) == 11
    assert float(output["loss"][0]) == pytest.approx(DATA[0]["w"][:11].sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda m, b, k: m(b["x"]).sum(-1), {}, "scalar"),
        (lambda m, b, k: Loss(m(b["x"]).sum(), 1.0, {"rows": b["w"]}), {}, "'rows'"),
        (lambda m, b, k: m(b["x"]).mean(), {"accumulation": 17}, "rows for 17 micro-batches, received 16"),
    ],
)
def test_invalid_losses_and_sizes_are_refused(function, options, message):
    with pytest.raises(BadArgument, match=message):
        outcome(function, **options)


@pytest.mark.parametrize("options", [{"accumulation": 0}, {"accumulation": 1.5}, {"clip": 0.0}, {"clip": -1.0}])
def test_invalid_options_are_refused(options):
    with pytest.raises(BadArgument, match="Expected"):
        make_train_step(loss, **options)


def test_a_jitted_step_donates_its_state():
    mesh, state, shardings = new_state()
    new, _ = JittedStep(make_train_step(loss), mesh, shardings, train=True)(state, put(mesh, DATA[0]))
    assert state.params["layers"]["kernel"].is_deleted()
    assert isinstance(new, TrainState)
    assert isinstance(new.model, Net)
