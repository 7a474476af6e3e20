"""Losses and gradients on several ranks, and in one process, from the same numbers.

Data-parallel training by hand: each rank has a share of the batch (of unequal size), differentiates the sum of its
losses, and gradients are all-reduced and divided by the total number of samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import all_reduced, share_of
from trainformer.losses import Center, infonce_with_queue, koleo_loss, moco_v3_loss, nt_xent_loss
from trainformer.losses.metric_learning import make_miner, make_pair_loss
from trainformer.utils.distributed import padding

BATCH, WIDTH, OUT, CLASSES = 12, 10, 6, 3


def problem() -> dict[str, Tensor]:
    """A linear network and the views of a whole batch."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "weight": (WIDTH, OUT),
        "x1": (BATCH, WIDTH),
        "x2": (BATCH, WIDTH),
        "k1": (BATCH, OUT),
        "k2": (BATCH, OUT),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def pair_losses() -> dict[str, nn.Module]:
    """Losses over pairs, with proxies, miners and memories, alike on all ranks."""
    torch.manual_seed(3)
    sizes = {"num_classes": CLASSES, "embedding_dim": OUT}
    return {
        "supcon": make_pair_loss("supcon"),
        "ntxent_pairs": make_pair_loss("ntxent"),
        "mined": make_pair_loss("triplet", miner=make_miner("semihard")),
        "proxies": make_pair_loss("proxy_anchor", **sizes).double(),
        "memory": make_pair_loss("xbm:contrastive", embedding_dim=OUT, memory_size=2 * BATCH + 5).double(),
    }


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Losses and gradients of everything, with a share of the batch; what is kept beyond the step; the centre."""
    found: dict[str, Tensor] = {}
    share = share_of(BATCH, rank, world)
    modules = pair_losses()
    for step in range(3):  # so that the memory goes round, and is read
        for name, (loss, *learned) in losses_of(modules, share, step).items():
            gradients = torch.autograd.grad(loss, learned, retain_graph=True)
            found[f"{name}.loss{step}"] = loss.detach() / BATCH
            found |= {f"{name}.gradient{step}.{i}": part / BATCH for i, part in enumerate(gradients)}
    found = all_reduced(found)
    found |= {f"kept.{name}": value.clone() for name, value in modules["memory"].state_dict().items()}
    return found | {"center": center(rank, world)} | padded(rank, world)


def losses_of(modules: dict[str, nn.Module], share: slice, step: int) -> dict[str, list[Tensor]]:
    """Sums of losses over the samples of a share, each with what is differentiated by."""
    whole = problem()
    x1, x2, k1, k2 = (whole[name][share] for name in ("x1", "x2", "k1", "k2"))
    labels = (torch.arange(BATCH) % CLASSES)[share]
    weight = (whole["weight"] + 0.1 * step).requires_grad_()
    z1, z2 = x1 @ weight, x2 @ weight
    queue = F.normalize(torch.arange(3.0 * OUT).double().view(3, OUT))
    losses = {
        "ntxent": nt_xent_loss(z1, z2, 0.3, reduction="sum"),
        "alone": nt_xent_loss(z1, z2, 0.3, reduction="sum", gather=False),
        "moco_v3": moco_v3_loss(z1, z2, k1, k2, 0.3, reduction="sum"),
        "queue": infonce_with_queue(z1, k1, queue, 0.3, reduction="sum"),
        "koleo": koleo_loss(z1, reduction="sum"),
    }
    made = {name: [loss, weight] for name, loss in losses.items()}
    for name, module in modules.items():
        made[name] = [module(x1 @ weight, labels) * len(x1), weight, *module.parameters()]
    return made


def center(rank: int, world: int) -> Tensor:
    """The centre after two steps, and one in which only one rank has something, which is not finite."""
    share = share_of(BATCH, rank, world)
    k1, k2 = (problem()[name][share] for name in ("k1", "k2"))
    center = Center(OUT).double()
    for step in range(2):
        center.add(k1[step:])  # not equally many rows in both steps
        center.add(k2 * (step + 1))
        with padding():
            center.add(k1 + 100)
        center.commit()
    if world > 1 and rank == 1:
        center.add(torch.full((2, OUT), torch.nan))  # what one rank brings, or does not, is no reason to hang
    center.commit()
    return center.center


def padded(rank: int, world: int) -> dict[str, Tensor]:
    """Gradients of a batch for all ranks but the last, which takes part with padding; the memory afterwards."""
    modules = pair_losses()
    if world == 1:
        made = losses_of(modules, slice(0, BATCH), 0)
    elif rank < world - 1:
        made = losses_of(modules, share_of(BATCH, rank, world - 1), 0)
    else:
        with padding(participates=True):
            made = losses_of(modules, slice(0, 1), 0)
        made = {name: [loss * 0, *learned] for name, (loss, *learned) in made.items()}
    found = {}
    for name, (loss, *learned) in made.items():
        gradients = torch.autograd.grad(loss, learned, retain_graph=True)
        found |= {f"padded.{name}.{i}": part / BATCH for i, part in enumerate(gradients)}
    kept = {f"kept.padded.{name}": value for name, value in modules["memory"].state_dict().items()}
    return all_reduced(found) | kept
