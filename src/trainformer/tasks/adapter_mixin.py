"""Adapter support for tasks: checkpoints hold only the adapter, exports hold the merged model."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import Tensor, nn

from trainformer.adapters.base import Adapter, is_adapted
from trainformer.adapters.export import merge_adapter
from trainformer.adapters.saved import write_adapters
from trainformer.adapters.state import load_adapter_state_dict, saved_adapter_state_dict
from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.tasks.base import TaskBase

_WEIGHTS = "model.safetensors"  # the model's file in a checkpoint


class AdapterMixin(TaskBase):
    """Base class of tasks with an optional adapter. A subclass applies it when it builds the model.

    A model may also come with an adapter (a `PeftModel`, the folder of an adapter): it is treated in the same way.
    """

    adapter: Adapter | None

    def _check_adapter(self, kind: str, packing: bool = False) -> None:
        """Validate the adapter argument. Call it from `__post_init__`."""
        if self.adapter is None:
            return
        if not isinstance(self.adapter, Adapter):
            raise BadArgument(expected("adapter to be a LoRA, QLoRA, PrefixTuning or the like", self.adapter))
        self.adapter.check(kind=kind, packing=packing)

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the adapter if there is one, otherwise of the model."""
        return saved_adapter_state_dict(self.model) if is_adapted(self.model) else self.model.state_dict()

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of `model_state_dict`."""
        if is_adapted(self.model):
            load_adapter_state_dict(self.model, state)
        else:
            self.model.load_state_dict(state)

    def save_assets(self, folder: Path) -> list[str]:
        """With an adapter, write the files for `PeftModel.from_pretrained`."""
        if not is_adapted(self.model):
            return []
        return write_adapters(self.model, folder / _WEIGHTS)

    def export_module(self, model: nn.Module) -> nn.Module:
        """Return the plain model with the adapter merged; the trained model does not change."""
        return merge_adapter(copy.deepcopy(model)) if is_adapted(model) else model
