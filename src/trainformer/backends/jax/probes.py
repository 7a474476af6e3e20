"""Classifiers of features that are evaluated during training, on JAX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.sharding import copy_to_mesh

_CHUNK = 256  # queries that are compared with the whole gallery at once


class LinearProbe:
    """A linear classifier trained by SGD with momentum on features of one step after another, normalised as in torch.

    The state is one pytree, replicated over the mesh and updated by a jitted function that donates it. Rows with a
    negative label do not count.
    """

    def __init__(self, lr: float, momentum: float, weight_decay: float, mesh: Mesh) -> None:
        self.classifier: dict[str, Any] | None = None
        self._sharding = NamedSharding(mesh, PartitionSpec())
        update = partial(_update, lr=lr, decay=momentum, weight_decay=weight_decay)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=self._sharding)
        self._steps = 0

    def train(self, features: Any, labels: Any, num_classes: int) -> None:
        """One step on features (N, D) and labels (N,)."""
        if self.classifier is None:
            self.classifier = copy_to_mesh(*self._placed(_new(features.shape[1], num_classes)))
        # A plain mean for the first ten steps, then an exponential one: features differ in scale by orders of
        # magnitude, and running statistics that start at 0 and 1 would be far off for dozens of steps.
        self._steps += 1
        self.classifier = self._update(self.classifier, features, labels, np.float32(max(0.1, 1 / self._steps)))

    def accuracy(self, features: Any, labels: Any) -> float | None:
        """The share of rows that are classified correctly; None before the first step."""
        if self.classifier is None:
            return None
        state = jax.tree.map(on_host, self.classifier)
        rows = (features - state["mean"]) / np.sqrt(state["var"] + _EPSILON)
        return float(np.mean((rows @ state["kernel"] + state["bias"]).argmax(1) == labels))

    def state_dict(self) -> dict[str, Any]:
        if self.classifier is None:
            return {}
        return {"steps": self._steps, "classifier": jax.tree.map(on_host, self.classifier)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"] if state else 0
        self.classifier = copy_to_mesh(*self._placed(state["classifier"])) if state else None

    def _placed(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return arrays, dict.fromkeys(arrays, self._sharding)


def on_host(array: Any) -> np.ndarray:
    """A replicated array, which may be one of several processes, as a NumPy array."""
    return np.array(array if array.is_fully_addressable else array.addressable_data(0))


_EPSILON = 1e-5  # as in torch's BatchNorm


def _new(width: int, classes: int) -> dict[str, Any]:
    trained = {"kernel": np.zeros((width, classes), np.float32), "bias": np.zeros(classes, np.float32)}
    buffers = {f"{name}_momentum": np.zeros_like(value) for name, value in trained.items()}
    return {**trained, **buffers, "mean": np.zeros(width, np.float32), "var": np.ones(width, np.float32)}


def _update(
    state: dict[str, Any], features: Any, labels: Any, share: Any, *, lr: float, decay: float, weight_decay: float
) -> dict[str, Any]:
    """The state after one step. `share` is the weight of this batch in the running statistics."""
    features = features.astype(jnp.float32)
    counted = labels >= 0
    # Steps that the run skips because of a non-finite loss still arrive here and would break the classifier for good.
    finite = jnp.all(jnp.isfinite(features), axis=1) & counted
    features = jnp.where(finite[:, None], features, 0.0)
    rows = jnp.maximum(jnp.sum(counted), 1)
    mean = jnp.sum(features, axis=0) / rows
    var = jnp.sum(jnp.where(counted[:, None], jnp.square(features - mean), 0.0), axis=0) / rows
    inputs = (features - mean) / jnp.sqrt(var + _EPSILON)

    def loss(trained: dict[str, Any]) -> Any:
        chances = jax.nn.log_softmax(inputs @ trained["kernel"] + trained["bias"])
        losses = -jnp.take_along_axis(chances, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(finite, losses, 0.0)) / rows

    trained = {name: state[name] for name in ("kernel", "bias")}
    new = dict(state)
    for name, grad in jax.grad(loss)(trained).items():
        buffer = decay * state[f"{name}_momentum"] + grad + weight_decay * state[name]
        new |= {name: state[name] - lr * buffer, f"{name}_momentum": buffer}
    unbiased = var * rows / jnp.maximum(rows - 1, 1)
    new |= {"mean": (1 - share) * state["mean"] + share * mean, "var": (1 - share) * state["var"] + share * unbiased}
    # Too few rows for batch statistics.
    return jax.tree.map(lambda after, before: jnp.where(rows < 2, before, after), new, state)


def knn_accuracy(queries: Mapping[str, Any], gallery: Mapping[str, Any], k: int, temperature: float) -> float:
    """Accuracy of a vote of the `k` rows of the gallery with the highest cosine similarity to each query.

    A vote counts exp(similarity / `temperature`). Both are dicts of `embedding` and `label`.

    >>> rows = {"embedding": np.array([[1.0, 0.0], [0.0, 1.0]]), "label": np.array([3, 5])}
    >>> knn_accuracy({"embedding": np.array([[2.0, 0.1]]), "label": np.array([3])}, rows, k=1, temperature=0.1)
    1.0
    """
    classes, numbers = np.unique(gallery["label"], return_inverse=True)
    rows, wanted = np.asarray(queries["embedding"], np.float32), np.asarray(queries["label"])
    padded = np.pad(rows, ((0, -len(rows) % _CHUNK), (0, 0)))
    bank = np.asarray(gallery["embedding"], np.float32)
    chunks = padded.reshape(-1, _CHUNK, rows.shape[1])
    found = on_host(_vote(chunks, bank, numbers, k=k, classes=len(classes), temperature=temperature))
    return float(np.mean(classes[found.reshape(-1)[: len(rows)]] == wanted))


@partial(jax.jit, static_argnames=("k", "classes", "temperature"))
def _vote(chunks: Any, bank: Any, numbers: Any, *, k: int, classes: int, temperature: float) -> Any:
    bank = _normalised(bank)

    def vote(rows: Any) -> Any:
        similarities, nearest = jax.lax.top_k(jnp.matmul(_normalised(rows), bank.T, precision="highest"), k)
        weights = jnp.exp((similarities - similarities[:, :1]) / temperature)  # of the nearest: 1, so none overflows
        return jnp.argmax(jnp.sum(jax.nn.one_hot(numbers[nearest], classes) * weights[..., None], axis=1), axis=1)

    return jax.lax.map(vote, chunks)


def _normalised(rows: Any) -> Any:
    return rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
