"""Sample completions with random numbers that belong to each row, not to the batch.

The seed of a row comes with its sample. Token number t of the row is the inverse of the cumulative distribution at the
t-th random number of that seed. So a completion depends on the weights, the prompt and its seed alone: not on the other
rows, the number of processes or what was sampled before, and a resumed run samples the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.core.errors import BadArgument, expected
from trainformer.data.text.sampling import SamplingOptions
from trainformer.models.modes import eval_mode


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    seeds: Tensor,
    options: SamplingOptions,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    drawn: Tensor | None = None,
    synced_gpus: bool = False,
) -> Tensor:
    """Continue prompts (B, T), padded on the left: new tokens (B, N), with `pad_id` after the first stop token.

    `seeds` (B,) are integers, one per row. `drawn` (B,) says how many random numbers of its seed a row has used
    already, in a conversation of several turns. The model is in eval mode meanwhile; global random number generators
    are not used. With `synced_gpus`, all processes run as many steps as the slowest, as sharded models need.
    """
    if seeds.shape != (len(input_ids),):
        raise BadArgument(expected(f"one seed per prompt, ({len(input_ids)},)", tuple(seeds.shape)))
    inner: Any = unwrap_model(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # of a PeftModel
    processors = warpers(options)
    if options.temperature > 0:
        numbers = row_numbers(seeds, options.max_new_tokens, drawn).to(input_ids.device)
        processors.append(InverseSampling(numbers, input_ids.shape[1]))
    with eval_mode(inner), _plain_generation(base, options, stop_ids, pad_id):
        found = inner.generate(
            input_ids=input_ids, attention_mask=attention_mask, logits_processor=processors, synced_gpus=synced_gpus
        )
    return found[:, input_ids.shape[1] :]


def completion_mask(tokens: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Which of the sampled tokens (B, N) belong to the completion: all up to and including the first stop token.

    >>> completion_mask(torch.tensor([[5, 2, 0], [5, 6, 7]]), stop_ids=[2]).long().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    stops = torch.isin(tokens, torch.tensor(list(stop_ids), device=tokens.device, dtype=tokens.dtype))
    return (stops.cumsum(-1) - stops.long()) == 0


def row_numbers(seeds: Tensor, length: int, drawn: Tensor | None = None) -> Tensor:
    """`length` random numbers in [0, 1) per seed, after the `drawn` first ones of it.

    >>> numbers = row_numbers(torch.tensor([1, 2]), 6)
    >>> bool((row_numbers(torch.tensor([2]), 2, torch.tensor([3])) == numbers[1:, 3:5]).all())
    True
    """
    used = torch.zeros_like(seeds) if drawn is None else drawn
    rows = [
        np.random.Generator(np.random.Philox(key=seed % 2**64)).random(begin + length)[begin:]
        for seed, begin in zip(seeds.tolist(), used.tolist(), strict=True)
    ]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, length, dtype=torch.float64)


def warpers(options: SamplingOptions) -> Any:
    """The logits processors of transformers for the options."""
    from transformers.generation import logits_process as made

    found = made.LogitsProcessorList()
    if options.repetition_penalty != 1:
        found.append(made.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.temperature == 0:
        return found
    if options.temperature != 1:
        found.append(made.TemperatureLogitsWarper(options.temperature))
    if options.top_k is not None:
        found.append(made.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        found.append(made.TopPLogitsWarper(options.top_p))
    if options.min_p:
        found.append(made.MinPLogitsWarper(options.min_p))
    return found


class InverseSampling:
    """A logits processor that leaves one token: the inverse of the cumulative distribution at a given number."""

    def __init__(self, numbers: Tensor, prompt_length: int) -> None:
        self.numbers = numbers
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt_length
        token = _inverse(scores, self.numbers[:, step : step + 1])
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def _inverse(scores: Tensor, numbers: Tensor) -> Tensor:
    """The first token (B, 1) whose cumulative probability is greater than the number; never one of probability 0."""
    cumulative = scores.double().softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    last = torch.searchsorted(cumulative, total.contiguous())  # the last token of positive probability
    return torch.minimum(torch.searchsorted(cumulative, (numbers * total).contiguous(), right=True), last)


@contextmanager
def _plain_generation(model: Any, options: SamplingOptions, stop_ids: Sequence[int], pad_id: int) -> Iterator[None]:
    """Replace the generation config of a model: what is not set in a call is taken from it."""
    from transformers import GenerationConfig

    before = model.generation_config
    model.generation_config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        bos_token_id=before.bos_token_id,
    )
    try:
        yield
    finally:
        model.generation_config = before
