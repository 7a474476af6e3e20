"""What two processes make of unequal shares of batches, and one process of whole ones, with the same weights."""

from __future__ import annotations

import ssl_toys as toys
import torch
from torch import Tensor

from ranks import all_reduced, share_of
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.tasks import SSL
from trainformer.utils.distributed import padding, shuffle_rows, unshuffle_rows

BATCH, STEPS = 12, 3


def task_of(method: str) -> SSL:
    """A task in float64 with BatchNorm over all ranks, in the backbone, the head and their momentum copies."""
    views = toys.crops if method == "dino" else toys.two_views
    options = {"num_local": 3, "freeze_last_layer": 0, "koleo": 0.1} if method == "dino" else {}
    if method == "moco":
        options["queue_size"] = 27  # goes round, in the middle of a batch
    task = toys.make(method, augment=views, **options)
    assert convert_sync_batchnorm(task.model.double()) >= 2
    return task


def train(method: str, rank: int, world: int) -> dict[str, Tensor]:
    """Weights, statistics, queue and centre after some steps of SGD on gradients of all ranks, of two batches each.

    The second batch of a step has no sample for the last rank, which takes part with padding.
    """
    task = task_of(method)
    task.model.train()
    losses = []
    for step, images in enumerate(toys.pixels(2 * BATCH * STEPS).double().div(255).split(2 * BATCH)):
        first, second = images[:BATCH], images[BATCH:][: BATCH // 2]
        value = differentiated(task, first[share_of(BATCH, rank, world)], 1.0)
        if world == 1:
            value = value + differentiated(task, second, 1.0)
        elif rank < world - 1:
            value = value + differentiated(task, second[share_of(len(second), rank, world - 1)], 1.0)
        else:
            with padding(participates=True):
                differentiated(task, second[:1] * 0, 0.0)
        losses.append(value)
        grads = {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
        all_reduced(grads)
        for name, parameter in task.model.named_parameters():
            if name in grads:
                parameter.data.sub_(grads[name], alpha=0.1 / (len(first) + len(second)))
                parameter.grad = None
        task.on_step_end(step + 1, STEPS)
    state = {f"{method}.{name}": value for name, value in toys.copied(task.model).items()}
    return state | all_reduced({f"{method}.loss": torch.stack(losses)})


def differentiated(task: SSL, images: Tensor, weight: float) -> Tensor:
    """The sum of the losses of a batch, after its gradients were computed."""
    loss = task.train_step(images).sum * weight
    loss.backward()
    return loss.detach()


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Of all methods, and of shuffling."""
    found: dict[str, Tensor] = {}
    for method in ("simclr", "moco", "moco_v3", "byol", "dino"):
        found |= train(method, rank, world)
    torch.manual_seed(rank)  # ranks have random numbers of their own, and must agree all the same
    rows = torch.arange(12)[share_of(12, rank, world)]
    dealt, shuffle = shuffle_rows(rows)
    back = unshuffle_rows(dealt, shuffle)
    return found | {"rows": rows, "dealt": dealt, "permutation": shuffle.permutation, "back": back}
