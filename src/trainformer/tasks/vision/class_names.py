"""Class names in the config and the state of a vision task."""

from __future__ import annotations

from typing import Any

from trainformer.tasks.base import TaskBase


class ClassNamesInState(TaskBase):
    """Mixin, to be named before `VisionTask`: `class_names` are recorded, saved and loaded."""

    class_names: Any

    def config_dict(self) -> dict[str, Any]:
        return super().config_dict() | {"class_names": self.class_names}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"class_names": self.class_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.class_names = state["class_names"]
