"""`GRPOConfig`: the arguments of `GRPOTrainer`, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainformer.backends.jax.optimizers import make_optimizer
from trainformer.core.errors import BadArgument, check_choice, check_count, expected
from trainformer.jax.text_arguments import TextArguments
from trainformer.losses.jax.policy import POLICY_VARIANTS
from trainformer.models.generation import SamplingOptions

_SCALES = {"dr_grpo": "none", "rloo": "none"}  # of the variants; otherwise "group"


@dataclass(kw_only=True)
class GRPOConfig(TextArguments):
    """Arguments of `GRPOTrainer`. `total_batch_size` counts prompts, each with `num_generations` completions.

    >>> GRPOConfig(num_generations=4, loss_type="dr_grpo").scale_rewards
    'none'
    """

    learning_rate: float = 1e-6
    num_generations: int = 8
    max_prompt_length: int | None = None  # tokens; longer prompts are left out
    max_completion_length: int = 256
    temperature: float = 1.0  # of sampling, and of the distribution in the loss
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_tokens: Sequence[str | int] = ()  # that end a completion, besides those of model, tokenizer and template
    generation_batch_size: int | None = None  # completions sampled at once; None: all of a step
    max_turns: int | None = None  # with tools or an environment
    loss_type: str = "dapo"  # dapo, grpo, dr_grpo, rloo, bnpo, cispo, sapo, luspo
    importance_sampling_level: str = "token"  # sequence: GSPO
    beta: float = 0.0  # weight of the KL divergence from the reference
    unbiased_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    num_iterations: int = 1
    mini_batches: int = 1
    reward_weights: Sequence[float] | None = None
    scale_rewards: str | None = None  # group, batch or none; None: what suits the loss
    mask_truncated_completions: bool = False
    skip_zero_variance: bool = False
    top_entropy_quantile: float = 1.0
    eval_generations: int = 1
    eval_temperature: float = 0.0
    log_samples: int = 4

    def check(self) -> None:
        super().check()
        for name in ("max_prompt_length", "generation_batch_size", "max_turns"):
            self._integer(name, 1, or_none=True)
        for name in ("max_completion_length", "num_iterations", "mini_batches", "eval_generations"):
            check_count(name, getattr(self, name))
        check_count("num_generations", self.num_generations, least=2, do="Completions of a prompt are compared.")
        check_count("log_samples", self.log_samples, least=0)
        check_choice("loss_type", self.loss_type, POLICY_VARIANTS)
        check_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        if self.scale_rewards is None:
            self.scale_rewards = _SCALES.get(self.loss_type, "group")
        check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        self.sampling(self.eval_temperature)
        if self.sampling(self.temperature).temperature == 0:
            do = "Equal completions of a prompt teach nothing; 1.0 is usual. eval_temperature=0 evaluates greedily."
            raise BadArgument(expected("temperature to be positive for training", self.temperature, do))
        self._check_loss()
        if self.router_aux_loss_coef or self.router_z_loss_coef:
            received = f"{self.router_aux_loss_coef} and {self.router_z_loss_coef}"
            do = "Completions are trained without the router losses of a mixture of experts."
            raise BadArgument(expected("no router_aux_loss_coef and router_z_loss_coef", received, do))
        for name, default in (("packing", False), ("train_on_inputs", None)):
            if getattr(self, name) not in (default, False):
                raise BadArgument(expected(f"no {name}", getattr(self, name), "Only sampled completions are trained."))

    def _check_loss(self) -> None:
        self._weight("beta")
        self._number("epsilon", lambda v: 0 < v < 1, "greater than 0 and less than 1")
        self._number("top_entropy_quantile", lambda v: 0 < v <= 1, "greater than 0, at most 1")
        if self.epsilon_high is not None:
            self._positive("epsilon_high")
        if self.delta is not None:
            least = 1 + (self.epsilon_high or self.epsilon)
            self._number("delta", lambda v: v > least, "greater than 1 + epsilon_high: ratios are clipped there anyway")
        if self.delta is not None and self.loss_type in ("cispo", "sapo"):
            what = f"no delta with loss_type={self.loss_type!r}, which has no such bound"
            raise BadArgument(expected(what, self.delta))
        if self.importance_sampling_level == "sequence" and self.loss_type == "rloo":
            what = "importance_sampling_level='token' with loss_type='rloo'"
            raise BadArgument(expected(what, "sequence", "It has its own."))

    def sampling(self, temperature: float) -> SamplingOptions:
        """How completions are sampled at a temperature."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        options = {name: getattr(self, name) for name in names}
        return SamplingOptions(self.max_completion_length, temperature, **options)

    @property
    def updates_per_step(self) -> int:
        """How often the weights are updated with the completions of a step."""
        return self.num_iterations * self.mini_batches

    def get_optimizer_and_scheduler(self, steps: int | None) -> tuple[Any, Any]:
        """As in `TrainingArguments`; the learning rate is that of the step, for each of its updates."""
        schedule, updates = self._schedule(steps), self.updates_per_step
        by_update = schedule if updates == 1 else lambda count: schedule(count // updates)
        return make_optimizer(self.optimizer, by_update, self.weight_decay, **self._optimizer_options()), schedule

    def run_settings(self, *args: Any, **options: Any) -> dict[str, Any]:
        """As in `TrainingArguments`, but the reward is monitored unless another metric was chosen."""
        values = super().run_settings(*args, **options)
        if self.metric_for_best_model is None:
            values |= {"monitor_metric": "val/reward", "monitor_mode": "max"}
        return values
