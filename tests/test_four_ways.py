"""One model, one order of the data, one set of numbers: whatever way a run is begun, the same is computed."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainformer import Trainer, hf, mini

STEPS, SIZE, RATE = 12, 8, 1e-2


class Net(nn.Module):
    """With dropout, so that random numbers have to be the same too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=g)
    return [{"x": row, "labels": row[:4].argmax()} for row in x]


def loader(count):
    return DataLoader(rows(count), batch_size=SIZE)


def factor(step):
    return 1 - step / STEPS


class ModelTask:
    def __init__(self):
        self.model = Net()

    def train_step(self, batch):
        return self.model(**batch)["loss"]

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


def by_task(folder, accumulation, count):
    """`trainformer.Trainer`."""
    task, losses = ModelTask(), []

    class Note:
        def on_step_end(self, trainer, step, loss):
            losses.append(float(loss))

    Trainer(
        task, loader(count), max_steps=STEPS, lr=RATE, weight_decay=0.0, scheduler="linear", warmup_ratio=0.0, seed=42,
        accumulation_steps=accumulation, precision="no", log="none", run_dir=folder, callbacks=[Note()], device="cpu",
    ).fit()  # fmt: skip
    return losses, task.model


class Seeded(transformers.TrainerCallback):
    """HF draws numbers at the beginning of an epoch, and so does `trainformer.hf`."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            torch.manual_seed(42)


def by_arguments(folder, accumulation, count):
    """`trainformer.hf.Trainer`."""
    model = Net()
    args = hf.TrainingArguments(
        str(folder), max_steps=STEPS, learning_rate=RATE, per_device_train_batch_size=SIZE, logging_steps=1, seed=42,
        gradient_accumulation_steps=accumulation, use_cpu=True, disable_tqdm=True, save_strategy="no",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=args, train_dataset=rows(count), callbacks=[Seeded()])
    trainer.train()
    return [r["loss"] for r in trainer.state.log_history if "loss" in r], model


def by_subclass(folder, accumulation, count):
    """`trainformer.mini.BaseTrainer`."""
    losses = []

    class Note(mini.BaseHook):
        def on_before_train(self, trainer):
            torch.manual_seed(42)  # what the other ways are given as `seed`

        def on_after_step(self, trainer):
            losses.append(float(trainer.step_info["loss"]))

    class Mine(mini.BaseTrainer):
        def build_data_loader(self):
            return loader(count)

        def build_model(self):
            return Net()

        def build_optimizer(self):
            return torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

        def build_lr_scheduler(self):
            return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

        def build_hooks(self):
            return [Note()]

        def forward(self, input):
            return self.model(**input)["loss"], {}

    trainer = Mine(max_steps=STEPS, grad_clip=1.0, gradient_accumulation_steps=accumulation, device="cpu")
    trainer.train()
    return losses, trainer.model


def by_huggingface(folder, accumulation, count):
    """`transformers.Trainer`."""
    model = Net()
    args = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, learning_rate=RATE, per_device_train_batch_size=SIZE, logging_steps=1, seed=42,
        gradient_accumulation_steps=accumulation, use_cpu=True, disable_tqdm=True, save_strategy="no", report_to="none",
        train_sampling_strategy="sequential", dataloader_pin_memory=False,
    )  # fmt: skip

    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows(count), callbacks=[Seeded()])
    trainer.train()
    return [r["loss"] for r in trainer.state.log_history if "loss" in r], model


@pytest.mark.parametrize("accumulation", [1, 3])
def test_four_ways_to_the_same_numbers(accumulation, tmp_path):
    """Within one epoch: at the beginning of each, HF draws numbers that shift its dropout."""
    count = STEPS * SIZE * accumulation
    ways = by_task, by_arguments, by_subclass, by_huggingface
    runs = {way.__name__: way(tmp_path / way.__name__, accumulation, count) for way in ways}
    losses, model = runs["by_task"]
    assert len(set(losses)) == len(losses) == STEPS
    for way in ("by_arguments", "by_subclass"):
        assert runs[way][0] == losses, way
        assert identical(model, runs[way][1]), way
    assert runs["by_huggingface"][0] == pytest.approx(losses, abs=1e-6)
    for (name, p), q in zip(model.named_parameters(), runs["by_huggingface"][1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6, msg=name)


def test_two_ways_through_several_epochs(tmp_path):
    """Five batches each, in windows of three and two."""
    losses, model = by_task(tmp_path / "task", 3, 5 * SIZE)
    others, other = by_subclass(tmp_path / "subclass", 3, 5 * SIZE)
    assert others == losses
    assert identical(model, other)


def test_the_ways_of_hf_through_several_epochs(tmp_path):
    losses, model = by_arguments(tmp_path / "ours", 1, 5 * SIZE)
    theirs, other = by_huggingface(tmp_path / "theirs", 1, 5 * SIZE)
    assert losses == pytest.approx(theirs, abs=1e-6)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6)


def identical(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
