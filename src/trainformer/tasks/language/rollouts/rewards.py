"""Rewards of completions on torch: Python functions, and reward models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.models.language import ensure_pad_token, load_tokenizer
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.pretrained import load_whole
from trainformer.tasks.language.rollouts.reward_functions import (
    RewardFunction,
    RewardFunctions,
    import_function,
    is_function_path,
    module_of,
    overlong_penalty,
)
from trainformer.tasks.language.rollouts.rollout import Rollout

__all__ = [
    "RewardFunction",
    "RewardModelFunction",
    "Rewards",
    "import_function",
    "is_function_path",
    "module_of",
    "overlong_penalty",
]


class Rewards(RewardFunctions):
    """`RewardFunctions`, one or several of which may be reward models.

    A reward model is a name, folder or model for sequence classification.
    """

    def __init__(self, rewards: Any, weights: Sequence[float] | None = None, tokenizer: Any = None) -> None:
        super().__init__(rewards, weights)
        self._tokenizer = tokenizer

    def __call__(self, rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
        """Rewards (B, number of functions) in float64; NaN where a function returned None."""
        return torch.from_numpy(self.scores(rollouts, device=device))

    def total(self, scores: Tensor) -> Tensor:
        """Weighted sums (B,); NaN where no function gave a reward.

        >>> Rewards([len, sum], weights=[1.0, 2.0]).total(torch.tensor([[1.0, 3.0], [math.nan, 1.0]]))
        tensor([7., 2.])
        """
        total = torch.nansum(scores * torch.tensor(self.weights, dtype=scores.dtype), dim=1)
        return torch.where(scores.isnan().all(1), math.nan, total)

    def _call(self, name: str, function: RewardFunction, columns: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
        if isinstance(function, RewardModelFunction):
            chosen = {key: columns[key] for key in ("prompts", "completions", "tools")}
            return function(device=context["device"], **chosen)
        return super()._call(name, function, columns, context)

    def _function(self, name: str) -> RewardFunction:
        given = self.given[name]
        if isinstance(given, str | Path | nn.Module) and not (isinstance(given, str) and is_function_path(given)):
            return RewardModelFunction(given, self._tokenizer)
        return super()._function(name)


class RewardModelFunction:
    """The score of a sequence classification model with one output, for prompt and completion together."""

    def __init__(self, model: Any, tokenizer: Any = None, batch_size: int = 16) -> None:
        self.model: Any = _load_reward_model(model).requires_grad_(False).eval()
        if getattr(self.model.config, "num_labels", 1) != 1:
            what = "a reward model with one output (num_labels=1)"
            raise BadArgument(expected(what, f"{self.model.config.num_labels} outputs"))
        self.tokenizer = load_tokenizer(model) if isinstance(model, str | Path) else tokenizer
        if self.tokenizer is None:
            raise BadArgument(expected("a reward model by its folder, with its tokenizer", type(model).__name__))
        ensure_pad_token(self.tokenizer)
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id  # where the model finds the last token
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: Any, completions: Any, tools: Any, device: torch.device) -> list[float]:
        """Scores of the completions."""
        model = self.model.to(device)
        texts = [self._text(*row) for row in zip(prompts, completions, tools, strict=True)]
        scores: list[float] = []
        for begin in range(0, len(texts), self.batch_size):
            chosen = texts[begin : begin + self.batch_size]
            inputs = self.tokenizer(
                chosen, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
            )
            names = ("input_ids", "attention_mask")
            with eval_mode(model):
                found = model(**{name: inputs[name].to(device) for name in names}).logits[:, 0]
            scores += found.double().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any, tools: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self.tokenizer.apply_chat_template([*prompt, *completion], tools=tools, tokenize=False)


def _load_reward_model(source: Any) -> Any:
    return load_whole(source, "sequence_classification")
