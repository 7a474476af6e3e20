"""Adapters for callbacks written for other trainers.

Native callbacks (`trainformer.callbacks.Callback`), HF `TrainerCallback`s and mini `BaseHook`s can be mixed in one run.
An adapter wraps each foreign callback, and goes by its name in logs and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainformer.engine import Event


class CallbackAdapter:
    """Makes a callback of another framework a callback of a run."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def handlers(self, trainer: Any) -> dict[Event, Callable[..., None]]:
        """Handlers for the events that the wrapped callback needs."""
        raise NotImplementedError


def to_native(callback: Any, shared: dict[str, Any]) -> Any:
    """The callback itself, or an adapter around it. `shared` holds what the adapters of one run have in common."""
    from trainformer.callbacks.compat.huggingface import HuggingFaceCallback, is_huggingface_callback
    from trainformer.callbacks.compat.mini import BaseHook, HookCallback

    if is_huggingface_callback(callback):
        return HuggingFaceCallback(callback, shared)
    return HookCallback(callback, shared) if isinstance(callback, BaseHook) else callback


def unwrap_callback(callback: Any) -> Any:
    """The callback inside an adapter; any other callback is returned unchanged."""
    return callback.wrapped if isinstance(callback, CallbackAdapter) else callback
