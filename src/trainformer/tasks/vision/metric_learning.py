"""Metric learning: embeddings in which images of one class are close together, including classes unseen in training.

The losses are in `trainformer.losses`, nearest-neighbour search and metrics in `trainformer.eval`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, expected
from trainformer.data.image import split_sample
from trainformer.data.metadata import DatasetInfo
from trainformer.data.order import preserved_generators
from trainformer.eval.clustering import feature_statistics, nmi
from trainformer.eval.neighbours import IndexKind
from trainformer.eval.retrieval import knn_accuracy, retrieval_metrics
from trainformer.losses.metric_learning import is_pair_loss, make_metric_loss
from trainformer.models.embedding import EmbeddingModel, check_neck, make_pooler
from trainformer.models.heads import single_sample_batchnorm
from trainformer.models.modes import eval_mode
from trainformer.tasks.vision.augment import AugmentSpec, check_augment
from trainformer.tasks.vision.base import VisionTask, fingerprint
from trainformer.tasks.vision.batch import feature_spread
from trainformer.tasks.vision.checks import check_counts, label_problems

_MOST_CLUSTERED = 20_000  # k-means over more embeddings takes longer than the rest of the evaluation


@dataclass(eq=False)
class MetricLearning(VisionTask):
    """Learn image embeddings with a timm backbone, or with your own module that returns features.

    `loss` is a classification loss with a learned center per class (`"arcface"`, `"cosface"`, `"subcenter"`,
    `"softmax"`), a pair loss (`"triplet"`, `"contrastive"`, `"supcon"`, `"multisimilarity"`, `"circle"`,
    `"proxy_anchor"`, ...; prefix ``xbm:`` adds a cross-batch memory), or a module called with (embeddings, labels).
    A `miner` selects the pairs. With pair losses, the default sampler puts several images of each class into a batch.
    `margin` and `scale` default to the loss's own values; `loss_options` are passed to its constructor.

    `pooling` (`"gem"`, `"avg"`, `"max"`) replaces the backbone's pooling, `neck="bn"` adds a BNNeck, and
    ``embedding_dim=None`` uses the features directly. Evaluation computes retrieval metrics over the whole validation
    set, whose classes may differ from those of training. If batches have a boolean third element, or a key
    `is_query`, the marked samples are queries and the others are the gallery.

    >>> task = MetricLearning("resnet10t", embedding_dim=64, pretrained=False, num_classes=5)
    >>> task.embed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 64])
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
    augment: AugmentSpec = "basic"
    drop_rate: float | None = None
    recall_at: tuple[int, ...] = (1, 5, 10)
    knn_k: int = 5
    index: IndexKind = "auto"  # nearest-neighbour search: torch, exact or ivf

    class_names: list[str] | None = field(init=False, default=None)

    open_set = True
    prediction_name = "embedding"

    def __post_init__(self) -> None:
        check_augment(self.augment)
        check_counts(self, "embedding_dim", "num_classes", "knn_k", "in_chans")
        _check_recall_at(self.recall_at)
        check_choice("index", self.index, get_args(IndexKind))
        check_neck(self.neck)
        self._init_task()
        self._criterion: nn.Module | None = None
        # Build them once to validate names and options. Two classes suffice: centers of a million would take 2 GB.
        with preserved_generators():
            if self.pooling is not None:
                make_pooler(self.pooling)
            self._make_loss(self.embedding_dim or 8, 2)

    # -- the model -----------------------------------------------------------------------------------------

    def configure(self, info: DatasetInfo) -> None:
        """Build the loss and the first layer for the data."""
        self.num_classes = self._classes_for(info)
        if self.num_classes < 2:
            raise DataError(expected("at least two classes", self.num_classes))
        self.class_names = info.class_names or self.class_names
        self._seen_shape = info.input_shape
        self._build_for(self.in_chans or self._channels_for(info))
        assert self.criterion is not None

    def _build(self, channels: int) -> None:
        # Drop the backbone's pooling if another one replaces it: its parameters would be unused.
        unpooled = {} if self.pooling is None else {"global_pool": ""}
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        backbone = self._make_backbone(0, channels, **rates, **unpooled)
        build = partial(EmbeddingModel, backbone, self.embedding_dim, pooling=self.pooling, neck=self.neck)
        self.model = self._with_image_size(build, channels)
        self._initial_fingerprint = fingerprint(self.model)

    @property
    def criterion(self) -> nn.Module | None:
        """The loss module, built after the model on first use; None while the number of classes is unknown."""
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
        """Parameters of the model and of the loss (class centers)."""
        yield from self.model.parameters()
        if self.criterion is not None:
            yield from self.criterion.parameters()

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Select the best checkpoint by MAP@R; use a PK sampler for pair losses."""
        wanted: dict[str, Any] = {}
        if not {"monitor_metric", "monitor_mode"} & set(chosen):
            wanted = {"monitor_metric": "val/map@r", "monitor_mode": "max"}
        if isinstance(self.loss, str) and is_pair_loss(self.loss):
            # Do not split a batch when out of memory: a pair loss would lose the pairs across the split.
            wanted |= {"sampler": "pk", "oom": "raise"}
        return wanted

    # -- data ----------------------------------------------------------------------------------------------

    def _sample_augment(self, train: bool) -> AugmentSpec:
        return self.augment if train else None

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Loss:
        """Loss of the embeddings, and their spread (see `CollapseMonitor`)."""
        images, labels = self._images_and_labels(batch)
        if self.criterion is None:
            raise BadArgument(
                "Expected the number of classes before the first step, received none. Pass num_classes, or call "
                "configure(info) first (Trainer does)."
            )
        with single_sample_batchnorm(self.model, size=len(images)):
            embeddings = self.model(images)
        metrics = {"feature_std": feature_spread(embeddings)}
        if getattr(self.criterion, "per_sample", False):
            if self.per_sample_losses:
                losses = self.criterion(embeddings, labels, reduction="none")
                return Loss(losses.sum(), len(labels), metrics, losses.detach())
            return Loss(self.criterion(embeddings, labels, reduction="sum"), len(labels), metrics)
        return Loss(self.criterion(embeddings, labels) * len(labels), len(labels), metrics)

    def eval_step(self, batch: Any) -> dict[str, Tensor]:
        """Embeddings and labels for the retrieval metrics."""
        images, labels = self._images_and_labels(batch)
        rows = {"embedding": self.model(images), "label": labels}
        queries = _queries_in(batch)
        return rows if queries is None else rows | {"is_query": queries}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Retrieval metrics over the whole dataset, or of queries against the gallery."""
        embeddings, labels = rows["embedding"].float(), rows["label"]
        queries = rows.get("is_query")
        if queries is None:
            return self.evaluate_retrieval(embeddings, labels)
        queries = _check_query_mask(queries)
        if not bool(queries.any()) or bool(queries.all()):
            received = f"{int(queries.sum())} queries among {len(queries)} samples"
            raise BadArgument(expected("both queries and gallery samples in the validation data", received))
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
        """Compute recall@k, MAP@R, R-precision, kNN accuracy, NMI and feature statistics.

        Each embedding is searched among all others, or in the `gallery`. Arguments can be arrays or tensors.
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
        """Embeddings, and labels if the data has them."""
        images, labels = split_sample(batch)
        rows = {"embedding": self.model(self._normalize(images))}
        return rows | {"label": labels} if isinstance(labels, Tensor) else rows

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """Return embeddings (N, D) of images: uint8 pixels, or normalised floats."""
        model, device = self.model, next(self.model.parameters()).device
        with eval_mode(model):
            return model(self._normalize(images.to(device)))

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        return super().check_batch(batch) + label_problems(split_sample(batch)[1], self.num_classes)

    def config_dict(self) -> dict[str, Any]:
        own = {name: getattr(self.criterion, name, None) for name in ("margin", "scale")}
        return (
            super().config_dict() | {k: v for k, v in own.items() if v is not None} | {"class_names": self.class_names}
        )

    def state_dict(self) -> dict[str, Any]:
        loss = {} if self.criterion is None else self.criterion.state_dict()
        return super().state_dict() | {"loss": loss, "class_names": self.class_names}

    def check_state(self, state: dict[str, Any]) -> None:
        if self.criterion is not None:
            _check_loss_state(self.criterion, state["loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        if self.criterion is not None:
            self.criterion.load_state_dict(state["loss"])
        super().load_state_dict(state)
        self.class_names = state["class_names"]


def _check_recall_at(numbers: Any) -> None:
    fits = isinstance(numbers, tuple | list) and len(numbers) > 0
    if not fits or any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in numbers):
        do = "Pass (1, 5), for instance."
        raise BadArgument(expected("recall_at to be whole numbers of at least 1", numbers, do))


def _check_loss_state(criterion: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise if the state belongs to another loss or another number of classes."""
    own = {name: tuple(value.shape) for name, value in criterion.state_dict().items() if isinstance(value, Tensor)}
    given = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
    if own != given:
        why = "It was saved with another loss, another embedding_dim or another number of classes."
        do = f"{why} To load only the model, pass components=['model']."
        raise DataError(expected(f"the state of a loss with {own or 'no parameters'}", given or "none", do))


def _check_query_mask(marks: Tensor) -> Tensor:
    if marks.ndim != 1 or (marks.dtype != torch.bool and not bool(((marks == 0) | (marks == 1)).all())):
        what = f"{marks.dtype} of shape {tuple(marks.shape)}, from {marks.min().item():g} to {marks.max().item():g}"
        meaning = "is_query to be true or 1 for queries, and false or 0 for the gallery"
        raise DataError(expected(meaning, what, "If it means something else, rename it."))
    return marks.bool()


def _queries_in(batch: Any) -> Tensor | None:
    """The query mask of a batch, if it has one."""
    if isinstance(batch, Mapping):
        marks = batch.get("is_query")
        return marks if marks is None or isinstance(marks, Tensor) else torch.as_tensor(marks)
    # A third element that is not boolean may be anything: a camera, a box, an index.
    third = batch[2] if isinstance(batch, tuple | list) and len(batch) == 3 else None
    return third if isinstance(third, Tensor) and third.dtype == torch.bool else None
