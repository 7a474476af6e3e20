"""Knowledge distillation on the digits: a large teacher and a small student train together. Half a minute on a CPU.

Two optimizers, two step functions. The student learns from the labels and from the teacher's softened predictions
(Hinton et al., 2015). Run with ``python examples/distillation.py`` where trainformer[samples] is installed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainformer import Loss, OptimizerConfig, Trainer
from trainformer.data.builtin import load_builtin
from trainformer.tasks import TaskBase


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Distillation(TaskBase):
    """A student that learns from a teacher, which learns at the same time."""

    def __init__(self, student: int = 16, teacher: int = 256, temperature: float = 4.0, share: float = 0.7) -> None:
        self.model = mlp(student)
        self.teacher = mlp(teacher)
        self.temperature = temperature
        self.share = share  # of the teacher in the student's loss

    def configure_optimizers(self) -> dict[str, OptimizerConfig]:
        return {
            "student": OptimizerConfig(params=self.model, lr=5e-3),
            "teacher": OptimizerConfig(params=self.teacher, lr=1e-3),
        }

    def teacher_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.teacher(images), labels)

    def student_step(self, batch: tuple[Tensor, Tensor]) -> Loss:
        images, labels = batch
        with torch.no_grad():
            target = (self.teacher(images) / self.temperature).softmax(-1)
        logits = self.model(images)
        soft = F.kl_div((logits / self.temperature).log_softmax(-1), target, reduction="none").sum(-1)
        hard = F.cross_entropy(logits, labels, reduction="none")
        losses = self.share * self.temperature**2 * soft + (1 - self.share) * hard
        return Loss(losses.sum(), len(losses), {"hard": (hard.sum(), len(hard)), "soft": (soft.sum(), len(soft))})

    def eval_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.model(images)
        return {
            "loss": F.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(-1) == labels).double().mean(),
            "teacher_accuracy": (self.teacher(images).argmax(-1) == labels).double().mean(),
        }


def digits(dtype: torch.dtype = torch.float32) -> TensorDataset:
    data = load_builtin("digits")
    return TensorDataset(data.images.flatten(1).to(dtype) / 255, data.tensors[1])


def main(epochs: int = 20, **settings: Any) -> dict[str, float]:
    trainer = Trainer(
        Distillation(),
        digits(),
        val_split=0.2,
        epochs=epochs,
        batch_size=64,
        monitor_metric="val/accuracy",
        monitor_mode="max",
        log_every=100,
        **{"run_dir": "runs/distillation", "resume": None, **settings},
    )
    trainer.fit()
    found = trainer.evaluate()
    print(f"accuracy: student {found['val/accuracy']:.1%}, teacher {found['val/teacher_accuracy']:.1%}")
    return found


if __name__ == "__main__":
    main()
