"""Rewards of completions: Python functions, reward models, several with weights; and ready ones."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.models.language import ensure_pad_token, load_tokenizer
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.pretrained import load_whole
from trainformer.tasks.language.rollouts.rollout import Rollout

RewardFunction = Callable[..., Sequence[float | None]]
_OWN_COLUMNS = ("prompts", "completions", "completion_ids", "environments", "completion", "prompt")


class Rewards:
    """Scores completions with one or several rewards, each with a name and a weight.

    `rewards` is a function, a reward model (a name, folder or model for sequence classification), ``"file.py:name"`` of
    a function in the working directory, a list of these, or a mapping from names to them. Functions in files are
    imported when the first completion is scored.
    """

    def __init__(self, rewards: Any, weights: Sequence[float] | None = None, tokenizer: Any = None) -> None:
        self._given = _named(rewards)
        self.names = list(self._given)
        self.weights = _checked_weights(weights, self.names)
        self._tokenizer = tokenizer
        self._functions: dict[str, RewardFunction] = {}

    def __bool__(self) -> bool:
        return bool(self.names)

    def __call__(self, rollouts: Sequence[Rollout], device: torch.device) -> Tensor:
        """Rewards (B, number of functions) in float64; NaN where a function returned None."""
        columns = _columns(rollouts)
        scores = [self._score(name, columns, device) for name in self.names]
        return torch.tensor(scores, dtype=torch.float64).reshape(len(self.names), len(rollouts)).T

    def total(self, scores: Tensor) -> Tensor:
        """Weighted sums (B,); NaN where no function gave a reward.

        >>> Rewards([len, sum], weights=[1.0, 2.0]).total(torch.tensor([[1.0, 3.0], [math.nan, 1.0]]))
        tensor([7., 2.])
        """
        total = torch.nansum(scores * torch.tensor(self.weights, dtype=scores.dtype), dim=1)
        return torch.where(scores.isnan().all(1), math.nan, total)

    def _score(self, name: str, columns: Mapping[str, Any], device: torch.device) -> list[float]:
        if name not in self._functions:
            self._functions[name] = self._function(name)
        function = self._functions[name]
        if isinstance(function, RewardModelFunction):
            return function(device=device, **{key: columns[key] for key in ("prompts", "completions", "tools")})
        found = function(**_accepted(name, function, columns))
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return _checked_scores(name, found, len(columns["completions"]))

    def _function(self, name: str) -> RewardFunction:
        given = self._given[name]
        if isinstance(given, str) and is_function_path(given):
            return import_function(given)
        if isinstance(given, str | Path | nn.Module):
            return RewardModelFunction(given, self._tokenizer)
        return given


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


# -- ready functions ---------------------------------------------------------------------------------------


def overlong_penalty(max_length: int, buffer: int) -> RewardFunction:
    """A reward of 0 for short completions that falls to -1 over the last `buffer` of `max_length` tokens (DAPO).

    Longer ones have -1. Tokens of observations count.

    >>> overlong_penalty(max_length=10, buffer=4)(completion_ids=[[1] * 6, [1] * 8, [1] * 12])
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= max_length:
        raise BadArgument(expected(f"buffer from 1 to max_length ({max_length})", buffer))

    def overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = max_length - buffer
        return [-min(1.0, max(0.0, (len(ids) - start) / buffer)) + 0.0 for ids in completion_ids]

    return overlong


# -- functions in files ------------------------------------------------------------------------------------


def is_function_path(text: str) -> bool:
    """Whether a text names a function in a file.

    >>> is_function_path("rewards.py:correct"), is_function_path("org/reward-model")
    (True, False)
    """
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def module_of(text: str) -> str:
    """The module of ``"file.py:name"``, a file below the working directory.

    >>> _ = Path("rewards.py").write_text("")
    >>> module_of("rewards.py:correct")
    'rewards'
    """
    file = text.rpartition(":")[0]
    path = Path(os.path.relpath(file))
    if not path.is_file() or ".." in path.parts:
        raise BadArgument(expected("the file of a function in the working directory", file))
    return ".".join(path.with_suffix("").parts)


def import_function(text: str) -> Any:
    """The function that ``"file.py:name"`` names, if its code may be imported (see docs/security.md)."""
    from trainformer.config.registry import Registry
    from trainformer.config.trust import Importer

    found = Importer(Registry()).find(f"{module_of(text)}:{text.rpartition(':')[2]}")
    if not callable(found):
        raise BadArgument(expected(f"{text!r} to name a function", type(found).__name__))
    return found


# -- arguments and results ---------------------------------------------------------------------------------


def _named(rewards: Any) -> dict[str, Any]:
    if rewards is None:
        return {}
    if isinstance(rewards, Mapping):
        found = {str(name): reward for name, reward in rewards.items()}
    else:
        several = rewards if isinstance(rewards, list | tuple) else [rewards]
        found = {}
        for reward in several:
            name = _name_of(reward)
            number = 1 + sum(other == name or other.startswith(f"{name}#") for other in found)
            found[name if number == 1 else f"{name}#{number}"] = reward
    for name, reward in found.items():
        if isinstance(reward, type) or not (callable(reward) or isinstance(reward, str | Path)):
            what = f"the reward {name!r} to be a function, a reward model, or 'file.py:function'"
            raise BadArgument(expected(what, f"a {type(reward).__name__}: {reward!r}"))
        if isinstance(reward, str) and is_function_path(reward):
            module_of(reward)
    return found


def _name_of(reward: Any) -> str:
    if isinstance(reward, str) and is_function_path(reward):
        return reward.rpartition(":")[2]
    if isinstance(reward, str | Path):
        return Path(reward).name
    return getattr(reward, "__name__", type(reward).__name__)


def _checked_weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    found = list(weights)
    good = all(isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) for w in found)
    if len(found) != len(names) or not good:
        what = f"one number in reward_weights for each of {', '.join(names) or 'no rewards'}"
        raise BadArgument(expected(what, found))
    return [float(weight) for weight in found]


def _columns(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What reward functions may ask for, one item per completion."""
    names = {name: None for rollout in rollouts for name in rollout.prompt.columns}
    columns = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in names if name not in _OWN_COLUMNS
    }
    return {
        "tools": [rollout.prompt.tools for rollout in rollouts],
        **columns,
        "prompts": [rollout.prompt.prompt for rollout in rollouts],
        "completions": [rollout.completion for rollout in rollouts],
        "completion_ids": [list(rollout.tokens) for rollout in rollouts],
        "environments": [rollout.environment for rollout in rollouts],
    }


def _accepted(name: str, function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function takes; all of them if it has **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(columns)
    wanted = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    missing = [p.name for p in wanted if p.name not in columns and p.default is p.empty]
    if missing:
        what = f"the arguments of the reward {name!r} to be columns of the data ({', '.join(columns)})"
        raise DataError(expected(what, ", ".join(missing)))
    return {p.name: columns[p.name] for p in wanted if p.name in columns}


async def _awaited(found: Any) -> Any:
    return await found


def _checked_scores(name: str, found: Any, count: int) -> list[float]:
    if hasattr(found, "tolist"):
        found = found.tolist()
    if not isinstance(found, list | tuple) or len(found) != count:
        received = f"{len(found)} values" if isinstance(found, list | tuple) else type(found).__name__
        raise DataError(expected(f"the reward {name!r} to return a list of {count} numbers or None", received))
    scores = []
    for place, value in enumerate(found):
        value = value.item() if hasattr(value, "item") else value
        if value is None:
            scores.append(math.nan)
        elif isinstance(value, int | float) and math.isfinite(value):  # booleans too
            scores.append(float(value))
        else:
            what = f"the reward {name!r} to return finite numbers or None"
            raise DataError(expected(what, f"{value!r} for completion {place}"))
    return scores
