"""ProgressCallback, InfoCallback, TBLogger and JsonLogger."""

import dataclasses
import io
import json
import logging
import math
import signal
from pathlib import Path

import pytest
from hf_toys import exit_code, train_with_json_logger
from rich.console import Console

from text_toys import Cut
from toys import MeanTask, classes, mlp
from trainformer import Trainer
from trainformer.callbacks import ProgressBar
from trainformer.core.errors import BadArgument
from trainformer.core.secrets import MASK
from trainformer.hf.callbacks import InfoCallback, JsonLogger, ProgressCallback, TBLogger
from trainformer.hf.callbacks.common import changed_arguments


def trainer_with(*callbacks, task=None, **options):
    """By default 16 steps of 8 samples, with two evaluations."""
    defaults = {"batch_size": 8, "epochs": 2, "lr": 1e-2, "log": "none", "log_every": 4, "run_dir": "run"}
    data = {"data": classes(), "val_data": classes(16)}
    return Trainer(task or MeanTask(), callbacks=list(callbacks), **data, **{**defaults, **options})


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def text_of(reader, name):
    return reader.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()


# -- progress ----------------------------------------------------------------------------------------------


def progress(terminal):
    file = io.StringIO()
    return ProgressCallback(Console(file=file, force_terminal=terminal, width=120)), file


def test_bars_and_lines_on_a_terminal():
    callback, file = progress(True)
    trainer_with(callback).fit()
    text = file.getvalue()
    for part in ("epoch 2", "16/16", "evaluating", "lr", "samples/s", "━"):
        assert part in text
    assert "val     16  loss" in text  # lines are printed above the bar
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_plain_lines_if_the_output_is_not_a_terminal():
    callback, file = progress(False)
    trainer = trainer_with(callback).fit()
    text = file.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    kinds = [line.split()[0] for line in text.splitlines()]
    assert kinds.count("val") == 2
    assert kinds.count("step") == len([r for r in trainer.state.log_history if "train/loss" in r]) + 1  # the summary
    first = trainer.state.log_history[0]
    assert f"loss {first['train/loss']:.4f}" in text.splitlines()[0]


def test_disable_tqdm(monkeypatch):
    callback, file = progress(True)
    trainer = trainer_with(callback)
    monkeypatch.setattr(type(trainer), "args", Arguments(), raising=False)
    trainer.fit()
    assert "━" not in file.getvalue()
    assert "loss" in file.getvalue()


@dataclasses.dataclass
class Arguments:
    """A minimal set of arguments."""

    output_dir: str = "out"
    logging_dir: str | None = None
    num_train_epochs: float = 2.0
    logging_steps: int = 4
    eval_steps: int = 4
    save_steps: int = 4
    logging_strategy: str = "steps"
    eval_strategy: str = "epoch"
    save_strategy: str = "steps"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    disable_tqdm: bool = True
    hub_token: str | None = None
    kwargs: dict = dataclasses.field(default_factory=dict)


def test_a_native_trainer_shows_one_bar_and_each_line_once():
    callback, file = progress(True)
    trainer_with(ProgressBar(Console(file=io.StringIO(), force_terminal=True)), callback).fit()
    assert file.getvalue() == ""


def test_the_bar_of_a_separate_evaluation_disappears():
    callback, file = progress(True)
    trainer = trainer_with(callback)
    trainer.evaluate()
    assert "evaluating" in file.getvalue()
    assert not callback.bar.is_open


def test_the_bar_is_closed_after_an_error():
    class Broken(MeanTask):
        def train_step(self, batch):
            raise RuntimeError("broken")

    callback, file = progress(True)
    with pytest.raises(RuntimeError, match="broken"):
        trainer_with(callback, task=Broken()).fit()
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_other_processes_print_nothing():
    from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState

    callback, file = progress(True)
    state = TrainerState(max_steps=4, is_world_process_zero=False)
    for event in ("on_train_begin", "on_epoch_begin", "on_step_end", "on_prediction_step"):
        getattr(callback, event)(Arguments(), state, TrainerControl(), eval_dataloader=[1, 2])
    callback.on_log(Arguments(), state, TrainerControl(), logs={"loss": 1.0})
    assert file.getvalue() == ""


# -- summary -----------------------------------------------------------------------------------------------


def test_info_callback_logs_model_data_device_and_arguments(caplog):
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.data = model[2].bias.data.float()
    task = MeanTask(model)
    with caplog.at_level(logging.INFO, logger="trainformer"):
        callback = InfoCallback()
        trainer = trainer_with(callback, task=MeanTask(), accumulation_steps=2, lr=0.02)
        control = None
        callback.on_train_begin(
            Arguments(hub_token="secret"),
            _state(16),
            control,
            model=task.model,
            train_dataloader=trainer.train_dataloader,
        )
    text = caplog.records[-1].getMessage()
    assert "67 parameters, 27 trainable (40.30%); float64 64, float32 3" in text  # 4·8+8 frozen, 8·3+3 trained
    assert "train 64 samples" in text
    assert "8 per epoch, 16 in total (2 epochs)" in text
    assert "secret" not in text


def _state(max_steps):
    from trainformer.callbacks.compat.huggingface_types import TrainerState

    return TrainerState(max_steps=max_steps)


def test_info_callback_in_a_native_run_shows_changed_settings(caplog):
    with caplog.at_level(logging.INFO, logger="trainformer"):
        trainer_with(InfoCallback(), accumulation_steps=2, lr=0.02, max_steps=1).fit()
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("training begins")]
    arguments = text.splitlines()[-1].split("arguments")[1]
    assert "16 samples per step: 8 per device x 2 accumulated x 1 processes" in text
    assert {"lr=0.02", "accumulation_steps=2", "batch_size=8"} <= set(arguments.strip().split(", "))
    assert "weight_decay" not in arguments  # the default
    assert "tensor" not in arguments  # the data


def test_changed_arguments():
    changed = changed_arguments(Arguments(num_train_epochs=3.0, hub_token="secret", kwargs={"a": 1}))
    assert changed == {"num_train_epochs": 3.0, "hub_token": MASK, "kwargs": {"a": 1}}


def test_datasets_of_a_trainer_are_not_settings():
    @dataclasses.dataclass
    class Settings:
        data: list
        lr: float = dataclasses.field(default=0.1, kw_only=True)

    assert changed_arguments(object(), Settings(["a text"], lr=0.2)) == {"lr": 0.2}


# -- TensorBoard -------------------------------------------------------------------------------------------


def test_tensorboard_has_scalars_and_texts():
    trainer = trainer_with(TBLogger("tb", name="My Experiment", date="2024-01-01")).fit()
    reader = events("tb")
    history = trainer.state.log_history
    losses = [(r["step"], r["train/loss"]) for r in history if "train/loss" in r]
    assert [(e.step, pytest.approx(e.value)) for e in reader.Scalars("train/loss")] == losses
    evaluated = [(r["step"], r["val/accuracy"]) for r in history if "val/accuracy" in r]
    assert [(e.step, pytest.approx(e.value)) for e in reader.Scalars("eval/accuracy")] == evaluated
    assert {"train/learning_rate", "train/train_runtime", "eval/loss"} <= set(reader.Tags()["scalars"])
    assert '"name": "My Experiment"' in text_of(reader, "experiment_info")
    assert '"per_device_train_batch_size": 8' in text_of(reader, "args")


@pytest.mark.slow
def test_tags_match_transformers():
    from transformers.integrations.integration_utils import rewrite_logs

    from trainformer.hf.callbacks.common import to_tags

    logs = {"loss": 1, "learning_rate": 2, "eval_loss": 3, "eval_a_b": 4, "test_x": 5, "epoch": 6, "evaluation": 7}
    assert to_tags(logs) == rewrite_logs(logs)


def test_a_passed_writer_stays_open():
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("tb")
    trainer_with(TBLogger(writer), max_steps=4).fit()
    assert events("tb").Scalars("train/loss")[-1].step == 4  # flushed
    writer.add_scalar("mine", 1.0, 5)
    writer.close()
    assert len(list(Path("tb").iterdir())) == 1  # closing it would have created a second file
    assert events("tb").Scalars("mine")[0].value == 1.0


def test_the_model_config_is_written_once():
    class Configured:
        def to_dict(self):
            return {"hidden_size": 8, "dropout": math.nan}

    task = MeanTask()
    task.model.config = Configured()
    trainer_with(TBLogger("tb"), task=task, max_steps=2).fit()
    (event,) = events("tb").Tensors("model_config/text_summary")
    assert b'"hidden_size": 8' in event.tensor_proto.string_val[0]


@pytest.mark.usefixtures("event_files_in_order")
def test_a_resumed_run_hides_repeated_steps_and_callbacks_share_a_writer():
    from trainformer.hf.callbacks import PeakMemory

    class LateCut:
        def on_step_end(self, trainer, step, loss):
            if step == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_with(TBLogger("tb"), PeakMemory("tb"), LateCut(), log_every=1, save_every=4).fit()
    assert events("tb").Scalars("train/loss")[-1].step == 6  # two steps beyond the checkpoint
    trainer_with(TBLogger("tb"), PeakMemory("tb"), log_every=1, save_every=4).fit()
    assert len(list(Path("tb").iterdir())) == 2  # one writer per run
    reader = events("tb")
    assert [e.step for e in reader.Scalars("train/loss")] == list(range(1, 17))
    assert [e.step for e in reader.Scalars("memory/peak_memory_resident")] == list(range(1, 17))


@pytest.mark.parametrize("writer", [3, object()])
def test_an_invalid_writer_is_an_error(writer):
    with pytest.raises(BadArgument, match="SummaryWriter"):
        TBLogger(writer)


# -- JSON --------------------------------------------------------------------------------------------------


def without_times(found):
    """The part of a record that is the same in every run."""
    clocks = ("samples_per_second", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [
        {k: v for k, v in r.items() if k not in ("timestamp", "metrics", "args")}
        | {"metrics": {k: v for k, v in r["metrics"].items() if k not in clocks}}
        for r in found
    ]


def test_records_have_the_documented_format():
    from datetime import datetime

    trainer = trainer_with(JsonLogger(name="My Experiment", config={"lr": 0.1}), save_every=8).fit()
    found = records("run/trainer_logs.jsonl")
    for record in found:
        assert list(record)[:6] == ["event", "timestamp", "global_step", "epoch", "metrics", "meta"]
        assert record["meta"] == {"name": "My Experiment", "config": {"lr": 0.1}}
        assert datetime.fromisoformat(record["timestamp"]).tzinfo is not None
    of_events = [(r["event"], r["global_step"]) for r in found if r["event"] != "on_log"]
    assert of_events == [
        ("on_train_begin", 0), ("on_evaluate", 8), ("on_save", 8), ("on_evaluate", 16), ("on_save", 16),
        ("on_train_end", 16),
    ]  # fmt: skip
    history = [r for r in trainer.state.log_history if "train/loss" in r]
    logged = [r for r in found if "loss" in r["metrics"]]
    assert [(r["global_step"], r["metrics"]["loss"]) for r in logged] == [(r["step"], r["train/loss"]) for r in history]
    assert found[0]["args"]["per_device_train_batch_size"] == 8
    assert logged[1]["epoch"] == 0.5


def test_every_line_is_strict_json():
    class Strange:
        def on_log(self, trainer, metrics):
            metrics |= {"train/a": math.nan, "train/b": -math.inf}

    trainer_with(Strange(), JsonLogger(config={"best": math.inf, "name": "\ud800"}), max_steps=2).fit()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = Path("run/trainer_logs.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    (logged, *_) = [r for r in found if "a" in r["metrics"]]
    assert logged["metrics"]["a"] == "NaN"
    assert float(logged["metrics"]["b"]) == -math.inf
    assert logged["meta"]["config"]["best"] == "Infinity"


def test_a_resumed_run_repairs_a_damaged_line_without_duplicates():
    options = {"log_every": 1, "save_every": 2}
    trainer_with(JsonLogger(path="whole.jsonl"), run_dir="whole", **options).fit()
    with pytest.raises(KeyboardInterrupt):
        trainer_with(JsonLogger(path="cut.jsonl"), Cut(), **options).fit()
    assert records("cut.jsonl")[-1]["global_step"] == 2
    with open("cut.jsonl", "a") as file:
        file.write('{"event": "on_log", "global_step": 3, "metrics": {}}\n{"event": "on_l')
    trainer_with(JsonLogger(path="cut.jsonl"), **options).fit()
    resumed = records("cut.jsonl")
    (begun,) = [r for r in resumed if r["event"] == "on_train_begin" and r["global_step"] == 2]
    resumed.remove(begun)
    summary = [r for r in resumed if "train_loss" in r["metrics"]]
    assert len(summary) == 1
    assert without_times(resumed) == without_times(records("whole.jsonl"))


def test_a_resumed_run_finds_its_own_file(tmp_path):
    def begin(logger, args, step):
        state = _state(16)
        state.global_step = step
        logger.on_train_begin(args, state, None)
        logger.on_train_end(args, state, None)
        return logger

    first = begin(JsonLogger(), Arguments("out", "out/runs/monday"), 0)
    again, elsewhere = JsonLogger(), JsonLogger()
    again.load_state_dict(first.state_dict())
    elsewhere.load_state_dict(first.state_dict())
    begin(again, Arguments("out", "out/runs/tuesday"), 4)
    begin(elsewhere, Arguments("other", "other/runs/tuesday"), 4)
    assert again.path == first.path
    assert elsewhere.path == Path("other/runs/tuesday/trainer_logs.jsonl")
    assert [r["global_step"] for r in records(first.path)] == [0, 0, 4, 4]


def test_a_new_run_renames_an_existing_file():
    trainer_with(JsonLogger(path="log.jsonl"), max_steps=2).fit()
    before = Path("log.jsonl").read_bytes()
    trainer_with(JsonLogger(path="log.jsonl"), max_steps=2, run_dir="other").fit()
    assert Path("log.1.jsonl").read_bytes() == before
    assert [r["event"] for r in records("log.jsonl")].count("on_train_begin") == 1


def test_an_evaluation_before_training_is_in_the_same_file():
    logger, args = JsonLogger(log_dir="logs"), Arguments()
    logger.on_evaluate(args, _state(4), None, metrics={"eval_loss": 1.0})
    for _ in range(2):
        logger.on_train_begin(args, _state(4), None)
        logger.on_train_end(args, _state(4), None)
        logger.on_evaluate(args, _state(4), None, metrics={"eval_loss": 0.5})
    whole, second = (records(f"logs/trainer_logs{part}.jsonl") for part in (".1", ""))
    assert [r["event"] for r in whole] == ["on_evaluate", "on_train_begin", "on_train_end", "on_evaluate"]
    assert [r["event"] for r in second] == ["on_train_begin", "on_train_end", "on_evaluate"]


def test_path_and_log_dir_are_mutually_exclusive():
    with pytest.raises(BadArgument, match="either path or log_dir"):
        JsonLogger(path="a.jsonl", log_dir="b")


@pytest.mark.slow
def test_a_killed_run_has_the_same_records_after_resuming():
    assert exit_code(train_with_json_logger, str(Path("whole").absolute())) == 0
    assert exit_code(train_with_json_logger, str(Path("killed").absolute()), 8) == -signal.SIGKILL
    assert exit_code(train_with_json_logger, str(Path("killed").absolute())) == 0
    found = [r for r in records("killed/trainer_logs.jsonl") if (r["event"], r["global_step"]) != ("on_train_begin", 6)]
    assert without_times(found) == without_times(records("whole/trainer_logs.jsonl"))
