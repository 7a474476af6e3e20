"""Which checkpoint of a run is meant: the last, or the best by the metric that the run monitors. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainformer.checkpointing import Checkpoint, Retention
from trainformer.checkpointing.tools.listing import AnyPath, find, is_checkpoint, is_of_jax, list_checkpoints
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.tree_files import read_tree

_WHICH = ("last", "best")


def choose_checkpoint(run: AnyPath, which: str) -> tuple[Checkpoint, str | None]:
    """The checkpoint that is meant, and a note if another is better."""
    if which not in _WHICH:
        raise BadArgument(expected(f"which to be {' or '.join(map(repr, _WHICH))}", which))
    found = find(run)
    if not isinstance(found, Checkpoint):
        do = "A file has no settings and no tokenizer beside it: see Trainer.export and export_weights."
        raise BadArgument(expected("the folder of a run or of one of its checkpoints", str(found), do))
    files = {key: found.manifest.components.get(key, []) for key in ("model", "assets")}
    dataclasses.replace(found.manifest, components=files).verify(found.path)
    if is_checkpoint(Path(run)):
        return found, None
    settings = settings_in(found)
    monitor, mode = settings.get("monitor_metric", "val/loss"), settings.get("monitor_mode", "min")
    ranked = Retention(monitor=monitor, mode=mode).ranked(list_checkpoints(run))
    if which == "best":
        if not ranked:
            what = f"a checkpoint with {monitor} to find the best by"
            raise DataError(expected(what, f"none in {run}", "Pass which='last', or the folder of one checkpoint."))
        return ranked[0], None
    if ranked and ranked[0].step != found.step:
        score = ranked[0].manifest.metrics[monitor]
        return found, f"step {ranked[0].step} has the best {monitor} ({score:.4g}): which='best' takes that"
    return found, None


def choose_ema(keys: Iterable[str], ema: bool | str | None) -> str | None:
    """The component with the average to take; None for the trained weights."""
    averages = [key for key in keys if key.removeprefix("callback.").split("-")[0] == "EMA"]
    if ema is False or (ema is None and not averages):
        return None
    if isinstance(ema, str):
        averages = [key for key in averages if key == ema]
    if len(averages) != 1:
        raise BadArgument(
            expected("ema to say which average to take", f"{ema!r} for a run with {', '.join(averages) or 'none'}")
        )
    return averages[0]


def settings_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint, by name."""
    if "context" not in checkpoint.manifest.components:
        return {}
    if is_of_jax(checkpoint):
        names = [record.name for record in checkpoint.manifest.components["context"]]
        context = read_tree(checkpoint.path, names)
    else:
        from trainformer.checkpointing.tools.states import States

        context = States(checkpoint)["context"]
    return dict(context["config"])
