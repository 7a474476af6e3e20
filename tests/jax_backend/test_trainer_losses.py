"""What a loss may return, and what it and the model may be: pairs, missing keys, modules of flax.linen."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from backend_toys import assert_close
from flax import linen, nnx
from jax_toys import MeanTrainer, Mlp, arguments, logged, losses, mean_loss, mesh_on, mlp_trainer, samples

from trainformer.callbacks import ModelCheckpoint
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import Loss
from trainformer.jax import Trainer


def accuracy(model, batch):
    return jnp.mean(model(batch["x"]).argmax(-1) == batch["y"])


class PairTrainer(MeanTrainer):
    """Returns (loss, aux), as functions for `jax.value_and_grad(has_aux=True)` do."""

    def compute_loss(self, model, batch, key):
        return mean_loss(model, batch), {"accuracy": accuracy(model, batch)}


class LossTrainer(MeanTrainer):
    def compute_loss(self, model, batch, key):
        rows = len(batch["x"])
        return Loss(mean_loss(model, batch) * rows, rows, {"accuracy": (accuracy(model, batch) * rows, rows)})


def test_a_loss_with_metrics_equals_loss_with_sums():
    """Also with accumulation on several devices, and in the evaluation of a smaller last batch."""
    options = {"mesh": mesh_on((2, 1, 1, 1), 2), "gradient_accumulation_steps": 2, "dataset_eval": samples(13, seed=1)}
    pair, sums = (mlp_trainer(kind, output_dir=kind.__name__, **options) for kind in (PairTrainer, LossTrainer))
    assert_close(pair.train().params, sums.train().params, atol=1e-7)
    for name in ("train/loss", "train/accuracy"):
        np.testing.assert_allclose(logged(pair, name), logged(sums, name), rtol=1e-6)
    assert pair.eval() == pytest.approx(sums.eval(), rel=1e-6)
    assert "eval_accuracy" in pair.eval()


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss: (loss, jnp.ones(3)),
        lambda loss: (loss, {"a": jnp.ones(3)}),
        lambda loss: (loss, loss, loss),
        lambda loss: (Loss(loss, 1), {"a": loss}),
    ],
)
def test_any_other_tuple_is_refused(returned):
    class Own(MeanTrainer):
        def compute_loss(self, model, batch, key):
            return returned(mean_loss(model, batch))

    with pytest.raises(BadArgument, match=r"Loss\(sum, weight, metrics\)|metric 'a' to be a scalar"):
        mlp_trainer(Own).train()


@pytest.mark.parametrize(
    ("returned", "received"),
    [(None, "None"), ({"loss": 1.0}, "dict"), (jnp.ones(3), r"array of shape \(3,\)")],
)
def test_a_loss_that_is_no_scalar_is_named(returned, received):
    class Own(MeanTrainer):
        def compute_loss(self, model, batch, key):
            return returned

    with pytest.raises(BadArgument, match=rf"the loss to be a scalar, .* received '{received}'\. Take its mean"):
        mlp_trainer(Own).train()


@dataclasses.dataclass
class OwnMetrics:
    loss: object
    accuracy: object
    unused: object = None


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss: (loss, {"twice": 2 * loss}),
        lambda loss: (SimpleNamespace(loss=loss), {"loss": loss, "twice": 2 * loss}),
        lambda loss: (SimpleNamespace(loss=loss), OwnMetrics(loss, 2 * loss)),
    ],
)
def test_metrics_of_a_model_with_its_own_loss_are_logged(returned):
    class Own(Mlp):
        def compute_loss(self, x, y, index):
            return returned(mean_loss(self, {"x": x, "y": y}))

    trainer = Trainer(arguments(num_train_epochs=1), model=Own(nnx.Rngs(0)), dataset_train=samples())
    trainer.train()
    twice = logged(trainer, "train/twice") or logged(trainer, "train/accuracy")
    np.testing.assert_allclose(twice, [2 * loss for loss in losses(trainer)], rtol=1e-6)


def test_missing_keys_name_those_of_the_batch():
    class Own(MeanTrainer):
        def compute_loss(self, model, batch, key):
            return jnp.mean(model(batch["inputs"]))

    with pytest.raises(DataError, match=r"key 'inputs', which the loss reads, received \['index', 'x', 'y'\]"):
        mlp_trainer(Own).train()

    class Narrow(Mlp):
        def compute_loss(self, x, labels):
            return jnp.mean(self(x))

    trainer = Trainer(arguments(), model=Narrow(nnx.Rngs(0)), dataset_train=samples())
    with pytest.raises(BadArgument, match=r"missing a required argument: 'labels'.*\['index', 'x', 'y'\]"):
        trainer.train()


# -- modules of flax.linen -----------------------------------------------------------------------------------------


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(linen.Dense(16)(x))
        return linen.Dense(3)(linen.relu(x))


class LinenTrainer(MeanTrainer):
    def compute_loss(self, model, batch, key):
        logits = model(batch["x"], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def compute_metrics(self, model, batch, key):
        return mean_loss(model, batch)


def test_linen_modules_are_refused_with_the_bridge_that_works():
    with pytest.raises(BadArgument, match=r"received LinenMlp of flax\.linen\. .*ToNNX\(LinenMlp\(\.\.\.\), rngs"):
        mlp_trainer(LinenTrainer, model=LinenMlp())
    wrapped = nnx.bridge.ToNNX(LinenMlp(), rngs=nnx.Rngs(0))
    with pytest.raises(BadArgument, match=r"LinenMlp of flax\.linen, not initialised"):
        mlp_trainer(LinenTrainer, model=wrapped)
    data = samples()
    model = wrapped.lazy_init(data["x"])
    hidden = data["x"] @ model.Dense_0["kernel"][...] + model.Dense_0["bias"][...]
    trainer = mlp_trainer(LinenTrainer, data, model, total_batch_size=32, num_train_epochs=1, dataset_eval=data)
    state = trainer.train()
    statistics = state.variables["BatchNorm_0"]
    np.testing.assert_allclose(statistics["var"], 0.9 + 0.1 * hidden.var(0), rtol=1e-4)
    assert 0 < trainer.eval()["eval_loss"] < 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mlp, r"received 'the class Mlp'\. Pass a function that builds it: lambda rngs: Mlp\(rngs\)"),
        ({"weights": np.ones(1000)}, "a model to train, received 'dict'"),
        (lambda rngs: LinenMlp(), r"received LinenMlp of flax\.linen\. .*ToNNX"),
        (lambda rngs: None, r"a module of flax\.nnx, received 'None'"),
        (torch.nn.Linear(2, 2), "received Linear, a torch module"),
    ],
)
def test_other_models_are_refused_by_what_they_are(model, message):
    with pytest.raises(BadArgument, match=message):
        mlp_trainer(model=model).train()


# -- evaluation and files ------------------------------------------------------------------------------------------


def test_a_smaller_last_evaluation_batch_is_compiled_once_and_without_a_warning(caplog):
    trainer = mlp_trainer(dataset_eval=samples(13, seed=1), eval_steps=1)
    trainer.train()
    assert len(logged(trainer, "val/loss")) == 8
    assert trainer.eval_step_fn.compilations.count == 2  # 8 rows, 5 rows
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_model_checkpoint_writes_to_the_run_folder():
    keeper = ModelCheckpoint(save_top_k=1, save_dir="best", filename="step_{step}")
    trainer = mlp_trainer(callbacks=[keeper], dataset_eval=samples(8, seed=1), eval_steps=4)
    trainer.train()
    assert keeper.best_path.parent == trainer.run_folder.absolute() / "best"
