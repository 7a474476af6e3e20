"""Prompts to generate from: texts and conversations, alone or in records, as tokens; and what was generated.

A text is continued as it is. A conversation is rendered by the tokenizer's chat template up to where the assistant's
answer begins, and tokenised without a second BOS, as `apply_chat_template` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.order import sample_key
from trainformer.data.text.chat import ASSISTANT_ROLES, Message
from trainformer.data.text.encode import ALPACA, ALPACA_WITH_INPUT, fill_template
from trainformer.data.text.messages import check_messages, check_tools
from trainformer.data.text.rendering import for_template
from trainformer.data.text.schemas import MESSAGE_KEYS
from trainformer.data.text.sources import load_text

logger = logging.getLogger("trainformer")

_TARGETS = ("completion", "response", "output", "answer", "target")
_DO = 'Write prompts as lines of a .txt file, or as {"prompt": ...} or {"messages": [...]} in a .jsonl file.'
_ANSWER = "zq7StandInForOneTurn7qz"  # no template trims or splits it


@dataclass(frozen=True)
class GenerationPrompt:
    """What a model continues: a `text`, or the `messages` of a conversation. `target` is the known answer, if any.

    `tools` and `options` are passed to the chat template. With `continues`, the last message is the beginning of the
    answer.
    """

    text: str | None = None
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    target: str | None = None

    def render(self, tokenizer: Any) -> str:
        """The text that the model reads, without the special tokens that the tokenizer adds to a text."""
        if self.text is not None:
            return self.text
        check_template(tokenizer)
        try:
            return str(
                tokenizer.apply_chat_template(
                    [for_template(message) for message in self.messages],
                    tokenize=False,
                    add_generation_prompt=not self.continues,
                    continue_final_message=self.continues,
                    **{**self.options, "tools": self.tools},
                )
            )
        except Exception as error:  # whatever a template raises
            raise DataError(f"The chat template cannot render this conversation: {error}") from error

    def encode(self, tokenizer: Any) -> list[int]:
        """The tokens that the model reads."""
        text, is_chat = self.render(tokenizer), self.text is None
        ids = list(tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])
        if not is_chat and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids.pop()  # nothing follows the end of a text
        if not ids:
            raise DataError(expected("a prompt of at least one token", text))
        return ids


@dataclass(frozen=True)
class Generated:
    """A generated text. `finished`: the model ended it, rather than `max_new_tokens` or the end of its context."""

    text: str
    tokens: int
    finished: bool


def check_template(tokenizer: Any) -> None:
    """Reject a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        do = "Use an instruction-tuned model, set tokenizer.chat_template, or pass a text, which is continued as it is."
        raise BadArgument(expected("a tokenizer with a chat template for messages", "one without", do))


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages.

    >>> is_conversation([{"role": "user", "content": "hi"}]), is_conversation(["hi"]), is_conversation([])
    (True, False, False)
    """
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in value)
    )


def load_prompts(data: Any) -> Any:
    """Records to generate for: from a path, where each line of a text file is a prompt, or a list of them.

    >>> load_prompts({"prompt": "1 + 1 ="})
    [{'prompt': '1 + 1 ='}]
    """
    if isinstance(data, str | Path):
        return load_text(data, split="line" if Path(data).suffix == ".txt" else None)
    if isinstance(data, Mapping) or is_conversation(data):
        return [data]
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(expected("a list of prompts, conversations or records, or the path of a file", type(data)))
    return data


def row_seeds(seed: int | Sequence[int], count: int, first: int = 0) -> list[int]:
    """A seed per prompt: of the seed and the number of the prompt. A list has them already.

    >>> row_seeds(3, 4)[2:] == row_seeds(3, 2, first=2), row_seeds([5, 6], 2)
    (True, [5, 6])
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return [sample_key(int(seed), 0, first + index) for index in range(count)]
    if isinstance(seed, Sequence) and not isinstance(seed, str) and len(seed) == count:
        return [int(each) for each in seed]
    raise BadArgument(expected(f"seed to be an integer, or a list of {count} of them", seed))


def as_prompts(
    prompts: Any,
    *,
    tools: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    prompt_template: str | None = None,
) -> tuple[list[GenerationPrompt], bool]:
    """Prompts of one input or a list of them, and whether it was a list.

    An input is a text, a conversation, or a record. `tools` and `chat_template_kwargs` are for all conversations that
    have none of their own.

    >>> turns = [{"role": "user", "content": "hi"}]
    >>> as_prompts(turns) == ([GenerationPrompt(messages=turns)], False), len(as_prompts([turns, turns])[0])
    (True, 2)
    """
    single = isinstance(prompts, str | Mapping | GenerationPrompt) or is_conversation(prompts)
    given = [prompts] if single else prompts
    if not isinstance(given, Sequence) or not given:
        what = "a text, a conversation, a record, or a list of them"
        raise BadArgument(expected(what, given if given == [] else type(prompts).__name__))
    made = []
    for index, each in enumerate(given):
        prompt = read_prompt(each, index, prompt_template, continue_final_message)
        if prompt.text is None:
            options = {**(chat_template_kwargs or {}), **prompt.options}
            prompt = replace(prompt, tools=prompt.tools or check_tools(tools), options=options)
        made.append(prompt)
    if (tools or chat_template_kwargs or continue_final_message) and all(prompt.text is not None for prompt in made):
        what = "a conversation with tools, chat_template_kwargs or continue_final_message"
        raise BadArgument(expected(what, "texts alone", "Texts are continued as they are. Pass messages."))
    return made, not single


def read_prompt(
    record: Any, index: int = 0, prompt_template: str | None = None, continue_final_message: bool = False
) -> GenerationPrompt:
    """The prompt of a record.

    A record is a text, a conversation, or a mapping with `messages` (or another common name), `prompt` (a text or
    messages), `instruction` (and `input`), or `text`. The last turn of `messages`, if it is the assistant's, and
    `completion` (`output`, ...) are the target.

    >>> turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    >>> prompt = read_prompt({"messages": turns})
    >>> len(prompt.messages), prompt.target
    (1, '2')
    """
    if isinstance(record, GenerationPrompt):
        return record
    if isinstance(record, str):
        if not record:
            raise BadArgument(expected("prompts of at least one character", record))
        return GenerationPrompt(record)
    if is_conversation(record):
        prompt = _conversation(record, index, continue_final_message)
        if prompt.target is not None:
            do = "Remove it, or pass continue_final_message=True to continue it."
            received = f"one that ends with a turn of {record[-1].get('role', record[-1].get('from'))!r}"
            raise BadArgument(expected("a conversation that ends with a turn to answer", received, do))
        return prompt
    if isinstance(record, Mapping):
        found = _of_mapping(record, index, prompt_template, continue_final_message)
        if found is not None:
            return found
    keys = sorted(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"record {index} to have a prompt, a text or messages", keys, _DO))


def _of_mapping(
    record: Mapping[str, Any], index: int, template: str | None, continues: bool
) -> GenerationPrompt | None:
    target = next((str(record[name]) for name in _TARGETS if isinstance(record.get(name), str)), None)
    for name in ("prompt", *MESSAGE_KEYS):
        if is_conversation(record.get(name)):
            prompt = _conversation(record[name], index, continues, record.get("system"))
            if isinstance(options := record.get("chat_template_kwargs"), Mapping):
                prompt = replace(prompt, options={k: v for k, v in options.items() if v is not None})
            answer = _answer(record.get("completion")) if target is None else target
            return replace(prompt, tools=check_tools(record.get("tools")), target=prompt.target or answer)
    filled = {**record, "input": record.get("input") or ""}
    if isinstance(record.get("prompt"), str) and record["prompt"]:
        return GenerationPrompt(fill_template(template, filled) if template else record["prompt"], target=target)
    if isinstance(record.get("instruction"), str) and record["instruction"]:
        usual = ALPACA_WITH_INPUT if record.get("input") else ALPACA
        return GenerationPrompt(fill_template(template or usual, filled), target=target)
    if isinstance(record.get("text"), str) and record["text"]:
        return GenerationPrompt(record["text"])
    return None


def _conversation(given: Sequence[Any], index: int, continues: bool, system: Any = None) -> GenerationPrompt:
    """The turns up to the assistant's last, which is the target, or with `continues` to be continued."""
    try:
        messages = check_messages(given)
    except DataError as error:
        raise DataError(f"record {index}: {error}") from None
    if isinstance(system, str) and system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    answered = messages[-1]["role"] in ASSISTANT_ROLES
    if continues:
        if not answered:
            what = "a conversation that ends with a turn of the assistant, to continue it"
            raise BadArgument(expected(what, messages[-1]["role"], "Leave continue_final_message out."))
        return GenerationPrompt(messages=list(messages), continues=True)
    target = str(messages.pop()["content"]) if answered else None
    if not messages:
        raise DataError(expected(f"record {index} to have a turn before the assistant's", "none"))
    return GenerationPrompt(messages=list(messages), target=target)


def _answer(completion: Any) -> str | None:
    """The text of a completion that is a list of messages."""
    return str(completion[-1].get("content") or "") if is_conversation(completion) else None


def end_of_turn(tokenizer: Any) -> int | None:
    """The token with which the chat template ends an answer; None if it has none or there is no template.

    It is the first special token after the answer of a last turn. Some templates end a turn with the beginning of the
    next one (GLM-4): then it is the first after an answer that a user's turn follows.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}
    for messages in ([asked, said], [asked, said, asked]):
        try:
            rendered = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # a template may refuse anything; a prompt that it refuses is an error
            logger.info("the chat template does not render a plain conversation: %s", error)
            continue
        after = rendered.rpartition(_ANSWER)[2].lstrip()
        added = {str(token): index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        ends = [token for token in added if token.strip() and after.startswith(token)]
        if ends:
            return int(added[max(ends, key=len)])
    return None
