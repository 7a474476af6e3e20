"""What tests of optimizers share: a model of several types, a short run, and states laid out flat."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from toys import MeanTask, classes, mlp, weights
from trainformer import Trainer

STEPS = 12
BF16, FP32 = torch.bfloat16, torch.float32


class Upcast(MeanTask):
    """Each layer gets inputs in its own type, so that a model may be of several."""

    def train_step(self, batch):
        x, y = batch
        for layer in self.model:
            weight = getattr(layer, "weight", x)
            x = layer(x.to(weight.dtype))
        return F.cross_entropy(x.float(), y)


def net(*dtypes):
    """8,192 and 768 weights: the first matrix is large enough for 8 bits, the second is not."""
    model = mlp(32, 3, hidden=256, dtype=FP32)
    for layer, dtype in zip((model[0], model[2]), dtypes or (FP32, FP32), strict=True):
        layer.to(dtype)
    return model


def batches(seed=0):
    return DataLoader(TensorDataset(*classes(8 * STEPS, 32, dtype=FP32, seed=seed)), batch_size=8)


def make(task, **options):
    defaults = {"max_steps": STEPS, "lr": 3e-3, "log": "none", "log_every": 4, "save_best": 0, "weight_decay": 0.1}
    return Trainer(task, batches(), **{**defaults, **options})


def tensors(tree):
    """All tensors and numbers of a state, in order."""
    if isinstance(tree, dict):
        return [value for key in tree for value in tensors(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [value for part in tree for value in tensors(part)]
    return [tree.clone() if isinstance(tree, torch.Tensor) else tree]


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def bytes_of(state):
    return sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.numel() != 256)


class Watch:
    """Keeps parameters, copies and state after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, step, loss):
        optimizer = trainer.active_optimizer.state_dict()
        kept = {key: value for key, value in optimizer.items() if key != "param_groups"}
        self.seen.append(tensors([kept, weights(trainer.task)]))
