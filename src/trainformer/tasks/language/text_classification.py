"""Text classification (single-label, multi-label) and regression, for texts and pairs of texts.

Finding the classes is in `classifying` and `labels`. The loss is a sum over texts, so padding and gradient accumulation
do not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.metadata import DatasetInfo
from trainformer.data.text.labelled import LabelledTexts, TextEncoder, label_values, split_item
from trainformer.data.text.labels import Problem
from trainformer.data.text.sources import records_of
from trainformer.data.text.token_records import only_columns
from trainformer.eval.classification import confusion_matrix, multilabel_metrics, pearson, precision_recall_f1, spearman
from trainformer.losses.numerics import no_autocast, upcast
from trainformer.models.modes import eval_mode
from trainformer.tasks.classification_report import confusion_record
from trainformer.tasks.language.classifying import ClassifyingTask
from trainformer.tasks.vision.batch import cross_entropy
from trainformer.tasks.vision.checks import given_weights


@dataclass(eq=False)
class TextClassification(ClassifyingTask):
    """Train a text classifier of transformers (BERT, RoBERTa, DeBERTa, Llama, ...) on texts or pairs of texts.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer` defaults to the one of
    `model_name`. Records have a `text`, or two (`text` and `text_pair`, `sentence1` and `sentence2`, `premise` and
    `hypothesis`, ...), and a `label`; texts of more than `max_length` tokens are truncated. A label is a class name or
    index, a list of them (multi-label), or a number (regression). `problem` and the classes are inferred from the
    labels if not given.

    `label_smoothing` and `class_weights` (one number per class, or `"balanced"`) apply to single-label problems.
    Evaluation reports accuracy and macro F1 (single-label), F1 and average precision (multi-label), or MSE and
    correlations (regression) over the whole dataset.
    """

    model_name: Any = "bert-base-uncased"
    max_length: int = 512
    _: KW_ONLY
    num_classes: int | None = None
    class_names: list[str] | None = None
    problem: Problem | None = None
    label_smoothing: float = 0.0
    class_weights: Literal["balanced"] | Sequence[float] | None = None

    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation, labels as rows

    kind = "sequence_classification"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        self._init_classes(self.problem)
        if not 0 <= self.label_smoothing < 1:
            raise BadArgument(expected("label_smoothing from 0 to below 1", self.label_smoothing))
        if isinstance(self.class_weights, str) and self.class_weights != "balanced":
            raise BadArgument(expected("class_weights to be 'balanced', a list of numbers or None", self.class_weights))
        self._weights: Tensor | None = None

    def configure(self, info: DatasetInfo) -> None:
        """Find the classes, load the model, and compute the class weights."""
        super().configure(info)
        labels = self.labels
        self.problem = labels.problem
        if labels.problem != "single" and (self.label_smoothing or self.class_weights is not None):
            do = "Leave label_smoothing and class_weights out."
            raise BadArgument(expected("problem='single' for these arguments", f"problem={self.problem!r}", do))
        if self.class_weights == "balanced":
            weights = DatasetInfo(class_counts=None if labels.counts is None else list(labels.counts)).class_weights
            if weights is None:
                do = "Pass the weights as numbers."
                raise DataError(expected("class counts for class_weights='balanced'", None, do))
            self._weights = weights
        else:
            self._weights = given_weights(self.class_weights, labels.count)

    # -- data ----------------------------------------------------------------------------------------------

    def _label_values(self, dataset: Any) -> tuple[Iterable[Any], list[str] | None]:
        return label_values(records_of(dataset, None))

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise texts once, with their labels."""
        records = records_of(dataset, None)
        encoder = TextEncoder(self.text_tokenizer, self.max_length, self.labels, records[0], labelled=train)
        return LabelledTexts(self._tokenize(only_columns(records, encoder.keys), encoder, train), self.labels)

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate_fn(examples)
        types = batch.pop("labels")
        labels = self.labels.decode([example["label"] for example in examples])
        batch["token_type_ids"] = types.clamp(min=0)
        return batch if labels is None else {**batch, "labels": torch.from_numpy(labels)}

    # -- steps ---------------------------------------------------------------------------------------------

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        model: Any = self.model
        names = ["input_ids", "attention_mask"]
        # GPT-2 also accepts token_type_ids, with another meaning: its tokenizer does not list them.
        types = getattr(unwrap_model(model).config, "type_vocab_size", 0)
        if types > 1 and "token_type_ids" in self.text_tokenizer.model_input_names:
            names.append("token_type_ids")
        return upcast(model(**{name: batch[name] for name in names if name in batch}).logits)

    def _loss(self, logits: Tensor, labels: Tensor, *, train: bool, reduction: str = "sum") -> tuple[Tensor, Any]:
        with no_autocast(logits):
            if self.labels.problem == "single":
                weights = self._weights_like(logits) if train else None
                smoothing = self.label_smoothing if train else 0.0
                options = {"class_weights": weights, "label_smoothing": smoothing, "reduction": reduction}
                return tuple(cross_entropy(logits, labels, **options))  # type: ignore[return-value, arg-type]
            if self.labels.problem == "multi":
                losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
            else:
                losses = (logits - labels.to(logits.dtype)).square()
            if reduction == "none":
                return losses.mean(1), torch.ones_like(losses[:, 0])
            return losses.mean(1).sum(), len(labels)

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy, binary cross-entropy averaged over classes (multi-label), or squared error (regression)."""
        logits, labels = self._logits(batch), _require_labels(batch)
        total, weight = self._loss(logits, labels, train=True)
        rows = None
        if self.per_sample_losses:
            rows = self._loss(logits.detach(), labels, train=True, reduction="none")
        if self.labels.problem != "single":
            return Loss(total, weight, per_sample=rows)
        correct = (logits.detach().argmax(-1) == labels).sum()
        return Loss(total, weight, metrics={"accuracy": (correct, len(labels))}, per_sample=rows)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss without regularisation, and predictions for the dataset-level metrics."""
        logits, labels = self._logits(batch), _require_labels(batch)
        metrics: dict[str, Any] = {"loss": self._loss(logits, labels, train=False), "label": labels}
        if self.labels.problem == "single":
            prediction = logits.argmax(-1)
            return {**metrics, "accuracy": ((prediction == labels).sum(), len(labels)), "prediction": prediction}
        return {**metrics, "prediction": logits.sigmoid() if self.labels.problem == "multi" else logits}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Dataset-level metrics. Keeps the confusion matrix as `confusion`."""
        predictions, labels = rows["prediction"], rows["label"]
        if self.labels.problem == "single":
            self.confusion = confusion_matrix(predictions, labels, self.labels.count)
            return {"f1": precision_recall_f1(predictions, labels, "macro", self.labels.count).f1.item()}
        if self.labels.problem == "multi":
            return multilabel_metrics(predictions, labels)
        columns = list(zip(predictions.float().T, labels.float().T, strict=True))
        return {
            "mse": (predictions.double() - labels.double()).square().mean().item(),
            "pearson": float(np.mean([pearson(p, w).item() for p, w in columns])),
            "spearman": float(np.mean([spearman(p, w).item() for p, w in columns])),
        }

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        return confusion_record(self.confusion, self.labels.names)

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Predictions and probabilities, or regression outputs as `value`. Labels are optional."""
        logits = self._logits(batch)
        if self.labels.problem == "regression":
            return {"value": logits.squeeze(1) if self.labels.count == 1 else logits}
        if self.labels.problem == "multi":
            return {"prediction": logits > 0, "probabilities": logits.sigmoid()}
        probabilities = logits.softmax(-1)
        probability, prediction = probabilities.max(-1)
        return {"prediction": prediction, "probability": probability, "probabilities": probabilities}

    @torch.no_grad()
    def classify(self, texts: Any, *, top: int | None = None, batch_size: int = 32) -> list[dict[str, float]]:
        """Return {class name: score} for each text or pair of texts, best first: all classes, or the best `top`.

        Scores are probabilities (multi-label ones do not sum to 1), or regression outputs.
        """
        several: list[Any] = [texts] if isinstance(texts, str) else list(texts)
        if not several:
            return []
        records = [{"text": t} if isinstance(t, str) else {"text": t[0], "text_pair": t[1]} for t in several]
        encoders = {
            len(keys): TextEncoder(self.text_tokenizer, self.max_length, self.labels, keys, labelled=False)
            for keys in ({"text": ""}, {"text": "", "text_pair": ""})
        }
        items = [encoders[len(record)].encode(record)[0]._asdict() for record in records]
        found: list[list[float]] = []
        with eval_mode(self.model):
            for batch in self._batches([split_item(item) for item in items], batch_size):
                rows = self.predict_step(batch)
                found += rows.get("probabilities", rows.get("value")).reshape(-1, self.labels.count).tolist()  # type: ignore[union-attr]
        named = [{self.labels.name(index): score for index, score in enumerate(row)} for row in found]
        return [dict(sorted(row.items(), key=lambda pair: -pair[1])[:top]) for row in named]

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        if self._weights is not None and (self._weights.device, self._weights.dtype) != (logits.device, logits.dtype):
            self._weights = self._weights.to(logits)  # once: a copy in each step would synchronise
        return self._weights

    def check_batch(self, batch: Any) -> list[str]:
        if "labels" not in batch:
            return ["Texts of the batch have no label."]
        labels = batch["labels"]
        if self.labels.problem != "regression" and len(labels) > 8 and bool((labels == labels[:1]).all()):
            return ["All texts of the batch have the same label: is the data sorted, or is it the wrong column?"]
        return []


def _require_labels(batch: Mapping[str, Tensor]) -> Tensor:
    if "labels" not in batch:
        raise DataError(expected("a label with every text", "texts without", "To predict labels, call predict()."))
    return batch["labels"]
