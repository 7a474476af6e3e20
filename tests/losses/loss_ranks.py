"""What two processes compute together, and one process alone, from the same numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.losses import Center, infonce_with_queue, moco_v3_loss, nt_xent_loss

BATCH, WIDTH, OUT = 12, 10, 6


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
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Losses and gradients of the weight for one rank's share of the batch, and the centre after two steps."""
    whole = problem()
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    x1, x2, k1, k2 = (whole[name][share] for name in ("x1", "x2", "k1", "k2"))
    weight = whole["weight"].requires_grad_()
    queue = F.normalize(torch.arange(float(3 * OUT)).view(3, OUT))
    losses = {
        "ntxent": nt_xent_loss(x1 @ weight, x2 @ weight, 0.3),
        "alone": nt_xent_loss(x1 @ weight, x2 @ weight, 0.3, gather=False),
        "moco_v3": moco_v3_loss(x1 @ weight, x2 @ weight, k1, k2, 0.3),
        "queue": infonce_with_queue(x1 @ weight, k1, queue, 0.3),
    }
    found: dict[str, Tensor] = {}
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(loss, weight)
        found[name], found[f"{name}_gradient"] = loss.detach(), gradient
    center = Center(OUT)
    for step in range(2):
        center.add(k1[step:])  # not equally many rows in both steps
        center.add(k2 * (step + 1))
        center.commit()
    if world > 1 and rank == 1:
        center.add(torch.full((2, OUT), torch.nan))  # what one rank brings, or does not, is no reason to hang
    center.commit()
    found["center"] = center.center
    return found
