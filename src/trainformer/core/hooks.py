"""Checks of methods that users write for us to call: their names, and the arguments they take."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean

#: What Lightning, Keras and HF call our hooks.
_OTHER_NAMES = {
    **dict.fromkeys(("on_train_start", "on_fit_start", "on_training_start", "on_fit_begin"), "on_train_begin"),
    **dict.fromkeys(("on_fit_end", "on_training_end"), "on_train_end"),
    **dict.fromkeys(("on_train_batch_start", "on_train_batch_begin", "on_batch_begin"), "on_step_begin"),
    **dict.fromkeys(("on_train_batch_end", "on_batch_end"), "on_step_end"),
    **dict.fromkeys(("on_train_epoch_start", "on_epoch_start"), "on_epoch_begin"),
    "on_train_epoch_end": "on_epoch_end",
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start", "on_test_begin"), "on_validation_begin"),
    **dict.fromkeys(
        ("on_validation_epoch_end", "on_evaluate", "on_evaluation_end", "on_eval_end", "on_test_end"),
        "on_validation_end",
    ),
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
    "on_exception": "on_error",
    "on_after_backward": "on_before_optimizer_step",
}
_FRAMEWORKS = ("trainformer", "torch", "lightning", "pytorch_lightning", "transformers", "peft", "builtins", "typing")


def unknown_hooks(owner: object, known: Collection[str], prefix: str = "on_") -> dict[str, str]:
    """Methods named ``on_...`` that nobody will call, each with a hint at the name that was probably meant.

    >>> class Counter:
    ...     __module__ = "own"
    ...     def on_train_start(self): ...
    ...     def on_step_ends(self): ...
    >>> unknown_hooks(Counter(), ["on_train_begin", "on_step_end"])
    {'on_train_start': "Did you mean 'on_train_begin'?", 'on_step_ends': "Did you mean 'on_step_end'?"}
    """
    kind = type(owner)
    own = [c for c in kind.__mro__ if c.__module__.partition(".")[0] not in _FRAMEWORKS]
    names = dict.fromkeys(n for c in own for n in vars(c) if n.startswith(prefix) and callable(getattr(kind, n, None)))
    return {name: _suggestion(name, known) for name in names if name not in known}


def _suggestion(name: str, known: Collection[str]) -> str:
    other = _OTHER_NAMES.get(name)
    return f"Did you mean {other!r}?" if other else did_you_mean(name, known, most=1)


def check_arguments(
    owner: object, name: str, positional: Collection[str], keywords: Mapping[str, Any] | None = None
) -> None:
    """Reject a method that cannot be called with these arguments: otherwise it fails when it is called, perhaps late.

    >>> class Counter:
    ...     def on_step_end(self, trainer): ...
    >>> check_arguments(Counter(), "on_step_end", ["trainer", "step", "loss"])
    Traceback (most recent call last):
    trainformer.core.errors.BadArgument: Expected Counter.on_step_end to take (trainer, step, loss), ...
    """
    method = getattr(owner, name)
    try:
        signature = inspect.signature(method)
    except (ValueError, TypeError):  # built-in functions do not tell
        return
    try:
        signature.bind(*positional, **(keywords or {}))
    except TypeError:
        wanted = ", ".join([*positional, *(keywords or {})])
        raise BadArgument(
            f"Expected {type(owner).__name__}.{name} to take ({wanted}), received {name}{signature}. "
            f"Write def {name}({', '.join(['self', *([wanted] if wanted else [])])})."
        ) from None
