"""What tasks on text share: the model and its tokenizer, tokenising data once, and what lies beside the weights.

Owns when the model is built, how an adapter is put on it, and that a checkpoint of the task opens with transformers or
peft. What is learned is for the tasks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trainformer.adapters.base import Adapter
from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import has_tokens
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import tokenize
from trainformer.models.language import ensure_pad_token, load_model, load_tokenizer
from trainformer.tasks.adapter_mixin import AdapterMixin

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LanguageTask(AdapterMixin):
    """Base of the tasks on text. A subclass is a dataclass with the fields annotated here."""

    kind: ClassVar[str]
    groups_by_length: ClassVar[bool] = False  # whether batches of like lengths are the default: less padding

    model_name: Any
    adapter: Adapter | None
    max_length: int
    tokenizer: Any
    dtype: str | None
    attention: str | None
    cache_dir: str | Path | None
    model_kwargs: dict[str, Any]

    def _begin(self) -> None:
        """Check what can be checked before anything is loaded. For `__post_init__`."""
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise BadArgument(expected(f"dtype to be one of {', '.join(_DTYPES)} or None", self.dtype))
        if isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 2:
            raise BadArgument(expected("max_length to be a whole number of at least 2", self.max_length))
        self._check_adapter(self.kind, packing=bool(getattr(self, "packing", False)))
        self._model: nn.Module | None = None
        self._tokenizer: Any = None

    # -- the model -----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model, loaded or built when it is first asked for: by a trainer that is after seeding."""
        if self._model is None:
            self._model = self._load()
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    def text(self) -> Any:
        """The tokenizer."""
        if self._tokenizer is None:
            source = self.tokenizer if self.tokenizer is not None else self.model_name
            if not isinstance(source, str | Path) and not hasattr(source, "encode"):
                raise BadArgument(
                    "Expected a tokenizer, received a model without the name of one. Pass tokenizer=, which is a "
                    "tokenizer, or the name or folder of one."
                )
            self._tokenizer = load_tokenizer(source)
            ensure_pad_token(self._tokenizer)
        return self._tokenizer

    def _load(self) -> nn.Module:
        options = dict(self.model_kwargs)
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        if self.adapter is not None:
            options = {**self.adapter.load_options(self.kind), **options}
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        model = load_model(self.model_name, self.kind, dtype=dtype, **options)
        self._fit_vocabulary(model)
        return model if self.adapter is None else self.adapter.apply(model, kind=self.kind)

    def _fit_vocabulary(self, model: Any) -> None:
        """A tokenizer that knows more tokens than the model has rows for would index beyond its embeddings."""
        rows = model.get_input_embeddings().weight.shape[0]
        if len(self.text) > rows:
            model.resize_token_embeddings(len(self.text))

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Batches of like lengths, and the optimizer that an adapter advises.

        And here the adapter hears of settings of the run that it cannot live with.
        """
        packing = bool(getattr(self, "packing", False))
        if self.adapter is not None:
            checkpointing = settings.gradient_checkpointing
            self.adapter.check(kind=self.kind, packing=packing, gradient_checkpointing=checkpointing)
        wanted = {"sampler": "length"} if self.groups_by_length and not packing else {}
        advised = getattr(self.adapter, "optimizer", None)
        on_cuda = torch.cuda.is_available() and str(settings.device or "cuda").startswith("cuda")
        return wanted | ({"optimizer": advised} if advised and on_cuda else {})

    def configure(self, info: Any) -> None:
        """Load the model now, after seeding."""
        assert self.model is not None

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        """Text by path or name; see `trainformer.data.text.load_text`."""
        return load_text(path)

    def _tokenized(self, dataset: Any, encoder: Encoder, name: str) -> Any:
        """Every record once through the tokenizer, or from the cache."""
        records: Any = StandardRecords(dataset) if not has_tokens(dataset) else dataset
        return tokenize(records, encoder, cache_dir=self.cache_dir, name=name)

    # -- records -------------------------------------------------------------------------------------------

    def save_assets(self, folder: Path) -> list[str]:
        """What `from_pretrained` looks for beside the weights: configurations and the tokenizer, or the adapter."""
        before = set(folder.iterdir())
        super().save_assets(folder)
        if self.adapter is None:
            model: Any = self.model
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(folder)
        self.text.save_pretrained(folder)
        return sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down."""
        written = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        for name in ("model_name", "tokenizer"):
            if written[name] is not None and not isinstance(written[name], str | Path):
                written[name] = type(written[name]).__name__
        written["adapter"] = None if self.adapter is None else repr(self.adapter)
        return written
