"""Tables of plausible mistakes: what a user writes, and what the user then reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from toys import MeanTask, classes
from trainformer import Trainer


@dataclass(frozen=True)
class Mistake:
    """`outcome` is the exception, "warns" (the words are in the log) or "works" (nothing is logged)."""

    name: str
    make: Callable[[], Any]
    outcome: type[Exception] | str
    words: tuple[str, ...]


def row(name: str, make: Callable[[], Any], outcome: type[Exception] | str, *words: str) -> Any:
    return pytest.param(Mistake(name, make, outcome, words), id=name)


def text_for(mistake: Mistake, caplog: pytest.LogCaptureFixture) -> str:
    """Make the mistake, check its outcome, and return what the user reads: the error with its notes, or warnings."""
    caplog.set_level(logging.WARNING, logger="trainformer")
    if isinstance(mistake.outcome, str):
        assert mistake.make() is not False
        text = " ".join(r.getMessage() for r in caplog.records if r.name == "trainformer")
        assert bool(text) == (mistake.outcome == "warns"), text
    else:
        with pytest.raises(mistake.outcome) as caught:
            mistake.make()
        text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    return text


def build(task: Any = None, data: Any = None, **settings: Any) -> Trainer:
    """A trainer of two steps, unless the settings say otherwise."""
    usual = {"batch_size": 8, "max_steps": 2, "log": "none", "run_dir": "run", "num_workers": 0}
    if "epochs" in settings:
        del usual["max_steps"]
    if data is not None and not isinstance(data, (tuple, list)):
        del usual["batch_size"], usual["num_workers"]  # a loader has its own
    task = MeanTask() if task is None else task
    return Trainer(task, classes() if data is None else data, **{**usual, **settings})


def fit(*args: Any, **settings: Any) -> Trainer:
    return build(*args, **settings).fit()
