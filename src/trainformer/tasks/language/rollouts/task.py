"""Base class of the tasks that sample completions of prompts, score them, and learn from the scores."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument
from trainformer.core.errors import check_count, expected
from trainformer.core.types import Loss, OptimizerConfig
from trainformer.data.labels import is_stream
from trainformer.data.sharding import SampleList
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.prompts import Prompt, PromptEncoder, PromptRecords, Prompts
from trainformer.losses.policy import TokenScores, token_scores
from trainformer.models.generation import SamplingOptions
from trainformer.models.language import OutputStates
from trainformer.tasks.language.base import GenerationMixin, data_name, to_width
from trainformer.tasks.language.generation import end_tokens
from trainformer.tasks.language.positions import longest_sequence
from trainformer.tasks.language.reference import ReferenceMixin, model_digest
from trainformer.tasks.language.rollouts.environment import ToolEnvironment, environment_factory, tool_schemas
from trainformer.tasks.language.rollouts.generation import (
    Generator,
    TransformersGenerator,
    checked_generator,
    is_sharded,
)
from trainformer.tasks.language.rollouts.rewards import Rewards
from trainformer.tasks.language.rollouts.rollout import Rollout, RolloutMaker
from trainformer.tasks.language.rollouts.rows import Scored, TokenRows
from trainformer.tasks.language.rollouts.samples import sample_of
from trainformer.utils.distributed import is_padding

_REFUSED = ("pipeline", "deepspeed", "tensor_parallel", "tp")  # they split the model that has to generate


@dataclass(eq=False)
class RolloutTask(ReferenceMixin, GenerationMixin):
    """Base class of tasks that learn from their own completions, with the arguments that they share.

    A sample is a prompt. `train_step` samples `num_generations` completions of it, so nothing that was sampled lives
    longer than a step. The random numbers of a completion come with its sample: neither the batch size nor the number
    of processes changes it, and a resumed run samples what the interrupted one would have.
    """

    model_name: Any = "gpt2"
    _: KW_ONLY
    rewards: Any = None
    reward_weights: Sequence[float] | None = None
    num_generations: int = 8
    max_prompt_length: int | None = None
    max_completion_length: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_tokens: Sequence[str | int] = ()
    tools: Sequence[Any] | None = None
    environment: Any = None
    max_turns: int | None = None
    generator: Any = None
    generation_batch_size: int | None = None
    forward_batch_size: int | None = None
    prompt_template: str | None = None
    reference: Any = "start"
    eval_generations: int = 1
    eval_temperature: float = 0.0
    log_samples: int = 4
    chunk_tokens: int | None = None

    kind = "causal_lm"

    def _init_rollouts(self) -> None:
        """Validate shared arguments. Call it from `__post_init__`."""
        check_count("max_completion_length", self.max_completion_length)
        for name in ("max_prompt_length", "max_turns", "generation_batch_size", "forward_batch_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("num_generations", self.num_generations, least=2, do="Completions of a prompt are compared.")
        check_count("eval_generations", self.eval_generations)
        check_count("log_samples", self.log_samples, least=0)
        self._init_task()
        self._sampling(self.eval_temperature)
        if self._sampling(self.temperature).temperature == 0:
            do = "Equal completions of a prompt teach nothing; 1.0 is usual. eval_temperature=0 evaluates greedily."
            raise BadArgument(expected("temperature to be positive for training", self.temperature, do))
        if self.tools is not None and self.environment is not None:
            do = "Run the tools in the environment."
            raise BadArgument(expected("tools or an environment", "both", do))
        self._schemas = None if not self.tools else tool_schemas(self.tools)
        self._environment = None if self.environment is None else environment_factory(self.environment)
        if self.max_turns is not None and not self.tools and self.environment is None:
            raise BadArgument(expected("max_turns with tools or an environment", "neither", "Leave it out."))
        self._scorer = self._make_scorer()
        checked_generator(self.generator)
        self._synced: str | None = None
        self._limit: int | None = None
        self._metrics: dict[str, tuple[Any, Any]] = {}
        self._samples: list[dict[str, Any]] = []
        self._shown: list[dict[str, Any]] = []
        self._eval_samples: list[dict[str, Any]] = []
        self._policy_states, self._reference_states = OutputStates(self.chunk_tokens), OutputStates(self.chunk_tokens)
        self._init_reference()

    def _make_scorer(self) -> Rewards:
        if self.rewards is None and self.environment is None:
            do = "Pass rewards=function, for instance def reward(prompts, completions, **columns): return [...]."
            raise BadArgument(expected("rewards, or an environment that gives them", None, do))
        return Rewards(self.rewards, self.reward_weights)

    def _sampling(self, temperature: float) -> SamplingOptions:
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        options = {name: getattr(self, name) for name in names}
        return SamplingOptions(max_new_tokens=self.max_completion_length, temperature=temperature, **options)

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """The most tokens of a prompt with its completion, if they are limited."""
        return (self.max_prompt_length or 1) + self.max_completion_length

    # -- set-up --------------------------------------------------------------------------------------------

    def configure(self, info: Any) -> None:
        """Load the model, and check that prompts and completions fit into its positions."""
        super().configure(info)
        model: Any = self.model
        config = getattr(model.config, "text_config", model.config)
        self._limit = longest_sequence(model) or getattr(config, "max_position_embeddings", None)
        if self._limit is not None and self.max_length > self._limit:
            what = (
                f"max_prompt_length and max_completion_length of at most {self._limit} together, the model's positions"
            )
            raise BadArgument(expected(what, f"{self.max_prompt_length} and {self.max_completion_length}"))

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """A small learning rate, and the reward to monitor.

        Also refuses strategies with which the model cannot generate.
        """
        strategy = settings.strategy
        name = strategy.get("name") if isinstance(strategy, Mapping) else getattr(strategy, "name", strategy)
        if name in _REFUSED:
            what = f"strategy 'ddp' or 'fsdp' with {type(self).__name__}, whose model generates in every step"
            raise BadArgument(expected(what, name))
        defaults = {**super().training_defaults(settings, chosen), "lr": 1e-6 if self.adapter is None else 1e-5}
        if {"monitor_metric", "monitor_mode"} & set(chosen):
            return defaults
        return {**defaults, "monitor_metric": "val/reward", "monitor_mode": "max"}

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.text_tokenizer, self._schemas)

    @cached_property
    def stop_ids(self) -> list[int]:
        """The tokens that end a completion: of tokenizer, generation config and chat template, and your own."""
        tokenizer, model = self.text_tokenizer, unwrap_model(self.model)
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        own = []
        for token in self.stop_tokens:
            number = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token
            if number is None or not 0 <= number < len(tokenizer) or number == tokenizer.unk_token_id:
                raise BadArgument(expected("stop_tokens to be single tokens of the tokenizer", token))
            own.append(int(number))
        return sorted({*end_tokens(base, tokenizer), *own})

    @cached_property
    def _maker(self) -> RolloutMaker:
        environment = self._environment
        if self.tools:
            environment = partial(ToolEnvironment, list(self.tools), self.text_tokenizer)
        return RolloutMaker(
            self.text_tokenizer, self._encoder, self.stop_ids, environment, self.max_turns, max_tokens=self._limit
        )

    @cached_property
    def _own_generator(self) -> TransformersGenerator:
        return TransformersGenerator(self.text_tokenizer.pad_token_id, self.generation_batch_size)

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Prompts:
        """Tokenise each prompt once. Its columns stay as they are, for the reward functions."""
        if is_stream(dataset):
            raise BadArgument(expected("prompts with a length", "a stream", "Read it into a list or a file first."))
        room = None if self._limit is None else self._limit - self.max_completion_length
        limits = [limit for limit in (self.max_prompt_length, room) if limit is not None]
        return Prompts(
            PromptRecords(dataset, self.prompt_template),
            self._encoder,
            generations=self.num_generations if train else self.eval_generations,
            max_tokens=min(limits, default=None),
            keeps_all=not train,
            cache_dir=self.cache_dir,
            name=data_name(train),
        )

    def collate_fn(self, examples: list[Any]) -> dict[str, Any]:  # type: ignore[override]
        seeds = torch.stack([torch.as_tensor(example["seeds"]) for example in examples])
        return {"prompts": SampleList(example["prompt"] for example in examples), "seeds": seeds}

    # -- rollouts ------------------------------------------------------------------------------------------

    def rollouts(self, batch: Mapping[str, Any], temperature: float | None = None) -> list[Rollout]:
        """Completions of the prompts of a batch, those of a prompt next to each other."""
        seeds: Tensor = batch["seeds"]
        prompts = [prompt for prompt in batch["prompts"] for _ in range(seeds.shape[1])]
        options = self._sampling(self.temperature if temperature is None else temperature)
        return self._maker(prompts, seeds.flatten().tolist(), self._ready_generator(), options)

    def _ready_generator(self) -> Generator:
        """The generator, with the weights of the model as they are now."""
        if self.generator is None:
            if self._maker.environment is not None and is_sharded(self.model):
                what = "strategy 'ddp', or no environment and no tools: processes would take unequal numbers of turns"
                raise BadArgument(expected(what, "FSDP"))
            self._own_generator.update_weights(self.model)
            return self._own_generator
        if is_sharded(self.model):
            raise BadArgument(expected("strategy 'ddp' with a generator of its own weights", "FSDP"))
        digest = model_digest(self.model)
        if digest != self._synced:
            self.generator.update_weights(unwrap_model(self.model))
            self._synced = digest
        return self.generator

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Rewards of completions, with what the environment paid as the last part, if it did."""
        parts = self._scorer(rollouts, next(self.model.parameters()).device)
        total = self._scorer.total(parts)
        if self.environment is not None:
            paid = [float("nan") if rollout.reward is None else rollout.reward for rollout in rollouts]
            own = torch.tensor(paid, dtype=torch.float64)
            parts = torch.cat([parts, own[:, None]], dim=1)
            both = torch.stack([total, own], dim=1)
            total = torch.where(both.isnan().all(1), float("nan"), torch.nansum(both, 1))
        return Scored(parts, total)

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards in the log."""
        return [*self._scorer.names, *(["environment"] if self.environment is not None else [])]

    def rows_of(self, rollouts: Sequence[Rollout]) -> TokenRows:
        """The tokens of rollouts as tensors on the device of the model."""
        examples, sampled = [], []
        for rollout in rollouts:
            ids, begin = [*rollout.prompt.ids, *rollout.tokens], len(rollout.prompt.ids)
            written = [t if own else IGNORE_INDEX for t, own in zip(rollout.tokens, rollout.mask, strict=True)]
            examples.append({"input_ids": ids, "labels": [IGNORE_INDEX] * begin + written})
            sampled.append([float("nan")] * begin + (rollout.log_probs or []))
        batch = pad(examples, self.text_tokenizer.pad_token_id, max_length=self._limit)
        device = next(self.model.parameters()).device
        rows = TokenRows(batch["input_ids"].to(device), batch["labels"].to(device))
        if all(rollout.log_probs is None for rollout in rollouts):
            return rows
        width = rows.input_ids.shape[1]
        padded = [row + [float("nan")] * (width - len(row)) for row in sampled]
        return rows._replace(sampled=torch.tensor(padded, device=device)[:, 1:])

    @property
    def policy_temperature(self) -> float:
        """What the logits are divided by in the loss: the temperature of sampling, so that ratios start at 1."""
        return self.temperature

    def policy_scores(self, rows: TokenRows) -> TokenScores:
        """Log probabilities of the sampled tokens under the trained model."""
        return self._forward_scores(self.model, self._policy_states, rows)

    @torch.no_grad()
    def reference_log_probs(self, rows: TokenRows) -> Tensor | None:
        """The same under the reference, without a gradient; None if the loss does not use it."""
        if not self.needs_reference:
            return None
        with self.reference_model() as model:
            return self._forward_scores(model, self._reference_states, rows).log_probs

    def _forward_scores(self, model: nn.Module, states: OutputStates, rows: TokenRows) -> TokenScores:
        """Scores of all rows, `forward_batch_size` at a time; with gradients, activations are then recomputed."""

        def scores(input_ids: Tensor, targets: Tensor) -> TokenScores:
            # No attention mask: padding is on the right, where no token of a causal model attends.
            hidden, head = states(model, {"input_ids": input_ids})
            options: dict[str, Any] = {"temperature": self.policy_temperature, "chunk_tokens": states.chunk_tokens}
            return token_scores(hidden[:, :-1], targets, head, **options)

        size = self.forward_batch_size
        if size is None or size >= len(rows.input_ids):
            return scores(rows.input_ids, rows.targets)
        parts = zip(rows.input_ids.split(size), rows.targets.split(size), strict=True)
        run = partial(checkpoint, scores, use_reentrant=False) if torch.is_grad_enabled() else scores
        found: list[TokenScores] = [run(*part) for part in parts]
        return TokenScores(*(torch.cat(values) for values in zip(*found, strict=True)))

    # -- training ------------------------------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        """How often the weights are updated with the completions of a step."""
        return 1

    def _losses(self, batch: Mapping[str, Any]) -> Iterator[Loss]:
        """Sample completions of the prompts, then yield the loss of each update."""
        raise NotImplementedError

    def _choose_step(self) -> None:
        """Make `train_step` a generator if there are several updates per step. Call it from `__post_init__`."""
        if self.updates_per_step > 1:
            vars(self).update(train_step=self._yielding_step, configure_optimizers=self._one_optimizer)

    def train_step(self, batch: Mapping[str, Any]) -> Loss:
        """Sample completions, score them, and return the loss."""
        loss = next(iter(self._losses(batch)))
        return Loss(loss.sum, loss.weight, metrics=self._take_metrics())

    def _yielding_step(self, batch: Mapping[str, Any]) -> Iterator[tuple[str, Loss]]:
        for loss in self._losses(batch):
            for name, pair in self._take_metrics().items():
                if not is_padding():  # of a rank without samples
                    self.log(name, pair)
            yield "policy", loss

    def _one_optimizer(self) -> dict[str, OptimizerConfig]:
        return {"policy": OptimizerConfig(params=self.model, updates_per_step=self.updates_per_step)}

    def _log(self, metrics: Mapping[str, tuple[Any, Any]]) -> None:
        """Log (sum, weight) pairs with the next loss."""
        self._metrics |= {name: _on_host(pair) for name, pair in metrics.items() if float(pair[1]) > 0}

    def _take_metrics(self) -> dict[str, tuple[Any, Any]]:
        found, self._metrics = self._metrics, {}
        return found

    def _rollout_metrics(self, rollouts: Sequence[Rollout], scored: Scored) -> dict[str, tuple[Any, Any]]:
        """Rewards and lengths as (sum, weight)."""
        count = len(rollouts)
        known = ~scored.total.isnan()
        found: dict[str, tuple[Any, Any]] = {"reward": (torch.nansum(scored.total), known.sum())}
        for place, name in enumerate(self.reward_names if scored.parts.shape[1] > 1 else ()):
            part = scored.parts[:, place]
            found[f"rewards/{name}"] = (torch.nansum(part), (~part.isnan()).sum())
        lengths = [rollout.length for rollout in rollouts]
        found["completion_length"] = (float(sum(lengths)), count)
        found["truncated"] = (float(sum(rollout.is_truncated for rollout in rollouts)), count)
        if self._maker.environment is not None:
            found["turns"] = (float(sum(rollout.turns for rollout in rollouts)), count)
        if self.tools:
            environments: list[Any] = [rollout.environment for rollout in rollouts]
            calls = sum(environment.calls for environment in environments)
            found["tools/calls"] = (float(calls), count)
            found["tools/failures"] = (float(sum(environment.failures for environment in environments)), calls)
        return found

    def _keep_samples(
        self, kept: list[dict[str, Any]], rollouts: Sequence[Rollout], scored: Scored, **more: Tensor
    ) -> None:
        """Keep readable forms of the first rollouts."""
        for place in range(min(self.log_samples - len(kept), len(rollouts))):
            parts = dict(zip(self.reward_names, scored.parts[place].tolist(), strict=True))
            values = {name: float(tensor[place]) for name, tensor in more.items()}
            kept.append(sample_of(rollouts[place], parts, float(scored.total[place]), **values))

    def on_step_end(self, step: int, max_steps: int) -> None:
        """Later rollouts belong to the next step."""
        self._shown, self._samples = self._samples, []

    def training_records(self) -> dict[str, dict[str, Any]]:
        """Some completions of the latest step, with their rewards."""
        return {"text": {"key": "train/rollouts", "samples": self._shown}} if self._shown else {}

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_eval_begin(self, dataset: Any, val_set: str) -> None:
        """Keep samples of this evaluation only."""
        self._eval_samples = []

    def eval_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Mean rewards of completions at `eval_temperature`, and their lengths."""
        rollouts = self.rollouts(batch, self.eval_temperature)
        scored = self.score(rollouts)
        self._keep_samples(self._eval_samples, rollouts, scored)
        return {name: _on_host(pair) for name, pair in self._rollout_metrics(rollouts, scored).items()}

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """Some completions of the latest evaluation, with their rewards."""
        samples = self._eval_samples
        return {"text": {"key": "val/rollouts", "samples": samples}} if samples else {}

    def predict_step(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The first completion of each prompt, padded to `max_completion_length`."""
        first = {**batch, "seeds": batch["seeds"][:, :1]}
        rollouts = self.rollouts(first, self.eval_temperature)
        pad_id = self.text_tokenizer.pad_token_id
        rows = [
            to_width(torch.tensor([r.tokens], dtype=torch.long), self.max_completion_length, pad_id) for r in rollouts
        ]
        return {"generated": torch.cat(rows).to(next(self.model.parameters()).device)}

    @classmethod
    def stand_ins(cls, opaque: Collection[str]) -> dict[str, Any]:
        """Arguments for a model that is loaded to predict, where functions and objects could not be recorded."""
        found: dict[str, Any] = {"generator": None} if "generator" in opaque else {}
        return found | ({"rewards": _not_loaded, "reward_weights": None} if "rewards" in opaque else {})

    def config_dict(self) -> dict[str, Any]:
        """Return the arguments; functions and objects by their names."""
        config = super().config_dict()
        for name in ("rewards", "tools", "environment", "generator", "judge"):
            if config.get(name) is not None:
                config[name] = _described(config[name])
        return config

    def check_batch(self, batch: Any) -> list[str]:
        prompts: Sequence[Prompt] = batch["prompts"]
        return [] if all(prompt.ids for prompt in prompts) else ["A prompt of the batch has no tokens."]


def _on_host(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Tensors of the CPU as numbers: the others of a step are on the device."""
    values = (v.item() if isinstance(v, Tensor) and v.device.type == "cpu" else v for v in pair)
    return next(values), next(values)


def _not_loaded(completions: Any) -> Any:
    """In place of rewards that were functions of the program that trained."""
    do = "Make the task yourself and pass it: trainformer.load(folder, task=GRPO(..., rewards=...))."
    raise BadArgument(expected("rewards to score completions", "a loaded model without them", do))


def _described(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _described(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_described(part) for part in value]
    return getattr(value, "__name__", None) or type(value).__name__
