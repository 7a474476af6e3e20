"""What two processes compute of the multiple-negatives loss together, and one process alone, from the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ranks import all_reduced, share_of
from trainformer.losses.contrastive import TextKeys, multiple_negatives_loss


def share(rank: int, world: int) -> dict[str, Tensor]:
    """Loss and gradient of a linear model for one rank's share of the batch, a larger one for the first, added up."""
    generator = torch.Generator().manual_seed(5)
    x, y, z = torch.randn(3, 8, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    mine = share_of(8, rank, world)
    # Equal texts on different ranks.
    anchors, positives = torch.tensor([1, 2, 3, 4, 5, 6, 1, 8]), torch.tensor([11, 12, 13, 14, 15, 12, 17, 18])
    keys = TextKeys(anchors[mine], positives[mine], torch.arange(20, 28)[mine, None])
    first, second, third = (part[mine] @ weight for part in (x, y, z))
    loss = multiple_negatives_loss(
        first, second, third[:, None], keys=keys, temperature=0.3, symmetric=True, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(loss / 8, weight)
    return all_reduced({"loss": loss.detach() / 8, "gradient": gradient})
