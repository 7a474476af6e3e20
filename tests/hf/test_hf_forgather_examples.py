"""The examples of the Forgather document on callbacks, each with what it is supposed to do.

Class names, arguments and calls are the document's; only imports and placeholders (folders, prompts) are filled in.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import EarlyStoppingCallback, GPT2LMHeadModel

from text_toys import chat_tokenizer, gpt2, sentences
from trainformer.hf import (
    JsonLogger,
    ProgressCallback,
    TBLogger,
    TextgenCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

STEPS = 12


@pytest.fixture(scope="module")
def tokenizer():
    made = chat_tokenizer()
    made.pad_token = made.eos_token
    return made


@pytest.fixture
def make(tokenizer):
    """A trainer of a tiny language model: 12 steps, a log record every 2, an evaluation every 4."""
    ids = [tokenizer(text)["input_ids"][:4] for text in sentences()]
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == 4]

    def build(callbacks=None, eval_rows=rows[:4], **options):
        torch.manual_seed(0)
        defaults = {
            "output_dir": "out", "logging_dir": "logs", "per_device_train_batch_size": 4, "max_steps": STEPS,
            "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "use_cpu": True,
            "learning_rate": 1e-2, "disable_tqdm": True,
        }  # fmt: skip
        return Trainer(
            model=GPT2LMHeadModel(gpt2()),
            args=TrainingArguments(**{**defaults, **options}),
            train_dataset=rows,
            eval_dataset=eval_rows,
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    return build


@pytest.fixture
def writer():
    from torch.utils.tensorboard import SummaryWriter

    made = SummaryWriter("./runs/my_experiment")
    yield made
    made.close()


def tags(folder="./runs/my_experiment"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {*reader.Tags()["scalars"], *reader.Tags()["tensors"]}


# -- built-in callbacks ------------------------------------------------------------------------------------


def test_progress(make, capsys):
    trainer = make(callbacks=[])
    trainer.add_callback(ProgressCallback())
    trainer.train()
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " loss " in line]
    assert lines.count("val") == 3
    assert lines.count("step") == 6


def test_tensorboard(make, writer):
    trainer = make()
    callback = TBLogger(writer, name="My Experiment")
    trainer.add_callback(callback)
    trainer.train()
    assert {"train/loss", "eval/loss", "experiment_info/text_summary", "model_config/text_summary"} <= tags()


def test_generated_texts(make, writer):
    trainer = make()
    callback = TextgenCallback(
        summary_writer=writer,
        prompts=["Hello, world!", "The future of AI is"],
        generation_config={"max_new_tokens": 5, "temperature": 0.7},
        generation_steps=5,
    )
    trainer.add_callback(callback)
    trainer.train()
    assert {"generated/1/text_summary", "generated/2/text_summary"} <= tags()


# -- custom callbacks --------------------------------------------------------------------------------------


class MyCustomCallback(TrainerCallback):
    """Counts steps; stops after a number of steps or at a target loss."""

    def __init__(self, custom_param=None, most=5, target=0.0):
        self.custom_param = custom_param
        self.step_count = 0
        self.most, self.target = most, target

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        print(f"Training started with {state.max_steps} steps")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self.step_count += 1
        if self.step_count % 2 == 0:
            print(f"Completed {self.step_count} steps")
        if self.step_count >= self.most:
            control.should_training_stop = True
        return control

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs=None, **kwargs):
        if logs and "loss" in logs and logs["loss"] < self.target:
            print("Target loss reached!")
            control.should_training_stop = True
        return control


def test_a_custom_callback(make, capsys):
    callback = MyCustomCallback()
    make([callback]).train()
    out = capsys.readouterr().out
    assert f"Training started with {STEPS} steps" in out
    assert [line for line in out.splitlines() if line.startswith("Completed")] == [
        "Completed 2 steps",
        "Completed 4 steps",
    ]
    assert callback.step_count == 5


def test_a_target_loss_ends_the_run(make, capsys):
    trainer = make([MyCustomCallback(most=1000, target=100.0)])
    trainer.train()
    assert trainer.state.global_step == 2
    assert "Target loss reached!" in capsys.readouterr().out


class ModelCheckpointCallback(TrainerCallback):
    """Saves the model whenever an evaluation metric improves."""

    def __init__(self, output_dir="best", metric="eval_loss", mode="min"):
        self.output_dir = Path(output_dir)
        self.metric = metric
        self.mode = mode
        self.best_metric = float("inf") if mode == "min" else float("-inf")
        self.best_model_path = None

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics=None, **kwargs
    ):
        if not metrics or self.metric not in metrics:
            return None
        found = metrics[self.metric]
        if found < self.best_metric if self.mode == "min" else found > self.best_metric:
            self.best_metric = found
            folder = self.output_dir / f"best_model_step_{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            kwargs["model"].save_pretrained(folder)
            written = {"step": state.global_step, "epoch": state.epoch, self.metric: found, "all_metrics": metrics}
            (folder / "metrics.json").write_text(json.dumps(written, indent=2))
            self.best_model_path = folder
            control.should_save = True
        return control


def improvements(trainer):
    """Steps whose evaluation was the best so far."""
    losses = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    return [step for step in losses if losses[step] == min(v for s, v in losses.items() if s <= step)]


def test_the_best_model_is_saved(make):
    callback = ModelCheckpointCallback()
    trainer = make([callback])
    trainer.train()
    improved = improvements(trainer)
    assert improved == [4, 8, 12]
    assert sorted(path.name for path in Path("best").iterdir()) == sorted(f"best_model_step_{s}" for s in improved)
    noted = json.loads((callback.best_model_path / "metrics.json").read_text())
    assert noted["all_metrics"]["eval_loss"] == noted["eval_loss"] == callback.best_metric
    reread = GPT2LMHeadModel.from_pretrained(callback.best_model_path)
    assert all(torch.equal(a, b) for a, b in zip(reread.parameters(), trainer.model.parameters(), strict=True))


def test_should_save_in_on_evaluate(make):
    trainer = make([ModelCheckpointCallback()])
    trainer.train()
    found = {path.name for path in Path("out").glob("checkpoint-*")}
    assert found == {f"checkpoint-{step}" for step in improvements(trainer)}


# -- management --------------------------------------------------------------------------------------------


def test_adding(make, writer):
    trainer = make()
    first = MyCustomCallback(custom_param="value", most=1000)
    trainer.add_callback(first)
    trainer.add_callback(MyCustomCallback)  # instantiated with its defaults
    callbacks = [TBLogger(writer), JsonLogger(name="experiment"), TextgenCallback(prompts=["The weather today is"])]
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    assert first.step_count == 5  # the other instance ended the run
    assert "train/loss" in tags()
    (log,) = Path("logs").glob("trainer_logs.jsonl")
    assert json.loads(log.read_text().splitlines()[0])["meta"] == {"name": "experiment"}


def test_removing(make, writer):
    trainer = make()
    callback_instance = MyCustomCallback()
    trainer.add_callback(callback_instance)
    assert trainer.pop_callback(callback_instance) is callback_instance
    trainer.add_callback(MyCustomCallback)
    assert type(trainer.pop_callback(MyCustomCallback)) is MyCustomCallback
    trainer.add_callback(TBLogger(writer))
    trainer.remove_callback(TBLogger)
    assert trainer.pop_callback(TBLogger) is None
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert tags() == set()


def test_order(make, writer):
    called = []

    def noting(kind, *arguments):
        class Noting(kind):
            def on_step_begin(self, args, state, control, **kwargs):
                called.append(kind.__name__)

        return Noting(*arguments)

    trainer = make(max_steps=1)
    trainer.add_callback(noting(ModelCheckpointCallback))
    trainer.add_callback(noting(TBLogger, writer))
    trainer.add_callback(noting(TextgenCallback, ["The weather today is"]))
    trainer.train()
    assert called == ["ModelCheckpointCallback", "TBLogger", "TextgenCallback"]


# -- patterns ----------------------------------------------------------------------------------------------


def test_conditional_execution_by_steps_and_epochs(make):
    class ConditionalCallback(TrainerCallback):
        seen = ()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % 4 == 0:
                self.seen += (("step", state.global_step),)
            if state.epoch >= 2:
                self.seen += (("epoch", round(state.epoch, 2)),)
            return control

    callback = ConditionalCallback()
    trainer = make([callback])
    trainer.train()
    per_epoch = -(-len(trainer.train_dataset) // 4)
    late = [round(step / per_epoch, 2) for step in range(1, STEPS + 1) if step / per_epoch >= 2]
    assert [value for kind, value in callback.seen if kind == "step"] == [4, 8, 12]
    assert [value for kind, value in callback.seen if kind == "epoch"] == late


@pytest.mark.slow
def test_weights_and_biases(make, monkeypatch, tmp_path):
    values = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    folders = dict.fromkeys(("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"), tmp_path)
    for name, value in {**values, **folders}.items():
        monkeypatch.setenv(name, str(value))
    import wandb

    wandb.teardown()  # wandb reads the environment once per process

    class WandBCallback(TrainerCallback):
        def __init__(self, project_name, run_name=None):
            wandb.init(project=project_name, name=run_name)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs:
                wandb.log(logs, step=state.global_step)
            return control

        def on_train_end(self, args, state, control, **kwargs):
            wandb.finish()

    trainer = make([WandBCallback("my-project", run_name="first")])
    trainer.train()
    assert wandb.run is None
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    rows = [r["history"]["item"] for r in map(json.loads, output.splitlines()) if r["type"] == "history"]
    losses = {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}
    assert {row["_step"]: row["loss"] for row in rows} == pytest.approx(losses)
    assert [row["_step"] for row in rows if "eval_loss" in row] == [4, 8, 12]


def test_only_the_main_process_prints(make, capsys):
    class MultiProcessCallback(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            if not state.is_world_process_zero:
                return control
            print("Logging from main process only")
            return control

    class SafeCallback(TrainerCallback):
        logged = 0

        def on_log(self, args, state, control, **kwargs):
            if state.is_world_process_zero:
                self.logged += 1
            return control

    safe = SafeCallback()
    make([MultiProcessCallback(), safe]).train()
    assert capsys.readouterr().out.count("Logging from main process only") == safe.logged == 6 + 3 + 1


# -- looking into it ---------------------------------------------------------------------------------------


def test_a_callback_with_getattribute(make, capsys):
    class DebugCallback(TrainerCallback):
        def __init__(self, events_to_log=None):
            self.events_to_log = events_to_log or ["on_train_begin", "on_step_end", "on_log", "on_evaluate"]

        def __getattribute__(self, name):
            attr = super().__getattribute__(name)
            if name.startswith("on_") and name in self.events_to_log:

                def logged_method(*args, **kwargs):
                    print(f"Callback event: {name}")
                    return attr(*args, **kwargs)

                return logged_method
            return attr

    make([DebugCallback()]).train()
    lines = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("Callback event")]
    counts = {name: lines.count(name) for name in set(lines)}
    assert counts == {"on_train_begin": 1, "on_step_end": STEPS, "on_log": 6 + 3 + 1, "on_evaluate": 3}
    assert lines[:4] == ["on_train_begin", "on_step_end", "on_step_end", "on_log"]


def test_inspecting_the_state(make, capsys):
    class StateInspectionCallback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print(f"Step {state.global_step}/{state.max_steps}")
            print(f"Epoch {state.epoch:.2f}")
            print(f"Recent logs: {state.log_history[-1] if state.log_history else 'None'}")
            model = kwargs.get("model")
            if model:
                print(f"Model device: {next(model.parameters()).device}")
            return control

    trainer = make([StateInspectionCallback()])
    trainer.train()
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Step ")] == [
        f"Step {n}/{STEPS}" for n in range(1, STEPS + 1)
    ]
    assert out.count("Model device: cpu") == STEPS
    recent = [line for line in out.splitlines() if line.startswith("Recent logs")]
    assert recent[:2] == ["Recent logs: None"] * 2
    first = trainer.state.log_history[0]
    assert recent[2] == f"Recent logs: {first}"


# -- good practice -----------------------------------------------------------------------------------------


def test_a_focused_and_a_comprehensive_callback(make):
    class LossMonitorCallback(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            losses.extend(logs[name] for name in ("loss",) if name in logs)

    class EverythingCallback(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            pass

    losses = []
    trainer = make([LossMonitorCallback(), EverythingCallback()])
    trainer.train()
    assert losses == [r["loss"] for r in trainer.state.log_history if "loss" in r]


@pytest.mark.parametrize(("options", "seen"), [({}, [5, 10]), ({"enabled": False}, []), ({"frequency": 6}, [6, 12])])
def test_a_configurable_callback(make, options, seen):
    class ConfigurableCallback(TrainerCallback):
        def __init__(self, frequency=5, enabled=True, **kwargs):
            self.frequency = frequency
            self.enabled = enabled
            self.config = kwargs
            self.seen = []

        def on_step_end(self, args, state, control, **kwargs):
            if not self.enabled:
                return control
            if state.global_step % self.frequency == 0:
                self.seen.append(state.global_step)
            return control

    callback = ConfigurableCallback(**options)
    make([callback]).train()
    assert callback.seen == seen


def test_a_callback_that_catches_its_errors(make, capsys):
    class RobustCallback(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            try:
                self.risky_operation(logs)
            except Exception as e:
                print(f"Callback error: {e}")
            return control

    trainer = make([RobustCallback()])
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert "Callback error: 'RobustCallback' object has no attribute 'risky_operation'" in capsys.readouterr().out


def test_callbacks_of_transformers_together_with_ours(make, writer):
    trainer = make(
        learning_rate=1e-12,  # nothing improves by more than the threshold
        load_best_model_at_end=True, metric_for_best_model="eval_loss", save_strategy="steps", save_steps=4,
        max_steps=40,
    )  # fmt: skip
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.1))
    trainer.add_callback(TBLogger(writer))
    trainer.train()
    assert trainer.state.global_step == 16  # best at 4, then three without improvement
    assert "eval/loss" in tags()
