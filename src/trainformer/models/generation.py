"""What generation on torch and on JAX share: options, random numbers, and the tokens that end an output.

Never imports torch.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, check_count, expected

#: Options that sample; without any of them, the most likely tokens are taken.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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


@dataclass(frozen=True)
class SamplingOptions:
    """How completions are sampled; the names are those of transformers' `GenerationConfig`.

    Nothing is taken from the model's own generation config but its stop tokens: a repetition penalty there, for
    example, would sample from another distribution than the one that is trained. ``temperature=0`` is greedy.

    >>> SamplingOptions(max_new_tokens=16).temperature
    1.0
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        for name in ("temperature", "top_p", "repetition_penalty", "min_p"):
            value = getattr(self, name)
            may_be_none = name == "min_p" and value is None
            if not may_be_none and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
                raise BadArgument(expected(f"{name} to be a number", value))
        if not 0 <= self.temperature < float("inf"):
            raise BadArgument(expected("temperature to be 0 (greedy) or more", self.temperature))
        if not 0 < self.top_p <= 1:
            raise BadArgument(expected("top_p to be greater than 0 and at most 1", self.top_p))
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise BadArgument(expected("min_p to be from 0 to 1, or None", self.min_p))
        if not 0 < self.repetition_penalty < float("inf"):
            raise BadArgument(expected("repetition_penalty to be positive; 1 is none", self.repetition_penalty))


def random_numbers(seeds: Sequence[int], length: int, drawn: Sequence[int] | None = None) -> np.ndarray:
    """`length` random numbers in [0, 1) of each seed (rows, length), after the `drawn` first ones of it.

    >>> numbers = random_numbers([1, 2], 6)
    >>> bool((random_numbers([2], 2, [3]) == numbers[1:, 3:5]).all())
    True
    """
    used = [0] * len(seeds) if drawn is None else drawn
    rows = [
        np.random.Generator(np.random.Philox(key=seed % 2**64)).random(begin + length)[begin:]
        for seed, begin in zip(seeds, used, strict=True)
    ]
    return np.stack(rows) if rows else np.empty((0, length))
