"""Texts that a model writes during training, for people to read."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected


@dataclass
class TextSamples:
    """After each evaluation, let the model go on from some prompts, and hand the texts to loggers and records.

    It asks for a task that can `generate` (`CausalLM`, `Seq2Seq`, ...). `options` go to transformers' `generate`
    (`do_sample`, `temperature`, `num_beams`, ...); what is sampled depends on the seed of the run alone, and training
    goes on as if nothing had happened. `every`: after each so-many-th evaluation only.
    """

    prompts: Sequence[str]
    max_new_tokens: int = 64
    every: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "samples"

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str):
            self.prompts = [self.prompts]
        if not self.prompts or not all(isinstance(prompt, str) and prompt for prompt in self.prompts):
            raise BadArgument(expected("TextSamples's prompts to be texts of at least one character", self.prompts))
        for name in ("max_new_tokens", "every"):
            if getattr(self, name) < 1:
                raise BadArgument(expected(f"TextSamples's {name} to be at least 1", getattr(self, name)))
        self._evaluations = 0

    def attach(self, trainer: TrainerLike) -> None:
        """See that there is somebody to write."""
        generate = getattr(trainer.task, "generate", None)
        if not callable(generate) or "images" in inspect.signature(generate).parameters:
            raise BadArgument(
                expected("a task with generate(prompts) for TextSamples", type(trainer.task).__name__, "Leave it out.")
            )

    def on_validation_end(self, trainer: TrainerLike, metrics: dict[str, float]) -> None:
        """Write."""
        self._evaluations += 1
        if self._evaluations % self.every:
            return
        prompts = list(self.prompts)
        with trainer.eval_mode():
            texts = trainer.task.generate(prompts, max_new_tokens=self.max_new_tokens, **self.options)
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
            key = self.name if len(prompts) == 1 else f"{self.name}/{number}"
            trainer.logger.log_text(key, f"{prompt}⟶{text}", trainer.state.step)
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        trainer.record("text", key=self.name, samples=samples)

    def state_dict(self) -> dict[str, Any]:
        """How many evaluations there were."""
        return {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._evaluations = state["evaluations"]
