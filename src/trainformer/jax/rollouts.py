"""Rollouts on JAX: completions that the trained decoder samples in a step, their advantages, and steps that use them.

Prompts, turns, environments and rewards are those of `tasks.language.rollouts`; only sampling and steps are JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trainformer.backends.jax.compilation import Compilations, JittedStep
from trainformer.backends.jax.sharding import batch_sharding
from trainformer.backends.jax.state import TrainState
from trainformer.data.dataset import IndexedDataset
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.prompts import Prompts
from trainformer.models.generation import SamplingOptions
from trainformer.models.jax.generation import generate
from trainformer.tasks.language.rollouts.generator import Generated
from trainformer.tasks.language.rollouts.rollout import Rollout

_EPSILON = 1e-4
_HALF = np.uint64(32)  # bits


class NumberedPrompts(IndexedDataset):
    """Prompts as numbers, which can be moved to a device: the `index` of each, from `first` on, and its `seeds`."""

    in_memory = True

    def __init__(self, prompts: Prompts, first: int) -> None:
        self.prompts = prompts
        self.first = first

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": self.first + index % len(self), "seeds": self.prompts[index]["seeds"]}


def collate_prompts(samples: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """A batch of numbered prompts; seeds (rows, generations, 2) in halves, since jax has no integers of 64 bits."""
    seeds = np.stack([sample["seeds"] for sample in samples]).astype(np.uint64)
    halves = np.stack([seeds >> _HALF, seeds & np.uint64(2**32 - 1)], axis=-1).astype(np.uint32)
    return {"index": np.asarray([sample["index"] for sample in samples], np.int32), "seeds": halves}


def whole_seeds(halves: np.ndarray) -> np.ndarray:
    """The seeds from their halves.

    >>> whole_seeds(collate_prompts([{"index": 0, "seeds": [2**40 + 5]}])["seeds"]).tolist() == [[2**40 + 5]]
    True
    """
    return (halves[..., 0].astype(np.uint64) << _HALF) | halves[..., 1].astype(np.uint64)


class DecoderGenerator:
    """Samples from the trained decoder, `batch_size` prompts at a time (None: all at once)."""

    def __init__(self, mesh: Mesh, dtype: Any, batch_size: int | None = None) -> None:
        self.mesh = mesh
        self.dtype = dtype
        self.batch_size = batch_size
        self.model: Any = None

    def update_weights(self, model: Any) -> None:
        """Take the model itself."""
        self.model = model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        stop_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> Generated:
        """One completion per prompt, up to and including a stop token."""
        tokens: list[list[int]] = []
        size = self.batch_size or len(prompts)
        for begin in range(0, len(prompts), size):
            part = slice(begin, begin + size)
            with jax.set_mesh(self.mesh):
                found = generate(
                    self.model,
                    prompts[part],
                    options.max_new_tokens,
                    temperature=options.temperature,
                    top_k=options.top_k,
                    top_p=options.top_p,
                    min_p=options.min_p,
                    repetition_penalty=options.repetition_penalty,
                    seed=seeds[part],
                    drawn=drawn[part],
                    stop_ids=stop_ids,
                    dtype=self.dtype,
                )
            tokens += found.rows()
        return Generated(tokens)


def token_rows(rollouts: Sequence[Rollout], rows: int, length: int, masked: Iterable[int] = ()) -> dict[str, Any]:
    """Prompts with their completions, padded on the right to `length`; labels are -100 but at tokens of the model.

    There are `rows` rows, more than rollouts if some are padding. Those in `masked` have no labels.
    """
    ids, labels = np.zeros((rows, length), np.int32), np.full((rows, length), IGNORE_INDEX, np.int32)
    hidden = set(masked)
    for row, rollout in enumerate(rollouts):
        begin = len(rollout.prompt.ids)
        whole = [*rollout.prompt.ids, *rollout.tokens]
        ids[row, : len(whole)] = whole
        if row not in hidden:
            written = np.where(rollout.mask, rollout.tokens, IGNORE_INDEX)
            labels[row, begin : begin + len(written)] = written
    return {"input_ids": ids, "labels": labels}


# -- advantages ------------------------------------------------------------------------------------------------------


class Advantages(NamedTuple):
    """One advantage per completion, in the order of the completions, and which groups have rewards of no variance."""

    values: np.ndarray
    has_no_variance: np.ndarray


def group_advantages(
    rewards: np.ndarray, generations: int, *, scale: str = "group", leave_one_out: bool = False
) -> Advantages:
    """Advantages (B * G,) of completions from their rewards, as `group_advantages` on torch computes them.

    >>> found = group_advantages(np.array([1.0, 0.0, 2.0, 2.0]), 2, scale="none")
    >>> found.values.tolist(), found.has_no_variance.tolist()
    ([0.5, -0.5, 0.0, 0.0], [False, True])
    """
    groups = rewards.astype(np.float64).reshape(-1, generations)
    scored = ~np.isnan(groups)
    known = np.where(scored, groups, 0.0)
    counts, sums = scored.sum(1, keepdims=True), known.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations = np.where(scored, groups - sums / counts, 0.0)
        spread = np.sqrt(np.square(deviations).sum(1, keepdims=True) / (counts - 1))  # NaN for a group of one
        values = deviations
        if leave_one_out:
            values = groups - (sums - known) / (counts - 1)
        if scale == "group":
            values = values / (spread + _EPSILON)
        elif scale == "batch":
            chosen = (values if leave_one_out else groups)[scored]
            chosen = chosen[~np.isnan(chosen)]
            values = values / ((chosen.std(ddof=1) if len(chosen) > 1 else 0.0) + _EPSILON)
    values = np.nan_to_num(np.where(scored, values, 0.0), nan=0.0)
    return Advantages(values.reshape(-1), np.isclose(np.nan_to_num(spread[:, 0]), 0.0, atol=1e-8))


# -- steps -----------------------------------------------------------------------------------------------------------

Metrics = dict[str, tuple[Any, Any]]


class RolloutStep(JittedStep):
    """A train step that first samples completions, on the host, and then makes one or several updates with them.

    ``sample(state, batch)`` returns the rows of each update, and (sum, weight) pairs to log.
    """

    is_pure = False

    def __init__(
        self,
        sample: Callable[[TrainState, Any], tuple[list[dict[str, np.ndarray]], Metrics]],
        step: Callable[..., Any],
        mesh: Mesh,
        shardings: TrainState,
    ) -> None:
        super().__init__(step, mesh, shardings, train=True)
        self._sample = sample

    def __call__(self, state: TrainState, batch: Any) -> Any:
        updates, metrics = self._sample(state, batch)
        step, outputs = state.step + 1, []
        for rows in updates:
            state, output = super().__call__(state, on_mesh(rows, self.mesh))
            outputs.append(output)
        if len(updates) > 1:  # they count as one step
            state = state.replace(step=step)
        return state, _combined(outputs, metrics)


class RolloutEvalStep(JittedStep):
    """An evaluation by completions, on the host. Like jitted steps it receives batches of one size, with padding."""

    def __init__(self, evaluate: Callable[[TrainState, Any], Metrics], mesh: Mesh) -> None:
        self.mesh = mesh
        self.compilations = Compilations("evaluation")
        self._evaluate = evaluate

    def __call__(self, state: TrainState, batch: Any) -> Any:
        return {"metrics": self._evaluate(state, batch)}


def on_mesh(rows: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, Any]:
    """Rows that every process has, for a jitted function that shards them."""
    if jax.process_count() == 1:
        return dict(rows)  # the function copies them itself
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__) for name, array in rows.items()
    }


def _combined(outputs: Sequence[Mapping[str, Any]], metrics: Metrics) -> dict[str, Any]:
    """The outputs of several updates as that of one step: sums of sums and of weights."""
    pairs = [{"loss": output["loss"], **output["metrics"]} for output in outputs]
    sums = {name: tuple(sum(part) for part in zip(*(each[name] for each in pairs), strict=True)) for name in pairs[0]}
    finite = [output["finite"] for output in outputs]
    return {
        "loss": sums.pop("loss"),
        "metrics": {**sums, **metrics},
        "grad_norm": sum(output["grad_norm"] for output in outputs) / len(outputs),
        "finite": finite[0] if len(finite) == 1 else jnp.all(jnp.stack(finite)),
    }
