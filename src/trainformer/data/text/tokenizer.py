"""Tokenizers: opening one without torch, training one from scratch, comparing two, and the bytes per token.

`AutoTokenizer` reads the model's configuration first, which imports torch. `PreTrainedTokenizerFast` needs neither: it
reads `tokenizer.json`, which every fast tokenizer is saved in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.text.schemas import require_text

logger = logging.getLogger("trainformer")


def open_tokenizer(source: Any) -> Any:
    """The tokenizer of a folder or name, from its `tokenizer.json`; a tokenizer is returned unchanged.

    A padding token is not needed: batches are padded with any token (`token_batch`).
    """
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return source
    if not isinstance(source, str | Path) or not str(source):
        raise BadArgument(expected("a tokenizer, or the folder or name of one", source))
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        do = "Save it as a fast tokenizer: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        names = sorted(path.name for path in folder.iterdir())[:20]
        raise BadArgument(expected(f"a tokenizer.json in '{folder}'", names, do))
    transformers = _transformers("to load tokenizers")
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder) if folder.is_dir() else str(source))
    except Exception as error:  # from the hub, the network, or an invalid file: many types
        siblings = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        close = did_you_mean(folder.name, siblings)
        raise BadArgument(expected(f"a tokenizer called '{source}', or a folder with one", reason, close)) from error


def _transformers(why: str) -> ModuleType:
    """Import transformers. Without torch it would warn that only tokenizers work: that is enough for JAX."""
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if find_spec("torch") is not None or quiet in os.environ:
        return require("transformers", "text", why)
    os.environ[quiet] = "1"
    try:
        return require("transformers", "text", why)
    finally:
        del os.environ[quiet]


_BYTES = 256
_END = "<|endoftext|>"


def train_tokenizer(data: Iterable[Any], vocabulary: int, *, special: Sequence[str] = (), end: str = _END) -> Any:
    """Train a byte-level BPE tokenizer, as in GPT-2, on texts or records with a `text`.

    It encodes any text, so there is no unknown token. `vocabulary` is the total number of tokens; `end` is the EOS and
    padding token; `special` are more tokens that are never split.

    >>> tokenizer = train_tokenizer(["the cat sat on the mat"] * 4, vocabulary=262)
    >>> len(tokenizer), tokenizer.decode(tokenizer("the mat 🎉")["input_ids"])
    (262, 'the mat 🎉')
    """
    tokenizers = require("tokenizers", "text", "to train a tokenizer")
    transformers = _transformers("to train a tokenizer")
    least = _BYTES + 1 + len(special)
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or vocabulary < least:
        what = f"a vocabulary of at least {least} tokens (all bytes, and special ones)"
        raise BadArgument(expected(what, vocabulary, "1024 is little, 32768 is usual."))
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    plain.pre_tokenizer = byte_level(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end, *special],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    texts = (require_text(record["text"] if isinstance(record, Mapping) else record, "text") for record in data)
    plain.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token=end, eos_token=end, pad_token=end, additional_special_tokens=list(special)
    )


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a single byte in SentencePiece vocabularies
_SPACE = "\u2581"  # and a space


def token_bytes(tokenizer: Any) -> np.ndarray:
    """UTF-8 bytes of each token; 0 for special tokens. Makes losses of different vocabularies comparable.

    The sum over the tokens of a text is its length, up to spaces the tokenizer adds or drops.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        is_byte_level = hasattr(tokenizer, "byte_encoder")
    else:
        state = json.loads(backend.to_str())
        is_byte_level = "ByteLevel" in json.dumps([state.get("decoder"), state.get("pre_tokenizer")])
    # In a byte-level vocabulary, as in GPT-2, each character stands for a byte.
    width = len if is_byte_level else _by_characters
    special = set(tokenizer.all_special_ids)
    added = {index: str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    sizes = np.zeros(len(tokens), dtype=np.int64)
    for index, token in enumerate(tokens):
        if index in special or token is None:
            continue
        sizes[index] = len(added[index].encode()) if index in added else width(token)
    return sizes


def _by_characters(token: str) -> int:
    """Bytes of a SentencePiece or WordPiece token.

    >>> [_by_characters(token) for token in ("\u2581the", "<0x0A>", "##ing", "ü")]
    [4, 1, 3, 2]
    """
    if _BYTE.fullmatch(token):
        return 1
    return len(token.removeprefix("##").replace(_SPACE, " ").encode("utf-8", "surrogatepass"))


def check_same_tokenizer(student: Any, teacher: Any) -> None:
    """Refuse two tokenizers in which an id stands for different tokens.

    One may have more tokens than the other. Added tokens may have other names, since models of one family often use
    reserved ones.
    """
    own, other = _by_id(student), _by_id(teacher)
    shared = own.keys() & other.keys()
    added = set(student.get_added_vocab().values()) & set(teacher.get_added_vocab().values())
    differ = sorted(i for i in shared if own[i] != other[i])
    plain = [i for i in differ if i not in added]
    if plain or not shared:
        example = f"; token {plain[0]} is {own[plain[0]]!r} for the student and {other[plain[0]]!r} for the teacher"
        raise BadArgument(
            "Expected a teacher with the tokenizer of the student, received another one: "
            f"{len(plain):,} of {len(shared):,} tokens differ{example if plain else ''}. Distillation compares "
            "probabilities token by token: choose two models of one family."
        )
    if differ:
        logger.warning("%d added tokens have other names in the teacher: %s", len(differ), differ[:8])


def check_stored_tokenizer(digest: str, tokenizer: Any) -> None:
    """Refuse a tokenizer other than that of stored teacher logits, known by its `vocabulary_digest`."""
    if digest != vocabulary_digest(tokenizer):
        do = "Use the tokenizer of the teacher, or store the logits again."
        raise BadArgument(expected("the tokenizer that the teacher logits were stored with", "another one", do))


def vocabulary_digest(tokenizer: Any) -> str:
    """Identifies the tokens of a tokenizer and their ids."""
    text = "\0".join(f"{i} {token}" for i, token in sorted(_by_id(tokenizer).items()))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}
