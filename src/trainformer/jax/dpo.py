"""Preference tuning of causal language models on JAX: DPO, IPO, hinge, ORPO and SimPO.

Owns the trainer and its arguments: pairs of answers as tokens, both in one forward pass. What the reference model makes
of the answers is in `reference`, the losses are in `losses.jax`. The loss is a sum over pairs, so that padding and
accumulation do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import VALID
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import Loss
from trainformer.data.text.collate import pair_batch
from trainformer.data.text.prepare import PairEncoder, preference_tokens
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.outputs import TrainerConfigureModelOutput
from trainformer.jax.reference import KnownReference, ScoredPairs, Scorer, without_training
from trainformer.jax.text_trainer import TextArguments, TextTrainer, labels_of
from trainformer.losses.jax.preference import dpo_loss, orpo_loss, preference_rewards, simpo_loss

_BETAS = {"sigmoid": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}  # as in their papers
_ALONE = ("orpo", "simpo")  # these have no reference
_PER_TOKEN = ("ipo", "orpo", "simpo")  # these compare means over the tokens of an answer, the others sums
_SMOOTHED = ("sigmoid", "simpo")


@dataclass(kw_only=True)
class DPOConfig(TextArguments):
    """Arguments of `DPOTrainer`."""

    loss_type: str = "sigmoid"  # sigmoid (DPO), ipo, hinge; without a reference orpo, simpo
    beta: float | None = None  # None: 0.1, with simpo 2
    gamma: float = 1.0  # the margin that SimPO aims at
    label_smoothing: float = 0.0  # the share of pairs believed to be labelled the wrong way round
    reference_free: bool = False  # compare with a reference to which all answers are equally likely

    def check(self) -> None:
        """Refuse what cannot work."""
        super().check()
        if self.loss_type not in _BETAS:
            do = did_you_mean(str(self.loss_type), _BETAS)
            raise BadArgument(expected(f"loss_type to be one of {', '.join(_BETAS)}", self.loss_type, do))
        self.beta = _BETAS[self.loss_type] if self.beta is None else self.beta
        for name, fits, words in (
            ("beta", lambda v: 0 < v < float("inf"), "a positive number"),
            ("gamma", lambda v: 0 <= v < float("inf"), "0 or a positive number"),
            ("label_smoothing", lambda v: 0 <= v < 0.5, "from 0 to less than 0.5"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
                raise BadArgument(expected(f"{name} to be {words}", value))
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            what = f"label_smoothing=0 with {self.loss_type!r}, which has no label smoothing"
            raise BadArgument(expected(what, self.label_smoothing, "Use 'sigmoid' or 'simpo'."))
        if self.packing:
            raise BadArgument("Expected packing=False, received True. Answers are compared one by one: leave it out.")
        if self.train_on_inputs:
            raise BadArgument("Expected train_on_inputs to be left out, received True. Only answers are compared.")
        if self.truncation == "split":
            raise BadArgument(expected("truncation to be 'auto', 'truncate' or 'drop'", "split"))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with what a reference model says."""
        return self.loss_type not in _ALONE and not self.reference_free


class DPOTrainer(TextTrainer):
    """Trains a causal language model to prefer the chosen of two answers.

    Records have a `prompt`, a `chosen` and a `rejected` answer: texts, or messages; where both answers are whole
    conversations, their common beginning is the prompt. Prompts are not learned.

    `reference_model` (a folder, a module, a function that builds one) is what the model is compared with, by default
    the model as it is before training; with LoRA, without the adapter. What it says of the answers never changes. It is
    computed once, when the trainer is made, kept beside the tokens, and read with the data: in training there is one
    model on the devices. A run that goes on from a checkpoint checks that it has the same reference as before.
    """

    arguments_type: ClassVar[type[TextArguments]] = DPOConfig
    leaves_out_padding = True

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
        arguments = DPOConfig.of(arguments)
        if reference_model is not None and not arguments.needs_reference:
            what = f"no reference_model with loss_type={arguments.loss_type!r}"
            what += ", reference_free=True" * arguments.reference_free
            raise BadArgument(expected(what, reference_model, "Leave it out."))
        self.reference_model = reference_model
        self._scored: list[ScoredPairs] = []
        self._reference = KnownReference()
        super().__init__(arguments, model, processing_class, callbacks=[*(callbacks or ()), self._reference], **options)

    # -- data --------------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Both answers of every record, tokenised once."""
        encoder = self.encoder(PairEncoder, "completion")
        pairs = preference_tokens(dataset, encoder, **self.token_options(train))  # type: ignore[arg-type]
        self.make_room(pairs)
        if not self.arguments.needs_reference:
            return pairs
        self._scored.append(ScoredPairs(pairs))
        return self._scored[-1]

    def create_collect_function(self) -> Callable[[list[Any]], Any]:
        """Pairs (rows, 2, length), the chosen answer first, and what the reference says of them."""

        def collect(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = self.within_words(pair_batch(samples, self.batch_length, self.pad_id))
            if "reference" in samples[0]:
                batch["reference"] = np.stack([sample["reference"] for sample in samples])
            return batch

        return collect

    # -- the reference -----------------------------------------------------------------------------------------

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model; and, before it is trained, what the reference says of all answers."""
        output = super().configure_model()
        if self._scored:
            state = output.state if self.reference_model is None else self._load_reference()
            self._check_base(state)
            collect, rows = self.create_collect_function(), self.batch_sizes.evaluation
            scorer = Scorer(state, self.mesh, self._log_probs, collect, rows=rows, dtype=self.dtype)
            self._reference.known_by = scorer.digest
            for data in self._scored:
                scorer(data)
        return output

    def _load_reference(self) -> Any:
        given = self.reference_model
        if given is self.model and isinstance(given, nnx.Module):
            do = "Leave reference_model out."
            raise BadArgument(expected("a reference other than the model that is trained", "the same object", do))
        return without_training(BaseTrainer.load_model(self, given), self.prepare_model, self.mesh, self.arguments.seed)

    def _check_base(self, state: Any) -> None:
        """An adapter can be switched off; layers that it replaced as a whole are gone."""
        lora = getattr(state.model, "lora", None)
        if self.reference_model is None and self.lora and self.lora.folder and lora and lora.modules_to_save:
            raise BadArgument(
                f"Expected a reference_model, since the adapter in {self.lora.folder} has layers of its own "
                f"({', '.join(lora.modules_to_save)}). Pass the model without the adapter."
            )

    def _log_probs(self, model: Any, batch: Mapping[str, Any]) -> jax.Array:
        """Log probabilities (pairs, 2) of the answers, summed over their tokens."""
        return self._pair_sums(model, batch)[0]

    # -- steps -------------------------------------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """The loss of the pairs, summed, and what the answers are worth to the model."""
        return self._judge(model, batch, key, self.arguments.label_smoothing)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """The same without dropout and smoothing."""
        return self._judge(model, batch, None, 0.0)

    def _judge(self, model: Any, batch: Mapping[str, Any], key: Any, label_smoothing: float) -> Loss:
        arguments = self.arguments
        kind, beta = arguments.loss_type, arguments.beta
        values, tokens = self._pair_sums(model, batch, key)
        known = batch.get("reference", jnp.zeros_like(values))
        if kind in _PER_TOKEN:
            values, known = values / jnp.maximum(tokens, 1), known / jnp.maximum(tokens, 1)
        policy, reference = (values[:, 0], values[:, 1]), (known[:, 0], known[:, 1])
        if kind == "orpo":
            losses = orpo_loss(policy, beta)
        elif kind == "simpo":
            losses = simpo_loss(policy, beta, arguments.gamma, label_smoothing=label_smoothing)
        else:
            losses = dpo_loss(policy, reference, beta, variant=kind, label_smoothing=label_smoothing)
        rewards = preference_rewards(policy, reference, beta)
        found = {
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
            "rewards/margin": rewards.margin,
            "rewards/accuracy": rewards.correct,
        }
        counted = batch[VALID].astype(jnp.float32) if VALID in batch else jnp.ones_like(losses)
        weight = jnp.sum(counted)
        metrics = {name: (jnp.sum(each * counted), weight) for name, each in found.items()}
        return Loss(jnp.sum(losses * counted), weight, metrics)

    def _pair_sums(self, model: Any, batch: Mapping[str, Any], key: Any = None) -> tuple[jax.Array, jax.Array]:
        """Log probabilities and tokens of the answers, both (pairs, 2), in one forward pass."""
        pairs = {"input_ids": batch["input_ids"], "labels": labels_of(batch)}
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in pairs.items()}
        sums = self.token_sums(model, flat, key)
        return -sums.loss.reshape(-1, 2), sums.tokens.reshape(-1, 2)
