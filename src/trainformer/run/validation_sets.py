"""Several validation sets: their names, those of their metrics, how often each is evaluated, which one is monitored.

Validation data without a name is kept under the empty name, and its metrics are ``val/loss`` and so on; those of a set
called ``clean`` are ``val/clean/loss``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.engine.cadence import Cadence

EVAL_EVERY = 1  # epochs: the default of `eval_every`
NAME = re.compile(r"\w[\w.@+-]*")
#: Names that metrics of callbacks begin with.
_RESERVED = ("without_ema",)


def validation_sets(data: Any, argument: str = "val_data", nests: bool = False) -> dict[str, Any]:
    """Validation data by name. One dataset has the empty name; without data there are none.

    With `nests`, a set may itself be a mapping (of columns).

    >>> list(validation_sets({"clean": [1], "shifted": [2]})), list(validation_sets([1, 2])), validation_sets(None)
    (['clean', 'shifted'], [''], {})
    """
    if data is None:
        return {}
    if isinstance(data, list | tuple) and data and all(map(_is_dataset, data)):
        do = f"Give them names: {argument}={{'clean': ..., 'shifted': ...}}. Metrics are then val/clean/loss and so on."
        raise BadArgument(expected(f"several datasets as {argument} in a dict", f"a {type(data).__name__}", do))
    if not isinstance(data, Mapping):
        return {"": data}
    if not data:
        raise BadArgument(expected(f"{argument} with at least one dataset", data, f"Leave out {argument}."))
    for name, part in data.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in _RESERVED:
            what = f"names in {argument} that can be part of a metric's name: letters, digits and any of _ . @ + -"
            raise BadArgument(expected(what, name, "Metrics are called val/NAME/loss."))
        if part is None or (isinstance(part, Mapping) and not nests):
            kind = "None" if part is None else "another dict"
            raise BadArgument(expected(f"{argument}[{name!r}] to be a dataset", kind))
    return dict(data)


def _is_dataset(part: Any) -> bool:
    """Whether an item of a list is a dataset (or a path to one) rather than a sample. Tuples of tensors may be both."""
    if isinstance(part, str | Path):
        return os.path.exists(part)  # a list of texts is a dataset
    is_sample = isinstance(part, tuple | list | Mapping) or hasattr(part, "dtype")
    return not is_sample and (hasattr(part, "__getitem__") or hasattr(part, "__iter__")) and hasattr(part, "__len__")


def metric_name(name: str, val_set: str = "") -> str:
    """The name under which a metric of a validation set is logged.

    >>> metric_name("loss"), metric_name("val/loss"), metric_name("loss", "clean")
    ('val/loss', 'val/loss', 'val/clean/loss')
    """
    prefix = f"val/{val_set}/" if val_set else "val/"
    return prefix + name.removeprefix("val/")


def set_of(metric: str, names: Collection[str]) -> str | None:
    """The validation set that a metric belongs to, if it is one of `names`.

    >>> set_of("val/clean/loss", ["clean", "shifted"]), set_of("val/loss", ["clean"])
    ('clean', None)
    """
    first, _, rest = metric.removeprefix("val/").partition("/")
    return first if metric.startswith("val/") and rest and first in names else None


def check_eval_every(eval_every: Any, names: Collection[str]) -> None:
    """Reject cadences of validation sets that do not exist."""
    if not isinstance(eval_every, Mapping):
        return
    named = [name for name in names if name]
    for name in eval_every:
        if name not in named:
            if not named:
                do = "Name the validation sets: val_data={'clean': ..., 'shifted': ...}."
                raise BadArgument(expected("one eval_every for validation data without a name", dict(eval_every), do))
            hint = did_you_mean(str(name), named) or f"There is {', '.join(named)}."
            raise BadArgument(expected("eval_every with names of validation sets", name, hint))


def eval_cadences(eval_every: Any, names: Collection[str]) -> Cadence | dict[str, Cadence | None] | None:
    """The cadence of all validation sets, or one of each: a set that `eval_every` leaves out has the default."""
    if not isinstance(eval_every, Mapping):
        return Cadence.parse(eval_every, "epochs", "eval_every")
    every = {name: eval_every.get(name, EVAL_EVERY) for name in names}
    return {name: Cadence.parse(value, "epochs", f"eval_every[{name!r}]") for name, value in every.items()}


def default_monitor(monitor: str, names: Collection[str]) -> str:
    """What to monitor unless the user says it: the same metric of the first set.

    >>> default_monitor("val/loss", ["clean", "shifted"]), default_monitor("val/loss", [""])
    ('val/clean/loss', 'val/loss')
    """
    first = next(iter(names), "")
    return metric_name(monitor, first) if first and set_of(monitor, names) is None else monitor


def check_monitor(monitor: str, who: str, names: Collection[str], others: Collection[str] = ()) -> None:
    """Reject a metric that no validation set can have. `others` are metrics that callbacks add."""
    named = [name for name in names if name]
    is_known = set_of(monitor, named) or monitor in others or monitor.startswith("val/without_ema/")
    if not named or not monitor.startswith("val/") or is_known:
        return
    first, _, rest = monitor.removeprefix("val/").partition("/")
    close = difflib.get_close_matches(first, named, n=1) if rest else []
    example = metric_name(rest or first, close[0] if close else named[0])
    called = ", ".join(metric_name("...", name) for name in named)
    what = f"{who} to name a metric of one of the validation sets {', '.join(named)}"
    raise BadArgument(expected(what, monitor, f"Their metrics are called {called}, such as {example!r}."))
