"""Metric learning against pytorch-metric-learning, loops written by hand, and input that is wrong."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainformer import Trainer
from trainformer.core import BadArgument, CheckFailed, DataError
from trainformer.data import DatasetInfo, PKSampler, extract_info, load_images
from trainformer.eval import kmeans
from trainformer.losses import metric_loss_names
from trainformer.models import EmbeddingModel
from trainformer.run import run_of
from trainformer.tasks import SSL, ImageClassification, MetricLearning

SMALL = "test_resnet"  # 0.4 million parameters
CLASSES = 5
MEMORY = ["xbm:contrastive", "xbm:triplet"]


class Plain(nn.Module):
    """A convolutional network without BatchNorm, 6 features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


class Normed(nn.Module):
    """The same with BatchNorm and dropout, which a resumed run must get right too."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


class Kill:
    """Ends a run as a crash does, after so many steps."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if trainer.state.step == self.at:
            raise RuntimeError("power cut")


def samples(n: int = 40, classes: int = CLASSES, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Float images (1, 8, 8), each like its class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 1, 8, 8, dtype=dtype, generator=generator)
    labels = torch.arange(n) % classes
    return centres[labels] + torch.randn(n, 1, 8, 8, dtype=dtype, generator=generator), labels


def pixels(n: int = 40, classes: int = CLASSES, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 1, size, size), dtype=torch.uint8, generator=generator), torch.arange(n) % classes


def settings(**more: Any) -> dict[str, Any]:
    still = {"log": "none", "device": "cpu", "precision": "no", "save_every": None, "resume": None, "num_workers": 0}
    return {**still, "max_steps": 2, "batch_size": 10, **more}


def plain_task(loss: Any = "arcface", **options: Any) -> MetricLearning:
    return MetricLearning(Plain(), options.pop("embedding_dim", 4), loss, **{"augment": None, **options})


def exact_task(loss: str) -> MetricLearning:
    """In double precision."""
    task = MetricLearning(Plain().double(), 4, loss, scale=20.0, num_classes=CLASSES, in_chans=1)
    assert task.criterion is not None
    task.criterion.double()
    return task


def normed_task(loss: str = "arcface", **options: Any) -> MetricLearning:
    """With weights that are always the same: a module is made before a trainer could seed anything."""
    torch.manual_seed(5)
    return MetricLearning(Normed(), 4, loss, augment="crop", **options)


def folder(root: Path, names: str, each: int = 3, size: int = 20) -> Path:
    rng = np.random.default_rng(len(names))
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(each):
            Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def everything(task: MetricLearning) -> dict[str, Tensor]:
    """Weights and buffers of the model and of the loss."""
    assert task.criterion is not None
    parts = {**task.model.state_dict(), **{f"loss.{k}": v for k, v in task.criterion.state_dict().items()}}
    return {name: value.clone() for name, value in parts.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- the loss and its gradients ----------------------------------------------------------------------------


def by_hand(task: MetricLearning) -> tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Parameter], list[nn.Parameter]]:
    """The task's loss from scratch with the loss of pytorch-metric-learning: function, matrices, and biases."""
    model, own = task.model, task.criterion
    assert isinstance(model, EmbeddingModel)
    assert own is not None
    backbone, weight, bias = (copy.deepcopy(x) for x in (model.backbone, model.proj.weight, model.proj.bias))
    sizes = {"num_classes": CLASSES, "embedding_size": weight.shape[0], "scale": own.scale}
    degrees = math.degrees(own.margin)
    other = {
        "arcface": lambda: pml.ArcFaceLoss(margin=degrees, **sizes),
        "cosface": lambda: pml.CosFaceLoss(margin=own.margin, **sizes),
        "subcenter": lambda: pml.SubCenterArcFaceLoss(margin=degrees, sub_centers=own.sub_centers, **sizes),
    }[task.loss]()
    other.W = nn.Parameter(own.weight.detach().T.clone())

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        features = backbone(images) @ weight.T + bias
        return other(features / features.square().sum(1, keepdim=True).sqrt(), labels)

    convolution = backbone.body[0]
    return loss, [convolution.weight, weight, other.W], [convolution.bias, bias]


def results(task: MetricLearning) -> list[Tensor]:
    """In the order of `by_hand`."""
    model: Any = task.model
    convolution = model.backbone.body[0]
    return [convolution.weight, model.proj.weight, task.criterion.weight.T, convolution.bias, model.proj.bias]


@pytest.mark.parametrize("loss", ["arcface", "cosface", "subcenter"])
def test_one_step_is_that_of_the_library(loss: str) -> None:
    task = exact_task(loss)
    images, labels = samples(13, dtype=torch.float64)
    oracle, matrices, biases = by_hand(task)
    want = oracle(images, labels)
    want.backward()
    total, weight, _ = task.train_step((images, labels))
    (total / weight).backward()
    assert weight == 13
    torch.testing.assert_close(total / weight, want, rtol=1e-6, atol=0)
    grads = [p.grad for p in [*matrices, *biases]]
    mine = [p.grad for p in task.model.parameters()] + [task.criterion.weight.grad]
    assert len(mine) == len(grads)
    convolution, projection = task.model.backbone.body[0], task.model.proj
    own = [convolution.weight.grad, projection.weight.grad, task.criterion.weight.grad.T]
    torch.testing.assert_close([*own, convolution.bias.grad, projection.bias.grad], grads, rtol=1e-5, atol=1e-9)
    assert all(g.abs().max() > 1e-3 for g in own)


@pytest.mark.parametrize("loss", ["arcface", "cosface", "subcenter"])
def test_a_run_matches_a_hand_written_loop(loss: str) -> None:
    images, labels = samples(40, dtype=torch.float64)
    task = exact_task(loss)
    loader = DataLoader(TensorDataset(images, labels), batch_size=9)  # the last has 4
    plain = {"optimizer": "sgd", "scheduler": None, "gradient_clip": None, "lr": 0.05, "weight_decay": 0.1}
    trainer = Trainer(task, loader, **settings(max_steps=8, **plain))
    oracle, matrices, biases = by_hand(task)
    start = [p.detach().clone() for p in [*matrices, *biases]]
    optimizer = torch.optim.SGD(
        [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.05, momentum=0.9
    )
    trainer.fit()
    for step in range(8):
        part = slice(step % 5 * 9, step % 5 * 9 + 9)
        optimizer.zero_grad()
        oracle(images[part], labels[part]).backward()
        optimizer.step()
    torch.testing.assert_close(results(task), [p.detach() for p in [*matrices, *biases]], rtol=1e-5, atol=1e-8)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(results(task), start, strict=True))


@pytest.mark.parametrize(
    ("loss", "miner", "oracle"),
    [
        ("triplet", None, lambda x, y: pml.TripletMarginLoss()(x, y)),
        ("supcon", None, lambda x, y: pml.SupConLoss()(x, y)),
        (
            "multisimilarity",
            "multisimilarity",
            lambda x, y: pml.MultiSimilarityLoss()(x, y, miners.MultiSimilarityMiner()(x, y)),
        ),
    ],
)
def test_losses_over_pairs_are_those_of_the_library(loss: str, miner: str | None, oracle: Any) -> None:
    images, labels = samples(40)
    task = plain_task(loss, miner=miner, num_classes=CLASSES, in_chans=1)
    theirs = copy.deepcopy(task.model)
    want = oracle(theirs(images), labels)
    want.backward()
    total, weight, _ = task.train_step((images, labels))
    (total / weight).backward()
    torch.testing.assert_close(total / weight, want)
    for own, other in zip(task.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert want > 0


@pytest.mark.parametrize(("loss", "batch", "accumulate"), [("arcface", 8, 3), ("subcenter", 10, 2), ("arcface", 1, 20)])
def test_accumulation_gives_the_step_of_one_batch(loss: str, batch: int, accumulate: int) -> None:
    data = TensorDataset(*samples(20))
    ends = []
    for size, count in ((20, 1), (batch, accumulate)):
        torch.manual_seed(3)
        task = plain_task(loss, num_classes=CLASSES)
        trainer = Trainer(
            task, DataLoader(data, batch_size=size), accumulation_steps=count, lr=0.01, optimizer="sgd", **settings()
        )
        before = everything(task)
        ends.append(everything(trainer.fit().task))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, before[name]), name


# -- parameters of the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["arcface", "subcenter", "softmax", "proxy_anchor", "softtriple"])
def test_parameters_of_the_loss_are_optimized_and_decayed(loss: str) -> None:
    trainer = Trainer(plain_task(loss), samples(), weight_decay=0.3, **settings())
    own = {id(p) for p in trainer.task.criterion.parameters()}
    groups = trainer.active_optimizer.param_groups
    places = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert own
    assert own <= places.keys()
    assert {places[key] for key in own} == {0.3}
    before = [p.detach().clone() for p in trainer.task.criterion.parameters()]
    trainer.fit()
    changed = [not torch.equal(a, b) for a, b in zip(before, trainer.task.criterion.parameters(), strict=True)]
    assert all(changed)


def test_decay_reaches_the_centres() -> None:
    """Gradients of a cosine are perpendicular to the centres: without decay they can only grow longer."""
    lengths = []
    for decay in (0.0, 5.0):
        trainer = Trainer(plain_task(), samples(), weight_decay=decay, lr=0.01, **settings(max_steps=20)).fit()
        lengths.append(trainer.task.criterion.weight.norm().item())
    assert lengths[1] < 0.8 * lengths[0]


@pytest.mark.parametrize("loss", ["proxy_anchor", MEMORY[-1]])
def test_a_killed_run_resumes_bitwise(loss: str) -> None:
    options = {"loss_options": {"memory_size": 48}} if loss.startswith("xbm") else {}

    def run(name: str, *callbacks: Any) -> Trainer:
        task = normed_task(loss, **options)
        more = settings(max_steps=9, save_every=2, resume="auto", run_dir=name, lr=0.01)
        return Trainer(task, pixels(), val_data=pixels(20), callbacks=list(callbacks), **more)

    whole = run("whole").fit()
    with pytest.raises(RuntimeError, match="power cut"):
        run("cut", Kill(5)).fit()
    again = run("cut")
    assert not same(everything(again.task), everything(whole.task))
    again.fit()
    assert same(everything(again.task), everything(whole.task))
    assert again.evaluate() == whole.evaluate()
    if loss.startswith("xbm"):
        ours, theirs = again.task.criterion.loss, whole.task.criterion.loss
        assert (ours.queue_idx, ours.has_been_filled) == (theirs.queue_idx, theirs.has_been_filled) == (42, True)


@pytest.mark.parametrize("loss", ["arcface", "xbm:contrastive"])
def test_one_file_holds_the_whole_run(loss: str, tmp_path: Path) -> None:
    def run(steps: int) -> Trainer:
        more = settings(max_steps=steps, scheduler=None, lr=0.01)
        return Trainer(normed_task(loss), pixels(), **more)

    whole = run(7).fit()
    run(3).fit().save(tmp_path / "half.pt")
    other = run(7).load(tmp_path / "half.pt")
    assert other.state.step == 3
    assert same(everything(other.fit().task), everything(whole.task))


def test_centres_are_in_the_checkpoint() -> None:
    trainer = Trainer(plain_task(), samples(), **settings(run_dir="run")).fit()
    other = Trainer(plain_task(), samples(seed=1), **settings())
    assert not same(everything(other.task), everything(trainer.task))
    other.load("run")
    assert same(everything(other.task), everything(trainer.task))


def test_a_state_with_other_classes_is_an_error(tmp_path: Path) -> None:
    path = Trainer(plain_task(), samples(), **settings()).fit().save(tmp_path / "five.pt")
    other = Trainer(plain_task(), samples(classes=3), **settings())
    with pytest.raises(DataError, match=r"\(3, 4\).*received .*\(5, 4\).*components=\['model'\]"):
        other.load(path)
    before = other.task.criterion.weight.detach().clone()
    other.load(path, components=["model"])
    assert torch.equal(other.task.criterion.weight, before)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    path = Trainer(plain_task(), samples(), **settings()).fit().save(tmp_path / "five.pt")
    other = Trainer(plain_task(), samples(classes=3), **settings())
    before = everything(other.task)
    with pytest.raises(DataError):
        other.load(path)
    assert same(everything(other.task), before)


# -- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "precision"),
    [
        *(("arcface", "bf16"), ("cosface", "fp16"), ("subcenter", "bf16"), ("arcface", "fp16")),
        *(("triplet", "fp16"), ("supcon", "bf16"), ("proxy_anchor", "fp16")),
    ],
)
def test_half_precision_trains(precision: str, loss: str) -> None:
    images, labels = samples()
    images[:20] = images[0]  # one image with all labels
    trainer = Trainer(plain_task(loss), (images, labels), **settings(precision=precision, max_steps=12, lr=0.01))
    before = everything(trainer.task)
    after = everything(trainer.fit().task)
    assert all(value.isfinite().all() for value in after.values())
    assert all(value.dtype == torch.float32 for value in after.values())
    assert not same(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("loss", ["arcface", "cosface", "subcenter", "softmax"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_are_finite_at_the_poles(loss: str, dtype: torch.dtype, sign: float) -> None:
    """Images that are embedded exactly at the centre of their class, or opposite to it."""
    task = MetricLearning(nn.Flatten(), None, loss, num_classes=3, image_size=2, in_chans=2)
    images = torch.randn(3, 2, 2, 2)
    centres = F.normalize(images.flatten(1)) * sign
    assert task.model.embedding_dim == 8
    repeats = len(task.criterion.weight) // 3
    task.criterion.weight.data = centres.repeat_interleave(repeats, 0)
    images.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        total, _, _ = task.train_step((images, torch.arange(3)))
    (total * 2.0**14).backward()  # a loss scale
    assert images.grad.isfinite().all()
    assert task.criterion.weight.grad.isfinite().all()


def test_a_row_of_zeros_does_not_drown_the_others() -> None:
    """A network of ReLUs without a bias gives zeros for a black image; dividing by 1e-12 gives gradients of 1e12."""
    task = MetricLearning(nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False)), None, num_classes=2, image_size=2)
    task.in_chans = task._channels = 1
    images = torch.randn(4, 1, 2, 2)
    images[0] = 0
    images.requires_grad_()
    total, _, _ = task.train_step((images, torch.tensor([0, 1, 0, 1])))
    total.backward()
    assert total.isfinite()
    assert images.grad.abs().max() < 1e4
    embeddings = task.embed(images.detach())
    torch.testing.assert_close(embeddings.norm(dim=1), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(embeddings, F.normalize(task.model.features(images)).detach())


@pytest.mark.parametrize("loss", ["xbm:ntxent", "xbm:supcon"])
def test_a_batch_that_is_not_finite_does_not_stay_in_the_memory(loss: str) -> None:
    images, labels = samples(40)
    images[13] = float("nan")
    losses: list[float] = []

    class Note:
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            losses.append(float(loss))

    more = settings(max_steps=12, sampler=None, nonfinite="skip")
    Trainer(plain_task(loss), (images, labels), callbacks=[Note()], **more).fit()
    good = [value for value in losses if math.isfinite(value) and value > 0]
    assert len(good) == 9  # 3 epochs of 4 batches, of which one is bad


# -- evaluation --------------------------------------------------------------------------------------------


def library_metrics(rows: dict[str, Tensor], **gallery: Tensor) -> dict[str, float]:
    """What pytorch-metric-learning says of embeddings."""
    calculator = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
        knn_func=CustomKNN(CosineSimilarity()),
    )
    found = calculator.get_accuracy(rows["embedding"], rows["label"], *gallery.values())
    names = {
        "precision_at_1": "val/precision@1",
        "r_precision": "val/r_precision",
        "mean_average_precision_at_r": "val/map@r",
    }
    return {names[name]: value for name, value in found.items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_metrics_are_those_of_the_whole_set_whatever_the_batch(precision: str) -> None:
    results: list[dict[str, float]] = []
    for size in (1, 7, 64):
        more = settings(eval_batch_size=size, precision=precision, lr=0.01)
        trainer = Trainer(normed_task(), samples(), val_data=samples(61, 7, seed=1), **more).fit()
        results.append(trainer.evaluate())
    want = library_metrics(trainer.embed("val"))
    assert {name: results[2][name] for name in want} == pytest.approx(want, abs=1e-6)
    assert 0.05 < want["val/map@r"] < 0.95
    for other in results[:2]:
        assert other == pytest.approx(results[2], abs=1e-5 if precision == "no" else 0.1)


def test_nmi_is_that_of_scikit_learn() -> None:
    trainer = Trainer(plain_task(), samples(), val_data=samples(60, 4, seed=1), **settings(max_steps=30, lr=0.02)).fit()
    rows = trainer.embed("val")
    labels = rows["label"].numpy()
    clusters = kmeans(rows["embedding"], 4).assignment.numpy()
    value = trainer.evaluate()["val/nmi"]
    assert value == pytest.approx(normalized_mutual_info_score(labels, clusters), abs=1e-9)
    theirs = KMeans(4, n_init=10, random_state=0).fit_predict(rows["embedding"].numpy())
    assert value == pytest.approx(normalized_mutual_info_score(labels, theirs), abs=0.1)


class Rows(torch.utils.data.Dataset):
    """Samples as dicts."""

    def __init__(self, images: Tensor, labels: Tensor, queries: Tensor) -> None:
        self.parts = (images, labels, queries)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label, query = (part[index] for part in self.parts)
        return {"image": image, "label": int(label), "is_query": query}


@pytest.mark.parametrize("form", ["tensors", "loader", "dict loader", "numbers in dicts"])
def test_queries_search_among_the_others(form: str) -> None:
    images, labels = samples(50, 6, seed=1)
    queries = torch.rand(50) < 0.3
    data: Any = TensorDataset(images, labels, queries)
    if form == "loader":
        data = DataLoader(data, batch_size=7)
    elif form != "tensors":
        marks = queries.long() if "numbers" in form else queries
        data = DataLoader(Rows(images, labels, marks), batch_size=7)
    trainer = Trainer(plain_task(), samples(), val_data=data, **settings())
    metrics = trainer.evaluate()
    rows = trainer.embed((images, labels))
    chosen = {name: value[queries] for name, value in rows.items()}
    others = {"gallery": rows["embedding"][~queries], "labels": rows["label"][~queries]}
    want = library_metrics(chosen, **others)
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-6)
    assert metrics["val/map@r"] != pytest.approx(library_metrics(rows)["val/map@r"], abs=1e-3)
    nearest = (chosen["embedding"] @ rows["embedding"][~queries].T).topk(5).indices
    hits = (others["labels"][nearest] == chosen["label"][:, None]).any(1)
    assert metrics["val/recall@5"] == pytest.approx(hits.float().mean().item())


@pytest.mark.parametrize("form", ["pixels", "dicts"])
def test_queries_are_known_for_data_that_is_prepared(form: str) -> None:
    images, labels = pixels(40)
    queries = torch.arange(40) < 12
    data: Any = TensorDataset(images, labels, queries)
    if form == "dicts":
        data = Rows(images, labels, queries)
    trainer = Trainer(plain_task(), pixels(), val_data=data, **settings())
    rows = trainer.embed((images, labels))
    chosen = {name: value[queries] for name, value in rows.items()}
    want = library_metrics(chosen, gallery=rows["embedding"][~queries], labels=rows["label"][~queries])
    metrics = trainer.evaluate()
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("marked", [0, 30])
def test_all_or_no_queries_are_refused(marked: int) -> None:
    data = TensorDataset(*samples(30), torch.arange(30) < marked)
    trainer = Trainer(plain_task(), samples(), val_data=data, **settings())
    with pytest.raises(BadArgument, match=rf"both queries and gallery samples.*{marked} queries among 30"):
        trainer.evaluate()


def test_one_query_is_enough() -> None:
    trainer = Trainer(
        plain_task(), samples(), val_data=TensorDataset(*samples(30), torch.arange(30) == 4), **settings()
    )
    metrics = trainer.evaluate()
    assert metrics["val/queries_without_match"] == 0
    assert metrics["val/recall@10"] in (0.0, 1.0)


@pytest.mark.parametrize("third", [torch.arange(30), torch.arange(30) % 2, torch.rand(30), torch.zeros(30, 4)])
def test_a_third_part_that_is_something_else_is_not_taken_for_queries(third: Tensor) -> None:
    """Cameras, numbers of samples, boxes: whatever is not 0 would be a query."""
    data = samples(30, seed=1)
    trainer = Trainer(plain_task(), samples(), val_data=TensorDataset(*data, third), **settings())
    assert trainer.evaluate() == trainer.evaluate(data)
    named = Trainer(plain_task(), samples(), val_data=DataLoader(Rows(*data, third), batch_size=7), **settings())
    if third.ndim == 2 or third.max() > 1 or third.is_floating_point():
        with pytest.raises(DataError, match="is_query to be true or 1 for queries"):
            named.evaluate()
    else:
        assert named.evaluate() != trainer.evaluate()


def test_classes_of_one_image_are_left_out_of_the_means() -> None:
    images, labels = samples(24, 4, seed=1)
    labels[:3] = torch.tensor([10, 11, 12])
    trainer = Trainer(plain_task(), samples(), val_data=(images, labels), **settings())
    metrics = trainer.evaluate()
    assert metrics["val/queries_without_match"] == 3
    rows = trainer.embed("val")
    similar = rows["embedding"] @ rows["embedding"].T - 2 * torch.eye(24)
    right = rows["label"][similar.argmax(1)] == rows["label"]
    assert metrics["val/precision@1"] == pytest.approx(right[3:].float().mean().item())
    with pytest.raises(DataError, match="Every label occurs once"):
        trainer.evaluate((images, torch.arange(24)))


def test_classes_that_training_never_saw(tmp_path: Path) -> None:
    train, val = folder(tmp_path / "train", "abc", 4), folder(tmp_path / "val", "xyzvw", 3)
    task = MetricLearning(SMALL, 8, pretrained=False, image_size=32)
    trainer = Trainer(task, str(train), val_data=str(val), **settings(batch_size=4, max_steps=None, epochs=1)).fit()
    assert task.num_classes == 3
    assert task.class_names == ["a", "b", "c"]
    rows = trainer.embed("val")
    assert rows["label"].tolist() == [i // 3 for i in range(15)]
    want = library_metrics(rows)
    metrics = trainer.evaluate()
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-6)
    assert trainer.best_metrics["val/map@r"] == pytest.approx(metrics["val/map@r"])


def test_some_of_the_classes_in_a_folder_of_torchvision(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    train, val = folder(tmp_path / "train", "abc"), folder(tmp_path / "val", "bc")
    task = MetricLearning(SMALL, 8, pretrained=False, image_size=32)
    trainer = Trainer(task, str(train), val_data=ImageFolder(str(val)), **settings(batch_size=4))
    assert trainer.evaluate()["val/recall@10"] == 1.0


def test_the_usage_of_the_documents(tmp_path: Path) -> None:
    train, val = folder(tmp_path / "sop", "abcd", 2), folder(tmp_path / "sop_val", "ef", 2)
    task = MetricLearning("efficientnet_b0", loss="arcface", margin=0.5, pretrained=False, image_size=32)
    more = settings(max_steps=None, epochs=1, batch_size=3, lr=1e-3)
    trainer = Trainer(task=task, data=str(train), val_data=str(val), **more).fit()  # batches of 3, 3 and 2
    assert trainer.state.step == 3
    assert task.model.embedding_dim == 512
    assert (task.criterion.margin, task.criterion.scale) == (0.5, 64.0)
    rows = trainer.embed("val")
    metrics = task.evaluate_retrieval(rows["embedding"], rows["label"])
    assert {f"val/{name}": value for name, value in metrics.items()} == pytest.approx(trainer.evaluate())
    assert {"recall@1", "map@r", "r_precision", "knn_accuracy", "nmi"} <= metrics.keys()
    arrays = [rows["embedding"].numpy(), rows["label"].numpy()]
    assert task.evaluate_retrieval(*arrays) == metrics


def test_the_index_is_used_for_every_search(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    from trainformer.eval import retrieval

    class Noted(retrieval.NeighbourIndex):
        def __init__(self, gallery: Tensor, index: Any = "auto", **more: Any) -> None:
            super().__init__(gallery, index, **more)
            used.append(self.kind)

    monkeypatch.setattr(retrieval, "NeighbourIndex", Noted)
    images, labels = samples()
    exact, plain = plain_task(index="exact", num_classes=5), plain_task(num_classes=5)
    assert exact.evaluate_retrieval(images.flatten(1), labels) == pytest.approx(
        plain.evaluate_retrieval(images.flatten(1), labels)
    )
    assert used == ["exact", "exact", "torch", "torch"]


def test_an_explicit_gallery() -> None:
    images, labels = samples(20)
    rows, numbers = images.flatten(1).numpy(), labels.numpy()
    metrics = plain_task().evaluate_retrieval(rows[:5], numbers[:5], gallery=rows[:15], gallery_labels=numbers[:15])
    assert metrics["recall@1"] == 1.0  # each finds itself
    with pytest.raises(BadArgument, match="gallery and gallery_labels together"):
        plain_task().evaluate_retrieval(rows, numbers, gallery=rows)


# -- losses over pairs and their batches -------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*metric_loss_names(), *MEMORY])
def test_every_loss_trains(loss: str) -> None:
    trainer = Trainer(MetricLearning(Normed(), 4, loss, augment="crop"), pixels(), val_data=pixels(20), **settings())
    before = everything(trainer.task)
    report = trainer.check()
    assert report.ok
    assert not [finding for finding in report.warnings if "gradient" in finding.question]
    assert same(everything(trainer.task), before)
    trainer.fit()
    after = everything(trainer.task)
    assert all(value.isfinite().all() for value in after.values())
    names = [name for name, _ in trainer.task.model.named_parameters()]
    assert all(not torch.equal(before[name], after[name]) for name in names)


@pytest.mark.parametrize("miner", ["multisimilarity", "batch_hard", "semihard", "angular"])
def test_miners_train(miner: str) -> None:
    trainer = Trainer(plain_task("triplet", miner=miner), samples(), **settings())
    before = everything(trainer.task)
    assert not same(everything(trainer.fit().task), before)


@pytest.mark.parametrize("loss", ["triplet", "xbm:contrastive", "Multi-Similarity"])
def test_batches_for_pairs_hold_several_images_of_each_class(loss: str) -> None:
    seen: list[Tensor] = []
    task = plain_task(loss)
    trainer = Trainer(task, samples(60, 6), **settings(max_steps=6, batch_size=12))
    step = task.train_step

    def noting(batch: Any) -> Any:
        seen.append(batch[1])
        return step(batch)

    task.train_step = noting  # type: ignore[method-assign]
    trainer.fit()
    for labels in seen:
        _, counts = labels.unique(return_counts=True)
        assert counts.tolist() == [4, 4, 4]
    assert len(torch.cat(seen).unique()) == 6


def test_a_chosen_sampler_is_kept() -> None:
    for chosen in (None, "pk:2", "balanced"):
        assert Trainer(plain_task("triplet"), samples(), sampler=chosen, **settings()).sampler == chosen
    assert Trainer(plain_task("arcface"), samples(), **settings()).sampler is None
    own = Trainer(plain_task("triplet"), samples(), sampler=lambda d: PKSampler(d, 5, 2), **settings())
    own.fit()


def pk_of(trainer: Trainer) -> tuple[int, int]:
    sampler = run_of(trainer).train_source.sampler
    return sampler.p, sampler.k


@pytest.mark.parametrize(
    ("classes", "batch_size"),
    [(3, 64), (2, 64), (10, 36), (5, 10), (5, 6), (5, 4)],
)
def test_batches_for_pairs_adapt_to_the_data(classes: int, batch_size: int) -> None:
    """At least two classes and at least two images of each: a batch of one class teaches nothing about others."""
    trainer = Trainer(plain_task("triplet"), samples(60, classes), **settings(batch_size=batch_size))
    p, k = pk_of(trainer)
    assert 2 <= p <= classes
    assert k >= 2
    before = everything(trainer.task)
    assert not same(everything(trainer.fit().task), before)


@pytest.mark.parametrize(("classes", "batch_size"), [(10, 5), (10, 37), (2, 9)])
def test_a_batch_size_that_cannot_be_divided_is_refused(classes: int, batch_size: int) -> None:
    with pytest.raises(BadArgument, match="batch_size"):
        Trainer(plain_task("triplet"), samples(60, classes), **settings(batch_size=batch_size))


def test_small_classes_and_small_sets_for_pairs() -> None:
    images, labels = samples(9, 3)
    labels[:] = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])
    trainer = Trainer(plain_task("supcon"), (images, labels), **settings(batch_size=12)).fit()
    assert trainer.state.step == 2
    assert pk_of(trainer) == (3, 4)


def test_a_loader_of_ones_own_needs_no_sampler() -> None:
    loader = DataLoader(TensorDataset(*samples()), batch_size=10)
    trainer = Trainer(plain_task("triplet"), loader, **settings()).fit()
    assert trainer.state.step == 2
    with pytest.raises(BadArgument, match="no sampler"):
        Trainer(plain_task("triplet"), loader, sampler="pk", **settings())


@pytest.mark.parametrize("loss", ["arcface", "triplet", "supcon", "softtriple"])
@pytest.mark.parametrize("neck", [None, "bn"])
def test_a_last_batch_of_one_sample(loss: str, neck: str | None) -> None:
    task = MetricLearning(Normed(), 4, loss, neck=neck)
    more = settings(max_steps=None, epochs=1, sampler=None)
    trainer = Trainer(task, samples(21), **more).fit()
    assert trainer.state.step == 3
    assert all(value.isfinite().all() for value in everything(task).values())
    assert all(part.training for part in task.model.modules())


def test_a_module_of_ones_own_is_the_loss() -> None:
    own = pml.ArcFaceLoss(CLASSES, 4)
    trainer = Trainer(plain_task(own), samples(), **settings())
    before = own.W.detach().clone()
    names = [name for name in run_of(trainer).backend.names.values() if name.endswith("W")]
    assert len(names) == 1
    trainer.fit()
    assert not torch.equal(own.W, before)
    state = trainer.task.state_dict()["loss"]
    assert any(torch.equal(value, own.W) for value in state.values())


# -- the model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backbone", "width", "pooling"),
    [
        (SMALL, 96, "gem"),
        (SMALL, 96, "avg"),
        (SMALL, 96, "max"),
        ("test_vit", 64, "avg"),
        ("test_vit", 64, "gem"),
        ("test_mambaout", 256, "max"),
        ("mobilenetv3_small_050", 1024, "gem"),
    ],
)
def test_pooling_is_over_positions(backbone: str, width: int, pooling: str) -> None:
    """mambaout, like Swin, has its channels last; a ViT has a class token; mobilenet is wider than it says."""
    task = MetricLearning(backbone, None, pretrained=False, pooling=pooling, num_classes=3)
    assert task.model.embedding_dim == width
    plain = timm.create_model(backbone, num_classes=0, global_pool="", pretrained=False).eval()
    plain.load_state_dict(task.model.backbone.state_dict())
    images = torch.randn(2, 3, *task._config.size)
    maps = plain(images)
    if backbone == "test_mambaout":
        rows = maps.flatten(1, 2)
    else:
        rows = maps[:, 1:] if maps.ndim == 3 else maps.flatten(2).transpose(1, 2)
    want = {
        "avg": lambda: rows.mean(1),
        "max": lambda: rows.amax(1),
        "gem": lambda: rows.clamp(min=1e-6).pow(3).mean(1).pow(1 / 3),
    }[pooling]()
    torch.testing.assert_close(task.embed(images), F.normalize(want).detach(), rtol=1e-4, atol=1e-5)


def test_class_tokens_that_a_model_does_not_count_are_no_positions() -> None:
    options = {"embed_dim": 32, "depth": 1, "num_heads": 2, "img_size": 32}
    task = MetricLearning("cait_xxs24_224", None, pretrained=False, pooling="avg", model_kwargs=options)
    images = torch.randn(2, 3, 32, 32)
    tokens = task.model.backbone.eval()(images)
    assert tokens.shape == (2, 5, 32)
    torch.testing.assert_close(task.embed(images), F.normalize(tokens[:, 1:].mean(1)).detach())


@pytest.mark.parametrize(("backbone", "pooling"), [(SMALL, "gem"), ("test_vit", None), ("test_mambaout", "gem")])
def test_every_option_of_the_model_trains(backbone: str, pooling: str | None) -> None:
    for dim, neck in ((None, None), (8, "bn")):
        task = MetricLearning(backbone, dim, pretrained=False, pooling=pooling, neck=neck, image_size=32)
        trainer = Trainer(task, pixels(8, 2), **settings(max_steps=1, batch_size=4))
        assert trainer.check().ok
        assert trainer.fit().embed("train")["embedding"].norm(dim=1).allclose(torch.ones(8))


def test_the_neck_keeps_its_shift_out_of_the_optimizer() -> None:
    trainer = Trainer(plain_task(neck="bn"), samples(), **settings())
    assert "neck.weight" in run_of(trainer).backend.names.values()
    assert "neck.bias" not in run_of(trainer).backend.names.values()
    trainer.fit()
    assert torch.equal(trainer.task.model.neck.bias, torch.zeros(4))


@pytest.mark.parametrize("data", ["floats", "pixels", "digits"])
def test_a_module_may_take_one_size_only(data: str) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    images: Any = {"floats": samples(), "pixels": pixels(), "digits": "digits"}[data]
    trainer = Trainer(MetricLearning(module, 4, augment=None), images, **settings()).fit()
    assert trainer.task.model.proj.in_features == 12


def test_a_module_for_files_gets_the_usual_size(tmp_path: Path) -> None:
    module = nn.Sequential(nn.AvgPool2d(28), nn.Flatten(), nn.Linear(192, 6))
    trainer = Trainer(MetricLearning(module, 4), str(folder(tmp_path, "ab")), **settings(max_steps=1)).fit()
    assert trainer.task.model.proj.in_features == 6


def test_a_module_for_other_images_is_an_error() -> None:
    task = MetricLearning(nn.Sequential(nn.Flatten(), nn.Linear(7, 4)), 4)
    with pytest.raises(BadArgument, match=r"takes images of shape \(3, 224, 224\).*cannot be multiplied.*image_size"):
        _ = task.model


def test_weights_of_other_runs(tmp_path: Path) -> None:
    ssl = SSL.simclr("test_vit", hidden_dim=16, proj_dim=8, image_size=32)
    Trainer(ssl, pixels(16, size=32), **settings(max_steps=1, batch_size=8)).fit()
    ssl.save_backbone(tmp_path / "backbone.safetensors")
    task = MetricLearning("test_vit", 8, checkpoint=tmp_path / "backbone.safetensors", image_size=32, in_chans=1)
    theirs = timm.create_model("test_vit", num_classes=0, img_size=32, in_chans=1)
    from safetensors.torch import load_file

    theirs.load_state_dict(load_file(tmp_path / "backbone.safetensors"))
    assert same(task.model.backbone.state_dict(), theirs.state_dict())
    run = Trainer(task, pixels(16, size=32), **settings(max_steps=1, run_dir="run", batch_size=8)).fit()
    saved = next(Path("run/checkpoints").glob("step_*"))
    trained = run.task.model.backbone.state_dict()
    assert not same(trained, theirs.state_dict())
    again = MetricLearning("test_vit", 8, pooling="gem", checkpoint=saved, image_size=32, in_chans=1)
    assert same(again.model.backbone.state_dict(), trained)
    classifier = ImageClassification("test_vit", 3, checkpoint=saved, image_size=32, in_chans=1)
    assert torch.equal(classifier.model.pos_embed, trained["pos_embed"])


@pytest.mark.parametrize(
    "format",
    ["torchscript", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch.export", "onnx"))],
)
def test_export(format: str, tmp_path: Path) -> None:
    if format == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        pytest.skip("needs onnx, onnxscript and onnxruntime")
    trainer = Trainer(MetricLearning(Normed(), 4, neck="bn", augment=None), pixels(), **settings(max_steps=1)).fit()
    path = trainer.export(tmp_path / "model", format)  # reads the file back and compares
    if format == "torchscript":
        images = torch.randn(3, 1, 8, 8)
        torch.testing.assert_close(torch.jit.load(path)(images), trainer.task.embed(images))


def test_equal_seeds_begin_with_equal_weights() -> None:
    ends = []
    for number in range(3):
        torch.manual_seed(100 + number)
        task = MetricLearning(SMALL, 8, pretrained=False)
        trainer = Trainer(task, pixels(8, 2), seed=7 if number < 2 else 8, **settings(batch_size=4))
        ends.append(everything(trainer.task))
    assert same(ends[0], ends[1])
    for name in ("proj.weight", "backbone.conv1.0.weight", "loss.weight"):
        assert name not in ends[0] or not torch.equal(ends[0][name], ends[2][name])
    assert not torch.equal(ends[0]["loss.weight"], ends[2]["loss.weight"])


def test_making_a_task_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    MetricLearning(SMALL, loss="arcface", pooling="gem", num_classes=1000)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_was_touched_is_never_built_again() -> None:
    info = DatasetInfo(num_classes=3, input_shape=(1, 32, 32))
    task = MetricLearning(SMALL, 8, pretrained=False)
    first = task.model
    assert next(first.parameters()).shape[1] == 3
    task.configure(info)
    assert next(task.model.parameters()).shape[1] == 1  # gray data, untouched weights
    touched = MetricLearning(SMALL, 8, pretrained=False)
    with torch.no_grad():
        touched.model.proj.weight.mul_(2)
    kept = touched.model
    touched.configure(info)
    assert touched.model is kept
    centres = touched.criterion
    touched.configure(info)
    assert touched.criterion is centres


def test_gray_images_get_a_gray_first_layer() -> None:
    task = MetricLearning(SMALL, 8, pretrained=False, augment=None)
    trainer = Trainer(task, "digits", **settings(max_steps=1, batch_size=4)).fit()
    assert task.input_shape == (1, 32, 32)
    assert next(task.model.parameters()).shape[1] == 1
    assert trainer.embed("train", max_samples=5)["embedding"].shape == (5, 8)


def test_embedding_leaves_the_mode_and_takes_pixels_or_floats() -> None:
    task = MetricLearning(SMALL, 8, pretrained=False, num_classes=2)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    task.model.train()
    embeddings = task.embed(images)
    assert task.model.training
    assert torch.equal(task.embed(images), embeddings)
    torch.testing.assert_close(task.embed(task._normalize(images)), embeddings)
    assert [set(row) for row in Trainer(plain_task(), samples(), **settings()).predict(samples(2)[0])] == [
        {"id", "embedding"},
        {"id", "embedding"},
    ]


# -- arguments that are wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "arcfce"}, "name of a loss, received 'arcfce'. Did you mean 'arcface'"),
        ({"loss": "xbm:arcface"}, "name of a loss, received 'xbm:arcface'"),
        ({"loss": "triplet", "miner": "semihrd"}, "Did you mean 'semihard'"),
        ({"miner": "semihard"}, "no miner for 'arcface'"),
        ({"loss": "supcon", "margin": 0.1}, "no margin for 'supcon'"),
        ({"loss_options": {"centers": 3}}, "an option of 'arcface', received 'centers'"),
        ({"margin": 28.6}, "margin to be from 0 to 1.57"),
        ({"pooling": "gme"}, "Did you mean 'gem'"),
        ({"neck": "bnneck"}, "neck to be 'bn' or None"),
        ({"index": "exatc"}, "Did you mean 'exact'"),
        ({"backbone": "resnt18"}, "Did you mean 'resnet18'"),
        ({"recall_at": ()}, "recall_at to be whole numbers"),
        ({"recall_at": 1}, "recall_at to be whole numbers"),
        ({"recall_at": (1, 2.5)}, "recall_at to be whole numbers"),
        ({"embedding_dim": 0}, "embedding_dim to be a positive integer"),
        ({"knn_k": 0}, "knn_k to be a positive integer"),
        ({"augment": "cropp"}, "Did you mean 'crop'"),
    ],
)
def test_wrong_arguments_are_found_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        MetricLearning(**{"backbone": SMALL, "pretrained": False, **options})


def test_a_backbone_without_replaceable_pooling_is_an_error() -> None:
    task = MetricLearning("crossvit_tiny_240", pretrained=False, pooling="gem")
    with pytest.raises(BadArgument, match=r"'crossvit_tiny_240' takes.*pooling.*global_pool=''"):
        _ = task.model


def test_numbers_of_classes_that_do_not_fit() -> None:
    with pytest.raises(BadArgument, match=r"num_classes to be at least 5.*received 3"):
        Trainer(plain_task(num_classes=3), samples(), **settings())
    with pytest.raises(DataError, match="at least two classes"):
        Trainer(plain_task(), samples(classes=1), **settings())
    with pytest.raises(BadArgument, match="Pass num_classes, or data with labels"):
        plain_task().configure(DatasetInfo(num_samples=3))
    with pytest.raises(BadArgument, match=r"number of classes.*configure\(info\) first"):
        plain_task(in_chans=1).train_step(samples(4))
    more = Trainer(plain_task(num_classes=9), samples(), **settings()).fit()
    assert more.task.criterion.weight.shape == (9, 4)


@pytest.mark.parametrize("wrong", [7, -1])
def test_labels_out_of_range_are_found_before_training(wrong: int) -> None:
    images, labels = samples(10)
    labels[3] = wrong
    data: Any = DataLoader(Rows(images, labels, labels), batch_size=10)  # which does not say its labels beforehand
    trainer = Trainer(plain_task(num_classes=CLASSES), data, **settings())
    with pytest.raises(CheckFailed, match=rf"Labels should be 0 to 4 for 5 classes, but {wrong} occur"):
        trainer.check()


@pytest.mark.parametrize("order", ["queries first", "every class once"])
def test_checking_looks_further_than_the_first_batch_for_what_belongs_together(order: str) -> None:
    images, labels = samples(40, 10)
    data = TensorDataset(images, labels, torch.arange(40) < 10) if order == "queries first" else (images, labels)
    trainer = Trainer(plain_task(), samples(), val_data=data, eval_batch_size=10, **settings())
    assert trainer.evaluate()["val/recall@10"] > 0
    assert trainer.check().ok


def test_the_best_checkpoint_is_that_with_the_best_retrieval() -> None:
    trainer = Trainer(plain_task(), samples(), val_data=samples(20), **settings())
    assert (trainer.monitor_metric, trainer.monitor_mode) == ("val/map@r", "max")
    chosen = settings(monitor_metric="val/feature_std", monitor_mode="min")
    other = Trainer(plain_task(), samples(), val_data=samples(20), **chosen)
    assert (other.monitor_metric, other.monitor_mode) == ("val/feature_std", "min")


@pytest.mark.parametrize("augment", ["crop", "basic"])
def test_images_are_augmented_for_training_alone(augment: str) -> None:
    seen: dict[str, list[Tensor]] = {"train": [], "eval": []}
    task = MetricLearning(Normed(), 4, augment=augment)
    trainer = Trainer(task, pixels(10), val_data=pixels(10), **settings(max_steps=3, eval_every="1steps"))
    step, judge = task.train_step, task.eval_step

    def training(batch: Any) -> Any:
        seen["train"].append(batch[0])
        return step(batch)

    def eval_mode(batch: Any) -> Any:
        seen["eval"].append(batch[0])
        return judge(batch)

    task.train_step, task.eval_step = training, eval_mode  # type: ignore[method-assign]
    trainer.fit()
    plain = task._normalize(pixels(10)[0])
    assert all(torch.equal(images, plain) for images in seen["eval"])
    first, second, third = (images.flatten(1).sort(0).values for images in seen["train"])  # whatever their order
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)


def test_what_is_recorded() -> None:
    Trainer(plain_task(margin=0.3), samples(), **settings(run_dir="run")).fit()
    text = json.loads(Path("run/config.json").read_text())
    written = json.dumps(text)
    assert '"num_classes"' in written
    task = plain_task("cosface")
    task.configure(extract_info(load_images("digits")))
    config = task.config_dict()
    assert (config["margin"], config["scale"], config["num_classes"]) == (0.35, 64.0, 10)
    assert config["backbone"] == "Plain"
    json.dumps(config)
