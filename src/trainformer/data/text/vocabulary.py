"""A tokenizer of one's own, for models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.data.text.schemas import text_value

_BYTES = 256
_END = "<|endoftext|>"


def train_tokenizer(data: Iterable[Any], vocabulary: int, *, special: Sequence[str] = (), end: str = _END) -> Any:
    """Byte-level BPE, as GPT-2 and most later models have it, trained on texts or on records with a `text`.

    It can write any text, so there is no unknown token. `vocabulary` is the number of tokens in all; `end` is the token
    that ends a text, and pads; `special` are further tokens that are never split.

    >>> tokenizer = train_tokenizer(["the cat sat on the mat"] * 4, vocabulary=262)
    >>> len(tokenizer), tokenizer.decode(tokenizer("the mat 🎉")["input_ids"])
    (262, 'the mat 🎉')
    """
    tokenizers = require("tokenizers", "text", "to train a tokenizer")
    transformers = require("transformers", "text", "to train a tokenizer")
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
    plain.train_from_iterator(_texts(data), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token=end, eos_token=end, pad_token=end, additional_special_tokens=list(special)
    )


def _texts(data: Iterable[Any]) -> Iterator[str]:
    for record in data:
        yield text_value(record["text"] if isinstance(record, Mapping) else record, "text")
