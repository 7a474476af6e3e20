"""Generators: what samples completions. The default is the trained model itself, with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.data.text.collate import pad
from trainformer.data.text.sampling import SamplingOptions
from trainformer.tasks.language.rollouts.sampling import sample_tokens


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

    def update_weights(self, model: nn.Module) -> None:
        """Use the weights of a model from now on. Called before the first sample, and when they have changed."""
        ...


class TransformersGenerator:
    """Samples from the trained model, `batch_size` prompts at a time (None: all at once)."""

    def __init__(self, pad_id: int, batch_size: int | None = None) -> None:
        self.pad_id = pad_id
        self.batch_size = batch_size
        self.model: nn.Module | None = None

    def update_weights(self, model: nn.Module) -> None:
        """Take the model itself."""
        self.model = model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        stop_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> Generated:
        """Completions of prompts, padded on the left."""
        assert self.model is not None, "update_weights() comes first"
        sharded = is_sharded(self.model)
        size = len(prompts) if sharded or self.batch_size is None else self.batch_size
        device = next(self.model.parameters()).device
        tokens: list[list[int]] = []
        for begin in range(0, len(prompts), size):
            part = slice(begin, begin + size)
            batch = pad([{"input_ids": list(ids)} for ids in prompts[part]], self.pad_id, side="left", multiple_of=1)
            found = sample_tokens(
                self.model,
                batch["input_ids"].to(device),
                batch["attention_mask"].to(device),
                torch.tensor(list(seeds[part])),
                options,
                stop_ids=stop_ids,
                pad_id=self.pad_id,
                drawn=torch.tensor(list(drawn[part])),
                synced_gpus=sharded,
            )
            tokens += found.tolist()
        return Generated(tokens)


def is_sharded(model: nn.Module) -> bool:
    """Whether blocks of a model are gathered in each forward pass, so that all processes must make as many."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def checked_generator(generator: Any) -> Any:
    """Reject what does not generate."""
    if generator is not None and not isinstance(generator, Generator):
        what = "generator to be None, or an object with generate(...) and update_weights(model)"
        raise BadArgument(expected(what, type(generator).__name__, "VLLMServer and VLLMEngine are such."))
    return generator
