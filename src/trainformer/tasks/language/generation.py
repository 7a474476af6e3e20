"""Generating with causal language models, whatever they were trained by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.data.text.collate import pad
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import LanguageTask


class GenerationMixin(LanguageTask):
    """Base of tasks whose model continues texts."""

    @torch.no_grad()
    def generate(self, prompts: str | Sequence[str], max_new_tokens: int = 64, **options: Any) -> list[str]:
        """Continuations of prompts; `options` go to transformers' `generate` (`do_sample`, `temperature`, ...)."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or any(not text for text in texts):
            raise BadArgument(expected("prompts of at least one character", prompts))
        model: Any = self.model
        # On the left: what is generated must follow the prompt, and not its padding.
        examples = [{"input_ids": self.text(text)["input_ids"]} for text in texts]
        batch = pad(examples, self.text.pad_token_id, side="left", multiple_of=1)
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        with eval_mode(model):
            made = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                **{"do_sample": False, "pad_token_id": self.text.pad_token_id, **options},
            )
        return self.text.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
