"""Small tasks for tests, with losses of both kinds."""

import torch
from torch import nn
from torch.nn import functional as F

from trainformer import Loss


def mlp(inputs=4, outputs=3, hidden=8, dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(dtype)


class MeanTask:
    """Returns a mean: samples are the weight."""

    def __init__(self, model=None):
        self.model = model or mlp()

    def train_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def eval_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).double().mean()}


class TokenTask:
    """Returns a sum and a weight: each sample has its own number of supervised positions (label -100 is none)."""

    def __init__(self, model=None):
        self.model = model or mlp()

    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return Loss(total, (y != -100).sum())

    def eval_step(self, batch):
        total, weight, _ = self.train_step(batch)
        return {"loss": (total, weight)}


def classes(n=64, inputs=4, outputs=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=g, dtype=dtype)
    return x, x[:, :outputs].argmax(-1)


def tokens(n=64, length=5, inputs=4, outputs=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, length, inputs, generator=g, dtype=dtype)
    y = x[..., :outputs].argmax(-1)
    lengths = torch.randint(1, length + 1, (n,), generator=g)
    y[torch.arange(length)[None] >= lengths[:, None]] = -100
    return x, y


def weights(task):
    return {name: p.detach().clone() for name, p in task.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def largest_difference(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in a)
