"""What the settings of a run say to its backend and its loaders."""

from __future__ import annotations

import torch

from trainformer.backends.torch import TorchSettings
from trainformer.data.sharding import Shard
from trainformer.distributed import TorchProcessGroup
from trainformer.run.torch.data import LoadOptions
from trainformer.run.torch.settings import RunSettings


def torch_settings(settings: RunSettings) -> TorchSettings:
    """To the backend: how a step is computed."""
    names = TorchSettings.__dataclass_fields__
    return TorchSettings(**{name: getattr(settings, name) for name in names})


def load_options(
    settings: RunSettings, device: torch.device, process_group: TorchProcessGroup, batch_size: int | None = None
) -> LoadOptions:
    """To a loader: how batches are made, of another size than that of training if one is given."""
    return LoadOptions(
        batch_size=batch_size or settings.batch_size,
        seed=settings.seed,
        num_workers=settings.num_workers,
        pin_memory=device.type == "cuda" if settings.pin_memory is None else settings.pin_memory,
        prefetch_factor=settings.prefetch_factor,
        skip_bad=settings.bad_samples == "skip",
        sampler=settings.sampler,
        drop_last=settings.drop_last,
        accumulation=settings.accumulation_steps,
        shard=Shard(process_group.dp_rank, process_group.dp_world_size),
        dispatch=process_group if settings.dispatch_batches and not process_group.is_single_process else None,
    )
