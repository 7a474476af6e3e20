"""Models and tokenizers of transformers: by hub name, local folder, configuration, or as they are.

Owns every call that loads one, and the errors when that fails. What is trained, and on what, is for the tasks.
"""

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

logger = logging.getLogger("trainformer")

# The class of transformers that loads a model for a purpose.
_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "embedding": "AutoModel",
    "clip": "AutoModel",
    "vlm": "AutoModelForImageTextToText",
}

Source = Any  # a hub name, a folder, a configuration, or a model


def load_model(source: Source, kind: str, *, dtype: torch.dtype | None = None, **options: Any) -> nn.Module:
    """A model for a purpose (`causal_lm`, `seq2seq`, ...), pretrained or, from a configuration, with random weights.

    Weights are loaded in fp32 unless `dtype` says otherwise, whatever they were saved in: the optimizer needs them.
    """
    if isinstance(source, nn.Module):
        return source
    transformers = _transformers()
    auto = getattr(transformers, _CLASSES[kind])
    dtype = dtype or torch.float32
    if isinstance(source, transformers.PretrainedConfig):
        return auto.from_config(source, dtype=dtype, **options)
    name = _checked_name(source, "model_name")
    try:
        return auto.from_pretrained(name, dtype=dtype, **options)
    except Exception as error:  # whatever a hub, a file or a missing class may raise
        raise BadArgument(_not_found("a model", name, kind, error)) from error


def load_tokenizer(source: Source, **options: Any) -> Any:
    """The tokenizer of a name or folder; one that is a tokenizer already is returned as it is."""
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return source
    name = _checked_name(source, "tokenizer")
    try:
        return _transformers().AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:
        raise BadArgument(_not_found("a tokenizer", name, None, error)) from error


def ensure_pad_token(tokenizer: Any) -> None:
    """Give a tokenizer without a padding token one to pad with. Padding is masked by length, so any will do."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise BadArgument("Expected a tokenizer with an end-of-text or padding token, received one with neither.")
        tokenizer.pad_token = tokenizer.eos_token


def output_head(model: nn.Module) -> nn.Linear | None:
    """The layer that makes logits of hidden states, if it is a linear layer and the logits are nothing but its output.

    Models that cap or scale their logits afterwards (Gemma 2, Cohere, Granite) are left alone: None.
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
    """What a model says of each token: hidden states with the layer that makes logits of them, or else the logits.

    From hidden states a loss can be computed without all logits at once. Whether they are what the layer takes is tried
    at the first call: some models do more in between. ``chunked=False`` always gives logits.
    """

    def __init__(self, chunked: bool = True) -> None:
        self._usable: bool | None = None if chunked else False

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Any, nn.Linear | None]:
        """(hidden states, layer), or (logits, None)."""
        head = output_head(model) if self._usable is not False else None
        with told_documents(packed="position_ids" in inputs):
            if head is None:
                return model(**inputs, use_cache=False).logits, None
            # One row of logits is made for nothing; the hidden states of the others are what is asked for.
            output = model(**inputs, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        hidden = output.hidden_states[-1]
        if self._usable is None:
            self._usable = self._fits(head, hidden, output.logits)
            if not self._usable:
                logger.info("the logits are not the output layer's alone: they are computed all at once")
                return self(model, inputs)
        return hidden, head

    @staticmethod
    @torch.no_grad()
    def _fits(head: nn.Linear, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
        made = head(hidden[:, -1:])
        return made.shape == logits.shape and torch.allclose(made.float(), logits.float(), atol=1e-2)


@contextmanager
def told_documents(packed: bool) -> Iterator[None]:
    """Tell transformers in this block whether sequences hold several documents, told apart by `position_ids`.

    Without an attention mask it would look at the positions and wait for the device, in every step.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    found = getattr(masking, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masking.find_packed_sequence_indices = _documents if packed else _one_document
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = found


def _documents(position_ids: torch.Tensor) -> torch.Tensor:
    """The number of its document for each token: positions go on by 1 inside of one.

    >>> _documents(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
    [[0, 0, 0, 1, 1]]
    """
    begins = torch.diff(position_ids, dim=-1) != 1
    return torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)


def _one_document(position_ids: torch.Tensor) -> None:
    return None


def _checked_name(source: Any, argument: str) -> str:
    if not isinstance(source, str | Path):
        raise BadArgument(
            expected(f"{argument} to be a hub name, a folder, a configuration or an object", type(source).__name__)
        )
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
