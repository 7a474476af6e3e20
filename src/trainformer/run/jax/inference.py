"""Evaluation and prediction on JAX: with which weights, and what `predict_step` returns for a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.backends.jax.compilation import DynamicBatchStep
from trainformer.backends.jax.probes import on_host
from trainformer.backends.jax.sharding import batch_sharding
from trainformer.backends.jax.step import VALID, make_predict_step
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.run.logging import eval_progress

if TYPE_CHECKING:
    from trainformer.run.jax.run import JaxRun

IMAGES = ("image", "img", "pixel_values", "images", "x")
LABELS = ("label", "labels", "target", "targets", "y")
"""Names of columns with images and with classes."""
_CHANNELS = (1, 3, 4)


class Inference:
    """Computes the `predict_step` of a run's trainer, which returns one row per sample."""

    def __init__(self, run: JaxRun) -> None:
        self._run = run
        self._step: DynamicBatchStep | None = None

    @contextmanager
    def eval_mode(self, state: Any = None) -> Iterator[None]:
        """Inside, the state of the run is the one to evaluate: the given one, or that of a callback (EMA), if any."""
        backend = self._run.backend
        trained = backend.state
        backend.state = self.state() if state is None else state
        try:
            with backend.run_context():
                yield
        finally:
            backend.state = trained

    def state(self) -> Any:
        """The state to evaluate: one that a callback provides, else the one that is trained."""
        run = self._run
        offers = [callback.inference_model() for callback in run.callbacks if hasattr(callback, "inference_model")]
        return next((state for state in reversed(offers) if state is not None), run.backend.state)

    def rows(self, source: Any, inputs: Callable[[Any], dict[str, np.ndarray]] | None = None) -> dict[str, np.ndarray]:
        """Predictions for a source of padded batches, in input order; `inputs` maps each batch to further columns.

        Every process reads all samples, and gets all rows.
        """
        run, parts = self._run, []
        sharding = batch_sharding(run.backend.mesh)
        with self.eval_mode(), eval_progress(run.callbacks, run.owner, source.batches_per_epoch) as advance:
            for batch in source.batches(0):
                data = run.backend.numeric_columns(batch.data)
                if jax.process_count() > 1:
                    data = {n: jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for n, a in data.items()}
                rows = {name: on_host(values) for name, values in self._predict(data).items()}
                rows |= {} if inputs is None else inputs(batch.data)
                parts.append({name: values[: batch.size] for name, values in rows.items()})
                if advance is not None:
                    advance(batch.size)
        if not parts:
            raise DataError(expected("data with at least one sample to predict for", "none"))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def step_features(self) -> tuple[Any, Any] | None:
        """Features and labels of the latest training batch, still on the devices; rows of padding have the label -1."""
        batch = self._run.backend.batch
        if batch is None or not self.can_predict:
            return None
        with self._run.backend.run_context():
            rows = self._predict(batch.data)
            if "embedding" not in rows or "label" not in rows:
                return None
            valid = batch.data.get(VALID)
            labels = rows["label"] if valid is None else jnp.where(valid, rows["label"], -1)
            return rows["embedding"], labels

    @property
    def can_predict(self) -> bool:
        """Whether the trainer has a `predict_step`."""
        return bool(self._run.owner._overrides("predict_step"))

    def _predict(self, batch: Any) -> dict[str, Any]:
        """The rows of a batch, replicated over the devices."""
        run = self._run
        if not self.can_predict:
            raise BadArgument(
                f"{type(run.owner).__name__} has no predict_step, so there is nothing to predict. Define "
                "predict_step(model, batch) returning a dict of arrays with one row per sample."
            )
        state = run.backend.state
        if self._step is None:
            function = make_predict_step(run.owner.predict_step, compute_dtype=run.owner.dtype)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            size = run.owner.batch_sizes.per_device
            self._step = DynamicBatchStep(
                lambda _: function, run.backend.mesh, shardings, per_device=size, train=False, name="predict step"
            )
        rows: dict[str, Any] = self._step(state, {name: column for name, column in batch.items() if name != VALID})
        return rows

    def embed(self, source: Any) -> dict[str, np.ndarray]:
        """Embeddings (and labels) of a source."""
        rows = self.rows(source)
        if "embedding" not in rows:
            raise BadArgument(
                f"{type(self._run.owner).__name__} gives no embeddings: its predict_step returns {', '.join(rows)}. "
                "Return the embeddings of a batch as 'embedding', and the labels as 'label' where there are any."
            )
        return {**rows, "embedding": rows["embedding"].astype(np.float32)}

    def sample_images(self, source: Any) -> dict[str, np.ndarray]:
        """The images (N, H, W, C) of a source with their class as `true`, if they have one, and their predictions."""
        rows = self.rows(source, _images_and_labels)
        shown = getattr(self._run.owner, "as_pixels", None)
        if shown is not None and rows["image"].dtype != np.uint8:
            rows["image"] = np.clip(np.asarray(shown(rows["image"])), 0, 1)
        return rows


def _images_and_labels(batch: Any) -> dict[str, np.ndarray]:
    images = next((np.asarray(batch[name]) for name in IMAGES if name in batch), None)
    if images is None or images.ndim not in (3, 4):
        received = list(batch) if images is None else f"shape {images.shape}"
        what = f"ImageSamples to get batches with images (N, H, W, C) as {', '.join(IMAGES)}"
        raise DataError(expected(what, received, "Remove it."))
    labels = next((np.asarray(batch[name]) for name in LABELS if name in batch), None)
    has_classes = labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu"
    return {"image": channels_last(images), **({"true": labels} if has_classes else {})}


def channels_last(images: Any) -> Any:
    """Images with the channels last; grayscale images get a channel.

    >>> channels_last(np.zeros((2, 8, 8))).shape, channels_last(np.zeros((2, 3, 8, 8))).shape
    ((2, 8, 8, 1), (2, 8, 8, 3))
    """
    if images.ndim == 3:
        return images[..., None]
    if images.ndim != 4:
        what = "images of shape (rows, height, width, channels)"
        raise DataError(expected(what, tuple(images.shape), "Grayscale images may omit the channels."))
    if images.shape[-1] in _CHANNELS or images.shape[1] not in _CHANNELS:
        return images
    return images.transpose(0, 2, 3, 1)
