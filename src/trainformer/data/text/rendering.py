"""Rendering conversations with a tokenizer's chat template, whole, in part, or with another answer in a turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.text.fields import expected_value
from trainformer.data.text.messages import decoded, without_none
from trainformer.utils.files import decode_json

Message = Mapping[str, Any]
Span = tuple[int, int]

ASSISTANT_ROLES = frozenset({"assistant", "model"})
# Stand in for an answer to find its position: two, since an answer may start like one. Templates do not change them.
PLACEHOLDERS = ("zq7StandInForOneTurn7qz", "Yk4AnotherOneForTurn4kY")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Conversation:
    """One conversation and the ways to render it."""

    def __init__(self, tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> None:
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise DataError(expected("'messages' to be a list of {'role': ..., 'content': ...}", messages))
        if not tokenizer.chat_template:
            what = "a tokenizer with a chat template for data with 'messages'"
            do = "Use the tokenizer of an instruction-tuned model, or set tokenizer.chat_template."
            raise BadArgument(expected(what, f"{type(tokenizer).__name__} without one", do))
        self.tokenizer = tokenizer
        self.messages = [for_template(message) for message in messages]
        self.options = options

    def assistant_turns(self, since: int) -> list[int]:
        """Indices of the assistant's messages from `since` on."""
        return [i for i in range(since, len(self.messages)) if self.messages[i]["role"] in ASSISTANT_ROLES]

    def trained_turns(self, since: int) -> list[int]:
        """Those of them that are trained on: a message with the weight 0 is not, as in OpenAI's format."""
        return [turn for turn in self.assistant_turns(since) if _weight(self.messages[turn])]

    def render(self) -> str:
        """The whole conversation as text."""
        return self._tolerant(lambda: self._render(self.messages))

    def try_render(self, count: int, prompt: bool = False) -> str | None:
        """The first messages as text, or None if the template refuses them: some require a user turn."""
        return self.try_messages(self.messages[:count], prompt)

    def try_messages(self, messages: list[Any], prompt: bool = False) -> str | None:
        """Other messages as text, or None if the template refuses them."""
        try:
            return self._render(messages, prompt)
        except Exception:
            return None

    def varying(self, text: str, turn: int, count: int, prompt: bool = False) -> Span | None:
        """Where the text of the first messages depends on the content of one of them: the first and last position."""
        first, after = len(text), len(text)
        for placeholder in PLACEHOLDERS:
            replaced = [*self.messages[:count]]
            replaced[turn] = _replaced(replaced[turn], placeholder)
            other = self.try_messages(replaced, prompt)
            if other is None or placeholder not in other:
                return None
            first = min(first, common_prefix(text, other))
            after = min(after, common_prefix(text[::-1], other[::-1]))
        return first, max(first, len(text) - after)

    def contents(self, text: str) -> list[Span | None]:
        """Where the content of each message is in the text, found with one rendering; None where it is not known.

        All plain contents are replaced at once. The text must consist of what is between the placeholders and of the
        contents themselves, perhaps trimmed.
        """
        found: list[Span | None] = [None] * len(self.messages)
        plain = [place for place, message in enumerate(self.messages) if _is_plain(message)]
        names = {place: f"zq{place}StandIn{place}qz" for place in plain}
        rest = self.try_messages([{**m, "content": names[i]} if i in names else m for i, m in enumerate(self.messages)])
        if rest is None:
            return found
        between = []
        for place in plain:
            before, _, rest = rest.partition(names[place])
            between.append(before)
        between.append(rest)
        spans, position = found.copy(), len(between[0])
        if not text.startswith(between[0]):
            return found
        for place, after in zip(plain, between[1:], strict=True):
            content = self.messages[place]["content"]
            forms = (content, content.strip(), content.lstrip(), content.rstrip())
            size = next((len(c) for c in forms if text.startswith(c + after, position)), None)
            if size is None:
                return found
            spans[place] = (position, position + size)
            position += size + len(after)
        return spans if position == len(text) else found

    def renders_calls(self, text: str, turn: int) -> bool:
        """Whether the text depends on every tool call of a message. Some templates render only the first."""
        message = self.messages[turn]
        for number, call in enumerate(message["tool_calls"]):
            name = call["function"].get("name") if isinstance(call, Mapping) and "function" in call else None
            if name is not None and str(name) not in text:
                return False
            if number > 0:
                calls = [*message["tool_calls"]]
                calls[number] = _replaced({"tool_calls": [call]}, PLACEHOLDERS[0])["tool_calls"][0]
                others = [*self.messages]
                others[turn] = {**message, "tool_calls": calls}
                if self.try_messages(others) == text:
                    return False
        return True

    def render_marked(self) -> tuple[str, list[Span]]:
        """The whole conversation as text, and the character spans between the template's markers.

        The token mask of `apply_chat_template` is not used: if a span ends in whitespace that is no token of its own,
        that mask covers everything after it.
        """
        render = require("transformers.utils.chat_template_utils", "text", "for chat templates").render_jinja_template
        options = {**self.tokenizer.special_tokens_map, **self.options}
        template = self.tokenizer.get_chat_template(tools=self.options.get("tools"))
        marked = {"chat_template": template, "return_assistant_tokens_mask": True}
        texts, spans = self._tolerant(lambda: render([self.messages], **marked, **options))
        return texts[0], [tuple(span) for span in spans[0]]

    def _tolerant(self, render: Callable[[], Any]) -> Any:
        """Render. Some templates (DeepSeek) need the arguments of tool calls as JSON text, most others as a mapping."""
        try:
            try:
                return render()
            except TypeError:
                self.messages = [_with_json_arguments(message) for message in self.messages]
                return render()
        except Exception as error:
            raise DataError(
                f"The chat template cannot render this conversation: {type(error).__name__}: {error}"
            ) from error

    def _render(self, messages: list[Any], prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **self.options
        )


def _weight(message: Message) -> int:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(expected_value("the weight of a message to be 0 (not trained on) or 1", weight))
    return int(weight)


def _is_plain(message: Message) -> bool:
    """Whether the content is all that a message says."""
    content = message.get("content")
    is_text = isinstance(content, str) and bool(content.strip()) and "<think>" not in content
    return is_text and "tool_calls" not in message and not any(key in message for key in THOUGHTS)


def for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it, with the arguments of tool calls as mappings.

    HF datasets fill in None for keys that only other messages have, and templates test whether a key exists.

    >>> call = {"name": "add", "arguments": '{"a": 1}'}
    >>> for_template({"role": "assistant", "content": None, "name": None, "tool_calls": [call]})["tool_calls"]
    [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "tool_calls" not in kept:
        return kept
    calls = decoded(kept.pop("tool_calls"), "tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(expected_value("a list of tool calls in 'tool_calls'", calls))
    return {**kept, "tool_calls": [_tool_call(call) for call in calls]} if calls else kept


def _tool_call(call: Any) -> Any:
    call = decoded(call, "a tool call") if isinstance(call, str) and call.lstrip().startswith("{") else call
    if not isinstance(call, Mapping):
        return call
    call = without_none(call)
    if "function" not in call and "name" in call:  # as the model writes it
        outer = {key: call.pop(key) for key in ("id", "type") if key in call}
        call = {"type": "function", **outer, "function": call}
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except json.JSONDecodeError:  # code, for instance
            arguments = function["arguments"]
    # Arguments that are no JSON object stay the text that they are.
    arguments = arguments if isinstance(arguments, Mapping) else function["arguments"]
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _with_json_arguments(message: Message) -> dict[str, Any]:
    return _with_arguments(
        message, lambda value: json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value
    )


def _replaced(message: Message, placeholder: str) -> dict[str, Any]:
    """A message with another answer, thought and arguments, of the same kind."""
    parts = message.get("content")
    texts: dict[str, Any] = {key: placeholder for key in ("content", *THOUGHTS) if isinstance(message.get(key), str)}
    texts = {key: text for key, text in texts.items() if message[key]}
    if isinstance(parts, list):  # of a multimodal model
        is_text = [isinstance(part, Mapping) and part.get("type") == "text" for part in parts]
        texts["content"] = [
            {**part, "text": placeholder} if flag else part for part, flag in zip(parts, is_text, strict=True)
        ]
    replaced = _with_arguments(
        {**message, **texts},
        lambda value: dict.fromkeys(value or [placeholder], placeholder) if isinstance(value, Mapping) else placeholder,
    )
    return {**replaced, "content": placeholder} if replaced == message else replaced


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A message whose tool calls have other arguments."""
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        else call
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix.

    >>> common_prefix("<end>", "<end>\\n<user>")
    5
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
