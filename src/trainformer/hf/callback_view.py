"""`trainer.callbacks`: a list of a trainer's callbacks that can be changed."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import TYPE_CHECKING, Any, overload

from trainformer.callbacks.compat import unwrap_callback
from trainformer.hf.run import LogRelay

if TYPE_CHECKING:
    from trainformer.hf.base_trainer import BaseTrainer


class CallbackView(MutableSequence[Any]):
    """The callbacks of a trainer in order. Adding and removing works like `add_callback` and `remove_callback`."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer

    def _all(self) -> list[Any]:
        stored = self._trainer._callbacks
        return [unwrap_callback(callback) for callback in stored if not isinstance(callback, LogRelay)]

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        changed = self._all()
        changed[index] = value
        self.replace(changed)

    def __delitem__(self, index: Any) -> None:
        removed = self._all()[index]
        for callback in removed if isinstance(index, slice) else [removed]:
            self._trainer.remove_callback(callback)

    def __len__(self) -> int:
        return len(self._all())

    def insert(self, index: int, value: Any) -> None:
        """Add a callback before another one."""
        if index >= len(self):
            self._trainer.add_callback(value)
        else:
            changed = self._all()
            changed.insert(index, value)
            self.replace(changed)

    def replace(self, callbacks: Iterable[Any]) -> None:
        """Remove all callbacks, and add others."""
        callbacks = list(callbacks)
        for callback in self._all():
            self._trainer.remove_callback(callback)
        for callback in callbacks:
            self._trainer.add_callback(callback)

    def __eq__(self, other: object) -> bool:
        return self._all() == list(other) if isinstance(other, list | CallbackView) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self._all(), *other]

    def __repr__(self) -> str:
        return repr(self._all())
