"""Checkpoints of real runs: what is in them, when they are written, what comes back, and what happens when it fails."""

import errno
import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.callbacks import EMA, EarlyStopping, LRFinder
from trainformer.checkpointing import CheckpointStore
from trainformer.checkpointing.checkpointer import SaveFailed
from trainformer.core.errors import BadArgument, DataError
from trainformer.loggers import read_jsonl
from trainformer.run import run_of


def make(task=None, data=None, **options):
    defaults = {"batch_size": 8, "max_steps": 20, "lr": 1e-2, "log": "none", "run_dir": "run", "save_best": 0}
    return Trainer(task or MeanTask(), data or classes(), **{**defaults, **options})


def saved_steps(run="run"):
    return [c.step for c in CheckpointStore(Path(run) / "checkpoints").checkpoints()]


class At:
    """Does something at a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, trainer, step, loss):
        if step == self.step:
            self.action(trainer)


# -- what and when -----------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_folder_others_can_read():
    task = MeanTask()
    make(task, callbacks=[EMA(), EarlyStopping()], val_data=classes(8), precision="fp16").fit()
    folder = Path("run/checkpoints/step_00000020")
    assert sorted(p.name for p in folder.iterdir()) == [
        "backend.pt", "callback.EMA.pt", "callback.EarlyStopping.pt", "context.pt", "loggers.json", "manifest.json",
        "model.safetensors", "optimizer.pt", "rng.rank0.pt", "run.json", "schedule.pt", "task.json",
    ]  # fmt: skip
    assert same(load_file(folder / "model.safetensors"), task.model.state_dict())
    run = json.loads((folder / "run.json").read_text())
    assert run["step"] == 20
    assert run["log_history"][0]["step"] == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert manifest["world_size"] == 1
    assert manifest["versions"]["torch"] == torch.__version__
    assert Path("run/checkpoints/latest").read_text() == folder.name


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_every": 6}, [20]),
        ({"save_every": 6, "save_last": 2}, [18, 20]),
        ({"save_every": 6, "save_last": 9}, [6, 12, 18, 20]),
        ({"save_every": "1epoch", "save_last": 9}, [8, 16, 20]),
        ({"save_every": 1, "save_strategy": "epochs", "save_last": 9}, [8, 16, 20]),
        ({"save_every": 4, "keep_every": 8}, [8, 16, 20]),
        ({"save_every": None}, [20]),
    ],
)
def test_when_and_what_is_kept(options, steps):
    make(**options).fit()
    assert saved_steps() == steps


def test_an_evaluation_before_each_save():
    trainer = make(val_data=classes(8), save_every=6, eval_on_save=True, eval_every=None, save_last=9).fit()
    evaluated = [r["step"] for r in trainer.state.log_history if "val/loss" in r]
    assert evaluated == [6, 12, 18, 20]
    store = CheckpointStore(Path("run/checkpoints"))
    assert all("val/loss" in c.manifest.metrics for c in store.checkpoints())


def test_files_of_the_task_are_written_beside_the_weights():
    class WithConfig(MeanTask):
        def save_assets(self, folder):
            (folder / "config.json").write_text("{}")
            return ["config.json"]

    make(WithConfig()).fit()
    assert Path("run/checkpoints/step_00000020/config.json").read_text() == "{}"
    assert make(WithConfig(), max_steps=21).fit().state.step == 21


def test_effects_of_epoch_end_are_in_the_checkpoint():
    class Counts:
        n = 0

        def on_epoch_end(self, trainer, epoch, metrics):
            self.n += 1

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    make(max_steps=None, epochs=2, callbacks=[Counts()]).fit()
    counts = Counts()
    make(max_steps=None, epochs=4, callbacks=[counts]).fit()
    assert counts.n == 4


# -- in the background -------------------------------------------------------------------------------------


def test_a_background_save_holds_the_state_of_its_step():
    task = MeanTask(mlp(hidden=64))
    seen = {}
    notes = [At(n, lambda t, n=n: seen.update({n: weights(task)})) for n in (5, 10, 15)]
    make(task, save_every=5, save_last=9, save_async=True, callbacks=notes).fit()
    assert saved_steps() == [5, 10, 15, 20]
    for step, state in seen.items():
        assert same(load_file(f"run/checkpoints/step_{step:08d}/model.safetensors"), state)


def test_background_and_foreground_runs_are_equal():
    one, other = MeanTask(), MeanTask()
    make(one, save_every=3, run_dir="a").fit()
    make(other, save_every=3, save_async=True, run_dir="b", log_every=5).fit()
    assert same(weights(one), weights(other))
    assert any("train/save_seconds" in r for r in read_jsonl("b/metrics.jsonl"))


# -- what comes back ---------------------------------------------------------------------------------------


def test_some_components_only():
    make(run_dir="a").fit()
    task = MeanTask(mlp(hidden=8))
    trainer = make(task, run_dir="b", optimizer="sgd").load("a", components=["model"])
    assert same(load_file("a/checkpoints/step_00000020/model.safetensors"), task.model.state_dict())
    assert trainer.state.step == 0
    begun = [value for state in trainer.active_optimizer.state.values() for value in state.values()]
    assert not any(value.any() for value in begun)  # a momentum that has not moved
    trainer = make(run_dir="c", resume="a", load_components=["model", "run"], optimizer="sgd", max_steps=22).fit()
    assert trainer.state.step == 22


def test_files_folders_and_runs_can_be_loaded():
    make().fit().save("file.pt")
    for path in ("file.pt", "run", "run/checkpoints", "run/checkpoints/step_00000020"):
        assert make(run_dir="other").load(path).state.step == 20
    Path("empty").mkdir()
    with pytest.raises(DataError, match="no complete checkpoint in empty"):
        make().load("empty")


def test_an_optimizer_that_does_not_fit_is_refused_and_nothing_changes():
    make(optimizer=lambda groups: torch.optim.SGD([p for g in groups for p in g["params"]], lr=0.1)).fit()
    task = MeanTask()
    before = weights(task)
    with pytest.raises(DataError, match=r"groups of \[4\] tensors, the one here of \[2, 2\].*Nothing was loaded"):
        make(task, run_dir="b").load("run")
    assert same(before, weights(task))


def rewrite(change):
    """Change a single-file checkpoint."""
    state = torch.load("x.pt", weights_only=True)
    change(state["components"])
    torch.save(state, "x.pt")


def test_missing_components(caplog):
    make().fit().save("x.pt")
    rewrite(lambda c: c.pop("rng"))
    with caplog.at_level(logging.WARNING):
        assert make(run_dir="b").load("x.pt").state.step == 20
    assert "has no 'rng'" in caplog.text
    rewrite(lambda c: (c.pop("model"), c.pop("optimizer")))
    task = MeanTask()
    before = weights(task)
    with pytest.raises(DataError, match="lacks required components: model, optimizer"):
        make(task, run_dir="c").load("x.pt")
    assert same(before, weights(task))


def test_going_back_to_an_older_checkpoint_sets_the_later_ones_aside():
    make(save_every=5, save_last=9).fit()
    trainer = make(save_every=5, max_steps=13, resume="run/checkpoints/step_00000005").fit()
    assert trainer.state.step == 13
    assert saved_steps() == [13]
    assert len(list(Path("run/checkpoints/abandoned-1").iterdir())) == 3
    steps = [r["step"] for r in read_jsonl("run/metrics.jsonl")]
    assert steps == sorted(set(steps))


def test_starting_from_scratch_with_a_save_dir():
    make(save_dir="mine", save_every=5).fit()
    make(save_dir="mine", save_every=5, resume=None, max_steps=7).fit()
    assert [c.step for c in CheckpointStore(Path("run/mine")).checkpoints()] == [7]


def test_the_same_command_takes_up_its_unfinished_run_and_no_other():
    def run(**options):
        return make(run_dir=None, save_every=4, **options)

    def crash(trainer):
        raise RuntimeError("power cut")

    whole = MeanTask()
    make(whole, run_dir="reference").fit()
    with pytest.raises(RuntimeError, match="power cut"):
        run(callbacks=[At(10, crash)]).fit()
    (folder,) = Path("runs").iterdir()
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    other = run(lr=0.5).fit()  # another command
    assert other.run_folder != folder
    task = MeanTask()
    again = run(task=task).fit()
    assert again.run_folder == folder
    assert same(weights(whole), weights(task))
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert run().fit().run_folder != folder  # a finished run is left alone


def test_loggers_go_on_in_the_same_place_after_load():
    from trainformer.loggers import BaseLogger

    class Remote(BaseLogger):
        def __init__(self, place):
            self.place = place

        def init(self, config):
            pass

        def log(self, metrics, step):
            pass

        def finish(self, status="finished"):
            pass

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    make(log=Remote("first"), run_dir="a").fit().save("x.pt")
    again = Remote("second")
    make(log=again, run_dir="b", max_steps=25).load("x.pt").fit()
    assert again.place == "first"


def test_the_config_is_kept_up_to_date():
    trainer = Trainer(MeanTask(), classes(), max_steps=3, log="none", run_dir="run", callbacks=[LRFinder(num_steps=20)])
    trainer.fit()
    config = json.loads(Path("run/config.json").read_text())
    assert config["lr"]["value"] == trainer.lr
    assert config["lr"]["source"] == "derived"
    trainer.max_steps = 6
    trainer.fit()
    config = json.loads(Path("run/config.json").read_text())
    assert (config["max_steps"]["value"], config["max_steps"]["source"]) == (6, "user")
    assert config["total_steps"]["value"] == 6
    assert config["lr"]["source"] == "derived"


# -- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_reported_and_training_goes_on(asynchronous, monkeypatch, caplog):
    from trainformer.checkpointing import torch_files as state_files

    real, calls = state_files.write_component, []

    def sometimes(folder, stem, format, state):
        if stem == "model":
            calls.append(stem)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(folder, stem, format, state)

    monkeypatch.setattr(state_files, "write_component", sometimes)
    trainer = make(save_every=4, save_last=9, save_async=asynchronous).fit()
    assert trainer.state.step == 20
    assert saved_steps() == [4, 16, 20]
    assert caplog.text.count("could not be written") == 2
    assert not list(Path("run/checkpoints").glob(".writing*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_three_failures_in_a_row_stop_the_run(asynchronous, monkeypatch):
    from trainformer.checkpointing import torch_files as state_files

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make(max_steps=2).fit()
    monkeypatch.setattr(state_files, "write_component", full)
    with pytest.raises(SaveFailed, match=r"3 saves in a row failed.*No space left.*step_00000002"):
        make(save_every=4, save_async=asynchronous).fit()
    assert saved_steps() == [2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves_with_its_code(number, code):
    before = signal.getsignal(number)
    whole, resumed = MeanTask(), MeanTask()
    make(whole, run_dir="a").fit()
    with pytest.raises(SystemExit) as left:
        make(callbacks=[At(7, lambda t: signal.raise_signal(number))]).fit()
    assert left.value.code == code
    assert signal.getsignal(number) is before
    assert saved_steps() == [7]
    assert json.loads(Path("run/status.json").read_text())["status"] == "interrupted"
    make(resumed).fit()
    assert same(weights(whole), weights(resumed))


def test_a_second_interrupt_stops_at_once():
    def twice(trainer):
        signal.raise_signal(signal.SIGINT)  # to this thread: handled at once, never merged with the second
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make(callbacks=[At(7, twice)]).fit()
    assert saved_steps() == []


def test_usr1_saves_and_goes_on_and_signals_need_not_exit():
    trainer = make(save_last=9, callbacks=[At(7, lambda t: signal.raise_signal(signal.SIGUSR1))]).fit()
    assert trainer.state.step == 20
    assert saved_steps() == [7, 20]
    stopped = make(
        run_dir="b", exit_on_signal=False, callbacks=[At(7, lambda t: signal.raise_signal(signal.SIGTERM))]
    ).fit()
    assert stopped.state.step == 7
    assert stopped.control.stopped_by == "a signal"


def test_bad_samples_in_a_run():
    class Rotten(torch.utils.data.Dataset):
        x, y = classes(40)

        def __len__(self):
            return 40

        def __getitem__(self, i):
            if i in (5, 17):
                raise OSError("unreadable")
            return self.x[i], self.y[i]

    trainer = make(data=Rotten(), bad_samples="skip", max_steps=None, epochs=2, num_workers=0).fit()
    assert trainer.state.samples == 76
    assert trainer.state.bad_samples == 4
    assert trainer.state.log_history[-1]["train/bad_samples"] == 4
    with pytest.raises(OSError, match="unreadable"):
        make(data=Rotten(), run_dir="b", num_workers=0).fit()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("oom", "explode"),
        ("bad_samples", "eat"),
        ("save_strategy", "moons"),
        ("keep_every", 0),
        ("matmul_precision", "low"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_at_once(setting, value):
    with pytest.raises(BadArgument, match=setting):
        make(**{setting: value})


# -- the classes of validation folders ---------------------------------------------------------------------


def test_validation_folders_are_numbered_as_in_training(tmp_path):
    from PIL import Image

    from trainformer.tasks import ImageClassification

    for split, names in (("train", "ant bee cat"), ("val", "bee cat"), ("odd", "bee dog")):
        for name in names.split():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (32, 32), (i, 9, 9)).save(folder / f"{i}.png")
    task = ImageClassification("test_resnet", pretrained=False, image_size=32)
    trainer = Trainer(task, "train", val_data="val", log="none", num_workers=0)
    assert [int(y) for b in run_of(trainer).val_source.batches(0) for y in b.data[1]] == [1, 1, 2, 2]
    with pytest.raises(DataError, match="received others: dog"):
        Trainer(
            ImageClassification("test_resnet", pretrained=False, image_size=32), "train", val_data="odd", log="none"
        )
    assert task.input_shape == (3, 32, 32)


# -- found in review ---------------------------------------------------------------------------------------


def test_a_mistyped_component_is_refused():
    make().fit()
    with pytest.raises(BadArgument, match="Did you mean 'model'"):
        make(run_dir="b").load("run", components=["modle"])


def test_a_run_with_a_folder_of_its_own_for_checkpoints_can_be_loaded():
    make(save_dir="mine").fit()
    assert make(run_dir="b").load("run").state.step == 20


def test_predictions_have_a_row_for_every_input():
    class Rotten(torch.utils.data.Dataset):
        x, y = classes(10)

        def __len__(self):
            return 10

        def __getitem__(self, i):
            if i == 5:
                raise OSError("unreadable")
            return self.x[i], self.y[i]

    class Predicts(MeanTask):
        def predict_step(self, batch):
            return {"class": self.model(batch[0]).argmax(-1)}

    trainer = make(Predicts(), bad_samples="skip", num_workers=0)
    with pytest.raises(OSError, match="unreadable"):
        trainer.predict(Rotten())


def test_tied_weights_are_written_once_in_the_background_too():
    def sizes(asynchronous, where):
        task = MeanTask(mlp(4, 4, 4))
        task.model[2].weight = task.model[0].weight
        make(task, classes(outputs=4), save_async=asynchronous, run_dir=where).fit()
        return sorted(load_file(f"{where}/checkpoints/step_00000020/model.safetensors"))

    assert sizes(True, "a") == sizes(False, "b") == ["0.bias", "0.weight", "2.bias"]


def test_the_same_command_with_a_path_goes_on_after_a_crash():
    def crash(trainer):
        raise RuntimeError("power cut")

    make(run_dir="start", max_steps=4).fit()
    whole, resumed = MeanTask(), MeanTask()
    make(whole, run_dir="whole", resume="start").fit()
    with pytest.raises(RuntimeError, match="power cut"):
        make(resume="start", save_every=3, callbacks=[At(14, crash)]).fit()
    trainer = make(resumed, resume="start", save_every=3)
    trainer.fit()
    assert same(weights(whole), weights(resumed))
    assert not Path("run/checkpoints/abandoned-1").exists()
    assert "resuming from run/checkpoints/step_00000012" in Path("run/log.txt").read_text()


def test_other_data_or_another_model_is_another_command():
    def crash(trainer):
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        make(run_dir=None, save_every=4, callbacks=[At(10, crash)]).fit()
    (folder,) = Path("runs").iterdir()
    assert make(data=classes(seed=9), run_dir=None, save_every=4).fit().run_folder != folder
    assert make(MeanTask(mlp(hidden=9)), run_dir=None, save_every=4).fit().run_folder != folder
    assert make(run_dir=None, save_every=4).fit().run_folder == folder


def test_a_disk_that_is_really_full(tmp_path):
    """The system refuses to let files grow: every library wraps that in an error of its own."""
    import resource

    make(MeanTask(mlp(hidden=2048)), max_steps=2).fit()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        with pytest.raises(SaveFailed, match="3 saves in a row failed"):
            make(MeanTask(mlp(hidden=2048)), save_every=4).fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert saved_steps() == [2]
    assert make(MeanTask(mlp(hidden=2048))).fit().state.step == 20


def test_a_failed_save_is_not_announced_and_is_tried_again(monkeypatch):
    from trainformer.checkpointing import torch_files as state_files

    real, announced = state_files.write_component, []

    def fails_first(folder, stem, format, state):
        if not announced and "step_00000004" in str(folder):
            raise OSError("disk full")
        return real(folder, stem, format, state)

    class Hears:
        def on_save(self, trainer, path):
            announced.append(Path(path).name)
            assert Path(path).is_dir()

    monkeypatch.setattr(state_files, "write_component", fails_first)
    make(save_every=4, max_steps=8, callbacks=[Hears()]).fit()
    assert announced == ["step_00000008"]


def test_what_the_data_decide_is_derived_in_the_config():
    from trainformer.tasks import ImageClassification

    x, y = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8), torch.arange(12) % 3
    task = ImageClassification("test_resnet", pretrained=False, label_smoothing=0.1)
    config = Trainer(task, (x, y), log="none").context.config
    wanted = {
        "DERIVED": ["num_classes", "image_size", "in_chans"],
        "DEFAULT": ["mixup", "model_kwargs"],
        "USER": ["pretrained", "label_smoothing"],
    }
    assert {k: [n for n in names if config.source(f"task/{n}").name == k] for k, names in wanted.items()} == wanted
