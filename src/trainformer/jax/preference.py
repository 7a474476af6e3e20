"""What the trainers on judged answers (DPO, KTO, reward models) share: arguments, and the reference model.

Reference log probabilities are computed once; see `reference`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.reference import ReferenceDigest, ScoredAnswers, Scorer, load_reference, refuse_replaced_layers
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import TextTrainer
from trainformer.jax.trainer_protocol import TrainerConfigureModelOutput


@dataclass(kw_only=True)
class AnswerArguments(TextArguments):
    """`TextArguments` of trainers on judged answers, which are neither packed nor split."""

    disable_dropout: bool = True

    def check(self) -> None:
        super().check()
        if self.packing:
            raise BadArgument("Expected packing=False, received True. Answers cannot be packed: leave it out.")
        if self.train_on_inputs:
            raise BadArgument("Expected train_on_inputs to be left out, received True. Only answers enter the loss.")
        if self.truncation == "split":
            raise BadArgument(expected("truncation to be 'auto', 'truncate' or 'drop'", "split"))


class ReferenceTrainer(TextTrainer):
    """Base class of trainers whose loss compares log probabilities with those of a reference model.

    `reference_model` (a folder, a module, or a function that builds one) defaults to the model before training; with
    LoRA, without the adapter. Its log probabilities are computed once, when the trainer is created, cached next to the
    tokens and read with the data (as the column `reference`), so that only one model is on the devices during training.
    A resumed run checks that it has the same reference.
    """

    masks_padding = True
    score_name = "reference"  # of the cached scores, which differ between losses

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        reference_model: Any = None,
        callbacks: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        arguments = self.arguments_type.from_arguments(arguments)
        if reference_model is not None and not arguments.needs_reference:  # type: ignore[attr-defined]
            what = f"no reference_model with loss_type={arguments.loss_type!r}"  # type: ignore[attr-defined]
            what += ", reference_free=True" * getattr(arguments, "reference_free", False)
            raise BadArgument(expected(what, reference_model, "Leave it out."))
        self.reference_model = reference_model
        self._scored: list[ScoredAnswers] = []
        self._reference = ReferenceDigest()
        super().__init__(arguments, model, processing_class, callbacks=[*(callbacks or ()), self._reference], **options)

    @abstractmethod
    def answer_log_probs(self, model: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Log probabilities of the answers of a batch (rows, columns), as the reference computes them, too."""

    def with_reference(self, data: Any, kind: type) -> Any:
        """The tokenised data, to be scored once there is a model, if the loss needs that."""
        if not isinstance(data, kind):
            do = "Pass a list of the first records, or the files."
            raise DataError(expected("data with a length", "a stream", do))
        self.update_batch_length(data)
        if not self.arguments.needs_reference:
            return data
        self._scored.append(ScoredAnswers(data))
        return self._scored[-1]

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model; before training, also the reference log probabilities of all answers."""
        output = super().configure_model()
        if self._scored:
            state = output.state if self.reference_model is None else load_reference(self, self.reference_model)
            if self.reference_model is None:
                refuse_replaced_layers(self, state)
            scorer = Scorer(
                state,
                self.mesh,
                self.answer_log_probs,
                self.create_collect_function(),
                rows=self.batch_sizes.evaluation,
                dtype=self.dtype,
                name=self.score_name,
            )
            self._reference.digest = scorer.digest
            for data in self._scored:
                scorer(data)
        return output

    # -- to be built again from a checkpoint ---------------------------------------------------------------------

    def recorded_options(self) -> dict[str, Any]:
        return {**super().recorded_options(), **recorded_model("reference_model", self.reference_model)}

    @classmethod
    def options_to_evaluate(cls, record: TrainerRecord, arguments: Any) -> dict[str, Any]:
        """The reference model: the one that training began with."""
        if not arguments.needs_reference or "reference_model" in record.options:
            return {}
        return model_before_training("reference_model", record)


def recorded_model(name: str, model: Any) -> dict[str, Any]:
    """What a checkpoint records of a frozen model that was passed as the argument `name`."""
    return {} if model is None else {name: str(model) if isinstance(model, Path) else model}


def model_before_training(name: str, record: TrainerRecord) -> dict[str, Any]:
    """The argument `name` that stands for the model that training began with, when a checkpoint is evaluated."""
    if record.lora is not None and not record.lora["modules_to_save"]:
        return {}  # the model without its adapter
    if record.base is None:
        do = "Evaluate in the program that started the run: trainer.eval()."
        raise BadArgument(
            expected("the folder or name of the model that training began with", "one made by the program", do)
        )
    return {name: record.base}
