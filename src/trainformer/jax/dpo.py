"""Preference tuning of causal language models on JAX: DPO, IPO, hinge, ORPO and SimPO.

Both answers of a pair go through one forward pass. Reference log probabilities are in `reference`, the losses in
`losses.jax`. The loss is a (sum, weight) over pairs, so that padding and gradient accumulation do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainformer.backends.jax.sharding import make_sharded
from trainformer.backends.jax.step import VALID
from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.core.types import Loss
from trainformer.data.text.collate import pair_batch
from trainformer.data.text.prepare import PairEncoder, Pairs, preference_tokens
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.reference import ReferenceDigest, ScoredPairs, Scorer
from trainformer.jax.text_trainer import TextArguments, TextTrainer, valid_labels
from trainformer.jax.trainer_protocol import TrainerConfigureModelOutput
from trainformer.losses.jax import dpo_loss, orpo_loss, preference_rewards, simpo_loss

_BETAS = {"sigmoid": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}  # as in their papers
_REFERENCE_FREE = ("orpo", "simpo")
_PER_TOKEN = ("ipo", "orpo", "simpo")  # compare mean log probabilities per token, the others sums
_SMOOTHED = ("sigmoid", "simpo")


@dataclass(kw_only=True)
class DPOConfig(TextArguments):
    """Arguments of `DPOTrainer`."""

    learning_rate: float = 1e-6
    max_prompt_length: int | None = None  # tokens; longer prompts lose their beginning
    max_completion_length: int | None = None  # tokens; longer answers lose their end
    disable_dropout: bool = True
    loss_type: str = "sigmoid"  # sigmoid (DPO), ipo, hinge; without a reference orpo, simpo
    beta: float | None = None  # None: 0.1, with simpo 2
    gamma: float = 1.0  # the target margin of SimPO
    label_smoothing: float = 0.0  # assumed share of mislabelled pairs
    reference_free: bool = False  # compare with a uniform reference

    def check(self) -> None:
        super().check()
        for name in ("max_prompt_length", "max_completion_length"):
            self._integer(name, 1, or_none=True)
        if not isinstance(self.disable_dropout, bool):
            raise BadArgument(expected("disable_dropout to be True or False", self.disable_dropout))
        if self.loss_type not in _BETAS:
            do = did_you_mean(str(self.loss_type), _BETAS)
            raise BadArgument(expected(f"loss_type to be one of {', '.join(_BETAS)}", self.loss_type, do))
        self.beta = _BETAS[self.loss_type] if self.beta is None else self.beta
        for name, fits, words in (
            ("beta", lambda v: 0 < v < float("inf"), "a positive number"),
            ("gamma", lambda v: 0 <= v < float("inf"), "0 or a positive number"),
            ("label_smoothing", lambda v: 0 <= v < 0.5, "at least 0 and below 0.5"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
                raise BadArgument(expected(f"{name} to be {words}", value))
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            what = f"label_smoothing=0 with {self.loss_type!r}, which does not support it"
            raise BadArgument(expected(what, self.label_smoothing, "Use 'sigmoid' or 'simpo'."))
        if self.packing:
            raise BadArgument("Expected packing=False, received True. Answers cannot be packed: leave it out.")
        if self.train_on_inputs:
            raise BadArgument("Expected train_on_inputs to be left out, received True. Only answers enter the loss.")
        if self.truncation == "split":
            raise BadArgument(expected("truncation to be 'auto', 'truncate' or 'drop'", "split"))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log probabilities of a reference model."""
        return self.loss_type not in _REFERENCE_FREE and not self.reference_free


@dataclass(kw_only=True)
class ORPOConfig(DPOConfig):
    """Arguments of `ORPOTrainer`: those of DPO, whose loss needs no reference."""

    loss_type: str = "orpo"


class DPOTrainer(TextTrainer):
    """Trains a causal language model to prefer the chosen of two answers.

    Records have a `prompt`, a `chosen` and a `rejected` answer: texts or messages. If both answers are whole
    conversations, their common prefix is the prompt. Prompts do not enter the loss.

    `reference_model` (a folder, a module, or a function that builds one) defaults to the model before training; with
    LoRA, without the adapter. Its log probabilities are computed once, when the trainer is created, cached next to the
    tokens and read with the data, so that only one model is on the devices during training. A resumed run checks that
    it has the same reference.
    """

    arguments_type: ClassVar[type[TextArguments]] = DPOConfig
    masks_padding = True

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
        if reference_model is not None and not arguments.needs_reference:
            what = f"no reference_model with loss_type={arguments.loss_type!r}"
            what += ", reference_free=True" * arguments.reference_free
            raise BadArgument(expected(what, reference_model, "Leave it out."))
        self.reference_model = reference_model
        self._scored: list[ScoredPairs] = []
        self._reference = ReferenceDigest()
        super().__init__(arguments, model, processing_class, callbacks=[*(callbacks or ()), self._reference], **options)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        limits = self.arguments.max_prompt_length, self.arguments.max_completion_length
        encoder = self.encoder(partial(PairEncoder, limits=limits), "completion")
        pairs = preference_tokens(dataset, encoder, **self.token_options(train))  # type: ignore[arg-type]
        if not isinstance(pairs, Pairs):
            do = "Pass a list of the first records, or the files."
            raise DataError(expected("data with a length", "a stream", do))
        self.update_batch_length(pairs)
        if not self.arguments.needs_reference:
            return pairs
        self._scored.append(ScoredPairs(pairs))
        return self._scored[-1]

    def recorded_options(self) -> dict[str, Any]:
        given = self.reference_model
        own = {} if given is None else {"reference_model": str(given) if isinstance(given, Path) else given}
        return {**super().recorded_options(), **own}

    @classmethod
    def options_to_evaluate(cls, record: TrainerRecord, arguments: Any) -> dict[str, Any]:
        """The reference model: the one that training began with."""
        if not arguments.needs_reference or "reference_model" in record.options:
            return {}
        if record.base is None:
            do = "Evaluate in the program that started the run: trainer.eval()."
            raise BadArgument(expected("the folder or name of the reference model", "a model made by the program", do))
        return {"reference_model": record.base}

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Pairs (rows, 2, length), the chosen answer first, with their reference log probabilities."""

        def collate(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = self.check_token_ids(pair_batch(samples, self.batch_length, self.pad_id))
            if "reference" in samples[0]:
                batch["reference"] = np.stack([sample["reference"] for sample in samples])
            return batch

        return collate

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model; before training, also the reference log probabilities of all pairs."""
        output = super().configure_model()
        if self._scored:
            state = output.state if self.reference_model is None else self._load_reference()
            lora = getattr(state.model, "lora", None)
            # An adapter can be disabled for the reference, but layers that it replaced (modules_to_save) are lost.
            if self.reference_model is None and self.lora and self.lora.folder and lora and lora.modules_to_save:
                raise BadArgument(
                    f"Expected a reference_model, since the adapter in {self.lora.folder} replaces whole layers "
                    f"({', '.join(lora.modules_to_save)}). Pass the model without the adapter."
                )
            scorer = Scorer(
                state,
                self.mesh,
                lambda model, batch: self._pair_sums(model, batch)[0],
                self.create_collect_function(),
                rows=self.batch_sizes.evaluation,
                dtype=self.dtype,
            )
            self._reference.digest = scorer.digest
            for data in self._scored:
                scorer(data)
        return output

    def _load_reference(self) -> Any:
        given = self.reference_model
        if given is self.model and isinstance(given, nnx.Module):
            do = "Leave reference_model out."
            raise BadArgument(expected("a reference_model other than the trained model", "the same object", do))
        model, key = BaseTrainer.load_model(self, given), jax.random.key(self.arguments.seed)
        return make_sharded(model, self.prepare_model, optax.identity(), key, self.mesh)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        key = None if self.arguments.disable_dropout else key
        return self._preference_loss(model, batch, key, self.arguments.label_smoothing)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """Loss and rewards without dropout and label smoothing."""
        return self._preference_loss(model, batch, None, 0.0)

    def _preference_loss(self, model: Any, batch: Mapping[str, Any], key: Any, label_smoothing: float) -> Loss:
        arguments = self.arguments
        kind, beta = arguments.loss_type, arguments.beta
        own, tokens = self._pair_sums(model, batch, key)
        known = batch.get("reference", jnp.zeros_like(own))
        if kind in _PER_TOKEN:
            own, known = own / jnp.maximum(tokens, 1), known / jnp.maximum(tokens, 1)
        policy, reference = (own[:, 0], own[:, 1]), (known[:, 0], known[:, 1])
        if kind == "orpo":
            losses = orpo_loss(policy, beta)
        elif kind == "simpo":
            losses = simpo_loss(policy, beta, arguments.gamma, label_smoothing=label_smoothing)
        else:
            losses = dpo_loss(policy, reference, beta, variant=kind, label_smoothing=label_smoothing)
        rewards = preference_rewards(policy, reference, beta)
        values = {
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
            "rewards/margin": rewards.margin,
            "rewards/accuracy": rewards.correct,
        }
        valid = batch[VALID].astype(jnp.float32) if VALID in batch else jnp.ones_like(losses)
        weight = jnp.sum(valid)
        metrics = {name: (jnp.sum(each * valid), weight) for name, each in values.items()}
        return Loss(jnp.sum(losses * valid), weight, metrics, (losses * valid, valid))

    def _pair_sums(self, model: Any, batch: Mapping[str, Any], key: Any = None) -> tuple[jax.Array, jax.Array]:
        """Log probabilities and token counts of the answers, both (pairs, 2), from one forward pass."""
        pairs = {"input_ids": batch["input_ids"], "labels": valid_labels(batch)}
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in pairs.items()}
        sums = self.token_sums(model, flat, key)
        return -sums.loss.reshape(-1, 2), sums.tokens.reshape(-1, 2)


class ORPOTrainer(DPOTrainer):
    """A `DPOTrainer` with the loss of ORPO."""

    arguments_type: ClassVar[type[TextArguments]] = ORPOConfig
