"""Which tokens end the output of a language model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids of all tokens that end an answer: those of the model's generation config, and the tokenizer's.

    Chat models often have several, e.g. one for the end of a turn and one for the end of the text.

    >>> from types import SimpleNamespace as Some
    >>> stop_token_ids(Some(generation_config=Some(eos_token_id=[7, 2])), Some(eos_token_id=2))
    [2, 7]
    """
    config = getattr(model, "generation_config", None)
    found = [getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    ids = [token for given in found for token in (given if isinstance(given, Iterable) else [given])]
    return sorted({int(token) for token in ids if token is not None})
