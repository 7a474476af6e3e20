"""What the vision tasks learn: longer runs than the tests can afford, as a table and as pictures.

Every run sees the same split of a built-in sample (`digits`: 1,200 images to train on, 597 to judge by) and the same
small convolutional network, or a small ViT for MAE. Self-supervised runs are judged by logistic regression on their
frozen features with ten labels per class, against the raw pixels and the untrained network. Pictures of views, of
reconstructions and of nearest neighbours are written beside the table (with matplotlib).

    python benchmarks/vision.py
    python benchmarks/vision.py --only simclr mae --epochs 200 --out pictures
    python benchmarks/vision.py --data fashion-mnist --device cuda
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from trainformer import Trainer
from trainformer.eval import knn_accuracy, label_subset, linear_probe, nearest, retrieval_metrics
from trainformer.run import run_of
from trainformer.tasks import SSL, ImageClassification, MetricLearning

LABELS_PER_CLASS = 10
SEEDS = 5  # choices of the labels; the mean is reported
CLASSES = 10

console = Console()


@dataclass
class Outcome:
    """One line of the table. Shares from 0 to 1; None where it does not apply."""

    name: str
    probe: float | None = None
    knn: float | None = None
    map_at_r: float | None = None
    accuracy: float | None = None
    seconds: float = 0.0


class SmallNet(nn.Module):
    """Four convolutions, 128 features."""

    def __init__(self, channels: int = 1, width: int = 64) -> None:
        super().__init__()
        widths = [(channels, width // 2, 1), (width // 2, width, 2), (width, width, 1), (width, 2 * width, 2)]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b, stride in widths
        ]
        self.body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        """One row of features per image."""
        return self.body(images)


def still(**more: Any) -> dict[str, Any]:
    """Augmentation for gray images whose left and right mean something."""
    return {"flip": 0.0, "jitter": None, "grey": 0.0, "blur": 0.0, **more}


def small_vit(size: int) -> dict[str, Any]:
    """Arguments that make timm's smallest ViT smaller still: 2-pixel patches on 8-pixel digits."""
    return {"patch_size": max(2, size // 8), "embed_dim": 96, "depth": 4, "num_heads": 4}


def methods(size: int) -> dict[str, Callable[[], SSL]]:
    """Self-supervised tasks by name."""
    crops = still(scale=(0.4, 1.0))
    quiet = still(solarise=0.0)
    return {
        "simclr": lambda: SSL.simclr(SmallNet(), hidden_dim=128, proj_dim=64, temperature=0.2, augment_options=crops),
        "moco": lambda: SSL.moco(
            SmallNet(), hidden_dim=128, proj_dim=64, queue_size=1024, momentum=0.99, augment_options=crops
        ),
        "moco v3": lambda: SSL.moco(
            SmallNet(),
            version="v3",
            hidden_dim=256,
            proj_dim=64,
            temperature=0.2,
            momentum=0.98,
            augment_options={**crops, "solarise": 0.0},
        ),
        "byol": lambda: SSL.byol(
            SmallNet(), hidden_dim=256, proj_dim=64, momentum=0.98, augment_options={**crops, "solarise": 0.0}
        ),
        "dino": lambda: SSL.dino(
            SmallNet(),
            out_dim=256,
            hidden_dim=256,
            bottleneck_dim=64,
            momentum=0.98,
            teacher_temp=0.04,
            num_local=2,
            local_size=size,
            local_scale=(0.2, 0.5),
            augment_options=quiet,
        ),
        "mae": lambda: SSL.mae(
            "vit_tiny_patch16_224",
            image_size=size,
            decoder_dim=64,
            decoder_depth=2,
            decoder_heads=4,
            augment_options=still(scale=(0.6, 1.0)),
            model_kwargs=small_vit(size),
        ),
    }


# -- eval_mode -----------------------------------------------------------------------------------------------


def few_label_accuracy(train: dict[str, Tensor], val: dict[str, Tensor]) -> float:
    """Logistic regression with a few labels per class, the mean over several choices of them."""
    results = []
    for seed in range(SEEDS):
        few = label_subset(train["label"], LABELS_PER_CLASS, seed=seed)
        result = linear_probe(train["embedding"][few], train["label"][few], val["embedding"], val["label"])
        results.append(result.accuracy)
    return sum(results) / len(results)


def judge(name: str, train: dict[str, Tensor], val: dict[str, Tensor], seconds: float = 0.0) -> Outcome:
    """Everything that can be said of features."""
    return Outcome(
        name,
        probe=few_label_accuracy(train, val),
        knn=knn_accuracy(
            val["embedding"], val["label"], k=20, gallery=train["embedding"], gallery_labels=train["label"]
        ),
        map_at_r=retrieval_metrics(val["embedding"], val["label"])["map@r"],
        seconds=seconds,
    )


def as_pixels(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The images themselves as features."""
    parts = []
    for data in (run_of(trainer)._train_data, run_of(trainer)._val_data):
        images = torch.stack([data[i][0] for i in range(len(data))]).float().flatten(1) / 255
        parts.append({"embedding": images, "label": torch.tensor([int(data[i][1]) for i in range(len(data))])})
    return parts[0], parts[1]


# -- running -----------------------------------------------------------------------------------------------


def train(task: Any, args: argparse.Namespace, name: str, **settings: Any) -> tuple[Trainer, float]:
    """One run; how long it took."""
    run_dir = Path(args.out) / "runs" / name.replace(" ", "_")
    options = {"epochs": args.epochs, "batch_size": 256, "lr": 2e-3, "weight_decay": 1e-4, "eval_every": None}
    trainer = Trainer(
        task,
        args.data,
        val_split=args.val,
        device=args.device,
        run_dir=run_dir,
        resume=None,
        save_every=None,
        num_workers=0,
        **{**options, **settings},
    )
    began = time.perf_counter()
    trainer.fit()
    return trainer, time.perf_counter() - began


def run_all(args: argparse.Namespace) -> list[Outcome]:
    """Every run that was asked for."""
    wanted = set(args.only or ["classifier", "arcface", *methods(args.size)])
    outcomes: list[Outcome] = []
    baseline = Trainer(SSL.simclr(SmallNet()), args.data, val_split=args.val, log="none", device=args.device)
    outcomes.append(judge("raw pixels", *as_pixels(baseline)))
    outcomes.append(judge("untrained network", baseline.embed("train"), baseline.embed("val")))
    if "classifier" in wanted:
        net = nn.Sequential(SmallNet(), nn.Linear(128, CLASSES))
        task = ImageClassification(net, num_classes=CLASSES, augment="crop")
        trainer, seconds = train(task, args, "classifier", epochs=min(args.epochs, 60), batch_size=64)
        outcomes.append(Outcome("classifier", accuracy=trainer.evaluate()["val/accuracy"], seconds=seconds))
    if "arcface" in wanted:
        metric = MetricLearning(SmallNet(), embedding_dim=64, loss="arcface", scale=16.0, augment="crop")
        trainer, seconds = train(metric, args, "arcface", epochs=min(args.epochs, 60), batch_size=64)
        outcomes.append(judge("arcface", trainer.embed("train"), trainer.embed("val"), seconds))
        draw_neighbours(trainer, Path(args.out) / "neighbours.png")
    for name, make in methods(args.size).items():
        if name in wanted:
            task = make()
            trainer, seconds = train(task, args, name)
            outcomes.append(judge(name, trainer.embed("train"), trainer.embed("val"), seconds))
            console.print(f"{name}: {outcomes[-1].probe:.1%} with {LABELS_PER_CLASS} labels per class, {seconds:.0f} s")
            draw_views(trainer, Path(args.out) / f"views_{name.replace(' ', '_')}.png")
            if name == "mae":
                draw_reconstructions(trainer, Path(args.out) / "reconstructions.png")
    return outcomes


# -- pictures ----------------------------------------------------------------------------------------------


def first_images(trainer: Trainer, count: int) -> Tensor:
    """Some validation images, as pixels."""
    data = run_of(trainer)._val_data
    return torch.stack([data[i][0] for i in range(count)])


def draw_views(trainer: Trainer, path: Path, count: int = 8) -> None:
    """Each image, and below it the views that were made of it."""
    images = first_images(trainer, count)
    made = trainer.task._views()(images.to(run_of(trainer).backend.device), keys=list(range(count)))
    rows = [images.float() / 255, *(view.cpu() for view in made.images)]
    draw(rows, path, ["image", *(f"view {i + 1}" for i in range(len(made.images)))])


def draw_reconstructions(trainer: Trainer, path: Path, count: int = 8) -> None:
    """What a masked autoencoder saw, what it made of it, and what was there."""
    images = first_images(trainer, count)
    images = torch.nn.functional.interpolate(images.float() / 255, size=trainer.task.input_shape[1:])
    shown = trainer.task.reconstruct(images)
    draw([shown.masked.cpu(), shown.pasted.cpu(), shown.original.cpu()], path, ["seen", "rebuilt", "image"])


def draw_neighbours(trainer: Trainer, path: Path, count: int = 8, k: int = 6) -> None:
    """Images (first row), and below each its nearest neighbours."""
    rows = trainer.embed("val")
    found = nearest(rows["embedding"], rows["embedding"], k, exclude_self=True)
    images = first_images(trainer, len(rows["embedding"])).float() / 255
    columns = [images[:count], *(images[found.indices[:count, i]] for i in range(k))]
    draw(columns, path, ["query", *(f"neighbour {i + 1}" for i in range(k))])


def draw(rows: list[Tensor], path: Path, names: list[str]) -> None:
    """A grid of gray pictures, one row per name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(
        len(rows), len(rows[0]), figsize=(len(rows[0]) * 1.1, len(rows) * 1.2), squeeze=False
    )
    for row, name, line in zip(rows, names, axes, strict=True):
        for picture, cell in zip(row, line, strict=True):
            cell.imshow(picture.mean(0), cmap="gray")
            cell.set_xticks([])
            cell.set_yticks([])
        line[0].set_ylabel(name, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(outcomes: list[Outcome]) -> Table:
    """The outcomes as a table."""
    shown = Table(title="what was learned", title_justify="left")
    for column in ("run", f"probe, {LABELS_PER_CLASS} labels per class", "kNN", "MAP@R", "accuracy", "seconds"):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for o in outcomes:
        shares = ["" if value is None else f"{value:.1%}" for value in (o.probe, o.knn, o.map_at_r, o.accuracy)]
        shown.add_row(o.name, *shares, f"{o.seconds:.0f}" if o.seconds else "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="runs to make; all by default")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--val", type=int, default=597, help="validation images")
    parser.add_argument("--size", type=int, default=8, help="side of the images")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="runs/vision", help="where runs and pictures go")
    parser.add_argument("--json", help="write the outcomes to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    outcomes = run_all(args)
    console.print(table(outcomes))
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(o) for o in outcomes], indent=2))


if __name__ == "__main__":
    main()
