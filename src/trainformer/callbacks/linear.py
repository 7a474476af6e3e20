"""A linear classifier trained beside a self-supervised run, on features through which no gradient passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.callbacks.base import TrainerLike
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import gather_rows, row_shares


@dataclass
class OnlineLinear:
    """Train a linear layer on the features of each training step, and report its accuracy on the validation data.

    An upper trend of ``val/online_linear`` says that the features get better, long before a proper probe is trained.
    The layer has its own optimizer (SGD with momentum) and never touches the run: its features are without gradients.
    It needs data with labels, and a task that keeps the features of its latest step as `task.step_features` (`SSL`
    does, except for MAE, which has no features of whole images in training). Batch statistics replace normalisation,
    since features change their scale during a run. All ranks train the same layer, on the features of all ranks.
    """

    needs_torch = True
    makes_requests = False

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    name: str = "val/online_linear"

    classifier: nn.Sequential | None = field(init=False, default=None, repr=False)
    _steps: int = field(init=False, default=0, repr=False)
    _optimizer: torch.optim.Optimizer | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise BadArgument(expected("OnlineLinear's lr to be positive", self.lr))

    def on_step_end(self, trainer: TrainerLike, step: int, loss: Any) -> None:
        """One step of the classifier."""
        latest = getattr(trainer.task, "step_features", None)
        if latest is None:
            raise BadArgument(
                "OnlineLinear needs features and labels of each step: a task that keeps them as `step_features` (SSL "
                "does, except for MAE) and data with labels."
            )
        features, labels = _of_all_ranks(latest.features.detach().float(), latest.labels.long())
        if len(features) < 2:  # nothing to take batch statistics of
            return
        classifier, optimizer = self._ready(trainer, features)
        # A plain mean at first, an exponential one from the tenth step on: features differ in scale by orders of
        # magnitude, and running statistics that begin at 0 and 1 would be far off for dozens of steps.
        self._steps += 1
        classifier[0].momentum = max(0.1, 1 / self._steps)
        # A step that the run skips for a value that is not finite still comes by here, and would spoil the classifier
        # for good. Nobody looks at the values, which would wait for the device: such rows count nothing.
        finite = features.isfinite().all(1)
        features = torch.where(finite.unsqueeze(1), features, 0.0)
        with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
            losses = F.cross_entropy(classifier(features), labels, reduction="none")
            torch.where(finite, losses, 0.0).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the metrics that `measure` gives."""
        return (self.name,)

    @torch.no_grad()
    def measure(self, trainer: TrainerLike, metrics: dict[str, float]) -> dict[str, float]:
        """The accuracy on the validation data, as a further metric of an evaluation."""
        if self.classifier is None:
            return {}
        rows = trainer.embed("val")
        if "label" not in rows:
            return {}
        device = next(self.classifier.parameters()).device
        self.classifier.eval()
        right = sum(
            int((self.classifier(part.to(device)).argmax(1).cpu() == labels).sum())
            for part, labels in zip(rows["embedding"].split(4096), rows["label"].split(4096), strict=True)
        )
        self.classifier.train()
        return {self.name: right / len(rows["label"])}

    def _ready(self, trainer: TrainerLike, features: Tensor) -> tuple[Any, torch.optim.Optimizer]:
        if self.classifier is None or self._optimizer is None:
            classes = trainer.context.config.get("num_classes")
            if classes is None:
                raise BadArgument("OnlineLinear needs data that say their number of classes, and received others.")
            self._build(features.shape[1], int(classes), features.device)
        assert self.classifier is not None
        assert self._optimizer is not None
        if next(self.classifier.parameters()).device != features.device:  # loaded from a file
            self.classifier.to(features.device)
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # which follows the parameters
        return self.classifier, self._optimizer

    def _build(self, width: int, classes: int, device: torch.device | str) -> None:
        # A linear layer needs no random start. `skip_init`, as the usual one would draw from the run's random numbers.
        linear = nn.utils.skip_init(nn.Linear, width, classes)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.classifier = nn.Sequential(nn.BatchNorm1d(width, affine=False), linear).to(device)
        self._optimizer = torch.optim.SGD(linear.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)

    def state_dict(self) -> dict[str, Any]:
        """The classifier and its optimizer."""
        if self.classifier is None or self._optimizer is None:
            return {}
        return {
            "steps": self._steps,
            "classifier": self.classifier.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
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


def _of_all_ranks(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Features and labels of all ranks: each of them then trains the same classifier."""
    shares = row_shares(features)
    return gather_rows(features, shares), gather_rows(labels, shares)
