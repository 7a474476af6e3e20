"""Load models and tokenizers of transformers: by hub name, local folder or configuration."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.models.auto_classes import AUTO_CLASSES

logger = logging.getLogger("trainformer")

# The auto class of transformers for each kind of model.

# Kinds whose head is new if the model was saved for another purpose, and the head of that purpose is not used.
_NEW_HEADS = ("sequence_classification", "token_classification", "embedding")

_ENCODERS = (*_NEW_HEADS, "masked_lm")

ModelSource = Any  # a hub name, a folder, a configuration, or a model


def load_model(source: ModelSource, kind: str, *, dtype: torch.dtype | None = None, **options: Any) -> nn.Module:
    """A model of a kind (`causal_lm`, `seq2seq`, ...), pretrained or, from a configuration, with random weights.

    Weights are loaded in float32 unless `dtype` is given, whatever dtype they were saved in. Weights that the model has
    and its files do not, or the other way round, are an error, except for the head of a classifier or an embedding
    model that was saved for another purpose, for the other heads of an encoder, and for buffers that older versions of
    transformers saved.
    """
    if isinstance(source, nn.Module):
        return source
    transformers = _transformers()
    auto = getattr(transformers, AUTO_CLASSES[kind])
    dtype = dtype or torch.float32
    options = {"trust_remote_code": False, **options}  # without it, transformers asks on a terminal
    if isinstance(source, transformers.PretrainedConfig):
        return auto.from_config(source, dtype=dtype, **options)
    name = _checked_name(source, "model_name")
    try:
        model, report = auto.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # anything that the hub or a file may raise
        raise BadArgument(_not_found("a model", name, kind, error)) from error
    _check_loaded(model, kind, report, name)
    return model


def _check_loaded(model: Any, kind: str, report: Mapping[str, Any], name: str) -> None:
    """Reject weights that transformers initialised at random or left out, with no more than a warning."""
    saved_as = (getattr(model.config, "architectures", None) or [None])[0]
    expects_head = kind in _NEW_HEADS and saved_as != type(model).__name__
    # An adapter of a model has to save these: they are in no file of its base.
    model.new_weights = sorted(report["missing_keys"]) if kind != "embedding" else []
    problems = []
    missing = {key for key in report["missing_keys"] if not (expects_head and _is_head(model, key))}
    unused = {key for key in report["unexpected_keys"] if not _is_buffer(model, key)}
    if expects_head or kind in _ENCODERS:  # saved for several purposes, as BERT is
        unused = {key for key in unused if not _is_head(model, key)}
    for what, keys in (("missing", missing), ("unused", unused)):
        if odd := sorted(keys):
            problems.append(f"{len(odd)} {what} ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})")
    if problems:
        do = f"Is it a model for {kind.replace('_', ' ')}? If this is intended, load the model yourself and pass it."
        what = f"files under {name!r} with exactly the weights of {type(model).__name__}"
        raise BadArgument(expected(what, "; ".join(problems), do))


def _is_head(model: Any, key: str) -> bool:
    """Whether a weight is outside of the encoder, or one of its poolers, which not every purpose has."""
    encoder = getattr(model, "base_model_prefix", "")
    inside = key.startswith(f"{encoder}.") if encoder and hasattr(model, encoder) else key in model.state_dict()
    return not inside or ".pooler." in f".{key}"


def _is_buffer(model: Any, key: str) -> bool:
    """Whether a key is that of a buffer that the model computes by itself, and older files contain."""
    prefix = getattr(model, "base_model_prefix", "")
    names = {name for name, _ in model.named_buffers()}
    return key in names or f"{prefix}.{key}" in names or key.endswith(".masked_bias")


def load_tokenizer(source: ModelSource, **options: Any) -> Any:
    """The tokenizer of a name or folder; a tokenizer is returned unchanged."""
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return source
    name = _checked_name(source, "tokenizer")
    try:
        return _transformers().AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False, **options})
    except Exception as error:
        raise BadArgument(_not_found("a tokenizer", name, None, error)) from error


def ensure_pad_token(tokenizer: Any) -> None:
    """Set a missing padding token to the end-of-text token. Padding is masked by length, so any token works."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise BadArgument("Expected a tokenizer with an end-of-text or padding token, received one with neither.")
        tokenizer.pad_token = tokenizer.eos_token


def output_head(model: nn.Module) -> nn.Linear | None:
    """The output layer, if it is a linear layer whose output is the logits.

    None for models that cap or scale their logits afterwards (Gemma 2, Cohere, Granite).
    """
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1, 1.0):
            return None
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if type(head) is nn.Linear else None


class OutputStates:
    """Forward pass that returns the last hidden states and the output layer, or else the logits.

    From hidden states a loss can be computed without materialising all logits. The first call verifies that the output
    layer reproduces the logits: some models do more in between. ``chunk_tokens=0`` always returns logits.
    """

    def __init__(self, chunk_tokens: int | None = None) -> None:
        if chunk_tokens is not None and chunk_tokens < 0:
            raise BadArgument(expected("chunk_tokens to be at least 0, or None", chunk_tokens))
        self.chunk_tokens = chunk_tokens or None
        self.keeps_router_logits = False  # of a mixture of experts, in `router_logits` after each call
        self.router_logits: tuple[torch.Tensor, ...] | None = None
        self._usable: bool | None = False if chunk_tokens == 0 else None

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, nn.Linear | None]:
        """(hidden states, layer), or (logits, None)."""
        head = output_head(model) if self._usable is not False else None
        options: dict[str, Any] = {"use_cache": False} | (
            {"output_router_logits": True} if self.keeps_router_logits else {}
        )
        if head is not None:
            # Computes logits of one position, and returns the hidden states of all.
            options |= {"output_hidden_states": True, "logits_to_keep": 1}
        with declare_packing(packed="position_ids" in inputs):
            output = model(**inputs, **options)
        self.router_logits = output.router_logits if self.keeps_router_logits else None
        if head is None:
            return output.logits, None
        hidden = output.hidden_states[-1]
        if self._usable is None:
            self._usable = self._fits(head, hidden, output.logits)
            if not self._usable:
                logger.info("the output layer does not reproduce the logits: computing all logits at once")
                return self(model, inputs)
        return hidden, head

    @staticmethod
    @torch.no_grad()
    def _fits(head: nn.Linear, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        made = head(hidden.detach()[:, -1:])  # a view of what needs gradients breaks the hooks of FlopCounterMode
        return made.shape == logits.shape and torch.allclose(made.float(), logits.float(), atol=1e-2)


@contextmanager
def declare_packing(packed: bool) -> Iterator[None]:
    """Tell transformers whether sequences are packed from several documents, as `position_ids` show.

    Without an attention mask it would inspect the positions, a device sync in every step.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    found = getattr(masking, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masking.find_packed_sequence_indices = _document_ids if packed else _single_document
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = found


def _document_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """The index of each token's document: positions increase by 1 within a document.

    >>> _document_ids(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [[0, 0, 0, 1, 1]]
    """
    begins = torch.diff(position_ids, dim=-1) != 1
    return torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)


def _single_document(position_ids: torch.Tensor) -> None:
    return None


def _checked_name(source: Any, argument: str) -> str:
    if not isinstance(source, str | Path):
        what = f"{argument} to be a hub name, a folder, a configuration or an object"
        raise BadArgument(expected(what, type(source).__name__))
    name = os.path.expanduser(str(source))
    looks_local = name.startswith((".", "/")) or name.count("/") > 1
    if looks_local and not os.path.isdir(name):
        raise BadArgument(expected(f"{argument} to be a folder that exists, or the name of a model on the hub", name))
    return name


def _not_found(what: str, name: str, kind: str | None, error: Exception) -> str:
    purpose = "" if kind is None else f" for {kind.replace('_', ' ')}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return (
        f"Expected to find {what}{purpose} under {name!r}, received {type(error).__name__}: {first} "
        "Pass the name of a model on the Hugging Face Hub (which needs a connection the first time), or a folder with "
        "config.json and weights."
    )


def _transformers() -> ModuleType:
    return require("transformers", "text", "for language models")
