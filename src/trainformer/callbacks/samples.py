"""Log images with predictions, or generated texts, after each evaluation."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainformer.callbacks.base import EveryNthEvaluation, TrainerLike
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from torch import Tensor

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

    needs_torch = True

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
            rows = trainer.sample_predictions(self.n, _images_and_labels, name)
            if not trainer.is_main:
                continue
            images = _pixels(trainer.task, rows["image"])
            names = getattr(trainer.task, "class_names", None)
            shown = [
                {"png": _png(image, self.size), "caption": _caption(rows, place, names)}
                for place, image in enumerate(images)
            ]
            trainer.record("images", key=self.key if name is None else f"{self.key}/{name}", images=shown)


def _images_and_labels(batch: Any) -> dict[str, Tensor]:
    import torch

    from trainformer.data.image import split_sample

    images, labels = split_sample(batch)
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
        received = f"shape {tuple(images.shape)}" if isinstance(images, torch.Tensor) else type(images).__name__
        raise DataError(expected("ImageSamples to get batches of images (N, 1 or 3, H, W)", received, "Remove it."))
    has_classes = isinstance(labels, torch.Tensor) and labels.ndim == 1 and not labels.is_floating_point()
    return {"image": images, **({"true": labels} if has_classes else {})}


def _pixels(task: Any, images: Tensor) -> Tensor:
    """Images in [0, 1], whatever preprocessing was applied."""
    import torch

    low, high = float(images.min()), float(images.max())
    if images.dtype == torch.uint8:
        return images.float() / 255
    if low >= 0 and high <= 1:
        return images.float()
    if hasattr(task, "as_pixels"):
        return task.as_pixels(images).clamp(0, 1)
    return (images.float() - low) / max(high - low, 1e-12)  # unknown preprocessing: stretch to the full range


def _png(image: Tensor, max_size: int) -> str:
    """A small PNG as base64."""
    pillow = require("PIL.Image", "vision", "to write images")
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    picture = pillow.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
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
