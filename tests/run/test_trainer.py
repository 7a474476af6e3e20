"""`Trainer` as a user meets it."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from toys import MeanTask, TokenTask, classes, mlp, same, tokens, weights
from trainformer import DatasetInfo, TaskBase, Trainer
from trainformer.core.errors import BadArgument, DataError
from trainformer.loggers import read_jsonl


def make(task=None, data=None, **options):
    defaults = {"batch_size": 8, "epochs": 3, "lr": 1e-2, "log": "none", "run_dir": "run"}
    return Trainer(task or MeanTask(), data or classes(), **{**defaults, **options})


# -- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "data"), [(MeanTask, classes), (TokenTask, tokens)])
def test_evaluation_does_not_depend_on_the_batch_size(task, data):
    results = []
    for size in (1, 3, 7, 50, 64):
        results.append(make(task(), data(), val_data=data(50, seed=1), eval_batch_size=size).evaluate())
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-12)


def test_evaluation_equals_the_definition_over_the_whole_set():
    task, (x, y) = TokenTask(), tokens(50, seed=1)
    got = make(task, tokens(), val_data=(x, y), eval_batch_size=7).evaluate()
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(task.model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    assert got["val/loss"] == pytest.approx(want.item(), rel=1e-12)


def test_rows_are_reduced_once_over_the_whole_set_in_input_order():
    class Rows(MeanTask):
        def eval_step(self, batch):
            x, y = batch
            return {"features": self.model(x), "labels": y, "loss": 0.0}

        def on_eval_end(self, rows):
            self.rows = rows
            return {"rank": torch.linalg.matrix_rank(rows["features"]).float(), "n": len(rows["labels"])}

    task, val = Rows(), classes(20, seed=3)
    metrics = make(task, val_data=val, eval_batch_size=6).evaluate()
    assert metrics == {"val/loss": 0.0, "val/rank": 3.0, "val/n": 20.0}
    assert torch.equal(task.rows["labels"], val[1])
    assert torch.allclose(task.rows["features"], task.model(val[0]).detach())


def test_per_sample_values_without_a_reduction_are_averaged():
    class PerSample(MeanTask):
        def eval_step(self, batch):
            x, y = batch
            return {
                "hit": self.model(x).argmax(-1) == y,
                "loss": torch.nn.functional.cross_entropy(self.model(x), y, reduction="none"),
            }

    task, (x, y) = PerSample(), classes(30)
    metrics = make(task, val_data=(x, y), eval_batch_size=7).evaluate()
    assert metrics["val/hit"] == pytest.approx((task.model(x).argmax(-1) == y).double().mean().item())
    assert metrics["val/loss"] == pytest.approx(MeanTask(task.model).train_step((x, y)).item(), rel=1e-12)


def test_evaluating_often_does_not_change_training():
    class Random(MeanTask):
        def train_step(self, batch):
            return super().train_step((batch[0] + torch.randn_like(batch[0]), batch[1]))

        def eval_step(self, batch):
            torch.randn(5)
            return super().eval_step(batch)

    seldom, often = Random(), Random()
    make(seldom, val_data=classes(10), eval_every=None).fit()
    make(often, val_data=classes(10), eval_every="1step", run_dir="other").fit()
    assert same(weights(seldom), weights(often))


def test_an_unknown_kind_of_metric_is_explained():
    class Wrong(MeanTask):
        def eval_step(self, batch):
            return {"oops": torch.zeros(3, 2)}

    with pytest.raises(BadArgument, match=r"'oops'.*8 rows.*\(3, 2\)"):
        make(Wrong(), val_data=classes(8)).evaluate()


def test_evaluating_without_data_says_what_to_pass():
    with pytest.raises(DataError, match="val_split"):
        make().evaluate()
    assert "val/loss" in make().evaluate(classes(12))


# -- prediction --------------------------------------------------------------------------------------------


def test_prediction_gives_rows_in_input_order():
    class Predicts(MeanTask):
        def predict_step(self, batch):
            x = batch[0]
            return {"class": self.model(x).argmax(-1), "first": x[:, 0]}

    task, (x, y) = Predicts(), classes(21)
    rows = make(task).predict((x, y), batch_size=4)
    assert len(rows) == 21
    assert [r["class"].item() for r in rows] == task.model(x).argmax(-1).tolist()
    assert torch.equal(torch.stack([r["first"] for r in rows]), x[:, 0])
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    assert [r["class"].item() for r in make(task).predict(loader)] == [r["class"].item() for r in rows]


def test_prediction_with_nothing_to_predict_is_explained():
    with pytest.raises(BadArgument, match="predict_step"):
        make().predict(classes(8))


# -- going on ----------------------------------------------------------------------------------------------


def test_fit_again_goes_on_and_equals_one_long_run():
    whole, parts = MeanTask(), MeanTask()
    make(whole, epochs=6, scheduler=None, run_dir="a").fit()
    trainer = make(parts, epochs=2, scheduler=None, run_dir="b").fit()
    trainer.epochs = 4
    trainer.fit()
    trainer.epochs = 6
    trainer.fit()
    assert same(weights(whole), weights(parts))
    assert trainer.state.epoch == 6
    steps = [r["step"] for r in read_jsonl("b/metrics.jsonl")]
    assert steps == sorted(steps)


def test_max_steps_in_the_middle_of_an_epoch_then_on():
    whole, parts = MeanTask(), MeanTask()
    make(whole, max_steps=13, scheduler=None, run_dir="a").fit()
    trainer = make(parts, max_steps=5, scheduler=None, run_dir="b").fit()
    assert (trainer.state.epoch, trainer.state.batch) == (0, 5)
    trainer.max_steps = 13
    trainer.fit()
    assert same(weights(whole), weights(parts))


def test_fit_after_the_end_says_so(caplog):
    trainer = make(epochs=1).fit()
    before = weights(trainer.task)
    with caplog.at_level(logging.WARNING):
        trainer.fit()
    assert same(before, weights(trainer.task))
    assert "nothing left to train" in caplog.text


class Noisy(MeanTask):
    """Draws random numbers in training, as dropout does."""

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x + 0.1 * torch.randn_like(x), y))


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}, {"precision": "fp16"}, {"optimizer": "sgd"}])
def test_save_load_and_go_on_is_bitwise_equal(options, tmp_path):
    def task():
        return Noisy(mlp(dtype=torch.float32))

    data = classes(61, dtype=torch.float32)
    whole = task()
    make(whole, data, max_steps=20, run_dir="a", **options).fit()

    class SaveAt:
        def on_step_end(self, trainer, step, loss):
            if step == 9:
                trainer.save(tmp_path / "nine.pt")

    make(task(), data, max_steps=20, run_dir="b", callbacks=[SaveAt()], **options).fit()
    torch.manual_seed(12345)
    resumed = task()
    trainer = make(resumed, data, max_steps=20, run_dir="c", callbacks=[SaveAt()], **options).load(tmp_path / "nine.pt")
    assert trainer.state.step == 9
    trainer.fit()
    assert same(weights(whole), weights(resumed))


def test_the_same_command_again_goes_on_from_the_newest_checkpoint():
    whole, resumed = Noisy(), Noisy()
    make(whole, max_steps=20, run_dir="a").fit()

    class Crash:
        def on_step_end(self, trainer, step, loss):
            if step == 17:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        make(Noisy(), max_steps=20, run_dir="b", save_every=5, callbacks=[Crash()], log_every=3).fit()
    trainer = make(resumed, max_steps=20, run_dir="b", save_every=5, log_every=3).fit()
    assert same(weights(whole), weights(resumed))
    steps = [r["step"] for r in read_jsonl("b/metrics.jsonl")]
    assert steps == sorted(set(steps))  # nothing twice
    assert [r["step"] for r in trainer.state.log_history] == steps


def test_resume_none_starts_from_scratch_and_keeps_the_old_files():
    make(epochs=1).fit()
    trainer = make(epochs=1, resume=None).fit()
    assert trainer.state.step == 8
    assert json.loads(Path("run/previous/001/config.json").read_text())
    assert [r["step"] for r in read_jsonl("run/metrics.jsonl")] == [1, 8]


def test_resume_from_a_path():
    make(epochs=1, run_dir="a").fit().save("x/y.pt")
    assert make(epochs=2, run_dir="b", resume="x/y.pt").fit().state.step == 16
    with pytest.raises(DataError, match=r"no checkpoint at .*nowhere\.pt"):
        make(resume="nowhere.pt", run_dir="c").fit()


def test_a_damaged_newest_checkpoint_is_passed_over(caplog):
    make(max_steps=10, save_every=4, save_last=5).fit()
    folders = sorted(Path("run/checkpoints").glob("step_*"))
    assert [f.name for f in folders] == ["step_00000004", "step_00000008", "step_00000010"]
    weights_file = folders[-1] / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:500])
    trainer = make(max_steps=12, save_every=4, save_last=5)
    trainer.fit()
    assert "step_00000010/model.safetensors is damaged" in caplog.text
    assert trainer.state.step == 12


def test_loading_executes_nothing(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))

    torch.save({"format": 1, "model": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(DataError, match="could execute code"):
        make().load(tmp_path / "bomb.pt")
    assert not (tmp_path / "boom").exists()


def test_loading_into_another_model_changes_nothing():
    make(MeanTask(mlp(hidden=9))).save("nine.pt")
    task = MeanTask()
    before = weights(task)
    with pytest.raises(DataError, match=r"0.weight: \(9, 4\) in the checkpoint, \(8, 4\) here.*Nothing was loaded"):
        make(task).load("nine.pt")
    assert same(before, weights(task))


def test_not_a_checkpoint_is_explained():
    torch.save({"weight": torch.zeros(1)}, "weights.pt")
    with pytest.raises(DataError, match="not a trainformer checkpoint"):
        make().load("weights.pt")
    Path("text.pt").write_text("hello")
    with pytest.raises(DataError, match=r"text\.pt"):
        make().load("text.pt")


# -- checkpoints kept --------------------------------------------------------------------------------------


def test_the_best_and_the_last_are_kept():
    values = iter([0.5, 0.3, 0.4, 0.1, 0.9, 0.8])

    class Scripted(MeanTask):
        def eval_step(self, batch):
            return {"loss": self.value}

        def on_epoch_begin(self, epoch):
            self.value = next(values)

    trainer = make(Scripted(), val_data=classes(8), epochs=6, save_best=2).fit()
    kept = sorted(p.name for p in (trainer.run_folder / "checkpoints").glob("step_*"))
    assert kept == ["step_00000016", "step_00000032", "step_00000048"]  # epochs 2 and 4, and the last
    assert trainer.best_metrics == {"val/loss": 0.1}
    assert trainer.state.best_step == 32


# -- the run folder and the config -------------------------------------------------------------------------


def test_the_run_folder_holds_config_metrics_and_log():
    trainer = make(val_split=0.25, epochs=2, weight_decay=0.01, log_every=3).fit()
    config = json.loads((trainer.run_folder / "config.json").read_text())
    assert (config["epochs"]["value"], config["epochs"]["source"]) == (2, "user")
    assert config["weight_decay"]["source"] == "user"  # passed, though it is the default
    assert config["warmup_ratio"]["source"] == "default"
    assert config["num_samples"]["source"] == "data"
    assert config["total_steps"]["value"] == 12
    assert config["total_steps"]["source"] == "derived"
    assert config["torch_version"]["source"] == "env"
    records = read_jsonl(trainer.run_folder / "metrics.jsonl")
    assert {r["step"] for r in records if "train/loss" in r} == {1, 3, 6, 9, 12}
    assert {r["step"] for r in records if "val/loss" in r} == {6, 12}
    assert "training MeanTask on cpu" in (trainer.run_folder / "log.txt").read_text()


def test_runs_without_a_name_get_folders_of_their_own():
    first, second = make(run_dir=None, epochs=1).fit(), make(run_dir=None, epochs=1).fit()
    assert first.run_folder != second.run_folder
    assert first.run_folder.name.startswith("MeanTask-")
    assert str(make(run_dir=None, name="my run/1", epochs=1).fit().run_folder) == "runs/my-run-1"


def test_nothing_is_written_before_fit(tmp_path):
    trainer = make(val_split=0.2)
    trainer.check()
    trainer.evaluate()
    assert list(tmp_path.iterdir()) == []


# -- data --------------------------------------------------------------------------------------------------


def test_data_in_every_form():
    x, y = classes(24)
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    for data in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), list(zip(x, y, strict=True)), loader):
        trainer = make(data=data, epochs=1, run_dir=None).fit()
        assert trainer.state.samples == 24


def test_a_stream_needs_max_steps_and_then_trains():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*classes(20), strict=True)

    with pytest.raises(BadArgument, match="max_steps"):
        make(data=Stream())
    trainer = make(data=Stream(), max_steps=5).fit()
    assert trainer.state.step == 5
    assert trainer.state.epoch == 1


def test_tasks_configure_load_prepare_and_collate():
    calls = []

    class Full(TaskBase):
        def __init__(self):
            self.model = None

        def configure(self, info: DatasetInfo):
            calls.append(("configure", info.num_classes, info.num_samples))
            self.model = mlp(outputs=info.num_classes)

        def load_data(self, path):
            calls.append(("load", path))
            return TensorDataset(*classes(16))

        def prepare_dataset(self, dataset, train):
            calls.append(("prepare", train))
            return dataset

        def collate_fn(self, examples):
            x, y = zip(*examples, strict=True)
            return {"x": torch.stack(x), "y": torch.stack(y)}

        def train_step(self, batch):
            return torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

        def eval_step(self, batch):
            return {"loss": self.train_step(batch)}

    trainer = make(Full(), "somewhere", val_split=0.25, epochs=1).fit()
    assert calls == [("load", "somewhere"), ("configure", 3, 12), ("prepare", True), ("prepare", False)]
    assert "val/loss" in trainer.best_metrics


def test_hooks_of_a_task_are_called():
    calls = []

    class Hooks(MeanTask):
        def on_train_begin(self):
            calls.append("begin")

        def on_epoch_begin(self, epoch):
            calls.append(f"epoch {epoch}")

        def on_step_end(self, step, max_steps):
            calls.append(f"{step}/{max_steps}")

        def on_validation_end(self, metrics):
            calls.append(sorted(metrics))

        def on_epoch_end(self, epoch, metrics):
            calls.append((epoch, sorted(metrics)))

        def on_train_end(self):
            calls.append("end")

    make(Hooks(), classes(16), val_data=classes(8), epochs=1).fit()
    metrics = ["val/accuracy", "val/loss"]
    assert calls == ["begin", "epoch 0", "1/2", "2/2", metrics, (0, metrics), "end"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "folder"}, "load_data"),
        ({"data": 3}, "data to be a path"),
        ({"val_split": 0.1, "val_data": (1,)}, "received both"),
        ({"val_split": 1.5}, "val_split"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": -1}, "batch_size"),
        ({"lr": -1}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"warmup_ratio": 2}, "warmup_ratio"),
        ({"log_every": "often"}, "log_every"),
        ({"eval_every": 0}, "eval_every"),
        ({"monitor_mode": "best"}, "monitor_mode"),
        ({"strategy": "ddpp"}, "strategy"),
        ({"task": MeanTask}, "the class MeanTask"),
        ({"task": object()}, "train_step"),
        ({"callbacks": [object()]}, "on_train_begin"),
        ({"callbacks": [dict]}, "the class dict"),
        ({"max_steps": 2.5}, "max_steps"),
    ],
)
def test_bad_arguments_are_explained(options, message):
    options = {"task": MeanTask(), "data": classes(), "log": "none", **options}
    with pytest.raises((BadArgument, DataError), match=message):
        Trainer(**options)


def test_an_unknown_logger_is_explained():
    with pytest.raises(BadArgument, match="Did you mean 'wandb'"):
        make(log="wandbb", epochs=1).fit()


def test_what_a_killed_process_was_writing_is_cleared_away(tmp_path):
    """Drafts of a living process are its own business."""
    dead, living = (tmp_path / f".status.json.{number}.tmp" for number in (999_999_999, os.getppid()))
    dead.touch()
    living.touch()
    make(epochs=1, run_dir=tmp_path).fit()
    assert not dead.exists()
    assert living.exists()


# -- callbacks and the trainer -----------------------------------------------------------------------------


def test_names_of_the_reference_plan_work_in_callbacks():
    seen = {}

    class Old:
        def on_step_end(self, trainer, step, loss):
            seen["lr"] = trainer._scheduler.get_last_lr()[0]
            seen["groups"] = len(trainer._optimizer.param_groups)
            seen["places"] = trainer._step, trainer._epoch, trainer._max_steps
            trainer._logger.log({"train/mine": 1.0}, step)
            trainer._ctx.set("mine", step)
            if step == 5:
                trainer._should_stop = True

    trainer = make(callbacks=[Old()], epochs=4)
    trainer.fit()
    assert trainer.state.step == 5
    assert trainer.control.stopped_by == "Old"
    assert seen["places"] == (5, 0, 32)
    assert seen["groups"] == 2
    assert trainer.context.get("mine") == 5
    assert any(r.get("train/mine") == 1.0 for r in read_jsonl("run/metrics.jsonl"))
    trainer.fit()  # a second fit does not end at once, until the callback asks again
    assert trainer.state.step == 32


def test_the_callers_list_is_not_changed():
    mine = []
    make(callbacks=mine, log="console")
    assert mine == []


def test_step_values_of_the_context_end_with_the_step():
    from trainformer.context import Lifecycle

    seen = []

    class Uses:
        def on_step_begin(self, trainer, step):
            seen.append(trainer.context.get("scratch"))
            trainer.context.set("scratch", step, Lifecycle.STEP)

        def on_step_end(self, trainer, step, loss):
            seen.append(trainer.context.get("scratch"))

    make(callbacks=[Uses()], max_steps=2).fit()
    assert seen == [None, 0, None, 1]


def test_a_failing_run_closes_its_loggers_and_tells_callbacks():
    told = []

    class Fails:
        def on_step_end(self, trainer, step, loss):
            raise ValueError("broken")

        def on_error(self, trainer, error):
            told.append(str(error))

    with pytest.raises(ValueError, match="broken"):
        make(callbacks=[Fails()]).fit()
    assert told == ["broken"]
    assert not [h for h in logging.getLogger("trainformer").handlers if isinstance(h, logging.FileHandler)]


def test_six_frames_from_fit_to_the_task():
    import inspect

    depth = []

    class Look(MeanTask):
        def train_step(self, batch):
            names = [f.function for f in inspect.stack()]
            depth.append(names.index("fit", names.index("fit") + 1) if names.count("fit") > 1 else names.index("fit"))
            return super().train_step(batch)

    make(Look(), max_steps=1).fit()
    assert depth[0] <= 6


@pytest.mark.parametrize("name", ["", "..", "."])
def test_a_name_that_names_no_folder_is_refused(name):
    with pytest.raises(BadArgument, match="name to name a folder under runs/"):
        Trainer(MeanTask(), classes(), name=name, log="none", max_steps=1).fit()


@pytest.mark.parametrize(("given", "recorded"), [({}, ("cpu", "env")), ({"device": "cpu"}, ("cpu", "user"))])
def test_the_device_is_recorded_with_whoever_chose_it(given, recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = Trainer(MeanTask(), classes(), log="none", max_steps=1, **given).fit()
    written = json.loads((trainer.run_folder / "config.json").read_text())["device"]
    assert (written["value"], written["source"]) == recorded
