"""Callbacks written for other trainers, heard here as if they were our own.

Three dialects are understood everywhere and mix freely: the native one (`trainformer.callbacks.Callback`), that of
HuggingFace's `TrainerCallback`, and that of mini's `BaseHook`. A callback of another dialect is wrapped; the wrapper
says itself what it listens to (`listen`), and is known by the name of what it wraps.
"""

from __future__ import annotations

from typing import Any

from trainformer.callbacks.compat.foreign import ForeignCallback
from trainformer.callbacks.compat.huggingface import HuggingFaceCallback, speaks_huggingface
from trainformer.callbacks.compat.mini import HookCallback, speaks_mini


def to_native(callback: Any, shared: dict[str, Any]) -> Any:
    """The callback itself, or a wrapper around it. `shared` is what wrappers of one run have in common."""
    if speaks_huggingface(callback):
        return HuggingFaceCallback(callback, shared)
    if speaks_mini(callback):
        return HookCallback(callback, shared)
    return callback


def original(callback: Any) -> Any:
    """What a wrapper wraps; anything else is what it is."""
    return callback.original if isinstance(callback, ForeignCallback) else callback
