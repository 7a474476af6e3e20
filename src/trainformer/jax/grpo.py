"""Reinforcement learning of causal language models on JAX: GRPO and its variants, from rewards of sampled completions.

Sampling, scores and steps are in `rollouts`, losses in `losses.jax.policy`. All are (sum, weight), so that gradient
accumulation and the mesh change neither completions nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.precision import cast_floating
from trainformer.backends.jax.processes import gather_to_host
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step import VALID, eval_model, make_train_step
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss
from trainformer.data.labels import is_stream
from trainformer.data.mixture.dataset import SOURCE
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.prompts import Prompt, PromptEncoder, PromptRecords, Prompts
from trainformer.engine import Event
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.generation import stop_tokens
from trainformer.jax.grpo_config import GRPOConfig
from trainformer.jax.reference import (
    ReferenceDigest,
    load_reference,
    params_digest,
    refuse_replaced_layers,
    without_adapter,
)
from trainformer.jax.rollouts import (
    Advantages,
    DecoderGenerator,
    Metrics,
    NumberedPrompts,
    RolloutEvalStep,
    RolloutStep,
    collate_prompts,
    group_advantages,
    on_mesh,
    token_rows,
    whole_seeds,
)
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import TextTrainer
from trainformer.jax.trainer_protocol import TrainerConfigureFunctionOutput, TrainerConfigureModelOutput
from trainformer.jax.validation import mixture_sources
from trainformer.losses.jax.policy import TokenScores, policy_loss, token_scores
from trainformer.tasks.language.rollouts.environment import ToolEnvironment, environment_factory, tool_schemas
from trainformer.tasks.language.rollouts.reward_functions import RewardFunctions, is_function_path
from trainformer.tasks.language.rollouts.rollout import Rollout, RolloutMaker
from trainformer.tasks.language.rollouts.samples import sample_of


class GRPOTrainer(TextTrainer):
    """Trains a causal language model with rewards: group relative policy optimization, and its variants.

    Records have a `prompt`, a text or messages, and any other columns. In each step the model writes `num_generations`
    completions of each prompt, `reward_funcs` score them, and completions that are better than the mean of their group
    become more likely. A reward is a function ``reward(prompts, completions, **columns)`` that returns one number (or
    None) per completion, or ``"file.py:function"``; several are added with `reward_weights`. `tools` and `environment`
    are those of `trainformer.tasks.GRPO`.

    With `beta`, the KL divergence from a reference is added: `reference_model` (a folder, a module, or a function that
    builds one), by default the model before training; with LoRA, the model without the adapter, which takes no memory.

    Evaluation computes the mean reward at `eval_temperature`.
    """

    arguments_type: ClassVar[type[TextArguments]] = GRPOConfig
    masks_padding = True

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        reward_funcs: Any = None,
        reference_model: Any = None,
        tools: Sequence[Any] | None = None,
        environment: Any = None,
        callbacks: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        checked: Any = self.arguments_type.from_arguments(arguments)
        self._init_rewards(checked, reward_funcs, tools, environment)
        if reference_model is not None and not checked.beta:
            do = "Pass beta=0.04, or leave it out."
            raise BadArgument(expected("no reference_model with beta=0", reference_model, do))
        self.reference_model = reference_model
        self._reference: TrainState | None = None
        self._digest = ReferenceDigest()
        self._prompt_sets: list[NumberedPrompts] = []
        self._shown: list[dict[str, Any]] = []
        self._eval_samples: list[dict[str, Any]] = []
        callbacks = [*(callbacks or ()), *([self._digest] if checked.beta else [])]
        super().__init__(checked, model, processing_class, callbacks=callbacks, **options)

    def _init_rewards(self, arguments: GRPOConfig, rewards: Any, tools: Any, environment: Any) -> None:
        if rewards is None and environment is None:
            do = "Pass reward_funcs=function, for instance def reward(prompts, completions, **columns): return [...]."
            raise BadArgument(expected("reward_funcs, or an environment that gives rewards", None, do))
        self._scorer = RewardFunctions(rewards, arguments.reward_weights)
        for reward in self._scorer.given.values():
            if isinstance(reward, (str, Path)) and not is_function_path(str(reward)):
                do = "Pass a function that runs the reward model."
                raise BadArgument(expected("reward_funcs to be functions, or 'file.py:function'", str(reward), do))
        if tools is not None and environment is not None:
            raise BadArgument(expected("tools or an environment", "both", "Run the tools in the environment."))
        if arguments.max_turns is not None and not tools and environment is None:
            raise BadArgument(expected("max_turns with tools or an environment", "neither", "Leave it out."))
        if (tools or environment is not None) and jax.process_count() > 1:
            what = "no tools and no environment with several processes, which would take unequal turns"
            raise BadArgument(expected(what, f"{jax.process_count()} processes"))
        self.tools = list(tools or ())
        self._environment = None if environment is None else environment_factory(environment)
        if self.tools:
            self._environment = None

    def _inspect_model(self, model: Any) -> None:
        super()._inspect_model(model)
        arguments = self.arguments
        if not self._is_decoder:
            do = "Completions are sampled from it."
            raise BadArgument(expected("a decoder of trainformer.models.jax", type(model).__name__, do))
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) to generate with", None))
        self.positions: int = arguments.max_sequence_length or self.model_config.max_position_embeddings
        most = (arguments.max_prompt_length or 1) + arguments.max_completion_length
        if most > self.positions:
            what = f"max_prompt_length and max_completion_length of at most {self.positions} together"
            received = f"{arguments.max_prompt_length} and {arguments.max_completion_length}"
            raise BadArgument(expected(what, received, "The model has no more positions."))

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> NumberedPrompts:
        """Tokenise each prompt once. Its columns stay as they are, for the reward functions."""
        if is_stream(dataset):
            raise BadArgument(expected("prompts with a length", "a stream", "Read it into a list or a file first."))
        arguments = self.arguments
        room = self.positions - arguments.max_completion_length
        prompts = Prompts(
            PromptRecords(dataset, arguments.prompt_template),
            self._encoder,
            generations=arguments.num_generations if train else arguments.eval_generations,
            max_tokens=min(room, arguments.max_prompt_length or room),
            keeps_all=not train,
            **self.token_options(train),
        )
        first = sum(map(len, self._prompt_sets))
        self._prompt_sets.append(NumberedPrompts(prompts, first))
        if train:
            self._longest = max(self._longest, int(prompts.lengths.max()))
        return self._prompt_sets[-1]

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """`collate_prompts`: prompts are tokenised, and are looked up by their number when they are completed."""
        return collate_prompts

    def _prompt(self, index: int) -> Prompt:
        held = next(each for each in reversed(self._prompt_sets) if each.first <= index)
        return held.prompts.prompt(index - held.first)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.text, tool_schemas(self.tools) if self.tools else None)

    def recorded_options(self) -> dict[str, Any]:
        """Rewards, tools and environment are code: a checkpoint records their types only."""
        given = {"reward_funcs": self._scorer, "tools": self.tools or None, "environment": self._environment}
        own = {name: value for name, value in given.items() if value is not None}
        return {**super().recorded_options(), **own}

    # -- model and steps -------------------------------------------------------------------------------------

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model, and with `beta` the reference."""
        output = super().configure_model()
        if not self.arguments.beta:
            return output
        state = output.state
        if self.reference_model is not None:
            self._reference = load_reference(self, self.reference_model)
        elif getattr(state.model, "lora", None) is None:
            # A copy: training steps donate their weights.
            params = jax.tree.map(jnp.copy, cast_floating(state.params, self.dtype))
            self._reference = state.replace(params=params, opt_state=())
        else:
            refuse_replaced_layers(self, state)
        self._digest.digest = params_digest((self._reference or state).params, self.mesh)
        return output

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Steps that sample completions on the host and then run the jitted update."""
        arguments, sizes = self.arguments, self.batch_sizes
        unit = sizes.accumulation * sizes.data_shards
        rows = sizes.total // arguments.mini_batches * arguments.num_generations  # of an update
        if sizes.total % arguments.mini_batches or rows % unit:
            what = f"total_batch_size to divide into {arguments.mini_batches} mini_batches"
            raise BadArgument(expected(f"{what} and their completions into {unit} parts", sizes.total))
        over_batch = arguments.top_entropy_quantile < 1
        if over_batch and sizes.accumulation > 1:
            what = "no gradient accumulation with top_entropy_quantile, which is one of the whole batch"
            raise BadArgument(expected(what, sizes.accumulation, "Pass gradient_accumulation_steps=1."))
        state = self._state if self._state is not None else self.model_state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        step = make_train_step(
            self.compute_loss,
            accumulation=sizes.accumulation,
            compute_dtype=self.dtype,
            clip=arguments.max_grad_norm or None,
            sources=mixture_sources(self),
        )
        self._own_scores = self._score_step(shardings, "log probabilities")
        reference = shardings if self._reference is None else jax.tree.map(lambda leaf: leaf.sharding, self._reference)
        self._reference_scores = self._score_step(reference, "reference", adapted=self._reference is not None)
        return TrainerConfigureFunctionOutput(
            RolloutStep(self._updates, step, self.mesh, shardings), RolloutEvalStep(self._evaluated, self.mesh)
        )

    def _score_step(self, shardings: TrainState, name: str, adapted: bool = True) -> JittedStep:
        """Log probabilities of sampled tokens, without a gradient."""

        def score(state: TrainState, batch: Mapping[str, Any]) -> jax.Array:
            model = eval_model(state, self.dtype)
            return self._scores(model if adapted else without_adapter(model), batch).log_probs

        return JittedStep(score, self.mesh, shardings, train=False, name=name)

    def _scores(self, model: Any, batch: Mapping[str, Any]) -> TokenScores:
        # No attention mask: padding is on the right. No dropout: ratios compare probabilities.
        states, labels = model.hidden_states(batch["input_ids"]), batch["labels"]
        options: dict[str, Any] = {"temperature": self.arguments.temperature, "chunks": self._chunks(labels.shape)}
        return token_scores(states, labels, model.head, **options)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """The loss of completions with their advantages, relative to `old` log probabilities if there are any."""
        arguments, scores = self.arguments, self._scores(model, batch)
        mask = jnp.pad(batch["labels"][:, 1:] != IGNORE_INDEX, ((0, 0), (0, 1)))
        token_mask = None
        if arguments.top_entropy_quantile < 1:
            known = jnp.where(mask, scores.entropy, jnp.nan)
            token_mask = mask & (scores.entropy >= jnp.nanquantile(known, 1 - arguments.top_entropy_quantile))
        found = policy_loss(
            scores.log_probs,
            batch.get("old", jax.lax.stop_gradient(scores.log_probs)),
            batch["advantages"],
            mask,
            variant=arguments.loss_type,
            level=arguments.importance_sampling_level,
            epsilon=arguments.epsilon,
            epsilon_high=arguments.epsilon_high,
            delta=arguments.delta,
            beta=arguments.beta,
            unbiased_kl=arguments.unbiased_kl,
            reference_log_probs=batch.get("reference"),
            token_mask=token_mask,
            row_mask=batch["counted"],
            max_length=arguments.max_completion_length,
        )
        entropy = jnp.sum(scores.entropy * mask), jnp.sum(mask)
        return Loss(found.sum, found.weight, {**(found.metrics or {}), "entropy": entropy}, found.per_sample)

    # -- rollouts ------------------------------------------------------------------------------------------

    @cached_property
    def stop_ids(self) -> list[int]:
        """The tokens that end a completion: of model, tokenizer and chat template, and your own."""
        own = []
        for token in self.arguments.stop_tokens:
            number = self.text.convert_tokens_to_ids(token) if isinstance(token, str) else token
            if number is None or not 0 <= number < len(self.text) or number == self.text.unk_token_id:
                raise BadArgument(expected("stop_tokens to be single tokens of the tokenizer", token))
            own.append(int(number))
        return sorted({*stop_tokens(self.model_state.model, self.text, self.base_folder), *own})

    @cached_property
    def _maker(self) -> RolloutMaker:
        environment = self._environment
        if self.tools:
            environment = partial(ToolEnvironment, self.tools, self.text)
        turns = self.arguments.max_turns
        return RolloutMaker(self.text, self._encoder, self.stop_ids, environment, turns, max_tokens=self.positions)

    def rollouts(self, state: TrainState, batch: Mapping[str, Any], temperature: float) -> list[Rollout]:
        """Completions of the prompts of a batch, those of a prompt next to each other."""
        valid = np.asarray(batch[VALID]) if VALID in batch else np.ones(len(batch["index"]), bool)
        seeds = whole_seeds(np.asarray(batch["seeds"])[valid])
        prompts = [self._prompt(int(i)) for i in np.asarray(batch["index"])[valid] for _ in range(seeds.shape[1])]
        generator = DecoderGenerator(self.mesh, self.dtype, self.arguments.generation_batch_size)
        generator.update_weights(state.model)
        return self._maker(prompts, seeds.flatten().tolist(), generator, self.arguments.sampling(temperature))

    def score(self, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
        """Rewards of each function (B, F), with what an environment paid as the last one, and in total (B,).

        With several processes, the first one scores.
        """
        parts = self.processes.run_on_main(lambda: self._scorer.scores(rollouts))
        total = self._scorer.weighted(parts)
        if self._environment is not None:
            own = np.asarray([np.nan if rollout.reward is None else rollout.reward for rollout in rollouts])
            both = np.stack([total, own], axis=1)
            parts = np.concatenate([parts, own[:, None]], axis=1)
            total = np.where(np.isnan(both).all(1), np.nan, np.nansum(both, axis=1))
        return parts, total

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards in the log."""
        return [*self._scorer.names, *(["environment"] if self._environment is not None else [])]

    def _updates(self, state: TrainState, batch: Any) -> tuple[list[dict[str, np.ndarray]], Metrics]:
        """Sample and score completions: the rows of each update of a step, and the metrics of the rollouts."""
        arguments, batch = self.arguments, gather_to_host(batch)
        rollouts = self.rollouts(state, batch, arguments.temperature)
        parts, total = self.score(rollouts)
        prompts, generations = len(batch["index"]), arguments.num_generations
        cut = [i for i, r in enumerate(rollouts) if r.is_truncated] if arguments.mask_truncated_completions else []
        rows = token_rows(rollouts, prompts * generations, self._row_length(rollouts), cut)
        mask = np.pad(rows["labels"][:, 1:] != IGNORE_INDEX, ((0, 0), (0, 1)))
        if arguments.beta:
            held = state if self._reference is None else self._reference
            rows["reference"] = self._log_probs(self._reference_scores, held, rows)
        in_reward = arguments.loss_type == "rloo" and arguments.beta > 0
        if arguments.updates_per_step > 1 or in_reward:
            rows["old"] = self._log_probs(self._own_scores, state, rows)
        metrics, rewards = self._rollout_metrics(rollouts, parts, total), total
        if in_reward:
            kl = ((rows["old"] - rows["reference"]) * mask).sum(-1)[: len(rollouts)]
            metrics["kl"] = (float(kl.sum()), float(mask.sum()))
            rewards = total - arguments.beta * kl
        options: dict[str, Any] = {"scale": arguments.scale_rewards, "leave_one_out": arguments.loss_type == "rloo"}
        advantages = group_advantages(rewards, generations, **options)
        metrics |= self._group_metrics(total, advantages)
        padding = prompts * generations - len(rollouts)
        rows["advantages"] = np.pad(advantages.values, (0, padding)).astype(np.float32)
        rows[VALID] = np.pad(np.ones(len(rollouts), bool), (0, padding))
        useful = ~np.repeat(advantages.has_no_variance, generations) | (not arguments.skip_zero_variance)
        rows["counted"] = np.pad(useful, (0, padding)).astype(np.float32)
        if SOURCE in batch:
            valid = np.asarray(batch[VALID])
            sources = np.concatenate([np.asarray(batch[SOURCE])[chosen] for chosen in (valid, ~valid)])
            rows[SOURCE] = np.repeat(sources, generations)
        self._shown = self._samples(rollouts, parts, total, advantage=advantages.values)
        groups = np.arange(prompts * generations).reshape(prompts, generations)
        chosen = [groups[number :: arguments.mini_batches].reshape(-1) for number in range(arguments.mini_batches)]
        updates = [{name: rows[name][part] for name in rows} for part in chosen] if len(chosen) > 1 else [rows]
        return updates * arguments.num_iterations, {name: pair for name, pair in metrics.items() if pair[1] > 0}

    def _row_length(self, rollouts: Sequence[Rollout]) -> int:
        """Tokens per row: of the longest prompt with the longest completion, so that nothing is recompiled."""
        longest = self._longest + self.arguments.max_completion_length
        actual = max(len(rollout.prompt.ids) + len(rollout.tokens) for rollout in rollouts)
        return self.padded_length(max(longest, actual), self.positions)

    def _log_probs(self, step: JittedStep, state: TrainState, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Scores of the rows, in as many parts as there are micro-batches."""
        names, parts = ("input_ids", "labels"), self.batch_sizes.accumulation
        inputs = [{name: rows[name][start::parts] for name in names} for start in range(parts)]
        found = np.empty(rows["labels"].shape, np.float32)
        for start, part in enumerate(inputs):
            found[start::parts] = np.asarray(step(state, on_mesh(part, self.mesh)))
        return found

    # -- metrics and samples ---------------------------------------------------------------------------------

    def _rollout_metrics(self, rollouts: Sequence[Rollout], parts: np.ndarray, total: np.ndarray) -> Metrics:
        """Rewards and lengths as (sum, weight)."""

        def pair(values: np.ndarray) -> tuple[float, float]:
            return float(np.nansum(values)), float((~np.isnan(values)).sum())

        found: Metrics = {"reward": pair(total)}
        for place, name in enumerate(self.reward_names if parts.shape[1] > 1 else ()):
            found[f"rewards/{name}"] = pair(parts[:, place])
        count = float(len(rollouts))
        found["completion_length"] = (float(sum(rollout.length for rollout in rollouts)), count)
        found["truncated"] = (float(sum(rollout.is_truncated for rollout in rollouts)), count)
        if self._maker.environment is not None:
            found["turns"] = (float(sum(rollout.turns for rollout in rollouts)), count)
        if self.tools:
            environments: list[Any] = [rollout.environment for rollout in rollouts]
            calls = float(sum(environment.calls for environment in environments))
            found["tools/calls"] = (calls, count)
            found["tools/failures"] = (float(sum(environment.failures for environment in environments)), calls)
        return found

    def _group_metrics(self, total: np.ndarray, advantages: Advantages) -> Metrics:
        spread = np.nan_to_num(total.reshape(-1, self.arguments.num_generations).std(1, ddof=1))
        return {
            "reward_std": (float(spread.sum()), len(spread)),
            "frac_reward_zero_std": (float(advantages.has_no_variance.sum()), len(spread)),
        }

    def _samples(
        self, rollouts: Sequence[Rollout], parts: np.ndarray, total: np.ndarray, **more: np.ndarray
    ) -> list[dict[str, Any]]:
        """Readable forms of the first rollouts."""
        found = []
        for place in range(min(self.arguments.log_samples, len(rollouts))):
            scores = dict(zip(self.reward_names, parts[place].tolist(), strict=True))
            values = {name: float(array[place]) for name, array in more.items()}
            found.append(sample_of(rollouts[place], scores, float(total[place]), **values))
        return found

    @property
    def log_samples(self) -> int:
        """How many completions of a step are kept for records and loggers."""
        return self.arguments.log_samples

    def training_records(self) -> dict[str, dict[str, Any]]:
        """Some completions of the latest step, with their rewards."""
        return {"text": {"key": "train/rollouts", "samples": self._shown}} if self._shown else {}

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """Some completions of the latest evaluation, with their rewards."""
        samples, self._eval_samples = self._eval_samples, []
        return {"text": {"key": "val/rollouts", "samples": samples}} if samples else {}

    def listeners(self) -> dict[Event, Any]:
        found = super().listeners()
        before = found.get(Event.LOG)

        def log(metrics: dict[str, float]) -> None:
            if before is not None:
                before(metrics)
            for kind, content in self.training_records().items():
                self._run.records.add(kind, content)

        return {**found, Event.LOG: log}

    def _evaluated(self, state: TrainState, batch: Any) -> Metrics:
        rollouts = self.rollouts(state, gather_to_host(batch), self.arguments.eval_temperature)
        if not rollouts:
            return {}
        parts, total = self.score(rollouts)
        room = self.arguments.log_samples - len(self._eval_samples)
        self._eval_samples += self._samples(rollouts, parts, total)[: max(0, room)]
        return {name: pair for name, pair in self._rollout_metrics(rollouts, parts, total).items() if pair[1] > 0}
