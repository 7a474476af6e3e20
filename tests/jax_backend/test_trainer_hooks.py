"""Hooks of the trainer, native, HF and mini callbacks, and loggers in a run on JAX."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from backend_toys import are_equal, on_host
from jax_toys import Crash, CrashAt, MeanTrainer, StepsTrainer, logged, losses, mlp_trainer, samples
from transformers import TrainerCallback

from trainformer.callbacks import EarlyStopping, LMEval, ModelCheckpoint
from trainformer.core.errors import BadArgument
from trainformer.loggers.jsonl import JsonlLogger, read_jsonl
from trainformer.mini import BaseHook
from trainformer.run import run_of

# -- hooks of the trainer ---------------------------------------------------------------------------------------------


class Silent(MeanTrainer):
    """Hooks that return nothing."""

    calls = ()

    def on_step_start(self, state, *args, **kwargs):
        self.calls = (*self.calls, ("start", *args))
        return super().on_step_start(state, *args, **kwargs)

    def on_step_end(self, state, metrics, *args, **kwargs):
        self.calls = (*self.calls, ("end", sorted(metrics), *args))

    def on_log(self, metrics, *args, **kwargs):
        self.calls = (*self.calls, ("log", "train/loss" in metrics, *args))


def test_hooks_that_return_nothing_change_nothing():
    plain, silent = mlp_trainer(max_steps=3), mlp_trainer(Silent, max_steps=3, output_dir="silent")
    assert are_equal(plain.train().params, silent.train().params)
    assert losses(plain) == losses(silent)
    one = [("start", 0), ("end", ["grad_norm", "loss"], 1), ("log", True, 1)]
    assert list(silent.calls[:4]) == [*one, ("start", 1)]
    assert len(silent.calls) == 9


class Modifying(MeanTrainer):
    """Hooks that return a new state or metrics."""

    def on_step_start(self, state, *args):
        return state.replace(params={**state.params, "outer": {**state.params["outer"], "bias": jnp.ones(3)}})

    def on_step_end(self, state, metrics, step):
        metrics = {**metrics, "loss": metrics["loss"] * 0 + 7.0, "double": metrics["grad_norm"] * 2}
        return state.replace(
            params={**state.params, "inner": {**state.params["inner"], "bias": jnp.full(16, 3.0)}}
        ), metrics

    def on_log(self, metrics, step):
        return {**metrics, "train/mine": float(step)}


def test_return_values_of_hooks_are_used():
    trainer = mlp_trainer(Modifying, max_steps=2, learning_rate=1e-30)
    state = trainer.train()
    np.testing.assert_array_equal(state.params["outer"]["bias"], np.ones(3))
    np.testing.assert_array_equal(state.params["inner"]["bias"], np.full(16, 3.0))
    assert losses(trainer) == [7.0, 7.0]
    np.testing.assert_allclose(
        logged(trainer, "train/double"), 2 * np.array(logged(trainer, "train/grad_norm")), rtol=1e-6
    )
    assert logged(trainer, "train/mine") == [1.0, 2.0]
    assert [r["train/mine"] for r in read_jsonl(trainer.run_folder / "metrics.jsonl")] == [1.0, 2.0]


class OnlyState(StepsTrainer):
    """User-written steps; the hook returns a state alone."""

    def on_step_end(self, state, metrics, *args):
        assert set(metrics) == {"loss"}
        return state.replace(step=state.step + 10)


def test_a_hook_can_return_a_state_alone():
    trainer = mlp_trainer(OnlyState, max_steps=3)
    assert int(trainer.train().step) == 33
    assert trainer.state.step == 3


# -- callbacks -----------------------------------------------------------------------------------------------------


class Native:
    def __init__(self):
        self.steps, self.losses, self.count = [], [], 0

    def on_step_end(self, trainer, step, loss):
        self.steps.append(step)
        self.losses.append(float(loss))
        self.count += 1

    def on_log(self, trainer, metrics):
        metrics["train/native"] = float(len(self.steps))

    def state_dict(self):
        return {"count": self.count, "array": np.arange(3)}

    def load_state_dict(self, state):
        self.count = state["count"] + int(state["array"].sum())


class Huggingface(TrainerCallback):
    def __init__(self):
        self.calls, self.logs = [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append(state.global_step)
        control.should_training_stop = state.global_step == 5

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


class Mini(BaseHook):
    def __init__(self):
        self.steps = 0

    def on_after_step(self, trainer):
        self.steps += 1


def test_native_hf_and_mini_callbacks():
    native, foreign, hook = Native(), Huggingface(), Mini()
    trainer = mlp_trainer(callbacks=[native, foreign, hook], num_train_epochs=5)
    trainer.train()
    assert native.steps == foreign.calls == [1, 2, 3, 4, 5]
    assert hook.steps == 5
    np.testing.assert_allclose(native.losses, losses(trainer), rtol=1e-6)
    assert foreign.logs[0]["loss"] == pytest.approx(native.losses[0], rel=1e-3)
    assert logged(trainer, "train/native") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert trainer.control.stopped_by == "Huggingface"


def test_the_state_of_a_callback_is_resumed():
    with pytest.raises(Crash):
        mlp_trainer(callbacks=[Native(), CrashAt(at=4)], save_steps=3).train()
    native = Native()
    mlp_trainer(callbacks=[native, CrashAt(at=99)], save_steps=3).train()
    assert native.steps == [4, 5, 6, 7, 8]
    assert native.count == 3 + 3 + 5  # steps before, the sum of the array, and steps after


def test_early_stopping_and_a_checkpoint_by_name():
    keeping = ModelCheckpoint(save_top_k=1, save_dir="best", filename="step_{step}")
    trainer = mlp_trainer(
        callbacks=[EarlyStopping(patience=1, min_delta=10.0), keeping],
        dataset_eval=samples(13, seed=1),
        eval_steps=2,
        num_train_epochs=9,
    )
    trainer.train()
    assert trainer.state.step == 4
    assert trainer.control.stopped_by == "EarlyStopping"
    assert [path.name for path in keeping.best_path.parent.iterdir()] == [keeping.best_path.name]
    again = mlp_trainer(output_dir="again")
    again.train(ckpt_path=keeping.best_path)
    assert again.state.step == 8


class Substep:
    def on_substep_end(self, trainer, step):
        """Never called."""


class PreOptimizer(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Never called."""


@pytest.mark.parametrize("callback", [Substep(), PreOptimizer()], ids=lambda c: type(c).__name__)
def test_callbacks_for_events_inside_a_jitted_step_are_refused(callback):
    name = type(callback).__name__
    message = f"{name} handles .* inside a compiled step"
    with pytest.raises(BadArgument, match=message):
        mlp_trainer(callbacks=[callback])
    trainer = mlp_trainer()
    with pytest.raises(BadArgument, match=message):
        trainer.add_callback(callback)
    assert not [kept for kept in run_of(trainer).callbacks if type(kept).__name__ == name]


def test_callbacks_that_need_a_torch_model_are_refused():
    with pytest.raises(BadArgument, match="LMEval needs a torch model"):
        mlp_trainer(callbacks=[LMEval("arc_easy")])


# -- loggers -------------------------------------------------------------------------------------------------------


def test_loggers_continue_after_a_failure(tmp_path, event_files_in_order):
    """No step is logged twice or missing; TensorBoard has the same values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = {"log": ["tensorboard", JsonlLogger(tmp_path / "mine.jsonl")], "save_steps": 3}
    with pytest.raises(Crash):
        mlp_trainer(callbacks=[CrashAt(at=5)], **options).train()
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "failed"
    trainer = mlp_trainer(callbacks=[CrashAt(at=99)], **options)
    trainer.train()
    wanted = [(record["step"], record["train/loss"]) for record in trainer.state.log_history]
    assert [step for step, _ in wanted] == list(range(1, 9))
    for file in ("run/metrics.jsonl", "mine.jsonl"):
        assert [(r["step"], r["train/loss"]) for r in read_jsonl(tmp_path / file)] == wanted
    shown = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Scalars("train/loss")
    assert [s.step for s in shown] == [step for step, _ in wanted]
    np.testing.assert_allclose([s.value for s in shown], [value for _, value in wanted], rtol=1e-6)


def test_a_hook_can_keep_a_copy_of_the_state():
    """The next step donates the state itself."""
    kept = []

    class Keeping(MeanTrainer):
        def on_step_end(self, state, metrics, *args):
            kept.append(on_host(state.params))

    final = mlp_trainer(Keeping, max_steps=3).train()
    assert are_equal(kept[-1], final.params)
    assert not are_equal(kept[0], final.params)
