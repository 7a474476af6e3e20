"""Environments: the other side of a conversation of several turns, and tools as one of them."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.text.prompts import Messages, Prompt

_PLACEHOLDER = "zq7StandInForOneTurn7qz"
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@runtime_checkable
class Environment(Protocol):
    """Answers the model. One instance plays one rollout.

    An observation is a text (a message of the user, or, after a prompt that is a text, a continuation of it), a message
    or a list of messages. Its tokens are read by the model and not trained on.
    """

    def reset(self, prompt: str | Messages, columns: dict[str, Any]) -> Any:
        """Begin with a prompt and the other columns of its record.

        Returns None, a text to append to the prompt, or messages to use instead of it.
        """
        ...

    def step(self, completion: str) -> tuple[Any, float | None]:
        """Answer what the model wrote: (observation, reward). The rollout ends if the observation is None."""
        ...


def environment_factory(environment: Any) -> Callable[[], Environment]:
    """A function that makes an environment for each rollout, from a class, a function or an instance (copied)."""
    if isinstance(environment, type) or not isinstance(environment, Environment):
        if not callable(environment):
            what = "environment to be a class or an object with reset(prompt, columns) and step(completion)"
            raise BadArgument(expected(what, type(environment).__name__))
        missing = [n for n in ("reset", "step") if not hasattr(environment, n)] if isinstance(environment, type) else []
        if missing:
            do = f"Define {' and '.join(missing)}."
            raise BadArgument(expected("environment to have reset and step", environment.__name__, do))
        return environment
    return lambda: copy.deepcopy(environment)


class ToolEnvironment:
    """Runs the tools that the model calls, and shows it the results. The rollout ends with an answer without calls.

    `tools` are Python functions with type hints and docstrings, from which transformers makes the schemas for the chat
    template. Calls are read by the tokenizer's response parser if it has one, else in the form
    ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. What a tool raises is shown to the model as an error.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first.
    ...         b: The second.
    ...     '''
    ...     return a + b
    >>> tools = ToolEnvironment([add])
    >>> tools.step('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    ([{'role': 'tool', 'name': 'add', 'content': '3'}], None)
    >>> tools.step("It is 3.")
    (None, None)
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], tokenizer: Any = None) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        self.tokenizer = tokenizer
        self.calls = self.failures = 0

    def reset(self, prompt: str | Messages, columns: dict[str, Any]) -> None:
        """Nothing to show at the start: the prompt has the schemas of the tools."""

    def step(self, completion: str) -> tuple[Messages | None, None]:
        """Run the calls in a completion."""
        found = [self._run(call) for call in tool_calls(completion, self.tokenizer)]
        return found or None, None

    def message(self, completion: str) -> dict[str, Any]:
        """The calls of a completion, for its message."""
        calls = tool_calls(completion, self.tokenizer)
        return {"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {}

    def _run(self, call: Mapping[str, Any]) -> dict[str, Any]:
        self.calls += 1
        name = str(call.get("name"))
        try:
            if name not in self.tools:
                raise KeyError(f"there is no tool {name!r}; the tools are {', '.join(self.tools)}")
            content: Any = self.tools[name](**call["arguments"])
        except Exception as error:  # the model's mistake, which it is shown
            self.failures += 1
            content = {"error": f"{type(error).__name__}: {error}"}
        return {"role": "tool", "name": name, "content": content if isinstance(content, str) else _text(content)}


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The schemas of Python functions, for chat templates."""
    made = []
    utils = require("transformers.utils", "text", "for tools")
    for tool in tools:
        if not inspect.isroutine(tool):
            what = "tools to be Python functions with type hints and a docstring"
            raise BadArgument(expected(what, type(tool).__name__))
        try:
            made.append(utils.get_json_schema(tool))
        except Exception as error:
            raise BadArgument(
                f"Expected a type hint and a description of each argument of the tool {tool.__name__!r}, received: "
                f"{error}"
            ) from error
    return made


def tool_calls(completion: str, tokenizer: Any = None) -> list[dict[str, Any]]:
    """The tool calls in what a model wrote: name and arguments of each; malformed ones are no calls."""
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    if parses:
        try:
            parsed = tokenizer.parse_response(completion)
        except Exception:  # what a model writes need not be valid
            parsed = None
        calls = [call.get("function", call) for call in (parsed or {}).get("tool_calls") or []]
    else:
        calls = [_decoded(text) for text in _TOOL_CALL.findall(completion)]
    return [
        {"name": call["name"], "arguments": dict(call["arguments"])}
        for call in calls
        if isinstance(call, Mapping) and "name" in call and isinstance(call.get("arguments"), Mapping)
    ]


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def as_messages(observation: Any) -> Messages:
    """An observation as messages: a text is one of the user."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return [dict(observation)] if isinstance(observation, dict) else [dict(message) for message in observation]


def observation_ids(
    tokenizer: Any, prompt: Prompt, observation: Any, stop_ids: Sequence[int], tools: Any = None
) -> list[int]:
    """The tokens of an observation, from the end of the model's turn to the beginning of its next one.

    What the model wrote is never rendered again: a template might change it.
    """
    if not prompt.is_chat:
        if not isinstance(observation, str):
            raise DataError(expected("observations that are texts, as the prompts", type(observation).__name__))
        return list(tokenizer(observation, add_special_tokens=False)["input_ids"])
    messages = as_messages(observation)
    answer: dict[str, Any] = {"role": "assistant", "content": _PLACEHOLDER}
    names = [message.get("name", "tool") for message in messages if message.get("role") == "tool"]
    if names:
        arguments = {_PLACEHOLDER: _PLACEHOLDER}
        answer["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": arguments}} for n in names]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "question"}, answer, *messages],
        tools=prompt.tools or tools,
        tokenize=False,
        add_generation_prompt=True,
        **prompt.options,
    )
    rest = text.rpartition(_PLACEHOLDER)[2] if _PLACEHOLDER in text else ""
    ids = list(tokenizer(rest, add_special_tokens=False)["input_ids"]) if rest else []
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if end is None:
        raise DataError(
            "Expected the chat template to end a turn of the assistant with a stop token, so that an observation can "
            f"follow it, received {rest[:80]!r} after the turn. Pass the end of a turn as stop_tokens=[...]."
        )
    return ids[end + 1 :]
