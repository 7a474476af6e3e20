"""What two processes make of halves of batches, and one process of whole ones, with the same method and weights."""

from __future__ import annotations

import ssl_toys as toys
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainformer.tasks import SSL
from trainformer.utils.distributed import shuffle_rows, unshuffle_rows

BATCH, STEPS = 12, 3


def task_of(method: str) -> SSL:
    """A task in which images see each other only in the loss, and BatchNorm of heads is taken over all ranks."""
    views = toys.crops if method == "dino" else toys.two_views
    options = {"num_local": 3, "freeze_last_layer": 0} if method == "dino" else {}
    if method == "moco":
        options["queue_size"] = 24  # goes round once
    task = toys.make(method, toys.groups, augment=views, **options)
    for tower in task.model.modules():
        for name, part in tower.named_children():
            if isinstance(part, nn.BatchNorm1d):  # torch has no SyncBatchNorm on the CPU
                setattr(tower, name, nn.Identity())
    return task


def train(method: str, rank: int, world: int) -> dict[str, Tensor]:
    """Weights, queue and centre after some steps of SGD, with gradients averaged over ranks."""
    task = task_of(method)
    task.model.train()
    losses = []
    for step, batch in enumerate(toys.pixels(BATCH * STEPS).float().div(255).split(BATCH)):
        share = batch.chunk(world)[rank]
        total, weight, _ = task.train_step(share)
        losses.append((total / weight).detach())
        (total / weight).backward()
        for parameter in task.parameters():
            if parameter.grad is not None:
                if world > 1:
                    dist.all_reduce(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=0.1 / world)
                parameter.grad = None
        task.on_step_end(step + 1, STEPS)
    state = {f"{method}.{name}": value for name, value in toys.copied(task.model).items()}
    return state | {f"{method}.loss": torch.stack(losses)}


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Of all methods, and of shuffling."""
    found: dict[str, Tensor] = {}
    for method in ("simclr", "moco", "moco_v3", "byol", "dino"):
        found |= train(method, rank, world)
    torch.manual_seed(rank)  # ranks have random numbers of their own, and must agree all the same
    rows = torch.arange(6) + 6 * rank
    dealt, permutation = shuffle_rows(rows)
    found |= {"rows": rows, "dealt": dealt, "permutation": permutation, "back": unshuffle_rows(dealt, permutation)}
    return found
