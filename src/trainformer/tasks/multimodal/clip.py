"""CLIP, SigLIP and similar models: contrastive training of images and texts, and zero-shot classification.

Samples and batches are in `pairs`, losses and retrieval metrics in `contrastive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.image import load_images
from trainformer.data.labels import is_stream, targets_of
from trainformer.data.multimodal import ImageTextDataset, ImageTextStream, has_captions
from trainformer.data.order import preserved_generators
from trainformer.losses.numerics import l2_normalize
from trainformer.models.modes import eval_mode
from trainformer.tasks.multimodal.contrastive import clip_loss, find_matches, retrieval_metrics, siglip_loss
from trainformer.tasks.multimodal.pairs import EncodedPairs, EncodedStream, PairEncoder, collate, split_pair
from trainformer.tasks.multimodal.processor import PixelAugment, Pixels, ProcessorTask
from trainformer.tasks.vision.batch import Normalize
from trainformer.tasks.vision.checks import image_problems

_MOST_SCANNED_BYTES = 4 << 30  # of shards to scan for their length
_LARGEST_SCALE = 100.0  # as in the paper
# Causal text towers that read off the EOS token: no token attends to padding, so no mask is needed.
_CAUSAL = ("clip",)
# The modules that embed an image, or a text.
TOWERS = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}
_NEEDED = ("get_image_features", "get_text_features", "logit_scale")


@dataclass(eq=False)
class CLIP(ProcessorTask):
    """Train CLIP, SigLIP, Chinese-CLIP or AltCLIP of transformers on image-text pairs, pretrained or from scratch.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `processor` defaults to the one of
    `model_name`. Data comes from `ImageTextDataset`, or any dataset of ``{"image", "text"}`` or ``(image, text)``.
    Images are resized by the model's processor. Training crops `crop_scale` of their area at random, on the device
    (``augment=None`` turns it off; a module for batches of pixels replaces it).

    The negatives of a pair are the other pairs in its micro-batch on all ranks, except those with an equal caption
    (``same_caption="negative"`` includes them, as in the papers). The temperature is learned; its inverse is clamped
    at `max_scale` (None: 100 for CLIP, no limit for SigLIP). ``freeze="image"`` or "text" freezes that tower.

    Evaluation reports recall at `recall_at`, the median rank and the loss in both directions over the whole dataset.
    For images with labels it reports zero-shot accuracy: `classes`, or the class names of the data, are inserted into
    `templates`.
    """

    model_name: Any = "openai/clip-vit-base-patch32"
    _: KW_ONLY
    max_length: int = 77
    augment: str | nn.Module | Callable[[Tensor], Tensor] | None = "crop"
    crop_scale: tuple[float, float] = (0.9, 1.0)
    same_caption: str = "ignore"
    max_scale: float | None = None
    freeze: str | None = None
    recall_at: tuple[int, ...] = (1, 5, 10)
    eval_captions: int = 5
    classes: Sequence[str] | None = None
    templates: str | Sequence[str] = "a photo of a {}."

    kind = "clip"

    def __post_init__(self) -> None:
        self._init_task()
        check_arguments(self)
        self._class_names: Sequence[str] | None = self.classes

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        model = super()._load()
        for name, parameter in model.named_parameters():
            if self.freeze is not None and set(name.split(".")) & set(TOWERS[self.freeze]):
                parameter.requires_grad_(False)
        return model

    def _fit_vocabulary(self, model: Any) -> None:
        """Check that the model is supported and fits the processor."""
        missing = [name for name in _NEEDED if not hasattr(model, name)]
        if missing or model.config.model_type == "siglip2":
            why = f"without {', '.join(missing)}" if missing else "which takes patches of variable-size images"
            raise BadArgument(expected("CLIP, SigLIP or a model like them", f"{type(model).__name__}, {why}"))
        config = model.config.text_config
        if len(self.text_tokenizer) > config.vocab_size:
            received = f"{len(self.text_tokenizer)} tokens"
            raise BadArgument(expected(f"a tokenizer with at most the model's {config.vocab_size} tokens", received))
        self.max_length = min(self.max_length, config.max_position_embeddings)
        if model.config.model_type in _CAUSAL:
            check_end(self.text_tokenizer("a")["input_ids"], config.eos_token_id)

    @property
    def _pads_fully(self) -> bool:
        model: Any = self.model
        return model.config.model_type.startswith("siglip")

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        if not path.startswith("hf:") and not has_captions(path):
            return load_images(path)
        data = ImageTextDataset(path)
        if isinstance(data, ImageTextStream):
            size = sum(Path(shard).stat().st_size for shard in data.shards)
            return data.scan() if size <= _MOST_SCANNED_BYTES else data
        return data

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Encode pixels and captions: one per image in training, up to `eval_captions` otherwise."""
        if not is_stream(dataset) and not len(dataset):
            return dataset
        first = _first(dataset)
        pair = split_pair(first)
        if train and not pair.captions:
            received = list(first) if isinstance(first, Mapping) else type(first).__name__
            raise DataError(expected("images with captions to train on", received, "Pass {'image', 'text'} samples."))
        if not pair.captions and self.classes is None:
            self._class_names = targets_of(dataset).names
        base = dataset
        while hasattr(base, "dataset"):  # subsets
            base = base.dataset
        several = len(pair.captions) > 1 or bool(getattr(base, "has_several_captions", False))
        encoder = self._encoder(0 if train else self.eval_captions if several else 1)
        self._check_pixels(encoder(first)["pixel_values"])
        encoded: Any = (
            EncodedStream(dataset, encoder, shuffle=train) if is_stream(dataset) else EncodedPairs(dataset, encoder)
        )
        encoded.class_names = self._class_names
        return encoded

    def on_eval_begin(self, dataset: Any, val_set: str) -> None:
        """Validation sets may have different classes."""
        if self.classes is None:
            self._class_names = getattr(dataset, "class_names", self._class_names)

    def _encoder(self, captions: int) -> PairEncoder:
        assert self.model is not None  # loading it limits max_length
        return PairEncoder(self._pixels, self.text_tokenizer, self.max_length, captions)

    def _check_pixels(self, pixels: Tensor) -> None:
        model: Any = self.model
        side = model.config.vision_config.image_size
        size = (side, side) if isinstance(side, int) else tuple(side)
        if tuple(pixels.shape[-2:]) != size:
            what = f"a processor that resizes images to the model's {size[0]} x {size[1]} pixels"
            do = "Set size (and crop_size) of processor.image_processor."
            raise BadArgument(expected(what, f"{pixels.shape[-2]} x {pixels.shape[-1]}", do))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        return collate(examples, self.text_tokenizer.pad_token_id, self.max_length, full=self._pads_fully)

    def get_train_transforms(self) -> Any:
        """Random crop and normalisation on the device."""
        if self.augment is None:
            return self._normalize
        if not isinstance(self.augment, str):
            return self.augment
        model: Any = self.model
        side = model.config.vision_config.image_size
        # No flips: captions mention left and right, and text in images.
        return PixelAugment(side, scale=self.crop_scale, flip=0.0, mean=self._pixels.mean, std=self._pixels.std)

    def get_eval_transforms(self) -> nn.Module:
        """Normalisation on the device."""
        return self._normalize

    @cached_property
    def _pixels(self) -> Pixels:
        return Pixels(self.preprocessor.image_processor)

    @cached_property
    def _normalize(self) -> Normalize:
        return Normalize(self._pixels.mean, self._pixels.std)

    # -- steps ---------------------------------------------------------------------------------------------

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Never split a batch when out of memory: its pairs are each other's negatives."""
        return {**super().training_defaults(settings, chosen), "oom": "raise"}

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The contrastive loss of a batch."""
        model: Any = self.model
        images = self._normalize(batch["pixel_values"])  # a no-op on images that are already normalised
        output = model(pixel_values=images, **self._text_inputs(batch))
        captions = batch.get("caption") if self.same_caption == "ignore" else None  # a user's DataLoader may have none
        ids = None if captions is None else captions.flatten()
        pair = output.image_embeds, output.text_embeds
        scale, bias = model.logit_scale, getattr(model, "logit_bias", None)
        if bias is None:
            loss = clip_loss(*pair, scale, ids, reduction="sum")
        else:
            loss = siglip_loss(*pair, scale, bias, ids, reduction="sum")
        return Loss(loss, len(images), metrics={"logit_scale": scale.detach().exp().squeeze()})

    @torch.no_grad()
    def on_step_end(self, step: int, max_steps: int) -> None:
        """Clamp the logit scale, without a device sync."""
        model: Any = self.model
        largest = self.max_scale or (None if hasattr(model, "logit_bias") else _LARGEST_SCALE)
        if largest is not None and model.logit_scale.requires_grad:
            model.logit_scale.clamp_(max=math.log(largest))

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embeddings of images and captions for the dataset-level metrics."""
        rows = {"embedding": self._image_features(self._normalize(batch["pixel_values"]))}
        if "caption" in batch:
            texts = self._text_features(self._text_inputs(batch))
            rows |= {"text_embedding": texts.view(*batch["caption"].shape, -1), "caption": batch["caption"]}
        return rows | ({"label": batch["label"]} if "label" in batch else {})

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embeddings of images, with labels or embeddings of captions."""
        return self.eval_step(batch)

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Retrieval metrics over the whole dataset, or zero-shot accuracy."""
        if "label" in rows:
            return self._zero_shot_metrics(rows["embedding"], rows["label"])
        if "caption" not in rows:
            raise DataError("Expected captions or labels to evaluate on, received only images.")
        model: Any = self.model
        scale, bias = model.logit_scale.detach().exp().item(), getattr(model, "logit_bias", None)
        found = find_matches(rows["embedding"], rows["text_embedding"], rows["caption"])
        return retrieval_metrics(found, self.recall_at, scale, None if bias is None else bias.item())

    def _zero_shot_metrics(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        if self._class_names is None:
            raise BadArgument(
                "Expected the names of the classes to evaluate on images with labels, received data without. Pass "
                "classes=[...] to CLIP."
            )
        classifier = self.zero_shot_classifier(self._class_names).cpu()
        if int(labels.max()) >= len(classifier):
            raise DataError(expected(f"labels of the {len(classifier)} classes", int(labels.max())))
        best = (embeddings @ classifier.T).topk(min(5, len(classifier))).indices
        correct = best == labels.unsqueeze(1)
        return {
            "zero_shot_accuracy": correct[:, 0].double().mean().item(),
            "zero_shot_top5": correct.any(1).double().mean().item(),
        }

    def _text_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        model: Any = self.model
        names = ["input_ids"]
        if model.config.model_type not in _CAUSAL and not self._pads_fully:
            names.append("attention_mask")
        return {name: batch[name].flatten(0, -2) for name in names}

    def _image_features(self, pixels: Tensor) -> Tensor:
        model: Any = self.model
        features = model.get_image_features(pixel_values=pixels)
        return l2_normalize(getattr(features, "pooler_output", features))

    def _text_features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        model: Any = self.model
        features = model.get_text_features(**inputs)
        return l2_normalize(getattr(features, "pooler_output", features))

    # -- inference -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed_images(self, images: Sequence[Any], batch_size: int = 64) -> Tensor:
        """Return normalised embeddings (N, D) of images: PIL images, or uint8 tensors or arrays, of any size."""
        device = next(self.model.parameters()).device
        rows = []
        with eval_mode(self.model):
            for start in range(0, len(images), batch_size):
                batch = torch.stack([self._pixels(image) for image in images[start : start + batch_size]])
                rows.append(self._image_features(self._normalize(batch.to(device))))
        return torch.cat(rows)

    @torch.no_grad()
    def embed_texts(self, texts: str | Sequence[str], batch_size: int = 256) -> Tensor:
        """Return normalised embeddings (N, D) of texts."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        encoder = self._encoder(1)
        blank = torch.zeros(1, dtype=torch.uint8)
        examples = [{"pixel_values": blank, "tokens": [encoder.tokens(text)]} for text in texts]
        with eval_mode(self.model):
            batches = self._batches(examples, batch_size)
            return torch.cat([self._text_features(self._text_inputs(batch)) for batch in batches])

    def zero_shot_classifier(self, classes: Sequence[str], templates: str | Sequence[str] | None = None) -> Tensor:
        """Return one embedding (classes, D) per class: the mean over its prompts from the templates."""
        forms = self.templates if templates is None else templates
        forms = [forms] if isinstance(forms, str) else list(forms)
        rows = self.embed_texts([form.format(name) for name in classes for form in forms])
        return l2_normalize(rows.view(len(classes), len(forms), -1).mean(1))

    def zero_shot(
        self, images: Sequence[Any], classes: Sequence[str], templates: str | Sequence[str] | None = None
    ) -> Tensor:
        """Return zero-shot class probabilities (N, classes) of images."""
        model: Any = self.model
        logits = self.embed_images(images) @ self.zero_shot_classifier(classes, templates).T
        logits = logits * model.logit_scale.detach().exp()
        bias = getattr(model, "logit_bias", None)
        return logits.softmax(1) if bias is None else (logits + bias.detach()).sigmoid()

    # -- checks and config ---------------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        problems = image_problems(batch["pixel_values"], 3)
        captions = batch.get("caption")
        if captions is not None and len(captions) > 1 and len(captions.unique()) == 1:
            problems.append("All captions of the batch are equal: there are no negatives.")
        return problems

    def config_dict(self) -> dict[str, Any]:
        by_name = self.augment is None or isinstance(self.augment, str)
        return super().config_dict() | {"augment": self.augment if by_name else type(self.augment).__name__}


def _first(dataset: Any) -> Any:
    """The first sample, without advancing the random generators."""
    with preserved_generators():
        if not is_stream(dataset):
            return dataset[0]
        first = dataset.first() if hasattr(dataset, "first") else next(iter(dataset), None)
    if first is None:
        raise DataError(expected("a stream of at least one sample", "an empty one"))
    return first


def check_arguments(task: CLIP) -> None:
    """Validate the arguments that do not depend on model and data."""
    if task.same_caption not in ("ignore", "negative"):
        raise BadArgument(expected("same_caption to be 'ignore' or 'negative'", task.same_caption))
    if task.freeze is not None and task.freeze not in TOWERS:
        raise BadArgument(expected("freeze to be 'image', 'text' or None", task.freeze))
    if isinstance(task.augment, str) and task.augment != "crop":
        raise BadArgument(expected("augment to be 'crop', None or a module for batches of images", task.augment))
    if task.max_scale is not None and not 0 < task.max_scale < math.inf:
        raise BadArgument(expected("max_scale to be a positive number or None", task.max_scale))
    counts = (*task.recall_at, task.eval_captions)
    if not task.recall_at or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        what = "recall_at and eval_captions to be whole numbers of at least 1"
        raise BadArgument(expected(what, (task.recall_at, task.eval_captions)))
    forms = [task.templates] if isinstance(task.templates, str) else task.templates
    if not forms or any("{}" not in form for form in forms):
        raise BadArgument(expected("templates with {} in the place of the class", task.templates))
    if isinstance(task.classes, str) or (task.classes is not None and not len(task.classes)):
        raise BadArgument(expected("classes to be a list of names", task.classes))


def check_end(tokens: Sequence[int], end: int | None) -> None:
    """Check the EOS token: CLIP reads a text off at the first one, or (in old configs) at the largest token id."""
    place = tokens.index(max(tokens)) if end == 2 else tokens.index(end) if end in tokens else None
    if place != len(tokens) - 1:
        what = f"a tokenizer that ends texts with the model's EOS token ({end})"
        do = "Let the tokenizer add its end token, and set text_config.eos_token_id to that."
        raise BadArgument(expected(what, f"one that encodes 'a' as {list(tokens)}", do))
