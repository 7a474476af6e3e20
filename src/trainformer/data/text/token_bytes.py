"""How many bytes of text a token stands for, by which losses of models with different vocabularies compare."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how vocabularies of SentencePiece write a single byte
_SPACE = "\u2581"  # and a space


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Bytes (UTF-8) that each token of a tokenizer adds to a text; 0 for special tokens, which are no text.

    The sum over the tokens of a text is its length, up to spaces that the tokenizer itself adds or drops.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # Of a byte-level vocabulary each character is a byte; of the others each is itself.
    width = _by_bytes if _is_byte_level(tokenizer) else _by_characters
    special = set(tokenizer.all_special_ids)
    added = {place: str(token) for place, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    sizes = np.zeros(len(tokens), dtype=np.int64)
    for place, token in enumerate(tokens):
        if place in special or token is None:
            continue
        sizes[place] = len(added[place].encode()) if place in added else width(token)
    return sizes


def _by_bytes(token: str) -> int:
    return len(token)


def _by_characters(token: str) -> int:
    """Bytes of a token as SentencePiece or WordPiece write it.

    >>> [_by_characters(token) for token in ("\u2581the", "<0x0A>", "##ing", "ü")]
    [4, 1, 3, 2]
    """
    if _BYTE.fullmatch(token):
        return 1
    return len(token.removeprefix("##").replace(_SPACE, " ").encode("utf-8", "surrogatepass"))


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary is that of GPT-2 and its heirs, which write every byte as one printable character."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hasattr(tokenizer, "byte_encoder")
    state = json.loads(backend.to_str())
    return "ByteLevel" in json.dumps([state.get("decoder"), state.get("pre_tokenizer")])
