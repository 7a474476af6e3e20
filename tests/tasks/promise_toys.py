"""Small runs of segmentation, detection, tabular and forecasting tasks in double precision, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainformer import Trainer
from trainformer.data.shapes import draw_shapes
from trainformer.tasks import (
    ObjectDetection,
    SemanticSegmentation,
    TabularClassification,
    TabularRegression,
    TimeSeriesForecasting,
)


class Pixelwise(nn.Module):
    """A tiny segmentation network in double precision."""

    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=2, dilation=2)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, classes, 1)).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.double())


def settings(**more: Any) -> dict[str, Any]:
    """Settings of a quiet run on the CPU."""
    still = {"log": "none", "device": "cpu", "precision": "no", "save_every": None, "resume": None, "num_workers": 0}
    return {**still, "max_steps": 3, "batch_size": 8, "lr": 1e-2, "optimizer": "sgd", **more}


def holes(masks: Tensor) -> Tensor:
    """Masks with a different number of ignored pixels in each image, all of them in one."""
    for number, mask in enumerate(masks):
        mask[: 3 * (number % 6)] = 255
    masks[1] = 255
    return masks


def shapes(count: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Images and masks of the sample, cut to a small size."""
    pictures = [draw_shapes(number, size) for number in range(count)]
    images = torch.stack([torch.from_numpy(picture.image).permute(2, 0, 1) for picture in pictures])
    return images, holes(torch.stack([torch.from_numpy(picture.mask) for picture in pictures]))


def segmentation(**more: Any) -> Trainer:
    torch.manual_seed(0)
    task = SemanticSegmentation(Pixelwise(), 4, loss="ce+dice", class_weights=[0.5, 1, 2, 1])
    return Trainer(task, shapes(24), val_data=shapes(7), **settings(**more))


class Grid(nn.Module):
    """A tiny backbone for detectors, with one feature map at an eighth of the size."""

    out_channels = 32

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 32, 4, stride=4), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def detector(size: int = 48) -> nn.Module:
    """A tiny FCOS, without random sampling."""
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return FCOS(Grid(), 3, anchor_generator=AnchorGenerator(((16,),), ((1.0,),)), min_size=size, max_size=size)


def boxed(count: int, size: int = 48) -> list[Any]:
    """Images with boxes; one of them has none."""
    pictures = [draw_shapes(number, size) for number in range(count)]
    samples = [(picture.image, {"boxes": picture.boxes, "labels": picture.labels}) for picture in pictures]
    if count > 2:
        samples[2] = samples[2][0], {"boxes": [], "labels": []}
    return samples


def detection(**more: Any) -> Trainer:
    torch.manual_seed(0)
    task = ObjectDetection(detector().double(), 3, augment="flip", image_size=48)
    return Trainer(task, boxed(24), val_data=boxed(7), **settings(**more))


class Rows(nn.Module):
    """A network for a table with numbers and one column of categories, in double precision."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)
        self.layers = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, outputs))
        self.double()

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        return self.layers(torch.cat([numbers.double(), self.embedding(categories[:, 0])], 1))


def table(rows: int) -> list[dict[str, Any]]:
    """Rows with numbers (some missing), a column of categories, and a target of each kind."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, 3, generator=generator, dtype=torch.float64).tolist()
    return [
        {
            **{f"x{place}": None if place == 2 and number % 5 == 1 else value for place, value in enumerate(values)},
            "city": ("Rome", "Oslo", "Lima")[number % 3],
            "price": 100 + 20 * values[0] - 5 * (number % 3),
            "sold": "yes" if values[1] > 0 else "no",
        }
        for number, values in enumerate(numbers)
    ]


def regression(**more: Any) -> Trainer:
    torch.manual_seed(0)
    task = TabularRegression(Rows(1), "price", ignore=["sold"])
    return Trainer(task, table(24), val_data=table(7), **settings(**more))


def classification(**more: Any) -> Trainer:
    torch.manual_seed(0)
    task = TabularClassification(Rows(2), "sold", ignore=["price"], class_weights="balanced")
    return Trainer(task, table(24), val_data=table(7), **settings(**more))


def forecasting(**more: Any) -> Trainer:
    torch.manual_seed(0)
    data = [torch.arange(60.0).sin().double().numpy() * 3 + 5, torch.arange(40.0).cos().double().numpy()]
    task = TimeSeriesForecasting(nn.Linear(12, 4).double(), 12, 4, season=6)
    return Trainer(task, data, val_split=9, **settings(**more))


CASES = {
    "segmentation": segmentation,
    "detection": detection,
    "regression": regression,
    "classification": classification,
    "forecasting": forecasting,
}


def trained(rank: int, world: int) -> dict[str, Tensor]:
    """Weights and metrics of each case after three steps, with batches that the ranks cannot share equally."""
    found: dict[str, Tensor] = {}
    for name, make in CASES.items():
        trainer = make(batch_size=5, eval_batch_size=3, run_dir=f"{name}-{world}", strategy="auto").fit()
        found |= {f"{name}/{key}": value.clone() for key, value in trainer.task.model.state_dict().items()}
        found |= {f"{name}/{key}": torch.tensor(value) for key, value in trainer.evaluate().items()}
    return found
