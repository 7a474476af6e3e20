"""Metric learning: embeddings in which images of one class lie close together, also of classes never seen in training.

Owns the task: the model, which loss it is trained with, and what is measured. The losses are in `trainformer.losses`,
the search and the metrics in `trainformer.eval`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import did_you_mean, expected
from trainformer.data.folder import LAYOUT
from trainformer.data.image import split_sample
from trainformer.data.metadata import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.eval.clustering import feature_statistics, nmi
from trainformer.eval.neighbours import IndexKind
from trainformer.eval.retrieval import knn_accuracy, retrieval_metrics
from trainformer.losses.metric_learning import is_pair_loss, make_metric_loss
from trainformer.models.backbones import Weights
from trainformer.models.embedding import EmbeddingModel, check_neck, make_pooler
from trainformer.models.heads import single_sample_batchnorm
from trainformer.models.modes import eval_mode
from trainformer.tasks.vision.augment import Augment, check_augment
from trainformer.tasks.vision.base import VisionTask, check_counts, fingerprint
from trainformer.tasks.vision.checks import label_problems
from trainformer.tasks.vision.features import spread

_MOST_CLUSTERED = 20_000  # k-means over more embeddings takes longer than everything else in an evaluation


@dataclass(eq=False)
class MetricLearning(VisionTask):
    """Learn embeddings of images with a timm backbone, or with a module of your own that gives features.

    `loss` is `"arcface"`, `"cosface"`, `"subcenter"` or `"softmax"`, which compare embeddings with a learned centre of
    each class, or one over pairs: `"triplet"`, `"contrastive"`, `"supcon"`, `"multisimilarity"`, `"circle"`,
    `"proxy_anchor"`, ... (with ``xbm:`` before it: also against earlier batches), or a module called with
    (embeddings, labels). Pairs are chosen by a `miner`. For losses over pairs, batches hold several images of each
    class, unless `Trainer` is given another sampler. `margin` and `scale` are the loss's own unless given;
    `loss_options` go to its constructor.

    `pooling` (`"gem"`, `"avg"`, `"max"`) takes the place of the backbone's, `neck="bn"` is a BNNeck, and
    ``embedding_dim=None`` takes the features as they are. Evaluation looks at the whole validation set at once, whose
    classes need not be those of training; where batches have a third part of true and false, or a key `is_query`, the
    samples marked in it search among the others.

    >>> task = MetricLearning("resnet10t", embedding_dim=64, pretrained=False, num_classes=5)
    >>> task.embed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).norm(dim=1)
    tensor([1., 1.])
    """

    backbone: str | nn.Module = "efficientnet_b0"
    embedding_dim: int | None = 512
    loss: str | nn.Module = "arcface"
    margin: float | None = None
    scale: float | None = None
    pretrained: bool = True
    _: KW_ONLY
    num_classes: int | None = None
    miner: str | nn.Module | None = None
    loss_options: dict[str, Any] = field(default_factory=dict)
    pooling: str | nn.Module | None = None
    neck: str | None = None
    image_size: int | tuple[int, int] | None = None
    augment: Augment = "basic"
    in_chans: int | None = None
    checkpoint: Weights | None = None
    drop_rate: float | None = None
    drop_path_rate: float | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    recall_at: tuple[int, ...] = (1, 5, 10)
    knn_k: int = 5
    index: IndexKind = "auto"  # torch, exact, ivf: how neighbours are searched

    class_names: list[str] | None = field(init=False, default=None)

    open_set = True

    def __post_init__(self) -> None:
        check_augment(self.augment)
        check_counts(self, "embedding_dim", "num_classes", "knn_k", "in_chans")
        _check_recall_at(self.recall_at)
        if self.index not in get_args(IndexKind):
            hint = did_you_mean(str(self.index), get_args(IndexKind))
            raise BadArgument(expected("index to be 'auto', 'torch', 'exact' or 'ivf'", self.index, hint))
        check_neck(self.neck)
        self._begin()
        self._criterion: nn.Module | None = None
        self._seen_shape: tuple[int, ...] | None = None
        # A wrong name or option is found here and now. Two classes will do: the centres of a million take 2 GB.
        with preserved_generators():
            if self.pooling is not None:
                make_pooler(self.pooling)
            self._make_loss(self.embedding_dim or 8, 2)

    # -- the model -----------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Size the loss and the first layer from the data."""
        if info.num_classes is None and self.num_classes is None:
            raise BadArgument(
                "Expected to learn the number of classes from the data, received data that do not say. Pass "
                "num_classes, or data with labels."
            )
        found = info.num_classes or 0
        if self.num_classes is not None and found > self.num_classes:
            words = f"num_classes to be at least {found}, the number of classes in the data"
            raise BadArgument(expected(words, self.num_classes))
        if (self.num_classes or found) < 2:
            raise DataError(
                expected(
                    "at least two classes to tell apart",
                    f"{self.num_classes or found} in the data",
                    f"For a folder: {LAYOUT}",
                )
            )
        self.num_classes = self.num_classes or found
        self.class_names = info.class_names or self.class_names
        self._seen_shape = info.input_shape
        self._build_for(self.in_chans or self._channels_for(info))
        assert self.criterion is not None

    def _build(self, channels: int) -> None:
        if isinstance(self.backbone, nn.Module):
            backbone = self.backbone
            self._look_at(backbone)
        else:
            # Without pooling of its own where another is to take its place: its parameters would never be used.
            unpooled = {} if self.pooling is None else {"global_pool": ""}
            rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
            backbone = self._make_backbone(0, channels, **rates, **unpooled)
        self.model = self._assembled(backbone, channels)
        self._as_built = fingerprint(self.model)

    def _assembled(self, backbone: nn.Module, channels: int) -> EmbeddingModel:
        """The backbone and what comes behind it, whose width a dry run tells.

        A module of the user's may take images of one size only: those of the data, which are given to it as they are
        if they are tensors, or else of the usual size, to which files are brought.
        """
        build = partial(EmbeddingModel, backbone, self.embedding_dim, pooling=self.pooling, neck=self.neck)
        if isinstance(self.backbone, nn.Module) and self._size is None and self._seen_shape:
            with suppress(BadArgument):
                return build(channels=self._seen_shape[0], size=self._seen_shape[1:])
        return build(channels=channels, size=self._size or self._described.size)

    @property
    def criterion(self) -> nn.Module | None:
        """The loss with its parameters, once the number of classes is known. Made after the model, when first used."""
        if self._criterion is None and self.num_classes is not None:
            assert isinstance(self.model, EmbeddingModel)
            self._criterion = self._make_loss(self.model.embedding_dim, self.num_classes)
        return self._criterion

    def _make_loss(self, width: int, num_classes: int) -> nn.Module:
        return make_metric_loss(
            self.loss,
            embedding_dim=width,
            num_classes=num_classes,
            margin=self.margin,
            scale=self.scale,
            miner=self.miner,
            options=self.loss_options,
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the model, and those of the loss: centres of the classes."""
        yield from self.model.parameters()
        if self.criterion is not None:
            yield from self.criterion.parameters()

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """The best checkpoint is that with the best retrieval; losses over pairs need several images of a class."""
        wanted: dict[str, Any] = {}
        if not {"monitor_metric", "monitor_mode"} & set(chosen):
            wanted = {"monitor_metric": "val/map@r", "monitor_mode": "max"}
        if isinstance(self.loss, str) and is_pair_loss(self.loss):
            # A batch is not cut where memory is short: a loss over pairs would lose those across the cut.
            wanted |= {"sampler": "pk", "oom": "raise"}
        return wanted

    # -- data ----------------------------------------------------------------------------------------------

    def _sample_augment(self, train: bool) -> Augment:
        return self.augment if train else None

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Loss:
        """The loss of the embeddings of a batch, and how far they are from a collapse (see `CollapseMonitor`)."""
        images, labels = self._images_and_labels(batch)
        if self.criterion is None:
            raise BadArgument(
                "Expected to know the number of classes, received a step before it. Pass num_classes, or call "
                "configure(info) first (Trainer does)."
            )
        with single_sample_batchnorm(self.model, size=len(images)):
            embeddings = self.model(images)
        metrics = {"feature_std": spread(embeddings)}
        if getattr(self.criterion, "per_sample", False):
            return Loss(self.criterion(embeddings, labels, reduction="sum"), len(labels), metrics)
        return Loss(self.criterion(embeddings, labels) * len(labels), len(labels), metrics)

    def eval_step(self, batch: Any) -> dict[str, Tensor]:
        """Embeddings and labels, for the metrics of the whole set."""
        images, labels = self._images_and_labels(batch)
        rows = {"embedding": self.model(images), "label": labels}
        queries = _queries_in(batch)
        return rows if queries is None else rows | {"is_query": queries}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Retrieval over the whole set, or of the queries among the others."""
        embeddings, labels = rows["embedding"].float(), rows["label"]
        queries = rows.get("is_query")
        if queries is None:
            return self.evaluate_retrieval(embeddings, labels)
        queries = _checked_marks(queries)
        if not bool(queries.any()) or bool(queries.all()):
            raise BadArgument(
                expected(
                    "both queries and others among the validation data",
                    f"{int(queries.sum())} queries among {len(queries)} samples",
                )
            )
        return self.evaluate_retrieval(
            embeddings[queries], labels[queries], gallery=embeddings[~queries], gallery_labels=labels[~queries]
        )

    def evaluate_retrieval(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
    ) -> dict[str, float]:
        """recall@k, MAP@R, R-precision, kNN accuracy, NMI, and how evenly the embeddings are spread.

        Every embedding searches among all others, or among those of a `gallery`. Arrays will do as well as tensors.
        """
        embeddings, labels = torch.as_tensor(embeddings), torch.as_tensor(labels)
        found = {"gallery": gallery, "gallery_labels": gallery_labels}
        others: dict[str, Any] = {name: torch.as_tensor(rows) for name, rows in found.items() if rows is not None}
        metrics = retrieval_metrics(embeddings, labels, recall_at=self.recall_at, index=self.index, **others)
        metrics["knn_accuracy"] = knn_accuracy(embeddings, labels, k=self.knn_k, index=self.index, **others)
        if len(embeddings) <= _MOST_CLUSTERED and len(labels.unique()) > 1:
            metrics["nmi"] = nmi(embeddings, labels)
        return metrics | (feature_statistics(embeddings) if len(embeddings) > 1 else {})

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        """Embeddings, with labels beside them where there are any."""
        images, labels = split_sample(batch)
        rows = {"embedding": self.model(self._normalize(images))}
        return rows | {"label": labels} if isinstance(labels, Tensor) else rows

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """Embeddings (N, D) of images: uint8 pixels, or floats that are normalised already."""
        model, device = self.model, next(self.model.parameters()).device
        with eval_mode(model):
            return model(self._normalize(images.to(device)))

    # -- records -------------------------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        """What is wrong with the images and labels of a batch, in sentences."""
        return super().check_batch(batch) + label_problems(split_sample(batch)[1], self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        """The arguments, what the data decided, and what the loss made of them."""
        own = {name: getattr(self.criterion, name, None) for name in ("margin", "scale")}
        return (
            super().config_dict() | {k: v for k, v in own.items() if v is not None} | {"class_names": self.class_names}
        )

    def state_dict(self) -> dict[str, Any]:
        """The loss's parameters and memory, and what a run that only predicts needs."""
        loss = {} if self.criterion is None else self.criterion.state_dict()
        return super().state_dict() | {"loss": loss, "class_names": self.class_names}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of another loss, or of one with other classes."""
        if self.criterion is not None:
            _check_fits(self.criterion, state["loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.check_state(state)
        if self.criterion is not None:
            self.criterion.load_state_dict(state["loss"])
        super().load_state_dict(state)
        self.class_names = state["class_names"]


def _check_recall_at(numbers: Any) -> None:
    fits = isinstance(numbers, tuple | list) and len(numbers) > 0
    if not fits or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in numbers):
        raise BadArgument(
            expected("recall_at to be whole numbers of at least 1", numbers, "Pass (1, 5), for instance.")
        )


def _check_fits(criterion: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse the state of another loss, or of one with other classes."""
    own = {name: tuple(value.shape) for name, value in criterion.state_dict().items() if isinstance(value, Tensor)}
    given = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    if own != given:
        raise DataError(
            expected(
                f"the state of a loss with {own or 'no parameters'}",
                given or "none",
                "It was saved with another loss, another embedding_dim or another number of classes. To take over the "
                "model alone, load components=['model'].",
            )
        )


def _checked_marks(marks: Tensor) -> Tensor:
    """Which of all validation samples are queries."""
    if marks.ndim != 1 or (marks.dtype != torch.bool and not bool(((marks == 0) | (marks == 1)).all())):
        what = f"{marks.dtype} of shape {tuple(marks.shape)}, from {marks.min().item():g} to {marks.max().item():g}"
        raise DataError(
            expected(
                "is_query to be true or 1 for queries, and false or 0 for others",
                what,
                "If it means something else, call it something else.",
            )
        )
    return marks.bool()


def _queries_in(batch: Any) -> Tensor | None:
    """Which samples of a batch are queries, if it says so."""
    if isinstance(batch, Mapping):
        marks = batch.get("is_query")
        return marks if marks is None or isinstance(marks, Tensor) else torch.as_tensor(marks)
    # A third part may be anything else: a camera, a box, the number of a sample.
    third = batch[2] if isinstance(batch, tuple | list) and len(batch) == 3 else None
    return third if isinstance(third, Tensor) and third.dtype == torch.bool else None
