"""PyTorch: placing batches, the step, precision, optimizers and schedules, state in and out."""

from trainformer.backends.torch.backend import TorchBackend
from trainformer.backends.torch.state import capture_random, restore_random
from trainformer.utils.known_messages import hide_known_messages

hide_known_messages()

__all__ = ["TorchBackend", "capture_random", "restore_random"]
