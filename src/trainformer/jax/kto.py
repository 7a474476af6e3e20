"""Kahneman-Tversky optimisation on JAX: tuning on single answers that are desirable or not.

The loss compares each answer with an estimate of the KL divergence from the reference: the mean log ratio of prompts
with the answers of other records. Which answer belongs to which prompt depends on the data alone, and the mean is taken
over all micro-batches and devices of a step (`step_totals`), before its update; so it is the same however a step is
divided, and nothing has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import TOTALS, VALID, EvalOutput
from trainformer.core.errors import check_choice
from trainformer.core.types import Loss
from trainformer.data.text.collate import token_batch
from trainformer.data.text.preferences import Unpaired, UnpairedEncoder, check_balance, unpaired_tokens
from trainformer.jax.preference import AnswerArguments, ReferenceTrainer
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import valid_rows
from trainformer.losses.jax.preference import KTO_VARIANTS, kto_loss

_INPUTS = ("input_ids", "labels")


@dataclass(kw_only=True)
class KTOConfig(AnswerArguments):
    """Arguments of `KTOTrainer`."""

    learning_rate: float = 1e-6
    loss_type: str = "kto"  # or apo_zero_unpaired, which needs no estimate of the KL divergence
    beta: float = 0.1
    desirable_weight: float = 1.0  # of the desirable answers, to balance unequal numbers of both
    undesirable_weight: float = 1.0

    def check(self) -> None:
        super().check()
        check_choice("loss_type", self.loss_type, KTO_VARIANTS)
        self._positive("beta")
        self._weight("desirable_weight", "undesirable_weight")

    @property
    def needs_reference(self) -> bool:
        """Always: both losses compare with the reference."""
        return True

    @property
    def needs_divergence(self) -> bool:
        """Whether the loss depends on the KL divergence, an estimate over the whole step."""
        return self.loss_type == "kto"


class KTOTrainer(ReferenceTrainer):
    """Trains a causal language model on answers of which each is desirable or not.

    Records have a `prompt`, a `completion` (texts or messages) and a `label`: true if the completion is desirable. They
    may have `messages` and a `label` instead, whose last answer is judged. Records of `DPOTrainer` count as two: the
    chosen answer is desirable, the rejected one is not. Prompts do not enter the loss.

    `reference_model` is that of `DPOTrainer`.
    """

    arguments_type: ClassVar[type[TextArguments]] = KTOConfig
    has_router_loss = True

    @property
    def score_name(self) -> str:  # type: ignore[override]
        """The cached scores have a second column, of mismatched answers, if the loss needs the KL divergence."""
        return "reference-kl" if self.arguments.needs_divergence else "reference"

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        encoder: Any = self.encoder(UnpairedEncoder, "completion")
        options = self.token_options(train)
        tokens = unpaired_tokens(dataset, encoder, kl=self.arguments.needs_divergence, **options)
        scored = self.with_reference(tokens, Unpaired)
        if train:
            weights = self.arguments.desirable_weight, self.arguments.undesirable_weight
            check_balance(tokens.label_counts(), weights)  # type: ignore[union-attr]
        return scored

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Answers with their labels and reference log probabilities, and the mismatched ones beside them."""

        def rows(samples: list[Any]) -> dict[str, np.ndarray]:
            return self.check_token_ids(token_batch(samples, self.batch_length, self.pad_id))

        def collate(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = rows(samples)
            batch["desirable"] = np.array([bool(sample["label"]) for sample in samples])
            if "kl_input_ids" in samples[0]:
                others = rows([{name: sample[f"kl_{name}"] for name in _INPUTS} for sample in samples])
                batch |= {f"kl_{name}": others[name] for name in _INPUTS}
            if "reference" in samples[0]:
                batch["reference"] = np.stack([sample["reference"] for sample in samples])
            return batch

        return collate

    def update_batch_length(self, tokens: Any) -> Any:
        """A mismatched answer may be longer than all records: rows have room for the longest possible one."""
        if getattr(tokens, "kl_length", None) is not None:
            self.cover_length(max(len(tokens[i]["kl_input_ids"]) for i in range(len(tokens))))
        return super().update_batch_length(tokens)

    def answer_log_probs(self, model: Any, batch: Mapping[str, Any]) -> jax.Array:
        columns = [self._log_probs(model, batch)]
        if self.arguments.needs_divergence:
            columns.append(self._mismatched(model, batch))
        return jnp.stack(columns, axis=1)

    def _log_probs(self, model: Any, batch: Mapping[str, Any], key: Any = None, **options: Any) -> jax.Array:
        return -self.token_sums(model, {n: batch[n] for n in (*_INPUTS, VALID) if n in batch}, key, **options).loss

    def loss_weight(self, batch: Mapping[str, Any]) -> jax.Array:
        return jnp.sum(valid_rows(batch))

    def _mismatched(self, model: Any, batch: Mapping[str, Any]) -> jax.Array:
        others = {name: batch[f"kl_{name}"] for name in _INPUTS}
        return self._log_probs(model, others | {name: batch[name] for name in (VALID,) if name in batch})

    def step_totals(self, model: nnx.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The log ratios of the mismatched answers, summed, and their number."""
        totals = super().step_totals(model, batch)
        if not self.arguments.needs_divergence:
            return totals
        valid = valid_rows(batch)
        ratios = self._mismatched(model, batch) - batch["reference"][:, 1]
        return {**totals, "ratios": jnp.sum(ratios * valid), "rows": jnp.sum(valid)}

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        kl: Any = 0.0
        if self.arguments.needs_divergence:
            totals = batch[TOTALS]
            kl = jnp.maximum(totals["ratios"] / jnp.maximum(totals["rows"], 1), 0.0)
        valid, desirable = valid_rows(batch), batch["desirable"]
        probe = self.router_probe(batch)
        policy = self._log_probs(model, batch, None if self.arguments.disable_dropout else key, probe=probe)
        reference = batch["reference"][:, 0]
        losses = self._losses(policy, reference, desirable, kl) * valid
        rewards = self.arguments.beta * (jax.lax.stop_gradient(policy) - reference)
        metrics = {}
        for name, kind in (("rewards/chosen", desirable * valid), ("rewards/rejected", ~desirable * valid)):
            metrics[name] = jnp.sum(rewards * kind), jnp.sum(kind)
        weight = jnp.sum(valid)
        if self.arguments.needs_divergence:
            metrics["kl"] = kl * weight, weight
        return self.with_router_loss(Loss(jnp.sum(losses), weight, metrics, (losses, valid)), probe, batch)

    def _losses(self, policy: Any, reference: Any, desirable: Any, kl: Any) -> jax.Array:
        return kto_loss(
            policy,
            reference,
            desirable,
            kl,
            self.arguments.beta,
            desirable_weight=self.arguments.desirable_weight,
            undesirable_weight=self.arguments.undesirable_weight,
            variant=self.arguments.loss_type,
        )

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> EvalOutput:
        """What `summarize_rows` computes the loss from, per answer."""
        rows = {"log_prob": self._log_probs(model, batch), "desirable": batch["desirable"]}
        rows["reference"] = batch["reference"][:, 0]
        if self.arguments.needs_divergence:
            rows["kl_log_ratio"] = self._mismatched(model, batch) - batch["reference"][:, 1]
        return EvalOutput(Loss(0.0, 0.0), rows)

    def summarize_rows(self, rows: dict[str, Any]) -> dict[str, float]:
        """Loss and rewards, with the KL divergence estimated over the whole dataset."""
        desirable, metrics, kl = rows["desirable"].astype(bool), {}, 0.0
        if "kl_log_ratio" in rows:
            kl = metrics["kl"] = max(0.0, float(rows["kl_log_ratio"].astype(np.float64).mean()))
        losses = np.asarray(self._losses(rows["log_prob"], rows["reference"], desirable, kl), np.float64)
        metrics["loss"] = float(losses.mean())
        rewards = self.arguments.beta * (rows["log_prob"].astype(np.float64) - rows["reference"])
        for name, chosen in (("rewards/chosen", desirable), ("rewards/rejected", ~desirable)):
            if chosen.any():
                metrics[name] = float(rewards[chosen].mean())
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics
