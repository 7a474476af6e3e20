"""Texts generated for the records of a file or a list, as the commands and `trainformer.load` need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.data.text.generation import load_prompts, read_prompt, row_seeds
from trainformer.models.jax.decoder import Decoder
from trainformer.models.jax.reward import RewardModel


def generated_columns(
    trainer: Any, data: Any, batch_size: int, *, seed: int | Sequence[int] = 0, **options: Any
) -> Iterator[dict[str, Any]]:
    """The prompts of records and the texts generated for them, a batch at a time.

    All records are checked before the first text is generated. Each has a seed of its own, whatever the batches.
    """
    records, template = load_prompts(data), trainer.arguments.prompt_template
    check_count("batch_size", batch_size)
    prompts = [read_prompt(records[index], index, template) for index in range(len(records))]
    seeds = row_seeds(seed, len(prompts))
    has_targets = any(prompt.target is not None for prompt in prompts)
    for first in range(0, len(prompts), batch_size):
        chosen = prompts[first : first + batch_size]
        made = trainer.generate_texts(chosen, seed=seeds[first : first + batch_size], **options)
        index = list(range(first, first + len(chosen)))
        columns: dict[str, Any] = {"index": index, "id": index}
        columns |= {"prompt": [prompt.render(trainer.text) for prompt in chosen], "text": [each.text for each in made]}
        yield columns | ({"target": [prompt.target for prompt in chosen]} if has_targets else {})


def check_language_model(trainer: Any) -> None:
    """Raise if the model of a trainer is no causal language model."""
    model = trainer.model_state.model
    if not isinstance(model, Decoder) or isinstance(model, RewardModel):
        what = "a causal language model of trainformer.models.jax to generate with"
        raise BadArgument(expected(what, type(model).__name__))


def context_length(trainer: Any) -> int | None:
    """The most tokens that the model reads; None if it has no limit."""
    length = getattr(getattr(trainer.model_state.model, "config", None), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None
