"""User-facing errors. Each message says what was expected, what was received, and what to do.

They derive from the built-in exception a Python programmer would expect (``ValueError`` for a bad argument), and from
`TrainformerError`, so that one clause catches them all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainformer.core.secrets import mask, mask_text


class TrainformerError(Exception):
    """Base class of all errors that trainformer raises on purpose. Secrets in the message are masked."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(mask_text(arg) if isinstance(arg, str) else arg for arg in args))


class BadArgument(TrainformerError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class UnknownArgument(BadArgument, TypeError):
    """A keyword argument that does not exist; the message suggests one that does."""


class DataError(TrainformerError, ValueError):
    """Data that is missing, empty, unreadable or does not fit the task."""


class MissingDependency(TrainformerError, ImportError):
    """An optional package is not installed; the message names the pip command."""


class NonFiniteError(TrainformerError, ArithmeticError):
    """A loss or gradient became NaN or infinite. The weights are those of the last finite step."""


class CheckFailed(TrainformerError, RuntimeError):
    """`Trainer.check()` found a problem that would make the run fail or train incorrectly."""


def expected(what: str, received: object, do: str = "") -> str:
    """An error message in the standard form.

    >>> expected("batch_size to be a positive integer", 0, "Pass batch_size=32, for instance.")
    'Expected batch_size to be a positive integer, received 0. Pass batch_size=32, for instance.'
    >>> expected("hub_token to be None", "abc")
    "Expected hub_token to be None, received '***masked***'."
    """
    text = f"Expected {what}, received {mask(received, what.partition(' ')[0])!r}."
    return f"{text} {do}" if do else text


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """A sentence that suggests similar names; empty if there are none.

    >>> did_you_mean("resnt18", ["resnet18", "vit_tiny"])
    "Did you mean 'resnet18'?"
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=most, cutoff=0.5)
    if not close:
        return ""
    return "Did you mean " + " or ".join(repr(c) for c in close) + "?"


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Reject an argument that is not one of the choices.

    >>> check_choice("reduction", "mean", ["mean", "sum"])
    """
    known = list(choices)
    if value not in known:
        what = f"{name} to be one of {', '.join(map(repr, known))}"
        raise BadArgument(expected(what, value, did_you_mean(str(value), known)))


def check_count(name: str, value: object, least: int = 1, do: str = "") -> None:
    """Reject an argument that is not an integer of at least `least`.

    >>> check_count("batch_size", 32)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise BadArgument(expected(f"{name} to be {what}", value, do))
