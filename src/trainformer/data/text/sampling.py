"""`SamplingOptions`: how completions are sampled, whatever computes them."""

from __future__ import annotations

from dataclasses import dataclass

from trainformer.core.errors import BadArgument, check_count, expected

#: Options that sample; without any of them, the most likely tokens are taken.
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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
        if not 0 <= self.temperature < float("inf"):
            raise BadArgument(expected("temperature to be 0 (greedy) or more", self.temperature))
        if not 0 < self.top_p <= 1:
            raise BadArgument(expected("top_p to be greater than 0 and at most 1", self.top_p))
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise BadArgument(expected("min_p to be from 0 to 1, or None", self.min_p))
        if not 0 < self.repetition_penalty < float("inf"):
            raise BadArgument(expected("repetition_penalty to be positive; 1 is none", self.repetition_penalty))
