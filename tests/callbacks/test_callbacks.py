"""The built-in callbacks in real runs, and callbacks given by name."""

import copy
import logging
import math
import sys
from pathlib import Path

import pytest
import timm.utils
import torch

from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.callbacks import (
    EMA,
    CallbackList,
    EarlyStopping,
    GradientMonitor,
    LRFinder,
    LRMonitor,
    ModelCheckpoint,
    Throughput,
    make_callback,
)
from trainformer.core import plugins
from trainformer.core.errors import BadArgument
from trainformer.loggers import read_jsonl
from trainformer.run import run_of


def fit(*callbacks, task=None, data=None, **options):
    defaults = {"batch_size": 8, "epochs": 3, "lr": 1e-2, "log": "none", "save_best": 0, "run_dir": "run"}
    trainer = Trainer(task or MeanTask(), data or classes(), callbacks=list(callbacks), **{**defaults, **options})
    return trainer.fit()


class Scripted(MeanTask):
    """Evaluates to given values, one per evaluation."""

    def __init__(self, values):
        super().__init__()
        self.values = list(values)
        self.turn = 0

    def eval_step(self, batch):
        return {"loss": float(self.values[self.turn])}

    def on_validation_end(self, metrics):
        self.turn += 1


# -- early stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "stopped_after"),
    [
        ([5, 4, 3, 2, 1], {"patience": 2}, None),
        ([5, 4, 4, 4, 1], {"patience": 2}, 4),
        ([5, 6, 4, 5, 6], {"patience": 2}, 5),
        ([1, 2, 3, 2, 1], {"patience": 2, "mode": "max"}, 5),
        ([5, 4.95, 4.91, 4, 3], {"patience": 2, "min_delta": 0.1}, 3),
        ([5, math.nan, math.nan, 1, 1], {"patience": 2}, 3),
        ([5, 11, 1, 1, 1], {"patience": 3, "divergence_threshold": 10}, 2),
        ([5, math.nan, 1, 1, 1], {"patience": 3, "divergence_threshold": 10}, 2),
        ([5, -1, 9, 9, 9], {"patience": 3, "mode": "max", "divergence_threshold": 0}, 2),
        ([0, 0, 0, 0, 0], {"patience": 1}, 2),
    ],
)
def test_early_stopping(values, options, stopped_after):
    trainer = fit(EarlyStopping(**options), task=Scripted(values), val_data=classes(8), epochs=5)
    assert trainer.state.epoch == (stopped_after or 5)
    if stopped_after and stopped_after < 5:
        assert trainer.control.stopped_by == "EarlyStopping"
        assert "val/loss" in trainer.control.stop_reason


def test_early_stopping_on_an_unknown_metric_names_the_known_ones():
    with pytest.raises(BadArgument, match=r"'val/acc'.*val/accuracy"):
        fit(EarlyStopping(monitor="val/acc"), val_data=classes(8))


def test_early_stopping_continues_counting_after_resume():
    stopper = EarlyStopping(patience=3)
    fit(stopper, task=Scripted([1, 2, 2]), val_data=classes(8), epochs=3)
    other = EarlyStopping(patience=3)
    other.load_state_dict(stopper.state_dict())
    assert other.state_dict()["best"] == 1
    trainer = fit(other, task=Scripted([2, 2, 2]), val_data=classes(8), epochs=3, run_dir="b")
    assert trainer.state.epoch == 1


@pytest.mark.parametrize("bad", [{"mode": "best"}, {"patience": 0}])
def test_early_stopping_rejects_invalid_arguments(bad):
    with pytest.raises(BadArgument):
        EarlyStopping(**bad)


# -- checkpoints -------------------------------------------------------------------------------------------


def test_model_checkpoint_keeps_the_best_files():
    keeper = ModelCheckpoint(save_top_k=2, save_dir="best")
    fit(keeper, task=Scripted([0.5, 0.0, 0.7, 0.25, 0.9]), val_data=classes(8), epochs=5)
    names = sorted(p.name for p in Path("best").iterdir())
    assert names == ["epoch_2_val_loss_0.0000.pt", "epoch_4_val_loss_0.2500.pt"]
    assert keeper.best_path.name == names[0]


def test_model_checkpoint_with_mode_max_and_a_custom_filename():
    keeper = ModelCheckpoint(mode="max", save_top_k=1, save_dir="best", filename="s{step}.pt")
    fit(keeper, task=Scripted([0.1, 0.3, 0.2]), val_data=classes(8))
    assert [p.name for p in Path("best").iterdir()] == ["s16.pt"]
    again = ModelCheckpoint(mode="max", save_top_k=1, save_dir="best")
    again.load_state_dict(keeper.state_dict())
    assert again.state_dict() == {"best_scores": [(0.3, str(Path("best/s16.pt")))]}


def test_files_of_model_checkpoint_can_be_loaded():
    keeper = ModelCheckpoint(save_top_k=1, save_dir="best")
    trainer = fit(keeper, val_data=classes(32, seed=1))
    want = trainer.best_metrics["val/loss"]
    task = MeanTask()
    other = Trainer(task, classes(), val_data=classes(32, seed=1), log="none")
    assert other.load(keeper.best_path).evaluate()["val/loss"] == pytest.approx(want, rel=1e-12)


# -- monitors ----------------------------------------------------------------------------------------------


def test_lr_monitor_logs_every_group():
    def two(groups):
        return torch.optim.SGD([{**g, "lr": 0.1 * (i + 1)} for i, g in enumerate(groups)], lr=0.1)

    trainer = fit(LRMonitor(), optimizer=two, scheduler=None, log_every=4)
    assert all(r["train/lr"] == 0.1 and r["train/lr_1"] == pytest.approx(0.2) for r in trainer.state.log_history)


def test_gradient_monitor_logs_norms_before_clipping():
    norms = []

    class Reference:
        def on_before_optimizer_step(self, trainer, step):
            norms.append(float(trainer.grad_norm))

    fit(Reference(), GradientMonitor(log_every=6, clip_percentile=50), gradient_clip=0.01, epochs=3)
    records = [r for r in read_jsonl("run/metrics.jsonl") if "train/grad_norm_p50" in r]
    assert [r["step"] for r in records] == [6, 12, 18, 24]
    for i, record in enumerate(records):
        window = torch.tensor(norms[6 * i : 6 * i + 6])
        assert record["train/grad_norm_p50"] == pytest.approx(torch.quantile(window, 0.5).item(), rel=1e-5)
        assert record["train/grad_norm_max"] == pytest.approx(window.max().item(), rel=1e-5)
        assert 0 < record["train/grad_norm_largest_parameter"] <= window[-1] * 1.001


def test_gradient_monitor_warns_and_names_the_parameter(caplog):
    class Exploding(MeanTask):
        def train_step(self, batch):
            return super().train_step(batch) + 1e4 * self.model[2].bias.sum()

    with caplog.at_level(logging.WARNING):
        fit(GradientMonitor(log_every=2, explosion_threshold=100), task=Exploding(), max_steps=2)
    assert "2.bias" in caplog.text
    assert "gradient norm reached" in caplog.text


def test_throughput_adds_flops_and_steps():
    x, y = classes(dtype=torch.float32)
    meter = Throughput(peak_flops=1e12)
    trainer = fit(meter, task=MeanTask(mlp(dtype=torch.float32)), data=(x, y), log_every=5)
    # Two linear layers, 4x8 and 8x3: 2 FLOPs per weight for the forward pass, the weight gradients and the input
    # gradients each, minus the gradient of the first inputs, which is not computed.
    want = 2 * (4 * 8 + 8 * 3) * 3 - 2 * 4 * 8
    assert meter.flops_per_sample == want
    record = trainer.state.log_history[-1]
    assert record["train/mfu"] == pytest.approx(record["train/samples_per_second"] * want / 1e12)
    assert record["train/steps_per_second"] == pytest.approx(record["train/samples_per_second"] / 8)


# -- LR finder ---------------------------------------------------------------------------------------------


class Noisy(MeanTask):
    def __init__(self):
        super().__init__(torch.nn.Sequential(mlp(4, 8), torch.nn.BatchNorm1d(8, dtype=torch.float64), mlp(8, 3)))

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x + 0.1 * torch.randn_like(x), y))


def test_lr_finder_has_no_side_effects_if_lr_was_set():
    plain, searched = Noisy(), Noisy()
    fit(task=plain, lr=1e-4, run_dir="a")
    finder = LRFinder(num_steps=30)
    trainer = fit(finder, task=searched, lr=1e-4, run_dir="b")
    assert trainer.lr == 1e-4  # the default value, but passed explicitly
    assert same(plain.model.state_dict(), searched.model.state_dict())
    assert len(finder.lrs) <= 30
    assert trainer.context.config["suggested_lr"] == finder.suggested_lr


def test_lr_finder_sets_lr_if_it_was_not_passed():
    finder = LRFinder(num_steps=60, smoothing=0.2)
    trainer = Trainer(
        MeanTask(), classes(), batch_size=8, epochs=2, callbacks=[finder], log="none", run_dir="run", log_every=1
    )
    trainer.fit()
    assert trainer.lr == finder.suggested_lr
    assert 1e-4 < finder.suggested_lr < 3
    assert max(r["train/lr"] for r in trainer.state.log_history) == pytest.approx(finder.suggested_lr, rel=0.05)


def test_lr_finder_runs_once():
    finder = LRFinder(num_steps=12)
    trainer = Trainer(MeanTask(), classes(), max_steps=3, callbacks=[finder], log="none", run_dir="run")
    trainer.fit()
    found, finder.lrs = finder.suggested_lr, []
    trainer.max_steps = 6
    trainer.fit()
    assert finder.lrs == []
    assert trainer.lr == found


def test_lr_finder_keeps_its_suggestion_when_a_failed_run_resumes():
    class Failing:
        def on_step_end(self, trainer, step, loss):
            if step == 5:
                raise RuntimeError("failed on purpose")

    options = {"batch_size": 8, "epochs": 2, "log": "none", "save_every": 3, "log_every": 1}
    whole = Trainer(MeanTask(), classes(), callbacks=[LRFinder(num_steps=12)], run_dir="whole", **options).fit()
    with pytest.raises(RuntimeError, match="on purpose"):
        Trainer(MeanTask(), classes(), callbacks=[LRFinder(num_steps=12), Failing()], run_dir="run", **options).fit()
    finder = LRFinder(num_steps=12)
    resumed = Trainer(MeanTask(), classes(), callbacks=[finder], run_dir="run", **options).fit()
    assert not finder.lrs
    assert same(weights(resumed.task), weights(whole.task))


def test_lr_finder_stops_when_the_loss_explodes():
    class Steep(MeanTask):
        def train_step(self, batch):
            return sum((p**2).sum() for p in self.model.parameters())

    finder = LRFinder(min_lr=1e-3, max_lr=1e6, num_steps=100)
    fit(finder, task=Steep(), optimizer="sgd", gradient_clip=None)
    assert len(finder.lrs) < 100


@pytest.mark.parametrize("bad", [{"min_lr": 1, "max_lr": 0.1}, {"num_steps": 2}, {"smoothing": 0}])
def test_lr_finder_rejects_invalid_arguments(bad):
    with pytest.raises(BadArgument):
        LRFinder(**bad)


# -- EMA ---------------------------------------------------------------------------------------------------


def test_ema_matches_timm():
    reference = {}

    class Reference:
        def attach(self, trainer):
            reference["ema"] = timm.utils.ModelEmaV3(trainer.task.model, decay=0.9)

        def on_step_end(self, trainer, step, loss):
            reference["ema"].update(trainer.task.model)

    task = Noisy()
    ema = EMA(decay=0.9, warmup=False)
    fit(ema, Reference(), task=task)
    want = reference["ema"].module.state_dict()
    got = ema.model.state_dict()
    assert got.keys() == want.keys()
    for key in got:
        assert torch.allclose(got[key].double(), want[key].double(), atol=1e-12), key


def test_ema_updates_once_per_optimizer_step_not_micro_batch():
    ema = EMA(decay=0.9)
    fit(ema, accumulation_steps=4, epochs=2)
    assert ema.updates == 4


def test_evaluation_uses_the_ema_and_leaves_the_trained_weights_alone():
    task = MeanTask()
    ema = EMA(decay=0.99, warmup=False)
    trainer = fit(ema, task=task, val_data=classes(32, seed=1), lr=0.1)
    trained = weights(task)
    val = classes(32, seed=1)
    average = MeanTask(copy.deepcopy(ema.model))
    with torch.no_grad():
        want = average.train_step(val).item()
        raw = task.train_step(val).item()
    assert trainer.evaluate()["val/loss"] == pytest.approx(want, rel=1e-12)
    assert abs(want - raw) > 1e-3
    assert same(trained, weights(task))
    kept = fit(EMA(decay=0.99, evaluate=False), task=MeanTask(), val_data=val, lr=0.1, run_dir="b")
    assert kept.evaluate()["val/loss"] == pytest.approx(raw, rel=1e-12)


def test_the_trained_model_is_restored_if_evaluation_fails():
    class Fails(MeanTask):
        def eval_step(self, batch):
            raise RuntimeError("evaluation broke")

    task = Fails()
    model = task.model
    with pytest.raises(RuntimeError, match="evaluation broke"):
        fit(EMA(), task=task, val_data=classes(8))
    assert task.model is model


def test_ema_is_restored_on_resume():
    whole, half, rest = EMA(decay=0.9), EMA(decay=0.9), EMA(decay=0.9)
    fit(whole, max_steps=9, scheduler=None, run_dir="a")
    fit(half, max_steps=5, scheduler=None, run_dir="b").save("five.pt")
    fit(rest, max_steps=9, scheduler=None, run_dir="c", resume="five.pt")
    assert rest.updates == whole.updates == 9
    assert same(rest.model.state_dict(), whole.model.state_dict())


def test_ema_keeps_fp32_for_a_bf16_model():
    ema = EMA(decay=0.5)
    fit(ema, task=MeanTask(mlp(dtype=torch.bfloat16)), data=classes(dtype=torch.bfloat16), max_steps=2)
    assert all(p.dtype == torch.float32 for p in ema.model.parameters())


def test_the_ema_is_exported():
    ema = EMA(decay=0.99, warmup=False)
    trainer = fit(ema, lr=0.1)
    path = trainer.export("m")
    exported = torch.load(path, weights_only=True)
    assert torch.equal(exported["0.weight"], ema.model.state_dict()["0.weight"].float())


# -- CallbackList ------------------------------------------------------------------------------------------


def test_two_instances_of_a_class_have_separate_states():
    a, b = EarlyStopping(patience=2), EarlyStopping(patience=9)
    a.load_state_dict({"best": 1.0, "counter": 1})
    b.load_state_dict({"best": 1.0, "counter": 5})
    saved = CallbackList([a, b]).state_dict()
    assert set(saved) == {"EarlyStopping", "EarlyStopping#2"}
    c, d = EarlyStopping(patience=2), EarlyStopping(patience=9)
    CallbackList([c, d]).load_state_dict(saved)
    assert (c.state_dict()["counter"], d.state_dict()["counter"]) == (1, 5)


def test_callbacks_run_in_the_order_given():
    order = []

    class Named:
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, trainer):
            order.append(self.name)

    fit(Named("first"), Named("second"), Named("third"), max_steps=1)
    assert order == ["first", "second", "third"]


# -- callbacks by name -------------------------------------------------------------------------------------


def test_callbacks_can_be_given_by_name():
    named = fit("lr_monitor", {"name": "ema", "decay": 0.9}, run_dir="a")
    assert [type(callback) for callback in run_of(named).callbacks] == [LRMonitor, EMA]
    assert same(weights(named.task), weights(fit(LRMonitor(), EMA(decay=0.9), run_dir="b").task))


def test_every_built_in_callback_has_a_name():
    needs_options = {"text_samples": {"prompts": ["a"]}, "lm_eval": {"tasks": "a"}}
    names = """collapse_monitor early_stopping ema gradient_monitor image_samples lm_eval lr_finder lr_monitor
    model_checkpoint online_knn online_linear profiler progress_bar rollout_samples text_samples throughput"""
    for name in names.split():
        assert callable(type(make_callback({"name": name, **needs_options.get(name, {})})))
    with pytest.raises(BadArgument, match=", ".join(names.split())):
        make_callback("no such callback")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("early_stoping", "Did you mean 'early_stopping'"),
        ({"name": "ema", "decey": 0.9}, "'ema' do not fit EMA.*'decey'"),
        ({"decay": 0.9}, "{'name': ..., options}"),
        ({"name": "text_samples"}, "missing a required argument: 'prompts'"),
    ],
)
def test_wrong_names_and_options_are_explained(spec, message):
    with pytest.raises(BadArgument, match=message):
        CallbackList([spec])


PLUGIN = """
class StepPrinter:
    def __init__(self, every=1):
        self.every = every

    def on_step_end(self, trainer, step, loss):
        if step % self.every == 0:
            trainer.log_metrics({"train/printed": float(step)})
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package that registers callbacks, one of them broken."""
    (tmp_path / "step_printer.py").write_text(PLUGIN)
    info = tmp_path / "step_printer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step-printer\nVersion: 1.0\n")
    lines = ["[trainformer.callbacks]", "step_printer = step_printer:StepPrinter", "broken = step_printer:Missing"]
    lines.append("text = step_printer:__name__")
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._registered.cache_clear()
    yield
    plugins._registered.cache_clear()
    sys.modules.pop("step_printer", None)


def test_a_callback_of_another_package_is_found_by_name(plugin):
    fit({"name": "step_printer", "every": 4}, max_steps=8)
    assert [r["step"] for r in read_jsonl("run/metrics.jsonl") if "train/printed" in r] == [4, 8]
    with pytest.raises(BadArgument, match="Did you mean 'step_printer'"):
        make_callback("step_pinter")
    with pytest.raises(
        BadArgument, match=r"'broken' \(trainformer.callbacks, step_printer:Missing\) cannot be imported"
    ):
        make_callback("broken")
    with pytest.raises(BadArgument, match="'text' to be a callback class, or a function"):
        make_callback("text")
