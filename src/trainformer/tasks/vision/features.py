"""What can be said of the features of a batch."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def spread(features: Tensor) -> Tensor:
    """How evenly features lie on the sphere: 1 for all directions alike, 0 when all images look the same.

    >>> import torch
    >>> spread(torch.eye(4)) > 0.8, spread(torch.ones(4, 4))
    (tensor(True), tensor(0.))
    """
    unit = F.normalize(features.detach().float(), dim=-1)
    return unit.std(0, correction=0).mean() * math.sqrt(features.shape[-1])
