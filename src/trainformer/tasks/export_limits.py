"""What stands for a model that can be exported as weights, but not as a graph of one input."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument


class WeightsOnly(nn.Module):
    """Has the state dict of a model, and refuses to be traced."""

    def __init__(self, model: nn.Module, inputs: str) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.model.state_dict(*args, **kwargs)

    def forward(self, inputs: Any) -> Any:
        raise BadArgument(
            f"Expected format='pytorch', received another: the model takes {self.inputs}, not one tensor. Export its "
            "weights, or export task.model with the tools of its library."
        )
