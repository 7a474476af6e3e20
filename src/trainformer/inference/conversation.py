"""`Conversation`: the turns of a chat with a model, and which of them still fit in its context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.order import sample_key
from trainformer.data.text.generation import Generated, check_template
from trainformer.models.generation import SAMPLING, SamplingOptions

if TYPE_CHECKING:
    from trainformer.inference.jax_models import JaxTextPredictor
    from trainformer.inference.text import TextPredictor


class Conversation:
    """A conversation with a model. `options` are those of `generate`, and may be changed between turns.

    Without sampling options, the model's generation config decides whether to sample. Without `template`, the text so
    far is continued, for models that were not trained to answer.

    If the turns and the answer exceed the context of the model, the oldest turns are not shown to it, and `notices`
    says so. The system prompt always is, and a message that is too long by itself is an error.
    """

    def __init__(
        self,
        model: TextPredictor | JaxTextPredictor,
        system: str | None = None,
        *,
        template: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if template:
            check_template(model.tokenizer)
        elif system is not None:
            do = "Leave one of them out."
            raise BadArgument(expected("a chat template for the system prompt", "none", do))
        self.model = model
        self.system = system
        self.template = template
        self.seed = seed
        self.options: dict[str, Any] = {"max_new_tokens": 512, **options}
        self.turns: list[dict[str, str]] = []
        self.notices: list[str] = []
        self._attempt = 0
        check_sampling(self.options)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns, with the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str) -> Iterator[str]:
        """The answer to a message, piece by piece. Both are turns afterwards, also if the reader leaves early."""
        self.notices = []
        asked = {"role": "user", "content": text}
        prompt = self._fitted([*self.turns, asked])
        key = sample_key(self.seed, self._attempt, len(self.turns))
        stream = self.model.stream(prompt, seed=[key], **self._call_options())
        try:
            yield from stream
        finally:
            stream.close()
            if stream.result is not None:
                self.turns += [asked, {"role": "assistant", "content": stream.result.text}]
                self._describe_end(stream.result, stream.interrupted)

    def _call_options(self) -> dict[str, Any]:
        """The options, and sampling as the model's generation config says if they do not."""
        config = getattr(self.model.model, "generation_config", None)
        if getattr(config, "do_sample", None) and not any(self.options.get(name) is not None for name in SAMPLING):
            return {**self.options, "do_sample": True}
        return self.options

    def undo(self) -> str | None:
        """Remove the last question and its answer; returns the question."""
        if not self.turns:
            return None
        del self.turns[-1]
        return self.turns.pop()["content"]

    def retry(self) -> Iterator[str]:
        """Answer the last question again, with other random numbers."""
        question = self.undo()
        if question is None:
            raise BadArgument("There is no question yet to answer again.")
        self._attempt += 1
        return self.ask(question)

    def reset(self) -> None:
        """Begin a new conversation, with the same system prompt."""
        self.turns.clear()
        self._attempt = 0

    def save(self, path: str | Path) -> Path:
        """Append the conversation to a JSON Lines file, as a record to train on."""
        file = Path(path).expanduser()
        record = {"messages": self.messages} if self.template else {"text": self._joined(self.turns)}
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
        return file

    def _prompt(self, turns: list[dict[str, str]]) -> Any:
        if not self.template:
            return self._joined(turns)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *turns]

    @staticmethod
    def _joined(turns: list[dict[str, str]]) -> str:
        return "".join(turn["content"] for turn in turns)

    def _fitted(self, turns: list[dict[str, str]]) -> Any:
        """The prompt of the newest turns that leave room for an answer, or for half of the context."""
        context, wanted = self.model.context_length, self.options["max_new_tokens"]
        if context is None:
            return self._prompt(turns)
        room = context - min(wanted, context // 2)
        kwargs = {key: self.options[key] for key in ("chat_template_kwargs",) if key in self.options}
        whole = size = self.model.count_tokens(self._prompt(turns), **kwargs)
        dropped = 0
        while size > room and len(turns) - dropped > 1:
            dropped += 2
            size = self.model.count_tokens(self._prompt(turns[dropped:]), **kwargs)
        if dropped:
            self.notices.append(
                f"the {dropped} oldest messages are left out: {whole:,} tokens and {context - room:,} for the answer "
                f"exceed the context of {context:,}"
            )
        return self._prompt(turns[dropped:])

    def _describe_end(self, made: Generated, interrupted: bool) -> None:
        if interrupted:
            self.notices.append("stopped")
        elif not made.finished and made.tokens < self.options["max_new_tokens"]:
            self.notices.append(f"cut after {made.tokens} tokens: the context of the model is full")
        elif not made.finished:
            self.notices.append(f"cut after {made.tokens} tokens: max_new_tokens")


def check_sampling(options: dict[str, Any]) -> None:
    """Reject values of sampling options that cannot work."""
    names = ("max_new_tokens", "repetition_penalty", *SAMPLING)
    SamplingOptions(**{name: options[name] for name in names if options.get(name) is not None})
