"""Native callbacks, HF callbacks and mini hooks in one run of `Trainer`."""

import pytest
import torch
import transformers

from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.compat.huggingface import is_huggingface_callback
from trainformer.callbacks.compat.huggingface_types import IntervalStrategy, TrainerCallback
from trainformer.callbacks.compat.mini import BaseHook
from trainformer.core.errors import BadArgument


def trainer_with(tmp_path, *callbacks, **options):
    defaults = {"epochs": 2, "batch_size": 16, "lr": 0.05, "log": "none", "run_dir": tmp_path / "run", "val_split": 16}
    return Trainer(MeanTask(), classes(), callbacks=list(callbacks), **{**defaults, **options})


def test_callbacks_of_three_kinds_run_in_the_given_order(tmp_path):
    received = []

    class Native:
        def on_step_end(self, trainer, step, loss):
            received.append(("native", step))

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            received.append(("transformers", state.global_step))

    class Ours(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            received.append(("hf", state.global_step))

    class Hook(BaseHook):
        def on_after_step(self, trainer):
            received.append(("mini", trainer.step))

    trainer_with(tmp_path, Theirs(), Hook(), Native(), Ours(), max_steps=2).fit()
    assert received == [(who, step) for step in (1, 2) for who in ("transformers", "mini", "native", "hf")]


def test_hf_callbacks_without_a_base_class_are_recognised_by_their_signature():
    class Theirs:
        def on_step_end(self, args, state, control, **kwargs): ...

    class Native:
        def on_step_end(self, trainer, step, loss): ...

    assert is_huggingface_callback(Theirs())
    assert not is_huggingface_callback(Native())
    with pytest.raises(BadArgument, match="at least one of"):
        CallbackList([object()])


def test_early_stopping_of_transformers_in_a_plain_trainer(tmp_path):
    """Random labels: the validation loss rises from the start."""
    x, _ = classes(96)
    y = torch.arange(96) % 3
    options = {"epochs": 30, "batch_size": 16, "lr": 0.1, "log": "none", "run_dir": tmp_path, "scheduler": None}
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = Trainer(MeanTask(), (x[:64], y[:64]), val_data=(x[64:], y[64:]), callbacks=[stopper], **options).fit()
    assert trainer.control.stopped_by == "EarlyStoppingCallback"
    values = [r["val/loss"] for r in trainer.state.log_history if "val/loss" in r]
    best = min(range(len(values)), key=values.__getitem__)
    assert len(values) == best + 3
    assert all(v >= values[best] for v in values[best:])


def test_what_hf_callbacks_receive_from_a_plain_trainer(tmp_path):
    seen = {}

    class Recorder(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen["begin"] = (state.max_steps, state.num_train_epochs, args.learning_rate, args.eval_strategy)
            seen["keywords"] = sorted(kwargs)
            seen["lengths"] = len(kwargs["train_dataloader"]), len(kwargs["eval_dataloader"])
            seen["json"] = args.to_json_string()

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.setdefault("logs", []).append(set(logs))
            logs["mine"] = 7.0

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            seen["metrics"] = metrics
            seen.setdefault("best", []).append(state.best_metric)

        def on_save(self, args, state, control, **kwargs):
            seen["saved"] = state.global_step

    trainer = trainer_with(tmp_path, Recorder(), log_every=2).fit()
    assert seen["begin"] == (6, 2, 0.05, IntervalStrategy.EPOCH)
    assert seen["keywords"] == sorted(
        ["model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "trainer"]
    )
    assert seen["lengths"] == (3, 1)
    assert '"learning_rate": 0.05' in seen["json"]
    assert {"loss", "learning_rate", "grad_norm", "epoch"} <= seen["logs"][0]
    assert {"eval_loss", "eval_accuracy", "epoch"} <= seen["metrics"].keys()
    assert seen["best"][0] is None  # at the first evaluation there is nothing to compare with
    assert seen["best"][1] == next(r["val/loss"] for r in trainer.state.log_history if "val/loss" in r)
    assert seen["saved"] == 6
    assert [r["mine"] for r in trainer.state.log_history if "train/loss" in r] == [7.0] * 4


def test_an_argument_that_a_plain_trainer_does_not_have_is_explained(tmp_path):
    class Asks(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            args.deepspeed_plugin  # noqa: B018

    with pytest.raises(AttributeError, match=r"args\.deepspeed_plugin.*trainformer\.hf\.Trainer"):
        trainer_with(tmp_path, Asks()).fit()


def test_callbacks_of_transformers_do_not_change_the_weights(tmp_path):
    plain = trainer_with(tmp_path / "a").fit()
    kinds = (
        transformers.PrinterCallback,
        transformers.ProgressCallback,
        transformers.trainer_callback.DefaultFlowCallback,
    )
    watched = trainer_with(tmp_path / "b", *(kind() for kind in kinds)).fit()
    assert same(weights(plain.task), weights(watched.task))


def test_a_pending_epoch_end_is_dispatched_on_resume(tmp_path):
    """HF dispatches it after a checkpoint that is due by steps, so a run that resumes from it dispatches it first."""

    class Counting(TrainerCallback):
        def __init__(self):
            self.received = []

        def on_epoch_end(self, args, state, control, **kwargs):
            self.received.append(("end", state.global_step))

        def on_step_end(self, args, state, control, **kwargs):
            self.received.append(("step", state.global_step))

        def state_dict(self):
            return {"received": list(self.received)}

        def load_state_dict(self, state):
            self.received = [tuple(item) for item in state["received"]]

    options = {"save_every": 3, "save_last": 9, "eval_every": None, "epochs": 3}
    whole = Counting()
    trainer_with(tmp_path / "whole", whole, **options).fit()
    assert whole.received[:5] == [("step", 1), ("step", 2), ("step", 3), ("end", 3), ("step", 4)]
    again = Counting()
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / "step_00000003"
    trainer_with(tmp_path / "again", again, **options, resume=checkpoint).fit()
    assert again.received == whole.received


def test_callbacks_can_be_added_and_removed(tmp_path):
    class Counter:
        steps = 0

        def attach(self, trainer):
            self.attached = trainer

        def on_step_end(self, trainer, step, loss):
            self.steps += 1

    first, second = Counter(), Counter()
    trainer = trainer_with(tmp_path, first, max_steps=2)
    trainer.add_callback(second)
    assert second.attached is trainer
    trainer.fit()
    assert trainer.remove_callback(first) is first
    assert trainer.remove_callback(first) is None
    trainer.max_steps = 5
    trainer.fit()
    assert (first.steps, second.steps) == (2, 5)
    assert trainer.remove_callback(Counter) is second


def test_hf_callbacks_see_the_cadence_of_the_monitored_validation_set():
    seen = []

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append((args.eval_strategy, args.eval_steps, args.metric_for_best_model))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            seen.append((state.global_step, sorted(name for name in metrics if "loss" in name)))

    sets = {"clean": classes(8, seed=1), "shifted": classes(8, seed=2)}
    Trainer(MeanTask(), classes(32), sets, epochs=1, batch_size=8, log="none", eval_every={"clean": "3steps"},
            callbacks=[Recorder()]).fit()  # fmt: skip
    assert seen == [
        ("steps", 3, "eval_clean/loss"),
        (3, ["eval_clean/loss"]),
        (4, ["eval_clean/loss", "eval_shifted/loss"]),
    ]
