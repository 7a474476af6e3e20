"""NEFTune for tasks with causal language models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.models.neftune import EmbeddingNoise, document_lengths, input_embeddings
from trainformer.tasks.language.base import LanguageTask


@dataclass(eq=False)
class NoisyEmbeddingsMixin(LanguageTask):
    """Adds uniform noise to the input embeddings in training (NEFTune), at most `neftune_noise_alpha` / sqrt(L d).

    L is the number of tokens of a document without padding, as in the paper (transformers and TRL take the padded
    length); d the width. The noise depends on seed, step and tokens only. There is none in evaluation and generation.
    """

    _: KW_ONLY
    neftune_noise_alpha: float | None = None

    def _init_task(self) -> None:
        super()._init_task()
        alpha = self.neftune_noise_alpha
        self._noise: EmbeddingNoise | None = None
        if alpha is None:
            return
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
            what = "neftune_noise_alpha to be a number of at least 0, or None"
            raise BadArgument(expected(what, alpha, "5 is usual."))
        self._noise = EmbeddingNoise(float(alpha))

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        if self._noise is not None:
            self._noise.seed = int(settings.seed)
            if settings.strategy == "pipeline":
                do = "Use another strategy, or leave neftune_noise_alpha out."
                raise BadArgument(expected("a strategy with the embeddings on each rank for NEFTune", "pipeline", do))
        return super().training_defaults(settings, chosen)

    def _load(self) -> nn.Module:
        model = super()._load()
        self._add_noise(model)
        return model

    def configure(self, info: Any) -> None:
        super().configure(info)
        self._add_noise(self.model)  # if the user has set `model`

    def _add_noise(self, model: nn.Module) -> None:
        """Add the hook, once. It is no part of a state dict."""
        if self._noise is None:
            return
        layer = input_embeddings(unwrap_model(model))
        if layer is None:
            do = "Leave neftune_noise_alpha out."
            raise BadArgument(expected("a model with input embeddings for NEFTune", type(model).__name__, do))
        if self._noise not in layer._forward_hooks.values():
            layer.register_forward_hook(self._noise)

    def _noisy(self, batch: Mapping[str, Tensor], in_eval: bool = False) -> AbstractContextManager[None]:
        """A context for the forward pass of a training batch."""
        if self._noise is None:
            return nullcontext()
        rows = {name: batch[name].flatten(0, -2) for name in batch if batch[name].ndim > 1}
        return self._noise.rows(rows["input_ids"], document_lengths(rows), in_eval)

    # -- state ---------------------------------------------------------------------------------------------

    def on_step_end(self, step: int, max_steps: int) -> None:
        super().on_step_end(step, max_steps)
        if self._noise is not None:
            self._noise.step = step

    def state_dict(self) -> dict[str, Any]:
        """The step, which the noise of the next one depends on."""
        state = super().state_dict()
        return state if self._noise is None else {**state, "neftune_step": self._noise.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._noise is not None:
            self._noise.step = int(state.get("neftune_step", 0))
