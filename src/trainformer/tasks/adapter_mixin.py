"""Adapter support for tasks: checkpoints hold only the adapter, exports hold the merged model."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import Tensor, nn

from trainformer.adapters.base import Adapter, is_adapted
from trainformer.adapters.export import merge_adapter
from trainformer.adapters.state import adapter_state_dict, load_adapter_state_dict, save_adapter_beside
from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.tasks.base import TaskBase

_WEIGHTS = "model.safetensors"  # the model's file in a checkpoint


class AdapterMixin(TaskBase):
    """Base class of tasks with an optional adapter. A subclass applies it when it builds the model."""

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
        return self.model.state_dict() if self.adapter is None else adapter_state_dict(self.model)

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of `model_state_dict`."""
        if self.adapter is None:
            self.model.load_state_dict(state)
        else:
            load_adapter_state_dict(self.model, state)

    def save_assets(self, folder: Path) -> list[str]:
        """With an adapter, write the files for `PeftModel.from_pretrained`."""
        if self.adapter is None:
            return []
        weights = folder / _WEIGHTS
        if not (weights.is_file() and is_adapted(self.model)):
            return self.adapter.save(self.model, folder)
        return save_adapter_beside(self.model, weights)

    def export_module(self, model: nn.Module) -> nn.Module:
        """Return the plain model with the adapter merged; the trained model does not change."""
        return model if self.adapter is None else merge_adapter(copy.deepcopy(model))
