"""Prefix tuning: trained keys and values in front of every sequence, in each attention layer of a frozen model.

The prefix is passed as a key-value cache, so features that read or rebuild that cache are rejected.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainformer.adapters.base import Adapter, peft, task_type
from trainformer.core.errors import BadArgument, check_choice, check_count, expected
from trainformer.utils.files import decode_json

_INITS = {"random": None, "zero": "zero"}


@dataclass
class PrefixTuning(Adapter):
    """Trained keys and values in front of every sequence (Li & Liang, 2021).

    Args:
        num_virtual_tokens: Length of the prefix. It has ``length * layers * 2 * width`` parameters.
        init: "random" (standard normal), or "zero", which starts closer to the base model: the prefix then receives
            attention but contributes nothing.

    >>> PrefixTuning(10).check(kind="causal_lm", packing=True)
    Traceback (most recent call last):
    ...
    trainformer.core.errors.BadArgument: Expected prefix tuning or packing, received both: ...
    """

    num_virtual_tokens: int = 20
    _: KW_ONLY
    init: str = "random"

    def __post_init__(self) -> None:
        check_count("num_virtual_tokens", self.num_virtual_tokens, do="Pass 20, for instance.")
        check_choice("init", self.init, _INITS)

    def check(
        self,
        *,
        kind: str | None = None,
        packing: bool = False,
        gradient_checkpointing: bool = False,
        model: Any = None,
    ) -> None:
        """Reject packing, gradient checkpointing, and models without external keys and values."""
        super().check(kind=kind)
        if packing:
            raise BadArgument(
                "Expected prefix tuning or packing, received both: packed documents would share one prefix, and the "
                "position ids that separate them are dropped. Pass packing=False, or use LoRA."
            )
        if gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False):
            raise BadArgument(
                "Expected prefix tuning or gradient checkpointing, received both: the prefix is passed as a key-value "
                "cache, which is off while activations are recomputed. Pass gradient_checkpointing=False, or use LoRA."
            )
        if kind in ("clip", "vision") or (isinstance(model, nn.Module) and not hasattr(model, "config")):
            received = type(model).__name__ if isinstance(model, nn.Module) else f"one of kind {kind!r}"
            raise BadArgument(
                f"Expected a model that takes keys and values from outside, received {received}: a prefix is passed "
                "that way. Use LoRA."
            )
        if model is not None and _has_multimodal_positions(model):
            raise BadArgument(
                "Expected a model that counts positions in one dimension, received one of the Qwen-VL family: it "
                "counts time, height and width from the first token on, and a prefix has none of these. Use LoRA."
            )

    def peft_config(self, model: nn.Module, kind: str | None = None) -> Any:
        """The `PrefixTuningConfig` for a kind of model."""
        # peft has no class for masked language models; the one for features passes everything through.
        task = "FEATURE_EXTRACTION" if kind == "masked_lm" else task_type(kind)
        if task is None:
            what = "the kind of the model for prefix tuning"
            do = "Pass kind='causal_lm', 'seq2seq' or 'masked_lm', for instance."
            raise BadArgument(expected(what, f"none that fits {type(model).__name__}", do))
        return peft().PrefixTuningConfig(
            num_virtual_tokens=self.num_virtual_tokens, init_weights=_INITS[self.init], task_type=task
        )

    def merge(self, model: nn.Module) -> nn.Module:
        """Always an error: a prefix is an input, which weights cannot represent."""
        raise BadArgument(
            "Expected an adapter that can be merged into weights, received prefix tuning: a prefix is an input of the "
            "model. Save the adapter and load it beside the model, or train LoRA."
        )


def _has_multimodal_positions(model: Any) -> bool:
    """Whether a model (a module, a configuration, a name or a folder) is one of the Qwen-VL family."""
    if isinstance(model, str | Path):
        file = Path(model).expanduser() / "config.json"
        text = decode_json(file.read_text("utf-8")).get("model_type", "") if file.is_file() else str(model)
        text = text.lower()
        return "qwen" in text and "vl" in text
    config = getattr(model, "config", model)
    kind = str(getattr(config, "model_type", ""))
    text = getattr(config, "text_config", config)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return ("qwen" in kind and "vl" in kind) or (isinstance(rope, dict) and "mrope_section" in rope)
