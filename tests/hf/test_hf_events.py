"""The order of events, and the state at each of them, compared with the Trainer of transformers."""

import pytest
import transformers
from hf_toys import examples, make, make_theirs, recorder

SETS = {
    "as it is": {},
    "logging at some steps": {"logging_steps": 3},
    "logging the first step": {"logging_steps": 4, "logging_first_step": True},
    "logging per epoch": {"logging_strategy": "epoch"},
    "not logging": {"logging_strategy": "no"},
    "evaluation at steps": {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 3},
    "evaluation at steps that end before the run": {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 5},
    "evaluation per epoch": {"eval_strategy": "epoch", "logging_steps": 5},
    "saving at steps": {"save_strategy": "steps", "save_steps": 5, "logging_steps": 5},
    "saving at steps that end before the run": {"save_strategy": "steps", "save_steps": 4},
    "saving per epoch": {"save_strategy": "epoch", "logging_steps": 5},
    "saving per epoch, ending within one": {"save_strategy": "epoch", "max_steps": 7},
    "everything per epoch, ending within one": {
        "logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 7,
    },
    "everything at once": {
        "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 10,
    },
    "everything per epoch": {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"},
    "accumulating": {"gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "epoch"},
    "a number of steps": {"max_steps": 7, "logging_steps": 2, "save_strategy": "steps", "save_steps": 3},
    "half an epoch": {"num_train_epochs": 1.5, "logging_steps": 2, "eval_strategy": "epoch"},
    "shares of all steps": {"logging_steps": 0.2, "eval_strategy": "steps", "eval_steps": 0.5},
    "one epoch": {"num_train_epochs": 1, "logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch"},
    "the best one": {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "logging_steps": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_the_order_of_events_matches_transformers(name, tmp_path):
    options = {"num_train_epochs": 2, **SETS[name]}
    ours, theirs = recorder(), recorder(transformers.TrainerCallback)
    evaluation = examples(20, seed=1)
    make(tmp_path / "ours", callbacks=[ours], evaluation=evaluation, **options).train()
    make_theirs(tmp_path / "theirs", callbacks=[theirs], evaluation=evaluation, **options).train()
    assert ours.seen == theirs.seen
    assert ours.names().count("on_step_end") >= 5


def expected_events(trainer, train_length, eval_length):
    """The expected events, as in the callback test of transformers."""
    args = trainer.args
    evaluation = ["on_prediction_step"] * eval_length + ["on_log", "on_evaluate"]
    events, step = ["on_init_end", "on_train_begin"], 0
    for _ in range(int(trainer.state.num_train_epochs)):
        events.append("on_epoch_begin")
        for _ in range(train_length):
            step += 1
            events += ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
            if step % args.logging_steps == 0:
                events.append("on_log")
            if args.eval_strategy == "steps" and step % args.eval_steps == 0:
                events += evaluation
            if args.save_strategy == "steps" and (step % args.save_steps == 0 or step == trainer.state.max_steps):
                events.append("on_save")
        events.append("on_epoch_end")
        if args.eval_strategy == "epoch":
            events += evaluation
    return [*events, "on_log", "on_train_end"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logging_steps": 3},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"eval_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 10, "logging_steps": 3, "save_strategy": "steps", "save_steps": 5},
    ],
)
def test_the_order_of_events_matches_the_test_of_transformers(options, tmp_path):
    seen = recorder()
    options = {"logging_steps": 500, "num_train_epochs": 2, **options}
    trainer = make(tmp_path, callbacks=[seen], evaluation=examples(20, seed=1), **options)
    trainer.train()
    assert seen.names() == expected_events(trainer, train_length=5, eval_length=3)


def test_callbacks_can_be_added_popped_and_removed(tmp_path):
    """As in the callback test of transformers."""
    trainer = make(tmp_path, disable_tqdm=False)
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds == ["ProgressCallback", "InfoCallback"]
    kind = transformers.PrinterCallback
    trainer.add_callback(kind)
    assert type(trainer.callbacks[-1]) is kind
    popped = trainer.pop_callback(kind)
    assert type(popped) is kind
    assert len(trainer.callbacks) == 2
    trainer.add_callback(popped)
    assert trainer.callbacks[-1] is popped
    assert trainer.pop_callback(popped) is popped
    trainer.add_callback(popped)
    trainer.remove_callback(kind)
    assert len(trainer.callbacks) == 2
    assert trainer.pop_callback(kind) is None


def test_callbacks_are_added_to_the_default_ones_and_the_list_is_copied(tmp_path):
    mine = [recorder()]
    trainer = make(tmp_path, callbacks=mine, disable_tqdm=False)
    assert len(trainer.callbacks) == 3
    trainer.add_callback(recorder())
    assert len(mine) == 1


def test_callbacks_can_be_added_and_removed_during_training(tmp_path):
    late = recorder()

    class Host(type(late)):
        def on_step_end(self, args, state, control, trainer=None, **kwargs):
            if state.global_step == 2:
                trainer.add_callback(late)
            if state.global_step == 4:
                trainer.remove_callback(late)

    make(tmp_path, callbacks=[Host()], max_steps=6).train()
    steps = [step for name, step, _ in late.seen if name == "on_step_end"]
    assert steps == [3, 4]
    assert "on_train_end" not in late.names()


def test_evaluate_and_predict_dispatch_events(tmp_path):
    seen = recorder()
    trainer = make(tmp_path, callbacks=[seen], evaluation=examples(20, seed=1))
    trainer.evaluate()
    assert seen.names() == ["on_init_end", *["on_prediction_step"] * 3, "on_log", "on_evaluate"]
    seen.seen.clear()
    trainer.predict(examples(9, seed=2))
    assert seen.names() == [*["on_prediction_step"] * 2, "on_predict"]


@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"max_steps": 7}])
def test_flags_at_the_end_of_an_epoch_match_transformers(length, tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", **length}
    seen = []
    for maker in (make_theirs, make):
        flags = []

        class Watching(transformers.TrainerCallback):
            def on_epoch_end(self, args, state, control, flags=flags, **kwargs):
                flags.append((state.global_step, control.should_save, control.should_evaluate))

        trainer = maker(tmp_path / maker.__name__, evaluation=examples(8), **options)
        trainer.add_callback(Watching())
        trainer.train()
        seen.append(flags)
    assert seen[0] == seen[1]
    assert all(flag for _, *flags in seen[1] for flag in flags)
