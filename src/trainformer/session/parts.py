"""What the settings of a run say to each of its parts: the backend, the loaders, the loop, the checkpoint store."""

from __future__ import annotations

import torch

from trainformer.backends.torch import TorchSettings
from trainformer.backends.torch.distribution import Ranks
from trainformer.data.sharding import Shard
from trainformer.engine import Cadence, Plan
from trainformer.engine.checkpoint import Retention
from trainformer.session.data import LoadOptions
from trainformer.session.settings import RunSettings


def torch_settings(settings: RunSettings) -> TorchSettings:
    """To the backend: how a step is computed."""
    names = TorchSettings.__dataclass_fields__
    return TorchSettings(**{name: getattr(settings, name) for name in names})


def load_options(
    settings: RunSettings, device: torch.device, ranks: Ranks, batch_size: int | None = None
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
        shard=Shard(ranks.index, ranks.count),
        dispatch=ranks if settings.dispatch_batches and not ranks.is_alone else None,
    )


def plan(settings: RunSettings, evaluates: bool) -> Plan:
    """To the loop: how long it goes on, and what it does when. Without validation data nothing is evaluated."""
    s = settings
    return Plan(
        max_steps=s.max_steps,
        epochs=None if s.max_steps is not None else s.epochs,
        accumulation=s.accumulation_steps,
        log_every=Cadence.parse(s.log_every, "steps", "log_every"),
        eval_every=Cadence.parse(s.eval_every, "epochs", "eval_every") if evaluates else None,
        save_every=Cadence.parse(s.save_every, s.save_strategy, "save_every"),
        eval_on_save=s.eval_on_save and evaluates,
        eval_at_end=evaluates and s.eval_every is not None,
        monitor=s.monitor_metric,
        monitor_mode=s.monitor_mode,
    )


def retention(settings: RunSettings) -> Retention:
    """To the checkpoint store: what it keeps."""
    return Retention(
        last=settings.save_last,
        best=settings.save_best,
        every=settings.keep_every,
        monitor=settings.monitor_metric,
        mode=settings.monitor_mode,
    )
