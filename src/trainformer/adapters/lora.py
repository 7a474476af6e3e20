"""LoRA on any module with linear, embedding or convolution layers. `targets` selects the layers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import nn

from trainformer.adapters.base import Adapter, adapted_model, peft, task_type, unwrap_model
from trainformer.adapters.state import base_vocabulary_size, vocabulary_size
from trainformer.adapters.targets import (
    Targets,
    adapted_layers,
    check_names,
    head_names,
    is_conv1d,
    names_of,
    resolve_parameters,
    resolve_targets,
    tied_embeddings,
)
from trainformer.core.errors import BadArgument, NonFiniteError, check_choice, check_count, expected

logger = logging.getLogger("trainformer")

# peft's other schemes (pissa, olora, ...) change the frozen weights: an adapter saved alone would not restore them.
_INITS = (True, False, "gaussian", "orthogonal")


@dataclass
class LoRA(Adapter):
    """Low-rank adaptation: y = W x + (alpha / r) B A x, with W frozen.

    Args:
        r: Rank. Each adapted layer of size (n, m) gets r * (n + m) parameters.
        alpha: Scale of the update, divided by `r` (by its square root with `use_rslora`).
        dropout: Dropout on the input of the adapter.
        target_modules: Layers to adapt: names or suffixes of names, "all-linear", or a regular expression over full
            names. Default: peft's choice for the architecture (mostly query and value), else all linear layers except
            the head. On a vision-language model, names without a dot refer to the language model only.
        target_parameters: Stacked weights of experts to adapt as well: names or suffixes of parameters such as
            "experts.down_proj", or "experts" for all of them. It needs ``dropout=0``.
        use_dora: Learn direction and magnitude of each weight separately (DoRA). Slower, better at low ranks.
        use_rslora: Scale by alpha / sqrt(r), which stabilises high ranks.
        bias: Biases to train: "none", "all" or "lora_only".
        modules_to_save: Modules to train in full and save with the adapter. The head of a classifier always is.
        trainable_token_indices: Rows of the embeddings to train (new tokens): a list, or one list per embedding name.
        init: True (B is zero, so training starts at the base model), "gaussian", "orthogonal", or False (random).

    >>> adapter = LoRA(r=2, target_modules=["0"])
    >>> model = adapter.apply(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)  # 2 * (4 + 3)
    14
    >>> type(adapter.merge(model))
    <class 'torch.nn.modules.container.Sequential'>
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.1
    target_modules: Targets = None
    _: KW_ONLY
    use_dora: bool = False
    use_rslora: bool = False
    bias: str = "none"
    modules_to_save: Sequence[str] | None = None
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    init: bool | str = True
    target_parameters: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        check_count("r", self.r, do="Pass r=8, for instance.")
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not number or not math.isfinite(self.alpha) or self.alpha <= 0:
            raise BadArgument(expected("alpha to be a positive number", self.alpha, "Pass alpha=2 * r, for instance."))
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise BadArgument(expected("dropout to be from 0 to below 1", self.dropout, "Pass dropout=0.1."))
        check_choice("bias", self.bias, ("none", "all", "lora_only"))
        if self.init not in _INITS:
            do = "Others change the frozen weights, and a checkpoint of the adapter alone would not restore them."
            raise BadArgument(expected("init to be True, False, 'gaussian' or 'orthogonal'", self.init, do))
        if self.init == "orthogonal" and self.r % 2:
            raise BadArgument(expected("an even r with init='orthogonal'", self.r))
        if self.target_parameters is not None and (self.dropout or self.use_dora):
            received = "use_dora=True" if self.use_dora else f"dropout={self.dropout}"
            do = "Adapters of stacked weights have no input of their own to drop. Pass dropout=0, and no use_dora."
            raise BadArgument(expected("LoRA without dropout and DoRA for target_parameters", received, do))
        for argument in ("target_modules", "modules_to_save"):
            given = getattr(self, argument)
            if given is None or (argument == "target_modules" and isinstance(given, str) and given):
                continue
            is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
            if not is_list or not all(isinstance(name, str) and name for name in given):
                what = f"{argument} to be a list of names of modules"
                raise BadArgument(expected(what, given, f'Pass {argument}=["q_proj", "v_proj"], for instance.'))

    def apply(self, model: nn.Module, *, kind: str | None = None) -> nn.Module:
        """Freeze a model and add LoRA, in place. The head of a classifier stays trainable and is saved."""
        adapted = super().apply(model, kind=kind)
        plain = unwrap_model(model)
        rows, before = vocabulary_size(plain), base_vocabulary_size(plain)
        trained = self.trainable_token_indices is not None or self.modules_to_save
        if rows is not None and before is not None and rows > before and not trained:
            logger.warning(
                "%d tokens were added to the vocabulary; LoRA does not train their embeddings. "
                "Pass trainable_token_indices=list(range(%d, %d)) to train them.",
                rows - before,
                before,
                rows,
            )
        return adapted

    def peft_config(self, model: nn.Module, kind: str | None = None) -> Any:
        """The `LoraConfig` for a model, with resolved targets."""
        heads = head_names(model, kind)
        full = list(dict.fromkeys([*heads, *(self.modules_to_save or ())]))
        check_names(model, full, "modules_to_save")
        targets = resolve_targets(model, self.target_modules, kind, full)
        return peft().LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            target_parameters=resolve_parameters(model, self.target_parameters),
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            bias=self.bias,
            modules_to_save=full or None,
            trainable_token_indices=self._token_rows(model),
            init_lora_weights=self.init,
            # GPT-2 stores transposed weights; peft would find out by itself, with a warning for each layer.
            fan_in_fan_out=all(is_conv1d(type(layer)) for layer in adapted_layers(model, targets)),
            # Keep tied embeddings tied when they are trained in full.
            ensure_weight_tying=bool(names_of(model, tied_embeddings(model), full)),
            task_type=task_type(kind),
        )

    def merge(self, model: nn.Module) -> nn.Module:
        """Merge the adapter into the weights. Returns the plain model; the adapted one is consumed.

        In float32 the outputs agree to about 1e-6; in bf16 the sum is rounded to 8 bits.
        """
        return merge_peft_model(adapted_model(model))

    def _token_rows(self, model: nn.Module) -> list[int] | dict[str, list[int]] | None:
        given = self.trainable_token_indices
        if given is None:
            return None
        rows = vocabulary_size(model)
        if rows is None:
            what = "a model with token embeddings for trainable_token_indices"
            raise BadArgument(expected(what, type(model).__name__))
        lists = given.values() if isinstance(given, Mapping) else [given]
        for index in (index for indices in lists for index in indices):
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < rows:
                do = "Call model.resize_token_embeddings(len(tokenizer)) before, if tokens were added."
                what = f"trainable_token_indices from 0 to {rows - 1}, the rows of the embeddings"
                raise BadArgument(expected(what, index, do))
        if isinstance(given, Mapping):
            check_names(model, list(given), "trainable_token_indices")
            self._check_tied_rows(model, given)
            return {name: list(indices) for name, indices in given.items()}
        return list(given)

    @staticmethod
    def _check_tied_rows(model: nn.Module, given: Mapping[str, Sequence[int]]) -> None:
        """Reject rows of one of two tied layers alone: peft would train a copy, and merge it into both."""
        tied = tied_embeddings(model)
        named = {name: list(rows) for name, rows in given.items() if names_of(model, tied, [name])}
        inputs = names_of(model, tied[:1], list(named))
        if named and (not inputs or any(rows != named[inputs[0]] for rows in named.values())):
            what = "trainable_token_indices of the input embeddings, whose weight the output layer shares"
            raise BadArgument(expected(what, dict(given), "Pass a list of rows: it is for both."))


def merge_peft_model(model: Any) -> nn.Module:
    """Merge a `PeftModel` into a plain model whose weights are all trainable."""
    try:
        plain = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        raise NonFiniteError(f"The adapter has weights that are not finite, and was not merged: {error}") from error
    if hasattr(plain, "peft_config"):  # left behind by peft
        del plain.peft_config
    for parameter in plain.parameters():
        if parameter.is_floating_point() or parameter.is_complex():  # not the packed integers of quantised weights
            parameter.requires_grad_(True)
    return plain
