"""`SSL`: self-supervised pretraining on images. The methods are in `methods`, `moco` and `dino`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.augment import presets
from trainformer.data.image import ImageDataset, images_in_memory, split_sample
from trainformer.data.labels import is_stream
from trainformer.data.metadata import DatasetInfo
from trainformer.eval.clustering import feature_statistics
from trainformer.eval.retrieval import knn_accuracy
from trainformer.models.backbones import feature_width, has_fixed_size
from trainformer.models.modes import eval_mode
from trainformer.tasks.vision.augment import sample_transform
from trainformer.tasks.vision.base import VisionTask, fingerprint
from trainformer.tasks.vision.checks import image_problems
from trainformer.tasks.vision.classification import ImageClassification
from trainformer.tasks.vision.ssl.dino import DINO, check_crops
from trainformer.tasks.vision.ssl.methods import (
    BYOL,
    MAE,
    EvalBatch,
    EvalTransform,
    Method,
    SimCLR,
    Views,
    ViewTransform,
)
from trainformer.tasks.vision.ssl.moco import MoCo, MoCoV3
from trainformer.tasks.vision.ssl.options import CROPS, DEFAULTS, check_method, paper_settings, resolve
from trainformer.utils.distributed import is_padding

# Images from files are first resized to this factor of the model's size (256 for 224), and views are cropped from that.
_LOAD_SCALE = 8 / 7


class StepFeatures(NamedTuple):
    """Detached features of the latest training step, and their labels."""

    features: Tensor
    labels: Tensor


@dataclass(eq=False)
class SSL(VisionTask):
    """Pretrain a backbone without labels: SimCLR, MoCo (v2, v3), BYOL, DINO or MAE.

    Create it with ``SSL.simclr("resnet50")``, ``SSL.moco(...)``, ``SSL.byol(...)``, ``SSL.dino("vit_small")`` or
    ``SSL.mae("vit_base")``. Options default to the values of the method's paper; an option that the method does not
    have is an error. Labels are optional and never trained on; evaluation uses them for kNN accuracy.

    Views are made on the device with per-image random numbers, by the paper's augmentation. `augment_options` change
    its details (``{"flip": 0.0}``; see `trainformer.data.augment.BatchAugment`). Or pass your own `augment`: a function
    of a batch of images that returns a list of views. Images are uint8, or floats from 0 to 1.

    >>> task = SSL.simclr("resnet10t", image_size=32)
    >>> loss = task.train_step(torch.zeros(4, 3, 32, 32, dtype=torch.uint8))
    >>> task.embed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 512])
    """

    method: str
    backbone: str | nn.Module = "resnet50"
    pretrained: bool = False
    proj_dim: int | None = None
    temperature: float | None = None
    momentum: float | None = None
    _: KW_ONLY
    version: str | None = None  # of MoCo: v2 (default) or v3
    hidden_dim: int | None = None
    momentum_end: float | None = None
    # MoCo
    queue_size: int | None = None
    freeze_patch_embed: bool | None = None
    # DINO
    out_dim: int | None = None
    bottleneck_dim: int | None = None
    norm_last_layer: bool | None = None
    student_temp: float | None = None
    teacher_temp: float | None = None
    warmup_teacher_temp: float | None = None
    warmup_teacher_temp_epochs: int | None = None
    center_momentum: float | None = None
    freeze_last_layer: int | None = None
    koleo: float | None = None
    num_local: int | None = None
    local_size: int | None = None
    global_scale: tuple[float, float] | None = None
    local_scale: tuple[float, float] | None = None
    # MAE
    mask_ratio: float | None = None
    decoder_dim: int | None = None
    decoder_depth: int | None = None
    decoder_heads: int | None = None
    norm_pix: bool | None = None
    # Images and backbone
    augment: Callable[..., Any] | None = None
    augment_options: dict[str, Any] = field(default_factory=dict)
    # Evaluation
    eval_loss: bool = True  # also compute the loss on views of validation images
    knn_k: int = 20

    needs_labels = False
    open_set = True
    prediction_name = "embedding"

    def __post_init__(self) -> None:
        self.method = check_method(self.method, self.version)
        names = {name for options in DEFAULTS.values() for name in options}
        self._options = resolve(self.method, {name: getattr(self, name) for name in names})
        for name, value in self._options.items():
            setattr(self, name, value)
        if self.augment is not None and self.augment_options:
            raise BadArgument("Expected augment or augment_options, received both. Give your augment its options.")
        if self.method == "dino" and self.drop_path_rate is None and isinstance(self.backbone, str):
            self.drop_path_rate = 0.1 if has_fixed_size(self.backbone) else None  # for ViTs, as in the paper
        self._init_task()
        self.step_features: StepFeatures | None = None

    @classmethod
    def simclr(cls, backbone: str | nn.Module = "resnet50", **options: Any) -> SSL:
        """SimCLR: `proj_dim`, `hidden_dim`, `temperature`."""
        return cls("simclr", backbone, **options)

    @classmethod
    def moco(cls, backbone: str | nn.Module = "resnet50", **options: Any) -> SSL:
        """MoCo v2: `proj_dim`, `hidden_dim`, `temperature`, `momentum`, `queue_size`; ``version="v3"`` for v3."""
        return cls("moco", backbone, **options)

    @classmethod
    def byol(cls, backbone: str | nn.Module = "resnet50", **options: Any) -> SSL:
        """BYOL: `proj_dim`, `hidden_dim`, `momentum`."""
        return cls("byol", backbone, **options)

    @classmethod
    def dino(cls, backbone: str | nn.Module = "vit_small_patch16_224", **options: Any) -> SSL:
        """DINO: `out_dim`, `momentum`, `student_temp`, `teacher_temp`, `num_local`, `local_size`, `koleo`, ..."""
        return cls("dino", backbone, **options)

    @classmethod
    def mae(cls, backbone: str | nn.Module = "vit_base_patch16_224", **options: Any) -> SSL:
        """MAE: `mask_ratio`, `decoder_dim`, `decoder_depth`, `decoder_heads`, `norm_pix`."""
        return cls("mae", backbone, **options)

    # -- the model -----------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Build the first layer for the data."""
        self._seen_shape = info.input_shape
        self._build_for(self.in_chans or self._channels_for(info))

    def _build(self, channels: int) -> None:
        # Local crops are smaller than the model's input: a ViT must interpolate its position embeddings.
        by_name = isinstance(self.backbone, str)
        dynamic = self.method == "dino" and self.num_local and by_name and has_fixed_size(self.backbone)  # type: ignore[arg-type]
        options = {"drop_path_rate": self.drop_path_rate, "dynamic_img_size": True if dynamic else None}
        backbone = self._make_backbone(0, channels, **options)
        if self.method == "dino" and self.num_local:
            check_crops(backbone, self.local_size)
        self.model = self._make_method(backbone, self._with_image_size(partial(feature_width, backbone), channels))
        self._initial_fingerprint = fingerprint(self.model)

    def _make_method(self, backbone: nn.Module, width: int) -> Method:
        options = dict(self._options)
        if options.get("hidden_dim", 0) is None:
            options["hidden_dim"] = width
        if self.method == "mae":
            return MAE(backbone, init_encoder=not self.pretrained and self.checkpoint is None, **options)
        if self.method == "moco_v3":
            options["temperature"] = options["temperature"] or (0.2 if hasattr(backbone, "patch_embed") else 1.0)
        if self.method == "dino":
            options = {name: value for name, value in options.items() if name not in CROPS}
        methods: dict[str, Any] = {"simclr": SimCLR, "moco": MoCo, "moco_v3": MoCoV3, "byol": BYOL, "dino": DINO}
        return methods[self.method](backbone, width, **options)

    @property
    def _method(self) -> Method:
        model = self.model
        assert isinstance(model, Method)
        return model

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Optimizer, learning rate, weight decay and schedule of the paper, for the run's batch size."""
        named = isinstance(self.backbone, str)
        is_vit = has_fixed_size(self.backbone) if named else hasattr(self.backbone, "patch_embed")  # type: ignore[arg-type]
        wanted = paper_settings(self.method, is_vit, settings, chosen)
        # Do not split a batch when out of memory if its images are each other's negatives.
        return wanted | ({"oom": "raise"} if self.method in ("simclr", "moco_v3") else {})

    # -- data ----------------------------------------------------------------------------------------------

    def _prepare_pixels(self, dataset: Any, image: Any, train: bool) -> Any:
        geometry = self._geometry(image)
        if not train:
            return self._resized_and_augmented(dataset, image, None, geometry)
        # Views are cropped on the device from the full image: tensors keep their size, files are loaded a bit larger.
        tensors = images_in_memory(dataset, self._channels)
        if tensors is not None:
            return tensors
        return ImageDataset(dataset, self._pipeline(image, train), self._channels)

    def _pipeline(self, image: Any, train: bool) -> Callable[[Any], Any]:
        if not train:
            return super()._pipeline(image, train)
        geometry = self._geometry(image)
        height, width = (round(side * _LOAD_SCALE) for side in geometry.size)
        larger = replace(geometry, size=(height, width), crop_pct=1.0)
        return sample_transform(None, larger, self._crops(image))

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Resize images; float images must be pixels from 0 to 1."""
        prepared = super().prepare_dataset(dataset, train)
        if train and not is_stream(prepared) and len(prepared):
            image, _ = split_sample(prepared[0])
            if isinstance(image, Tensor) and image.is_floating_point() and (image.min() < 0 or image.max() > 1):
                low, high = image.min().item(), image.max().item()
                do = "Leave out the normalisation: the task normalises after augmentation."
                received = f"floats from {low:.3g} to {high:.3g}"
                raise DataError(expected("images as uint8, or as floats from 0 to 1", received, do))
        return prepared

    def get_train_transforms(self) -> nn.Module:
        """Make views on the device."""
        return self._views

    def get_eval_transforms(self) -> nn.Module:
        """Normalise images, with views for the validation loss."""
        return EvalTransform(self._normalize, self._views if self.eval_loss else None)

    @cached_property
    def _views(self) -> ViewTransform:
        patches = None
        if self.method == "mae":
            assert isinstance(self.model, MAE)
            height, width = self._view_size()
            tall, wide = self.model.autoencoder.patch_size
            patches = (height // tall) * (width // wide)
        method, augment = self._method, self.augment or self._preset()
        return ViewTransform(augment, method.fewest_views, method.most_views, patches=patches)

    def _view_size(self) -> tuple[int, int]:
        if self._size is None:
            # A user's DataLoader: keep the size of its images, unless the model takes only one.
            known = self._seen_shape is not None and not self._config.fixed_size
            self._size = tuple(self._seen_shape[-2:]) if known and self._seen_shape else self._config.size  # type: ignore[assignment]
        assert self._size is not None
        return self._size

    def _preset(self) -> Callable[..., Any]:
        size = self._view_size()
        options = {"mean": self._config.mean, "std": self._config.std} | self.augment_options
        if self.method != "dino":
            return getattr(presets, self.method)(size, **options)
        crops = {name: self._options[name] for name in CROPS}
        if crops["local_size"] is None:  # 3/7 of a global crop, as 96 is of 224, in whole patches
            patch = getattr(getattr(self._method.backbone, "patch_embed", None), "patch_size", (1, 1))
            pairs = zip(size, patch, strict=True)
            crops["local_size"] = tuple(max(side, math.ceil(whole * 3 / 7 / side) * side) for whole, side in pairs)
        return presets.dino(size, **crops, **options)

    # -- steps ---------------------------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int) -> None:
        self._method.on_epoch_begin(epoch)

    def train_step(self, batch: Any) -> Loss:
        """The method's loss on views of the images."""
        inputs, labels = _split_batch(batch)
        if self._seen_shape is None and isinstance(inputs, Tensor):
            self._seen_shape = tuple(inputs.shape[1:])  # in a hand-written loop, views have the size of the images
        views = inputs if isinstance(inputs, Views) else self._views(inputs)
        output = self.model(views)
        self._method.collect(output)
        labelled = output.features is not None and isinstance(labels, Tensor)
        rows = 0 if is_padding() else len(labels) if labelled else 0  # padding samples count nowhere
        self.step_features = StepFeatures(output.features[:rows], labels[:rows]) if labelled else None
        return Loss(output.losses.sum(), len(output.losses), metrics=output.metrics)

    def on_step_end(self, step: int, max_steps: int) -> None:
        self._method.on_step_end(step, max_steps)

    def on_step_skipped(self) -> None:
        self._method.on_step_skipped()

    def unused_parameters(self) -> Iterator[nn.Parameter]:
        """DINO's last layer during its first epochs."""
        yield from self._method.unused_parameters()

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """Embeddings of the images, and the loss on views of them (within each evaluation batch)."""
        inputs, labels = _split_batch(batch)
        eval_batch = inputs if isinstance(inputs, EvalBatch) else EvalTransform(self._normalize, None)(inputs)
        rows: dict[str, Any] = {"embedding": self.model(eval_batch.images).float()}
        if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.is_floating_point():
            rows["label"] = labels
        if eval_batch.make_views is not None:
            losses = self.model(eval_batch.make_views()).losses
            rows["loss"] = (losses.sum(), len(losses))
        return rows

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Collapse metrics, and with labels the leave-one-out kNN accuracy."""
        embeddings = rows["embedding"]
        if len(embeddings) < 2:
            return {}
        metrics = dict(feature_statistics(embeddings))
        if "label" in rows:
            k = min(self.knn_k, len(embeddings) - 1)
            metrics["knn_accuracy"] = knn_accuracy(embeddings, rows["label"], k=k, weighted=True)
        return metrics

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Embeddings, and labels if the data has them."""
        inputs, labels = _split_batch(batch)
        images = inputs.images if isinstance(inputs, EvalBatch) else self._normalize.pixels(inputs)
        rows = {"embedding": self.model(images).float()}
        return rows | {"label": labels} if isinstance(labels, Tensor) else rows

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """Return features (N, width) of images: uint8, or floats from 0 to 1, of the model's input size."""
        encoder, device = self._method.encoder, next(self.model.parameters()).device
        with eval_mode(encoder):
            return self.model(self._normalize.pixels(images.to(device)))

    def reconstruct(self, images: Tensor, noise: Tensor | None = None) -> Any:
        """Return (masked, reconstructed, original) images of a masked autoencoder, from 0 to 1."""
        if not isinstance(self.model, MAE):
            raise BadArgument(expected("a masked autoencoder (SSL.mae) to reconstruct with", self.method))
        config, device = self._config, next(self.model.parameters()).device
        mean, std = config.mean, config.std
        if self._channels not in (None, len(mean)):
            mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
        ready = self._normalize.pixels(images.to(device))
        return self.model.autoencoder.reconstruct(ready, noise, mean=mean, std=std)

    # -- the pretrained backbone ---------------------------------------------------------------------------

    def export_module(self, model: nn.Module) -> nn.Module:
        """Deploy the plain backbone."""
        assert isinstance(model, Method)
        return model.encoder

    def backbone_state_dict(self) -> dict[str, Tensor]:
        """Return the weights of the pretrained backbone (for DINO the teacher's), with timm's names."""
        return {name: value.detach().cpu().clone() for name, value in self._method.encoder.state_dict().items()}

    def save_backbone(self, path: str | Path) -> str:
        """Write the pretrained backbone as safetensors: for ``ImageClassification(..., checkpoint=path)``, or timm."""
        from safetensors.torch import save_file

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: value.contiguous() for n, value in self.backbone_state_dict().items()}, path)
        return str(path)

    def linear_probe(self, num_classes: int | None = None, **options: Any) -> ImageClassification:
        """Return a classification task that trains a linear classifier on the frozen backbone."""
        return self.fine_tune(num_classes, **{"freeze_backbone": True, **options})

    def fine_tune(self, num_classes: int | None = None, **options: Any) -> ImageClassification:
        """Return a classification task that starts from a copy of the pretrained backbone."""
        if not isinstance(self.backbone, str):
            raise BadArgument("Expected a backbone by name, received a module. Put a head on your module instead.")
        given = {
            "image_size": self._size,
            "in_chans": self._channels,
            "checkpoint": self.backbone_state_dict(),
            "model_kwargs": dict(self.model_kwargs),
        }
        return ImageClassification(self.backbone, num_classes, False, **{**given, **options})

    def check_batch(self, batch: Any) -> list[str]:
        inputs, _ = _split_batch(batch)
        if not isinstance(inputs, Views):
            return image_problems(inputs, self._channels)
        return image_problems(inputs.images[0], self._channels)


def _split_batch(batch: Any) -> tuple[Any, Any]:
    """Images (or their views) and labels (or None)."""
    return (batch, None) if isinstance(batch, Tensor | Views | EvalBatch) else split_sample(batch)
