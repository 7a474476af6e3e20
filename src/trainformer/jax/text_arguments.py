"""`TextArguments` and `LoRAConfig`: what all trainers for language models are configured with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainformer.core.errors import BadArgument, check_choice, did_you_mean, expected
from trainformer.data.text.encode import TRUNCATION
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.previews import PreviewArguments
from trainformer.jax.router_loss import SCOPES
from trainformer.models.jax.lora import apply_lora, load_lora
from trainformer.models.jax.quantization import check_quantization


@dataclass(kw_only=True)
class TextArguments(PreviewArguments):
    """`TrainingArguments` plus the arguments of all language-model trainers."""

    quantization: str | None = None  # with lora: int8, int4 or nf4 for the frozen weights of the layers
    truncation: str = "auto"  # for records that are too long: split, truncate, drop; auto: texts are split
    prompt_template: str | None = None  # a format string over the fields of a record
    chunk_tokens: int | None = None  # tokens per device with logits in memory at once; None: 1 GiB of logits, 0: all
    cache_dir: str | None = None  # for tokenised data; None: the user's cache
    router_aux_loss_coef: float | None = None  # of a mixture of experts; None: that of the model's config
    router_z_loss_coef: float = 0.0
    router_loss: str = "step"  # of the tokens of a whole optimizer step, or of a micro-batch ("batch")

    def check(self) -> None:
        super().check()
        if self.quantization is not None:
            check_quantization(self.quantization)
        check_choice("router_loss", self.router_loss, SCOPES)
        self._weight("router_z_loss_coef")
        if self.router_aux_loss_coef is not None:
            self._weight("router_aux_loss_coef")
        if self.truncation not in TRUNCATION:
            do = did_you_mean(str(self.truncation), TRUNCATION)
            raise BadArgument(expected(f"truncation to be one of {', '.join(TRUNCATION)}", self.truncation, do))
        self._integer("chunk_tokens", 0, or_none=True)

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """Convert plain `TrainingArguments`: their passed values, with the defaults of this class."""
        if isinstance(arguments, cls):
            return arguments
        if not isinstance(arguments, TrainingArguments):
            raise BadArgument(expected(f"arguments to be {cls.__name__}", type(arguments).__name__))
        foreign = arguments.passed - set(cls.field_names())
        if foreign:
            what = f"arguments to be {cls.__name__}, or TrainingArguments"
            raise BadArgument(expected(what, f"{type(arguments).__name__} with {', '.join(sorted(foreign))}"))
        return cls(**{name: getattr(arguments, name) for name in arguments.passed})


@dataclass(frozen=True)
class LoRAConfig:
    """Settings of LoRA; see `trainformer.models.jax.apply_lora`.

    `targets` are layer names (ours or HF's), a regex over paths, "all-linear", or None for queries and values. `folder`
    is a peft adapter to continue from; it determines all other settings.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: str | tuple[str, ...] | list[str] | None = None
    modules_to_save: tuple[str, ...] | list[str] = ()
    folder: str | Path | None = None

    @classmethod
    def parse(cls, given: Any) -> LoRAConfig | None:
        """From a `LoRAConfig`, a dict of its fields, the folder of an adapter, True, or None."""
        if given is None or given is False:
            return None
        if given is True or isinstance(given, (str, Path)):
            return cls(folder=None if given is True else given)
        if isinstance(given, Mapping):
            names = [field.name for field in dataclasses.fields(cls)]
            for name in given:
                if name not in names:
                    raise BadArgument(expected("fields of LoRAConfig", name, did_you_mean(str(name), names)))
            return cls(**given)
        if not isinstance(given, cls):
            do = "Pass a LoRAConfig, a dict of its fields, or the folder of an adapter."
            raise BadArgument(expected("lora to be a LoRAConfig", type(given).__name__, do))
        return given

    def apply(self, model: Any, seed: int) -> str:
        """Add LoRA to a model, in place. Returns the regex of the frozen parameters."""
        if self.folder is not None:
            return load_lora(model, self.folder)
        saved = tuple(self.modules_to_save)
        return apply_lora(model, self.r, self.alpha, self.dropout, self.targets, modules_to_save=saved, seed=seed)


def refuse_values(arguments: TextArguments, do: str, **allowed: tuple[Any, ...]) -> None:
    """Raise for arguments of all text trainers that mean nothing for one of them. `allowed` are their values."""
    for name, values in allowed.items():
        if getattr(arguments, name) not in values:
            what = f"{name}={' or '.join(map(repr, values))} in {type(arguments).__name__}"
            raise BadArgument(expected(what, getattr(arguments, name), do))
