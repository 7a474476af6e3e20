"""What trainers of causal language models share: tokenizer, lengths, the forward pass up to the head, LoRA, saving.

Owns `TextTrainer` and its arguments. How records become tokens is in `data.text`, the sums over tokens are in
`losses.jax`, the models in `models.jax`; what the loss is, is said by a subclass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import VALID
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.text.encode import TRUNCATION, Encoder
from trainformer.data.text.tokenizer import open_tokenizer
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.saving import new_files, save_trainer, save_weights
from trainformer.losses.jax.tokens import IGNORE_INDEX, Head, RowSums, row_sums
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.huggingface import check_family
from trainformer.models.jax.lora import apply_lora, load_lora, merge_lora, save_lora

_LONGEST = 2048  # tokens, where neither the user nor the model wants fewer
_STEP = 64  # batches are as long as the longest sequence, rounded up to this: devices work in such blocks
_LOGITS = 1 << 28  # numbers that a device makes at once, 1 GiB in float32
_PLACES = ("position_ids", "segment_ids")


@dataclass(kw_only=True)
class TextArguments(TrainingArguments):
    """Arguments that all trainers of language models have beyond those of every trainer."""

    truncation: str = "auto"  # of records that are too long: split, truncate, drop; auto: texts are split
    prompt_template: str | None = None  # a format string over the fields of a record
    chunk_tokens: int | None = None  # tokens per device whose logits exist at once; None: 1 GiB of them, 0: all
    cache_dir: str | None = None  # of tokenised data; None: the user's cache

    def check(self) -> None:
        """Refuse what cannot work."""
        super().check()
        if self.truncation not in TRUNCATION:
            do = did_you_mean(str(self.truncation), TRUNCATION)
            raise BadArgument(expected(f"truncation to be one of {', '.join(TRUNCATION)}", self.truncation, do))
        self._whole("chunk_tokens", 0, or_none=True)

    @classmethod
    def of(cls, arguments: Any) -> Self:
        """These arguments from those of any trainer: what was passed to them, and the defaults of this class."""
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
    """Small matrices that are trained beside a frozen model; see `trainformer.models.jax.apply_lora`.

    `targets` are names of layers, ours or HF's, a regular expression over paths, "all-linear", or None for queries and
    values. `folder` is an adapter of peft to go on from: it says everything else itself.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: str | tuple[str, ...] | list[str] | None = None
    modules_to_save: tuple[str, ...] | list[str] = ()
    folder: str | Path | None = None

    @classmethod
    def of(cls, given: Any) -> LoRAConfig | None:
        """From what a user may pass: this, a dict of its fields, the folder of an adapter, True, or None."""
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

    def put_on(self, model: Any, seed: int) -> str:
        """Put it on a model, in place; the regular expression of what is frozen."""
        if self.folder is not None:
            return load_lora(model, self.folder)
        saved = tuple(self.modules_to_save)
        return apply_lora(model, self.r, self.alpha, self.dropout, self.targets, modules_to_save=saved, seed=seed)


class TextTrainer(BaseTrainer):
    """Base of the trainers of causal language models.

    `model` is the folder (or name) of a model in HuggingFace's format, a `DecoderConfig` for random weights, a module,
    or a function that builds one. `processing_class` is its tokenizer, or the folder of one; by default that of the
    model's folder. With `lora` only small matrices are trained, and `save_pretrained` writes an adapter of peft.
    """

    arguments_type: ClassVar[type[TextArguments]] = TextArguments
    arguments: Any

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        lora: Any = None,
        model_state: Any = None,
        **options: Any,
    ) -> None:
        self.arguments = self.arguments_type.of(arguments)
        self.lora = LoRAConfig.of(lora)
        self.base_folder = str(model) if isinstance(model, (str, Path)) else None
        self._frozen: list[str] = []
        self._adapted: Any = None
        if model_state is None:
            model = self.load_model(model)
        elif self.lora is not None:
            raise BadArgument("Expected lora or model_state, received both: a state has the adapter it has.")
        self.text = _tokenizer(processing_class, self.base_folder)
        self._look_at(model_state.model if model_state is not None else model)
        self._longest = 0  # sequence of the data
        super().__init__(self.arguments, model, model_state=model_state, **options)
        self._adapted = None

    def _look_at(self, model: Any) -> None:
        """What the data have to know of the model: its length and its words."""
        shape = model if isinstance(model, nnx.Module) else nnx.eval_shape(lambda: model(nnx.Rngs(0)))
        config = getattr(shape, "config", None)
        self._is_ours = isinstance(shape, Decoder)
        self.vocab_size: int | None = getattr(config, "vocab_size", None)
        limit = getattr(config, "max_position_embeddings", None)
        asked = self.arguments.max_sequence_length
        if asked is not None and limit is not None and asked > limit and getattr(config, "rope", None) is None:
            raise BadArgument(expected(f"max_sequence_length of at most {limit}, as the model has places", asked))
        self.max_length: int = asked or min(_LONGEST, limit or _LONGEST)
        if self.arguments.packing and not self._is_ours:
            do = "Pass packing=False."
            raise BadArgument(expected("a model that keeps packed texts apart (segment_ids)", type(shape).__name__, do))
        words = None if self.text is None else len(self.text)
        if words is not None and self.vocab_size is not None and words > self.vocab_size:
            do = "Is it the tokenizer of this model?"
            raise BadArgument(expected(f"a tokenizer of at most {self.vocab_size} tokens", words, do))

    # -- model -------------------------------------------------------------------------------------------------

    def load_model(self, model: Any) -> Any:
        """A module or a function that builds one, with LoRA if that was asked for."""
        if model is not None and model is self._adapted:
            return model
        if isinstance(model, DecoderConfig):
            check_family(model)
            model = partial(_build, model)
        model, lora, seed = super().load_model(model), self.lora, self.arguments.seed
        if lora is not None and isinstance(model, nnx.Module):
            self._frozen = [lora.put_on(model, seed)]
        elif lora is not None:
            build = model

            def adapted(rngs: nnx.Rngs) -> nnx.Module:
                made = build(rngs)
                self._frozen = [lora.put_on(made, seed)]
                return made

            model = adapted
            nnx.eval_shape(lambda: adapted(nnx.Rngs(0)))  # the pattern is needed before the weights
        self._adapted = model
        return model

    def frozen_patterns(self) -> list[str]:
        """With LoRA, everything else."""
        return [*super().frozen_patterns(), *self._frozen]

    # -- data --------------------------------------------------------------------------------------------------

    def encoder(self, kind: type[Encoder], train_on: str) -> Encoder:
        """What makes tokens of a record."""
        return kind(
            self.text,
            max_length=self.max_length,
            train_on=train_on,
            truncation=self.arguments.truncation,
            prompt_template=self.arguments.prompt_template,
        )

    def token_options(self, train: bool) -> dict[str, Any]:
        """Where tokens are kept, and what the data are called in messages."""
        return {"cache_dir": self.arguments.cache_dir, "name": "training data" if train else "evaluation data"}

    def make_room(self, tokens: Any) -> Any:
        """The same data, once their longest sequence is noted: batches of all data have one length."""
        lengths = getattr(tokens, "lengths", None)
        longest = self.max_length if lengths is None else int(np.max(lengths))
        step = math.lcm(_STEP, self.mesh.shape["sp"])
        self._longest = max(self._longest, min(self.max_length, -(-longest // step) * step))
        return tokens

    def within_words(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same batch, if the model has all its tokens: of one that it has not, jax would make NaN."""
        ids = batch["input_ids"]
        if self.vocab_size is not None and (ids.min() < 0 or ids.max() >= self.vocab_size):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            do = "Were the data tokenised for another model?"
            raise DataError(expected(f"tokens from 0 to {self.vocab_size - 1}, as the model has", wrong, do))
        return batch

    @property
    def batch_length(self) -> int:
        """Tokens of a row that is not packed."""
        return self._longest or self.max_length

    @property
    def pad_id(self) -> int | None:
        """What rows are filled up with. Nothing looks at it."""
        return None if self.text is None else self.text.pad_token_id

    # -- steps -------------------------------------------------------------------------------------------------

    def token_sums(self, model: Any, batch: Mapping[str, Any], key: Any = None, **options: Any) -> RowSums:
        """Loss, tokens and right predictions of each row of `batch`. With a key the model's dropout is on."""
        labels = labels_of(batch)
        states, head = self.states_of(model, batch, key)
        chunks = 1 if head is None else self._chunks(labels.shape)
        return row_sums(states, labels, head, chunks=chunks, **options)

    def states_of(self, model: Any, batch: Mapping[str, Any], key: Any = None) -> tuple[jax.Array, Head | None]:
        """What the head makes logits of, and the head; or the logits, of a model that does not tell them apart.

        There is no attention mask: padding is on the right, where no token of a causal model looks.
        """
        if not hasattr(model, "hidden_states") or not hasattr(model, "head"):
            return model(batch["input_ids"]), None
        places = {name: batch[name] for name in _PLACES if name in batch}
        states = model.hidden_states(batch["input_ids"], **places, deterministic=key is None, key=key)
        return states, model.head

    def _chunks(self, shape: tuple[int, ...]) -> int:
        """In how many pieces the logits of a batch are made."""
        asked, words = self.arguments.chunk_tokens, self.vocab_size
        if asked == 0 or (asked is None and words is None):
            return 1
        here = math.prod(shape) // math.prod(self.mesh.shape[axis] for axis in ("dp", "fsdp", "sp"))
        return min(shape[1], max(1, -(-here // (asked or max(1, _LOGITS // (words or 1))))))

    # -- files -------------------------------------------------------------------------------------------------

    def save_assets(self, folder: Path) -> list[str]:
        """The arguments and the tokenizer."""
        files = super().save_assets(folder)
        if hasattr(self.text, "save_pretrained"):
            with new_files(folder) as written:
                self.text.save_pretrained(str(folder))
            files += written
        return files

    def save_pretrained(self, ckpt_path: str | Path, state: Any = None, *, merge: bool = False) -> str:
        """Write the state, the arguments, the tokenizer and the weights to a folder, all or nothing.

        The weights open in transformers. With LoRA it is the adapter that is written, for peft; `merge` writes the
        whole model instead, with the adapter added to its weights.
        """
        return str(save_trainer(self, Path(ckpt_path), state, partial(self.save_weights, merge=merge)))

    def save_weights(self, folder: Path, state: Any, *, merge: bool = False) -> list[str]:
        """Write the weights of a state to a folder; the names of the files."""
        model: Any = getattr(state, "model", None)
        if getattr(model, "lora", None) is None:
            return save_weights(self, folder, state)
        with new_files(folder) as written:
            if merge:
                merge_lora(model).save_pretrained(folder)
            else:
                save_lora(model, folder, base_model=self.base_folder)
        return written


def labels_of(batch: Mapping[str, Any]) -> jax.Array:
    """The labels of a batch; none in rows that only make up its size."""
    labels = batch["labels"]
    if VALID not in batch:
        return labels
    return jnp.where(batch[VALID].reshape(-1, *[1] * (labels.ndim - 1)), labels, IGNORE_INDEX)


def _build(config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
    return Decoder(config, rngs=rngs)


def _tokenizer(given: Any, folder: str | None) -> Any:
    """The tokenizer that was passed, in whatever form; that of the model, if it has one; or None."""
    if given is None:
        return open_tokenizer(folder) if folder is not None and _has_tokenizer(folder) else None
    return open_tokenizer(getattr(given, "tokenizer", given))  # a processor has one


def _has_tokenizer(folder: str) -> bool:
    path = Path(folder)
    return not path.is_dir() or (path / "tokenizer.json").is_file()
