"""MoCo v2 (He et al., 2020) and v3 (Chen et al., 2021): contrast queries with keys of a momentum encoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.contrastive import infonce_with_queue, moco_v3_loss
from trainformer.losses.numerics import upcast
from trainformer.models.heads import moco_projector, moco_v3_predictor, moco_v3_projector
from trainformer.tasks.vision.batch import feature_spread
from trainformer.tasks.vision.ssl.methods import MethodOutput, MomentumMethod, Tower, Views, forward_views
from trainformer.utils.distributed import gather_rows, is_padding, shuffle_rows, unshuffle_rows, world_size


class KeyQueue(nn.Module):
    """A ring buffer of the latest `size` keys, one per row.

    `add` collects keys; `commit` writes them without a device sync. Non-finite keys do not overwrite old ones: one bad
    image would otherwise spoil the loss for thousands of steps.

    >>> queue = KeyQueue(4, 2)
    >>> queue.add(torch.ones(3, 2))
    >>> queue.commit()
    >>> int(queue.position)
    3
    """

    keys: Tensor
    position: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self._pending: list[Tensor] = []

    def add(self, keys: Tensor) -> None:
        """Collect normalised keys of this rank for `commit`. Padding batches add none."""
        if is_padding():
            keys = keys[:0]  # still appended: `commit` gathers batch by batch
        size = len(self.keys)
        count = len(keys) + sum(map(len, self._pending))
        if count > size and world_size() == 1:  # otherwise `commit` raises, on all ranks
            self._pending.clear()
            received = f"a queue of {size} for {count} keys or more"
            do = "Pass a larger queue_size, or a smaller batch_size."
            raise BadArgument(expected("queue_size to hold at least the keys of one optimizer step", received, do))
        self._pending.append(keys.detach())

    @torch.no_grad()
    def commit(self) -> None:
        """Overwrite the oldest keys with those of all ranks."""
        if not self._pending:
            return
        # Gather batch by batch, so that the order is the same as with one process.
        keys = torch.cat([gather_rows(part) for part in self._pending]).to(self.keys.dtype)
        self._pending.clear()
        if len(keys) > len(self.keys):
            raise BadArgument(expected(f"queue_size to be at least {len(keys)}, the keys of a step", len(self.keys)))
        places = (self.position + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        finite = keys.isfinite().all(1, keepdim=True)
        self.keys.index_copy_(0, places, torch.where(finite, keys, self.keys[places]))
        self.position.copy_((self.position + len(keys)) % len(self.keys))

    def discard(self) -> None:
        """Drop pending keys."""
        self._pending.clear()


class MoCo(MomentumMethod):
    """MoCo v2: queries from the first view, keys from the second, negatives from a queue."""

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        proj_dim: int,
        hidden_dim: int,
        temperature: float,
        queue_size: int,
        **momentum: float,
    ) -> None:
        online = Tower(backbone, moco_projector(width, hidden_dim, proj_dim))
        super().__init__(online, **momentum)
        self.queue = KeyQueue(queue_size, proj_dim)
        self.temperature = temperature

    def step(self, views: Views) -> MethodOutput:
        """InfoNCE of each query with its key against the queue."""
        first, second = views.images
        features, queries = self.online(first)
        # Shuffled BatchNorm: a query must not recognise its key by the statistics of their shared batch.
        shuffled, shuffle = shuffle_rows(second)
        keys = F.normalize(upcast(unshuffle_rows(self.target(shuffled)[1], shuffle)), dim=1)
        losses = infonce_with_queue(queries, keys, self.queue.keys, self.temperature, reduction="none")
        own = features.detach()
        return MethodOutput(losses, own, {"feature_std": feature_spread(own)}, keys)

    def collect(self, output: MethodOutput) -> None:
        """Add the keys to the queue's pending ones."""
        self.queue.add(output.collected)

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Update queue and momentum network."""
        self.queue.commit()
        super().on_step_end(step, max_steps)

    def on_step_skipped(self) -> None:
        """Drop pending keys."""
        self.queue.discard()


class MoCoV3(MomentumMethod):
    """MoCo v3: a predictor on the queries, both views as query and key, negatives from the batch of all ranks.

    A ViT's patch projection stays frozen at its random initialisation; otherwise training is unstable.
    """

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        proj_dim: int,
        hidden_dim: int,
        temperature: float,
        freeze_patch_embed: bool,
        **momentum: float,
    ) -> None:
        patches = getattr(backbone, "patch_embed", None)
        if freeze_patch_embed and isinstance(patches, nn.Module):
            patches.requires_grad_(False)
        layers = 2 if patches is None else 3
        online = Tower(backbone, moco_v3_projector(width, hidden_dim, proj_dim, layers=layers))
        super().__init__(online, **momentum)
        self.predictor = moco_v3_predictor(proj_dim, hidden_dim, proj_dim, last_norm=patches is not None)
        self.temperature = temperature

    def step(self, views: Views) -> MethodOutput:
        """Symmetric InfoNCE."""
        features, projections = forward_views(self.online, views.images)
        q1, q2 = self.predictor(projections).chunk(2)
        k1, k2 = forward_views(self.target, views.images)[1].chunk(2)
        losses = moco_v3_loss(q1, q2, k1, k2, self.temperature, reduction="none")
        own = features[: len(q1)].detach()
        return MethodOutput(losses, own, {"feature_std": feature_spread(own)})
