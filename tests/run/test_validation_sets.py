"""Several validation sets: names, metrics, cadences, what is monitored, and what is refused."""

import json
import re
from collections import Counter

import pytest
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.callbacks import EMA, EarlyStopping, ModelCheckpoint, OnlineKNN
from trainformer.checkpoint import list_checkpoints
from trainformer.core.errors import BadArgument, DataError
from trainformer.live.server import Request, apply
from trainformer.report.reading import read_run
from trainformer.report.series import group_plots
from trainformer.run import run_of
from trainformer.run.validation_sets import validation_sets

TRAIN = TensorDataset(*classes(24))
CLEAN, SHIFTED = classes(13, seed=1), (classes(9, seed=2)[0] + 0.7, classes(9, seed=2)[1])
SETS = {"clean": CLEAN, "shifted": SHIFTED}
QUIET = {"log": "none", "device": "cpu", "precision": "no", "num_workers": 0, "lr": 0.05, "batch_size": 8}


def trainer(val_data=SETS, task=None, **options):
    return Trainer(task or MeanTask(), TRAIN, val_data, **{"epochs": 2, "eval_batch_size": 4, **QUIET, **options})


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("time", "train/samples_per_second", "train/memory_gb", "train/save_seconds")
    return [{name: value for name, value in line.items() if name not in names} for line in lines]


class Evaluated:
    """Which sets were evaluated at which step."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, metrics):
        sets = {name.split("/")[1] for name in metrics}
        assert sets == set(trainer.evaluated_sets)
        self.seen.append((trainer.state.step, *sorted(sets)))


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_each_set_has_the_metrics_that_it_has_alone():
    both = trainer().fit()
    expected = {}
    for name, data in SETS.items():
        alone = trainer(data).fit()
        assert same(weights(alone.task), weights(both.task))
        expected |= {f"val/{name}/{metric}": alone.evaluate()[f"val/{metric}"] for metric in ("loss", "accuracy")}
    assert both.evaluate() == expected
    assert both.val_sets == ("clean", "shifted")
    assert [len(loader) for loader in both.val_dataloaders.values()] == [4, 3]
    assert both.val_dataloader.dataset is both.val_dataloaders["clean"].dataset


def test_other_data_can_have_names_too():
    alone = trainer(CLEAN).fit()
    found = alone.evaluate({"a": SHIFTED, "b": CLEAN})
    assert found["val/b/loss"] == alone.evaluate()["val/loss"]
    assert found["val/a/loss"] == alone.evaluate(SHIFTED)["val/loss"]
    assert set(found) == {f"val/{name}/{metric}" for name in "ab" for metric in ("loss", "accuracy")}


def test_the_same_data_under_two_names_and_every_kind_of_data():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(TensorDataset(*CLEAN))

    sets = {"tensors": CLEAN, "again": CLEAN, "dataset": TensorDataset(*CLEAN), "stream": Stream(),
            "loader": DataLoader(TensorDataset(*CLEAN), batch_size=5)}  # fmt: skip
    found = trainer(sets, epochs=1).fit().evaluate()
    assert len({round(found[f"val/{name}/loss"], 12) for name in sets}) == 1
    assert found["val/tensors/loss"] == found["val/again/loss"]


def test_names_of_metrics_are_names_like_any_other():
    found = trainer({"loss": CLEAN, "v2.1-b": SHIFTED}, monitor_metric="val/loss/loss").fit().evaluate()
    assert set(found) == {"val/loss/loss", "val/loss/accuracy", "val/v2.1-b/loss", "val/v2.1-b/accuracy"}


def test_metrics_of_whole_sets_are_computed_per_set():
    class Rows(MeanTask):
        def eval_step(self, batch):
            return {"label": batch[1]}

        def on_eval_end(self, rows):
            return {"val/size": len(rows["label"])}

        def derive_metrics(self, metrics):
            return {"double": 2 * metrics["val/size"]}

    found = trainer(task=Rows(), monitor_metric="val/shifted/size").fit().evaluate()
    assert found == {"val/clean/size": 13, "val/clean/double": 26, "val/shifted/size": 9, "val/shifted/double": 18}


# -- cadences --------------------------------------------------------------------------------------------------------


def test_each_set_has_its_own_cadence_and_the_end_comes_once():
    count = Counter()

    class Counting(MeanTask):
        def eval_step(self, batch):
            count[len(batch[0])] += 1
            return super().eval_step(batch)

    seen = Evaluated()
    sets = {"often": classes(4, seed=3), "rarely": classes(3, seed=4), "never": classes(2, seed=5)}
    every = {"often": "2steps", "rarely": 2, "never": None}  # 3 steps per epoch
    one = trainer(sets, Counting(), epochs=5, eval_every=every, callbacks=[seen]).fit()
    assert seen.seen == [(2, "often"), (4, "often"), (6, "often", "rarely"), (8, "often"), (10, "often"),
                         (12, "often", "rarely"), (14, "often"), (15, "often", "rarely")]  # fmt: skip
    assert count == {4: 8, 3: 3}
    assert one.evaluate().keys() >= {"val/never/loss"}


def test_a_set_without_a_cadence_has_the_default():
    seen = Evaluated()
    trainer(eval_every={"shifted": "2steps"}, callbacks=[seen]).fit()
    assert seen.seen == [(2, "shifted"), (3, "clean"), (4, "shifted"), (6, "clean", "shifted")]


def test_all_sets_share_one_cadence():
    seen = Evaluated()
    trainer(eval_every="4steps", callbacks=[seen]).fit()
    assert seen.seen == [(4, "clean", "shifted"), (6, "clean", "shifted")]


def test_requests_mean_all_sets_and_can_be_cancelled():
    class Asking(Evaluated):
        def on_step_end(self, trainer, step, loss):
            if step == 1:
                trainer.control.should_evaluate = True
            if step == 2:
                trainer.control.should_evaluate = False  # that of "shifted"
            if step == 4:
                apply(Request("eval", "someone"), trainer.control)  # `trainformer ctl eval`, where one is due anyway

        def on_epoch_end(self, trainer, epoch, metrics):
            trainer.control.should_evaluate = True

    asking = Asking()
    trainer(eval_every={"clean": None, "shifted": "2steps"}, epochs=2, callbacks=[asking]).fit()
    both = ("clean", "shifted")
    assert asking.seen == [(1, *both), (3, *both), (4, *both), (6, "shifted"), (6, "clean")]


def test_a_cadence_that_never_comes_is_a_warning(caplog):
    """Epochs where steps were meant: 5 of 3 steps each, in a run of 6 steps."""
    seen = Evaluated()
    options = {"max_steps": 6, "eval_every": 5, "save_every": 3, "save_strategy": "epochs", "callbacks": [seen]}
    with caplog.at_level("WARNING", logger="trainformer"):
        run = trainer(**options).fit()
    assert seen.seen == [(6, "clean", "shifted")]  # only at the end
    saving, evaluation = [record.message for record in caplog.records]
    assert evaluation == (
        "eval_every=5 means 5 epochs, and the run has 2: it is never due before the end. For steps write '5steps'."
    )
    assert "save_every=3 means 3 epochs" in saving
    assert any(evaluation in finding.message for finding in run.check().findings)
    caplog.clear()
    with caplog.at_level("WARNING", logger="trainformer"):
        trainer(max_steps=6, eval_every={"clean": "7steps", "shifted": 2}).fit()
        trainer(max_steps=2).fit()  # the default was not chosen
        trainer(max_steps=6, eval_every=2, save_every="6steps").fit()
        trainer(None, max_steps=6, eval_every=125).fit()  # there is nothing to evaluate
    assert [record.message for record in caplog.records] == [
        "eval_every['clean']='7steps' is longer than the whole run of 6 steps."
    ]


def test_cadences_survive_a_resume_in_the_middle(tmp_path):
    options = {"epochs": 4, "eval_every": {"clean": "2steps", "shifted": "5steps"}, "save_every": 2, "log_every": 1}
    whole = trainer(run_dir=tmp_path / "whole", **options).fit()

    class Stop:
        def __init__(self, at):
            self.at = at

        def on_step_end(self, trainer, step, loss):
            if step == self.at:
                trainer.control.signal = 15

    for at in (4, 5, 10, None):
        part = trainer(run_dir=tmp_path / "parts", exit_on_signal=False, callbacks=[Stop(at)], **options).fit()
    assert same(weights(part.task), weights(whole.task))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert part.best_metrics == whole.best_metrics


# -- what is monitored -----------------------------------------------------------------------------------------------


def test_one_of_them_chooses_the_best_checkpoint(tmp_path):
    options = {"epochs": 6, "monitor_metric": "val/shifted/accuracy", "monitor_mode": "max", "save_every": None}
    one = trainer(run_dir=tmp_path, save_best=1, **options).fit()
    logged = [r for r in one.state.log_history if "val/shifted/accuracy" in r]
    best = max(logged, key=lambda record: (record["val/shifted/accuracy"], -record["step"]))
    assert one.best_metrics["val/shifted/accuracy"] == best["val/shifted/accuracy"]
    assert one.state.best_step == best["step"]
    assert best["step"] in {checkpoint.step for checkpoint in list_checkpoints(tmp_path)}
    assert read_run(tmp_path)["best"]["step"] == best["step"]


def test_by_default_the_first_set_is_monitored(tmp_path):
    one = trainer(run_dir=tmp_path).fit()
    assert one.monitor_metric == "val/clean/loss"
    recorded = json.loads((tmp_path / "config.json").read_text())
    assert recorded["monitor_metric"]["source"] == "derived"
    assert recorded["val_sets"]["value"] == ["clean", "shifted"]


def test_callbacks_wait_for_the_set_that_they_monitor(tmp_path):
    """Evaluations without it count neither for patience nor as an error."""
    stopping = EarlyStopping("val/shifted/loss", patience=2, min_delta=100.0)
    saving = ModelCheckpoint("val/shifted/loss", save_dir=str(tmp_path))
    one = trainer(eval_every={"clean": "1steps", "shifted": "2steps"}, epochs=4, callbacks=[stopping, saving]).fit()
    assert one.state.step == 6  # the third evaluation of "shifted"
    assert one.control.stopped_by == "EarlyStopping"
    assert len(list(tmp_path.glob("*.pt"))) == 3


def test_what_other_callbacks_call_a_monitor_may_be_anything():
    class Own:
        monitor = "train/loss"

        def on_log(self, trainer, metrics):
            self.seen = metrics[self.monitor]

    class Other(Evaluated):
        monitor = 3

    own = Own()
    trainer(callbacks=[own, Other()]).fit()
    assert own.seen > 0


def test_a_plateau_follows_one_set():
    plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 100.0, "threshold_mode": "abs", "factor": 0.5}
    rates = []

    class Rates:
        def on_log(self, trainer, metrics):
            rates.append(metrics["train/lr"] / 0.05)

    trainer(eval_every={"clean": "1steps", "shifted": "2steps"}, scheduler={**plateau, "monitor": "val/shifted/loss"},
            callbacks=[Rates()], log_every=1).fit()  # fmt: skip
    assert rates == pytest.approx([1, 1, 1, 1, 0.5, 0.5])  # the first value is the best, the later ones are bad


def test_the_average_is_compared_on_the_sets_that_were_evaluated():
    one = trainer(eval_every={"clean": 1, "shifted": 2}, epochs=1, callbacks=[EMA(compare=True)], save_best=0).fit()
    first = next(record for record in one.state.log_history if "val/clean/loss" in record)
    assert {"val/without_ema/clean/loss", "val/without_ema/shifted/loss"} <= first.keys()  # the end of the run
    seen = []

    class Names:
        def on_validation_end(self, trainer, metrics):
            seen.append({name for name in metrics if "without" in name and "loss" in name})

    stopping = EarlyStopping("val/without_ema/shifted/loss")
    trainer(eval_every={"clean": "1steps"}, epochs=1, callbacks=[EMA(compare=True), Names(), stopping]).fit()
    assert seen[0] == {"val/without_ema/clean/loss"}


# -- check, report, live ---------------------------------------------------------------------------------------------


def test_the_check_evaluates_every_set(capsys):
    report = trainer().check()
    assert report.ok
    assert "val/clean/loss" in str(report)
    assert "val/shifted/accuracy" in str(report)
    broken = {"clean": CLEAN, "broken": (CLEAN[0][:, :2], CLEAN[1])}
    assert not trainer(broken).check(raise_on_failure=False).ok


def test_a_plot_has_a_curve_per_set(tmp_path):
    trainer(run_dir=tmp_path, log_every=1, eval_every={"shifted": "2steps"}).fit()
    found = read_run(tmp_path)
    plots = {
        plot["title"]: plot["names"] for plot in group_plots(found["series"], found["config"]["val_sets"]["value"])
    }
    assert plots["loss"] == ["train/loss", "val/clean/loss", "val/shifted/loss"]
    assert plots["accuracy"] == ["val/clean/accuracy", "val/shifted/accuracy"]
    assert found["series"]["val/shifted/loss"][0] == [2, 4, 6]
    assert found["series"]["val/clean/loss"][0] == [3, 6]


def test_the_status_of_a_run_has_the_latest_value_of_each_set(tmp_path):
    class Asks:
        def on_log(self, trainer, metrics):
            self.status = run_of(trainer).live_control._snapshot(run_of(trainer).folder or trainer._run.folder)

    asks = Asks()
    trainer(run_dir=tmp_path, log_every=1, eval_every={"clean": "2steps", "shifted": "3steps"}, callbacks=[asks]).fit()
    assert {"val/clean/loss", "val/shifted/loss"} <= asks.status["evaluation"].keys()


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "a list of datasets": ([TRAIN, TRAIN], {}, "Give them names: val_data={'clean'"),
    "a list of loaders": ([DataLoader(TRAIN), DataLoader(TRAIN)], {}, "Give them names"),
    "a list of arrays": ([CLEAN, CLEAN], {}, "Give them names"),
    "no sets": ({}, {}, "at least one dataset"),
    "a slash": ({"a/b": CLEAN}, {}, "received 'a/b'"),
    "a space": ({"my set": CLEAN}, {}, "letters, digits"),
    "an empty name": ({"": CLEAN}, {}, "letters, digits"),
    "a number": ({1: CLEAN}, {}, "letters, digits"),
    "the prefix of another metric": ({"without_ema": CLEAN}, {}, "letters, digits"),
    "None": ({"clean": None}, {}, r"val_data\['clean'\] to be a dataset"),
    "nested": ({"clean": {"deep": CLEAN}}, {}, "another dict"),
    "an empty set": ({"clean": CLEAN, "none": (CLEAN[0][:0], CLEAN[1][:0])}, {}, r"val_data\['none'\].*one sample"),
    "no dataset": ({"clean": 3}, {}, r"val_data\['clean'\]: Expected data to be"),
    "with a split": (SETS, {"val_split": 0.2}, "received both"),
    "the metric without a set": (SETS, {"monitor_metric": "val/accuracy"}, "'val/clean/accuracy'"),
    "another set": (SETS, {"monitor_metric": "val/shiftd/loss"}, "'val/shifted/loss'"),
    "a callback without a set": (SETS, {"callbacks": [EarlyStopping()]}, "EarlyStopping to name a metric of one"),
    "a scheduler without a set": (
        SETS, {"scheduler": {"name": "plateau", "monitor": "val/loss"}}, "ReduceLROnPlateau to name a metric",
    ),
    "a scheduler of a set that is never evaluated": (
        SETS, {"scheduler": {"name": "plateau", "monitor": "val/clean/loss"}, "eval_every": {"clean": None}},
        "evaluations during training",
    ),
    "a probe without a set": (
        SETS, {"callbacks": [OnlineKNN()], "monitor_metric": "val/online_knn"}, "'val/clean/online_knn'",
    ),
    "the cadence of another set": (SETS, {"eval_every": {"shiftet": 1}}, "Did you mean 'shifted'"),
    "cadences without names": (CLEAN, {"eval_every": {"clean": 1}}, "Name the validation sets"),
    "an impossible cadence": (SETS, {"eval_every": {"clean": "often"}}, r"eval_every\['clean'\]"),
    "a cadence of 0": (SETS, {"eval_every": {"clean": 0}}, r"eval_every\['clean'\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_before_training(case):
    val_data, options, message = REFUSED[case]
    with pytest.raises((BadArgument, DataError), match=message):
        trainer(val_data, **options)


def test_a_metric_that_no_set_has_is_refused_before_the_first_step(tmp_path):
    one = trainer(monitor_metric="val/shifted/acuracy", run_dir=tmp_path / "run")
    with pytest.raises(BadArgument, match=re.escape("['val/shifted/accuracy', 'val/shifted/loss']. Did you mean")):
        one.fit()
    assert one.state.step == 0
    assert not (tmp_path / "run").exists()


def test_a_metric_that_depends_on_the_data_is_found_in_the_whole_set():
    """Only the last batch has class 2."""
    x, y = CLEAN
    order = y.argsort()

    class PerClass(MeanTask):
        def eval_step(self, batch):
            return {**super().eval_step(batch), **{f"count_{c}": float(c in batch[1]) for c in batch[1].tolist()}}

    one = trainer((x[order], y[order]), PerClass(), monitor_metric="val/count_2", monitor_mode="max").fit()
    assert one.state.best_step > 0


def test_what_can_be_read_only_once_is_not_read_before_training():
    """A stream that continues where it was left: the first evaluation sees its first batch."""
    seen = []

    class Once(IterableDataset):
        def __init__(self):
            self.left = [(x, y) for x, y in zip(*CLEAN, strict=True)] * 2

        def __iter__(self):
            for _ in range(len(CLEAN[0])):
                yield self.left.pop(0)

    class Seeing(MeanTask):
        def eval_step(self, batch):
            seen.extend(batch[1].tolist())
            return super().eval_step(batch)

    trainer({"once": Once()}, Seeing(), monitor_metric="val/once/accuracy", monitor_mode="max").fit()
    assert seen == 2 * CLEAN[1].tolist()
    unknown = trainer({"once": Once()}, monitor_metric="val/once/acuracy")
    with pytest.raises(BadArgument, match="Did you mean 'val/once/accuracy'"):
        unknown.fit()
    assert unknown.state.step == 3  # the first evaluation


def test_a_metric_that_is_missing_once_does_not_end_the_run():
    class Sometimes(MeanTask):
        evaluations = 0

        def derive_metrics(self, metrics):
            self.evaluations += 1
            return {} if self.evaluations == 5 else {"own": metrics["loss"]}

    one = trainer(task=Sometimes(), monitor_metric="val/shifted/own", epochs=4).fit()
    assert [("val/shifted/own" in record) for record in one.state.log_history if "val/clean/loss" in record] == [
        True, False, True, True,
    ]  # fmt: skip


def test_a_list_of_samples_is_one_set():
    samples = [(x, y) for x, y in zip(*CLEAN, strict=True)]
    assert trainer(samples).fit().evaluate() == trainer(CLEAN).fit().evaluate()


def test_an_accuracy_of_a_set_is_maximised(caplog):
    made = trainer(monitor_metric="val/clean/accuracy", callbacks=[EarlyStopping("val/shifted/accuracy")])
    assert made.monitor_mode == "max"
    assert "EarlyStopping monitors val/shifted/accuracy with mode='min'" in caplog.text


def test_a_training_set_by_name_is_refused():
    with pytest.raises(BadArgument, match="one dataset to train on, received \"a dict with 'a'"):
        Trainer(MeanTask(), {"a": CLEAN}, **QUIET)


def test_an_empty_stream_is_named():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="'nothing' to have metrics"):
        trainer({"clean": CLEAN, "nothing": Nothing()}).fit()


def test_a_list_of_long_texts_is_one_dataset():
    """As a path, each of them would be longer than file systems allow."""
    texts = ["word " * 120, "another " * 90]
    assert validation_sets(texts) == {"": texts}


def test_a_set_that_is_never_evaluated_is_not_monitored():
    never = {"eval_every": {"clean": None}}
    with pytest.raises(BadArgument, match="evaluations of 'clean' for monitor_metric"):
        trainer(monitor_metric="val/clean/loss", **never).fit()
    with pytest.raises(BadArgument, match="evaluations of 'clean' for EarlyStopping"):
        trainer(callbacks=[EarlyStopping("val/clean/loss")], **never).fit()


def test_the_default_monitors_the_first_set_that_is_evaluated():
    made = trainer(eval_every={"clean": None}).fit()
    assert set(made.best_metrics) == {"val/shifted/loss", "val/shifted/accuracy"}
