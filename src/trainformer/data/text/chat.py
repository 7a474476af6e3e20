"""Conversations as tokens, with a mask of the assistant's tokens.

A chat template with `{% generation %}` markers says which tokens are the assistant's. With any other template the
conversation is rendered and the boundaries of every turn are found in the text. The text is tokenised once, as a whole,
so the tokens are those of `apply_chat_template`, without a second BOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require

Message = Mapping[str, Any]

ASSISTANT_ROLES = frozenset({"assistant", "model"})
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Replaces the answer of one turn to find its position. No template trims or splits it.
_PLACEHOLDER = "zq7StandInForOneTurn7qz"


# The tokens of a conversation, and the mask of those to train on.
Conversation = tuple[np.ndarray, np.ndarray]


class ChatRenderer:
    """Applies a tokenizer's chat template and finds the assistant's turns, each with its end-of-turn token.

    With `{% generation %}` markers the template decides. Only an EOS directly after a marked turn is added, since a
    model that was never trained on it never stops. Without markers, a turn starts where the generation prompt ends and
    includes the end-of-turn token (or all the template writes for it, if there is none): the conversation is rendered
    up to the turn and with it. Some templates render a turn differently once others follow, for instance without its
    reasoning: then a placeholder for the answer shows its position.

    A token belongs to the turn it ends in.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Some vocabularies have whitespace as added tokens, which do not end a turn.
        added = (str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values())
        self._ends = tuple(token for token in added if token.strip())

    def encode(
        self,
        messages: Sequence[Message],
        *,
        since: int | None = 0,
        tools: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Tokens of a conversation, with the assistant's turns from message `since` on as the mask (None: all tokens).

        `tools` and `options` are passed to the template.
        """
        chat = _Chat(self.tokenizer, list(messages), {**(options or {}), "tools": tools})
        if since is None:
            ids, _ = locate(self.tokenizer, chat.render(), [], special=False)
            return ids, np.ones(len(ids), dtype=bool)
        has_markers = _MARKER.search(self.tokenizer.get_chat_template(tools=tools))
        if has_markers and getattr(self.tokenizer, "is_fast", False):  # only fast tokenizers have the offsets
            return self._by_markers(chat, since)
        text = chat.render()
        boundaries = [self._boundaries(chat, text, turn) for turn in chat.assistant_turns(since)]
        cuts = [cut for begin, end in boundaries for cut in (begin, self._trim(text, begin, end))]
        return self._supervised(text, cuts)

    def _by_markers(self, chat: _Chat, since: int) -> Conversation:
        text, spans = chat.render_marked()
        ids, mask = self._supervised(text, [cut for span in spans for cut in span])
        eos = self.tokenizer.eos_token_id
        if eos is not None:
            mask[1:] |= mask[:-1] & (ids[1:] == eos)
        turns = chat.assistant_turns(since)
        if turns != chat.assistant_turns(0):
            start = self._boundaries(chat, text, turns[0])[0] if turns else len(text)
            _, (first,) = locate(self.tokenizer, text, [start], special=False)
            mask[:first] = False
        return ids, mask

    def _supervised(self, text: str, cuts: Sequence[int]) -> Conversation:
        """The tokens of a text, masked between the first and second position, the third and fourth, ..."""
        ids, places = locate(self.tokenizer, text, cuts, special=False)
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in zip(places[::2], places[1::2], strict=True):
            mask[begin:end] = True
        return ids, mask

    def _boundaries(self, chat: _Chat, text: str, turn: int) -> tuple[int, int]:
        """The characters of a turn, from after its header to the end of all the template writes for it."""
        before = chat.try_render(turn, prompt=True)
        through = chat.try_render(turn + 1)
        begin = len(before) if before is not None and text.startswith(before) else None
        end = len(through) if through is not None and text.startswith(through) else None
        if begin is None or end is None or end < begin:
            content, after = self._find_by_placeholder(chat, text, turn)
            begin = content if begin is None or begin > after else begin
            end = after
        return begin, end

    def _find_by_placeholder(self, chat: _Chat, text: str, turn: int) -> tuple[int, int]:
        """The same, found with a placeholder: the text before and after it is the text before and after the answer."""
        parts = chat.around_placeholder(turn, len(chat.messages))
        if parts is None or not (text.startswith(parts[0]) and text.endswith(parts[1])):
            raise DataError(
                f"The chat template renders message {turn + 1} differently depending on what follows, and its answer "
                "cannot be found in the text: which tokens to train on is unknown. Put {% generation %} and "
                "{% endgeneration %} around the assistant's answer in tokenizer.chat_template, or pass train_on='all'."
            )
        begin, end = len(parts[0]), len(text) - len(parts[1])
        # What follows the answer with and without later turns closes the turn: the end-of-turn token.
        alone = chat.around_placeholder(turn, turn + 1)
        closing = 0 if alone is None else common_prefix(alone[1], parts[1])
        return begin, max(begin, end) + closing

    def _trim(self, text: str, begin: int, end: int) -> int:
        """The end of a turn without the line break that many templates write after the end-of-turn token."""
        turn = text[begin:end].rstrip()
        return begin + len(turn) if self._ends and turn.endswith(self._ends) else end


class _Chat:
    """One conversation and the ways to render it."""

    def __init__(self, tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> None:
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise DataError(expected("'messages' to be a list of {'role': ..., 'content': ...}", messages))
        if not tokenizer.chat_template:
            what = "a tokenizer with a chat template for data with 'messages'"
            do = "Use the tokenizer of an instruction-tuned model, or set tokenizer.chat_template."
            raise BadArgument(expected(what, f"{type(tokenizer).__name__} without one", do))
        self.tokenizer = tokenizer
        # HF datasets fill in None for keys that only other messages have, and templates test whether a key exists.
        self.messages: list[Message] = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]
        self.options = options

    def assistant_turns(self, since: int) -> list[int]:
        """Indices of the assistant's messages from `since` on."""
        return [i for i in range(since, len(self.messages)) if self.messages[i]["role"] in ASSISTANT_ROLES]

    def render(self) -> str:
        """The whole conversation as text."""
        try:
            return self._render(self.messages)
        except Exception as error:
            raise _not_rendered(error) from error

    def try_render(self, count: int, prompt: bool = False) -> str | None:
        """The first messages as text, or None if the template refuses them: some require a user turn."""
        try:
            return self._render(self.messages[:count], prompt)
        except Exception:
            return None

    def around_placeholder(self, turn: int, count: int) -> tuple[str, str] | None:
        """What the template writes before and after the content of one of the first messages."""
        if not isinstance(self.messages[turn].get("content"), str):
            return None
        replaced = [*self.messages[:count]]
        replaced[turn] = {**replaced[turn], "content": _PLACEHOLDER}
        try:
            before, *after = self._render(replaced).split(_PLACEHOLDER)
        except Exception:
            return None
        return (before, after[0]) if len(after) == 1 else None

    def render_marked(self) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation as text, and the character spans between the template's markers.

        The token mask of `apply_chat_template` is not used: if a span ends in whitespace that is no token of its own,
        that mask covers everything after it.
        """
        render = require("transformers.utils.chat_template_utils", "text", "for chat templates").render_jinja_template
        options = {**self.tokenizer.special_tokens_map, **self.options}
        template = self.tokenizer.get_chat_template(tools=self.options.get("tools"))
        try:
            texts, spans = render([self.messages], chat_template=template, return_assistant_tokens_mask=True, **options)
        except Exception as error:
            raise _not_rendered(error) from error
        return texts[0], [tuple(span) for span in spans[0]]

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **self.options
        )


def _not_rendered(error: Exception) -> DataError:
    return DataError(f"The chat template cannot render this conversation: {type(error).__name__}: {error}")


def locate(tokenizer: Any, text: str, cuts: Sequence[int], *, special: bool) -> tuple[np.ndarray, list[int]]:
    """The tokens of a text, and for each character position the number of tokens that end at or before it.

    `special` lets the tokenizer add its special tokens (BOS, ...). With a tokenizer without offsets, the text up to the
    position is tokenised, and the common prefix with the tokens of the whole text counts.
    """
    fast = bool(getattr(tokenizer, "is_fast", False)) and len(cuts) > 0
    encoded = tokenizer(
        text,
        add_special_tokens=special,
        return_offsets_mapping=fast,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    if fast:
        # Added special tokens have offsets (0, 0), even at the end of the text.
        ends = np.maximum.accumulate(np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1])
        return ids, np.searchsorted(ends, np.asarray(cuts), side="right").tolist()
    parts = [tokenizer(text[:cut], add_special_tokens=special, verbose=False)["input_ids"] for cut in cuts]
    return ids, [common_prefix(ids.tolist(), part) for part in parts]


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The length of the common prefix.

    >>> common_prefix("<end>", "<end>\\n<user>")
    5
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
