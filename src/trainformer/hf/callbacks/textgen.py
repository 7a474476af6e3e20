"""`TextgenCallback`: generates texts during training, with transformers' `generate`, without affecting the run."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainformer.backends.torch import capture_random, restore_random
from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require
from trainformer.data.text.collate import pad
from trainformer.hf.callbacks.common import trainer_api
from trainformer.hf.callbacks.tensorboard import WritingCallback
from trainformer.models.modes import eval_mode

logger = logging.getLogger("trainformer")

_DEFAULT_NEW_TOKENS = 64
# Setting one of these implies do_sample=True.
_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "typical_p")


class TextgenCallback(WritingCallback):
    """Every `generation_steps` steps, generates completions of all prompts in one batch, and logs them.

    Texts go to `summary_writer` (a `SummaryWriter` or a folder) and to the loggers of the run, as
    ``<name>/<number of the prompt>``. With ``generation_steps=None`` it generates after each evaluation.

    `generation_config` is a dict of transformers' options (`max_new_tokens`, `do_sample`, `temperature`, ...), or a
    `GenerationConfig`. Defaults for a dict: 64 new tokens (fewer if the model has fewer positions left), and greedy
    decoding unless you set a sampling option such as `temperature`, `top_p` or `top_k`. `max_new_tokens` can also be
    passed by itself. The tokenizer is the `processing_class` of the trainer. A trial when training begins shows errors
    early.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        prompts: Sequence[str] = (),
        generation_config: Any = None,
        generation_steps: int | None = 1000,
        max_new_tokens: int | None = None,
        name: str = "generated",
    ) -> None:
        if not prompts and isinstance(summary_writer, list | tuple):  # TextgenCallback(prompts)
            summary_writer, prompts = None, summary_writer
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self.prompts or not all(isinstance(prompt, str) and prompt for prompt in self.prompts):
            raise BadArgument(expected("TextgenCallback's prompts to be texts of at least one character", self.prompts))
        if generation_steps is not None and (not isinstance(generation_steps, int) or generation_steps < 1):
            what = "TextgenCallback's generation_steps to be a positive number of steps, or None for evaluations"
            raise BadArgument(expected(what, generation_steps))
        self.generation_steps = generation_steps
        self.generation_config = {} if generation_config is None else generation_config
        if max_new_tokens is not None:
            config = copy.deepcopy(self.generation_config)
            if isinstance(config, dict):
                config["max_new_tokens"] = max_new_tokens
            else:
                config.max_new_tokens = max_new_tokens
            self.generation_config = config
        self.name = name
        super().__init__(summary_writer)

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check model, tokenizer and options, and generate once."""
        if not callable(processing_class) or not hasattr(processing_class, "batch_decode"):
            do = "Pass processing_class=tokenizer to the trainer."
            raise BadArgument(expected("a tokenizer for TextgenCallback", processing_class, do))
        able = getattr(model, "can_generate", lambda: True)()
        if not able or not callable(getattr(model, "generate", None)):
            do = "Use one with a language-model head, or remove the callback."
            raise BadArgument(expected("a model that can generate for TextgenCallback", type(model).__name__, do))
        self._check_options(model)
        try:  # fail now rather than after the first thousand steps
            with _eval_mode(model, kwargs.get("trainer")) as eval_model:
                self._generate(eval_model, processing_class, kwargs.get("trainer"))
        except Exception as error:
            do = "Do prompts and max_new_tokens together exceed the positions of the model?"
            what = "prompts and a generation_config that the model can generate with"
            raise BadArgument(expected(what, f"{type(error).__name__}: {error}", do)) from error
        self._writer.open(state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.generation_steps is not None and state.global_step % self.generation_steps == 0:
            self._show(state, **kwargs)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.generation_steps is None:
            self._show(state, **kwargs)

    def _show(
        self, state: TrainerState, model: Any = None, processing_class: Any = None, trainer: Any = None, **_: Any
    ) -> None:
        # On every rank: the model may be sharded.
        with _eval_mode(model, trainer) as eval_model:
            texts = self._generate(eval_model, processing_class, trainer)
        if not state.is_world_process_zero:
            return
        log_text = getattr(getattr(trainer_api(trainer), "logger", None), "log_text", None)
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True), start=1):
            key, shown = f"{self.name}/{number}", f"{prompt}⟶{text}"
            self._writer.add_text(key, shown, state.global_step)
            if log_text is not None:
                log_text(key, shown, state.global_step)

    def _generate(self, model: Any, tokenizer: Any, trainer: Any) -> list[str]:
        """Generate through the strategy, which can call a sharded model."""
        run = getattr(trainer_api(trainer), "_run", None)
        if run is None:
            return self.generate(model, tokenizer)
        return run.backend.strategy.infer(lambda _: self.generate(model, tokenizer), None)

    @torch.no_grad()
    def generate(self, model: Any, tokenizer: Any) -> list[str]:
        """The completions of the prompts, computed in one batch."""
        padding = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        examples = [{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in self.prompts]
        # Pad on the left: new tokens must follow the prompt, not its padding.
        batch = pad(examples, padding, side="left", multiple_of=1)
        device = next(model.parameters()).device
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        length, config = inputs["input_ids"].shape[1], getattr(model, "config", None)
        is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
        room = (getattr(config, "max_position_embeddings", None) or _DEFAULT_NEW_TOKENS + length) - length
        tokens = model.generate(
            **inputs, **self.generate_kwargs(padding, _DEFAULT_NEW_TOKENS if is_encoder_decoder else room)
        )
        if not is_encoder_decoder:
            tokens = tokens[:, length:]
        return tokenizer.batch_decode(tokens, skip_special_tokens=True)

    def generate_kwargs(self, padding: int, room: int = _DEFAULT_NEW_TOKENS) -> dict[str, Any]:
        """The keyword arguments of `generate` besides the inputs, with our defaults."""
        config = self.generation_config
        if not isinstance(config, dict):
            known = {} if getattr(config, "pad_token_id", None) is not None else {"pad_token_id": padding}
            return {"generation_config": config, **known}
        samples = any(config.get(name) is not None for name in _SAMPLING_OPTIONS)
        length = {} if "max_length" in config else {"max_new_tokens": max(1, min(_DEFAULT_NEW_TOKENS, room))}
        return {**length, "do_sample": samples, "pad_token_id": padding, **config}

    def _check_options(self, model: Any) -> None:
        if not isinstance(self.generation_config, dict):
            return
        transformers = require("transformers", "text", "to generate texts")
        known = {*vars(transformers.GenerationConfig()), *inspect.signature(model.generate).parameters} - {"kwargs"}
        unknown = {name for name in self.generation_config if name not in known}
        for name in sorted(unknown):
            hint = did_you_mean(name, known)
            logger.warning(
                "generation_config: %r is no option of transformers' generate, and is left out. %s", name, hint
            )
        self.generation_config = {name: value for name, value in self.generation_config.items() if name not in unknown}


@contextmanager
def _eval_mode(model: Any, trainer: Any) -> Iterator[Any]:
    """The model (its EMA, if there is one) in eval mode; the random state is restored afterwards."""
    api = trainer_api(trainer)
    if hasattr(api, "eval_mode"):
        with api.eval_mode():
            yield api.task.model
        return
    random = capture_random()
    try:
        with eval_mode(model):
            yield model
    finally:
        restore_random(random)
