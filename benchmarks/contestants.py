"""The contestants of `overhead.py`: one and the same training, driven by different loops.

Owns what every contestant shares (data, model, optimizer, schedule) and how each framework is asked to run it. A
contestant is a function that trains for a number of steps and returns the model. Frameworks are imported inside, so
that each is in the process of its own contestant alone.

Unless its name says otherwise, each gets the very same parts: one `DataLoader` with a seeded sampler, a fused
AdamW over one group of parameters, torch's `OneCycleLR`, clipping at 1.0, a record every 100 steps. All of them
therefore compute the same weights, which `overhead.py` checks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

FEATURES, HIDDEN, CLASSES = 32, 64, 10
BATCH_SIZE = 32
STEPS_PER_EPOCH = 1000
SAMPLES = STEPS_PER_EPOCH * BATCH_SIZE
LR, WEIGHT_DECAY, CLIP, WARMUP = 3e-3, 0.01, 1.0, 0.1
LOG_EVERY = 100

Batch = dict[str, Tensor]


class Rows(Dataset):
    """Samples in two tensors. A batch is read with one call, so that the data cost little beside the loop."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.y[index]}

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.tensor(indices)
        return {"x": self.x.index_select(0, chosen), "y": self.y.index_select(0, chosen)}


class Shuffled(Sampler[int]):
    """A new order per epoch, the same for every contestant.

    torch's `RandomSampler` would do but for one thing: it draws once more when it is used up, so that those who stop
    at the last batch and those who ask for another one see different second epochs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())

    def __len__(self) -> int:
        return self.size


def make_samples() -> tuple[Tensor, Tensor]:
    """Random inputs, labelled by a random linear map: easy to learn, so that a loop that does not train shows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def make_model() -> nn.Module:
    """A model so small that the loop is most of what there is."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch


@dataclass
class Job:
    """What to train, for how many steps, on what, and where files may go."""

    steps: int
    device: torch.device
    folder: Path
    samples: tuple[Tensor, Tensor]
    on_step: Callable[[], None]
    model: nn.Module = field(default_factory=make_model)

    def loader(self, dataset: Any = None, **options: Any) -> DataLoader:
        """The loader everybody gets."""
        if dataset is None:
            dataset, options = Rows(*self.samples), {"collate_fn": _as_it_is}
        return DataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            sampler=Shuffled(len(dataset)),
            pin_memory=self.device.type == "cuda",
            **options,
        )

    def optimizer(self, fused: bool | None = True) -> AdamW:
        return AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=fused)

    def schedule(self, optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, LR, total_steps=self.steps, pct_start=WARMUP, cycle_momentum=False)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch. Everybody calls this once per step, so this is where time is taken."""
        self.on_step()
        return F.cross_entropy(model(x), y)

    def recorder(self) -> Callable[..., None]:
        """Writes a line of JSON per record, as the metrics file of trainformer has it."""
        file = open(self.folder / "metrics.jsonl", "a")  # noqa: SIM115 - closed with the process's last reference

        def record(step: int, loss: float, lr: float) -> None:
            file.write(json.dumps({"step": step, "loss": loss, "lr": lr}) + "\n")
            file.flush()

        return record


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


# -- by hand -----------------------------------------------------------------------------------------------


def by_hand(job: Job, fused: bool | None = True, plain_data: bool = False) -> nn.Module:
    """The loop to beat. `plain_data`: over a `TensorDataset` with torch's own collation, as most people write it."""
    device, model = job.device, job.model.to(job.device).train()
    optimizer = job.optimizer(fused)
    schedule, record = job.schedule(optimizer), job.recorder()
    parameters = list(model.parameters())
    loader = job.loader(TensorDataset(*job.samples)) if plain_data else job.loader()
    inputs, targets = (0, 1) if plain_data else ("x", "y")
    running = torch.zeros((), device=device)
    for step, batch in enumerate(islice(endless(loader), job.steps), start=1):
        x, y = batch[inputs].to(device, non_blocking=True), batch[targets].to(device, non_blocking=True)
        loss = job.loss(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % LOG_EVERY == 0:
            record(step, running.item() / LOG_EVERY, schedule.get_last_lr()[0])
            running.zero_()
    return model


def by_hand_with_every_trick(job: Job) -> nn.Module:
    """The floor: what one gets by also replacing torch's clipping, schedule and `zero_grad` by less general code."""
    device, model = job.device, job.model.to(job.device).train()
    optimizer, record = job.optimizer(), job.recorder()
    parameters = list(model.parameters())
    running = torch.zeros((), device=device)
    for step, batch in enumerate(islice(endless(job.loader()), job.steps), start=1):
        lr = optimizer.param_groups[0]["lr"] = one_cycle(step - 1, job.steps)
        x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(device, non_blocking=True)
        loss = job.loss(model, x, y)
        loss.backward()
        grads = [p.grad for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        running += loss.detach()
        if step % LOG_EVERY == 0:
            record(step, running.item() / LOG_EVERY, lr)
            running.zero_()
    return model


def one_cycle(step: int, total: int) -> float:
    """The rate that `OneCycleLR` gives with the settings of `Job.schedule`."""
    peak = WARMUP * total - 1
    low, high = (LR / 25, LR) if step <= peak else (LR / 25e4, LR)
    share = 1 - step / peak if step <= peak else (step - peak) / (total - 1 - peak)
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


# -- trainformer -------------------------------------------------------------------------------------------


class Classify:
    """The task, over batches that are dicts."""

    def __init__(self, job: Job) -> None:
        self.model = job.model
        self.loss = job.loss

    def train_step(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch["x"], batch["y"])

    def eval_step(self, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.train_step(batch)}


class ClassifyPairs(Classify):
    """The task, over batches that are pairs."""

    def train_step(self, batch: Any) -> Tensor:
        x, y = batch
        return self.loss(self.model, x, y)


def _fit(job: Job, task: Classify, data: Any, **settings: Any) -> nn.Module:
    from trainformer import Trainer

    Trainer(
        task,
        data,
        max_steps=job.steps,
        batch_size=BATCH_SIZE,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        warmup_ratio=WARMUP,
        gradient_clip=CLIP,
        device=job.device,
        precision="no",
        log="none",
        log_every=LOG_EVERY,
        save_best=0,
        run_dir=job.folder,
        **settings,
    ).fit()
    return task.model


def trainformer(job: Job) -> nn.Module:
    """`Trainer` with the parts that everybody gets."""
    # An optimizer that is handed over finds its parameters where they are: the model must be there first.
    job.model.to(job.device)
    return _fit(job, Classify(job), job.loader(), optimizer=job.optimizer(), scheduler=job.schedule)


def trainformer_alone(job: Job) -> nn.Module:
    """`Trainer` with its own loader, optimizer (two groups of parameters) and schedule."""
    return _fit(job, ClassifyPairs(job), job.samples)


def trainformer_hf(job: Job) -> nn.Module:
    """`trainformer.hf.Trainer`, asked for the same as `transformers.Trainer` below."""
    from trainformer import hf

    class Trainer(hf.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return job.loader()

        def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
            return job.loss(model, inputs["x"], inputs["y"])

    job.model.to(job.device)
    optimizer = job.optimizer()
    arguments = hf.TrainingArguments(
        output_dir=str(job.folder),
        max_steps=job.steps,
        per_device_train_batch_size=BATCH_SIZE,
        max_grad_norm=CLIP,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=job.device.type == "cpu",
    )
    Trainer(job.model, arguments, optimizers=(optimizer, job.schedule(optimizer))).train()
    return job.model


def trainformer_mini(job: Job) -> nn.Module:
    """`trainformer.mini.BaseTrainer` with a hook that writes the same records."""
    from trainformer import mini

    record = job.recorder()

    class Trainer(mini.BaseTrainer):
        def build_data_loader(self) -> DataLoader:
            return job.loader()

        def build_model(self) -> nn.Module:
            return job.model.to(job.device)

        def build_optimizer(self) -> AdamW:
            return job.optimizer()

        def build_lr_scheduler(self) -> OneCycleLR:
            return job.schedule(self.optimizer)

        def build_hooks(self) -> list[Any]:
            return [mini.LoggingHook(interval=LOG_EVERY)]

        def forward(self, input: Batch) -> tuple[Tensor, dict[str, Any]]:
            return job.loss(self.model, input["x"], input["y"]), {}

        def log(self, records: dict[str, Any], dry_run: bool = False) -> None:
            record(self.step, records["train"]["loss"], self.lr_scheduler.get_last_lr()[0])

    Trainer(max_steps=job.steps, grad_clip=CLIP, device=job.device).train()
    return job.model


# -- the others --------------------------------------------------------------------------------------------


def accelerate(job: Job) -> nn.Module:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device.type == "cpu", mixed_precision="no")
    optimizer = job.optimizer()
    model, optimizer, loader, schedule = accelerator.prepare(
        job.model, optimizer, job.loader(), job.schedule(optimizer)
    )
    model.train()
    record = job.recorder()
    running = torch.zeros((), device=accelerator.device)
    for step, batch in enumerate(islice(endless(loader), job.steps), start=1):
        loss = job.loss(model, batch["x"], batch["y"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % LOG_EVERY == 0:
            record(step, running.item() / LOG_EVERY, schedule.get_last_lr()[0])
            running.zero_()
    return accelerator.unwrap_model(model)


def huggingface(job: Job) -> nn.Module:
    """`transformers.Trainer` with everything optional switched off."""
    import transformers
    from transformers.trainer_callback import PrinterCallback

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(job.loader())

        def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
            return job.loss(model, inputs["x"], inputs["y"])

    optimizer = job.optimizer()
    trainer = Trainer(
        job.model,
        transformers.TrainingArguments(
            output_dir=str(job.folder),
            max_steps=job.steps,
            per_device_train_batch_size=BATCH_SIZE,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=job.device.type == "cpu",
        ),
        train_dataset=Rows(*job.samples),
        optimizers=(optimizer, job.schedule(optimizer)),
    )
    trainer.remove_callback(PrinterCallback)  # it would write to the terminal, which nobody else does
    trainer.train()
    return job.model


def lightning(job: Job, log_each_step: bool = False) -> nn.Module:
    """`lightning.Trainer` with everything optional switched off."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl  # the same under its older name

    # Set by importing it; makes torch look for GPUs in every step of an optimizer. That is not the loop's doing.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    record = job.recorder()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model
            self.step = 0

        def on_train_start(self) -> None:
            self.running = torch.zeros((), device=self.device)

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = job.loss(self.model, batch["x"], batch["y"])
            if log_each_step:
                self.log("loss", loss)
                return loss
            self.running += loss.detach()
            self.step += 1
            if self.step % LOG_EVERY == 0:
                record(self.step, self.running.item() / LOG_EVERY, self.lr_schedulers().get_last_lr()[0])
                self.running.zero_()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer()
            return [optimizer], [{"scheduler": job.schedule(optimizer), "interval": "step"}]

    trainer = pl.Trainer(
        max_steps=job.steps,
        accelerator="cpu" if job.device.type == "cpu" else "gpu",
        devices=1,
        precision="32-true",
        gradient_clip_val=CLIP,
        log_every_n_steps=LOG_EVERY,
        logger=pl.loggers.CSVLogger(job.folder) if log_each_step else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), job.loader())
    return job.model


# -- the list ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    """`exact`: it does the arithmetic of the hand-written loop in the same order, so its weights must be the same."""

    key: str
    title: str
    run: Callable[[Job], nn.Module]
    needs: tuple[str, ...] = ()
    main: bool = True
    exact: bool = True


BASELINE = "hand"

CONTESTANTS = (
    Contestant(BASELINE, "hand-written loop", by_hand),
    Contestant("trainformer", "trainformer", trainformer),
    Contestant("accelerate", "Accelerate", accelerate, ("accelerate",)),
    Contestant("huggingface", "transformers.Trainer", huggingface, ("transformers", "accelerate")),
    Contestant("lightning", "Lightning", lightning, ("lightning|pytorch_lightning",)),
    Contestant(
        "hand-default-adamw", "hand-written, AdamW not fused", partial(by_hand, fused=None), main=False, exact=False
    ),
    Contestant("hand-tensor-dataset", "hand-written, TensorDataset", partial(by_hand, plain_data=True), main=False),
    Contestant("hand-every-trick", "hand-written, every trick", by_hand_with_every_trick, main=False),
    Contestant(
        "trainformer-alone", "trainformer, its own parts", trainformer_alone,
        main=False, exact=False,
    ),
    Contestant("trainformer-hf", "trainformer.hf", trainformer_hf, ("transformers",), main=False),
    Contestant("trainformer-mini", "trainformer.mini", trainformer_mini, main=False),
    Contestant(
        "lightning-log", "Lightning, self.log in every step", partial(lightning, log_each_step=True),
        ("lightning|pytorch_lightning",), main=False,
    ),
)  # fmt: skip


def silence() -> None:
    """Keep the frameworks' greetings and advice off the terminal."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
