"""Conversations as tokens, and which of the tokens the assistant wrote.

Owns the search for the assistant's turns. A chat template with `{% generation %}` markers says itself what they are. Of
any other the text is rendered, and the borders of every turn are found in it; the text is then tokenised once, as a
whole, so that the tokens are those of `apply_chat_template`, never with a second BOS. What happens to a conversation
that is too long is left to `encode`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require

Message = Mapping[str, Any]

ASSISTANT_ROLES = frozenset({"assistant", "model"})
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Stands for the answer of one turn while its place is looked for. No template trims or splits it.
_STAND_IN = "zq7StandInForOneTurn7qz"


class Conversation(NamedTuple):
    """The tokens of a conversation, and which of them are trained on."""

    input_ids: np.ndarray
    supervised: np.ndarray


class ChatRenderer:
    """Applies a tokenizer's chat template and finds the assistant's turns: what it says, and the end-of-turn token.

    With markers, the template decides; only an EOS that directly follows a marked turn is added, since a model that was
    never trained on it never stops. Without, a turn begins where the template's generation prompt ends and
    reaches to its end-of-turn token (to the end of what the template writes for it, if there is no such token). This
    is read off the conversation rendered up to the turn and with it. Where a template renders a turn
    differently once others follow, as those do which drop earlier thoughts, a stand-in for the answer shows its place.

    A token belongs to the turn that it ends in, also where it begins before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Whitespace is an added token in some vocabularies, and ends nothing.
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
        """Tokens of a conversation, trained on the assistant's turns from message `since` on (None: on everything).

        `tools` and `options` go to the template.
        """
        chat = _Chat(self.tokenizer, list(messages), {**(options or {}), "tools": tools})
        if since is None:
            text = chat.render()
            ids, _ = locate(self.tokenizer, text, [], special=False)
            return Conversation(ids, np.ones(len(ids), dtype=bool))
        if self._is_marked(tools):
            return self._by_markers(chat, since)
        return self._by_borders(chat, since)

    def _is_marked(self, tools: Any) -> bool:
        """Whether the template has markers, and the tokenizer the offsets to use them."""
        template = self.tokenizer.get_chat_template(tools=tools)
        return bool(_MARKER.search(template)) and bool(getattr(self.tokenizer, "is_fast", False))

    def _by_markers(self, chat: _Chat, since: int) -> Conversation:
        text, spans = chat.render_marked()
        ids, mask = self._supervised(text, [cut for span in spans for cut in span])
        eos = self.tokenizer.eos_token_id
        if eos is not None:
            mask[1:] |= mask[:-1] & (ids[1:] == eos)
        turns = chat.assistant_turns(since)
        if turns != chat.assistant_turns(0):
            border = self._borders(chat, text, turns[0])[0] if turns else len(text)
            _, (first,) = locate(self.tokenizer, text, [border], special=False)
            mask[:first] = False
        return Conversation(ids, mask)

    def _by_borders(self, chat: _Chat, since: int) -> Conversation:
        text = chat.render()
        borders = [self._borders(chat, text, turn) for turn in chat.assistant_turns(since)]
        cuts = [cut for begin, end in borders for cut in (begin, self._trim(text, begin, end))]
        return self._supervised(text, cuts)

    def _supervised(self, text: str, cuts: Sequence[int]) -> Conversation:
        """The tokens of a text, trained on between the first and the second place, the third and the fourth, ..."""
        ids, places = locate(self.tokenizer, text, cuts, special=False)
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in zip(places[::2], places[1::2], strict=True):
            mask[begin:end] = True
        return Conversation(ids, mask)

    def _borders(self, chat: _Chat, text: str, turn: int) -> tuple[int, int]:
        """The characters of a turn, from behind its header to the end of all the template writes for it."""
        before = chat.try_render(turn, prompt=True)
        through = chat.try_render(turn + 1)
        begin = len(before) if before is not None and text.startswith(before) else None
        end = len(through) if through is not None and text.startswith(through) else None
        if begin is None or end is None or end < begin:
            content, after = self._answer(chat, text, turn)
            begin = content if begin is None or begin > after else begin
            end = after
        return begin, end

    def _answer(self, chat: _Chat, text: str, turn: int) -> tuple[int, int]:
        """The same, found by a stand-in: what the template puts before and after it is before and after the answer."""
        parts = chat.around_stand_in(turn, len(chat.messages))
        if parts is None or not (text.startswith(parts[0]) and text.endswith(parts[1])):
            raise DataError(
                f"The chat template renders message {turn + 1} differently depending on what follows, and its answer "
                "cannot be found in the text: which tokens to train on is unknown. Put {% generation %} and "
                "{% endgeneration %} around the assistant's answer in tokenizer.chat_template, or pass train_on='all'."
            )
        begin, end = len(parts[0]), len(text) - len(parts[1])
        # What follows the answer whether or not other turns come after it closes the turn: the end-of-turn token.
        alone = chat.around_stand_in(turn, turn + 1)
        closing = 0 if alone is None else _shared(alone[1], parts[1])
        return begin, max(begin, end) + closing

    def _trim(self, text: str, begin: int, end: int) -> int:
        """The end of a turn without the line break that many templates write behind the end-of-turn token."""
        turn = text[begin:end].rstrip()
        return begin + len(turn) if self._ends and turn.endswith(self._ends) else end


class _Chat:
    """One conversation and the ways to render it."""

    def __init__(self, tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> None:
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise DataError(expected("'messages' to be a list of {'role': ..., 'content': ...}", messages))
        if not tokenizer.chat_template:
            raise BadArgument(
                expected(
                    "a tokenizer with a chat template for data with 'messages'",
                    f"{type(tokenizer).__name__} without one",
                    "Use the tokenizer of an instruction-tuned model, or set tokenizer.chat_template.",
                )
            )
        self.tokenizer = tokenizer
        # HF data sets fill in None for keys that only other messages have, and templates ask whether a key is there.
        self.messages: list[Message] = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]
        self.options = options

    def assistant_turns(self, since: int) -> list[int]:
        """Numbers of the assistant's messages from `since` on."""
        return [i for i in range(since, len(self.messages)) if self.messages[i]["role"] in ASSISTANT_ROLES]

    def render(self) -> str:
        """The whole conversation as text."""
        try:
            return self._render(self.messages)
        except Exception as error:
            raise _not_rendered(error) from error

    def try_render(self, count: int, prompt: bool = False) -> str | None:
        """The first messages as text, or None where the template refuses them: some insist on a user's turn."""
        try:
            return self._render(self.messages[:count], prompt)
        except Exception:
            return None

    def around_stand_in(self, turn: int, count: int) -> tuple[str, str] | None:
        """What the template writes before and after the content of one of the first messages."""
        if not isinstance(self.messages[turn].get("content"), str):
            return None
        replaced = [*self.messages[:count]]
        replaced[turn] = {**replaced[turn], "content": _STAND_IN}
        try:
            before, *after = self._render(replaced).split(_STAND_IN)
        except Exception:
            return None
        return (before, after[0]) if len(after) == 1 else None

    def render_marked(self) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation as text, and the characters between the template's markers.

        Not the mask of tokens that `apply_chat_template` offers: where what is marked ends in whitespace that no token
        has of its own, that reaches over everything behind it.
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


def _shared(first: str, second: str) -> int:
    """The number of characters with which both begin.

    >>> _shared("<end>", "<end>\\n<user>")
    5
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _not_rendered(error: Exception) -> DataError:
    return DataError(f"The chat template cannot render this conversation: {type(error).__name__}: {error}")


def locate(tokenizer: Any, text: str, cuts: Sequence[int], *, special: bool) -> tuple[np.ndarray, list[int]]:
    """The tokens of a text, and for each place in it how many of them end at or before that place.

    `special` lets the tokenizer add what it adds to every text (BOS and the like). A tokenizer without offsets is asked
    for the tokens of the text up to the place; those that are the same in the whole text are before it.
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
        # Tokens that the tokenizer adds have offsets (0, 0), also at the end of the text.
        ends = np.maximum.accumulate(np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1])
        return ids, np.searchsorted(ends, np.asarray(cuts), side="right").tolist()
    return ids, [_common_prefix(ids, _ids_of(tokenizer, text[:cut], special)) for cut in cuts]


def _ids_of(tokenizer: Any, text: str, special: bool) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int32)


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size
