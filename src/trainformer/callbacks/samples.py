"""Log images with predictions, or generated texts, after each evaluation."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainformer.callbacks.base import EveryNthEvaluation, TrainerLike
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require

_MAX_IMAGES = 16  # a record is one line of JSON: some 100 KB at most


@dataclass
class TextSamples(EveryNthEvaluation):
    """After each evaluation, generate completions of some prompts and log them.

    Prompts are texts or, for a causal language model with a chat template, conversations (lists of messages).
    Needs a task with `generate` (`CausalLM`, `Seq2Seq`, ...). `options` go to transformers' `generate` (`do_sample`,
    `temperature`, `num_beams`, ...). Sampling depends on the seed of the run alone and does not affect training.
    `every`: run after every N-th evaluation.
    """

    prompts: Sequence[Any]
    max_new_tokens: int = 64
    every: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "samples"

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) or _is_conversation(self.prompts):
            self.prompts = [self.prompts]
        if not self.prompts or not all(map(_is_prompt, self.prompts)):
            raise BadArgument(expected("TextSamples's prompts to be texts of at least one character", self.prompts))
        for name in ("max_new_tokens", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"TextSamples's {name} to be at least 1", getattr(self, name)))

    def attach(self, trainer: TrainerLike) -> None:
        """Check that the task can generate."""
        generate = getattr(trainer.task, "generate", None)
        if not callable(generate) or "images" in inspect.signature(generate).parameters:
            received = type(trainer.task).__name__
            raise BadArgument(
                expected("a task with generate(prompts) for TextSamples", received, "Remove the callback.")
            )
        try:
            inspect.signature(generate).bind(self.prompts, max_new_tokens=self.max_new_tokens, **self.options)
            if hasattr(trainer.task, "check_generate_options"):
                trainer.task.check_generate_options(**self.options)
        except (TypeError, BadArgument) as error:
            name = type(trainer.task).__name__
            raise BadArgument(f"The options of TextSamples do not fit {name}.generate: {error}.") from error

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if not self.is_due():
            return
        prompts = list(self.prompts)
        with trainer.eval_mode():
            texts = trainer.task.generate(prompts, max_new_tokens=self.max_new_tokens, **self.options)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
            key = self.name if len(prompts) == 1 else f"{self.name}/{number}"
            trainer.logger.log_text(key, f"{_shown(prompt)}⟶{text}", trainer.state.step)
        samples = [{"prompt": _shown(prompt), "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        trainer.record("text", key=self.name, samples=samples)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def _is_prompt(prompt: Any) -> bool:
    return bool(prompt) if isinstance(prompt, str) else _is_conversation(prompt)


def _shown(prompt: Any) -> str:
    """
    >>> _shown([{"role": "user", "content": "Hi."}])
    'user: Hi.'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)


@dataclass
class ImageSamples(EveryNthEvaluation):
    """After each evaluation, record some images of each validation set with their true and predicted class.

    Records `n` evenly spaced images, the same each time, as the model sees them (without normalisation) and at most
    `size` pixels wide and high. They are stored as PNG in ``records.jsonl`` and shown in reports. Needs an image task
    whose `predict_step` returns the class as `prediction`. `every`: run after every N-th evaluation. Training is not
    affected.
    """

    n: int = 8
    size: int = 96
    every: int = 1
    key: str = "val"

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MAX_IMAGES:
            raise BadArgument(expected(f"ImageSamples's n to be from 1 to {_MAX_IMAGES}", self.n))
        for name in ("size", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"ImageSamples's {name} to be at least 1", getattr(self, name)))

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if not self.is_due():
            return
        for name in trainer.evaluated_sets or (None,):
            rows = trainer.sample_images(self.n, name)
            if not trainer.is_main:
                continue
            names = getattr(trainer.task, "class_names", None)
            shown = [
                {"png": _png(image, self.size), "caption": _caption(rows, place, names)}
                for place, image in enumerate(_pixels(rows["image"]))
            ]
            trainer.record("images", key=self.key if name is None else f"{self.key}/{name}", images=shown)


def _pixels(images: np.ndarray) -> np.ndarray:
    """Images as bytes, whatever preprocessing was applied.

    >>> _pixels(np.array([-1.0, 0.0, 1.0])), _pixels(np.array([0.0, 0.5]))
    (array([  0, 128, 255], dtype=uint8), array([  0, 128], dtype=uint8))
    """
    if images.dtype == np.uint8:
        return images
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:  # unknown preprocessing: stretch to the full range
        images = (images - low) / max(high - low, 1e-12)
    return (images * 255).round().astype(np.uint8)


def _png(image: np.ndarray, max_size: int) -> str:
    """A small PNG as base64."""
    pillow = require("PIL.Image", "vision", "to write images")
    picture = pillow.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    picture.thumbnail((max_size, max_size))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _caption(rows: dict[str, Any], index: int, names: Sequence[str] | None) -> str:
    def name(number: int) -> str:
        return names[number] if names and 0 <= number < len(names) else str(number)

    parts = []
    if "true" in rows:
        parts.append(f"true {name(int(rows['true'][index]))}")
    if "prediction" in rows and rows["prediction"].ndim == 1:
        sure = f" ({float(rows['probability'][index]):.2f})" if "probability" in rows else ""
        parts.append(f"predicted {name(int(rows['prediction'][index]))}{sure}")
    return ", ".join(parts)


@dataclass
class RolloutSamples:
    """Pass completions of the latest step, with their rewards, to the loggers and the terminal at every log point.

    Needs a task that samples completions (`GRPO`, `OnlineDPO`), which keeps `log_samples` of them. Without this
    callback they are only written to the run folder (``records.jsonl``).
    """

    n: int = 2
    every: int = 1  # log points
    name: str = "train/rollouts"
    _logged: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("n", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"RolloutSamples's {name} to be at least 1", getattr(self, name)))

    def attach(self, trainer: TrainerLike) -> None:
        """Check that the task samples completions."""
        kept = getattr(trainer.task, "log_samples", None)
        if kept is None:
            received = type(trainer.task).__name__
            raise BadArgument(
                expected("a task that samples completions for RolloutSamples", received, "Remove the callback.")
            )
        if kept < self.n:
            raise BadArgument(expected(f"a task that keeps {self.n} rollouts", kept, f"Pass log_samples={self.n}."))

    def on_log(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        if "train/loss" not in metrics:
            return
        self._logged += 1
        if self._logged % self.every:
            return
        samples = trainer.task.training_records().get("text", {}).get("samples", [])[: self.n]
        for number, sample in enumerate(samples, start=1):
            reward = "none" if sample["reward"] is None else f"{sample['reward']:.4g}"
            text = f"{sample['prompt']}⟶{sample['text']}\nreward {reward}, {sample['tokens']} tokens"
            trainer.logger.log_text(f"{self.name}/{number}", text, trainer.state.step)

    def state_dict(self) -> dict[str, Any]:
        return {"logged": self._logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logged = state["logged"]
