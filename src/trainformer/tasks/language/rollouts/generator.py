"""What a generator is: it samples completions. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trainformer.models.generation import SamplingOptions


class Generated(NamedTuple):
    """Tokens of each completion, and their log probabilities if another engine than the trained model sampled them."""

    tokens: list[list[int]]
    log_probs: list[list[float]] | None = None


@runtime_checkable
class Generator(Protocol):
    """Samples completions of tokenised prompts, with the weights that it was given last."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        stop_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> Generated:
        """One completion per prompt, up to and including a stop token.

        `seeds` has one number per prompt; `drawn` says how many tokens were sampled with it before, in earlier turns.
        """
        ...

    def update_weights(self, model: Any) -> None:
        """Use the weights of a model from now on. Called before the first sample, and when they have changed."""
        ...
