"""Train a WGAN-GP on the handwritten digits that scikit-learn carries. About two minutes on a laptop's CPU.

Two optimizers: the critic is updated in every step, the generator in every fifth. The generator is the task's `model`:
the EMA, checkpoints and exports are of it. Run with ``python examples/wgan_gp.py`` where trainformer[samples] is
installed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainformer import Loss, OptimizerConfig, Trainer
from trainformer.callbacks import EMA
from trainformer.data.builtin import load_builtin
from trainformer.eval import frechet_distance
from trainformer.tasks import TaskBase

NOISE = 16


class NoisyDigits(Dataset):
    """Each image with the random numbers of its step, drawn per sample: no batch size changes the result."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.images = load_builtin("digits").images.flatten(1).to(dtype) / 255
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {
            "image": self.images[i],
            "noise": torch.randn(NOISE, dtype=self.dtype),
            "mix": torch.rand(1, dtype=self.dtype),
        }


def mlp(inputs: int, outputs: int, hidden: int = 256) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


class WGAN(TaskBase):
    """A Wasserstein GAN with gradient penalty."""

    def __init__(self, every: int = 5, penalty: float = 10.0, hidden: int = 256) -> None:
        self.model = nn.Sequential(mlp(NOISE, 64, hidden), nn.Sigmoid())  # the generator
        self.critic = mlp(64, 1, hidden)
        self.every = every
        self.penalty = penalty

    def configure_optimizers(self) -> dict[str, OptimizerConfig]:
        adam = {"name": "adam", "betas": (0.0, 0.9)}
        return {
            "critic": OptimizerConfig(params=self.critic, optimizer=adam, gradient_clip=0),
            "generator": OptimizerConfig(params=self.model, optimizer=adam, gradient_clip=0, every=self.every),
        }

    def critic_step(self, batch: dict[str, Tensor]) -> Loss:
        real = batch["image"]
        with torch.no_grad():
            fake = self.model(batch["noise"])
        between = (fake + batch["mix"] * (real - fake)).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square()
        gap = self.critic(real) - self.critic(fake)
        return Loss((self.penalty * penalty - gap[:, 0]).sum(), len(real), {"distance": (gap.sum(), len(real))})

    def generator_step(self, batch: dict[str, Tensor]) -> Loss:
        return Loss(-self.critic(self.model(batch["noise"])).sum(), len(batch["noise"]))

    def eval_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"real": batch["image"], "fake": self.model(batch["noise"])}

    def on_eval_end(self, rows: dict[str, Tensor]) -> dict[str, float]:
        """The Fréchet distance between real and generated digits; pixels take the place of Inception features."""
        return {"frechet_distance": frechet_distance(rows["real"], rows["fake"])}


def main(max_steps: int = 6000, **settings: Any) -> dict[str, float]:
    data = NoisyDigits()
    trainer = Trainer(
        WGAN(),
        data,
        data,
        max_steps=max_steps,
        batch_size=64,
        lr=2e-4,
        scheduler="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        monitor_metric="val/frechet_distance",
        eval_every="1000steps",
        log_every=500,
        callbacks=[EMA(decay=0.995)],
        **{"run_dir": "runs/wgan_gp", "resume": None, **settings},
    )
    trainer.fit()
    found = trainer.evaluate()
    noise = frechet_distance(data.images, torch.rand_like(data.images))
    halves = frechet_distance(data.images[::2], data.images[1::2])
    print(f"Fréchet distance to the real digits: generated {found['val/frechet_distance']:.2f}, ", end="")
    print(f"uniform noise {noise:.2f}; between two halves of the real ones {halves:.2f}")
    return found


if __name__ == "__main__":
    main()
