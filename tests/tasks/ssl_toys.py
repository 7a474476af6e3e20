"""Small self-supervised tasks, for the tests of all methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainformer import Trainer
from trainformer.tasks import SSL

METHODS = ("simclr", "moco", "moco_v3", "byol", "dino", "mae")
MOMENTUM = ("moco", "moco_v3", "byol", "dino")
SIZE = 16


class Net(nn.Module):
    """Two convolutions, 12 features."""

    def __init__(self, batch_norm: bool = True, channels: int = 3) -> None:
        super().__init__()

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width) if batch_norm else nn.GroupNorm(2, width)

        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1, bias=False), norm(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1, bias=False), norm(12), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.second(self.first(images)))


def groups() -> Net:
    """One in which images do not see each other."""
    return Net(batch_norm=False)


def small_vit() -> dict[str, Any]:
    """Arguments that make timm's test ViT see 16 patches of 4 pixels, with two blocks."""
    return {"image_size": SIZE, "model_kwargs": {"patch_size": 4, "depth": 2}}


def make(method: str, backbone: str | Callable[[], nn.Module] | None = None, **options: Any) -> SSL:
    """A task of a few thousand parameters, with a `Net`, or a ViT for MAE. A backbone is made here, after seeding."""
    torch.manual_seed(0)
    if backbone is None:
        backbone = "test_vit" if method == "mae" else Net
    if backbone == "test_vit":
        options = {**small_vit(), **options}
    sizes: dict[str, dict[str, Any]] = {
        "simclr": {"hidden_dim": 16, "proj_dim": 8},
        "moco": {"hidden_dim": 16, "proj_dim": 8, "queue_size": 32},
        "moco_v3": {"hidden_dim": 16, "proj_dim": 8},
        "byol": {"hidden_dim": 16, "proj_dim": 8},
        "dino": {"out_dim": 24, "hidden_dim": 16, "bottleneck_dim": 8, "num_local": 2, "local_size": 8},
        "mae": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2},
    }
    made = backbone if isinstance(backbone, str) else backbone()
    task = SSL(method, made, **{**sizes[method], **options})
    assert task.model is not None  # built now, so that two tasks made alike are alike
    return task


def pixels(count: int, size: int | tuple[int, int] = SIZE, channels: int = 3, seed: int = 0) -> Tensor:
    """Images as uint8: noise over a coarse picture, so that they differ as a whole as well."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (size, size) if isinstance(size, int) else size
    coarse = torch.rand(count, channels, 2, 2, generator=generator)
    picture = nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    noise = torch.rand(count, channels, height, width, generator=generator)
    return ((0.7 * picture + 0.3 * noise) * 255).to(torch.uint8)


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.arange(count) % classes


def two_views(images: Tensor) -> list[Tensor]:
    """Views without chance."""
    return [images - 0.5, 0.5 - images.flip(-1)]


def crops(images: Tensor) -> list[Tensor]:
    """Two large and three small views without chance."""
    small = [images[..., :8, :8], images[..., 8:, 8:].flip(-2), images[..., 4:12, 4:12] * 0.5]
    return [*two_views(images), *(part - 0.5 for part in small)]


def fit(task: SSL, data: Any, **settings: Any) -> Trainer:
    """A quiet run on the CPU."""
    return trainer(task, data, **settings).fit()


def trainer(task: SSL, data: Any, **settings: Any) -> Trainer:
    """A quiet trainer on the CPU that starts from scratch by default."""
    quiet = {"log": "none", "device": "cpu", "precision": "no", "resume": None, "save_every": None, "num_workers": 0}
    return Trainer(task, data, **{**quiet, **settings})


class Watch:
    """A callback that calls a function of the trainer after every step."""

    def __init__(self, look: Callable[[Trainer], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_step_end(self, trainer: Trainer, step: int, loss: Any) -> None:
        self.seen.append(self.look(trainer))


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names under which two states differ, bit by bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
