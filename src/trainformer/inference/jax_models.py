"""Predictors of runs on JAX, as `trainformer.load` returns them. They wrap a trainer that has no training data.

The protocol of a trainer is small: `predicted_columns(data, batch_size, **options)`, `eval()` and `save_weights`.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainformer.checkpointing import Checkpoint
from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.data.text.generation import Generated, GenerationPrompt, as_prompts, is_conversation
from trainformer.jax.answers import check_language_model, context_length
from trainformer.jax.recorded import open_trainer
from trainformer.jax.saving import export_trainer
from trainformer.jax.text_trainer import TextTrainer
from trainformer.run import run_of

_TEMPLATE_OPTIONS = ("tools", "chat_template_kwargs", "continue_final_message")


class JaxPredictor:
    """A model that was trained on JAX, from `trainformer.load`. Calling it is `predict`.

    >>> import numpy as np, trainformer
    >>> from trainformer.jax import ImageClassificationTrainer, TrainingArguments
    >>> arguments = TrainingArguments(max_steps=2, total_batch_size=16, log="none", output_dir="runs/digits")
    >>> trainer = ImageClassificationTrainer(arguments, dataset_train="digits")
    >>> _ = trainer.train()
    >>> image = np.zeros((8, 8), np.uint8)
    >>> row = trainformer.load("runs/digits")(image)
    >>> sorted(row), bool(np.allclose(row["probabilities"], trainer.predict(image[None])[0], atol=1e-6))
    (['id', 'prediction', 'probabilities', 'probability'], True)
    """

    def __init__(self, trainer: Any, source: Path, checkpoint: Checkpoint | None = None) -> None:
        self.trainer = trainer
        self.source = source
        self._checkpoint = checkpoint

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.trainer).__name__} from {str(self.source)!r} on {self.device})"

    @property
    def model(self) -> Any:
        """The module with the trained weights."""
        return self.trainer.model_state.model

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, if they are known."""
        return getattr(self.trainer, "class_names", None)

    @property
    def device(self) -> str:
        """Where the model is."""
        devices = self.trainer.mesh.devices
        return f"{devices.size} x {devices.flat[0].device_kind}"

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(jax.tree.leaves(self.trainer.model_state.params)[0].dtype)

    def __call__(self, inputs: Any, batch_size: int | None = None, **options: Any) -> Any:
        """See `predict`."""
        return self.predict(inputs, batch_size, **options)

    def predict(self, inputs: Any, batch_size: int | None = None, **options: Any) -> Any:
        """The prediction for one input as a dict, or for several as a list of dicts.

        An image is an array (H, W, C) or the path of a file, several are an array (N, H, W, C), a list of them, a
        folder or a dataset. A text is a string, a record or a conversation, several are a list of them or the `Path` of
        a file. Of a causal language model, `predict` is `generate`.
        """
        check_count("batch_size", batch_size or 1)
        if isinstance(self.trainer, TextTrainer):
            single = isinstance(inputs, str | Mapping) or is_conversation(inputs)
            data: Any = [inputs] if single else inputs
            if isinstance(data, list | tuple) and not data:
                return []
        else:
            single = _is_one_array(inputs) or _is_file(inputs)
            data = inputs[None] if _is_one_array(inputs) else inputs
        rows = rows_of(self.trainer.predicted_columns(data, batch_size, **options))
        return rows[0] if single else rows

    def evaluate(self, data: Any, batch_size: int | None = None) -> dict[str, float]:
        """Metrics named ``val/...`` on data with labels; several sets have names."""
        if self._checkpoint is None:
            raise BadArgument("Expected a checkpoint to evaluate, received a trainer: use trainer.eval().")
        return evaluate(open_trainer(self._checkpoint, data, batch_size))

    def export(self, path: str | Path) -> str:
        """Write the model as a folder in HuggingFace format, or its weights to a ``.safetensors`` file."""
        return export_trainer(self.trainer, Path(path))


class JaxTextPredictor(JaxPredictor):
    """A causal language model that was trained on JAX.

    >>> import trainformer
    >>> from trainformer.data.text.tokenizer import train_tokenizer
    >>> from trainformer.jax import SFTConfig, SFTTrainer
    >>> from trainformer.models.jax import DecoderConfig
    >>> texts = [{"text": "the red fox"}, {"text": "the old dog"}] * 4
    >>> tokenizer = train_tokenizer(texts, vocabulary=300)
    >>> config = DecoderConfig(vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                        num_attention_heads=2, max_position_embeddings=32)
    >>> arguments = SFTConfig(max_steps=2, total_batch_size=8, log="none", output_dir="runs/fox", cache_dir="tokens")
    >>> trainer = SFTTrainer(arguments, config, tokenizer, train_dataset=texts)
    >>> _ = trainer.train()
    >>> row = trainformer.load("runs/fox").generate("the red", max_new_tokens=4)
    >>> row["text"] == trainer.generate("the red", max_new_tokens=4)
    True
    """

    trainer: TextTrainer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.trainer.text

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template, so that conversations can be answered."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model reads; None if it has no limit."""
        return context_length(self.trainer)

    def predict(self, inputs: Any, batch_size: int | None = None, **options: Any) -> Any:
        """See `generate`."""
        return self.generate(inputs, batch_size, **options)

    def generate(self, prompts: Any, batch_size: int | None = None, max_new_tokens: int = 64, **options: Any) -> Any:
        """Continue texts and answer conversations: a dict with `prompt` and `text` for one, a list for a list of them.

        A `Path` and a dataset are read as records.
        """
        single = isinstance(prompts, str | Mapping) or is_conversation(prompts)
        if not isinstance(prompts, str | Mapping | list | tuple):
            records = prompts
        elif not single and not prompts:
            return []
        else:
            records = self._prompts(prompts, options)
        found = self.trainer.predicted_columns(records, batch_size, max_new_tokens=max_new_tokens, **options)
        rows = [{name: row[name] for name in ("prompt", "text")} for row in rows_of(found)]
        return rows[0] if single else rows

    def chat(self, messages: str | Sequence[Mapping[str, Any]], max_new_tokens: int = 512, **options: Any) -> str:
        """The answer to a conversation: a list of messages, or the text of a user's first message."""
        turns: Any = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return str(self.generate(turns, 1, max_new_tokens, **options)["text"])

    def stream(self, prompt: Any, max_new_tokens: int = 512, **options: Any) -> WholeAnswer:
        """The new text of a prompt; on JAX it comes in one piece, when it is complete."""
        made = self._prompts(prompt, options)
        if len(made) != 1:
            raise BadArgument(expected("one text or one conversation to stream", f"{len(made)} of them"))
        return WholeAnswer(self.trainer, made[0], max_new_tokens, options)

    def count_tokens(self, prompt: Any, **options: Any) -> int:
        """The number of tokens of a prompt as the model reads it."""
        (made,) = self._prompts(prompt, options)
        return len(made.encode(self.tokenizer))

    def _prompts(self, prompts: Any, options: dict[str, Any]) -> list[GenerationPrompt]:
        """Prompts, with the options that are for the chat template taken out of the others."""
        given = {name: options.pop(name) for name in _TEMPLATE_OPTIONS if name in options}
        return as_prompts(prompts, prompt_template=self.trainer.arguments.prompt_template, **given)[0]


class WholeAnswer:
    """An answer that is generated as a whole, with the interface of a stream."""

    interrupted = False

    def __init__(self, trainer: TextTrainer, prompt: GenerationPrompt, max_new_tokens: int, options: Any) -> None:
        self.result: Generated | None = None
        self._trainer, self._prompt = trainer, prompt
        self._options = {**options, "max_new_tokens": max_new_tokens}

    def __iter__(self) -> Iterator[str]:
        (self.result,) = self._trainer.generate_texts([self._prompt], **self._options)
        yield self.result.text

    def close(self) -> None:
        """Nothing is running."""


def open_jax(
    checkpoint: Checkpoint, source: Path, batch_size: int | None = None, ema: bool | str | None = None
) -> JaxPredictor:
    """The predictor of a checkpoint."""
    return make_predictor(open_trainer(checkpoint, eval_batch_size=batch_size, ema=ema), source, checkpoint)


def make_predictor(trainer: Any, source: Path, checkpoint: Checkpoint | None = None) -> JaxPredictor:
    """The predictor of a trainer."""
    kind = JaxTextPredictor if generates(trainer) else JaxPredictor
    return kind(trainer, source, checkpoint)


def generates(trainer: Any) -> bool:
    """Whether predictions of a trainer are generated texts."""
    if not isinstance(trainer, TextTrainer) or trainer.text is None:
        return False
    try:
        check_language_model(trainer)
    except BadArgument:
        return False
    return True


def evaluate(trainer: Any) -> dict[str, float]:
    """Metrics of a trainer on its evaluation data, named as in the log: ``val/...``."""
    run = run_of(trainer)
    with run.backend.run_context():
        return {metric: value for name in run.val_sources for metric, value in run.validate(name).items()}


def rows_of(batches: Iterator[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A dict per sample, without the index."""
    rows = []
    for batch in batches:
        names = [name for name in batch if name != "index"]
        values = zip(*(batch[name] for name in names), strict=True)
        rows += [dict(zip(names, row, strict=True)) for row in values]
    return rows


def _is_file(inputs: Any) -> bool:
    return isinstance(inputs, str | Path) and Path(inputs).is_file() and Path(inputs).suffix != ".npz"


def _is_one_array(inputs: Any) -> bool:
    return isinstance(inputs, np.ndarray) and inputs.ndim <= 3
