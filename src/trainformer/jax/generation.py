"""Text from a decoder on JAX: prompts and conversations to tokens, their stop tokens, and completions back to text.

The loop over tokens is in `models.jax.generation`. Prompts, their seeds and what is returned are as on torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, DataError, check_count, did_you_mean, expected
from trainformer.data.text.generation import Generated, GenerationPrompt, end_of_turn, row_seeds
from trainformer.models.jax.decoder import Decoder
from trainformer.models.jax.generation import generate
from trainformer.models.jax.huggingface import find_folder
from trainformer.utils.files import decode_json

logger = logging.getLogger("trainformer")

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def generate_texts(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[GenerationPrompt],
    max_new_tokens: int = 64,
    seed: int | Sequence[int] = 0,
    *,
    batch_size: int | None = None,
    stop_ids: Sequence[int] | None = None,
    folder: str | Path | None = None,
    dtype: Any = None,
    **options: Any,
) -> list[Generated]:
    """Continue prompts, at most `batch_size` at once. Greedy, unless the `options` of sampling say otherwise.

    `stop_ids` replace the tokens that end a text; by default they are those of `stop_tokens`, to which the `folder` of
    the model may contribute. A text that reaches the end of the model's context ends there, with a warning.
    """
    check_count("max_new_tokens", max_new_tokens)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    options = sampling_options(options)
    rows = [prompt.encode(tokenizer) for prompt in prompts]
    limits = [_limit(len(row), max_new_tokens, model.config.max_position_embeddings) for row in rows]
    seeds = row_seeds(seed, len(rows))
    found: dict[int, Generated] = {}
    for is_chat in (False, True):  # which have different stop tokens
        places = [place for place, prompt in enumerate(prompts) if (prompt.text is None) == is_chat]
        stops = sorted(set(stop_tokens(model, tokenizer, folder, is_chat=is_chat) if stop_ids is None else stop_ids))
        size = batch_size or max(1, len(places))
        for begin in range(0, len(places), size):
            chosen = places[begin : begin + size]
            made = generate(
                model,
                [rows[place] for place in chosen],
                [limits[place] for place in chosen],
                seed=[seeds[place] % 2**63 for place in chosen],  # as on torch, whose integers have a sign
                stop_ids=stops,
                dtype=dtype,
                **options,
            )
            for place, ids, finished in zip(chosen, made.rows(), made.finished.tolist(), strict=True):
                text = tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
                found[place] = Generated(text, len(ids), finished)
                if not finished and limits[place] < max_new_tokens:
                    what = "a text ends after %d tokens, at the end of the model's context: its prompt has %d"
                    logger.warning(what, len(ids), len(rows[place]))
    return [found[place] for place in range(len(rows))]


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `models.jax.generate` from those of transformers' `generate`; others are refused."""
    unknown = next((name for name in given if name not in (*SAMPLING, "do_sample")), None)
    if unknown is not None:
        do = did_you_mean(unknown, [*SAMPLING, "do_sample"]) or f"There are {', '.join(SAMPLING)} and do_sample."
        raise BadArgument(expected("options of sampling", unknown, do))
    options = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    filters = [name for name in options if name != "repetition_penalty"]
    if given.get("do_sample") and options.get("temperature") == 0:
        raise BadArgument(expected("a positive temperature with do_sample=True", 0, "Leave do_sample out."))
    if given.get("do_sample"):
        options.setdefault("temperature", 1.0)
    elif given.get("do_sample") is False and filters and options.get("temperature") != 0:
        raise BadArgument(expected(f"do_sample=True with {filters[0]}", False, "Leave one of them out."))
    return options


def stop_tokens(model: Any, tokenizer: Any, folder: str | Path | None = None, *, is_chat: bool = True) -> list[int]:
    """The tokens that end an answer: of the model's config, of the generation config in its folder, of the tokenizer.

    In a chat, also the end of turn of the chat template.
    """
    given = [getattr(tokenizer, "eos_token_id", None), end_of_turn(tokenizer) if is_chat else None]
    source = getattr(getattr(model, "config", None), "source", "")
    given.append(decode_json(source.encode()).get("eos_token_id") if source else None)
    file = None if folder is None else find_folder(folder) / "generation_config.json"
    if file is not None and file.is_file():
        given.append(decode_json(file.read_bytes()).get("eos_token_id"))
    ids = [token for each in given for token in (each if isinstance(each, list) else [each])]
    return sorted({int(token) for token in ids if token is not None})


def _limit(size: int, wanted: int, context: int) -> int:
    """How many tokens to generate after a prompt of `size` tokens."""
    if size >= context:
        what = f"a prompt of fewer than {context} tokens, which is the context of the model"
        raise DataError(expected(what, f"{size} tokens", "Shorten it."))
    return min(wanted, context - size)
