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

from trainformer.adapters.base import Adapter, adapted_model, is_adapted, unwrap_model
from trainformer.adapters.prefix import PrefixTuning
from trainformer.adapters.qlora import is_quantised
from trainformer.adapters.saved import (
    check_one_trainable,
    check_trainable,
    merge_adapters,
    open_adapters,
    remember_frozen,
    stack_adapter,
)
from trainformer.core import BadArgument, Loss
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoder
from trainformer.data.text.generation import (
    Generated,
    GenerationPrompt,
    as_prompts,
    load_prompts,
    read_prompt,
    row_seeds,
)
from trainformer.data.text.prepare import has_tokens
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import tokenize
from trainformer.losses.tokens import TokenLoss, linear_cross_entropy, token_cross_entropy
from trainformer.models.embeddings import use_padding_row
from trainformer.models.language import OutputStates, ensure_pad_token, load_model, load_tokenizer
from trainformer.models.modes import eval_mode
from trainformer.models.rope import check_rope_scaling, keep_overrides, scaled_source
from trainformer.tasks.adapter_mixin import AdapterMixin
from trainformer.tasks.language.generation import generate_texts, preserved_random
from trainformer.tasks.language.positions import fit_lengths
from trainformer.tasks.language.pretrained import Pretrained, find_pretrained

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ON_ADAPTER = ("merge", "stack")
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
    rope_scaling: str | dict[str, Any] | None = None  # linear, dynamic, yarn or llama3; or a dict of options
    rope_factor: float | None = None  # None: what max_length needs
    on_adapter: str | None = None  # a new adapter for a model that has one: merge that one (default), or stack on it
    base: Any = None  # the base of the adapter in `model_name`, if it is not where it was

    def _init_task(self) -> None:
        """Validate shared arguments before anything is loaded. Call it from `__post_init__`."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise BadArgument(expected(f"dtype to be one of {', '.join(DTYPES)} or None", self.dtype))
        check_count("max_length", self.max_length, least=2)
        check_rope_scaling(self.rope_scaling, self.rope_factor)
        self._check_adapter(self.kind, packing=bool(getattr(self, "packing", False)))
        if self.on_adapter is not None:
            check_choice("on_adapter", self.on_adapter, _ON_ADAPTER)
            if self.adapter is None:
                raise BadArgument(expected("on_adapter together with a new adapter", self.on_adapter, "Pass adapter=."))
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

    @cached_property
    def pretrained(self) -> Pretrained:
        """What `model_name` stands for."""
        return find_pretrained(self.model_name, self.base)

    def _load(self) -> nn.Module:
        found, options = self.pretrained, self._load_options()
        for adapter in (self.adapter, found.adapters):
            options = {**(adapter.load_options(self.kind) if adapter is not None else {}), **options}
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        rope: dict[str, Any] = {}
        source = found.source
        if self.rope_scaling is not None:
            source, rope = scaled_source(source, self.rope_scaling, self.rope_factor, self.max_length)
        options |= rope
        model = load_model(source, self.kind, dtype=dtype, **options)
        keep_overrides(model, options)
        if is_adapted(model):
            self._check_vocabulary(model)
        else:
            self._fit_vocabulary(model)
            use_padding_row(model, self.text_tokenizer, is_new=not isinstance(source, str | Path | nn.Module))
        if found.adapters is not None:
            model = open_adapters(model, found.adapters)
        model = self._adapt(model)
        if is_adapted(model):
            remember_frozen(model)
        return model

    def _adapt(self, model: nn.Module) -> nn.Module:
        """Add the new adapter, if there is one."""
        if not is_adapted(model):
            if self.on_adapter is not None:
                raise BadArgument(expected("a model with an adapter for on_adapter", "one without", "Leave it out."))
            return model if self.adapter is None else self.adapter.apply(model, kind=self.kind)
        if self.adapter is None:
            check_one_trainable(model)
            return model
        if self.on_adapter == "stack":
            return stack_adapter(model, self.adapter, self.kind)
        if is_quantised(model):
            do = "Pass on_adapter='stack', or merge it into the model first (trainformer finalize)."
            raise BadArgument(expected("a model in full precision to merge its adapter into", "one in 4 bits", do))
        return self.adapter.apply(merge_adapters(model), kind=self.kind)

    def _check_vocabulary(self, model: Any) -> None:
        rows = model.get_input_embeddings().weight.shape[0]
        if len(self.text_tokenizer) > rows:
            do = "Call resize_token_embeddings(len(tokenizer)) on the model before it gets the adapter."
            what = f"a tokenizer with at most {rows} tokens, the rows of the model"
            raise BadArgument(expected(what, len(self.text_tokenizer), do))

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
        for adapter in self._adapters_used():
            checkpointing = settings.gradient_checkpointing
            adapter.check(kind=self.kind, packing=packing, gradient_checkpointing=checkpointing)
        defaults = {"sampler": "length"} if self.groups_by_length and not packing else {}
        optimizer = getattr(self.adapter, "optimizer", None)
        on_cuda = torch.cuda.is_available() and str(settings.device or "cuda").startswith("cuda")
        return defaults | ({"optimizer": optimizer} if optimizer and on_cuda else {})

    def _adapters_used(self) -> list[Adapter]:
        """The new adapter, and a prefix that the model comes with: it does not go with every setting."""
        found = self.pretrained
        is_prefix = found.adapters is not None and found.adapters.config.get("peft_type") == "PREFIX_TUNING"
        if isinstance(found.source, nn.Module) and is_adapted(found.source):
            is_prefix = adapted_model(found.source).active_peft_config.is_prompt_learning
        return [*([] if self.adapter is None else [self.adapter]), *([PrefixTuning()] if is_prefix else [])]

    def configure(self, info: Any) -> None:
        """Load the model now, after seeding."""
        if is_adapted(self.model):
            check_trainable(self.model)

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
        with eval_mode(model), preserved_random():
            return model.generate(
                **inputs, **{"do_sample": False, "pad_token_id": self.text_tokenizer.pad_token_id, **options}
            )

    # -- assets and config ---------------------------------------------------------------------------------

    def save_assets(self, folder: Path) -> list[str]:
        """Write the configs and the tokenizer (or the adapter) for `from_pretrained`."""
        before = set(folder.iterdir())
        names = super().save_assets(folder)
        if not is_adapted(self.model):
            model: Any = self.model
            model.config.architectures = [type(unwrap_model(model)).__name__.removeprefix("FSDP")]
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(folder)
        self.text_tokenizer.save_pretrained(folder)
        return sorted({*names, *(path.name for path in folder.iterdir() if path not in before and path.is_file())})

    def config_dict(self) -> dict[str, Any]:
        """Return the arguments; objects by the name of their class."""
        config = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        for name in ("model_name", "tokenizer", "processor", "base"):
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
        source = self.tokenizer if self.tokenizer is not None else self.pretrained.tokenizer
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

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        *,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[str]:
        """Continue texts and answer conversations: the new text of each prompt, always as a list.

        `prompts` is a text, a conversation (a list of messages), a record with one of them, or a list of these. Texts
        are continued as they are. Conversations are rendered by the chat template with the beginning of an answer;
        `tools` and `chat_template_kwargs` are passed to it. `continue_final_message` continues the assistant's last
        turn. A text ends at any stop token of the model's generation config, the tokenizer or the chat template.

        `options` are those of transformers' `generate`. Without any, the most likely token is taken; `temperature`,
        `top_k`, `top_p`, `min_p` or `do_sample=True` sample, and `seed` decides what: one for all prompts, or one for
        each. By default it follows the run's random numbers. Their state is never changed.
        """
        given, _ = as_prompts(
            prompts,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
            prompt_template=getattr(self, "prompt_template", None),
        )
        return [made.text for made in self.generate_texts(given, max_new_tokens, seed, **options)]

    def generate_texts(
        self,
        prompts: Sequence[GenerationPrompt],
        max_new_tokens: int = 64,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> list[Generated]:
        """The same for prompts that were read already, with the numbers of tokens and why each text ended."""
        return generate_texts(self.model, self.text_tokenizer, prompts, max_new_tokens, seed, **options)

    def predict_records(
        self, records: Any, batch_size: int, *, max_new_tokens: int = 64, seed: int = 0, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """A row per record, in order: the `prompt` as the model reads it, the `text`, and the `target` if there is one.

        If the last turn of `messages` is the assistant's, it is the target, and so is a `completion`. All records are
        checked before the first text is generated. Sampling depends on the seed and the number of the record.
        """
        check_count("batch_size", batch_size)
        template = getattr(self, "prompt_template", None)

        def read(place: int) -> GenerationPrompt:
            return read_prompt(records[place], place, template)

        # All of them, not up to the first with a target: a bad record is an error before the first text.
        has_targets = sum(read(place).target is not None for place in range(len(records))) > 0
        for first in range(0, len(records), batch_size):
            prompts = [read(place) for place in range(first, min(first + batch_size, len(records)))]
            texts = self.generate_texts(prompts, max_new_tokens, row_seeds(seed, len(prompts), first), **options)
            for prompt, made in zip(prompts, texts, strict=True):
                target = {"target": prompt.target} if has_targets else {}
                yield {"prompt": prompt.render(self.text_tokenizer), "text": made.text, **target}

    def load_prompts(self, data: Any) -> Any:
        """Records for `predict_records`: from a path, where each line of a text file is a prompt, or a list of them."""
        return load_prompts(data)


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
