"""What the methods learn, on real data: handwritten digits, judged with ten labels per class.

The first 1,200 digits are learned from, the last 597 (of other writers) judge. Logistic regression on raw pixels gets
85 % of them right with 100 labels. The settings are the shortest that leave a margin; `benchmarks/vision.py` has longer
runs. These tests say that a method works as a whole; that it is the method of its paper is for the others to say.
"""

from __future__ import annotations

from typing import Any

import pytest
import ssl_toys as toys
import torch
from torch import Tensor, nn

from trainformer.data import load_images
from trainformer.eval import label_subset, linear_probe
from trainformer.tasks import SSL

pytestmark = pytest.mark.slow

Rows = tuple[Tensor, Tensor]

# Gray images, whose left and right mean something.
VIEWS: dict[str, Any] = {"flip": 0.0, "jitter": None, "grey": 0.0, "blur": 0.0, "solarise": 0.0}
CROPS: dict[str, Any] = {**VIEWS, "scale": (0.5, 1.0)}

# Options, epochs, rate, and by how many points the probe must beat raw pixels. Measured: see the comments.
RUNS: dict[str, tuple[dict[str, Any], int, float, float]] = {
    "simclr": ({"hidden_dim": 128, "proj_dim": 64, "temperature": 0.2, "augment_options": CROPS}, 30, 1e-3, 5.0),
    "moco": (
        {"hidden_dim": 128, "proj_dim": 64, "queue_size": 512, "momentum": 0.97, "augment_options": CROPS},
        40,
        1e-3,
        5.0,
    ),
    "byol": ({"hidden_dim": 256, "proj_dim": 64, "momentum": 0.97, "augment_options": CROPS}, 40, 2e-3, 4.0),
    "dino": (
        {
            "out_dim": 256,
            "hidden_dim": 128,
            "bottleneck_dim": 64,
            "momentum": 0.99,
            "teacher_temp": 0.04,
            "num_local": 0,
            "global_scale": (0.5, 1.0),
            "augment_options": VIEWS,
        },
        40,
        1e-3,
        4.0,
    ),
}


class SmallNet(nn.Sequential):
    """Four convolutions, 96 features."""

    def __init__(self) -> None:
        widths = [(1, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2)]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b, stride in widths
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(scope="module")
def digits() -> tuple[Rows, Rows]:
    """Images and labels to learn from, and to judge by."""
    whole = load_images("digits")
    images, labels = whole.images, torch.as_tensor(whole.targets)
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def with_few_labels(train: Rows, val: Rows) -> float:
    """Accuracy in points with ten labels per class, the mean over three choices of them."""
    results = []
    for seed in range(3):
        few = label_subset(train[1], per_class=10, seed=seed)
        results.append(linear_probe(train[0][few], train[1][few], *val).accuracy)
    return 100 * sum(results) / len(results)


@pytest.fixture(scope="module")
def raw_pixels(digits: tuple[Rows, Rows]) -> float:
    train, val = ((images.float().flatten(1) / 255, labels) for images, labels in digits)
    return with_few_labels(train, val)


@pytest.mark.parametrize("method", RUNS)
def test_ten_labels_per_class_go_further_than_on_raw_pixels(
    method: str, digits: tuple[Rows, Rows], raw_pixels: float
) -> None:
    options, epochs, rate, points = RUNS[method]
    torch.manual_seed(0)
    task = SSL(method, SmallNet(), **options)
    settings = {"batch_size": 128, "weight_decay": 1e-4, "eval_every": None, "seed": 0}
    run = toys.fit(task, digits[0], val_data=digits[1], epochs=epochs, lr=rate, **settings)
    rows = [run.embed(part) for part in ("train", "val")]
    train, val = ((part["embedding"], part["label"]) for part in rows)
    gained = with_few_labels(train, val) - raw_pixels
    assert gained >= points, f"{method} gains {gained:.1f} points over {raw_pixels:.1f} on raw pixels"
