"""`TextPredictor`: a causal language model that continues texts and answers conversations, also as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.data.text.generation import GenerationPrompt, as_prompts, is_conversation
from trainformer.inference.predictor import Predictor
from trainformer.run import run_of
from trainformer.tasks.language.generation import TextStream, context_length

_TEMPLATE_OPTIONS = ("tools", "chat_template_kwargs", "continue_final_message")


class TextPredictor(Predictor):
    """A causal language model, from `trainformer.load`.

    >>> import trainformer
    >>> from transformers import LlamaConfig
    >>> from trainformer.data import train_tokenizer
    >>> from trainformer.tasks import CausalLM
    >>> texts = ["the red fox", "the old dog"] * 4
    >>> config = LlamaConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=2, max_position_embeddings=32)
    >>> task = CausalLM(config, tokenizer=train_tokenizer(texts, vocabulary=300), max_length=16, cache_dir="tokens")
    >>> _ = trainformer.Trainer(task, texts, run_dir="runs/talk", max_steps=2, log="none").fit()
    >>> model = trainformer.load("runs/talk")
    >>> row = model.generate("the red", max_new_tokens=4)
    >>> "".join(model.stream("the red", max_new_tokens=4)) == row["text"]
    True
    """

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.task.text_tokenizer

    @property
    def model(self) -> Any:
        """The model, a module."""
        return run_of(self.trainer).inference_model()

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template, so that conversations can be answered."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model reads; None if it has no limit."""
        return context_length(self.model)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], max_new_tokens: int = 512, **options: Any) -> str:
        """The answer to a conversation: a list of messages, or the text of a user's first message.

        `options` are those of `generate`: `tools`, `chat_template_kwargs`, `temperature`, `seed`, ...
        """
        (made,) = self._prompts(_as_messages(messages), options)
        (row,) = self.generated([made], 1, max_new_tokens=max_new_tokens, **options)
        return str(row["text"])

    def stream(self, prompt: Any, max_new_tokens: int = 512, **options: Any) -> TextStream:
        """The new text of a prompt piece by piece, while it is generated; `options` are those of `generate`.

        A text is continued, a conversation is answered. Leaving the loop stops the generation.
        """
        made = self._prompts(prompt, options)
        if len(made) != 1:
            raise BadArgument(expected("one text or one conversation to stream", f"{len(made)} of them"))
        return TextStream(self.model, self.tokenizer, made[0], max_new_tokens, **options)

    def generate(self, prompts: Any, batch_size: int | None = None, **options: Any) -> Any:
        """Continue texts and answer conversations: a dict with `prompt` and `text` for one, a list for a list of them.

        A `Path` and a dataset are read as records. `options` are `max_new_tokens` (64), `seed`, `tools`,
        `chat_template_kwargs`, and those of transformers.
        """
        if not isinstance(prompts, str | Mapping | list | tuple):
            records = self.task.load_prompts(prompts)
            prompts = [records[index] for index in range(len(records))]
        single = isinstance(prompts, str | Mapping) or is_conversation(prompts)
        if not single and not prompts:
            return []
        rows = list(self.generated(self._prompts(prompts, options), batch_size, **options))
        return rows[0] if single else rows

    def generated(
        self, records: Sequence[Any], batch_size: int | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The prompts of records and the text generated for each, in order, a batch at a time."""
        size = batch_size or self.trainer.eval_batch_size or self.trainer.batch_size
        with self.trainer.eval_mode():
            yield from self.task.predict_records(records, size, **options)

    def count_tokens(self, prompt: Any, **options: Any) -> int:
        """The number of tokens of a prompt as the model reads it."""
        (made,) = self._prompts(prompt, options)
        return len(made.encode(self.tokenizer))

    def _prompts(self, prompts: Any, options: dict[str, Any]) -> list[GenerationPrompt]:
        """Prompts, with the options that are for the chat template taken out of the others."""
        given = {name: options.pop(name) for name in _TEMPLATE_OPTIONS if name in options}
        return as_prompts(prompts, prompt_template=getattr(self.task, "prompt_template", None), **given)[0]


def _as_messages(messages: Any) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
