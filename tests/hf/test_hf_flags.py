"""Control flags compared with the Trainer of transformers, and who is named when a run is stopped."""

import logging

import pytest
import torch
import transformers
from hf_toys import Classifier, examples, make, make_theirs, parameters, recorder

from trainformer import hf


def asking(base, event, when, **flags):
    """A callback that sets flags at one event of one step."""

    class Asking(base):
        def _ask(self, args, state, control, **kwargs):
            if state.global_step == when:
                for name, value in flags.items():
                    setattr(control, name, value)

    setattr(Asking, event, Asking._ask)
    return Asking()


AT_TWO, AT_FOUR = ({"eval_strategy": "steps", "eval_steps": n} for n in (2, 4))

CASES = {
    "stop": ("on_step_end", 3, {"should_training_stop": True}, {"logging_steps": 2}),
    "stop, evaluated per epoch": ("on_step_end", 3, {"should_training_stop": True}, {"eval_strategy": "epoch"}),
    "stop when an epoch ends": ("on_epoch_end", 5, {"should_training_stop": True}, {"eval_strategy": "epoch"}),
    "stop at an evaluation": ("on_evaluate", 4, {"should_training_stop": True}, AT_FOUR),
    "stop at a log record": ("on_log", 2, {"should_training_stop": True}, {"logging_steps": 2}),
    "end the epoch": ("on_step_end", 3, {"should_epoch_stop": True}, {"logging_steps": 2}),
    "save": ("on_step_end", 3, {"should_save": True}, {}),
    "evaluate": ("on_step_end", 3, {"should_evaluate": True}, {}),
    "log": ("on_step_end", 3, {"should_log": True}, {}),
    "everything": ("on_step_end", 3, {"should_save": True, "should_evaluate": True, "should_log": True}, {}),
    "save when an epoch ends": ("on_epoch_end", 5, {"should_save": True}, {}),
    "evaluate when an epoch ends": ("on_epoch_end", 5, {"should_evaluate": True}, {}),
    "evaluate when the last epoch ends": ("on_epoch_end", 10, {"should_evaluate": True}, {}),
    "call off a save": ("on_step_end", 4, {"should_save": False}, {"save_strategy": "steps", "save_steps": 2}),
    "call off a log record": ("on_step_end", 4, {"should_log": False}, {"logging_steps": 2}),
    "call off an evaluation": ("on_step_end", 4, {"should_evaluate": False}, AT_TWO),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flags_match_transformers(case, tmp_path):
    event, when, flags, options = CASES[case]
    ours, theirs = recorder(), recorder(transformers.TrainerCallback)
    options = {"num_train_epochs": 2, "evaluation": examples(20, seed=1), **options}
    make(tmp_path / "a", callbacks=[asking(hf.TrainerCallback, event, when, **flags), ours], **options).train()
    asker = asking(transformers.TrainerCallback, event, when, **flags)
    make_theirs(tmp_path / "b", callbacks=[asker, theirs], **options).train()
    if "should_epoch_stop" in flags:  # transformers keeps the fractional epoch until the next one begins
        assert [place[:2] for place in ours.seen] == [place[:2] for place in theirs.seen]
    else:
        assert ours.seen == theirs.seen


def test_flags_in_a_returned_control_are_combined_with_those_set_in_place(tmp_path):
    """Older callbacks change the control they receive and return a new one."""

    class Both(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                control.should_log = True
                return hf.TrainerControl(should_training_stop=True)

    seen = recorder()
    trainer = make(tmp_path, callbacks=[Both(), seen], num_train_epochs=2)
    assert trainer.train().global_step == 2
    assert seen.names().count("on_log") == 2  # the requested one, and the summary
    assert trainer.stopped_by == "Both"


def test_the_callback_that_stopped_a_run_is_named(tmp_path, caplog):
    stopper = asking(transformers.TrainerCallback, "on_step_end", 3, should_training_stop=True)
    with caplog.at_level(logging.INFO, logger="trainformer"):
        trainer = make(tmp_path, callbacks=[stopper])
        trainer.train()
    assert trainer.stopped_by == "Asking"
    assert "should_training_stop in on_step_end" in trainer.stop_reason
    assert "stopped at step 3 by Asking" in caplog.text
    whole = make(tmp_path / "whole", max_steps=2)
    whole.train()
    assert whole.stopped_by is whole.stop_reason is None


def test_a_stopped_run_can_be_trained_again(tmp_path):
    """Flags of the first run do not affect the second."""
    trainer = make(tmp_path, callbacks=[asking(hf.TrainerCallback, "on_step_end", 3, should_training_stop=True)])
    assert trainer.train().global_step == 3
    trainer.pop_callback(trainer.callbacks[-1])
    assert trainer.train().global_step == 15


def test_abort_saves_no_further_checkpoint(tmp_path):
    seen = recorder()
    aborter = asking(hf.TrainerCallback, "on_step_end", 5, should_abort_without_save=True)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch", "evaluation": examples(8, seed=1)}
    trainer = make(tmp_path, callbacks=[aborter, seen], **options)
    assert trainer.train().global_step == 5
    assert trainer.stopped_by == "Asking"
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert "on_evaluate" not in seen.names()
    assert seen.names()[-2:] == ["on_log", "on_train_end"]


def test_an_aborted_run_resumes_from_its_last_checkpoint(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    whole = make(tmp_path / "whole", Classifier(0.2), **options)
    whole.train()
    aborter = asking(hf.TrainerCallback, "on_step_end", 5, should_abort_without_save=True)
    make(tmp_path / "cut", Classifier(0.2), callbacks=[aborter], **options).train()
    again = make(tmp_path / "cut", Classifier(0.2), callbacks=[recorder()], **options)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    for name, p in parameters(whole.model).items():
        assert torch.equal(p, parameters(again.model)[name])


def test_early_stopping_callback_of_transformers_stops_at_the_same_step(tmp_path):
    """With random labels the evaluation loss soon rises."""
    train = [{**e, "labels": torch.tensor(i % 3)} for i, e in enumerate(examples(24))]
    evaluation = [{**e, "labels": torch.tensor(i % 2)} for i, e in enumerate(examples(24, seed=5))]
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 40,
        "metric_for_best_model": "loss", "learning_rate": 5e-2, "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant", "train": train, "evaluation": evaluation,
    }  # fmt: skip
    made = {}
    for name, build in (("ours", make), ("theirs", make_theirs)):
        stopper = transformers.EarlyStoppingCallback(early_stopping_patience=3)
        trainer = build(tmp_path / name, callbacks=[stopper], **options)
        made[name] = trainer, trainer.train(), stopper
    ours, theirs = made["ours"], made["theirs"]
    assert ours[1].global_step == theirs[1].global_step < 40 * 3
    assert ours[2].early_stopping_patience_counter == 3
    assert ours[0].state.best_metric == pytest.approx(theirs[0].state.best_metric, rel=1e-5)
    assert ours[0].state.best_global_step == theirs[0].state.best_global_step
    assert ours[0].stopped_by == "EarlyStoppingCallback"
    assert ours[1].metrics.keys() == theirs[1].metrics.keys()
    best = theirs[0].state.best_model_checkpoint.rpartition("/")[2]
    assert ours[0].state.best_model_checkpoint.endswith(best)
    for name, p in parameters(theirs[0].model).items():  # the best, not the last
        torch.testing.assert_close(parameters(ours[0].model)[name], p, rtol=1e-4, atol=1e-6)


def test_the_state_of_a_callback_of_transformers_is_restored(tmp_path):
    """The patience of early stopping is restored on resume; in transformers it is re-initialised."""
    evaluation = [{**e, "labels": torch.tensor(i % 2)} for i, e in enumerate(examples(24, seed=5))]
    train = [{**e, "labels": torch.tensor(i % 3)} for i, e in enumerate(examples(24))]
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "loss", "learning_rate": 5e-2,
        "lr_scheduler_type": "constant", "train": train, "evaluation": evaluation, "num_train_epochs": 40,
    }  # fmt: skip

    def run(folder, *more, **resume):
        stopper = transformers.EarlyStoppingCallback(early_stopping_patience=4)
        trainer = make(tmp_path / folder, callbacks=[stopper, *more], **options)
        return trainer.train(**resume).global_step, stopper.early_stopping_patience_counter

    end, counter = run("whole")
    assert counter == 4
    run("cut", asking(hf.TrainerCallback, "on_step_begin", end - 5, should_abort_without_save=True))
    assert run("cut", resume_from_checkpoint=True) == (end, 4)
