"""What users and callbacks see of a trainer on torch, whatever the entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from trainformer.backends.torch.averaging import ModelAverage
from trainformer.backends.torch.gradient_norms import GradientNorms
from trainformer.backends.torch.probes import LinearProbe
from trainformer.backends.torch.profiling import Trace
from trainformer.eval.retrieval import knn_accuracy
from trainformer.run.api import TrainerApi
from trainformer.run.torch.dry_run import DryRun
from trainformer.run.torch.evaluation import Inputs
from trainformer.run.torch.image_samples import displayed, images_and_labels

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun


class TorchTrainerApi(TrainerApi):
    """The `trainer` that callbacks get (see `callbacks.base.TrainerLike`), on torch."""

    _run: TorchRun

    @property
    def active_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by the names of `configure_optimizers`; a single one has the name ``""``."""
        return {name: active.optimizer for name, active in self._run.backend.optimizers.items()}

    def evaluate_without_ema(self, names: Sequence[str] = ()) -> dict[str, float]:
        """Evaluate the trained weights on the validation data, even if `evaluate` uses an EMA of them.

        `names` are those of the validation sets, by default all.
        """
        return self._run.evaluate_without_ema(names)

    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, Tensor]:
        """Embeddings of a dataset in eval mode: ``{"embedding": (N, D)}``, plus ``"label"`` if the data has labels.

        `data` is ``"train"``, ``"val"``, ``"val/NAME"`` with several validation sets, or anything that `predict`
        accepts. `max_samples` evenly spaced samples.
        """
        return self._run.embed(data, max_samples)

    def sample_predictions(self, max_samples: int, inputs: Inputs, val_set: str | None = None) -> dict[str, Tensor]:
        """Predictions for up to `max_samples` evenly spaced validation samples, one row per sample.

        `inputs` maps a collated batch to further columns, such as the images or the labels. `val_set` is the name of
        the validation set, by default the first.
        """
        return self._run.sample_predictions(max_samples, inputs, val_set)

    def save(self, path: str | Path) -> str:
        """Write everything needed to resume exactly to a single file, atomically."""
        return str(self._run.save_file(Path(path).expanduser()))

    def eval_mode(self) -> AbstractContextManager[None]:
        """Eval mode inside this block, with the model to evaluate (the EMA, if there is one) as `task.model`.

        Random numbers drawn inside do not affect training.
        """
        return self._run.eval_mode()

    def copy_model(self) -> nn.Module:
        """A second model with the current weights, sharded over ranks like the first."""
        return self._run.backend.strategy.copy_model()

    # -- what the built-in callbacks need, which trainers on JAX provide as well -------------------------------

    def average_weights(self, modules: Sequence[str] | None = None) -> ModelAverage:
        """An average of the weights, or of those of some modules, which equals them until it is updated."""
        return ModelAverage(self._run.task.model, self.copy_model(), modules)

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.active_optimizer.param_groups]

    def gradient_norms(self, every: int) -> GradientNorms:
        """Records the gradient norm of each step from now on, and those of all parameters in every `every`-th."""
        return self._run.gradient_norms(every)

    def step_features(self) -> tuple[Tensor, Tensor] | None:
        """Features and labels of the latest training batch, if the task exposes them."""
        latest = getattr(self._run.task, "step_features", None)
        return None if latest is None else (latest.features, latest.labels)

    def knn_accuracy(
        self, queries: Mapping[str, Tensor], gallery: Mapping[str, Tensor], k: int, temperature: float
    ) -> float:
        """Accuracy of a weighted vote of the `k` nearest rows; both as `embed` returns them."""
        return knn_accuracy(
            queries["embedding"],
            queries["label"],
            k=k,
            gallery=gallery["embedding"],
            gallery_labels=gallery["label"],
            weighted=True,
            temperature=temperature,
        )

    def linear_probe(self, lr: float, momentum: float, weight_decay: float) -> LinearProbe:
        """A linear classifier, to be trained on features of single steps."""
        return LinearProbe(lr, momentum, weight_decay)

    def sample_images(self, max_samples: int, val_set: str | None = None) -> dict[str, np.ndarray]:
        """Up to `max_samples` evenly spaced validation images (N, H, W, C) with `true` class and predictions."""
        rows = self.sample_predictions(max_samples, images_and_labels, val_set)
        rows["image"] = displayed(self._run.task, rows["image"]).permute(0, 2, 3, 1)
        widened = (values.float() if values.is_floating_point() else values for values in rows.values())
        return dict(zip(rows, (values.numpy() for values in widened), strict=True))

    def start_trace(self, folder: Path) -> Trace:
        """Start torch's profiler; the trace is written to the folder when it is stopped."""
        return Trace(folder, self._run.backend.device)

    def sandbox(self) -> AbstractContextManager[DryRun]:
        """For trial steps that leave no trace."""
        return self._run.sandbox()

    # -- data -------------------------------------------------------------------------------------------

    @property
    def same_classes(self) -> bool:
        """Whether training and validation labels refer to the same classes, judging by the class names."""
        return self._run.same_classes
