"""Inputs of a trainer: models and dtypes, states of another mesh or optimizer, keywords of other libraries."""

from __future__ import annotations

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import assert_close
from flax import nnx
from jax_toys import (
    MeanTrainer,
    Mlp,
    arguments,
    by_hand,
    in_order,
    logged,
    losses,
    mean_loss,
    mesh_on,
    mlp_trainer,
    samples,
)

from trainformer.core.errors import BadArgument
from trainformer.jax import TrainState

# -- states --------------------------------------------------------------------------------------------------------


def continued(state, **options):
    """A trainer that continues from a state for one epoch of four batches."""
    own = {"mesh": options.pop("mesh", mesh_on((1, 1, 1, 1), 1))}
    given = {"shuffle": False, "num_train_epochs": 1, "max_grad_norm": None, "output_dir": "second"}
    return MeanTrainer(arguments(**given | options), model_state=state, dataset_train=samples(), **own)


@pytest.mark.parametrize("mesh", [None, mesh_on((2, 2, 1, 1))], ids=["one device", "four devices"])
def test_a_model_state_is_copied_to_the_mesh_and_keeps_its_optimizer(mesh, caplog):
    wanted, params = by_hand(Mlp(nnx.Rngs(0)), in_order(samples(), 8, 1), mean_loss, optax.sgd(0.5))
    state = TrainState.create(Mlp(nnx.Rngs(0)), optax.sgd(0.5), 0)
    with caplog.at_level(logging.WARNING, "trainformer"):
        trainer = continued(state, **({} if mesh is None else {"mesh": mesh}))
    assert "model_state has its own optimizer: learning_rate, weight_decay are not used." in caplog.text
    trained = trainer.train()
    assert losses(trainer) == pytest.approx(wanted, abs=1e-5)
    assert_close(trained.params, params, atol=1e-5)
    assert trainer.scheduler is None
    assert not logged(trainer, "train/lr")  # rather than the unused one of the arguments


def test_a_state_of_one_mesh_continues_on_another():
    options = {"shuffle": False, "num_train_epochs": 1, "scheduler": "constant", "max_grad_norm": None}
    first = mlp_trainer(mesh=mesh_on((1, 2, 1, 1), 2), **options).train()
    second = continued(first, mesh=mesh_on((4, 1, 1, 1)))
    trained = second.train()
    _, params = by_hand(Mlp(nnx.Rngs(0)), in_order(samples(), 8, 2), mean_loss, optax.adam(1e-2))
    assert_close(trained.params, params, atol=1e-5)
    assert int(trained.step) == 8
    assert all(leaf.sharding.mesh == second.mesh for leaf in jax.tree.leaves(trained))


def test_resuming_frees_the_initial_state():
    mlp_trainer(num_train_epochs=1).train()
    found = []

    class CheckFreed:
        def on_train_begin(self, trainer):
            gc.collect()
            found.append(before())

    trainer = mlp_trainer(num_train_epochs=2, callbacks=[CheckFreed()])
    before = weakref.ref(trainer.model_state.params["inner"]["kernel"])
    trainer.train()
    assert found == [None]


def test_a_hook_can_replace_the_optimizer():
    class Slower(MeanTrainer):
        def on_step_start(self, state, step):
            return state.replace(tx=optax.adam(1e-3)) if step == 2 else None

    given = {"shuffle": False, "num_train_epochs": 1, "scheduler": "constant", "max_grad_norm": None}
    trainer = mlp_trainer(Slower, optimizer=optax.adam(1e-2), weight_decay=0, **given)
    trainer.train()
    rates = optax.piecewise_constant_schedule(1e-2, {2: 0.1})
    wanted, _ = by_hand(Mlp(nnx.Rngs(0)), in_order(samples(), 8, 1), mean_loss, optax.adam(rates))
    assert losses(trainer) == pytest.approx(wanted, abs=1e-5)
    assert logged(trainer, "train/recompilations")[-1] == 1


def test_invalid_and_donated_states_are_refused():
    trainer = mlp_trainer(num_train_epochs=1, dataset_eval=samples())
    before = trainer.model_state
    trainer.train()
    with pytest.raises(BadArgument, match="a live state, received 'one whose buffers were donated"):
        trainer.eval(before)
    with pytest.raises(BadArgument, match="a live state"):
        continued(before)
    with pytest.raises(BadArgument, match=r"a state \(TrainState\), received 'dict'"):
        trainer.eval(trainer.model_state.params)


@pytest.mark.parametrize("returned", [3, ("no state", {})], ids=["number", "pair"])
def test_a_hook_must_return_a_state(returned):
    class Odd(MeanTrainer):
        def on_step_end(self, state, metrics, step):
            return returned

    with pytest.raises(BadArgument, match=r"on_step_end to return None or a state \(TrainState\), received"):
        mlp_trainer(Odd).train()


def test_a_hook_can_change_the_metrics_alone():
    class Adds(MeanTrainer):
        def on_step_end(self, state, metrics, step):
            return None, {**metrics, "twice": 2 * step}

    trainer = mlp_trainer(Adds, num_train_epochs=1)
    assert int(trainer.train().step) == 4
    assert logged(trainer, "train/twice") == [2, 4, 6, 8]


# -- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_built", [False, True], ids=["module", "function"])
def test_param_dtype_is_the_dtype_of_the_weights(is_built):
    module = Mlp(nnx.Rngs(0))
    trainer = mlp_trainer(model=(lambda rngs: Mlp(rngs)) if is_built else module, param_dtype="bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.model_state.params)} == {jnp.dtype("bfloat16")}
    assert module.inner.kernel.dtype == jnp.float32  # the user's module is unchanged


def test_the_trainer_keeps_one_copy_of_the_weights():
    module = Mlp(nnx.Rngs(0))
    given = weakref.ref(module)
    trainer = mlp_trainer(model=module)
    del module
    gc.collect()
    assert given() is None
    state = trainer.train()
    np.testing.assert_array_equal(trainer.model.inner.kernel[...], state.params["inner"]["kernel"])


# -- keywords ---------------------------------------------------------------------------------------------------------


def test_unknown_keywords_are_refused_with_a_hint():
    with pytest.raises(BadArgument, match=r"keywords of MeanTrainer, received 'eval_data'. It is called dataset_eval"):
        MeanTrainer(arguments(), model=Mlp(nnx.Rngs(0)), dataset_train=samples(), eval_data=samples())
    with pytest.raises(BadArgument, match=r"received 'dataset_trian'. Did you mean 'dataset_train'"):
        MeanTrainer(arguments(), model=Mlp(nnx.Rngs(0)), dataset_trian=samples())


def test_evaluation_arguments_without_data_are_reported(caplog):
    with pytest.raises(BadArgument, match=r"evaluation data with metric_for_best_model='loss'"):
        mlp_trainer(evaluation_strategy="epoch", metric_for_best_model="loss")
    with caplog.at_level(logging.WARNING, "trainformer"):
        mlp_trainer(evaluation_strategy="epoch")
    assert "evaluation_strategy='epoch' without evaluation data" in caplog.text
