"""Long runs: nothing that a step, a log record, an evaluation or a save leaves behind may accumulate."""

import gc
import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import trainformer.engine.state
from toys import MeanTask, classes, mlp
from trainformer import Trainer, hf
from trainformer.loggers import read_jsonl
from trainformer.run import run_of

RECORDS = 40  # instead of 10,000


@pytest.fixture(autouse=True)
def short_history(monkeypatch):
    monkeypatch.setattr(trainformer.engine.state, "MAX_LOG_RECORDS", RECORDS)


@pytest.fixture
def no_messages():
    """pytest keeps every log record."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def usage(checkpoint, history):
    """What could grow: our objects and tensors by type, others, open files, threads, the checkpoint, the log history.

    Weak references are not counted: those of other packages come and go.
    """
    gc.collect()
    kinds = Counter(type(o) for o in gc.get_objects())
    ours = {
        kind: count
        for kind, count in kinds.items()
        if str(kind.__module__).startswith("trainformer") or kind in (torch.Tensor, nn.Parameter)
    }
    return {
        "objects": ours,
        "others": sum(kinds.values()) - sum(ours.values()) - kinds[weakref.ref],
        "open files": len(os.listdir("/dev/fd")),
        "threads": threading.active_count(),
        "bytes": sum(file.stat().st_size for file in Path(checkpoint).iterdir()),
        "history": len(history),
    }


def grown(early, late):
    return {kind: count for kind, count in late["objects"].items() if count > early["objects"].get(kind, 0)}


def assert_flat(*seen):
    early, late = seen[-2:]
    assert not grown(early, late)
    # There are 500 steps and 60 log records in between. What else runs in this process may add some, once.
    assert min(after["others"] - before["others"] for before, after in itertools.pairwise(seen)) < 60
    assert late["history"] == early["history"] == RECORDS
    assert late["open files"] <= early["open files"]
    assert late["threads"] <= early["threads"]
    assert late["bytes"] < early["bytes"] + 2000  # numbers have more digits


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs /dev/fd")
@pytest.mark.parametrize("save_async", [False, True])
def test_a_long_run_does_not_grow(save_async, no_messages):
    class Sampler:
        def __init__(self):
            self.seen = {}

        def on_step_end(self, trainer, step, loss):
            float(loss)

        def on_save(self, trainer, path):
            if trainer.state.step in (500, 1000, 1500):
                run_of(trainer).checkpointer.wait()
                found, deadline = usage(path, trainer.state.log_history), time.monotonic() + 60
                # The thread that has saved may still hold what it saved for a moment.
                while grown(self.seen.get(trainer.state.step - 500, found), found) and time.monotonic() < deadline:
                    time.sleep(0.05)
                    found = usage(path, trainer.state.log_history)
                self.seen[trainer.state.step] = found

    sampler = Sampler()
    options = {"log_every": 10, "eval_every": "50steps", "save_every": 50, "save_async": save_async, "run_dir": "run"}
    trainer = Trainer(
        MeanTask(mlp(hidden=2)), classes(), val_data=classes(8), max_steps=1500, batch_size=2, log="none",
        num_workers=0, callbacks=[sampler], **options,
    )  # fmt: skip
    trainer.fit()
    assert_flat(*sampler.seen.values())
    records = read_jsonl("run/metrics.jsonl")
    assert len(records) == trainer.state.log_records == 1 + 150 + 30
    assert len(trainer.state.log_history) == RECORDS
    assert [r["step"] for r in trainer.state.log_history] == [r["step"] for r in records[-RECORDS:]]


def without_times(history):
    timed = "second", "memory", "runtime"
    return [{k: v for k, v in record.items() if not any(word in k for word in timed)} for record in history]


def test_a_resumed_run_has_the_same_history_as_an_uninterrupted_one():
    class Crash:
        def on_step_end(self, trainer, step, loss):
            if step == 70:
                raise RuntimeError("crash")

    def trained(run_dir, callbacks=()):
        trainer = Trainer(
            MeanTask(mlp(hidden=2)), classes(), max_steps=130, batch_size=2, log="none", log_every=1, save_every=30,
            callbacks=callbacks, run_dir=run_dir,
        )  # fmt: skip
        trainer.fit()
        return trainer.state

    with pytest.raises(RuntimeError, match="crash"):
        trained("cut", [Crash()])
    whole, resumed = trained("whole"), trained("cut")
    assert without_times(whole.log_history) == without_times(resumed.log_history)
    assert whole.log_records == resumed.log_records == 130
    assert [r["step"] for r in resumed.log_history] == list(range(91, 131))


class Model(nn.Module):
    """As `hf.Trainer` wants it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


class HfCrash(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 70:
            raise RuntimeError("crash")


def test_the_history_of_hf_is_bounded_and_survives_a_resume(tmp_path, monkeypatch):
    x, y = classes(dtype=torch.float32)
    data = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]
    options = {"logging_steps": 2, "save_steps": 20, "eval_strategy": "steps", "eval_steps": 20, "report_to": "none"}
    options |= {"save_total_limit": 2, "per_device_train_batch_size": 4, "disable_tqdm": True, "max_steps": 120}

    def trained(name, callbacks=(), resume=None):
        args = hf.TrainingArguments(str(tmp_path / name), **options)
        trainer = hf.Trainer(Model(), args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.log_history

    whole = trained("whole")
    assert len(whole) == RECORDS
    saved = json.loads((tmp_path / "whole" / "checkpoint-120" / "trainer_state.json").read_text())["log_history"]
    assert len(saved) == RECORDS
    assert saved[1:] == whole[:-1]  # the summary of the run comes last
    with pytest.raises(RuntimeError, match="crash"):
        trained("cut", [HfCrash()])
    assert without_times(trained("cut", resume=True)[:-1]) == without_times(whole[:-1])
    monkeypatch.setattr(trainformer.engine.state, "MAX_LOG_RECORDS", 10_000)
    full = trained("full")
    assert len(full) == 60 + 6 + 1
    assert without_times(full[-RECORDS:]) == without_times(whole)


def test_a_checkpoint_from_before_there_was_a_limit_loads():
    state = trainformer.engine.state.RunState(step=100).state_dict()
    del state["log_records"]
    state["log_history"] = [{"step": step} for step in range(1, 101)]
    loaded = trainformer.engine.state.RunState().load_state_dict(state)
    assert (len(loaded.log_history), loaded.log_history[-1]["step"], loaded.log_records) == (RECORDS, 100, 100)
    assert len(state["log_history"]) == 100
