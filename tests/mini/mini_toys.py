"""A small trainer for tests, and a hand-written loop to compare it with."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from toys import classes, mlp
from trainformer.mini import BaseHook, BaseTrainer


class Classifier(BaseTrainer):
    """Classifies toy data; tests override its parts by keywords."""

    def __init__(self, max_steps=8, *, lr=0.1, batches=None, hooks=(), model=None, schedule=None, **kwargs):
        super().__init__(max_steps, **{"device": "cpu", **kwargs})
        self.lr, self.batches, self.given_hooks, self.given_model = lr, batches, hooks, model
        self.schedule = schedule
        self.seen = []

    def build_data_loader(self):
        return batches_of() if self.batches is None else self.batches

    def build_model(self):
        return self.given_model if self.given_model is not None else mlp()

    def build_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)

    def build_lr_scheduler(self):
        return None if self.schedule is None else self.schedule(self.optimizer)

    def build_hooks(self):
        return list(self.given_hooks)

    def forward(self, input):
        x, y = input
        self.seen.append(x)
        logits = self.model(x)
        records = {"accuracy": (logits.argmax(-1) == y).double().mean(), "nested": {"rows": len(x)}}
        return F.cross_entropy(logits, y), records


class Teller(BaseHook):
    """Records the events it receives and their step."""

    def __init__(self, name="hook", story=None):
        self.name, self.story = name, [] if story is None else story

    def tell(self, what, trainer):
        self.story.append((self.name, what, trainer.step))

    def on_before_train(self, trainer):
        self.tell("before_train", trainer)

    def on_before_step(self, trainer):
        self.tell("before_step", trainer)

    def on_after_step(self, trainer):
        self.tell("after_step", trainer)

    def on_after_train(self, trainer):
        self.tell("after_train", trainer)


class Keeper(BaseHook):
    """Keeps every step's `step_info`."""

    def __init__(self):
        self.infos = []

    def on_after_step(self, trainer):
        self.infos.append(trainer.step_info)


def batches_of(n=32, size=8):
    """Batches in a fixed order."""
    x, y = classes(n)
    return list(zip(x.split(size), y.split(size), strict=True))


def shuffled_loader(n=32, size=8):
    """Batches in a new random order every epoch."""
    return DataLoader(TensorDataset(*classes(n)), batch_size=size, shuffle=True)


def by_hand(batches, steps, *, lr=0.1, accumulation=1, grad_clip=None, schedule=None):
    """The model after `steps` steps of a plain loop over the batches, and the loss of each step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = None if schedule is None else schedule(optimizer)
    losses = []
    for step in range(steps):
        total = 0.0
        for i in range(accumulation):
            x, y = batches[(step * accumulation + i) % len(batches)]
            loss = F.cross_entropy(model(x), y) / accumulation
            loss.backward()
            total += loss.item()
        losses.append(total)
        if grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return model, losses
