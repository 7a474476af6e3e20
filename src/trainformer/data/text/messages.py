"""Messages of a conversation, and what a record passes to the chat template with them: checked, with standard names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainformer.core.errors import DataError, did_you_mean, expected
from trainformer.data.text.fields import expected_value, require_key, require_text
from trainformer.utils.files import decode_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES = {role: role for role in ROLES} | {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "function_call"), "assistant"),
    "observation": "tool",
}
# Arguments of `apply_chat_template` that are not options of the template.
_RESERVED = {
    *("tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template", "conversation"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
}


def check_messages(raw: Sequence[Any], of: str = "") -> list[dict[str, Any]]:
    """Messages with standard roles and texts as contents; an error names the message."""
    checked = []
    for number, message in enumerate(raw):
        try:
            checked.append(_message(message))
        except DataError as error:
            raise DataError(f"message {number}{of}: {error}") from None
    return checked


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise DataError(expected_value("a message with a role and a content", raw))
    names = ("from", "value") if raw.get("from") is not None and raw.get("role") is None else ("role", "content")
    given = require_key(raw, names[0])
    role = _ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        close = did_you_mean(str(given), _ROLES) or f"Known roles: {', '.join(_ROLES)}."
        raise DataError(expected_value("a known role", given, close))
    # HF datasets fill in None for keys that only other messages have.
    rest = {key: value for key, value in raw.items() if key not in names and value is not None}
    content = raw.get(names[1])
    if isinstance(rest.get("function_call"), Mapping) and "tool_calls" not in rest:  # what OpenAI called it before
        rest["tool_calls"] = [{"type": "function", "function": rest.pop("function_call")}]
    if content is None and "tool_calls" in rest:
        content = ""  # a message that only calls a tool has no text
    if isinstance(content, Sequence) and not isinstance(content, str) and content:
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise DataError(expected_value("parts of the type text", part, "Images need a multimodal task."))
        content = "".join(part["text"] for part in content)
    return {"role": role, "content": require_text(content, names[1]), **rest}


def with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Messages that start with a system prompt, which they may have already.

    >>> with_system([{"role": "user", "content": "Hi"}], "Be short.")[0]
    {'role': 'system', 'content': 'Be short.'}
    """
    first = messages[0] if messages else {"role": "none"}
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": require_text(system, "system")}, *messages]
    if first["content"] != require_text(system, "system"):
        what = "one system prompt, in the field 'system' or in the messages"
        raise DataError(expected_value(what, {"system": system, "messages": first["content"]}, "Remove one of them."))
    return messages


def template_fields(tools: Any, options: Any) -> dict[str, Any]:
    """What a record passes to the chat template: `tools` and `chat_template_kwargs`, checked; without empty ones.

    >>> template_fields('[{"name": "clock"}]', {"enable_thinking": False, "documents": None})
    {'tools': [{'name': 'clock'}], 'chat_template_kwargs': {'enable_thinking': False}}
    """
    fields = {"tools": check_tools(tools), "chat_template_kwargs": check_template_options(options)}
    return {name: value for name, value in fields.items() if value}


def check_tools(tools: Any) -> list[Any] | None:
    """A list of tools, which tables store as JSON text; None if there are none."""
    tools = decoded(tools, "a list of tools")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(expected_value("a list of tools", tools))
    return without_none(list(tools))


def check_template_options(options: Any) -> dict[str, Any]:
    """The options of a chat template in a record, without those that are None."""
    options = decoded(options, "chat_template_kwargs")
    if options and not isinstance(options, Mapping):
        raise DataError(expected_value("a mapping in 'chat_template_kwargs'", options))
    if reserved := sorted(_RESERVED & (options or {}).keys()):
        what = "options of the chat template, such as enable_thinking, in 'chat_template_kwargs'"
        raise DataError(expected(what, reserved, "Remove them: they are set by the task."))
    return without_none(dict(options)) if options else {}


def decoded(value: Any, what: str) -> Any:
    """A nested value, which tables store as JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return decode_json(value)
    except json.JSONDecodeError as error:
        raise DataError(f"Expected {what} as JSON, received text that is not JSON: {error}.") from error


def without_none(value: Any) -> Any:
    """A nested value without keys that are None: HF datasets fill in those that only other records have.

    >>> without_none([{"a": 1, "b": None, "c": [{"d": None}]}])
    [{'a': 1, 'c': [{}]}]
    """
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list | tuple) else value
