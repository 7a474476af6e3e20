"""Preference tuning of causal language models on JAX: DPO and its variants, ORPO and SimPO.

Both answers of a pair go through one forward pass. The reference is in `preference`, the losses are in
`losses.jax.preference`. The loss is a (sum, weight) over pairs, so that padding and gradient accumulation do not change
it; a supervised loss beside it is a mean over the tokens of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import TOTALS
from trainformer.core.errors import BadArgument, check_choice, did_you_mean, expected
from trainformer.core.types import Loss
from trainformer.data.text.collate import pair_batch
from trainformer.data.text.prepare import PairEncoder, Pairs, preference_tokens
from trainformer.jax.preference import AnswerArguments, ReferenceTrainer
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import valid_labels, valid_rows
from trainformer.losses.jax.preference import (
    DIVERGENCES,
    OF_MARGIN,
    VARIANTS,
    dpo_loss,
    orpo_loss,
    preference_rewards,
    simpo_loss,
)
from trainformer.losses.jax.tokens import IGNORE_INDEX
from trainformer.models.jax.block import RouterProbe

_BETAS = {**dict.fromkeys((*VARIANTS, "sigmoid_norm", "orpo"), 0.1), "simpo": 2.0}  # as in their papers
_REFERENCE_FREE = ("orpo", "simpo")
_PER_TOKEN = ("ipo", "sigmoid_norm", "orpo", "simpo")  # compare mean log probabilities per token, the others sums
_SMOOTHED = ("sigmoid", "sigmoid_norm", "simpo", "robust", "exo_pair")
_PART_OF_LOSS = ("robust", "exo_pair")  # their label smoothing is no regularisation: evaluation uses it too
_SFT = "sft"


@dataclass(kw_only=True)
class DPOConfig(AnswerArguments):
    """Arguments of `DPOTrainer`.

    `loss_type` is a loss or a list of them, whose sum (with `loss_weights`) is trained on; `"sft"` in a list is the
    supervised loss of the chosen answers.
    """

    learning_rate: float = 1e-6
    max_prompt_length: int | None = None  # tokens; longer prompts lose their beginning
    max_completion_length: int | None = None  # tokens; longer answers lose their end
    loss_type: str | list[str] = "sigmoid"  # without a reference "orpo" or "simpo"
    loss_weights: list[float] | None = None  # of several losses; None: 1 each
    beta: float | None = None  # None: 0.1, with simpo 2
    gamma: float = 1.0  # the target margin of SimPO
    label_smoothing: float = 0.0  # assumed share of mislabelled pairs
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"  # from the reference; also forward_kl, js_divergence, alpha_divergence
    f_alpha_divergence_coef: float = 0.5  # the order of the alpha divergence
    reference_free: bool = False  # compare with a uniform reference

    def check(self) -> None:
        super().check()
        for name in ("max_prompt_length", "max_completion_length"):
            self._integer(name, 1, or_none=True)
        self._check_losses()
        self.beta = _BETAS[self.losses[0]] if self.beta is None else self.beta
        self._positive("beta", "discopop_tau")
        self._weight("gamma")
        self._number("label_smoothing", lambda v: 0 <= v < 0.5, "at least 0 and below 0.5")
        self._number("f_alpha_divergence_coef", lambda v: True, "a number")
        check_choice("f_divergence_type", self.f_divergence_type, DIVERGENCES)
        for loss in self.losses:
            self._check_options(loss)

    def _check_losses(self) -> None:
        names = self._loss_names()
        known = [*_BETAS, _SFT] if isinstance(self.loss_type, Sequence) and len(names) > 1 else list(_BETAS)
        for name in names:
            if name not in known:
                do = did_you_mean(str(name), known)
                raise BadArgument(expected(f"loss_type to be one of {', '.join(known)}", name, do))
        weights = [1.0] * len(names) if self.loss_weights is None else self.loss_weights
        if not names or len(set(names)) < len(names) or len(weights) != len(names):
            what = "loss_weights to have one number for each loss_type, which are named once"
            raise BadArgument(expected(what, f"loss_type={self.loss_type}, loss_weights={self.loss_weights}"))
        if not all(isinstance(w, (int, float)) and not isinstance(w, bool) and 0 <= w < math.inf for w in weights):
            raise BadArgument(expected("loss_weights to be 0 or positive numbers", self.loss_weights))
        if len(self.losses) > 1 and (free := [name for name in self.losses if name in _REFERENCE_FREE]):
            raise BadArgument(expected(f"{free[0]!r} to be the only preference loss", names))
        if not self.losses:
            raise BadArgument(expected("a preference loss beside 'sft'", names, "To imitate answers, use SFTTrainer."))

    def _check_options(self, loss: str) -> None:
        """Refuse options that a loss does not use."""
        if self.label_smoothing and loss not in _SMOOTHED:
            what = f"label_smoothing=0 with {loss!r}, which does not support it"
            raise BadArgument(expected(what, self.label_smoothing, "Use 'sigmoid' or 'simpo'."))
        if loss == "exo_pair" and not self.label_smoothing:
            raise BadArgument(expected("label_smoothing above 0 with 'exo_pair'", 0.0, "1e-3 is usual."))
        if self.f_divergence_type != "reverse_kl" and (loss not in OF_MARGIN or loss == "ipo"):
            do = "Use 'sigmoid', 'hinge', 'robust', 'exo_pair' or 'discopop'."
            raise BadArgument(expected(f"f_divergence_type='reverse_kl' with {loss!r}", self.f_divergence_type, do))

    def _loss_names(self) -> list[Any]:
        return [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)

    @property
    def losses(self) -> list[str]:
        """The names of the preference losses."""
        return [name for name in self._loss_names() if name != _SFT]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each loss, also of the supervised one."""
        names = self._loss_names()
        return dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log probabilities of a reference model."""
        return self.losses[0] not in _REFERENCE_FREE and not self.reference_free


@dataclass(kw_only=True)
class ORPOConfig(DPOConfig):
    """Arguments of `ORPOTrainer`: those of DPO, whose loss needs no reference."""

    loss_type: str | list[str] = "orpo"


class DPOTrainer(ReferenceTrainer):
    """Trains a causal language model to prefer the chosen of two answers.

    Records have a `prompt`, a `chosen` and a `rejected` answer: texts or messages. If both answers are whole
    conversations, their common prefix is the prompt. Prompts do not enter the loss.

    `reference_model` (a folder, a module, or a function that builds one) defaults to the model before training; with
    LoRA, without the adapter. Its log probabilities are computed once, when the trainer is created, cached next to the
    tokens and read with the data, so that only one model is on the devices during training. A resumed run checks that
    it has the same reference.
    """

    arguments_type: ClassVar[type[TextArguments]] = DPOConfig
    has_router_loss = True

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        limits = self.arguments.max_prompt_length, self.arguments.max_completion_length
        encoder = self.encoder(partial(PairEncoder, limits=limits), "completion")
        pairs = preference_tokens(dataset, encoder, **self.token_options(train))  # type: ignore[arg-type]
        return self.with_reference(pairs, Pairs)

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Pairs (rows, 2, length), the chosen answer first, with their reference log probabilities."""

        def collate(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = self.check_token_ids(pair_batch(samples, self.batch_length, self.pad_id))
            if "reference" in samples[0]:
                batch["reference"] = np.stack([sample["reference"] for sample in samples])
            return batch

        return collate

    def answer_log_probs(self, model: Any, batch: Mapping[str, Any]) -> jax.Array:
        return self._pair_sums(model, batch)[0]

    def step_totals(self, model: nnx.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Numbers of pairs, and of tokens of their chosen answers, for the mean of the supervised loss."""
        totals = super().step_totals(model, batch)
        if _SFT not in self.arguments.weights:
            return totals
        supervised = valid_labels(batch)[:, 0, 1:] != IGNORE_INDEX
        return {**totals, "pairs": jnp.sum(valid_rows(batch)), "tokens": jnp.sum(supervised)}

    def loss_weight(self, batch: Mapping[str, Any]) -> jax.Array:
        return jnp.sum(valid_rows(batch))

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        key = None if self.arguments.disable_dropout else key
        return self._preference_loss(model, batch, key, train=True)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """Loss and rewards without dropout and label smoothing."""
        return self._preference_loss(model, batch, None, train=False)

    def _preference_loss(self, model: Any, batch: Mapping[str, Any], key: Any, train: bool) -> Any:
        weights, valid = self.arguments.weights, valid_rows(batch)
        probe = self.router_probe(batch, train)
        sums, tokens = self._pair_sums(model, batch, key, probe)
        known = batch.get("reference", jnp.zeros_like(sums))
        means = [value / jnp.maximum(tokens, 1) for value in (sums, known)]
        losses = jnp.zeros_like(valid)
        for loss in self.arguments.losses:
            own, other = means if loss in _PER_TOKEN else (sums, known)
            losses = losses + weights[loss] * self._losses(loss, own, other, train)
        own, other = means if self.arguments.losses[0] in _PER_TOKEN else (sums, known)
        rewards = preference_rewards((own[:, 0], own[:, 1]), (other[:, 0], other[:, 1]), self.arguments.beta)
        values = {
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
            "rewards/margin": rewards.margin,
            "rewards/accuracy": rewards.correct,
        }
        weight = jnp.sum(valid)
        metrics = {name: (jnp.sum(each * valid), weight) for name, each in values.items()}
        if _SFT in weights:
            nll = -sums[:, 0]
            metrics["nll_loss"] = jnp.sum(nll * valid), jnp.sum(tokens[:, 0])
            if train:  # the step divides by the number of pairs; this term is to be divided by that of tokens
                totals = batch[TOTALS]
                losses = losses + weights[_SFT] * nll * (totals["pairs"] / jnp.maximum(totals["tokens"], 1))
            else:
                metrics["preference_loss"] = jnp.sum(losses * valid), weight
        loss = Loss(jnp.sum(losses * valid), weight, metrics, (losses * valid, valid))
        return (self.with_router_loss if train else self.with_router_rows)(loss, probe, batch)

    def _losses(self, loss: str, own: jax.Array, other: jax.Array, train: bool) -> jax.Array:
        """One preference loss of each pair."""
        arguments = self.arguments
        policy, reference = (own[:, 0], own[:, 1]), (other[:, 0], other[:, 1])
        smoothing = arguments.label_smoothing if train or loss in _PART_OF_LOSS else 0.0
        if loss == "orpo":
            return orpo_loss(policy, arguments.beta)
        if loss == "simpo":
            return simpo_loss(policy, arguments.beta, arguments.gamma, label_smoothing=smoothing)
        return dpo_loss(
            policy,
            reference,
            arguments.beta,
            variant="sigmoid" if loss == "sigmoid_norm" else loss,
            label_smoothing=smoothing,
            discopop_tau=arguments.discopop_tau,
            f_divergence=arguments.f_divergence_type,
            f_alpha=arguments.f_alpha_divergence_coef,
        )

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """With a supervised loss, the whole loss from the means over pairs and over tokens."""
        if "preference_loss" not in metrics:
            return {}
        return {"loss": metrics["preference_loss"] + self.arguments.weights[_SFT] * metrics["nll_loss"]}

    def _pair_sums(
        self, model: Any, batch: Mapping[str, Any], key: Any = None, probe: RouterProbe | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Log probabilities and token counts of the answers, both (pairs, 2), from one forward pass."""
        pairs = {"input_ids": batch["input_ids"], "labels": valid_labels(batch)}
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in pairs.items()}
        sums = self.token_sums(model, flat, key, probe=probe)
        return -sums.loss.reshape(-1, 2), sums.tokens.reshape(-1, 2)


class ORPOTrainer(DPOTrainer):
    """A `DPOTrainer` with the loss of ORPO."""

    arguments_type: ClassVar[type[TextArguments]] = ORPOConfig
