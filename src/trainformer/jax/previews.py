"""`Previews`: a callback that prints completions of some prompts during training, and the arguments that ask for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, expected
from trainformer.data.text.generation import is_conversation
from trainformer.data.text.sources import load_text
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.generation import SAMPLING, sampling_options
from trainformer.models.generation import SamplingOptions

logger = logging.getLogger("trainformer")


@dataclass(kw_only=True)
class PreviewArguments(TrainingArguments):
    """`TrainingArguments` plus those of previews, under the names that EasyDeL gives them."""

    generation_interval: int | None = None  # print completions of generation_prompts every so many steps
    generation_prompts: list[Any] | None = None  # texts, or conversations (lists of messages)
    generation_max_new_tokens: int | None = None  # None: 32
    generation_num_prompts: int | None = (
        None  # at most so many; None: all, and one of the training data if they are used
    )
    generation_use_train_prompts: bool = False  # also complete prompts of the training data
    generation_dataset_prompt_field: str | None = "prompt"  # their column
    generation_num_return_sequences: int | None = None  # completions of each prompt; None: 1
    generation_seed: int | None = None  # of the choice of prompts, and of sampling
    generation_do_sample: bool | None = None  # None: if one of the following is set
    generation_temperature: float | None = None
    generation_top_k: int | None = None
    generation_top_p: float | None = None
    generation_repetition_penalty: float | None = None
    generation_config_overrides: dict[str, Any] | None = None  # further options by their names in transformers

    def check(self) -> None:
        super().check()
        for name in ("interval", "max_new_tokens", "num_prompts", "num_return_sequences"):
            self._integer(f"generation_{name}", 1, or_none=True)
        self._integer("generation_seed", 0, or_none=True)
        prompts = self.generation_prompts or ()
        are_prompts = all((isinstance(each, str) and each) or is_conversation(each) for each in prompts)
        asked = bool(prompts) or self.generation_use_train_prompts
        if self.generation_interval is None and asked:
            logger.warning("generation prompts have no effect without generation_interval")
        if not are_prompts or (self.generation_interval is not None and not asked):
            do = "Pass generation_prompts=['...'], or generation_use_train_prompts=True."
            what = "texts or messages to complete with generation_interval"
            raise BadArgument(expected(what, self.generation_prompts, do))
        options = self.preview_options()
        given = {name: options[name] for name in SAMPLING if name in options}
        SamplingOptions(options.get("max_new_tokens", 32), **given)
        if options.get("num_return_sequences", 1) > 1 and not (options.keys() & {"do_sample", *SAMPLING}):
            do = "Pass generation_temperature=1.0."
            raise BadArgument(expected("sampling with generation_num_return_sequences", "greedy previews", do))

    def preview_options(self) -> dict[str, Any]:
        """Options of `TextTrainer.generate` for previews, and `num_return_sequences`."""
        names = ("max_new_tokens", "num_return_sequences", "do_sample", "seed", *SAMPLING)
        given = {name: getattr(self, f"generation_{name}", None) for name in names}
        given |= self.generation_config_overrides or {}
        found = {name: value for name, value in given.items() if value is not None}
        sampling_options({name: value for name, value in found.items() if name not in names[:2] and name != "seed"})
        return found


class Previews:
    """A callback that prints completions of some prompts every few steps. All processes generate, the first prints."""

    def __init__(self, arguments: PreviewArguments) -> None:
        self.interval = arguments.generation_interval or 1
        self.prompts = (arguments.generation_prompts or [])[: arguments.generation_num_prompts]
        self.options = arguments.preview_options()
        self.count = self.options.pop("num_return_sequences", 1)
        self.field = arguments.generation_dataset_prompt_field or "prompt"
        self.seed = arguments.generation_seed or 0
        wanted = arguments.generation_num_prompts or len(self.prompts) + 1
        self.missing = wanted - len(self.prompts) if arguments.generation_use_train_prompts else 0

    def on_train_begin(self, trainer: Any) -> None:
        if self.missing > 0:
            self.prompts = [*self.prompts, *self._of_training_data(trainer.dataset_train)]
            self.missing = 0

    def _of_training_data(self, data: Any) -> list[Any]:
        records = load_text(data) if isinstance(data, (str, Path)) else data
        if not hasattr(records, "__getitem__") or isinstance(records, Mapping):
            do = "Pass generation_prompts instead."
            raise BadArgument(expected("training data with an index for generation_use_train_prompts", type(data), do))
        chosen = np.random.default_rng(self.seed).choice(len(records), min(self.missing, len(records)), replace=False)
        found = [records[int(index)] for index in chosen]
        for record in found:
            prompt = record.get(self.field) if isinstance(record, Mapping) else None
            if not isinstance(prompt, str) and not is_conversation(prompt):
                what = f"records with the text or messages {self.field!r} (generation_dataset_prompt_field)"
                raise BadArgument(expected(what, list(record) if isinstance(record, Mapping) else record))
        return [record[self.field] for record in found]

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step % self.interval:
            return
        prompts = [prompt for prompt in self.prompts for _ in range(self.count)]
        for prompt, completion in zip(prompts, trainer.generate(prompts, **self.options), strict=True):
            if trainer.is_main:
                shown = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']} -> "
                logger.info("step %d: %s", step, shown + completion)
