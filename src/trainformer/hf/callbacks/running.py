"""The run behind the `trainer` that callbacks are told of."""

from __future__ import annotations

from typing import Any


def run_of(trainer: Any) -> Any:
    """What knows the run (see `callbacks.base.TrainerLike`): a `hf.Trainer` keeps it apart from its own names.

    Whoever is no trainer of ours comes back as he is; ask for what is needed with a default.
    """
    return getattr(trainer, "_handle", trainer)
