"""records.jsonl: every event of a run exactly once, also after crashes, at no cost per step."""

import json
import logging
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import trainformer
from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.callbacks import EarlyStopping, LRFinder, TextSamples
from trainformer.checkpointing import CheckpointStore
from trainformer.core.errors import BadArgument
from trainformer.loggers import read_jsonl
from trainformer.run.logging import RecordFile, current_commit


def trainer_for(task=None, **options):
    """Two epochs of eight steps, with an evaluation after each."""
    usual = {"val_data": classes(16), "batch_size": 8, "epochs": 2, "log": "none", "log_every": 4, "run_dir": "run"}
    return Trainer(task or MeanTask(), classes(), **{**usual, **options})


def records(kind=None, folder="run"):
    lines = [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


class SaveRecorder:
    """Remembers the checkpoints that were written."""

    def __init__(self):
        self.saves = []

    def on_save(self, trainer, path):
        self.saves.append(Path(path).name)


class Fails(MeanTask):
    """Raises in the n-th step."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def train_step(self, batch):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the data is gone")
        return super().train_step(batch)


# -- the events of a run -------------------------------------------------------------------------------------


def test_start_saves_evaluations_and_end_are_recorded():
    saves = SaveRecorder()
    trainer = trainer_for(save_every=5, callbacks=[saves]).fit()
    kinds = [(r["step"], r["kind"]) for r in records()]
    assert kinds == [
        *((0, "began"), (5, "saved"), (8, "evaluated"), (8, "saved"), (10, "saved"), (15, "saved")),
        *((16, "evaluated"), (16, "saved"), (16, "ended")),
    ]
    began = records("began")[0]
    assert (began["epochs"], began["steps_planned"], began["world_size"]) == (2, trainer.total_steps, 1)
    assert (began["device"], began["precision"]) == ("cpu", "fp32")
    assert began["versions"]["torch"] == torch.__version__
    assert began["versions"]["trainformer"] == trainformer.__version__
    assert isinstance(began["command"], list)
    assert [r["checkpoint"] for r in records("saved")] == saves.saves
    assert all(r["seconds"] >= 0 for r in records("saved"))
    times = [r["time"] for r in records()]
    assert times == sorted(times)
    ended = records("ended")[0]
    assert (ended["status"], ended["error"]) == ("finished", None)


def test_recorded_evaluations_match_the_metrics():
    trainer_for().fit()
    logged = [{k: v for k, v in r.items() if k != "time"} for r in read_jsonl("run/metrics.jsonl") if "val/loss" in r]
    assert [{"step": r["step"], **r["metrics"]} for r in records("evaluated")] == logged
    assert len(logged) == 2


def test_saves_have_a_reason():
    """The best evaluation, the cadence, a request by a callback, the end of the run."""

    class Asks:
        def on_step_end(self, trainer, step, loss):
            trainer.control.should_save |= step == 3
            if step == 14:
                trainer.stop("enough")

    trainer_for(save_every=5, callbacks=[Asks()]).fit()
    reasons = {r["step"]: r["reason"] for r in records("saved")}
    assert reasons == {3: "requested", 5: "due", 8: "best", 10: "due", 14: "stopped"}
    trainer_for(run_dir="b", save_every="1epochs", save_best=0, val_data=None).fit()
    assert [(r["step"], r["reason"]) for r in records("saved", "b")] == [(8, "due"), (16, "end")]


def test_a_stop_names_the_callback():
    trainer_for(callbacks=[EarlyStopping(patience=1, min_delta=10.0)], epochs=9).fit()
    (stopped,), (ended,) = records("stopped"), records("ended")
    assert (stopped["by"], stopped["step"]) == ("EarlyStopping", ended["step"])
    assert "val/loss" in stopped["reason"]
    assert ended["status"] == "stopped"


def test_a_signal():
    class Terminated:
        def on_step_end(self, trainer, step, loss):
            if step == 6:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        trainer_for(callbacks=[Terminated()]).fit()
    (saved,), (stopped,), (ended,) = records("saved"), records("stopped"), records("ended")
    assert (saved["step"], saved["reason"]) == (6, "signal")
    assert (stopped["by"], stopped["reason"]) == ("a signal", "received SIGTERM")
    assert ended["status"] == "interrupted"


def test_a_failure_and_the_resume_after_it():
    with pytest.raises(RuntimeError):
        trainer_for(Fails(11)).fit()
    assert records()[-1]["kind"] == "ended"
    assert (records()[-1]["status"], records()[-1]["error"]) == ("failed", "RuntimeError: the data is gone")
    before = len(records())
    saved = CheckpointStore(Path("run/checkpoints")).newest()
    trainer_for(Fails(99)).fit()
    began, resumed, *_ = records()[before:]
    assert began["kind"] == "began"
    assert resumed == {**resumed, "kind": "resumed", "from": str(saved.path), "from_step": 8, "step": 8}
    assert [r["status"] for r in records("ended")] == ["failed", "finished"]
    assert [r["step"] for r in records("evaluated")] == [8, 16]


def test_a_loaded_checkpoint_is_recorded_once():
    trainer_for(run_dir="a").fit()
    trainer = trainer_for(epochs=3).load("a")
    trainer.fit()
    trainer.epochs = 4
    trainer.fit()
    assert [(r["from"], r["from_step"]) for r in records("resumed")] == [("a", 16)]
    assert [r["step"] for r in records("began")] == [16, 24]


def test_a_run_that_starts_over_archives_the_old_records():
    trainer_for().fit()
    old = Path("run/records.jsonl").read_bytes()
    trainer_for(resume=None).fit()
    assert Path("run/previous/001/records.jsonl").read_bytes() == old
    assert [r["kind"] for r in records()].count("began") == 1


def test_skipped_steps_are_all_counted(caplog):
    """Also those that are noticed at an evaluation or a save instead of a log point."""

    class Bad(MeanTask):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            return super().train_step(batch) * (float("nan") if self.calls in (2, 7, 8, 13) else 1.0)

    trainer = trainer_for(Bad(), nonfinite="skip", log_every=5, save_every=3)
    trainer.fit()
    assert sum(r["steps"] for r in records("skipped")) == 4
    assert all(r["reason"] for r in records("skipped"))
    before = len(records("skipped"))
    assert before > 1
    good = Bad()
    good.calls = 99
    trainer_for(good, epochs=3, nonfinite="skip").fit()  # which knows of the four from its checkpoint
    assert len(records("skipped")) == before
    trainer_for(Bad(), nonfinite="skip", log_every=1000, run_dir="b").fit()
    assert [(r["step"], r["steps"]) for r in records("skipped", "b")] == [(8, 3), (16, 1)]  # at the evaluations


def test_batches_that_were_split():
    class Large(MeanTask):
        def train_step(self, batch):
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("too large")
            return super().train_step(batch)

    trainer_for(Large()).fit()
    assert [(r["step"], r["parts"]) for r in records("split")] == [(1, 4)]


# -- the file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partial", "kept"), [(b'{"time": 1, "st', 0), (b'{"time": 1, "step": 1, "kind": "mine"}', 1)])
def test_a_partial_line_of_a_killed_process_is_removed(partial, kept):
    trainer_for().fit()
    whole = len(records())
    with open("run/records.jsonl", "ab") as file:
        file.write(partial)
    trainer_for(epochs=3).fit()
    assert len(records("mine")) == kept
    assert records()[whole + kept]["kind"] == "began"


def test_a_failed_write_of_a_record_does_not_end_the_run(caplog):
    reference = trainer_for(run_dir="reference").fit()
    Path("run/records.jsonl").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "trainformer"):
        trainer = trainer_for(save_every=5).fit()
    assert len([r for r in caplog.records if "records.jsonl cannot be written" in r.getMessage()]) == 1
    assert same(weights(trainer.task), weights(reference.task))


def test_after_a_failed_write_the_file_is_valid_again(tmp_path, monkeypatch):
    """The disk is full after half a record, and has space again for the next one."""
    import builtins

    file = RecordFile(tmp_path / "records.jsonl")
    file.write("one", 1, {})

    def full(path, mode="r", **options):
        if mode == "ab":
            (tmp_path / "records.jsonl").write_bytes((tmp_path / "records.jsonl").read_bytes() + b'{"time": 1')
            raise OSError(28, "No space left on device")
        return real(path, mode, **options)

    real = builtins.open
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", full)
        file.write("two", 2, {})
    file.write("three", 3, {})
    assert [r["kind"] for r in records(folder=tmp_path)] == ["one", "three"]


def test_a_failed_save_is_not_recorded_as_saved(monkeypatch):
    write = CheckpointStore.write

    def fails_once(store, manifest, fill):
        if manifest.step == 10:
            raise OSError(28, "No space left on device")
        return write(store, manifest, fill)

    monkeypatch.setattr(CheckpointStore, "write", fails_once)
    trainer_for(save_every=5, save_async=True).fit()
    assert [r["checkpoint"] for r in records("saved")] == [f"step_{n:08d}" for n in (5, 8, 15, 16)]


def test_nothing_is_written_per_step():
    trainer_for(log_every=1, max_steps=4, val_data=None).fit()
    trainer_for(log_every=1, max_steps=64, val_data=None, run_dir="longer").fit()
    assert (
        [r["kind"] for r in records()] == [r["kind"] for r in records(folder="longer")] == ["began", "saved", "ended"]
    )


# -- what users and callbacks add ----------------------------------------------------------------------------


def test_custom_records():
    class Notes:
        def on_epoch_end(self, trainer, epoch, metrics):
            trainer.record("note", text="ünïcode", values=[epoch, float("inf")])

    trainer = trainer_for(callbacks=[Notes()])
    with pytest.raises(BadArgument, match="a run that has started"):
        trainer.record("too early")
    trainer.fit()
    trainer.record("after", of={"it": True})
    assert [(r["step"], r["text"], r["values"]) for r in records("note")] == [
        (8, "ünïcode", [0, "Infinity"]),
        (16, "ünïcode", [1, "Infinity"]),
    ]
    assert records()[-1]["of"] == {"it": True}
    for kind, content in (("", {}), (3, {}), ("x", {"step": 3})):
        with pytest.raises(BadArgument):
            trainer.record(kind, **content)


def test_the_curve_of_the_learning_rate_finder():
    finder = LRFinder(num_steps=20)
    trainer_for(callbacks=[finder]).fit()
    (found,) = records("lr_finder")
    assert (found["lrs"], found["losses"], found["suggestion"]) == (finder.lrs, finder.losses, finder.suggested_lr)
    assert len(found["lrs"]) > 5


def test_generated_texts():
    class Writes(MeanTask):
        def generate(self, prompts, max_new_tokens):
            return [prompt[::-1] for prompt in prompts]

    trainer_for(Writes(), callbacks=[TextSamples(["abc", "xy"], name="story")]).fit()
    wanted = [{"prompt": "abc", "text": "cba"}, {"prompt": "xy", "text": "yx"}]
    assert [(r["step"], r["key"], r["samples"]) for r in records("text")] == [
        (8, "story", wanted),
        (16, "story", wanted),
    ]


# -- memory and versions -------------------------------------------------------------------------------------


def test_training_records_have_the_memory_use():
    trainer_for().fit()
    values = [r["train/memory_gb"] for r in read_jsonl("run/metrics.jsonl") if "train/loss" in r]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    resident = int(status["VmRSS"].split()[0]) * 1024 / 1e9
    assert len(values) == 5
    assert all(abs(value - resident) < 0.1 * resident for value in values)
    assert not any("train/memory_gb" in r for r in read_jsonl("run/metrics.jsonl") if "val/loss" in r)


def test_the_commit_is_recorded(tmp_path):
    def git(*words, cwd=tmp_path):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *settings, *words], cwd=cwd, check=True, capture_output=True, text=True).stdout

    assert current_commit(tmp_path) is None
    git("init")
    assert current_commit(tmp_path) is None
    git("commit", "--allow-empty", "-m", "one")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    first = git("rev-parse", "HEAD").strip()
    assert current_commit(tmp_path / "deep" / "er") == first
    git("pack-refs", "--all")
    assert current_commit(tmp_path) == first
    git("worktree", "add", "other", "-b", "side")
    git("commit", "--allow-empty", "-m", "two", cwd=tmp_path / "other")
    assert current_commit(tmp_path / "other") == git("rev-parse", "HEAD", cwd=tmp_path / "other").strip() != first
    git("checkout", "--detach")
    assert current_commit(tmp_path) == first
