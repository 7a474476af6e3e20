"""Image classification on JAX: Vision Transformer, ResNet, ConvNeXt, or any flax classifier.

Accepts images and labels in many forms and normalises images on the device. Files are read by `image_files`. The models
themselves are in `models.jax`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import VALID
from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.core.types import Loss
from trainformer.data.builtin import builtin_arrays
from trainformer.data.dataset import ArrayDataset, IndexedDataset
from trainformer.data.labels import is_stream, labels_of
from trainformer.data.numpy_loader import as_data
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.image_files import ImageFiles, load_images
from trainformer.losses.jax.tokens import IGNORE_INDEX, row_sums
from trainformer.models.jax.block import Model
from trainformer.models.jax.convnext import ConvNextConfig
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.resnet import ResNet, ResNetConfig
from trainformer.models.jax.vit import ViTConfig
from trainformer.run.jax.inference import IMAGES, LABELS, channels_last

_PREPROCESSOR = "preprocessor_config.json"
_CONFIGS = (ViTConfig, ResNetConfig, ConvNextConfig)


class ImageClassificationTrainer(BaseTrainer):
    """Trains an image classifier.

    `model` is a `ViTConfig`, `ResNetConfig` or `ConvNextConfig` (`num_labels` is taken from the data), the folder of
    such a model in HuggingFace format (with a new head if its number of classes differs), any module that maps images
    ``(rows, height, width, channels)`` to logits, a function that builds one, or None for a small ViT.

    Datasets are ``{"image": ..., "label": ...}`` of arrays, a tuple of both, a list or dataset of such samples, or the
    name of a built-in sample such as ``"digits"``, an ``.npz`` file of such arrays, or a folder of images with a folder
    for each class, whose images are resized to `image_size`. Integer images are scaled to 0..1 and normalised by `mean`
    and `std` on the device; floating-point images are used as they are.
    """

    masks_padding = True

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        *,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
        image_size: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(label_smoothing, bool) or not 0 <= label_smoothing < 1:
            raise BadArgument(expected("label_smoothing of at least 0 and below 1", label_smoothing))
        if np.any(np.asarray(std, np.float32) <= 0):
            raise BadArgument(expected("std to be positive", std))
        if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
            raise BadArgument(expected("num_classes to be an integer of at least 2", num_classes))
        if image_size is not None:
            check_count("image_size", image_size)
        self.num_classes = num_classes
        self.image_size = image_size
        self.class_names: list[str] | None = None
        self.label_smoothing = label_smoothing
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
        self._image_shape: tuple[int, ...] = ()
        super().__init__(arguments, model, **options)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Samples with an image and a label. Infers the number of classes."""
        data = _image_dataset(dataset, self._file_shape)
        if is_stream(data):
            do = "Pass arrays or a list of samples."
            raise DataError(expected("a dataset with a length", type(data).__name__, do))
        names = getattr(data, "class_names", None)
        if train:
            self.class_names = names
        elif names is not None and self.class_names is not None and names != self.class_names:
            raise DataError(expected(f"the classes of the training data ({', '.join(self.class_names)})", names))
        # From the dataset's metadata, or by reading all samples.
        known = labels_of(data.samples if isinstance(data, _ImageSamples) else data)
        labels = np.asarray([data[i]["label"] for i in range(len(data))] if known is None else known)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            received = f"{labels.dtype} of shape {labels.shape}"
            raise DataError(expected("integer labels, one per image", received))
        if train:
            self.num_classes = self.num_classes or int(labels.max()) + 1
            self._image_shape = channels_last(np.asarray(data[0]["image"])[None]).shape[1:]
        if self.num_classes is not None and labels.size and (labels.min() < 0 or labels.max() >= self.num_classes):
            wrong = int(labels.min() if labels.min() < 0 else labels.max())
            raise DataError(expected(f"labels from 0 to {self.num_classes - 1}", wrong, "Pass num_classes."))
        return data

    @property
    def _file_shape(self) -> tuple[int, ...] | None:
        """Height, width and channels of images that are read from files, as far as they are known."""
        size = None if self.image_size is None else (self.image_size, self.image_size)
        return self._image_shape or size

    def load_model(self, model: Any) -> Any:
        classes = self.num_classes
        if isinstance(model, (str, Path)):
            return self.read_folder(model, num_labels=classes)
        if model is None or isinstance(model, _CONFIGS):
            assert classes is not None, "set by prepare_dataset"
            config: Any = dataclasses.replace(model or _small_vit(self._image_shape), num_labels=classes)
            return lambda rngs: family_of(config.model_type).build(config, rngs=rngs)
        return super().load_model(model)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        return self._loss(model, batch, key, self.label_smoothing)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """Loss and accuracy without dropout and label smoothing."""
        return self._loss(model, batch, None, 0.0)

    def _loss(self, model: Any, batch: Mapping[str, Any], key: Any, smoothing: float) -> Loss:
        images, labels = self.normalize(batch["image"]), batch["label"].astype(jnp.int32)
        options: dict[str, Any] = {"deterministic": key is None, "key": key} if isinstance(model, Model) else {}
        if isinstance(model, ResNet):
            options["valid"] = batch.get(VALID)  # padding rows do not count in batch statistics
        logits = model(images, **options)
        if logits.ndim != 2 or logits.shape[-1] < (self.num_classes or 2):
            what = f"logits (rows, {self.num_classes}) from {type(model).__name__}"
            raise BadArgument(expected(what, tuple(logits.shape), "Build it with one output per class."))
        if VALID in batch:
            labels = jnp.where(batch[VALID], labels, IGNORE_INDEX)
        return row_sums(logits[:, None], labels[:, None], shift=False, label_smoothing=smoothing).total()

    def predict_step(self, model: Any, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Class index, its probability, and the probabilities of all classes; the embedding and the label, if known."""
        images = self.normalize(batch["image"])
        embedding = {"embedding": model.features(images)} if hasattr(model, "features") else {}
        logits = model.classifier(embedding["embedding"]) if embedding else model(images)
        probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        return {
            "prediction": probabilities.argmax(-1),
            "probability": probabilities.max(-1),
            "probabilities": probabilities,
            **embedding,
            **({"label": batch["label"].astype(jnp.int32)} if "label" in batch else {}),
        }

    def normalize(self, images: jax.Array) -> jax.Array:
        """Images as float32 (rows, height, width, channels)."""
        images = channels_last(images)
        if not jnp.issubdtype(images.dtype, jnp.integer):
            return images.astype(jnp.float32)
        return (images.astype(jnp.float32) / 255.0 - self.mean) / self.std

    def predict(self, images: Any) -> np.ndarray:
        """Class probabilities (rows, classes) of a batch of images."""
        with self.eval_mode():
            return np.asarray(self._compiled(self.model_state, jnp.asarray(images)))

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._predict)

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """The `prediction`, its `probability` and all `probabilities` of images, with the name of the `class` if known.

        `data` is what the trainer is trained on, with or without labels: also a folder of images, or one image.
        """
        self.no_options(options)
        samples = _unlabelled(data, self._file_shape)
        ids, rows = getattr(samples, "ids", None) or range(len(samples)), batch_size or self.evaluation_batch_size
        check_count("batch_size", rows)
        for first in range(0, len(samples), rows):
            index = list(range(first, min(first + rows, len(samples))))
            images = np.stack([np.asarray(samples[place]) for place in index])
            padding = np.repeat(images[-1:], rows - len(images), axis=0)  # one shape: nothing is compiled again
            found = self.predict(np.concatenate([images, padding]))[: len(index)]
            chosen = found.argmax(-1)
            names = {} if self.class_names is None else {"class": [self.class_names[number] for number in chosen]}
            columns = {"prediction": chosen, "probability": found.max(-1), "probabilities": found}
            yield {"index": index, "id": [ids[place] for place in index], **names, **columns}

    def recorded_options(self) -> dict[str, Any]:
        numbers = {"mean": self.mean.tolist(), "std": self.std.tolist(), "label_smoothing": self.label_smoothing}
        return {**super().recorded_options(), **numbers, "num_classes": self.num_classes, "image_size": self.image_size}

    def learned(self) -> dict[str, Any]:
        return {"image_shape": list(self._image_shape), "class_names": self.class_names}

    def use_learned(self, record: TrainerRecord) -> None:
        self._image_shape = tuple(record.learned["image_shape"])
        self.class_names = record.learned["class_names"]

    def check_learned(self, learned: dict[str, Any]) -> None:
        """A resumed run must number the classes in the same way."""
        saved, own = learned["class_names"], self.class_names
        if saved is not None and own is not None and saved != own:
            raise DataError(expected(f"training data with the classes of the run ({', '.join(saved)})", own))

    def _predict(self, state: Any, images: jax.Array) -> jax.Array:
        model: Any = state.model
        model.eval()
        return jax.nn.softmax(model(self.normalize(images)).astype(jnp.float32), axis=-1)

    def save_weights(self, folder: Path, state: Any) -> list[str]:
        """The weights; for models of transformers also their image preprocessor config."""
        files = super().save_weights(folder, state)
        config = getattr(getattr(state, "model", None), "config", None)
        if isinstance(config, _CONFIGS):
            height, width = (config.image_size,) * 2 if isinstance(config, ViTConfig) else self._image_shape[:2]
            preprocessor = {
                "image_processor_type": "ViTImageProcessor",
                "do_resize": True,
                "size": {"height": height, "width": width},
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": np.broadcast_to(self.mean, config.num_channels).tolist(),
                "image_std": np.broadcast_to(self.std, config.num_channels).tolist(),
            }
            (folder / _PREPROCESSOR).write_text(json.dumps(preprocessor, indent=2) + "\n")
            files.append(_PREPROCESSOR)
        return files


def _image_dataset(data: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Samples with an `image` and a `label`, whatever the columns are called in the data.

    Images of files are resized to `shape`.
    """
    data = _opened(data, shape, labelled=True)
    if isinstance(data, ImageFiles):
        return data
    data = as_data(data)
    if not isinstance(data, ArrayDataset) or not isinstance(data.arrays, (Mapping, tuple)):
        return data if is_stream(data) else _ImageSamples(data)
    images, labels = _image_and_label(data.arrays)
    return ArrayDataset({"image": images, "label": labels})


def _opened(data: Any, shape: tuple[int, ...] | None, labelled: bool) -> Any:
    """What a path or the name of a built-in sample stands for; other data as they are."""
    if not isinstance(data, (str, Path)):
        return data
    return load_images(Path(data), shape, labelled) if Path(data).exists() else builtin_arrays(str(data))


def _unlabelled(data: Any, shape: tuple[int, ...] | None) -> Any:
    """Images with an index, of data with or without labels."""
    data = _opened(data, shape, labelled=False)
    data = data if isinstance(data, np.ndarray) else as_data(data)
    if is_stream(data):
        raise DataError(expected("images with a length", type(data).__name__, "Pass arrays or a list of samples."))
    return _Images(data)


class _Images(IndexedDataset):
    """The images of any dataset."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.ids = getattr(samples, "ids", None)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> np.ndarray:
        sample = self.samples[index]
        if isinstance(sample, Mapping):
            found = next((sample[name] for name in IMAGES if name in sample), None)
            if found is None:
                raise DataError(expected("samples with an 'image'", list(sample)))
            return np.asarray(found)
        return np.asarray(sample[0] if isinstance(sample, (tuple, list)) else sample)


class _ImageSamples(IndexedDataset):
    """Samples of any dataset as dicts with an `image` and a `label`."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = _image_and_label(self.samples[index])
        return {"image": np.asarray(image), "label": label}


def _image_and_label(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        found = [next((sample[name] for name in names if name in sample), None) for names in (IMAGES, LABELS)]
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
    elif isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    received = list(sample) if isinstance(sample, Mapping) else type(sample).__name__
    raise DataError(expected("samples with an 'image' and a 'label', or tuples of both", received))


def _small_vit(shape: tuple[int, ...]) -> ViTConfig:
    """A ViT with about 0.2 M parameters and 8 x 8 patches per image."""
    side, channels = shape[0], shape[-1]
    if shape[0] != shape[1]:
        raise BadArgument(expected("square images for the default model", shape, "Pass a model."))
    patch = max(size for size in range(1, max(2, side // 8) + 1) if side % size == 0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTConfig(image_size=side, patch_size=patch, num_channels=channels, **sizes)  # type: ignore[arg-type]
