"""How often something happens: one type and one parser for every "every ..." argument."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainformer.core.errors import BadArgument, expected

Unit = Literal["steps", "epochs", "seconds"]

_UNITS: dict[str, tuple[Unit, float]] = {
    **dict.fromkeys(("step", "steps"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1.0)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("m", "min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


@dataclass(frozen=True, slots=True)
class Cadence:
    """Every `every` steps, epochs or seconds.

    >>> Cadence.parse(100, "steps")
    Cadence(every=100, unit='steps')
    >>> Cadence.parse("10min", "steps")
    Cadence(every=600.0, unit='seconds')
    >>> Cadence.parse("2 epochs", "steps").due_at_epoch(4)
    True
    >>> Cadence.parse(None, "steps") is None
    True
    """

    every: float
    unit: Unit

    @classmethod
    def parse(cls, value: int | str | Cadence | None, default_unit: Unit, name: str = "the cadence") -> Cadence | None:
        """A cadence from what a user wrote; a bare integer counts in `default_unit`, ``None`` means never."""
        if value is None or isinstance(value, Cadence):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if value > 0:
                return cls(value, default_unit)
        elif isinstance(value, str) and (match := _FORM.fullmatch(value.strip().lower())):
            number, word = match.groups()
            if word in _UNITS and float(number) > 0:
                unit, seconds = _UNITS[word]
                if unit == "seconds":
                    return cls(float(number) * seconds, unit)
                if float(number).is_integer():
                    return cls(int(float(number)), unit)
        what = f"{name} to be a positive number of {default_unit}, or a string like '500steps', '2epochs', '10min'"
        raise BadArgument(expected(what, value, "Use None to switch it off."))

    def due_at_step(self, step: int) -> bool:
        """Whether it is time after `step` optimizer steps."""
        return self.unit == "steps" and step % self.every == 0

    def due_at_epoch(self, epochs: int) -> bool:
        """Whether it is time after `epochs` whole epochs."""
        return self.unit == "epochs" and epochs % self.every == 0

    def __str__(self) -> str:
        return f"{self.every:g}{self.unit}"
