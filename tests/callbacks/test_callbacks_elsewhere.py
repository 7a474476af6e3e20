"""The built-in callbacks in runs of `trainformer.hf` and `trainformer.mini`; the profiler; URLs instead of folders."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toys import MeanTask, classes
from trainformer import Trainer, hf, mini
from trainformer.callbacks import (
    EMA,
    CollapseMonitor,
    EarlyStopping,
    GradientMonitor,
    ImageSamples,
    LRFinder,
    LRMonitor,
    ModelCheckpoint,
    OnlineKNN,
    OnlineLinear,
    Profiler,
    TextSamples,
    Throughput,
)
from trainformer.core.errors import BadArgument, DataError

STEPS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count=32):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row[:4].argmax()} for row in x]


class Seen:
    """Collects the names in log records."""

    def __init__(self):
        self.names = set()

    def on_log(self, trainer, metrics):
        self.names |= metrics.keys()


def by_hf(*callbacks):
    arguments = hf.TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=8, logging_steps=1, use_cpu=True, disable_tqdm=True,
        save_strategy="no", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    hf.Trainer(Net(), arguments, train_dataset=rows(), eval_dataset=rows(8), callbacks=list(callbacks)).train()


def by_mini(*callbacks):
    class Mine(mini.BaseTrainer):
        def build_data_loader(self):
            return torch.utils.data.DataLoader(rows(), batch_size=8)

        def build_model(self):
            return Net()

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        def build_hooks(self):
            return list(callbacks)

        def forward(self, input):
            return self.model(**input)["loss"], {}

    Mine(max_steps=STEPS, device="cpu", workspace="out").train()


WAYS = pytest.mark.parametrize("run", [by_hf, by_mini])


@WAYS
@pytest.mark.parametrize(
    ("callback", "names"),
    [
        (LRMonitor(), {"train/lr"}),
        (GradientMonitor(log_every=2), {"train/grad_norm_max", "train/grad_norm_largest_parameter"}),
        (Throughput(), {"train/steps_per_second", "train/tflops_per_second"}),
        (CollapseMonitor(), {"train/loss"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, set) else "",
)
def test_monitors(run, callback, names):
    seen = Seen()
    run(callback, seen)
    assert names <= seen.names


@WAYS
def test_average_search_and_trace(run):
    average, finder = EMA(decay=0.5), LRFinder(num_steps=12)
    run(average, finder, Profiler(steps=(2, 3)))
    assert average.updates == STEPS
    assert not torch.equal(average.model.body.weight, Net().body.weight)
    assert finder.suggested_lr is not None
    assert Path("out/profile/steps_2-3/trace.json.gz").is_file()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (OnlineKNN(), "gives no embeddings"),
        (OnlineLinear(), "OnlineLinear needs features and labels"),
        (ImageSamples(), "batches of images"),
        (TextSamples(["a"]), "a task with generate"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_hf_refuses_what_a_bare_model_lacks(callback, message):
    with pytest.raises((BadArgument, DataError), match=message):
        by_hf(callback)


def test_hf_stops_and_keeps_files():
    keeper = ModelCheckpoint(save_top_k=1)
    by_hf(EarlyStopping(patience=9), keeper)
    assert keeper.best_path is not None
    assert keeper.best_path.is_file()


# -- profiler ----------------------------------------------------------------------------------------------------


def fit(*callbacks, folder="run", **options):
    given = {"batch_size": 8, "epochs": 2, "log": "none", "run_dir": folder, "save_every": 3}
    return Trainer(MeanTask(), classes(), callbacks=list(callbacks), **{**given, **options}).fit()


def traced(path):
    """The steps in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


class Failing:
    def on_step_end(self, trainer, step, loss):
        if step == 5:
            raise RuntimeError("failed on purpose")


def test_a_trace_has_the_chosen_steps_and_does_not_affect_the_run(caplog):
    caplog.set_level(logging.INFO, "trainformer")
    plain, watched = fit(folder="plain"), fit(Profiler(steps=(2, 3)))
    assert traced("run/profile/steps_2-3/trace.json.gz") == {"step 2", "step 3"}
    assert "Profiler: wrote a trace of steps up to 3; open " in caplog.text
    for a, b in zip(plain.task.model.parameters(), watched.task.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_trace_ends_with_a_run_that_fails_and_goes_on_when_it_resumes():
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Profiler(steps=(4, 6)), Failing())
    assert traced("run/profile/steps_4-6/trace.json.gz") == {"step 4", "step 5"}
    fit(Profiler(steps=(3, 6)))  # from step 3
    assert traced("run/profile/steps_4-6/trace.json.gz") == {"step 4", "step 5", "step 6"}
    fit(Profiler(steps=(7, 20)), folder="short", max_steps=8)
    assert traced("short/profile/steps_7-20/trace.json.gz") == {"step 7", "step 8"}


# -- remote folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", Path("gs://bucket/run")], ids=str)
def test_urls_are_refused_and_leave_no_folder(url):
    for make in (
        lambda: Trainer(MeanTask(), classes(), run_dir=url, log="none"),
        lambda: Trainer(MeanTask(), classes(), save_dir=url, log="none"),
        lambda: Trainer(MeanTask(), classes(), resume=url, log="none"),
        lambda: Trainer(MeanTask(), classes(), log="none").save(url),
        lambda: Trainer(MeanTask(), classes(), log="none").load(url),
        lambda: Trainer(MeanTask(), classes(), log="none").export(url),
        lambda: hf.TrainingArguments(str(url)),
    ):
        with pytest.raises(BadArgument, match=r"to be a path of this machine, received '(gs|s3):/.*Remote storage"):
            make()
    assert not list(Path().iterdir())
