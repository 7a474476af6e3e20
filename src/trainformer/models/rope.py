"""Longer sequences for models with rotary position embeddings (RoPE): scaling of the rotary frequencies.

Owns the settings that a configuration of transformers gets, and how many positions a configuration allows for.
transformers computes the frequencies, and reads them from the saved config again.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.core.optional import require

logger = logging.getLogger("trainformer")

# Options that transformers requires besides the factor: those of Llama 3.1.
_REQUIRED: dict[str, dict[str, float]] = {
    "linear": {},
    "dynamic": {},
    "yarn": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_ORIGINAL = "original_max_position_embeddings"
_CHANGED = ("rope_parameters", "max_position_embeddings", "head_dim")
_KEEPS_POSITIONS = "dynamic"  # it scales with the length of a sequence beyond the configured positions


def check_rope_scaling(scaling: Any, factor: Any) -> None:
    """Reject settings that no model takes."""
    if scaling is None:
        if factor is not None:
            raise BadArgument(expected("rope_scaling with rope_factor", None, "Pass rope_scaling='yarn'."))
        return
    given = scaling
    if isinstance(scaling, Mapping):
        given = scaling.get("rope_type", scaling.get("type"))
        if factor is not None and "factor" in scaling:
            raise BadArgument(expected("the factor once", f"rope_factor={factor} and {dict(scaling)}"))
        factor = scaling.get("factor", factor)
    if not isinstance(given, str):
        names = ", ".join(_REQUIRED)
        raise BadArgument(expected(f"rope_scaling to be one of {names}, or a dict with a 'rope_type'", scaling))
    check_choice("rope_scaling", given, _REQUIRED)
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is not None and not (number and math.isfinite(factor) and factor > 1):
        do = "It is the new number of positions divided by that of the model."
        raise BadArgument(expected("rope_factor to be a number above 1", factor, do))


def scaled_source(source: Any, scaling: Any, factor: float | None, length: int) -> tuple[Any, dict[str, Any]]:
    """A model source with scaled RoPE, and options for `load_model`: names and folders keep their own config.

    Without a factor, it is what `length` positions need.
    """
    transformers = require("transformers", "text", "for language models")
    if isinstance(source, nn.Module):
        do = "Pass its name, folder or config, or set rope_parameters in the config before you build it."
        raise BadArgument(expected("a model that is still to be loaded with rope_scaling", type(source).__name__, do))
    if isinstance(source, transformers.PretrainedConfig):
        return scale_rope(source, scaling, factor, length), {}
    config = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    scaled = scale_rope(config, scaling, factor, length)
    return source, {name: value for name in _CHANGED if (value := getattr(scaled, name, None)) is not None}


def keep_overrides(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Note with which rotary settings a model was loaded that its files do not have: an adapter saves them."""
    if kept := {name: options[name] for name in _CHANGED if name in options}:
        model.config_overrides = kept  # type: ignore[assignment]


def scale_rope(config: Any, scaling: str | Mapping[str, Any], factor: float | None, length: int) -> Any:
    """A copy of a configuration with scaled RoPE.

    `scaling` is a type, or a dict of options as in transformers' `rope_parameters`.

    >>> from transformers import LlamaConfig
    >>> config = scale_rope(LlamaConfig(max_position_embeddings=1024), "yarn", None, 4096)
    >>> config.rope_parameters["factor"], config.max_position_embeddings
    (4.0, 4096)
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    rope = _parameters(text) if text is config else None
    if rope is None:
        do = "Leave rope_scaling out, and keep max_length within the positions of the model."
        received = f"{type(config).__name__}, which has none, several kinds, or a model inside"
        raise BadArgument(expected("a model with one kind of rotary position embeddings", received, do))
    if rope.get("rope_type") == "linear":  # its config does not say how many positions it had before
        do = "Leave rope_scaling out to keep it, or pass the model before it was scaled."
        raise BadArgument(expected("a model without linear RoPE scaling", f"a factor of {rope.get('factor')}", do))
    options = dict(scaling) if isinstance(scaling, Mapping) else {"rope_type": scaling}
    kind = options.pop("type", None) or options["rope_type"]
    positions = int(options.get(_ORIGINAL) or rope.get(_ORIGINAL) or text.max_position_embeddings)
    chosen: Any = options.pop("factor", factor)
    if chosen is None:
        chosen = length / positions
        if chosen <= 1:
            do = "Pass a longer max_length or rope_factor, or leave rope_scaling out."
            raise BadArgument(expected(f"max_length beyond the {positions:,} positions of the model", length, do))
    if rope.get("rope_type", "default") != "default":
        logger.info("rope_scaling=%r replaces the scaling %r of the model", kind, rope["rope_type"])
    kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    text.rope_parameters = {**kept, **_REQUIRED[kind], **options, "rope_type": kind, "factor": float(chosen)}
    if kind in ("yarn", "llama3"):
        text.rope_parameters[_ORIGINAL] = positions
    text.max_position_embeddings = positions if kind == _KEEPS_POSITIONS else math.ceil(positions * chosen)
    if getattr(text, "head_dim", 0) is None:  # as in Mixtral's config; transformers multiplies with it
        text.head_dim = text.hidden_size // text.num_attention_heads
    try:
        text.validate_rope()
    except (KeyError, ValueError) as error:
        raise BadArgument(expected(f"options that transformers takes for {kind!r}", options, str(error))) from error
    return config


def rope_positions(model: nn.Module) -> int | None:
    """The longest sequence that a model with rotary embeddings was configured for; None for other models."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    rope = None if text is None else _parameters(text)
    positions = getattr(text, "max_position_embeddings", None)
    if rope is None or not isinstance(positions, int):
        return None
    original = rope.get(_ORIGINAL) or (positions if rope.get("rope_type") == _KEEPS_POSITIONS else 0)
    return max(positions, round(original * (rope.get("factor") or 1)))


def _parameters(text: Any) -> dict[str, Any] | None:
    """The rotary parameters of a text configuration; None without any, or with several (one for each kind of layer)."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return None
    return rope
