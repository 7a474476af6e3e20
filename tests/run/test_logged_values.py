"""Values that a task logs from inside a step: `TaskBase.log` and `log_metric`."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toys import MeanTask, classes
from trainformer import Trainer, hf, log_metric, mini
from trainformer.core import BadArgument
from trainformer.tasks import TaskBase


class LoggingTask(MeanTask, TaskBase):
    """Logs the mean of the first feature over samples, and of the second one over samples of class 0."""

    def train_step(self, batch):
        x, y = batch
        first = y == 0
        self.log("first", x[:, 0].mean())
        self.log("second", x[first, 1].mean() if first.any() else 0.0, weight=first.sum())
        self.log("train/pair", (x[first, 1].sum(), int(first.sum())))
        self.log("batches", 1)
        return super().train_step(batch)

    def eval_step(self, batch):
        self.train_step(batch)  # `train/pair` is another name here
        self.log("val/third", batch[0][:, 2].mean())  # and returns nothing


def fitted(task=None, **options):
    usual = {"val_data": classes(13, seed=1), "batch_size": 8, "epochs": 1, "log": "none", "log_every": 100}
    usual["run_dir"] = None
    return Trainer(task or LoggingTask(), classes(37), **{**usual, **options}).fit()


def records(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


def over(samples, condition, column):
    return samples[condition, column].mean().item()


@pytest.mark.parametrize(("batch_size", "accumulation"), [(37, 1), (8, 1), (3, 4)])
def test_means_over_the_log_interval_do_not_depend_on_the_batches(batch_size, accumulation):
    trainer = fitted(batch_size=batch_size, accumulation_steps=accumulation, log_every="1epochs")
    first, *rest = (record for record in trainer.state.log_history if "train/first" in record)
    x, y = classes(37)
    if not rest:  # a single step
        assert first["train/first"] == pytest.approx(x[:, 0].mean().item(), abs=1e-12)
        assert first["train/second"] == pytest.approx(over(x, y == 0, 1), abs=1e-12)
        return
    # The first step has a record of its own, the others share one: together they are the epoch.
    steps = -(-37 // (batch_size * accumulation))
    n = batch_size * accumulation
    assert first["step"] == 1
    assert rest[0]["step"] == steps
    assert (n * first["train/first"] + (37 - n) * rest[0]["train/first"]) / 37 == pytest.approx(x[:, 0].mean().item())
    assert rest[0]["train/second"] == rest[0]["train/pair"]
    assert rest[0]["train/batches"] == 1


def test_an_evaluation_averages_over_the_whole_dataset_and_may_return_nothing():
    metrics = fitted(eval_batch_size=4).evaluate()
    x, y = classes(13, seed=1)
    assert metrics["val/third"] == pytest.approx(x[:, 2].mean().item(), abs=1e-12)
    assert metrics["val/second"] == pytest.approx(over(x, y == 0, 1), abs=1e-12)
    assert "val/train/pair" in metrics


def test_a_resumed_run_logs_the_same_values():
    class Crash:
        def on_step_end(self, trainer, step, loss):
            if step == 7:
                raise RuntimeError("crash")

    options = {"epochs": 3, "log_every": 5, "save_every": 3, "val_data": None}
    whole = fitted(run_dir="whole", **options)
    with pytest.raises(RuntimeError, match="crash"):
        fitted(run_dir="parts", callbacks=[Crash()], **options)
    again = fitted(run_dir="parts", **options)  # from step 6, after the record of step 5
    for name in ("train/first", "train/second", "train/pair"):
        assert records(again, name) == records(whole, name)
        assert len(records(whole, name)) == 4


class Plain:
    """A task without a base class. `act` is called in its steps."""

    def __init__(self, act):
        self.model = nn.Linear(4, 1).double()
        self.act = act

    def train_step(self, batch):
        output = self.model(batch[0])
        self.act(self, output)
        return output.square().mean()

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


def test_a_task_without_the_base_class_calls_the_function():
    trainer = fitted(Plain(lambda task, output: log_metric("output", output.mean())), max_steps=1, batch_size=37)
    assert len(records(trainer, "train/output")) == len(records(trainer, "val/output")) == 1


def test_a_task_without_the_base_class_is_told_so():
    with pytest.raises(AttributeError) as caught:
        fitted(Plain(lambda task, output: task.log("output", output.mean())))
    assert "trainformer.log_metric(name, value)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda out: log_metric("a", 1, on_epoch=True), "log_every='1epochs'"),
        (lambda out: log_metric("a", 1, prog_bar=True), "progress bar"),
        (lambda out: log_metric("a", 1, batch_size=3), "weight="),
        (lambda out: log_metric("a", 1, wieght=3), "Did you mean 'weight'"),
        (lambda out: log_metric("loss", 1), "does not log itself"),
        (lambda out: log_metric("lr", 1), "does not log itself"),
        (lambda out: log_metric("", 1), "a name"),
        (lambda out: log_metric({"a": 1}, None), "once for each"),
        (lambda out: log_metric("a", {"b": 1}), "once for each"),
        (lambda out: log_metric("a", out), r"shape \(8, 1\)"),
        (lambda out: log_metric("a", "much"), "number"),
        (lambda out: log_metric("a", None), "number"),
        (lambda out: log_metric("a", 1, weight=-1), "at least 0"),
        (lambda out: log_metric("a", (1, 2, 3)), "pair"),
        (lambda out: log_metric("a", (1, 2), weight=2), "pair"),
    ],
)
def test_mistakes_are_refused_in_words(act, text):
    with pytest.raises(BadArgument, match=text):
        fitted(Plain(lambda task, output: act(output)))


def test_outside_of_a_step_it_is_refused():
    with pytest.raises(BadArgument, match=r"trainer.log_metrics\(\{...\}\)"):
        log_metric("a", 1)

    class Hook:
        def on_step_end(self, trainer, step, loss):
            log_metric("a", 1)

    with pytest.raises(BadArgument, match="outside of a step"):
        fitted(callbacks=[Hook()])


def test_a_recomputed_forward_pass_logs_once():
    calls = []

    class Block(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            log_metric("rows", (len(x), 1))
            return super().forward(x)

    class Recomputed(MeanTask):
        def __init__(self):
            self.model = Block(4, 3).double()

        def train_step(self, batch):
            output = checkpoint(self.model, batch[0], use_reentrant=False)
            return nn.functional.cross_entropy(output, batch[1])

    trainer = fitted(Recomputed(), max_steps=1, batch_size=8, val_data=None)
    assert records(trainer, "train/rows") == [8]
    assert len(calls) == 2


def test_trial_steps_log_nothing():
    plain = fitted(max_steps=3, log_every=1, val_data=None)
    checked = Trainer(
        LoggingTask(), classes(37), batch_size=8, max_steps=3, log="none", log_every=1, run_dir=None
    )  # fmt: skip
    checked.check()
    assert records(checked.fit(), "train/first") == records(plain, "train/first")


def test_a_discarded_step_logs_nothing():
    class Overflows(Plain):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            log_metric("call", self.calls)
            return super().train_step(batch) * (float("nan") if self.calls == 2 else 1.0)

    options = {"nonfinite": "retry", "max_steps": 3, "log_every": 1, "val_data": None}
    trainer = fitted(Overflows(lambda task, output: None), **options)
    assert records(trainer, "train/call") == [1, 3, 4]


def test_the_other_entry_points():
    class HfTrainer(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss = model(inputs["input"]).square().mean()
            log_metric("square", loss)
            return (loss, {}) if return_outputs else loss

    rows = [{"input": torch.ones(4)}] * 8
    args = hf.TrainingArguments("hf", max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True)
    trainer = HfTrainer(model=nn.Linear(4, 1), args=args, train_dataset=rows)
    trainer.train()
    logged = [record for record in trainer.state.log_history if "square" in record]
    assert [r["square"] for r in logged] == pytest.approx([r["loss"] for r in logged], abs=1e-3)

    class MiniTrainer(mini.BaseTrainer):
        def build_data_loader(self):
            return [torch.ones(2, 4)]

        def build_model(self):
            return nn.Linear(4, 1)

        def build_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def forward(self, input):
            log_metric("a", 1)
            return self.model(input).mean(), {}

    with pytest.raises(BadArgument, match="records of forward"):
        MiniTrainer(max_steps=1, device="cpu").train()
