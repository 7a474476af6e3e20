"""Checkpoints without any framework: the store, what is kept, and writing in the background.

How a component becomes files is the business of a backend; see `trainformer.backends.torch.codec`.
"""

from trainformer.engine.checkpoint.components import SharingPattern, StateComponent, Stateful
from trainformer.engine.checkpoint.manifest import FileRecord, InvalidCheckpoint, Manifest
from trainformer.engine.checkpoint.retention import Retention
from trainformer.engine.checkpoint.store import Checkpoint, CheckpointStore, protect
from trainformer.engine.checkpoint.writer import BackgroundWriter

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "FileRecord",
    "InvalidCheckpoint",
    "Manifest",
    "Retention",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "protect",
]
