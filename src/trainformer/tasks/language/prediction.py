"""What tasks that predict tokens share: a loss over supervised tokens, and the metrics that follow from it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from trainformer.core import Loss
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.losses.tokens import TokenLoss
from trainformer.tasks.language.base import LanguageTask

_MOST = 700.0  # e to a larger power is no number


class TokenPrediction(LanguageTask):
    """Base of tasks whose loss is a sum over supervised tokens, and their number. A subclass computes it.

    `shifted` says whether a label is predicted by the token before it: the first of a sequence is then not learned.
    """

    shifted: ClassVar[bool] = False

    @abstractmethod
    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        """The loss of a batch."""

    def _training_options(self) -> dict[str, Any]:
        """What the loss has in training and not in evaluation: smoothing and the like."""
        return {}

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy, summed over the supervised tokens."""
        loss = self._loss(batch, **self._training_options())
        return Loss(loss.sum, loss.weight, metrics={"accuracy": (loss.correct, loss.weight)})

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The same without smoothing, and how many tokens are predicted right."""
        return self._measured(self._loss(batch))

    def _measured(self, loss: TokenLoss) -> dict[str, Any]:
        return {"loss": (loss.sum, loss.weight), "accuracy": (loss.correct, loss.weight)}

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Perplexity, from the mean over all supervised tokens of the set."""
        return {"perplexity": math.exp(min(metrics["loss"], _MOST))} if "loss" in metrics else {}

    def check_batch(self, batch: Any) -> list[str]:
        """What is wrong with the tokens of a batch, in sentences."""
        labels = batch["labels"][..., 1:] if self.shifted else batch["labels"]
        learned = bool((labels != IGNORE_INDEX).any())
        return [] if learned else ["No token of the batch is trained on: all labels are -100."]
