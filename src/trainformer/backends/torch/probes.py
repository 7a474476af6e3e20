"""Classifiers of features that are evaluated during training, on torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.utils.distributed import gather_row_counts, gather_rows

_CHUNK = 4096  # rows that are classified at once


class LinearProbe:
    """A linear classifier with its own optimizer (SGD with momentum), trained on features of one step after another.

    A BatchNorm layer normalises the features, whose scale changes during training. All ranks train the same classifier
    on the features of all ranks.
    """

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.classifier: nn.Sequential | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._steps = 0

    def train(self, features: Tensor, labels: Tensor, num_classes: int) -> None:
        """One step on features (N, D) and labels (N,)."""
        features, labels = features.detach().float(), labels.long()
        counts = gather_row_counts(features)
        features, labels = gather_rows(features, counts), gather_rows(labels, counts)
        if len(features) < 2:  # too few for batch statistics
            return
        classifier, optimizer = self._on_device(features, num_classes)
        # A plain mean for the first ten steps, then an exponential one: features differ in scale by orders of
        # magnitude, and running statistics that start at 0 and 1 would be far off for dozens of steps.
        self._steps += 1
        classifier[0].momentum = max(0.1, 1 / self._steps)
        # Steps that the run skips because of a non-finite loss still arrive here and would break the classifier for
        # good. Masking such rows needs no device synchronisation.
        finite = features.isfinite().all(1)
        features = torch.where(finite.unsqueeze(1), features, 0.0)
        with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
            losses = F.cross_entropy(classifier(features), labels, reduction="none")
            torch.where(finite, losses, 0.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def accuracy(self, features: Tensor, labels: Tensor) -> float | None:
        """The share of rows that are classified correctly; None before the first step."""
        if self.classifier is None:
            return None
        device = next(self.classifier.parameters()).device
        self.classifier.eval()
        correct = sum(
            int((self.classifier(chunk.to(device)).argmax(1).cpu() == wanted).sum())
            for chunk, wanted in zip(features.split(_CHUNK), labels.split(_CHUNK), strict=True)
        )
        self.classifier.train()
        return correct / len(labels)

    def _on_device(self, features: Tensor, num_classes: int) -> tuple[Any, torch.optim.Optimizer]:
        if self.classifier is None or self._optimizer is None:
            self._build(features.shape[1], num_classes, features.device)
        assert self.classifier is not None
        assert self._optimizer is not None
        if next(self.classifier.parameters()).device != features.device:  # restored from a checkpoint
            self.classifier.to(features.device)
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # moves its state to the device
        return self.classifier, self._optimizer

    def _build(self, width: int, classes: int, device: torch.device | str) -> None:
        # Zeros, and `skip_init`: the default init would draw from the run's random state.
        linear = nn.utils.skip_init(nn.Linear, width, classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.classifier = nn.Sequential(nn.BatchNorm1d(width, affine=False), linear).to(device)
        self._optimizer = torch.optim.SGD(linear.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)

    def state_dict(self) -> dict[str, Any]:
        if self.classifier is None or self._optimizer is None:
            return {}
        return {
            "steps": self._steps,
            "classifier": self.classifier.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            self.classifier, self._optimizer, self._steps = None, None, 0
            return
        self._steps = state["steps"]
        weight = state["classifier"]["1.weight"]
        self._build(weight.shape[1], weight.shape[0], weight.device)
        assert self.classifier is not None
        assert self._optimizer is not None
        self.classifier.load_state_dict(state["classifier"])
        self._optimizer.load_state_dict(state["optimizer"])
