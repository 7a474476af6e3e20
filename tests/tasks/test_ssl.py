"""The self-supervised task: options, data, exact resuming, what it measures, and what is left when it is done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ssl_toys as toys
import timm
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainformer.callbacks import CollapseMonitor, OnlineKNN, OnlineLinear
from trainformer.core import BadArgument, DataError
from trainformer.data import load_images
from trainformer.run.torch.api import TorchTrainerApi
from trainformer.tasks import SSL, ImageClassification
from trainformer.tasks.base import Task
from trainformer.tasks.vision.ssl.methods import Views

# -- options -----------------------------------------------------------------------------------------------

PAPER: dict[str, dict[str, Any]] = {
    "simclr": {"proj_dim": 128, "temperature": 0.1},
    "moco": {"proj_dim": 128, "temperature": 0.2, "momentum": 0.999, "momentum_end": 0.999, "queue_size": 65536},
    "moco_v3": {"proj_dim": 256, "hidden_dim": 4096, "momentum": 0.99, "momentum_end": 1.0, "freeze_patch_embed": True},
    "byol": {"proj_dim": 256, "hidden_dim": 4096, "momentum": 0.996, "momentum_end": 1.0},
    "dino": {
        "out_dim": 65536, "hidden_dim": 2048, "bottleneck_dim": 256, "norm_last_layer": True, "momentum": 0.996,
        "momentum_end": 1.0, "student_temp": 0.1, "teacher_temp": 0.07, "warmup_teacher_temp": 0.04,
        "warmup_teacher_temp_epochs": 30, "center_momentum": 0.9, "freeze_last_layer": 1, "koleo": 0.0,
        "num_local": 8, "global_scale": (0.4, 1.0), "local_scale": (0.05, 0.4),
    },
    "mae": {"mask_ratio": 0.75, "decoder_dim": 512, "decoder_depth": 8, "decoder_heads": 16, "norm_pix": True},
}  # fmt: skip


@pytest.mark.parametrize("method", PAPER)
def test_options_left_out_are_those_of_the_paper(method: str) -> None:
    task = SSL(method, "test_vit")
    assert {name: getattr(task, name) for name in PAPER[method]} == PAPER[method]


def test_paper_sizes_reach_the_networks() -> None:
    simclr = SSL.simclr("resnet10t").model.online.head
    assert [(part.in_features, part.out_features) for part in simclr if isinstance(part, nn.Linear)] == [
        (512, 512),
        (512, 128),
    ]
    assert sum(isinstance(part, nn.BatchNorm1d) for part in simclr) == 2
    moco = SSL.moco("test_vit", queue_size=8).model
    assert not any(isinstance(part, nn.BatchNorm1d) for part in moco.online.head)
    assert moco.queue.keys.shape == (8, 128)
    for backbone, layers, norms, temperature in (("test_vit", 3, 3, 0.2), ("test_resnet", 2, 2, 1.0)):
        v3 = SSL.moco(backbone, version="v3", hidden_dim=16).model
        assert sum(isinstance(part, nn.Linear) for part in v3.online.head) == layers
        assert sum(isinstance(part, nn.BatchNorm1d) for part in v3.online.head) == norms
        assert sum(isinstance(part, nn.BatchNorm1d) for part in v3.predictor) == norms - 1
        assert all(part.bias is None for part in (*v3.online.head, *v3.predictor) if isinstance(part, nn.Linear))
        assert v3.temperature == temperature


def test_constructors_of_the_plan() -> None:
    assert SSL.dino("vit_small").drop_path_rate == 0.1  # known as a ViT
    assert isinstance(SSL.dino("test_vit", out_dim=8), Task)
    task = SSL(method="simclr", backbone="test_vit", pretrained=False, proj_dim=64, temperature=0.5, momentum=None)
    assert task.model.online.head[-2].out_features == 64
    assert task.model.temperature == 0.5
    defaults = {name: getattr(SSL, name)().backbone for name in ("simclr", "moco", "byol", "dino", "mae")}
    assert defaults == {
        "simclr": "resnet50",
        "moco": "resnet50",
        "byol": "resnet50",
        "dino": "vit_small_patch16_224",
        "mae": "vit_base_patch16_224",
    }


def test_what_a_task_records_makes_the_same_task_again() -> None:
    task = toys.make("moco_v3", "test_vit")
    record = task.config_dict()
    again = SSL(**{name: value for name, value in record.items() if name not in ("mean", "std")})
    assert again.config_dict() == record


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SSL("simcrl", "test_vit"), "method to be one of .*received 'simcrl'. Did you mean 'simclr'"),
        (lambda: SSL.simclr("test_vit", momentum=0.9), "simclr has no option momentum .*It has: proj_dim"),
        (lambda: SSL.byol("test_vit", queue_size=8), "byol has no option queue_size"),
        (lambda: SSL.mae("test_vit", temperature=0.1), "mae has no option temperature"),
        (lambda: SSL.moco("test_vit", version="v4"), "version to be 'v2' or 'v3', received 'v4'"),
        (lambda: SSL.byol("test_vit", version="v3"), "version with method 'moco' only"),
        (lambda: SSL("moco_v3", "test_vit", version="v2"), "version with method 'moco' only"),
        (lambda: SSL.simclr("test_vit", temperature=0.0), "temperature to be a positive number, received 0.0"),
        (lambda: SSL.simclr("test_vit", temperature="0.1"), "temperature to be a positive number, received '0.1'"),
        (lambda: SSL.simclr("test_vit", proj_dim=12.5), "proj_dim to be a whole number of at least 1, received 12.5"),
        (lambda: SSL.moco("test_vit", queue_size=True), "queue_size to be a whole number"),
        (lambda: SSL.byol("test_vit", momentum=1.5), "momentum to be a number from 0 to 1, received 1.5"),
        (lambda: SSL.dino("test_vit", num_local=-1), "num_local to be a whole number of at least 0"),
        (lambda: SSL.dino("test_vit", koleo=math.nan), "koleo to be a number of at least 0"),
        (lambda: SSL.simclr("tets_vit"), "received 'tets_vit'. Did you mean 'test_vit"),
        (
            lambda: SSL.simclr("test_vit", augment=toys.two_views, augment_options={"flip": 0.0}),
            "augment or augment_options, received both",
        ),
        (
            lambda: SSL.simclr("test_vit", augment_options={"flop": 0.5}).get_train_transforms(),
            "arguments of BatchAugment, received 'flop'. Did you mean 'flip'",
        ),
        (lambda: SSL.mae("test_resnet").model, "VisionTransformer"),
        (
            lambda: SSL.dino("test_vit", local_size=24).model,
            r"multiple of the backbone's patch \(16, 16\), received 24",
        ),
        (
            lambda: SSL.dino(timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=1)).model,
            "takes crops of several sizes.*dynamic_img_size=True",
        ),
        (lambda: SSL.mae("test_vit", mask_ratio=1.0).model, "mask_ratio to be above 0 and below 1"),
        (lambda: toys.make("simclr").fine_tune(), "backbone by name, received a module"),
        (lambda: toys.make("simclr").reconstruct(toys.pixels(1)), "masked autoencoder"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        make()


def test_a_misspelt_option_is_no_option() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SSL.simclr("test_vit", temprature=0.5)


@pytest.mark.parametrize(
    ("method", "augment", "message"),
    [
        ("simclr", lambda images: images, "augment to return a list of views"),
        (
            "simclr",
            lambda images: [images] * 3,
            "augment to return 2 view\\(s\\) for this method, received '3 of them'",
        ),
        ("moco", lambda images: [images], r"augment to return 2 view\(s\)"),
        ("byol", lambda images: [images, images[:1]], "every view to have the 4 images of the batch"),
        ("dino", lambda images: [images], r"augment to return at least 2 view\(s\)"),
        ("mae", lambda images: [images] * 2, r"augment to return 1 view\(s\)"),
    ],
)
def test_an_augment_that_returns_other_views_is_refused(method: str, augment: Any, message: str) -> None:
    """Three views in place of two would else be cut into two halves, of different images."""
    task = toys.make(method, augment=augment)
    with pytest.raises(BadArgument, match=message):
        task.train_step(toys.pixels(4).float().div(255))


# -- how the paper trains ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "backbone", "optimizer", "rate", "decay"),
    [
        ("simclr", None, "lars", 0.3, 1e-6),
        ("moco", None, "sgd", 0.03, 1e-4),
        ("moco_v3", None, "lars", 0.6, 1e-6),
        ("moco_v3", "test_vit", "adamw", 1.5e-4, 0.1),
        ("byol", None, "lars", 0.2, 1.5e-6),
        ("dino", None, "adamw", 5e-4, 0.04),
        ("mae", None, "adamw", 1.5e-4, 0.05),
    ],
)
def test_settings_of_the_paper_scale_with_the_batch(
    method: str, backbone: str | None, optimizer: str, rate: float, decay: float
) -> None:
    data = toys.pixels(16)
    run = toys.trainer(toys.make(method, backbone), data, batch_size=8, accumulation_steps=4, epochs=100)
    assert run.lr == pytest.approx(rate * 32 / 256)
    assert run.weight_decay == decay
    assert run.scheduler == "cosine"
    name = run.optimizer["name"] if isinstance(run.optimizer, dict) else run.optimizer
    assert name == optimizer
    assert type(run.active_optimizer).__name__.lower() == optimizer
    assert run.gradient_clip == (3.0 if method == "dino" else None)
    assert run.weight_decay_end == (0.4 if method == "dino" else None)
    config = run.context.config
    assert {config.source(key).name for key in ("lr", "optimizer", "weight_decay", "scheduler")} == {"DERIVED"}
    if method == "mae":
        assert run.active_optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("chosen", [{"lr": 0.02}, {"optimizer": "sgd"}])
def test_what_the_user_chose_is_left_alone(chosen: dict[str, Any]) -> None:
    run = toys.trainer(toys.make("dino"), toys.pixels(16), batch_size=8, **chosen)
    assert {name: getattr(run, name) for name in chosen} == chosen
    assert run.weight_decay == 0.01  # the trainer's own
    assert run.weight_decay_end is None
    name = next(iter(chosen))
    assert run.context.config.source(name).name == "USER"
    kept = toys.trainer(toys.make("dino"), toys.pixels(16), weight_decay=0.3, gradient_clip=0.5)
    assert (kept.weight_decay, kept.weight_decay_end, kept.gradient_clip) == (0.3, None, 0.5)
    assert kept.lr == pytest.approx(5e-4 * 32 / 256)


# -- data --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images of unequal sizes in two classes; one is gray."""
    for i in range(8):
        path = tmp_path / "images" / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        array = np.random.default_rng(i).integers(0, 256, (20 + 3 * i, 40 - i, 3), dtype=np.uint8)
        Image.fromarray(array).convert("L" if i == 3 else "RGB").save(path)
    return tmp_path / "images"


def run_on(data: Any, method: str = "simclr", **settings: Any) -> Any:
    task = settings.pop("task", None) or toys.make(method)
    run = toys.fit(task, data, **{"max_steps": 2, "batch_size": 4, "log_every": 1, **settings})
    assert all(math.isfinite(record["train/loss"]) for record in run.state.log_history if "train/loss" in record)
    return run


def test_bytes_and_floats_give_the_same() -> None:
    images = toys.pixels(8)
    whole, floats = run_on(images), run_on(images.float() / 255)
    for record, other in zip(whole.state.log_history, floats.state.log_history, strict=True):
        assert record["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
    bytes_, ready = (run.embed(images)["embedding"] for run in (whole, floats))
    torch.testing.assert_close(bytes_, ready, rtol=1e-3, atol=1e-4)


def test_normalised_floats_are_refused() -> None:
    with pytest.raises(DataError, match=r"floats from 0 to 1.*received .floats from -.*Leave out the normalisation"):
        run_on(torch.randn(8, 3, 16, 16))


@pytest.mark.parametrize("method", ["simclr", "dino", "mae"])
def test_images_in_a_folder(folder: Path, method: str) -> None:
    task = toys.make(method, "test_vit", image_size=32, model_kwargs={"patch_size": 8})
    run = run_on(str(folder), task=task, val_data=str(folder))
    assert run.embed("train")["embedding"].shape == (8, task.model.backbone.num_features)
    assert sorted(run.embed("train")["label"].tolist()) == [0] * 4 + [1] * 4
    assert math.isfinite(run.evaluate()["val/knn_accuracy"])


def test_workers_change_nothing(folder: Path) -> None:
    runs = [
        run_on(str(folder), task=toys.make("simclr", "test_vit", image_size=32), num_workers=workers, max_steps=4)
        for workers in (0, 2)
    ]
    first, second = (run.task.model.state_dict() for run in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_images_without_labels(folder: Path) -> None:
    flat = folder.parent / "flat"
    flat.mkdir()
    for i, path in enumerate(sorted(folder.rglob("*.png"))):
        path.rename(flat / f"{i}.png")
    run = run_on(str(flat), task=toys.make("moco", "test_vit"), val_data=str(flat))
    metrics = run.evaluate()
    assert "val/knn_accuracy" not in metrics
    assert {"val/loss", "val/feature_std", "val/effective_rank"} <= metrics.keys()
    assert "label" not in run.embed("val")


def test_a_loader_of_the_users() -> None:
    images, labels = toys.pixels(10, 24), toys.labels(10)
    loader = DataLoader(TensorDataset(images, labels), batch_size=5)
    task = toys.make("byol")
    seen: list[Views] = []
    task.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run = run_on(loader, task=task)
    assert [tuple(view.shape) for view in seen[0].images] == [(5, 3, 24, 24)] * 2
    assert run.state.samples == 10


@pytest.mark.parametrize(
    ("method", "channels", "size"),
    [("simclr", 1, 16), ("dino", 3, (16, 24)), ("dino", 1, 16), ("mae", 1, (24, 16))],
)
def test_gray_and_oblong_images(method: str, channels: int, size: Any) -> None:
    if method == "mae":
        task = toys.make("mae", "test_vit", image_size=size)
    else:
        task = toys.make(method, lambda: toys.Net(channels=channels), in_chans=channels)
    images = toys.pixels(8, size, channels)
    seen: list[Any] = []
    run = toys.trainer(task, images, val_data=images, max_steps=1, batch_size=4)
    task.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run.fit()
    height, width = (size, size) if isinstance(size, int) else size
    assert seen[0].images[0].shape == (4, channels, height, width)
    assert run.embed("val")["embedding"].isfinite().all()


def test_a_hand_written_loop_makes_views_as_large_as_the_images() -> None:
    """Not as large as the backbone's usual images, which are 160 pixels wide here."""
    task = SSL.simclr("test_resnet")
    seen: list[Views] = []
    task.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    total, weight, _ = task.train_step((toys.pixels(4, 32), toys.labels(4)))
    assert seen[0].images[0].shape == (4, 3, 32, 32)
    assert total.requires_grad
    assert weight == 4


# -- the run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", toys.METHODS)
def test_the_preflight_check_passes(method: str) -> None:
    run = toys.trainer(toys.make(method), (toys.pixels(16), toys.labels(16)), val_split=0.25, batch_size=4, epochs=2)
    before = toys.copied(run.task.model)
    report = run.check()
    assert report.ok
    assert report.warnings == []
    assert toys.apart(before, toys.copied(run.task.model)) == []


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step == self.step:
            trainer.stop("enough")


def everything(run: Any) -> dict[str, Tensor]:
    """All state of a run that is made of numbers, by name."""
    parts = {"model": run.task.model.state_dict(), "optimizer": run.active_optimizer.state_dict()["state"]}
    parts |= {
        type(callback).__name__: callback.state_dict()
        for callback in run.callbacks
        if hasattr(callback, "compute_metrics")
    }
    return flat("", parts)


def flat(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, dict):
        return {key: leaf for part, inner in value.items() for key, leaf in flat(f"{name}.{part}", inner).items()}
    if isinstance(value, list | tuple):
        return flat(name, dict(enumerate(value)))
    number = isinstance(value, Tensor | int | float) and not isinstance(value, bool)
    return {name: torch.as_tensor(value).clone()} if number else {}


@pytest.mark.parametrize("method", ["moco", "dino", "mae"])
def test_an_interrupted_run_resumes_bitwise(method: str, tmp_path: Path) -> None:
    """In the middle of an epoch, with drop path, accumulation and callbacks that learn; compares all state."""
    data = toys.pixels(26), toys.labels(26)
    vit = "test_vit" if method in ("dino", "mae") else None
    options: dict[str, Any] = {"num_local": 1, "warmup_teacher_temp_epochs": 3} if method == "dino" else {}
    watching = [OnlineKNN] if method == "mae" else [OnlineKNN, OnlineLinear]

    def start(name: str, *more: Any, **settings: Any) -> Any:
        return toys.trainer(
            toys.make(method, vit, **options),
            data,
            val_data=data,
            epochs=2,
            batch_size=4,
            accumulation_steps=2,
            callbacks=[*(kind() for kind in watching), *more],
            run_dir=tmp_path / name,
            **settings,
        )

    whole = start("whole").fit()
    assert whole.state.step == 8
    wanted = everything(whole)
    cut = start("cut", StopAt(5)).fit()  # after the first of four steps of the second epoch
    cut.save(tmp_path / "cut.pt")
    newest = sorted((tmp_path / "cut" / "checkpoints").iterdir())[-1]
    for way in ("file", "checkpoint") if method == "moco" else ("checkpoint",):
        torch.manual_seed(123)
        second = start(way, resume=newest if way == "checkpoint" else None)
        if way == "file":
            second.load(tmp_path / "cut.pt")
        assert toys.apart(wanted, everything(second.fit())) == []
        assert second.state.step == 8


def test_the_loss_of_a_loaded_checkpoint_is_that_of_its_epoch(tmp_path: Path) -> None:
    """DINO's temperature belongs to the epoch, and with it the loss."""
    make = lambda: toys.make("dino", warmup_teacher_temp_epochs=4)  # noqa: E731
    images = toys.pixels(8)
    run = toys.fit(make(), images, val_data=images, epochs=3, batch_size=4)
    run.save(tmp_path / "run.pt")
    again = toys.trainer(make(), images, val_data=images, epochs=3, batch_size=4).load(tmp_path / "run.pt")
    assert again.evaluate() == run.evaluate()


@pytest.mark.parametrize("method", ["simclr", "dino"])
def test_watching_does_not_change_the_run(method: str) -> None:
    """Bitwise, also where the run draws random numbers of its own (dropped paths)."""
    data = toys.pixels(12), toys.labels(12)
    ends = []
    for callbacks in ([], [OnlineLinear(), OnlineKNN(k=2), CollapseMonitor()]):
        task = toys.make(method, "test_vit", drop_path_rate=0.5)
        toys.fit(task, data, val_data=data, epochs=2, batch_size=4, lr=0.01, callbacks=callbacks)
        ends.append(toys.copied(task.model))
    assert toys.apart(*ends) == []


# -- what is measured --------------------------------------------------------------------------------------


MILD = {"flip": 0.0, "jitter": None, "grey": 0.0, "blur": 0.0, "scale": (0.7, 1.0)}


def digits_run(callbacks: list[Any], **settings: Any) -> Any:
    digits = load_images("digits")
    images, labels = digits.images[:300], torch.as_tensor(digits.targets)[:300]
    task = toys.make("simclr", lambda: toys.Net(channels=1), in_chans=1, augment_options=MILD)
    return toys.fit(
        task,
        (images[:200], labels[:200]),
        val_data=(images[200:], labels[200:]),
        callbacks=callbacks,
        **{"max_steps": 20, "batch_size": 32, "lr": 0.01, "eval_every": "10steps", **settings},
    )


def test_online_knn_is_the_weighted_vote_of_training_images() -> None:
    callback = OnlineKNN(k=7, temperature=0.1)
    run = digits_run([callback])
    train, val = run.embed("train"), run.embed("val")
    unit = lambda rows: nn.functional.normalize(rows["embedding"].double()).numpy()  # noqa: E731
    # With unit vectors the squared distance is 2 - 2 cos: the nearest are the same, and exp(cos / T) follows from it.
    judge = KNeighborsClassifier(7, weights=lambda d: np.exp((1 - d**2 / 2) / 0.1), algorithm="brute")
    judge.fit(unit(train), train["label"].numpy())
    logged = [record["val/online_knn"] for record in run.state.log_history if "val/online_knn" in record]
    assert len(logged) == 2
    assert logged[-1] == pytest.approx(judge.score(unit(val), val["label"].numpy()), abs=0.011)  # a tie of one image
    assert logged[-1] > 0.5


def test_online_knn_weighs_votes_by_similarity() -> None:
    """One image of class 0 is the same as the query, two of class 1 are further off: few, but near, win."""

    class Stub:
        same_classes, evaluated_sets = True, ()
        knn_accuracy = TorchTrainerApi.knn_accuracy

        def embed(self, data: str, max_samples: int | None = None) -> dict[str, Tensor]:
            bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
            return (
                {"embedding": bank[:1], "label": torch.tensor([0])}
                if data == "val"
                else {
                    "embedding": bank,
                    "label": torch.tensor([0, 1, 1]),
                }
            )

    assert OnlineKNN(k=3, temperature=0.07).compute_metrics(Stub(), {}) == {"val/online_knn": 1.0}
    assert OnlineKNN(k=3, temperature=100.0).compute_metrics(Stub(), {}) == {
        "val/online_knn": 0.0
    }  # nearly a plain count


def test_online_knn_every_and_max_train() -> None:
    sizes: list[int] = []
    callback = OnlineKNN(k=5, every=2, max_train=50)
    run = digits_run([])
    embed = run.embed

    class Counting:
        same_classes, evaluated_sets = True, ()
        knn_accuracy = TorchTrainerApi.knn_accuracy

        def embed(self, *args: Any) -> dict[str, Tensor]:
            rows = embed(*args)
            sizes.append(len(rows["label"]))
            return rows

    assert callback.compute_metrics(Counting(), {}) == {}
    assert callback.compute_metrics(Counting(), {}).keys() == {"val/online_knn"}
    assert sizes == [50, 100]
    again = OnlineKNN(every=2)
    again.load_state_dict({"evaluations": 1})
    assert again.state_dict() == {"evaluations": 1}


def test_online_linear_learns_and_reports() -> None:
    callback = OnlineLinear()
    run = digits_run(
        [callback], max_steps=60, eval_every="30steps", monitor_metric="val/online_linear", monitor_mode="max"
    )
    logged = [record["val/online_linear"] for record in run.state.log_history if "val/online_linear" in record]
    assert logged[-1] > 0.5
    val = run.embed("val")
    guesses = callback.classifier.eval()(val["embedding"]).argmax(1)
    assert logged[-1] == pytest.approx((guesses == val["label"]).float().mean().item())


def test_probes_of_several_validation_sets() -> None:
    """Each set has its own, at the evaluations that include it, and equal to that of the set alone."""
    images, labels = toys.pixels(40, channels=1), toys.labels(40)

    def run(val_data: Any, **options: Any) -> Any:
        task = toys.make("simclr", lambda: toys.Net(channels=1), in_chans=1, augment_options=MILD)
        return toys.fit(task, (images, labels), val_data=val_data, callbacks=[OnlineKNN(k=3), OnlineLinear()],
                        max_steps=4, batch_size=8, lr=0.01, **options)  # fmt: skip

    sets = {"a": (images[:15], labels[:15]), "b": (images[15:], labels[15:])}
    options = {"monitor_metric": "val/b/online_knn", "monitor_mode": "max"}
    both = run(sets, eval_every={"a": "2steps", "b": "4steps"}, **options)
    first, last = [record for record in both.state.log_history if "val/a/online_knn" in record]
    assert "val/b/online_knn" not in first
    alone = run(sets["b"], eval_every="4steps").state.log_history[-1]
    for probe in ("online_knn", "online_linear"):
        assert last[f"val/b/{probe}"] == alone[f"val/{probe}"]
    assert both.best_metrics["val/b/online_knn"] == last["val/b/online_knn"]
    assert len(both.embed("val/b")["label"]) == 25
    with pytest.raises(BadArgument, match="val/a, val/b"):
        both.embed("val")


def test_online_linear_survives_a_step_that_is_skipped() -> None:
    images = toys.pixels(16).float().div(255)
    images[5] = torch.nan
    loader = DataLoader(TensorDataset(images, toys.labels(16).int()), batch_size=4)
    callback = OnlineLinear()
    task = toys.make("simclr", augment=toys.two_views)
    toys.fit(task, loader, epochs=2, nonfinite="skip", lr=0.01, callbacks=[callback])
    state = callback.state_dict()["classifier"]
    assert all(value.isfinite().all() for value in state.values())
    assert state["1.weight"].any()


def test_callbacks_ask_for_what_they_need() -> None:
    with pytest.raises(BadArgument, match="OnlineLinear needs features and labels"):
        toys.fit(toys.make("mae"), (toys.pixels(4), toys.labels(4)), max_steps=1, callbacks=[OnlineLinear()])
    with pytest.raises(BadArgument, match="OnlineLinear needs features and labels"):
        toys.fit(toys.make("simclr"), toys.pixels(4), max_steps=1, callbacks=[OnlineLinear()])
    images = toys.pixels(4)
    with pytest.raises(DataError, match="OnlineKNN needs labels in the training and validation data"):
        toys.fit(toys.make("simclr"), images, val_data=images, max_steps=1, callbacks=[OnlineKNN()])
    for wrong, words in (
        (lambda: OnlineKNN(k=0), "k to be at least 1"),
        (lambda: OnlineKNN(temperature=0.0), "temperature to be positive"),
        (lambda: OnlineLinear(lr=0.0), "lr to be positive"),
        (lambda: CollapseMonitor(threshold=1.0), "threshold to be above 0"),
        (lambda: CollapseMonitor(patience=0), "patience to be at least 1"),
    ):
        with pytest.raises(BadArgument, match=words):
            wrong()


def test_a_collapse_is_seen_and_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Blind(toys.Net):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * 1e-4 + 1.0

    task = toys.make("byol", Blind)
    monitor = CollapseMonitor(stop=True, patience=2)
    run = toys.fit(task, toys.pixels(8), epochs=5, batch_size=4, log_every=1, callbacks=[monitor])
    assert run.state.step == 2
    assert "the features have collapsed: feature_std is" in caplog.text
    healthy = toys.fit(
        toys.make("byol"), toys.pixels(8), epochs=2, batch_size=4, log_every=1, callbacks=[CollapseMonitor(stop=True)]
    )
    assert healthy.state.step == 4


def test_feature_std_is_one_for_all_directions_and_zero_for_one() -> None:
    from trainformer.tasks.vision.batch import feature_spread

    torch.manual_seed(0)
    assert feature_spread(torch.randn(4000, 32)).item() == pytest.approx(1.0, abs=0.01)
    assert feature_spread(torch.randn(1, 32).expand(8, -1) * torch.rand(8, 1)).item() == pytest.approx(0.0, abs=1e-3)


def test_teacher_entropy_is_logged_and_labels_change_nothing() -> None:
    images = toys.pixels(8)
    runs = [
        toys.fit(toys.make("dino"), data, epochs=1, batch_size=4, log_every=1)
        for data in (images, (images, toys.labels(8)))
    ]
    assert toys.apart(*(toys.copied(run.task.model) for run in runs)) == []
    entropy = [record["train/teacher_entropy"] for record in runs[0].state.log_history]
    assert all(0 < value <= math.log(24) + 1e-6 for value in entropy)


def test_evaluation_over_the_whole_set() -> None:
    """Leave-one-out neighbours and spread of all embeddings, whatever the batch size."""
    images, labels = toys.pixels(30), toys.labels(30)
    task = toys.make("simclr", knn_k=5)
    run = toys.trainer(task, (images, labels), val_data=(images, labels))
    first = run.evaluate()
    second = run.evaluate((images, labels), batch_size=7)
    for name in ("val/knn_accuracy", "val/feature_std", "val/effective_rank"):
        assert first[name] == pytest.approx(second[name], rel=1e-5)
    rows = nn.functional.normalize(run.embed("val")["embedding"].double())
    similar = (rows @ rows.T).fill_diagonal_(-torch.inf).topk(5)
    votes = torch.zeros(30, 3, dtype=torch.double).scatter_add_(
        1, labels[similar.indices], (similar.values / 0.07).exp()
    )
    assert first["val/knn_accuracy"] == pytest.approx((votes.argmax(1) == labels).double().mean().item())
    quiet = toys.trainer(toys.make("simclr", eval_loss=False), (images, labels), val_data=(images, labels))
    assert "val/loss" not in quiet.evaluate()


def test_embedding_makes_no_views() -> None:
    made: list[int] = []

    def views(images: Tensor) -> list[Tensor]:
        made.append(len(images))
        return toys.two_views(images)

    images = toys.pixels(8).float().div(255)
    run = toys.trainer(toys.make("simclr", augment=views), images, val_data=images, batch_size=4)
    run.embed("val")
    run.predict(images)
    assert made == []
    run.evaluate()
    assert made == [4, 4]


def test_evaluating_twice_gives_the_same_loss() -> None:
    """Views of validation images are functions of the image, and not of the time."""
    images = toys.pixels(12)
    for method in toys.METHODS:
        run = toys.trainer(toys.make(method), images, val_data=images, batch_size=4)
        assert run.evaluate() == run.evaluate(), method


# -- what is left ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "backbone"), [("simclr", "test_resnet"), ("dino", "test_vit"), ("mae", "test_vit")])
def test_a_saved_backbone_is_a_plain_timm_model(method: str, backbone: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    crops = {"local_size": 16} if method == "dino" else {}
    task = toys.make(method, backbone, image_size=32, model_kwargs={}, **crops)
    images = toys.pixels(6, 32)
    run = toys.fit(task, images, val_data=images, max_steps=3, batch_size=3, lr=1e-3)
    path = task.save_backbone(tmp_path / "deep" / "backbone.safetensors")
    options = {"img_size": 32} if backbone == "test_vit" else {}
    plain = timm.create_model(backbone, num_classes=0, **options)
    plain.load_state_dict(load_file(path), strict=True)
    config = timm.data.resolve_model_data_config(plain)
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
    ready = (images / 255 - mean) / std

    @torch.no_grad()
    def features() -> Tensor:
        # Of a masked autoencoder the features are those of the patches, whose mean timm gives with `global_pool="avg"`.
        return plain.eval().forward_features(ready)[:, 1:].mean(1) if method == "mae" else plain.eval()(ready)

    expected = features()
    torch.testing.assert_close(task.embed(images), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run.embed("val")["embedding"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.embed(images / 255), expected, rtol=1e-4, atol=1e-5)
    single = run.predict(images)[4]["embedding"]
    torch.testing.assert_close(single, expected[4], rtol=1e-4, atol=1e-5)

    nn.init.zeros_(next(plain.parameters()))
    plain.load_state_dict(torch.load(run.export(tmp_path / "exported"), weights_only=True), strict=True)
    torch.testing.assert_close(features(), expected, rtol=1e-5, atol=1e-6)


def test_embed_leaves_every_mode_as_it_was() -> None:
    task = toys.make("simclr")
    task.model.train()
    task.model.backbone.first.eval()  # frozen on purpose
    modes = [part.training for part in task.model.modules()]
    statistics = toys.copied(task.model)
    task.embed(toys.pixels(4))
    assert [part.training for part in task.model.modules()] == modes
    assert toys.apart(statistics, toys.copied(task.model)) == []


@pytest.mark.parametrize("method", ["moco", "dino", "mae"])
def test_fine_tuning_begins_with_the_pretrained_backbone(method: str) -> None:
    task = toys.make(method, "test_vit")
    data = toys.pixels(12), toys.labels(12)
    toys.fit(task, data, max_steps=2, batch_size=4, lr=1e-3)
    classifier = task.fine_tune(num_classes=3)
    assert isinstance(classifier, ImageClassification)
    own = classifier.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in task.backbone_state_dict().items())
    before = toys.copied(classifier.model)
    toys.fit(classifier, data, max_steps=2, batch_size=4, lr=1e-3)
    assert "patch_embed.proj.weight" in toys.apart(before, toys.copied(classifier.model))


def test_a_linear_probe_trains_the_classifier_alone() -> None:
    task = toys.make("simclr", "test_resnet", image_size=32)
    data = toys.pixels(12, 32), toys.labels(12)
    toys.fit(task, data, max_steps=1, batch_size=4)
    probe = task.linear_probe(num_classes=3)
    before = toys.copied(probe.model)
    toys.fit(probe, data, max_steps=3, batch_size=4, lr=0.1)
    changed = toys.apart(before, toys.copied(probe.model))
    head = probe.model.default_cfg["classifier"]
    assert changed
    assert all(name.startswith(head) for name in changed)


def test_reconstructions_show_what_was_seen() -> None:
    task = toys.make("mae")
    images = toys.pixels(2)
    noise = torch.linspace(0, 1, 16).expand(2, -1)
    shown = task.reconstruct(images, noise)
    torch.testing.assert_close(shown.original, images / 255, rtol=0, atol=1e-5)
    assert torch.equal(shown.pasted[..., :4, :], shown.original[..., :4, :])  # the first row of patches is visible
    assert (shown.masked[..., 4:, :] == 0.5).all()
