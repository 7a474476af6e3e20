"""Every callback, in real runs."""

import copy
import logging
import math
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
)
from trainformer.core.errors import BadArgument
from trainformer.loggers import read_jsonl


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


def test_early_stopping_counts_on_after_a_restart():
    stopper = EarlyStopping(patience=3)
    fit(stopper, task=Scripted([1, 2, 2]), val_data=classes(8), epochs=3)
    other = EarlyStopping(patience=3)
    other.load_state_dict(stopper.state_dict())
    assert other._best == 1
    trainer = fit(other, task=Scripted([2, 2, 2]), val_data=classes(8), epochs=3, run_dir="b")
    assert trainer.state.epoch == 1


@pytest.mark.parametrize("bad", [{"mode": "best"}, {"patience": 0}])
def test_early_stopping_refuses_nonsense(bad):
    with pytest.raises(BadArgument):
        EarlyStopping(**bad)


# -- checkpoints -------------------------------------------------------------------------------------------


def test_model_checkpoint_keeps_the_best_files():
    keeper = ModelCheckpoint(save_top_k=2, save_dir="best")
    fit(keeper, task=Scripted([0.5, 0.0, 0.7, 0.25, 0.9]), val_data=classes(8), epochs=5)
    names = sorted(p.name for p in Path("best").iterdir())
    assert names == ["epoch_2_val_loss_0.0000.pt", "epoch_4_val_loss_0.2500.pt"]
    assert keeper.best_path.name == names[0]


def test_model_checkpoint_maximising_and_with_a_name_of_ones_own():
    keeper = ModelCheckpoint(mode="max", save_top_k=1, save_dir="best", filename="s{step}.pt")
    fit(keeper, task=Scripted([0.1, 0.3, 0.2]), val_data=classes(8))
    assert [p.name for p in Path("best").iterdir()] == ["s16.pt"]
    again = ModelCheckpoint(mode="max", save_top_k=1, save_dir="best")
    again.load_state_dict(keeper.state_dict())
    assert again._best_scores == [(0.3, Path("best/s16.pt"))]


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


def test_gradient_monitor_sees_gradients_before_they_are_gone():
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
    # Two linear layers, 4x8 and 8x3: 2 FLOPs per weight forward, and for the weights' and the inputs' gradients
    # each again, less the gradient of the first inputs, which nobody needs.
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


def test_lr_finder_leaves_no_trace_when_the_rate_was_set():
    plain, searched = Noisy(), Noisy()
    fit(task=plain, lr=1e-4, run_dir="a")
    finder = LRFinder(num_steps=30)
    trainer = fit(finder, task=searched, lr=1e-4, run_dir="b")
    assert trainer.lr == 1e-4  # set to the default's value, but set
    assert same(plain.model.state_dict(), searched.model.state_dict())
    assert len(finder.lrs) <= 30
    assert trainer.context.config["suggested_lr"] == finder.suggested_lr


def test_lr_finder_sets_the_rate_that_was_left_alone():
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


def test_lr_finder_stops_when_the_loss_explodes():
    class Steep(MeanTask):
        def train_step(self, batch):
            return sum((p**2).sum() for p in self.model.parameters())

    finder = LRFinder(min_lr=1e-3, max_lr=1e6, num_steps=100)
    fit(finder, task=Steep(), optimizer="sgd", gradient_clip=None)
    assert len(finder.lrs) < 100


@pytest.mark.parametrize("bad", [{"min_lr": 1, "max_lr": 0.1}, {"num_steps": 2}, {"smoothing": 0}])
def test_lr_finder_refuses_nonsense(bad):
    with pytest.raises(BadArgument):
        LRFinder(**bad)


# -- EMA ---------------------------------------------------------------------------------------------------


def test_ema_is_that_of_timm():
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


def test_ema_runs_once_per_optimizer_step_not_micro_batch():
    ema = EMA(decay=0.9)
    fit(ema, accumulation_steps=4, epochs=2)
    assert ema.updates == 4


def test_ema_is_evaluated_without_touching_the_trained_weights():
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


def test_the_trained_model_is_back_even_if_evaluation_fails():
    class Fails(MeanTask):
        def eval_step(self, batch):
            raise RuntimeError("evaluation broke")

    task = Fails()
    model = task.model
    with pytest.raises(RuntimeError, match="evaluation broke"):
        fit(EMA(), task=task, val_data=classes(8))
    assert task.model is model


def test_ema_survives_a_restart():
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


def test_ema_is_exported_and_predicted_with():
    ema = EMA(decay=0.99, warmup=False)
    trainer = fit(ema, lr=0.1)
    path = trainer.export("m")
    exported = torch.load(path, weights_only=True)
    assert torch.equal(exported["0.weight"], ema.model.state_dict()["0.weight"].float())


# -- the list ----------------------------------------------------------------------------------------------


def test_two_of_a_class_have_states_of_their_own():
    a, b = EarlyStopping(patience=2), EarlyStopping(patience=9)
    a._counter, b._counter = 1, 5
    saved = CallbackList([a, b]).state_dict()
    assert set(saved) == {"EarlyStopping", "EarlyStopping#2"}
    c, d = EarlyStopping(patience=2), EarlyStopping(patience=9)
    CallbackList([c, d]).load_state_dict(saved)
    assert (c._counter, d._counter) == (1, 5)


def test_callbacks_run_in_the_order_given():
    order = []

    class Named:
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, trainer):
            order.append(self.name)

    fit(Named("first"), Named("second"), Named("third"), max_steps=1)
    assert order == ["first", "second", "third"]
