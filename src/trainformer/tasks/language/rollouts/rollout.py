"""Rollouts: completions of prompts, in one turn or in several with an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.data.text.prompts import Messages, Prompt, PromptEncoder
from trainformer.data.text.sampling import SamplingOptions
from trainformer.tasks.language.rollouts.environment import Environment, as_messages, observation_ids
from trainformer.tasks.language.rollouts.generation import Generator


@dataclass
class Rollout:
    """A prompt with its completion: `tokens`, of which `mask` marks those of the model (others were observed).

    `completion` is a text, or the messages that follow those of the prompt. `log_probs` are those of the engine that
    sampled, if it is not the trained model itself. `reward` is what the environment paid, None without one.
    """

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] | None = None
    completion: str | Messages = ""
    is_truncated: bool = False
    turns: int = 0
    environment: Environment | None = None
    reward: float | None = None

    @property
    def length(self) -> int:
        """The number of tokens that the model wrote."""
        return sum(self.mask)


@dataclass(frozen=True)
class RolloutMaker:
    """Makes rollouts: samples with a generator and plays the turns of an environment."""

    tokenizer: Any
    encoder: PromptEncoder
    stop_ids: Sequence[int]
    environment: Callable[[], Environment] | None = None
    max_turns: int | None = None
    max_tokens: int | None = None  # of prompt and completion together: the positions of the model

    def __call__(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], generator: Generator, options: SamplingOptions
    ) -> list[Rollout]:
        """One rollout per prompt; the random numbers of each come from its seed."""
        rollouts = [self._begin(prompt) for prompt in prompts]
        active = list(range(len(rollouts)))
        while active:
            self._sample(rollouts, active, seeds, generator, options)
            active = [i for i in active if self._continues(rollouts[i], options.max_new_tokens)]
        for rollout in rollouts:
            if not rollout.prompt.is_chat:
                rollout.completion = self.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        return rollouts

    def _begin(self, prompt: Prompt) -> Rollout:
        rollout = Rollout(prompt, completion=[] if prompt.is_chat else "")
        if self.environment is None:
            return rollout
        rollout.environment = self.environment()
        changed = rollout.environment.reset(prompt.prompt, dict(prompt.columns))
        if changed is not None:
            extended = replace(prompt, prompt=_with_observation(prompt.prompt, changed))
            rollout.prompt = replace(extended, ids=tuple(self.encoder.ids_of(extended)))
        return rollout

    def _sample(
        self,
        rollouts: list[Rollout],
        active: list[int],
        seeds: Sequence[int],
        generator: Generator,
        options: SamplingOptions,
    ) -> None:
        """One turn of the model in each of the active rollouts."""
        for i in active:
            rollouts[i].turns += 1
        begins = {i: len(rollouts[i].tokens) for i in active}
        open_ = active
        while open_:
            self._write(rollouts, open_, seeds, generator, options)
            open_ = [i for i in open_ if rollouts[i].is_truncated and self._room(rollouts[i], options.max_new_tokens)]
        for i in active:
            rollout = rollouts[i]
            if isinstance(rollout.completion, list):
                rollout.completion.append(self._message(rollout, rollout.tokens[begins[i] :]))

    def _write(
        self,
        rollouts: list[Rollout],
        active: list[int],
        seeds: Sequence[int],
        generator: Generator,
        options: SamplingOptions,
    ) -> None:
        chosen = [rollouts[i] for i in active]
        contexts = [[*rollout.prompt.ids, *rollout.tokens] for rollout in chosen]
        rooms = [self._room(rollout, options.max_new_tokens) for rollout in chosen]
        most = max(rooms)
        if self.max_tokens is not None:  # all are continued as far as the longest can be; the others later go on
            most = min(most, self.max_tokens - max(map(len, contexts)))
        found = generator.generate(
            contexts,
            [seeds[i] for i in active],
            replace(options, max_new_tokens=most),
            stop_ids=self.stop_ids,
            drawn=[rollout.length for rollout in chosen],
        )
        for place, (rollout, room) in enumerate(zip(chosen, rooms, strict=True)):
            tokens = _until_stop(found.tokens[place], self.stop_ids)[:room]
            if found.log_probs is not None:
                before = rollout.log_probs or [float("nan")] * len(rollout.tokens)
                rollout.log_probs = before + list(found.log_probs[place][: len(tokens)])
            rollout.tokens += tokens
            rollout.mask += [True] * len(tokens)
            rollout.is_truncated = not tokens or tokens[-1] not in self.stop_ids
            if not tokens:
                raise DataError(expected("the generator to return at least one token of each completion", "none"))

    def _room(self, rollout: Rollout, most: int) -> int:
        room = most - len(rollout.tokens)
        if self.max_tokens is not None:
            room = min(room, self.max_tokens - len(rollout.prompt.ids) - len(rollout.tokens))
        return room

    def _message(self, rollout: Rollout, tokens: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.tokenizer.decode(tokens, skip_special_tokens=True)}
        parse = getattr(rollout.environment, "message", None)
        return message if parse is None else {**message, **parse(self._said(tokens))}

    def _said(self, tokens: list[int]) -> str:
        """What the environment gets: with special tokens, which may mark tool calls, but without the stop token."""
        spoken = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        return self.tokenizer.decode(spoken, skip_special_tokens=False)

    def _continues(self, rollout: Rollout, most: int) -> bool:
        """Play the environment's turn; whether the model has another one."""
        environment = rollout.environment
        if environment is None:
            return False
        begin = len(rollout.mask) - rollout.mask[::-1].index(False) if False in rollout.mask else 0
        observation, reward = _checked_step(environment, self._said(rollout.tokens[begin:]))
        if reward is not None:
            rollout.reward = (rollout.reward or 0.0) + float(reward)
        is_last = self.max_turns is not None and rollout.turns >= self.max_turns
        if observation is None or is_last or rollout.is_truncated:
            return False
        seen = observation_ids(self.tokenizer, rollout.prompt, observation, self.stop_ids, self.encoder.tools)
        if self._room(rollout, most) <= len(seen):  # no room for an answer
            rollout.is_truncated = True
            return False
        rollout.tokens += seen
        rollout.mask += [False] * len(seen)
        if rollout.log_probs is not None:
            rollout.log_probs += [float("nan")] * len(seen)
        if isinstance(rollout.completion, list):
            rollout.completion += as_messages(observation)
        return True


def _with_observation(prompt: str | Messages, observation: Any) -> str | Messages:
    """The prompt with what an environment shows at the start: a text continues it, messages replace it."""
    if isinstance(observation, str):
        if isinstance(prompt, str):
            return prompt + observation
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
    if isinstance(prompt, str):
        what = "reset() of an environment to return None or a text, since prompts are texts"
        raise DataError(expected(what, type(observation).__name__))
    return as_messages(observation)


def _checked_step(environment: Environment, completion: str) -> tuple[Any, float | None]:
    found = environment.step(completion)
    if isinstance(found, tuple) and len(found) == 2:
        return found
    what = f"{type(environment).__name__}.step(completion) to return (observation or None, reward or None)"
    raise DataError(expected(what, type(found).__name__))


def _until_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token.

    >>> _until_stop([5, 2, 0, 0], [2])
    [5, 2]
    """
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: place + 1])
    return list(tokens)
