"""What a reference model says of pairs of answers, computed once and kept.

Owns the scores: log probabilities of every answer under a model that is not trained. They are a column of the data, so
that no second model is on the devices in training, and are kept beside the tokens under a name made of both, so that a
run that goes on reads the very same numbers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.precision import cast_floating, compute_in
from trainformer.backends.jax.sharding import create_sharded, init_sharded
from trainformer.backends.jax.state import TrainState, flat, joined
from trainformer.backends.jax.step import JittedStep
from trainformer.core.errors import DataError
from trainformer.data.numpy_loader import NumpySource
from trainformer.data.text.prepare import Pairs
from trainformer.data.text.store import StoreView

logger = logging.getLogger("trainformer")

_ADAPTER = ("lora_a", "lora_b")
_SAMPLED = 7  # elements of each dimension of a parameter by which a model is known again


class ScoredPairs(StoreView):
    """Pairs of answers, each with what the reference says of it once `scores` (pairs, 2) are there."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs)
        self.scores: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self.store[index]
        return pair if self.scores is None else {**pair, "reference": self.scores[index]}


class KnownReference:
    """By what a run knows its reference again. As a callback with a state it is part of every checkpoint."""

    def __init__(self) -> None:
        self.known_by: str | None = None

    def on_train_begin(self, trainer: Any) -> None:
        """Nothing is done; a callback has to listen to something."""

    def state_dict(self) -> dict[str, Any]:
        """A digest of the reference."""
        return {"reference": self.known_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to take back."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on with another reference: the loss would be another one, and nothing would show it."""
        if state.get("reference") != self.known_by:
            raise DataError(
                "Expected the reference model that the run began with, received another one. Pass the same model and "
                "reference_model, with the weights they had; a model that was trained meanwhile is not the same."
            )


def without_training(model: Any, prepare: Callable[[Any], Any], mesh: Mesh, seed: int) -> TrainState:
    """A state on the mesh that no optimizer knows of, from a module or a function that builds one."""
    tx, key = optax.identity(), jax.random.key(seed)
    if isinstance(model, nnx.Module):
        return create_sharded(prepare(model), tx, key, mesh)[0]
    return init_sharded(lambda rngs: prepare(model(rngs)), tx, key, mesh)[0]


def digest_of(params: Mapping[Any, Any], mesh: Mesh) -> str:
    """What tells a model from another, also from itself after a step: some elements of each parameter, bit by bit.

    Adapters do not count: a reference is computed without.
    """
    chosen = {joined(path): value for path, value in flat(params) if path[-1] not in _ADAPTER}
    some = jax.jit(lambda tree: jax.tree.map(_some, tree), out_shardings=NamedSharding(mesh, PartitionSpec()))
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(jax.device_get(some(chosen)).items()):
        digest.update(f"{name} {chosen[name].shape} {value.dtype}\n".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _some(leaf: Any) -> Any:
    return leaf[tuple(slice(None, None, -(-size // _SAMPLED)) for size in leaf.shape)]


class Scorer:
    """Gives pairs their scores under the model of a state: those that were kept, or new ones.

    `log_probs` are those of the answers (rows, 2) of a batch, of `rows` pairs that `collect` puts together. An adapter
    of the model is switched off for it.
    """

    def __init__(
        self,
        state: TrainState,
        mesh: Mesh,
        log_probs: Callable[[Any, Mapping[str, Any]], jax.Array],
        collect: Callable[[list[Any]], Any],
        *,
        rows: int,
        dtype: Any,
    ) -> None:
        self.digest = digest_of(state.params, mesh)
        self._state = state
        self._mesh = mesh
        self._log_probs = log_probs
        self._collect = collect
        self._rows = rows
        self._dtype = np.dtype(dtype)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._step = JittedStep(self._scores_of, mesh, shardings, train=False, name="reference")

    def __call__(self, data: ScoredPairs) -> None:
        """Fill in the scores."""
        tokens: Path = data.store.store.path
        kept = tokens.with_name(f"{tokens.name}-reference-{self.digest}-{self._dtype.name}.npy")
        if kept.is_file():
            data.scores = np.load(kept)
            return
        logger.info("asking the reference about %s pairs", f"{len(data):,}")
        source = NumpySource(data, self._rows, collate=self._collect, pad_last=True)
        placed = Placer(self._mesh).feed(source.batches(0), False)
        found = [(self._step(self._state, batch.data), batch.size) for batch in placed]
        scores = np.concatenate([np.asarray(values)[:size] for values, size in found])
        if jax.process_index() == 0:
            _write(kept, scores)
        data.scores = scores

    def _scores_of(self, state: TrainState, batch: Mapping[str, Any]) -> jax.Array:
        model = state.merge(cast_floating(state.params, self._dtype), state.variables, state.key)
        if self._dtype != np.float32:
            compute_in(model, self._dtype)
        model.eval()
        switch_off(model)
        return self._log_probs(model, batch)


def switch_off(model: nnx.Module) -> None:
    """Take the adapter of a model out of what it computes, in place."""
    for _, layer in nnx.iter_graph(model):
        if getattr(layer, "lora_a", None) is not None:
            layer.lora_a = layer.lora_b = nnx.data(None)


def _write(path: Path, scores: np.ndarray) -> None:
    """All or nothing: a file of this name is whole."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".writing")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, scores)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
