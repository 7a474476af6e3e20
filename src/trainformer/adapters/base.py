"""The base class of adapters, the kinds of models, and helpers that all adapters share.

`targets` selects the adapted layers, `state` reads and writes checkpoints.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.core.optional import require

# peft's task type of a kind. Other kinds get the plain `PeftModel`, which passes all arguments through.
_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "vlm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
KINDS = (*_TASK_TYPES, "masked_lm", "clip", "vision")

# Suffixes of class names in transformers, and their kinds.
_SUFFIXES = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForImageClassification": "vision",
}

FolderPath = str | Path


class Adapter(ABC):
    """What a task needs of an adapter: the base class of `LoRA`, `QLoRA` and `PrefixTuning`."""

    @abstractmethod
    def peft_config(self, model: nn.Module, kind: str | None = None) -> Any:
        """The configuration in peft for a model."""

    @abstractmethod
    def merge(self, model: nn.Module) -> nn.Module:
        """Merge the adapter into the weights. Returns a plain model; the adapted one must not be used any more."""

    def check(
        self,
        *,
        kind: str | None = None,
        packing: bool = False,
        gradient_checkpointing: bool = False,
        model: Any = None,
    ) -> None:
        """Reject unsupported combinations before anything is loaded."""
        check_kind(kind)

    def apply(self, model: nn.Module, *, kind: str | None = None) -> nn.Module:
        """Freeze a model and add the adapter, in place. Returns the adapted model; only the adapter is trainable."""
        if is_adapted(model):
            do = "Merge the existing one first (adapter.merge(model)), or continue to train it."
            raise BadArgument(expected("a model without an adapter", f"a {type(model).__name__} with one", do))
        model = unwrap_model(model)
        kind = kind or kind_of(model)
        self.check(kind=kind, model=model)
        config = self.peft_config(model, kind)
        try:
            return peft().get_peft_model(model, config)
        except ValueError as error:  # e.g. a grouped convolution with an odd rank
            name = type(self).__name__
            raise BadArgument(f"Expected {name} to fit {type(model).__name__}, received from peft: {error}") from error

    def save(self, model: nn.Module, folder: FolderPath) -> list[str]:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which `PeftModel.from_pretrained` opens."""
        from trainformer.adapters.state import save_adapter

        return save_adapter(model, folder)

    def load(self, model: nn.Module, folder: FolderPath) -> nn.Module:
        """Load weights into an adapted model, or add the saved adapter to a plain one. Returns the adapted model."""
        from trainformer.adapters.state import load_adapter

        return load_adapter(model, folder)

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """Extra arguments for `from_pretrained`."""
        return {}

    def trainable(self, model: nn.Module) -> list[str]:
        """Names of the trainable parameters."""
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def peft() -> ModuleType:
    """The peft package, or an error with the pip command."""
    return require("peft", "adapters", "for adapters")


def check_kind(kind: str | None) -> None:
    """Reject an unknown kind of model.

    >>> check_kind("causal_lm")
    """
    if kind is not None:
        check_choice("kind", kind, KINDS)


def task_type(kind: str | None) -> str | None:
    """peft's task type of a kind of model; None for the plain `PeftModel`.

    >>> task_type("seq2seq"), task_type("vision")
    ('SEQ_2_SEQ_LM', None)
    """
    return _TASK_TYPES.get(kind or "")


def kind_of_task_type(name: str | None) -> str | None:
    """The kind of model that a task type of peft stands for; None if it is unknown.

    >>> kind_of_task_type("SEQ_2_SEQ_LM")
    'seq2seq'
    """
    return next((kind for kind, known in _TASK_TYPES.items() if known == name), None)


def kind_of(model: nn.Module) -> str | None:
    """The kind of a transformers model, from its class and configuration; None for other modules.

    >>> kind_of(nn.Linear(2, 2)) is None
    True
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return None
    name = type(model).__name__
    if (kind := kind_of_name(name)) is not None:
        return kind
    if hasattr(config, "vision_config"):
        # Two towers with a temperature, or a language model with images.
        return "clip" if hasattr(model, "logit_scale") else "vlm"
    if name.endswith("ForConditionalGeneration"):
        return "seq2seq"
    return "embedding" if name.endswith("Model") else None


def kind_of_name(name: str) -> str | None:
    """The kind that the name of a class in transformers stands for; None if it does not say.

    >>> kind_of_name("LlamaForCausalLM"), kind_of_name("BertModel")
    ('causal_lm', None)
    """
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def is_adapted(model: nn.Module) -> bool:
    """Whether a model has an adapter; unwraps DDP and torch.compile.

    >>> is_adapted(nn.Linear(2, 2))
    False
    """
    return _is_peft_model(unwrap_model(model))


def adapted_model(model: nn.Module) -> Any:
    """The `PeftModel` inside DDP and torch.compile; an error for a model without an adapter."""
    inner = unwrap_model(model)
    if not _is_peft_model(inner):
        do = "Add one first: model = adapter.apply(model)."
        raise BadArgument(expected("a model with an adapter", type(inner).__name__, do))
    return inner


def _is_peft_model(model: nn.Module) -> bool:
    # By its class: the inner model keeps an attribute `peft_config` after the adapter is removed.
    package = sys.modules.get("peft")
    return package is not None and isinstance(model, package.PeftModel)


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile."""
    inner: nn.Module | None = model
    while inner is not None:
        model = inner
        # In `_modules`, because `PeftModel` forwards unknown attributes to the inner model.
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = model._modules.get("module") if wrapped else model._modules.get("_orig_mod")
    return model
