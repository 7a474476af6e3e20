"""Base classes of the text tasks: model and tokenizer loading, tokenisation, token-level losses, generation.

Checkpoints open with transformers' `from_pretrained`, or with peft if there is an adapter.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.adapters.base import Adapter, unwrap_model
from trainformer.core import BadArgument, Loss
from trainformer.core.errors import check_count, expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoder
from trainformer.data.text.prepare import has_tokens
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import tokenize
from trainformer.losses.tokens import TokenLoss, linear_cross_entropy, token_cross_entropy
from trainformer.models.embeddings import use_padding_row
from trainformer.models.language import OutputStates, ensure_pad_token, load_model, load_tokenizer
from trainformer.models.modes import eval_mode
from trainformer.tasks.adapter_mixin import AdapterMixin
from trainformer.tasks.language.positions import fit_lengths

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST_EXPONENT = 700.0  # exp() overflows beyond

logger = logging.getLogger("trainformer")


@dataclass(eq=False)
class LanguageTask(AdapterMixin):
    """Base class of the tasks with a model of transformers, with the arguments that they share."""

    kind: ClassVar[str]
    groups_by_length: ClassVar[bool] = False  # whether to batch samples of similar length by default: less padding

    model_name: Any = None
    adapter: Adapter | None = None
    _: KW_ONLY
    dtype: str | None = None  # of the weights: fp32 (default), bf16 or fp16
    attention: str | None = None  # eager, sdpa, flash_attention_2, ...
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def _init_task(self) -> None:
        """Validate shared arguments before anything is loaded. Call it from `__post_init__`."""
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise BadArgument(expected(f"dtype to be one of {', '.join(_DTYPES)} or None", self.dtype))
        check_count("max_length", self.max_length, least=2)
        self._check_adapter(self.kind, packing=bool(getattr(self, "packing", False)))
        self._model: nn.Module | None = None

    # -- model and tokenizer -------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The model, loaded or built on first access. A trainer accesses it after seeding."""
        if self._model is None:
            self._model = self._load()
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    @abstractmethod
    def max_length(self) -> int:
        """The most tokens of a sequence."""

    @property
    @abstractmethod
    def text_tokenizer(self) -> Any:
        """The tokenizer."""

    def _load_options(self) -> dict[str, Any]:
        attention = {} if self.attention is None else {"attn_implementation": self.attention}
        return {**self.model_kwargs, **attention}

    def _load(self) -> nn.Module:
        options = self._load_options()
        if self.adapter is not None:
            options = {**self.adapter.load_options(self.kind), **options}
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        model = load_model(self.model_name, self.kind, dtype=dtype, **options)
        self._fit_vocabulary(model)
        is_new = not isinstance(self.model_name, str | Path | nn.Module)
        use_padding_row(model, self.text_tokenizer, is_new=is_new)
        return model if self.adapter is None else self.adapter.apply(model, kind=self.kind)

    def _fit_vocabulary(self, model: Any) -> None:
        """Resize the embeddings if the tokenizer has more tokens than the model has rows."""
        rows = model.get_input_embeddings().weight.shape[0]
        if len(self.text_tokenizer) > rows:
            logger.warning(
                "the tokenizer has %d tokens, the model %d embeddings: adding random ones. Do they belong together?",
                len(self.text_tokenizer), rows,
            )  # fmt: skip
            model.resize_token_embeddings(len(self.text_tokenizer))

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Batches of similar length, and the optimizer that the adapter recommends.

        Also checks the adapter against the run's settings.
        """
        packing = bool(getattr(self, "packing", False))
        if self.adapter is not None:
            checkpointing = settings.gradient_checkpointing
            self.adapter.check(kind=self.kind, packing=packing, gradient_checkpointing=checkpointing)
        defaults = {"sampler": "length"} if self.groups_by_length and not packing else {}
        optimizer = getattr(self.adapter, "optimizer", None)
        on_cuda = torch.cuda.is_available() and str(settings.device or "cuda").startswith("cuda")
        return defaults | ({"optimizer": optimizer} if optimizer and on_cuda else {})

    def configure(self, info: Any) -> None:
        """Load the model now, after seeding."""
        assert self.model is not None

    # -- inference -----------------------------------------------------------------------------------------

    def _batches(self, examples: list[Any], batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Batches of examples on the device of the model."""
        device = next(self.model.parameters()).device
        for begin in range(0, len(examples), batch_size):
            batch = self.collate_fn(examples[begin : begin + batch_size])
            yield {name: value.to(device) for name, value in batch.items()}

    @torch.no_grad()
    def _generate_tokens(self, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
        """The output of transformers' `generate` in eval mode, without sampling by default."""
        model: Any = unwrap_model(self.model)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        with eval_mode(model):
            return model.generate(
                **inputs, **{"do_sample": False, "pad_token_id": self.text_tokenizer.pad_token_id, **options}
            )

    # -- assets and config ---------------------------------------------------------------------------------

    def save_assets(self, folder: Path) -> list[str]:
        """Write the configs and the tokenizer (or the adapter) for `from_pretrained`."""
        before = set(folder.iterdir())
        super().save_assets(folder)
        if self.adapter is None:
            model: Any = self.model
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(folder)
        self.text_tokenizer.save_pretrained(folder)
        return sorted(path.name for path in folder.iterdir() if path not in before and path.is_file())

    def config_dict(self) -> dict[str, Any]:
        """Return the arguments; objects by the name of their class."""
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        for name in ("model_name", "tokenizer", "processor"):
            if config.get(name) is not None and not isinstance(config[name], str | Path):
                config[name] = type(config[name]).__name__
        config["adapter"] = None if self.adapter is None else repr(self.adapter)
        return config


@dataclass(eq=False)
class TextTask(LanguageTask):
    """Base class of the text tasks."""

    _: KW_ONLY
    tokenizer: Any = None
    cache_dir: str | Path | None = None

    @cached_property
    def text_tokenizer(self) -> Any:
        """The tokenizer, loaded on first access."""
        source = self.tokenizer if self.tokenizer is not None else self.model_name
        if not isinstance(source, str | Path) and not hasattr(source, "encode"):
            raise BadArgument(
                "Expected a tokenizer, received a model without the name of one. Pass tokenizer=, which is a "
                "tokenizer, or the name or folder of one."
            )
        tokenizer = load_tokenizer(source)
        ensure_pad_token(tokenizer)
        return tokenizer

    def configure(self, info: Any) -> None:
        super().configure(info)
        fit_lengths(self)

    def load_data(self, path: str) -> Any:
        """Load text by path or name; see `trainformer.data.text.load_text`."""
        return load_text(path)

    def _tokenize(self, records: Any, encoder: Encoder, train: bool) -> Any:
        """Tokenise each record once, or read the tokens from the cache."""
        return tokenize(records, encoder, cache_dir=self.cache_dir, name=data_name(train))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        return pad(examples, self.text_tokenizer.pad_token_id, max_length=self.max_length)


class TokenPredictionTask(LanguageTask):
    """Base class of tasks whose loss is a sum over supervised tokens, with their number as the weight.

    So padding, packing and gradient accumulation do not change the loss. With `shifted`, a label is predicted by the
    token before it, and the first label of a sequence is not used.
    """

    shifted: ClassVar[bool] = False

    @abstractmethod
    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        """Compute the loss of a batch."""

    def _causal_loss(
        self, states: OutputStates, inputs: Mapping[str, Tensor], labels: Tensor, **options: Any
    ) -> TokenLoss:
        """The loss of a causal model, with logits in chunks if the model allows it."""
        hidden, head = states(self.model, inputs)
        if head is None:
            return token_cross_entropy(hidden, labels, **options)
        chunk = states.chunk_tokens
        return linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, chunk_tokens=chunk, **options)

    def _training_options(self) -> dict[str, Any]:
        """Loss options for training only."""
        return {"label_smoothing": getattr(self, "label_smoothing", 0.0)}

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy, summed over the supervised tokens."""
        options = {"per_sequence": True} if self.per_sample_losses else {}
        loss = self._loss(batch, **self._training_options(), **options)
        rows = getattr(loss, "per_sequence", None)
        return Loss(loss.sum, loss.weight, metrics={"accuracy": (loss.correct, loss.weight)}, per_sample=rows)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss without label smoothing, and token accuracy."""
        return self._metrics(self._loss(batch))

    def _metrics(self, loss: TokenLoss) -> dict[str, Any]:
        return {"loss": (loss.sum, loss.weight), "accuracy": (loss.correct, loss.weight)}

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Perplexity, from the mean loss over all supervised tokens."""
        return {"perplexity": math.exp(min(metrics["loss"], _LARGEST_EXPONENT))} if "loss" in metrics else {}

    def check_batch(self, batch: Any) -> list[str]:
        """Report a batch without supervised tokens."""
        labels = batch["labels"][..., 1:] if self.shifted else batch["labels"]
        supervised = bool((labels != IGNORE_INDEX).any())
        return [] if supervised else ["No token of the batch is trained on: all labels are -100."]


class GenerationMixin(TextTask):
    """Text generation with causal language models."""

    def generate(self, prompts: str | Sequence[str], max_new_tokens: int = 64, **options: Any) -> list[str]:
        """Continue prompts; `options` are passed to transformers' `generate` (`do_sample`, `temperature`, ...)."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or any(not text for text in texts):
            raise BadArgument(expected("prompts of at least one character", prompts))
        tokenizer = self.text_tokenizer
        # Left padding: generated tokens must follow the prompt.
        examples = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
        batch = pad(examples, tokenizer.pad_token_id, side="left", multiple_of=1)
        del batch["labels"]
        generated = self._generate_tokens(batch, max_new_tokens=max_new_tokens, **options)
        return tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def standard_records(dataset: Any) -> Any:
    """Records with standard names; tokenised ones stay as they are."""
    return dataset if has_tokens(dataset) else StandardRecords(dataset)


def data_name(train: bool) -> str:
    """What messages about tokenisation call the data."""
    return "training data" if train else "validation data"


def to_width(rows: Tensor, width: int, value: int = IGNORE_INDEX) -> Tensor:
    """Pad or truncate rows of tokens to a fixed width, so that those of a whole dataset can be stacked.

    >>> to_width(torch.tensor([[5, 6]]), 3, 0).tolist(), to_width(torch.tensor([[5, 6]]), 1).tolist()
    ([[5, 6, 0]], [[5]])
    """
    return F.pad(rows, (0, width - rows.shape[1]), value=value)
