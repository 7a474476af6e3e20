"""MoCo: contrast with the keys of a slowly moving network (He et al., 2020; v3: Chen et al., 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.losses.contrastive import infonce_with_queue, moco_v3_loss
from trainformer.losses.numerics import upcast
from trainformer.models.heads import moco_projector, moco_v3_predictor, moco_v3_projector
from trainformer.tasks.vision.features import spread
from trainformer.tasks.vision.ssl.method import MomentumMethod, Step, Tower, Views, in_batches
from trainformer.utils.distributed import gather_rows, is_padding, shuffle_rows, unshuffle_rows, world_size


class KeyQueue(nn.Module):
    """The latest `size` keys, one per row, as a ring.

    `add` only collects; `commit` writes everything collected since, without waiting for the device. Keys that are not
    finite leave the old ones in place: one bad image would otherwise spoil every loss for thousands of steps.

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
        self._waiting: list[Tensor] = []

    def add(self, keys: Tensor) -> None:
        """Keys of this rank, of length 1, to be written by `commit`; keys of padding are none."""
        if is_padding():
            keys = keys[:0]  # kept all the same: `commit` gathers batch by batch
        size = len(self.keys)
        count = len(keys) + sum(map(len, self._waiting))
        if count > size and world_size() == 1:  # else `commit` sees it, on all ranks at once
            self._waiting.clear()
            raise BadArgument(
                expected(
                    "queue_size to hold at least the keys of one optimizer step",
                    f"a queue of {size} for {count} keys or more",
                    "Pass a larger queue_size, or a smaller batch_size.",
                )
            )
        self._waiting.append(keys.detach())

    @torch.no_grad()
    def commit(self) -> None:
        """Write the keys of all ranks over the oldest ones."""
        if not self._waiting:
            return
        # Batch by batch, so that keys come in the order in which one process would have them.
        keys = torch.cat([gather_rows(part) for part in self._waiting]).to(self.keys.dtype)
        self._waiting.clear()
        if len(keys) > len(self.keys):
            raise BadArgument(expected(f"queue_size to be at least {len(keys)}, the keys of a step", len(self.keys)))
        places = (self.position + torch.arange(len(keys), device=keys.device)) % len(self.keys)
        finite = keys.isfinite().all(1, keepdim=True)
        self.keys.index_copy_(0, places, torch.where(finite, keys, self.keys[places]))
        self.position.copy_((self.position + len(keys)) % len(self.keys))

    def discard(self) -> None:
        """Forget what was not written."""
        self._waiting.clear()


class MoCo(MomentumMethod):
    """MoCo v2: queries of the first view, keys of the second, negatives from a queue."""

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        proj_dim: int,
        hidden_dim: int,
        temperature: float,
        momentum: float,
        momentum_end: float,
        queue_size: int,
    ) -> None:
        online = Tower(backbone, moco_projector(width, hidden_dim, proj_dim))
        super().__init__(online, (momentum, momentum_end))
        self.queue = KeyQueue(queue_size, proj_dim)
        self.temperature = temperature

    def step(self, views: Views) -> Step:
        """InfoNCE of each query with its own key against the queue."""
        first, second = views.images
        features, queries = self.online(first)
        # Dealt out anew over ranks: BatchNorm must not let a query recognise its key by the batch they share.
        shuffled, shuffle = shuffle_rows(second)
        keys = F.normalize(upcast(unshuffle_rows(self.slow(shuffled)[1], shuffle)), dim=1)
        losses = infonce_with_queue(queries, keys, self.queue.keys, self.temperature, reduction="none")
        own = features.detach()
        return Step(losses, own, {"feature_std": spread(own)}, keys)

    def remember(self, step: Step) -> None:
        """Keys for the queue."""
        self.queue.add(step.memory)

    def end_step(self, step: int, total: int) -> None:
        """Enqueue, and move the slow network."""
        self.queue.commit()
        super().end_step(step, total)

    def drop_step(self) -> None:
        """Forget keys of a step that is given up."""
        self.queue.discard()


class MoCoV3(MomentumMethod):
    """MoCo v3: a predictor on the queries, both views as query and as key, negatives from the batch (of all ranks).

    For a ViT the patch projection stays at its random values, without which training is unstable.
    """

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        proj_dim: int,
        hidden_dim: int,
        temperature: float,
        momentum: float,
        momentum_end: float,
        freeze_patch_embed: bool,
    ) -> None:
        patches = getattr(backbone, "patch_embed", None)
        if freeze_patch_embed and isinstance(patches, nn.Module):
            patches.requires_grad_(False)
        layers = 2 if patches is None else 3
        online = Tower(backbone, moco_v3_projector(width, hidden_dim, proj_dim, layers=layers))
        super().__init__(online, (momentum, momentum_end))
        self.predictor = moco_v3_predictor(proj_dim, hidden_dim, proj_dim, last_norm=patches is not None)
        self.temperature = temperature

    def step(self, views: Views) -> Step:
        """InfoNCE both ways."""
        features, projections = in_batches(self.online, views.images)
        q1, q2 = self.predictor(projections).chunk(2)
        k1, k2 = in_batches(self.slow, views.images)[1].chunk(2)
        losses = moco_v3_loss(q1, q2, k1, k2, self.temperature, reduction="none")
        own = features[: len(q1)].detach()
        return Step(losses, own, {"feature_std": spread(own)})
