"""Texts that a trained language model generates: prompts as tokens, batches with left padding, ends of texts.

Owns what the commands and `trainformer.load` need beyond `models.jax.generate`: conversations rendered by the chat
template, the tokens that end an answer, the context of the model, and prompts read from files.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.data.text.generation import Generated, GenerationPrompt, end_of_turn, is_conversation, read_prompt
from trainformer.data.text.sources import load_text
from trainformer.models.jax.decoder import generate

_LENGTH_MULTIPLE = 32  # prompts are padded to it: each length is compiled once


def load_prompts(data: Any) -> Any:
    """Records to generate for: from a path, where each line of a text file is a prompt, or a list of them."""
    if isinstance(data, str | Path):
        return load_text(data, split="line" if Path(data).suffix == ".txt" else None)
    if isinstance(data, Mapping) or is_conversation(data):
        return [data]
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(expected("a list of prompts, conversations or records, or the path of a file", type(data)))
    return data


def generated_columns(trainer: Any, data: Any, batch_size: int, **options: Any) -> Iterator[dict[str, Any]]:
    """The prompts of records and the texts generated for them, a batch at a time.

    All records are checked before the first text is generated.
    """
    records, template = load_prompts(data), trainer.arguments.prompt_template
    check_count("batch_size", batch_size)
    prompts = [read_prompt(records[index], index, template) for index in range(len(records))]
    has_targets = any(prompt.target is not None for prompt in prompts)
    for first in range(0, len(prompts), batch_size):
        chosen = prompts[first : first + batch_size]
        made = trainer.generate_texts(chosen, **options)
        index = list(range(first, first + len(chosen)))
        columns: dict[str, Any] = {"index": index, "id": index}
        columns |= {"prompt": [prompt.render(trainer.text) for prompt in chosen], "text": [each.text for each in made]}
        yield columns | ({"target": [prompt.target for prompt in chosen]} if has_targets else {})


def answer(
    trainer: Any, prompts: Sequence[GenerationPrompt], max_new_tokens: int = 64, **options: Any
) -> list[Generated]:
    """Continue texts and answer conversations with the weights of a trainer. `options` are those of `generate`."""
    check_count("max_new_tokens", max_new_tokens)
    if trainer.text is None:
        raise BadArgument(expected("a tokenizer (processing_class) to generate with", None))
    check_language_model(trainer)
    options = supported_options(options)
    rows = [prompt.encode(trainer.text) for prompt in prompts]
    context = context_length(trainer)
    longest = max(map(len, rows))
    if context is not None and longest >= context:
        what = f"a prompt of fewer than {context} tokens, which is the context of the model"
        raise DataError(expected(what, f"{longest} tokens", "Shorten it."))
    limit = max_new_tokens if context is None else min(max_new_tokens, context - longest)
    room = longest if context is None else context - limit
    length = min(-(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, room)
    ids, mask = np.zeros((2, len(rows), length), np.int32)
    for number, row in enumerate(rows):
        ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
    with trainer._run.backend.run_context():
        model = trainer.model_state.model
        model.eval()
        tokens = generate(model, jnp.asarray(ids), limit, attention_mask=jnp.asarray(mask), **options)
        found = np.asarray(tokens)[:, length:].tolist()
    ends = {trainer.text.eos_token_id}
    turn_end = end_of_turn(trainer.text)
    return [
        _text(trainer.text, row, ends | {turn_end} if prompt.text is None else ends, max_new_tokens)
        for prompt, row in zip(prompts, found, strict=True)
    ]


def check_language_model(trainer: Any) -> None:
    """Raise if the model of a trainer is no causal language model."""
    model = trainer.model_state.model
    if not hasattr(model, "hidden_states") or not hasattr(model, "head"):
        what = "a causal language model of trainformer.models.jax to generate with"
        raise BadArgument(expected(what, type(model).__name__))


def context_length(trainer: Any) -> int | None:
    """The most tokens that the model reads; None if it has no limit."""
    length = getattr(getattr(trainer.model_state.model, "config", None), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def supported_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate`. One that it does not have is refused, unless it says what happens anyway."""
    known = [name for name in inspect.signature(generate).parameters if name not in ("model", "input_ids")]
    kept = {name: value for name, value in options.items() if value is not None and name in known}
    anyway = {"temperature": 0, "seed": options.get("seed"), "do_sample": False}
    for name, value in options.items():
        if name not in known and value is not None and not (name in anyway and value == anyway[name]):
            do = "Texts of JAX models are the most likely ones (greedy): leave it out."
            raise BadArgument(expected(f"no {name} for a model on JAX", value, do))
    return kept


def _text(tokenizer: Any, row: list[int], ends: set[int | None], wanted: int) -> Generated:
    end = next((place for place, token in enumerate(row) if token in ends), None)
    text = tokenizer.decode(row[:end], skip_special_tokens=True)
    return Generated(text, len(row) if end is None else end + 1, end is not None)
