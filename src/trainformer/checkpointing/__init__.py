"""Checkpoints without any framework: the store, what is kept, and writing in the background.

How a component becomes files is the business of a backend; see `trainformer.utils.tensor_files`.
"""

from trainformer.checkpointing.components import SharingPattern, StateComponent, Stateful
from trainformer.checkpointing.manifest import FileRecord, InvalidCheckpoint, Manifest
from trainformer.checkpointing.retention import Retention
from trainformer.checkpointing.store import Checkpoint, CheckpointStore, protect
from trainformer.checkpointing.writer import BackgroundWriter

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
