"""What tasks with an adapter share: a checkpoint holds the adapter alone, and an export the model it stands for."""

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

_WEIGHTS = "model.safetensors"  # what a checkpoint has of the model


class AdapterMixin(TaskBase):
    """Base of tasks that may have an adapter on their model. A subclass puts it there when it makes the model."""

    adapter: Adapter | None

    def _check_adapter(self, kind: str, packing: bool = False) -> None:
        """Refuse what is no adapter, and what it cannot go with. For `__post_init__`."""
        if self.adapter is None:
            return
        if not isinstance(self.adapter, Adapter):
            raise BadArgument(expected("adapter to be a LoRA, QLoRA, PrefixTuning or the like", self.adapter))
        self.adapter.check(kind=kind, packing=packing)

    def model_state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: with an adapter, the adapter alone."""
        return self.model.state_dict() if self.adapter is None else adapter_state_dict(self.model)

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take it back."""
        if self.adapter is None:
            self.model.load_state_dict(state)
        else:
            load_adapter_state_dict(self.model, state)

    def save_assets(self, folder: Path) -> list[str]:
        """With an adapter, what `PeftModel.from_pretrained` looks for."""
        if self.adapter is None:
            return []
        written = folder / _WEIGHTS
        if not (written.is_file() and is_adapted(self.model)):
            return self.adapter.save(self.model, folder)
        return save_adapter_beside(self.model, written)

    def export_module(self, model: nn.Module) -> nn.Module:
        """The plain model, with the adapter merged into it; the one that is trained stays as it is."""
        return model if self.adapter is None else merge_adapter(copy.deepcopy(model))
