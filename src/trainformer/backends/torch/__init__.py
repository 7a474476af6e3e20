"""PyTorch: placing batches, the step, precision, optimizers and schedules, state in and out."""

from trainformer.backends.torch.backend import TorchBackend
from trainformer.backends.torch.state import capture_random, restore_random

__all__ = ["TorchBackend", "capture_random", "restore_random"]
