"""The usage examples of EasyDeL users: arguments, a trainer with its own steps, hooks; and no torch."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import are_equal, assert_close, on_host
from flax import nnx
from jax_toys import CLASSES, MeanTrainer, Mlp, StepsTrainer, arguments, by_hand, in_order, losses, mean_loss, samples

from trainformer.core.errors import BadArgument
from trainformer.jax import (
    BaseTrainer,
    EasyDeLState,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainingArguments,
)


def test_easydel_arguments_train(tmp_path):
    args = TrainingArguments(
        model_name="MyFineTunedModel",
        num_train_epochs=3,
        learning_rate=2e-5,
        total_batch_size=32,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=1,
        weight_decay=0.01,
        max_steps=-1,
        gradient_checkpointing="nothing_saveable",
        sharding_array=(1, -1, 1, 1),
        use_fast_kernels=True,
        logging_steps=10,
        save_steps=2,
        save_total_limit=2,
        evaluation_strategy="steps",
        eval_steps=3,
        output_dir="runs/my_model_run",
    )
    data = samples(64)
    trainer = MeanTrainer(args, model=Mlp(nnx.Rngs(0)), dataset_train=data, dataset_eval=samples(20, seed=1))
    before = on_host(trainer.model_state.params)
    state = trainer.train()
    assert isinstance(state, EasyDeLState)
    assert int(state.step) == trainer.state.step == 6
    assert not are_equal(before, state.params)
    assert sorted(p.name for p in (tmp_path / "runs/my_model_run/checkpoints").glob("step_*")) == [
        "step_00000004",
        "step_00000006",
    ]
    assert [r["step"] for r in trainer.state.log_history if "val/loss" in r] == [3, 6]


class CustomTrainer(BaseTrainer):
    """Overrides collate function, step functions and a hook."""

    def create_collect_function(self, *args, **kwargs):
        return lambda batch: batch

    def configure_functions(self, *args, **kwargs) -> TrainerConfigureFunctionOutput:
        def train_step(state, batch):
            def loss_of(params):
                hidden = jnp.tanh(batch["x"] @ params["inner"]["kernel"] + params["inner"]["bias"])
                logits = hidden @ params["outer"]["kernel"] + params["outer"]["bias"]
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

            loss, grads = jax.value_and_grad(loss_of)(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss}

        def eval_step(state, batch):
            return {"eval_loss": mean_loss(state.model, batch)}

        return TrainerConfigureFunctionOutput(train_step_fn=jax.jit(train_step), eval_step_fn=jax.jit(eval_step))

    def on_step_end(self, state, metrics, *args, **kwargs):
        if hasattr(self, "scheduler") and self.scheduler is not None:
            current_lr = self.scheduler(state.step)
            print(f"Step completed. Current LR: {current_lr}")
        super().on_step_end(state, metrics, *args, **kwargs)


def test_an_easydel_trainer_matches_the_hand_written_loop(capsys):
    data, model = samples(32), Mlp(nnx.Rngs(0))
    schedule = optax.linear_schedule(1e-2, 0.0, 8)
    wanted, params = by_hand(Mlp(nnx.Rngs(0)), in_order(data, 8, 2), mean_loss, optax.adam(schedule))
    trainer = CustomTrainer(arguments(shuffle=False), model=model, dataset_train=data, dataset_eval=samples(16, 1))
    state = trainer.train()
    np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-5)
    assert_close(state.params, params, atol=1e-5)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Step completed. Current LR:")]
    np.testing.assert_allclose([float(line.split()[-1]) for line in printed], [float(schedule(n)) for n in range(1, 9)])
    assert set(trainer.eval(state)) == {"eval_loss"}


class PlaceholderTrainer(CustomTrainer):
    """Step functions that train nothing and do not increment the step."""

    def configure_functions(self, *args, **kwargs):
        def train_step(state, batch):
            return state, {"loss": jnp.mean(batch.get("y", 0.0))}

        return TrainerConfigureFunctionOutput(
            jax.jit(train_step), jax.jit(lambda s, b: {"eval_loss": jnp.mean(b["y"])})
        )


def test_a_run_ends_even_if_its_steps_do_not_increment_the_state():
    data = samples(32)
    trainer = PlaceholderTrainer(
        arguments(shuffle=False, max_steps=5), model=Mlp(nnx.Rngs(0)), dataset_train=data, dataset_eval=samples(13, 1)
    )
    before = on_host(trainer.model_state.params)
    state = trainer.train()
    assert trainer.state.step == 5
    assert int(state.step) == 0
    assert are_equal(before, state.params)
    np.testing.assert_allclose(losses(trainer)[0], data["y"][:8].mean(), rtol=1e-6)
    np.testing.assert_allclose(trainer.eval()["eval_loss"], samples(13, 1)["y"].mean(), rtol=1e-6)


class EverythingTrainer(StepsTrainer):
    """Configures its own model, state, optimizer and loaders."""

    def configure_model(self):
        model, tx = Mlp(nnx.Rngs(3)), optax.sgd(0.1)
        return TrainerConfigureModelOutput(model=model, state=EasyDeLState.create(model, tx, 0), tx=tx)

    def configure_dataloaders(self):
        return TrainerConfigureDataloaderOutput(in_order(samples(20), 8, 1), [samples(5, seed=1)], 4)


def test_a_trainer_can_configure_everything_itself():
    wanted, params = by_hand(Mlp(nnx.Rngs(3)), in_order(samples(20), 8, 2)[:4], mean_loss, optax.sgd(0.1))
    trainer = EverythingTrainer(arguments(num_train_epochs=9))
    state = trainer.train()
    np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-5)
    assert_close(state.params, params, atol=1e-6)
    assert trainer.max_training_steps == trainer.state.step == 4
    assert "train/lr" not in trainer.state.log_history[0]
    model = state.model
    model.eval()
    np.testing.assert_allclose(trainer.eval()["eval_loss"], float(mean_loss(model, samples(5, seed=1))), rtol=1e-5)


def test_the_collect_function_collates_the_batches():
    class Doubled(MeanTrainer):
        def create_collect_function(self):
            return lambda rows: (
                {name: np.stack([row[name] for row in rows]) * 2 for name in ("x",)}
                | {"y": np.stack([row["y"] for row in rows])}
            )

    data = samples(16)
    doubled = {**data, "x": data["x"] * 2}
    wanted, _ = by_hand(Mlp(nnx.Rngs(0)), in_order(doubled, 8, 1), mean_loss, optax.adam(1e-2))
    trainer = Doubled(
        arguments(shuffle=False, num_train_epochs=1, scheduler="constant"), model=Mlp(nnx.Rngs(0)), dataset_train=data
    )
    trainer.train()
    np.testing.assert_allclose(losses(trainer), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Expected training data, received none"),
        ({"dataset_train": samples(8), "model": None}, "a model to train"),
        ({"dataset_train": samples(8), "train_dataset": samples(8)}, "received both"),
        ({"dataset_train": samples(8), "model": Mlp}, r"Pass a function that builds it: lambda rngs: Mlp\(rngs\)"),
    ],
)
def test_missing_inputs_raise_at_construction(options, message):
    with pytest.raises(BadArgument, match=message):
        MeanTrainer(arguments(), **{"model": Mlp(nnx.Rngs(0)), **options})


def test_a_trainer_without_a_loss_is_refused():
    with pytest.raises(BadArgument, match="has no loss"):
        BaseTrainer(arguments(), model=Mlp(nnx.Rngs(0)), dataset_train=samples(8))
    with pytest.raises(BadArgument, match="arguments to be TrainingArguments"):
        MeanTrainer({"learning_rate": 1.0}, model=Mlp(nnx.Rngs(0)), dataset_train=samples(8))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s, b: s, r"train_step_fn to return \(state, metrics\)"),
        (lambda s, b: (s, 3.0), "metrics as a dict of scalars"),
        (lambda s, b: (s, {"loss": jnp.ones(CLASSES)}), "the metric 'loss' to be a scalar"),
    ],
)
def test_what_a_step_returns_is_looked_at(returned, message):
    class Wrong(BaseTrainer):
        def configure_functions(self):
            return TrainerConfigureFunctionOutput(returned)

    trainer = Wrong(arguments(), model=Mlp(nnx.Rngs(0)), dataset_train=samples(8))
    with pytest.raises(BadArgument, match=message):
        trainer.train()


WITHOUT_TORCH = """
import sys
import trainformer.jax
assert "torch" not in sys.modules and "jax" not in sys.modules, "at import"
import jax.numpy as jnp, numpy as np
from flax import nnx
from trainformer.jax import BaseTrainer, TrainingArguments

class Line(BaseTrainer):
    def compute_loss(self, model, batch, key):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

x = np.linspace(-1, 1, 22, dtype=np.float32)[:, None]
data = {"x": x, "y": 2 * x}
arguments = TrainingArguments(
    num_train_epochs=2, total_batch_size=8, output_dir="run", save_steps=2, evaluation_strategy="epoch",
    save_async=True, save_total_limit=2, metric_for_best_model="loss",
)
for expected in (6, 6):  # the second trainer resumes a finished run
    trainer = Line(arguments, model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), dataset_train=data, dataset_eval=data)
    trainer.train()
    assert trainer.state.step == expected
trainer.eval()
trainer.save_pretrained("saved")
found = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "transformers"))
print("found", found)
"""


@pytest.mark.slow
def test_torch_is_never_imported(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1][:60] == "found []"
