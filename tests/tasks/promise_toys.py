"""Small runs of segmentation, detection, tabular and forecasting tasks in double precision, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainformer import Trainer
from trainformer.tasks import SemanticSegmentation


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
    from trainformer.data.shapes import draw_shapes

    pictures = [draw_shapes(number, size) for number in range(count)]
    images = torch.stack([torch.from_numpy(picture.image).permute(2, 0, 1) for picture in pictures])
    return images, holes(torch.stack([torch.from_numpy(picture.mask) for picture in pictures]))


def segmentation(**more: Any) -> Trainer:
    torch.manual_seed(0)
    task = SemanticSegmentation(Pixelwise(), 4, loss="ce+dice", class_weights=[0.5, 1, 2, 1])
    return Trainer(task, shapes(24), val_data=shapes(7), **settings(**more))


CASES = {"segmentation": segmentation}


def trained(rank: int, world: int) -> dict[str, Tensor]:
    """Weights and metrics of each case after three steps, with batches that the ranks cannot share equally."""
    found: dict[str, Tensor] = {}
    for name, make in CASES.items():
        trainer = make(batch_size=5, eval_batch_size=3, run_dir=f"{name}-{world}", strategy="auto").fit()
        found |= {f"{name}/{key}": value.clone() for key, value in trainer.task.model.state_dict().items()}
        found |= {f"{name}/{key}": torch.tensor(value) for key, value in trainer.evaluate().items()}
    return found
