"""What callbacks may use of a run on torch, whatever way it was begun."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainformer.run.api import TrainerApi
from trainformer.run.torch.dry_run import Probe
from trainformer.run.torch.inference import Inputs

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun


class TorchTrainerApi(TrainerApi):
    """The `trainer` that callbacks get (see `callbacks.base.TrainerLike`), over the session of the run."""

    _run: TorchRun

    def evaluate_trained(self) -> dict[str, float]:
        """The same for the weights being trained, on the validation data, where `evaluate` judges an average (EMA)."""
        return self._run.evaluate_trained()

    def embed(self, data: Any = "val", most: int | None = None) -> dict[str, Tensor]:
        """Embeddings of data in evaluation mode: ``{"embedding": (N, D)}``, with ``"label"`` where there are labels.

        `data` is ``"train"``, ``"val"``, or anything that `predict` takes; `most` samples at most, evenly chosen.
        """
        return self._run.embed(data, most)

    def look(self, most: int, inputs: Inputs) -> dict[str, Tensor]:
        """What is predicted for at most so many samples of the validation data, evenly chosen: a row for each.

        `inputs` takes from a batch, as the model gets it, what is to stand beside the predictions.
        """
        return self._run.look(most, inputs)

    def save(self, path: str | Path) -> str:
        """Write everything needed to go on exactly from here to one file; all or nothing."""
        return str(self._run.save_file(Path(path)))

    def eval_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode in this block, with the model to be judged (an average, if one is kept) in its place.

        What is drawn inside does not change how training goes on.
        """
        return self._run.eval_mode()

    def copy_model(self) -> nn.Module:
        """A second model with the weights as they are, divided over ranks like the first."""
        return self._run.backend.strategy.copy_model()

    def sandbox(self) -> AbstractContextManager[Probe]:
        """A place for trial steps that leave no trace."""
        return self._run.sandbox()

    # -- looking -------------------------------------------------------------------------------------------

    @property
    def labels_comparable(self) -> bool:
        """Whether a label of the validation data means the class it means in training, as far as names tell."""
        return self._run.labels_comparable
