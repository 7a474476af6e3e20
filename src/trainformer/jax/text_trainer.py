"""`TextTrainer`: the base of trainers for language models (tokenizer, lengths, LoRA, generation, saving).

Tokenisation is in `data.text`, token losses in `losses.jax.tokens`, models in `models.jax`; subclasses define the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.sharding import data_shards
from trainformer.backends.jax.step import VALID, EvalOutput
from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Loss
from trainformer.data.text.collate import token_batch
from trainformer.data.text.encode import Encoder
from trainformer.data.text.generation import Generated, as_prompts
from trainformer.data.text.tokenizer import open_tokenizer
from trainformer.jax.answers import generated_columns
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.generation import generate_texts, sampling_options
from trainformer.jax.previews import Previews
from trainformer.jax.router_loss import RouterLoss, router_rows, summarize_router
from trainformer.jax.saving import new_files, save_trainer
from trainformer.jax.text_arguments import LoRAConfig, TextArguments
from trainformer.jax.trainer_protocol import TrainerConfigureFunctionOutput
from trainformer.losses.jax.tokens import IGNORE_INDEX, RowSums, row_sums, token_loss
from trainformer.models.jax.bert import Bert
from trainformer.models.jax.block import RouterProbe
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import check_family
from trainformer.models.jax.lora import merge_lora, quantize_frozen, save_lora
from trainformer.models.jax.t5 import T5

_DEFAULT_LENGTH = 2048  # tokens, unless the user or the model asks for fewer
_LENGTH_MULTIPLE = 64  # batch lengths are rounded up to it, to suit the hardware
_MAX_LOGITS = 1 << 28  # elements that a device holds at once, 1 GiB in float32
_MAX_EXPONENT = 700.0  # exp overflows a float beyond it
POSITION_INPUTS = ("position_ids", "segment_ids")
_INPUTS = ("input_ids", *POSITION_INPUTS)


class TextTrainer(BaseTrainer):
    """Base class of the trainers for language models.

    `model` is the folder (or hub name) of a model in HuggingFace format, a `DecoderConfig` for random weights, a
    module, or a function that builds one. `processing_class` is the tokenizer or its folder; default: the one in the
    model's folder. With `lora` only LoRA matrices are trained, and `save_pretrained` writes a peft adapter.
    """

    arguments_type: ClassVar[type[TextArguments]] = TextArguments
    #: The classes that the model must be one of (empty: any), and those that support packing.
    model_types: ClassVar[tuple[type, ...]] = ()
    #: Models that see later tokens, or need a second input: the loss of next tokens does not apply to them.
    not_causal: ClassVar[tuple[type, ...]] = (Bert, T5)
    packable: ClassVar[tuple[type, ...]] = (Decoder,)
    arguments: Any
    #: Whether `compute_loss` adds the router losses of a mixture of experts; if not, their arguments are refused.
    has_router_loss = False

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        lora: Any = None,
        model_state: Any = None,
        callbacks: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        self.arguments = self.arguments_type.from_arguments(arguments)
        if self.arguments.ids_to_pop_from_dataset:
            do = "Records are identified by their columns: drop columns from the dataset itself."
            raise BadArgument(expected("no ids_to_pop_from_dataset", self.arguments.ids_to_pop_from_dataset, do))
        self.lora = LoRAConfig.parse(lora)
        self.base_folder = str(model) if isinstance(model, (str, Path)) else None
        self._frozen: list[str] = []
        self._adapted: Any = None
        if self.lora is not None and self.arguments.dtype == "fp8":
            do = "Pass dtype='bf16': fp8 makes the gradients of weights cheaper, and these are frozen."
            raise BadArgument(expected("fp8 without lora", "both", do))
        self.text = _tokenizer(processing_class, self.base_folder)
        if model_state is None:
            if self.arguments.quantization is not None and self.lora is None:
                do = "Pass lora=LoRAConfig(...): quantized weights are frozen, and LoRA is what is trained."
                raise BadArgument(expected("quantization together with lora", self.arguments.quantization, do))
            model = self.load_model(model)
        elif self.lora is not None or self.arguments.quantization is not None:
            given = "lora" if self.lora is not None else "quantization"
            raise BadArgument(f"Expected {given} or model_state, received both. A model_state includes its adapter.")
        self._inspect_model(model_state.model if model_state is not None else model)
        self._longest = 0  # tokens of the longest sequence
        self.router: RouterLoss | None = None
        if self.arguments.generation_interval is not None:
            callbacks = [*(callbacks or ()), Previews(self.arguments)]
        super().__init__(self.arguments, model, model_state=model_state, callbacks=callbacks, **options)
        self._adapted = None

    def _inspect_model(self, model: Any) -> None:
        """Set what the data depend on: maximum length and vocabulary size."""
        shape = model if isinstance(model, nnx.Module) else nnx.eval_shape(lambda: model(nnx.Rngs(0)))
        if self.model_types and not isinstance(shape, self.model_types):
            names = " or ".join(kind.__name__ for kind in self.model_types)
            do = "Pass its folder, or a configuration."
            raise BadArgument(expected(f"a {names} of trainformer.models.jax", type(shape).__name__, do))
        if not self.model_types and isinstance(shape, self.not_causal):
            do = "Encoders train with MaskedLMTrainer and SequenceClassificationTrainer, T5 with Seq2SeqTrainer."
            raise BadArgument(expected(f"a causal language model for {type(self).__name__}", type(shape).__name__, do))
        config = getattr(shape, "config", None)
        self.model_config: Any = config
        self._is_decoder = isinstance(shape, Decoder)
        for name in ("generation_interval", "quantization"):
            if getattr(self.arguments, name) is not None and not self._is_decoder:
                kind = f"{name}={getattr(self.arguments, name)!r}"
                raise BadArgument(expected(f"no {name} for a {type(shape).__name__}", kind, "Leave it out."))
        self.vocab_size: int | None = getattr(config, "vocab_size", None)
        limit = getattr(config, "max_position_embeddings", None)
        asked = self.arguments.max_sequence_length
        if asked is not None and limit is not None and asked > limit and getattr(config, "rope", None) is None:
            raise BadArgument(expected(f"max_sequence_length of at most {limit}, the positions of the model", asked))
        self.max_length: int = asked or min(_DEFAULT_LENGTH, limit or _DEFAULT_LENGTH)
        if self.arguments.packing and not isinstance(shape, self.packable):
            do = "Pass packing=False."
            raise BadArgument(expected("a model that supports packing (segment_ids)", type(shape).__name__, do))
        tokens = None if self.text is None else len(self.text)
        if tokens is not None and self.vocab_size is not None and tokens > self.vocab_size:
            do = "Is it the tokenizer of this model?"
            raise BadArgument(expected(f"a tokenizer with at most {self.vocab_size} tokens", tokens, do))

    def load_model(self, model: Any) -> Any:
        if model is not None and model is self._adapted:
            return model
        if isinstance(model, DecoderConfig):
            model = self.build_decoder(model)
        elif hasattr(model, "model_type"):  # a subclass builds its own configurations
            raise BadArgument(expected(f"a model for {type(self).__name__}", type(model).__name__))
        model, lora = super().load_model(model), self.lora
        if lora is not None and isinstance(model, nnx.Module):
            self._frozen = [self._apply_lora(lora, model)]
        elif lora is not None:
            build = model

            def adapted(rngs: nnx.Rngs) -> nnx.Module:
                module = build(rngs)
                self._frozen = [self._apply_lora(lora, module)]
                return module

            model = adapted
            nnx.eval_shape(lambda: adapted(nnx.Rngs(0)))  # the frozen pattern is needed before the weights
        self._adapted = model
        return model

    def _apply_lora(self, lora: LoRAConfig, model: Any) -> str:
        """Add LoRA and quantize the rest, in place. Returns the regex of the frozen parameters."""
        frozen = lora.apply(model, self.arguments.seed)
        if self.arguments.quantization is not None:
            quantize_frozen(model, self.arguments.quantization)
        return frozen

    def build_decoder(self, config: DecoderConfig) -> Callable[[nnx.Rngs], Decoder]:
        """A function that builds the model of a config with random weights."""
        check_family(config)
        return partial(build_model, config)

    def frozen_patterns(self) -> list[str]:
        return [*super().frozen_patterns(), *self._frozen]

    def encoder(self, kind: Callable[..., Encoder], train_on: str) -> Encoder:
        """The encoder that tokenises records."""
        return kind(
            self.text,
            max_length=self.max_length,
            train_on=train_on,
            truncation=self.arguments.truncation,
            prompt_template=self.arguments.prompt_template,
        )

    def token_options(self, train: bool) -> dict[str, Any]:
        """Cache folder of the tokens, and the name of the dataset in messages."""
        return {"cache_dir": self.arguments.cache_dir, "name": "training data" if train else "evaluation data"}

    def update_batch_length(self, tokens: Any) -> Any:
        """Take a dataset into account in `batch_length`, which all datasets share. Returns the dataset."""
        lengths = getattr(tokens, "lengths", None)
        self.cover_length(self.max_length if lengths is None else int(np.max(lengths)))
        return tokens

    def cover_length(self, longest: int) -> None:
        """Give rows room for sequences of `longest` tokens."""
        self._longest = max(self._longest, self.padded_length(longest, self.max_length))

    def padded_length(self, length: int, limit: int, multiple: int = _LENGTH_MULTIPLE) -> int:
        """The length of rows for sequences of `length` tokens: a multiple, also of the axis `sp`, or else the limit."""
        multiple = math.lcm(multiple, self.mesh.shape["sp"])
        return min(limit, -(-length // multiple) * multiple)

    def check_token_ids(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Raise for token ids outside the vocabulary, which jax would turn into NaN. Returns the batch."""
        ids = batch["input_ids"]
        if self.vocab_size is not None and (ids.min() < 0 or ids.max() >= self.vocab_size):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            do = "Was the dataset tokenised for another model?"
            raise DataError(expected(f"token ids of the model, from 0 to {self.vocab_size - 1}", wrong, do))
        return batch

    def collect_tokens(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """Rows of the length of the longest sequence, or of `max_sequence_length` if they are packed."""
        length = self.max_length if "position_ids" in samples[0] else self.batch_length
        return self.check_token_ids(token_batch(samples, length, self.pad_id))

    @property
    def batch_length(self) -> int:
        """Length of rows that are not packed, in tokens."""
        return self._longest or self.max_length

    @property
    def pad_id(self) -> int | None:
        """The padding token. Its value does not matter: padding is masked."""
        return None if self.text is None else self.text.pad_token_id

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        config = self.model_config if self.has_router_loss else None
        self.router = RouterLoss.of(self.arguments, config, self.batch_sizes.accumulation)
        return super().configure_functions()

    @property
    def _has_step_totals(self) -> bool:
        counts = self.router is not None and self.router.counts_first
        return counts or type(self).step_totals is not TextTrainer.step_totals

    def step_totals(self, model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """How the routers of a mixture of experts spread the tokens of a step, if gradients are accumulated."""
        if self.router is None or not self.router.counts_first:
            return {}
        probe = self.router.probe(batch)
        names = [name for name in ("input_ids", *POSITION_INPUTS) if name in batch]
        flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names}
        model.hidden_states(**flat, probe=probe)
        return self.router.totals(probe, batch, self.loss_weight(batch))

    def loss_weight(self, batch: Mapping[str, Any]) -> jax.Array:
        """The weight of the loss of a batch: its supervised tokens."""
        return jnp.sum(valid_labels(batch)[..., 1:] != IGNORE_INDEX)

    def router_probe(self, batch: Mapping[str, Any], train: bool = True) -> RouterProbe | None:
        """An option of `token_sums`, and the argument of the methods below; None without experts."""
        return None if self.router is None else self.router.probe(batch, per_row=not train)

    def with_router_loss(self, loss: Loss, probe: RouterProbe | None, batch: Mapping[str, Any]) -> Loss:
        """Add the router losses of a mixture of experts to the training loss of a batch, after its forward pass."""
        return loss if probe is None or self.router is None else self.router.add(loss, probe, batch)

    def with_router_rows(self, loss: Loss, probe: RouterProbe | None, batch: Mapping[str, Any]) -> Any:
        """The same for an evaluation, whose loss does not include the router losses."""
        return loss if probe is None else EvalOutput(loss, router_rows(probe, batch))

    def summarize_rows(self, rows: dict[str, Any]) -> dict[str, float]:
        """The router losses of the whole evaluation."""
        return summarize_router(rows)

    def token_sums(
        self,
        model: Any,
        batch: Mapping[str, Any],
        key: Any = None,
        *,
        probe: RouterProbe | None = None,
        **options: Any,
    ) -> RowSums:
        """Loss, supervised tokens and correct predictions of each row. With a key, dropout is active."""
        states, labels, computed = self._token_states(model, batch, key, probe)
        return row_sums(states, labels, **computed, **options)

    def token_loss(
        self,
        model: Any,
        batch: Mapping[str, Any],
        key: Any = None,
        *,
        probe: RouterProbe | None = None,
        **options: Any,
    ) -> Loss:
        """The loss over all supervised tokens: faster than `token_sums` if logits are computed in chunks."""
        states, labels, computed = self._token_states(model, batch, key, probe)
        return token_loss(states, labels, **computed, **options)

    def _token_states(
        self, model: Any, batch: Mapping[str, Any], key: Any, probe: RouterProbe | None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """What a loss needs: logits, or hidden states with the head and the number of chunks; and the labels."""
        labels = valid_labels(batch)
        if not hasattr(model, "hidden_states") or not hasattr(model, "head"):
            return model(batch["input_ids"]), labels, {}
        # No attention mask: padding is on the right, which tokens of a causal model do not attend to.
        names = (*POSITION_INPUTS, *(("attention_mask",) if getattr(model, "needs_attention_mask", False) else ()))
        inputs = {name: batch[name] for name in names if name in batch}
        if probe is not None:
            inputs["probe"] = probe
        states = model.hidden_states(batch["input_ids"], **inputs, deterministic=key is None, key=key)
        return states, labels, {"head": model.head, "chunks": self._chunks(labels.shape)}

    def _chunks(self, shape: tuple[int, ...]) -> int:
        """The number of chunks in which logits are computed."""
        asked, vocab_size = self.arguments.chunk_tokens, self.vocab_size
        if asked == 0 or (asked is None and vocab_size is None):
            return 1
        tokens = math.prod(shape) // (data_shards(self.mesh) * self.mesh.shape["sp"])
        return min(shape[1], max(1, -(-tokens // (asked or max(1, _MAX_LOGITS // (vocab_size or 1))))))

    def use_learned(self, record: TrainerRecord) -> None:
        self.base_folder = record.base  # of an adapter that is saved again

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 32,
        *,
        seed: int | Sequence[int] = 0,
        batch_size: int | None = None,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> Any:
        """Continue texts and answer conversations with the current weights: a text for one prompt, a list for several.

        A prompt is a text, a list of messages, or a record with one of them. Greedy, unless `temperature`, `top_k`,
        `top_p`, `min_p` or ``do_sample=True`` ask for sampling; there is also `repetition_penalty`. A text depends on
        its prompt and its seed, not on the other prompts. All processes of a run must call it together.
        """
        given: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        template = self.arguments.prompt_template
        made, is_list = as_prompts(
            prompts, **given, continue_final_message=continue_final_message, prompt_template=template
        )
        found = self.generate_texts(made, max_new_tokens, seed, batch_size=batch_size, **options)
        texts = [each.text for each in found]
        return texts if is_list else texts[0]

    def check_generate_options(self, **options: Any) -> None:
        """Raise for options that `generate` does not have."""
        named = inspect.signature(self.generate).parameters
        sampling_options({name: value for name, value in options.items() if name not in named})

    def generate_texts(self, prompts: Sequence[Any], *args: Any, **options: Any) -> list[Generated]:
        """The same for `GenerationPrompt`s, with the number of tokens and whether the model ended the text."""
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) to generate with", None))
        if not self._is_decoder:
            raise BadArgument(expected("a model of trainformer.models.jax to generate with", type(self.model).__name__))
        with self.eval_mode():
            options = {"folder": self.base_folder, "dtype": self.dtype, **options}
            return generate_texts(self.model_state.model, self.text, prompts, *args, **options)

    def predicted_columns(
        self, data: Any, batch_size: int | None = None, *, max_new_tokens: int = 64, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The `prompt` and the `text` generated for each record, and its `target` if there are any.

        `data` is the path of a file or a list: texts, conversations, or records with a `prompt` or `messages`.
        """
        size = batch_size or self.evaluation_batch_size
        yield from generated_columns(self, data, size, max_new_tokens=max_new_tokens, **options)

    def save_tokenizer(self, folder: Path) -> list[str]:
        with new_files(folder) as written:
            if hasattr(self.text, "save_pretrained"):
                self.text.save_pretrained(str(folder))
        return written

    def save_assets(self, folder: Path) -> list[str]:
        return [*super().save_assets(folder), *self.save_tokenizer(folder)]

    def save_pretrained(self, ckpt_path: str | Path, state: Any = None, *, merge: bool = False) -> str:
        """Write the state, the arguments, the tokenizer and the weights to a folder, atomically.

        The weights open in transformers. With LoRA only the adapter is written, in peft's format; `merge` writes the
        whole model with the adapter merged into its weights.
        """
        return str(save_trainer(self, Path(ckpt_path), state, partial(self.save_weights, merge=merge)))

    def save_weights(self, folder: Path, state: Any, *, merge: bool = False) -> list[str]:
        model: Any = getattr(state, "model", None)
        if getattr(model, "lora", None) is None:
            return super().save_weights(folder, state)
        with new_files(folder) as written:
            if merge:
                merge_lora(model).save_pretrained(folder)
            else:
                save_lora(model, folder, base_model=self.base_folder)
        return written


def valid_labels(batch: Mapping[str, Any]) -> jax.Array:
    """The labels of a batch, with those of padding rows ignored."""
    labels = batch["labels"]
    if VALID not in batch:
        return labels
    return jnp.where(batch[VALID].reshape(-1, *[1] * (labels.ndim - 1)), labels, IGNORE_INDEX)


def valid_rows(batch: Mapping[str, Any]) -> jax.Array:
    """1.0 for each row of a batch that is no padding."""
    return batch[VALID].astype(jnp.float32) if VALID in batch else jnp.ones(len(batch["input_ids"]), jnp.float32)


def perplexity(metrics: Mapping[str, float], loss: str = "loss") -> dict[str, float]:
    """The perplexity of a mean loss over tokens; nothing without the loss.

    >>> perplexity({"loss": 0.0}), perplexity({})
    ({'perplexity': 1.0}, {})
    """
    return {"perplexity": math.exp(min(metrics[loss], _MAX_EXPONENT))} if loss in metrics else {}


def build_model(config: Any, rngs: nnx.Rngs) -> Any:
    """A model of a config, with random weights."""
    return family_of(config.model_type).build(config, rngs=rngs)


def _tokenizer(given: Any, folder: str | None) -> Any:
    """The given tokenizer, else the one in the model's folder, else None."""
    if given is not None:
        return open_tokenizer(getattr(given, "tokenizer", given))  # of a processor
    has_none = folder is None or (Path(folder).is_dir() and not (Path(folder) / "tokenizer.json").is_file())
    return None if has_none else open_tokenizer(folder)
