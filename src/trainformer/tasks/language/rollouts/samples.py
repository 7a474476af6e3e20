"""Rollouts in readable form, for records, loggers and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainformer.tasks.language.rollouts.rollout import Rollout


def sample_of(rollout: Rollout, scores: Mapping[str, float], reward: float, **more: float) -> dict[str, Any]:
    """A rollout as JSON values: prompt and completion as texts, the reward and its parts."""
    found: dict[str, Any] = {
        "prompt": readable(rollout.prompt.prompt),
        "text": readable(rollout.completion),
        "reward": _number(reward),
        "rewards": {name: _number(score) for name, score in scores.items()},
        **{name: _number(value) for name, value in more.items()},
        "tokens": rollout.length,
        "truncated": rollout.is_truncated,
    }
    return found if rollout.environment is None else {**found, "turns": rollout.turns}


def readable(text: str | Sequence[Mapping[str, Any]]) -> str:
    """A text as it is; messages with their roles.

    >>> print(readable([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]))
    user: Hi
    assistant: Hello
    """
    if isinstance(text, str):
        return text
    lines = []
    for message in text:
        calls = "".join(f" [{call['function']['name']}(...)]" for call in message.get("tool_calls") or ())
        lines.append(f"{message.get('role')}: {message.get('content') or ''}{calls}")
    return "\n".join(lines)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
