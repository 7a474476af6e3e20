"""What an adapter is: the protocol between tasks and adapters, and what all adapters here have in common.

Owns the words: the kinds of model, which model is adapted, and what peft calls each kind. Which layers are adapted is
decided in `targets`, what is written to disk in `state`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

# What peft calls a kind. Kinds that are not here get peft's plain wrapper, which hands every argument on unread.
_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "vlm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "embedding": "FEATURE_EXTRACTION",
}
KINDS = (*_TASK_TYPES, "masked_lm", "clip", "vision")

# The last part of the name of a class in transformers, and its kind.
_ENDINGS = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForImageClassification": "vision",
}

AnyFolder = str | Path


@runtime_checkable
class Adapter(Protocol):
    """What a task needs of an adapter. `LoRA`, `QLoRA` and `PrefixTuning` have it."""

    def apply(self, model: nn.Module, *, kind: str | None = None) -> nn.Module:
        """Freeze a model and put the adapter on it, in place; the adapted model. Only the adapter wants gradients."""
        ...

    def save(self, model: nn.Module, folder: AnyFolder) -> list[str]:
        """Write the adapter alone; the names of the files."""
        ...

    def load(self, model: nn.Module, folder: AnyFolder) -> nn.Module:
        """Fill an adapted model from a folder, or adapt a plain one as the folder says; the adapted model."""
        ...

    def merge(self, model: nn.Module) -> nn.Module:
        """A plain model that computes what the adapted one did. The adapted one is used up."""
        ...

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """Further arguments for `from_pretrained`."""
        ...

    def check(
        self,
        *,
        kind: str | None = None,
        packing: bool = False,
        gradient_checkpointing: bool = False,
        model: Any = None,
    ) -> None:
        """Refuse what cannot work together, with the reason, before anything is loaded."""
        ...

    def trainable(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are trained."""
        ...


class PeftAdapter:
    """Saving, loading and listing, which do not depend on the kind of adapter."""

    def save(self, model: nn.Module, folder: AnyFolder) -> list[str]:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which `PeftModel.from_pretrained` opens."""
        from trainformer.adapters.state import save_adapter

        return save_adapter(model, folder)

    def load(self, model: nn.Module, folder: AnyFolder) -> nn.Module:
        """Fill an adapted model from a folder, or adapt a plain one as the folder says; the adapted model."""
        from trainformer.adapters.state import load_adapter

        return load_adapter(model, folder)

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """Further arguments for `from_pretrained`: none."""
        return {}

    def trainable(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are trained: what an optimizer gets."""
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def peft() -> ModuleType:
    """The package all adapters here are made with."""
    return require("peft", "adapters", "for adapters")


def check_kind(kind: str | None) -> None:
    """Refuse a word that is no kind of model.

    >>> check_kind("causal_lm")
    """
    if kind is not None and kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"Known: {', '.join(KINDS)}."
        raise BadArgument(expected("kind to be a kind of model", kind, hint))


def task_type(kind: str | None) -> str | None:
    """What peft calls a kind of model; None for its plain wrapper.

    >>> task_type("seq2seq"), task_type("vision")
    ('SEQ_2_SEQ_LM', None)
    """
    return _TASK_TYPES.get(kind or "")


def kind_of(model: nn.Module) -> str | None:
    """The kind of a model of transformers, by its class and configuration; None for other modules.

    >>> kind_of(nn.Linear(2, 2)) is None
    True
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return None
    name = type(model).__name__
    for ending, kind in _ENDINGS.items():
        if name.endswith(ending):
            return kind
    if hasattr(config, "vision_config"):
        # Two towers that meet in a temperature, or a language model that is shown images.
        return "clip" if hasattr(model, "logit_scale") else "vlm"
    if name.endswith("ForConditionalGeneration"):
        return "seq2seq"
    return "embedding" if name.endswith("Model") else None


def is_adapted(model: nn.Module) -> bool:
    """Whether an adapter is on a model (DDP's and torch.compile's wrappers are looked through).

    >>> is_adapted(nn.Linear(2, 2))
    False
    """
    return _is_peft_model(unwrapped(model))


def adapted_model(model: nn.Module) -> Any:
    """The `PeftModel` in a model; an error for a model without an adapter."""
    inner = unwrapped(model)
    if not _is_peft_model(inner):
        do = "Put one on it first: model = adapter.apply(model)."
        raise BadArgument(expected("a model with an adapter", type(inner).__name__, do))
    return inner


def refuse_adapted(model: nn.Module) -> None:
    """An adapter goes onto a plain model, once."""
    if is_adapted(model):
        do = "Merge the one it has first (adapter.merge(model)), or go on training it."
        raise BadArgument(expected("a model without an adapter", f"a {type(model).__name__} with one", do))


def _is_peft_model(model: nn.Module) -> bool:
    # By its class: the model inside keeps an attribute `peft_config`, also when the adapter is off again.
    package = sys.modules.get("peft")
    return package is not None and isinstance(model, package.PeftModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile."""
    inner: nn.Module | None = model
    while inner is not None:
        model = inner
        # Looked up among the submodules: peft hands unknown attributes on to the model inside.
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        inner = model._modules.get("module") if wrapped else model._modules.get("_orig_mod")
    return model
