"""What subclasses of `BaseTrainer` define: the loss, and whatever else differs from the defaults here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, expected
from trainformer.jax.arguments import TrainingArguments


class TrainerHooks:
    """The methods of a trainer that subclasses override. See also those of `BaseTrainer` named ``configure_...``."""

    data_collator: Callable[[list[Any]], Any] | None

    # -- the loss and the metrics ----------------------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """The loss of a batch, to be differentiated: a mean over its rows, or ``Loss(sum, weight, metrics)``.

        A mean may come with a dict of means to log: ``return loss, {"accuracy": accuracy}``.

        The model is in training mode. `key` is a PRNG key, unique to each step and micro-batch.
        """
        raise NotImplementedError

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """The metrics of an evaluation batch, in the same form; the model is in eval mode. Default: the loss."""
        return self.compute_loss(model, batch, key)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Additional metrics, computed from the means of a whole evaluation."""
        return {}

    def summarize_rows(self, rows: dict[str, Any]) -> dict[str, float]:
        """Additional metrics, computed from the rows of a whole evaluation: NumPy arrays by name.

        For metrics that are no means. `compute_metrics` returns ``EvalOutput(loss, rows)`` (of
        `trainformer.backends.jax.step`) then.
        """
        return {}

    def step_totals(self, model: nnx.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Sums that the loss of a whole optimizer step depends on, as arrays by name, with the model in eval mode.

        They are added up over the micro-batches before the first one; `compute_loss` finds them in
        ``batch["_totals"]``. They have no gradient.
        """
        return {}

    def predict_step(self, model: nnx.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays with one row per sample, such as `prediction`, `embedding` and `label`; the model is in eval mode.

        Callbacks that show predictions or classify features need it, and so does `embed`.
        """
        raise NotImplementedError

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """Predictions for data, a batch at a time: columns with one item per sample, with its `index` and `id`."""
        do = "Trainers of classifiers, reward models and language models do; call the model of this one yourself."
        raise BadArgument(expected("a trainer that predicts", type(self).__name__, do))

    # -- the data --------------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Convert a dataset to the samples that batches are collated from."""
        return dataset

    # -- during a run ----------------------------------------------------------------------------------------------

    def on_step_start(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Called before a step with the number of completed steps. May return a state to train from instead."""

    def on_step_end(self, state: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Called after a step with the number of completed steps. May return a state, or (state, metrics).

        The metrics are device scalars; reading one waits for the step. Do not keep the state: the next step donates its
        buffers.
        """

    def on_log(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """Called when metrics are logged, with the number of completed steps. May return the metrics to log instead."""

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """What to write to ``records.jsonl`` about the latest evaluation besides its metrics, by kind."""
        return {}

    # -- to be built again from a checkpoint; see `recorded` -------------------------------------------------------

    def recorded_options(self) -> dict[str, Any]:
        """Arguments of the constructor that a checkpoint records, besides arguments, model, data and callbacks."""
        return {} if self.data_collator is None else {"data_collator": self.data_collator}

    def learned(self) -> dict[str, Any]:
        """What the trainer learned from the training data, as JSON values."""
        return {}

    def use_learned(self, record: TrainerRecord) -> None:
        """Restore what `learned` returned when the checkpoint was written."""

    def check_learned(self, learned: dict[str, Any]) -> None:
        """Raise if a run that learned this cannot be resumed with the training data of this trainer."""

    @classmethod
    def options_to_evaluate(cls, record: TrainerRecord, arguments: TrainingArguments) -> dict[str, Any]:
        """Further arguments of the constructor that evaluating a checkpoint needs."""
        return {}

    # -- the files of a model --------------------------------------------------------------------------------------

    def save_tokenizer(self, folder: Path) -> list[str]:
        """Write the tokenizer of a language model. Returns the file names."""
        return []
