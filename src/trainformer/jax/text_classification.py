"""Classification of texts on JAX: one label, several labels, or numbers, for texts and pairs of texts.

Classes are found in `data.text.labels`, texts are tokenised in `data.text.labelled`; the model is in `models.jax.bert`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.core.types import Loss
from trainformer.data.ids import sample_ids
from trainformer.data.mixture.mixture import Mixture
from trainformer.data.text.collate import token_batch
from trainformer.data.text.labelled import LabelledTexts, TextEncoder, label_values, split_item
from trainformer.data.text.labels import PROBLEM_TYPES, Labels, check_classes, check_names, read_labels
from trainformer.data.text.sources import records_of
from trainformer.data.text.store import tokenize
from trainformer.data.text.token_records import only_columns
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.recorded import NoTrainingData
from trainformer.jax.text_arguments import LoRAConfig, TextArguments, refuse_values
from trainformer.jax.text_trainer import TextTrainer, build_model, valid_rows
from trainformer.losses.jax.tokens import IGNORE_INDEX, row_sums
from trainformer.models.jax.bert import Bert, BertConfig
from trainformer.models.jax.huggingface import check_family, find_folder, read_model_config

_HEAD = "sequence_classification"
_INPUTS = ("attention_mask", "token_type_ids")


@dataclass(kw_only=True)
class SequenceClassificationConfig(TextArguments):
    """Arguments of `SequenceClassificationTrainer`. The problem and the classes are inferred from the labels if not
    given.

    >>> SequenceClassificationConfig(output_dir="run", class_names=["bad", "good"]).class_names
    ['bad', 'good']
    """

    num_classes: int | None = None
    class_names: list[str] | None = None
    problem: str | None = None  # single, multi, regression
    label_smoothing: float = 0.0  # of single labels

    def check(self) -> None:
        super().check()
        check_names(self.problem, self.class_names, self.num_classes)
        self._number("label_smoothing", lambda v: 0 <= v < 1, "at least 0 and below 1")
        do = "Each text is a row with one output, truncated if it is too long."
        fixed: dict[str, Any] = {"prompt_template": (None,), "train_on_inputs": (None,), "chunk_tokens": (None,)}
        refuse_values(self, do, **fixed, packing=(False,), truncation=("auto", "truncate"))


class SequenceClassificationTrainer(TextTrainer):
    """Trains a classifier of texts, or of pairs of texts.

    `model` is the folder (or hub name) of a BERT, RoBERTa or DistilBERT (with a new head if the saved one does not
    fit), a `BertConfig` for random weights, a `Bert`, or a function that builds one. Records have a ``text``, or two
    (``text`` and ``text_pair``, ``sentence1`` and ``sentence2``, ``premise`` and ``hypothesis``, ...), and a ``label``:
    a class name or index, a list of them (multi-label), or a number (regression). The names of the classes are saved
    with the model. With `lora`, the head is trained in full.

    Evaluation computes the loss (cross-entropy, binary cross-entropy averaged over classes, or squared error), and the
    accuracy: of rows, or of the single decisions of a multi-label problem.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "good", "bad"])}
    >>> plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    >>> plain.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = BertConfig(vocab_size=4, **sizes)
    >>> arguments = SequenceClassificationConfig(max_steps=1, log="none", output_dir="classes", total_batch_size=8)
    >>> texts = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}] * 4
    >>> trainer = SequenceClassificationTrainer(arguments, config, tokenizer, train_dataset=texts)
    >>> trainer.labels.names, trainer.predict(["good", "bad bad"]).shape
    (('no', 'yes'), (2, 2))
    """

    arguments_type: ClassVar[type[TextArguments]] = SequenceClassificationConfig
    masks_padding = True
    model_types = (Bert,)

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        lora: Any = None,
        **options: Any,
    ) -> None:
        arguments = SequenceClassificationConfig.from_arguments(arguments)
        for name in ("dataset_train", "train_dataset"):
            if options.get(name) is not None:
                options[name] = _records(options[name])
        given = options.get("dataset_train") if options.get("train_dataset") is None else options["train_dataset"]
        state = options.get("model_state")
        self.labels = _find_labels(arguments, given, _known_names(model if state is None else state.model))
        if self.labels.problem != "single" and arguments.label_smoothing:
            received = f"problem={self.labels.problem!r}"
            raise BadArgument(expected("problem='single' for label_smoothing", received, "Leave label_smoothing out."))
        lora = LoRAConfig.parse(lora)
        if lora is not None and lora.folder is None and not lora.modules_to_save:
            lora = dataclasses.replace(lora, modules_to_save=("output/pooler", "output/classifier"))
        super().__init__(arguments, model, processing_class, lora=lora, **options)

    # -- the model -----------------------------------------------------------------------------------------------

    def load_model(self, model: Any) -> Any:
        if isinstance(model, BertConfig):
            config = replace(model, **self._head())
            check_family(config)
            model = partial(build_model, config)
        return super().load_model(model)

    def read_folder(self, folder: str | Path, **options: Any) -> nnx.Module:
        model: Any = super().read_folder(folder, head=_HEAD, num_labels=self.labels.count, **options)
        model.config = replace(model.config, **self._head())
        return model

    def _head(self) -> dict[str, Any]:
        """The fields of the model's config that the labels determine."""
        labels = self.labels
        names = None if labels.names is None else tuple(labels.names)
        kind = PROBLEM_TYPES[labels.problem]
        return {"head": _HEAD, "num_labels": labels.count, "label_names": names, "problem_type": kind}

    def _inspect_model(self, model: Any) -> None:
        super()._inspect_model(model)
        config = self.model_config
        if (config.head, config.num_labels) != (_HEAD, self.labels.count):
            do = f"Build it with head={_HEAD!r} and num_labels={self.labels.count}, or pass its folder."
            received = f"head={config.head!r} with num_labels={config.num_labels}"
            raise BadArgument(expected("a classifier with one output per class", received, do))
        listed = getattr(self.text, "model_input_names", ("token_type_ids",))
        self._has_types = config.type_vocab_size > 1 and "token_type_ids" in listed

    # -- data ----------------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Texts with their labels, tokenised once."""
        records = records_of(dataset, None)
        encoder = TextEncoder(self.text, self.max_length, self.labels, records[0], labelled=True)
        store = tokenize(only_columns(records, encoder.keys), encoder, **self.token_options(train))
        return self.update_batch_length(LabelledTexts(store, self.labels))

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """`collect_texts`: texts were truncated when they were tokenised."""
        return partial(self.collect_texts, length=None)

    def collect_texts(self, samples: list[Any], length: int | None) -> dict[str, np.ndarray]:
        """Rows of the length of the longest text of all datasets, or of `length`."""
        batch = token_batch(samples, length or self.batch_length, self.pad_id)
        types = batch.pop("labels")
        batch |= {"token_type_ids": np.maximum(types, 0)} if self._has_types else {}
        labels = self.labels.decode([sample["label"] for sample in samples])
        return self.check_token_ids(batch if labels is None else {**batch, "labels": labels})

    # -- steps ---------------------------------------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        return self._loss(model, batch, key, self.arguments.label_smoothing)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """Loss and accuracy without dropout and label smoothing."""
        return self._loss(model, batch, None, 0.0)

    def _loss(self, model: Any, batch: Mapping[str, Any], key: Any, smoothing: float) -> Loss:
        logits, labels = self._logits(model, batch, key), batch["labels"]
        valid = valid_rows(batch)
        if self.labels.problem == "single":
            labels = jnp.where(valid > 0, labels.astype(jnp.int32), IGNORE_INDEX)
            return row_sums(logits[:, None], labels[:, None], shift=False, label_smoothing=smoothing).total()
        if self.labels.problem == "regression":
            losses, metrics = jnp.square(logits - labels), {}
        else:
            losses = optax.sigmoid_binary_cross_entropy(logits, labels)
            metrics = {"accuracy": (logits > 0) == (labels > 0)}
        rows, total = jnp.where(valid > 0, jnp.mean(losses, axis=-1), 0.0), jnp.sum(valid)
        pairs = {name: (jnp.sum(valid * jnp.mean(right, axis=-1)), total) for name, right in metrics.items()}
        return Loss(jnp.sum(rows), total, pairs, (rows, valid))

    def _logits(self, model: Any, batch: Mapping[str, Any], key: Any) -> jax.Array:
        inputs = {name: batch[name] for name in _INPUTS if name in batch}
        return model(batch["input_ids"], **inputs, deterministic=key is None, key=key).astype(jnp.float32)

    # -- to be built again from a checkpoint ---------------------------------------------------------------------

    def learned(self) -> dict[str, Any]:
        """The classes."""
        return dataclasses.asdict(self.labels)

    def check_learned(self, learned: dict[str, Any]) -> None:
        """A resumed run must number the classes in the same way."""
        saved, own = _labels_of(learned), self.labels
        if (saved.problem, saved.count, saved.names) != (own.problem, own.count, own.names):
            do = f"Pass class_names={list(saved.names)}." if saved.names else f"Pass num_classes={saved.count}."
            ours, theirs = (list(each.names) if each.names else each.count for each in (own, saved))
            raise DataError(
                expected(f"a checkpoint with the classes {ours} ({own.problem})", f"{theirs} ({saved.problem})", do)
            )

    # -- predictions ---------------------------------------------------------------------------------------------

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, if they have names."""
        return None if self.labels.names is None else list(self.labels.names)

    def predict(self, texts: Any, batch_size: int | None = None) -> np.ndarray:
        """The probabilities of the classes (texts, classes), or the values of a regression.

        `texts` is a text, a list of texts or of records as in training (labels are not needed), or the `Path` of a
        file. Multi-label probabilities do not sum to 1.
        """
        records = [texts] if isinstance(texts, str) else records_of(texts, None)
        return np.concatenate([found for _, found in self._predicted(records, batch_size)])

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """The `prediction`, its `probability` and all `probabilities` of texts, with the name of the `class` if known.

        Of a multi-label problem, `prediction` has a boolean and `classes` the names of the chosen classes; of a
        regression there is a `value`. `data` is the path of a file, or a list of texts or records, without labels.
        """
        self.no_options(options)
        records, names = records_of(data, None), self.class_names
        ids = sample_ids(records)
        for index, found in self._predicted(records, batch_size):
            columns: dict[str, Any] = {"index": index, "id": [next(ids) for _ in index]}
            if self.labels.problem == "regression":
                columns["value"] = found[:, 0] if self.labels.count == 1 else found
            elif self.labels.problem == "multi":
                chosen = found > 0.5
                named = [[name for name, holds in zip(names or (), row, strict=False) if holds] for row in chosen]
                columns |= {} if names is None else {"classes": named}
                columns |= {"prediction": chosen, "probabilities": found}
            else:
                best = found.argmax(-1)
                columns |= {} if names is None else {"class": [names[number] for number in best]}
                columns |= {"prediction": best, "probability": found.max(-1), "probabilities": found}
            yield columns

    def _predicted(self, records: Any, batch_size: int | None) -> Iterator[tuple[list[int], np.ndarray]]:
        """The numbers of records and what `predict` returns for them, a batch at a time."""
        check_count("batch_size", batch_size or 1)
        encoder = TextEncoder(self.text, self.max_length, self.labels, records[0], labelled=False)
        pieces = encoder.encode_all([records[i] for i in range(len(records))])
        samples = [{**split_item(piece._asdict()), "label": self.labels.encode(None)} for (piece,) in pieces]
        size = batch_size or self.batch_sizes.evaluation
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = max(self._longest, self.padded_length(longest, self.max_length))
        for start in range(0, len(samples), size):
            rows = samples[start : start + size]
            batch = self.collect_texts(rows + rows[-1:] * (size - len(rows)), length)  # one shape: one compilation
            with self.eval_mode():
                found = np.asarray(self._compiled(self.model_state, batch))
            yield list(range(start, start + len(rows))), found[: len(rows)]

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._predict)

    def _predict(self, state: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        logits = self._logits(state.model, batch, None)
        if self.labels.problem == "regression":
            return logits
        return jax.nn.sigmoid(logits) if self.labels.problem == "multi" else jax.nn.softmax(logits, axis=-1)

    def classify(self, texts: Any, *, top: int | None = None) -> list[dict[str, float]]:
        """{class name: score} for each text, best first: all classes, or the best `top`. Scores as in `predict`."""
        named = [
            {self.labels.name(index): float(score) for index, score in enumerate(row)} for row in self.predict(texts)
        ]
        return [dict(sorted(row.items(), key=lambda pair: -pair[1])[:top]) for row in named]


def _labels_of(learned: Mapping[str, Any]) -> Labels:
    """The classes that a checkpoint recorded."""
    try:
        tuples = {name: tuple(value) for name, value in learned.items() if isinstance(value, list)}
        return Labels(**{**learned, **tuples})
    except TypeError as error:
        raise DataError(expected("the classes of a run in its record", str(error))) from error


def _records(data: Any) -> Any:
    """The records of training data, except for those of a mixture and of data that are not there."""
    if isinstance(data, NoTrainingData):
        return data
    mixed = data if isinstance(data, Mixture) else Mixture.from_mapping(data) if isinstance(data, Mapping) else None
    return mixed if isinstance(mixed, Mixture) else records_of(data, None)


def _known_names(model: Any) -> tuple[str, ...] | None:
    """The class names of a trained classifier."""
    if isinstance(model, (str, Path)):
        return getattr(read_model_config(find_folder(model))[1], "label_names", None)
    return getattr(getattr(model, "config", model), "label_names", None)


def _find_labels(arguments: Any, records: Any, known: tuple[str, ...] | None) -> Labels:
    """The classes: given, or of the training data, or of the model."""
    if isinstance(records, NoTrainingData):
        return _labels_of(records.learned)
    given = arguments.class_names or arguments.num_classes or arguments.problem == "regression" or known
    if records is None or isinstance(records, Mixture):
        if not given:
            do = "Pass class_names or num_classes."
            raise BadArgument(expected("training data with labels, or known classes", type(records).__name__, do))
        records = None
    values, names = ((), None) if records is None else label_values(records)
    labels = read_labels(values, arguments.problem, arguments.class_names or names, arguments.num_classes, known)
    check_classes(labels, arguments.num_classes)
    return labels
