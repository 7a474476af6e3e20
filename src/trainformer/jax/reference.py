"""Reference log probabilities of answers, computed once and cached.

They are a column of the dataset, so that no second model is on the devices during training. The cache file lies next to
the tokens and is named after both, so that a resumed run reads exactly the same numbers.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.placement import Placer
from trainformer.backends.jax.sharding import make_sharded
from trainformer.backends.jax.state import TrainState, path_string
from trainformer.backends.jax.step import eval_model
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.numpy_loader import NumpySource
from trainformer.data.text.store import StoreView
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")

_ADAPTER = ("lora_a", "lora_b")
_SAMPLED = 7  # elements along each dimension of a parameter that enter the digest


class ScoredAnswers(StoreView):
    """Tokenised answers, with a `reference` column once `scores` (rows, columns) are set."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.scores: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.store[index]
        return item if self.scores is None else {**item, "reference": self.scores[index]}


class ReferenceDigest:
    """A callback that stores a digest of the reference model in every checkpoint and compares it on resume.

    `what` is the frozen model, and `argument` the one it is passed as.
    """

    def __init__(self, what: str = "reference model", argument: str = "reference_model") -> None:
        self.digest: str | None = None
        self.what, self.argument = what, argument

    def on_train_begin(self, trainer: Any) -> None:
        """Nothing to do, but a callback must handle at least one event."""

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse to resume with another reference: it would silently change the loss."""
        if state.get("reference") != self.digest:
            raise DataError(
                f"Expected the {self.what} that the run started with, received another one. Pass the same model and "
                f"{self.argument}, with the weights they had; a model that was trained since then is a different one."
            )


def params_digest(params: dict[Any, Any], mesh: Mesh) -> str:
    """A digest of sampled elements of each parameter, which changes with every training step.

    Adapters are left out, since the reference is computed without them.
    """

    def sample(leaf: Any) -> Any:
        return leaf[tuple(slice(None, None, -(-size // _SAMPLED)) for size in leaf.shape)]

    chosen = {path_string(path): value for path, value in flatten_dict(params).items() if path[-1] not in _ADAPTER}
    sampled = jax.jit(lambda tree: jax.tree.map(sample, tree), out_shardings=NamedSharding(mesh, PartitionSpec()))
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(jax.device_get(sampled(chosen)).items()):
        digest.update(f"{name} {chosen[name].shape} {value.dtype}\n".encode() + np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


class Scorer:
    """Scores answers with the model of a state, or reads cached scores.

    `log_probs(model, batch)` returns (rows, columns) for a batch made by `collate`. An adapter of the model is
    disabled. `name` is part of the name of the cached file.
    """

    def __init__(
        self,
        state: TrainState,
        mesh: Mesh,
        log_probs: Callable[[Any, Mapping[str, Any]], jax.Array],
        collate: Callable[[list[Any]], Any],
        *,
        rows: int,
        dtype: Any,
        name: str = "reference",
    ) -> None:
        self.name = name
        self.digest = params_digest(state.params, mesh)
        self._state = state
        self._mesh = mesh
        self._log_probs = log_probs
        self._collate = collate
        self._rows = rows
        self._dtype = np.dtype(dtype)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._step = JittedStep(self._scores_of, mesh, shardings, train=False, name="reference")

    def __call__(self, data: ScoredAnswers) -> None:
        tokens: Path = data.store.store.path
        cached = tokens.with_name(f"{tokens.name}-{self.name}-{self.digest}-{self._dtype.name}.npy")
        if (known := _cached_scores(cached, len(data))) is not None:
            data.scores = known
            return
        logger.info("computing reference log probabilities of %s records", f"{len(data):,}")
        source = NumpySource(data, self._rows, collate=self._collate, pad_last=True)
        placed = Placer(self._mesh).feed(source.batches(0), False)
        outputs = [(self._step(self._state, batch.data), batch.size) for batch in placed]
        scores = np.concatenate([np.asarray(values)[:size] for values, size in outputs])
        if jax.process_index() == 0:
            content = io.BytesIO()
            np.save(content, scores)
            write_atomically(cached, content.getvalue() + hashlib.sha256(content.getvalue()).digest())
        data.scores = scores

    def _scores_of(self, state: TrainState, batch: Mapping[str, Any]) -> jax.Array:
        return self._log_probs(without_adapter(eval_model(state, self._dtype)), batch)


def without_adapter(model: Any) -> Any:
    """The model with its LoRA matrices removed, in place."""
    for _, layer in nnx.iter_graph(model):
        if getattr(layer, "lora_a", None) is not None:
            layer.lora_a = layer.lora_b = nnx.data(None)
    return model


def refuse_replaced_layers(trainer: Any, state: TrainState) -> None:
    """Raise if the reference cannot be the model without its adapter, whose layers to save replaced original ones."""
    lora = getattr(state.model, "lora", None)
    if trainer.lora and trainer.lora.folder and lora and lora.modules_to_save:
        raise BadArgument(
            f"Expected a reference_model, since the adapter in {trainer.lora.folder} replaces whole layers "
            f"({', '.join(lora.modules_to_save)}). Pass the model without the adapter."
        )


def load_reference(trainer: Any, given: Any) -> TrainState:
    """The state of a reference model (a folder, a module, or a function that builds one), on the trainer's mesh."""
    if given is trainer.model and isinstance(given, nnx.Module):
        what = "a reference_model other than the trained model"
        raise BadArgument(expected(what, "the same object", "Leave reference_model out."))
    model, key = BaseTrainer.load_model(trainer, given), jax.random.key(trainer.arguments.seed)
    return make_sharded(model, trainer.prepare_model, optax.identity(), key, trainer.mesh)


def _cached_scores(path: Path, count: int) -> np.ndarray | None:
    """The scores in a file that ends with its digest; None if there is none, or a damaged one."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content[:-32]).digest() == content[-32:]:
        scores = np.load(io.BytesIO(content), allow_pickle=False)
        if len(scores) == count:
            return scores
    logger.warning("the cached reference log probabilities in %s are damaged; they are computed again", path)
    return None
