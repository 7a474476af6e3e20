"""The components that every run has, and how a state is held behind functions.

What is trained is a component too: which, and in which format, is said by `session.torch` and `session.jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainformer.checkpointing import StateComponent

if TYPE_CHECKING:
    from trainformer.run.run import Run


@dataclass(frozen=True)
class StatefulAdapter:
    """A state behind two functions, and a third that refuses one that does not fit before anything is changed."""

    get: Callable[[], dict[str, Any]]
    put: Callable[[dict[str, Any]], Any]
    check: Callable[[dict[str, Any]], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return self.get()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.put(state_dict)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise if it does not fit."""
        if self.check is not None:
            self.check(state)


def record_components(run: Run) -> list[StateComponent]:
    """Where the run is, and what its loggers and components that share values have noted."""
    return [
        StateComponent("run", StatefulAdapter(run.run_state, run.state.load_state_dict), format="json"),
        StateComponent("context", StatefulAdapter(run.context.state_dict, run.context.load_state_dict), required=False),
        StateComponent(
            "loggers",
            StatefulAdapter(lambda: run.loggers.state_dict(), run.take_logger_state),
            required=False,
            format="json",
        ),
    ]


def callback_states(run: Run) -> Iterator[tuple[str, StatefulAdapter]]:
    """Those callbacks that have a state, each under a key of its own."""
    for name, callback in run.callbacks.named().items():
        if callable(getattr(callback, "state_dict", None)):
            check = getattr(callback, "check_state", None)
            yield (
                "callback." + name.replace("#", "-"),
                StatefulAdapter(callback.state_dict, callback.load_state_dict, check),
            )
