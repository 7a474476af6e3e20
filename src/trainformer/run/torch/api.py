"""What users and callbacks see of a trainer on torch, whatever the entry point."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainformer.run.api import TrainerApi
from trainformer.run.torch.dry_run import DryRun
from trainformer.run.torch.evaluation import Inputs

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun


class TorchTrainerApi(TrainerApi):
    """The `trainer` that callbacks get (see `callbacks.base.TrainerLike`), on torch."""

    _run: TorchRun

    @property
    def active_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by the names of `configure_optimizers`; a single one has the name ``""``."""
        return {name: active.optimizer for name, active in self._run.backend.optimizers.items()}

    def evaluate_without_ema(self) -> dict[str, float]:
        """Evaluate the trained weights on the validation data, even if `evaluate` uses an EMA of them."""
        return self._run.evaluate_without_ema()

    def embed(self, data: Any = "val", max_samples: int | None = None) -> dict[str, Tensor]:
        """Embeddings of a dataset in eval mode: ``{"embedding": (N, D)}``, plus ``"label"`` if the data has labels.

        `data` is ``"train"``, ``"val"``, or anything that `predict` accepts. `max_samples` evenly spaced samples.
        """
        return self._run.embed(data, max_samples)

    def sample_predictions(self, max_samples: int, inputs: Inputs) -> dict[str, Tensor]:
        """Predictions for up to `max_samples` evenly spaced validation samples, one row per sample.

        `inputs` maps a collated batch to further columns, such as the images or the labels.
        """
        return self._run.sample_predictions(max_samples, inputs)

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

    def sandbox(self) -> AbstractContextManager[DryRun]:
        """For trial steps that leave no trace."""
        return self._run.sandbox()

    # -- data -------------------------------------------------------------------------------------------

    @property
    def same_classes(self) -> bool:
        """Whether training and validation labels refer to the same classes, judging by the class names."""
        return self._run.same_classes
