"""What metric learning learns on real images: 1,200 digits to train on, 597 to judge by."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from trainformer import Trainer
from trainformer.data import load_images
from trainformer.eval import retrieval_metrics
from trainformer.tasks import MetricLearning

pytestmark = pytest.mark.slow


def small_net(width: int = 64) -> nn.Module:
    """Four convolutions, 128 features."""
    widths = [(1, width // 2, 1), (width // 2, width, 2), (width, width, 1), (width, 2 * width, 2)]
    layers: list[nn.Module] = []
    for a, b, stride in widths:
        layers += [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def learned(loss: str, **options: Any) -> tuple[dict[str, float], float]:
    """Metrics on the validation images after training, and how many seconds of one processor it took."""
    torch.manual_seed(0)
    task = MetricLearning(small_net(), 64, loss, augment="crop", **options)
    trainer = Trainer(
        task,
        "digits",
        val_split=597,
        epochs=12,
        batch_size=60,
        lr=2e-3,
        weight_decay=1e-4,
        device="cpu",
        precision="no",
        num_workers=0,
        eval_every=None,
        save_every=None,
        resume=None,
        log="none",
    )
    began = time.process_time()
    trainer.fit()
    return trainer.evaluate(), time.process_time() - began


def test_raw_pixels_are_far_from_it() -> None:
    digits = load_images("digits")
    pixels = torch.stack([digits[i][0] for i in range(len(digits))]).float().flatten(1)
    labels = torch.tensor([int(digits[i][1]) for i in range(len(digits))])
    assert retrieval_metrics(pixels[:597], labels[:597])["map@r"] < 0.6


def test_arcface_brings_equal_digits_together() -> None:
    metrics, seconds = learned("arcface", scale=16.0)
    assert metrics["val/map@r"] >= 0.93
    assert metrics["val/recall@1"] >= 0.97
    assert metrics["val/nmi"] >= 0.9
    assert seconds < 30


@pytest.mark.parametrize("loss", ["subcenter", "supcon", "triplet"])
def test_other_losses_do_so_too(loss: str) -> None:
    options: dict[str, Any] = {"scale": 16.0} if loss == "subcenter" else {}
    if loss == "triplet":
        options["miner"] = "semihard"
    metrics, _ = learned(loss, **options)
    assert metrics["val/map@r"] >= (0.93 if loss != "triplet" else 0.85)
