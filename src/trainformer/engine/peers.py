"""The processes of a run, as the engine sees them. How they exchange values is the business of a backend."""

from __future__ import annotations

from typing import Any, Protocol


class Peers(Protocol):
    """The processes that train together; every rank must take part in an exchange."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else."""
        ...

    @property
    def rank(self) -> int:
        """Number of this process."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        ...

    def gather_parts(self, value: Any) -> list[Any]:
        """The values of those that compute different samples: one for each part of a batch, in their order."""
        ...

    def total(self, values: list[float]) -> list[float]:
        """Sums over the parts of a batch."""
        ...

    def any(self, flags: list[bool]) -> list[bool]:
        """Which of them at least one rank has set."""
        ...


class Alone:
    """One process."""

    is_main = True
    is_alone = True
    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def gather_parts(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def total(self, values: list[float]) -> list[float]:
        """The values."""
        return values

    def any(self, flags: list[bool]) -> list[bool]:
        """The flags."""
        return flags
