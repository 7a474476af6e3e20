"""Conversations as tokens, with a mask of the assistant's tokens.

A chat template with `{% generation %}` markers says which tokens are the assistant's. With any other template the
conversation is rendered and the boundaries of every turn are found in the text. The text is tokenised once, as a whole,
so the tokens are those of `apply_chat_template`, without a second BOS.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.text.rendering import (
    ASSISTANT_ROLES,
    PLACEHOLDERS,
    THOUGHTS,
    Conversation,
    Message,
    Span,
    common_prefix,
)

logger = logging.getLogger("trainformer")

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPACE = re.compile(r"\s*")
_CALLS = "Set tokenizer.chat_template to one with tool calls, or write them into the content of the message."
_WHY_UNKNOWN = (
    "The chat template renders message {} differently depending on what follows, and its answer cannot be found in "
    "the text: which tokens to train on is unknown. Put {{% generation %}} and {{% endgeneration %}} around the "
    "assistant's answer in tokenizer.chat_template, or pass train_on='all'."
)


Masked = tuple[np.ndarray, np.ndarray]  # the tokens of a conversation, and the mask of those to train on


class ChatRenderer:
    """Applies a tokenizer's chat template and finds the assistant's turns, each with its end-of-turn token.

    With `{% generation %}` markers the template decides. Without markers, a turn starts where the generation prompt
    ends and includes the end-of-turn token (or all the template writes for it, if there is none). The position of plain
    contents is found with placeholders for all of them. For any other turn, the conversation is rendered up to the turn
    and with it; some templates render a turn differently once others follow, for instance without its reasoning: then
    placeholders for this answer show its position.

    A model that was never trained on an end-of-turn token never stops. Where the template writes it after the markers,
    or as the start of the next turn (GLM's `<|user|>`), it belongs to the turn, and it is added after the last one.

    A token belongs to the turn it ends in.
    """

    def __init__(self, tokenizer: Any, expects_stop: bool = True) -> None:
        self.tokenizer = tokenizer
        self.expects_stop = expects_stop  # whether a template without an end-of-turn token is a warning
        # Some vocabularies have whitespace as added tokens, which do not end a turn.
        added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        eos = {tokenizer.eos_token} if tokenizer.eos_token else set()
        self._ends = tuple(token for token in sorted(added | eos) if token.strip())
        tags = {tag for tag in added if tag.startswith("</")}  # </think>, </tool_call>: they do not end a turn
        tags |= {tag.replace("</", "<") for tag in tags}
        self._stops = tuple(token for token in self._ends if token in eos or token not in tags)
        self._end_pattern, self._stop_pattern = _any_of(self._ends), _any_of(self._stops)
        self._templates: dict[str, bool] = {}  # whether they have markers
        self._next_stops: dict[bool, str | None] = {}
        self._frames: dict[str, tuple[str | None, str | None]] = {}
        self._warned: set[str] = set()

    def encode(
        self,
        messages: Sequence[Message],
        *,
        since: int | None = 0,
        tools: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> Masked:
        """Tokens of a conversation, with the assistant's turns from message `since` on as the mask (None: all tokens).

        `tools` and `options` are passed to the template.
        """
        chat = Conversation(self.tokenizer, list(messages), {**(options or {}), "tools": tools})
        has_markers = self._check_template(chat)
        has_markers = has_markers and getattr(self.tokenizer, "is_fast", False)  # only those have the offsets
        text, marked = chat.render_marked() if has_markers else (chat.render(), [])
        self._check_rendered(chat, text)
        if since is None:
            spans = [(0, len(text))]
        elif has_markers:
            spans = self._by_markers(chat, text, marked, since)
        else:
            spans = self._by_rendering(chat, text, since)
        ids, places = locate(self.tokenizer, text, [cut for span in spans for cut in span], special=False)
        mask = np.zeros(len(ids), dtype=bool)
        for begin, end in zip(places[::2], places[1::2], strict=True):
            mask[begin:end] = True
        stop = self._missing_stop(chat, text[spans[-1][0] :] if spans else text)
        if stop is not None:
            is_trained = since is None or len(chat.messages) - 1 in chat.trained_turns(since)
            ids, mask = np.append(ids, np.int32(stop)), np.append(mask, is_trained)
        return ids, mask

    # -- turns ---------------------------------------------------------------------------------------------

    def _by_markers(self, chat: Conversation, text: str, spans: list[Span], since: int) -> list[Span]:
        spans = [(begin, self._with_stop(chat, text, begin, end)) for begin, end in spans]
        turns = chat.assistant_turns(0)
        if turns == chat.trained_turns(since):
            return spans
        # Which marked spans belong to which turn is not known: a turn ends where the next one begins.
        starts = [self._find_turn(chat, text, turn)[0] for turn in turns]
        kept = [(start, end) for turn, start, end in zip(turns, starts, [*starts[1:], len(text)], strict=True)
                if turn in chat.trained_turns(since)]  # fmt: skip
        both = [(max(begin, start), min(end, last)) for begin, end in spans for start, last in kept]
        return [(begin, end) for begin, end in both if begin < end]

    def _by_rendering(self, chat: Conversation, text: str, since: int) -> list[Span]:
        spans = []
        contents = chat.contents(text)
        for turn in chat.trained_turns(since):
            begin, answered, end = self._around(chat, text, contents, turn) or self._find_turn(chat, text, turn)
            end = self._with_stop(chat, text, answered, end)
            # Without the line break that many templates write after the end-of-turn token.
            trimmed = text[begin:end].rstrip()
            spans.append((begin, begin + len(trimmed) if trimmed.endswith(self._ends) else end))
        return spans

    def _around(
        self, chat: Conversation, text: str, contents: Sequence[Span | None], turn: int
    ) -> tuple[int, int, int] | None:
        """The characters of a turn whose content is known, after a user's whose content is known; see `_find_turn`."""
        before, here = contents[turn - 1] if turn else None, contents[turn]
        if before is None or here is None or chat.messages[turn - 1]["role"] != "user":
            return None
        opening, closing = self._frame(chat)
        if opening is None or closing is None:
            return None
        size = self._shared(text[before[1] : here[0]], opening)
        cut = opening[:size]
        if size < len(opening) and not cut.endswith(("\n", *self._ends)):
            return None
        is_last = turn == len(chat.messages) - 1
        rest = text[here[1] : here[1] + len(closing) + 64]
        end = len(text) if is_last else here[1] + self._shared(rest, closing)
        return before[1] + size, here[1], end

    def _frame(self, chat: Conversation) -> tuple[str | None, str | None]:
        """What the template writes between a question and its answer, and after an answer at the end."""
        key = repr(sorted((name, value) for name, value in chat.options.items() if name != "tools"))
        if key not in self._frames:
            question, answer = PLACEHOLDERS
            asked = [{"role": "user", "content": question}]
            opened = chat.try_messages(asked, prompt=True)
            ended = chat.try_messages([*asked, {"role": "assistant", "content": answer}])
            self._frames[key] = (
                None if opened is None else opened.partition(question)[2],
                None if ended is None else ended.partition(answer)[2],
            )
        return self._frames[key]

    def _find_turn(self, chat: Conversation, text: str, turn: int) -> tuple[int, int, int]:
        """The characters of a turn: after its header, after its answer if that is known, after all that is written."""
        before = chat.try_render(turn, prompt=True)
        through = chat.try_render(turn + 1)
        begin = len(before) if before is not None and text.startswith(before) else None
        end = len(through) if through is not None and text.startswith(through) else None
        if begin is not None and end is not None and begin <= end:
            return begin, begin, end
        found = chat.varying(text, turn, len(chat.messages))
        if found is None:
            raise DataError(_WHY_UNKNOWN.format(turn + 1))
        first, last = found
        if begin is None or begin > last:
            begin = self._after_header(chat, text, turn, first)
        return begin, last, last + self._closing(chat, text[last:], turn)

    def _after_header(self, chat: Conversation, text: str, turn: int, first: int) -> int:
        """Where the header of a turn ends: what follows the message before it, also with no answer yet.

        A generation prompt may open the reasoning, which the turn may not have: then only its beginning counts. If the
        message before cannot be found either, it is the last generation prompt before the answer.
        """
        before = chat.try_render(turn, prompt=True)
        if turn and before is not None:
            here = chat.varying(text, turn - 1, len(chat.messages))
            alone = chat.varying(before, turn - 1, turn, prompt=True)
            if here is not None and alone is not None and here[1] <= first:
                rest, wanted = text[here[1] :], before[alone[1] :]
                if (size := self._shared(rest, wanted)) or not wanted:
                    return here[1] + size
        header = self._generation_prompt(chat, turn)
        cuts = {len(header), *(found.end() for found in re.finditer(r"\n", header))}
        cuts |= {found.end() for found in self._end_pattern.finditer(header)}
        found = ((text.rfind(header[:cut], 0, first), cut) for cut in cuts if cut)
        return max((place + cut for place, cut in found if place >= 0), default=first)

    def _closing(self, chat: Conversation, rest: str, turn: int) -> int:
        """How much of the text after an answer closes its turn: what follows it with and without later turns."""
        if turn == len(chat.messages) - 1:
            return len(rest)
        alone = chat.try_render(turn + 1)
        found = None if alone is None else chat.varying(alone, turn, turn + 1)
        if alone is None or found is None:
            return 0
        return self._shared(rest, alone[found[1] :])

    def _generation_prompt(self, chat: Conversation, turn: int) -> str:
        """What the template writes after the messages before a turn to start it."""
        start = [{"role": "user", "content": PLACEHOLDERS[0]}]
        for messages in (chat.messages[:turn], start):
            opened, plain = chat.try_messages(messages, prompt=True), chat.try_messages(messages)
            if opened is not None and plain is not None:
                prompt = opened[self._shared(opened, plain) :]
                if prompt:
                    return prompt
        return ""

    def _shared(self, one: str, other: str) -> int:
        """The length of the common prefix of two texts that cuts no added token of either."""
        size = common_prefix(one, other)
        for text in (one, other):
            around = self._end_pattern.finditer(text, max(0, size - 64), size + 64)
            size = next((found.start() for found in around if found.start() < size < found.end()), size)
        return size

    # -- end of turn ---------------------------------------------------------------------------------------

    def _with_stop(self, chat: Conversation, text: str, begin: int, end: int) -> int:
        """The end of a turn with its end-of-turn token, which may follow as the start of the next turn."""
        eos = self.tokenizer.eos_token
        if eos and text.startswith(eos, end):
            return end + len(eos)
        if text[begin:end].rstrip().endswith(self._stops):
            return end
        stop = self._stop_at(chat, text, end)
        return end if stop is None else stop[1]

    def _stop_at(self, chat: Conversation, text: str, place: int) -> tuple[str, int] | None:
        """The end-of-turn token at a position, and where it ends. A token that starts the assistant's turns is none."""
        space = _SPACE.match(text, place)
        found = self._stop_pattern.match(text, space.end() if space else place)
        if not found:
            return None
        header = self._stop_pattern.search(self._generation_prompt(chat, chat.assistant_turns(0)[0]))
        return None if header and header.group() == found.group() else (found.group(), found.end())

    def _missing_stop(self, chat: Conversation, turn: str) -> int | None:
        """The end-of-turn token to add after the last turn, if the template writes it with the next one."""
        last = chat.messages[-1]
        if last["role"] not in ASSISTANT_ROLES or turn.rstrip().endswith(self._stops):
            return None
        calls = bool(last.get("tool_calls"))
        if calls not in self._next_stops:
            self._next_stops[calls] = self._find_next_stop(chat, last if calls else {"role": last["role"]})
        stop = self._next_stops[calls]
        if stop is None:
            if self.expects_stop:
                self._warn(
                    "the chat template writes no end-of-turn token after the assistant's last turn: the model does not "
                    "learn to stop. Add one to tokenizer.chat_template, such as {{ eos_token }}"
                )
            return None
        return self.tokenizer.convert_tokens_to_ids(stop)

    def _find_next_stop(self, chat: Conversation, last: Message) -> str | None:
        question = {"role": "user", "content": PLACEHOLDERS[0]}
        ended = [question, {**last, "content": PLACEHOLDERS[1]}]
        reply = {"role": "tool", "content": "", "name": "", "tool_call_id": ""} if "tool_calls" in last else question
        alone, followed = chat.try_messages(ended), chat.try_messages([*ended, reply])
        if alone is None or followed is None or not followed.startswith(alone):
            return None
        found = self._stop_at(chat, followed, len(alone))
        return None if found is None else found[0]

    # -- checks --------------------------------------------------------------------------------------------

    def _check_template(self, chat: Conversation) -> bool:
        """Whether the template has markers. One that leaves out tool calls is an error, or tools: a warning."""
        template = self.tokenizer.get_chat_template(tools=chat.options["tools"])
        if template not in self._templates:
            self._templates[template] = bool(_MARKER.search(template))
        if "tool_calls" not in template and any(message.get("tool_calls") for message in chat.messages):
            raise DataError(expected("a chat template that renders tool calls", "one that leaves them out", _CALLS))
        if chat.options["tools"] and "tools" not in template:
            self._warn("the chat template does not render the tools of the records: the model does not see them")
        return self._templates[template]

    def _check_rendered(self, chat: Conversation, text: str) -> None:
        """Tool calls that the template leaves out are an error; other messages and thoughts a warning."""
        for turn, message in enumerate(chat.messages):
            if message["role"] not in ASSISTANT_ROLES:
                if not _occurs(message.get("content"), text):
                    self._warn(f"the chat template leaves out or changes messages with the role {message['role']!r}")
                continue
            if not all(_occurs(thought, text) for thought in _thoughts(message)):
                which = "the last turn" if turn == len(chat.messages) - 1 else "earlier turns"
                self._warn(
                    f"the chat template leaves out the reasoning of {which}: the model does not learn it. To train on "
                    "it, set tokenizer.chat_template to one that keeps it"
                )
            if message.get("tool_calls") and not chat.renders_calls(text, turn):
                raise DataError(expected("a chat template that renders tool calls", "one that leaves some out", _CALLS))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


def _thoughts(message: Message) -> list[Any]:
    """The reasoning of a message, in a field of its own or in the content."""
    content = message.get("content")
    inline = re.findall(r"<think>(.*?)</think>", content, re.DOTALL) if isinstance(content, str) else []
    return [*(message[key] for key in THOUGHTS if key in message), *inline]


def _occurs(content: Any, text: str) -> bool:
    """Whether a text contains another one, as it is or as JSON. Other content is not looked for."""
    if not isinstance(content, str) or content.strip() in text:
        return True
    return any(json.dumps(content, ensure_ascii=flag)[1:-1] in text for flag in (False, True))


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """A pattern for any of the tokens, the longest first; for none of them one that never matches."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


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
