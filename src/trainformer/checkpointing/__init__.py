"""Checkpoints: components, the checkpointer that saves and resumes them, the store on disk, retention, and tools.

`torch_files` and `jax_files` store components with their framework; everything else imports neither.
"""

from trainformer.checkpointing.components import StateComponent, StateFiles, Stateful, StatefulAdapter
from trainformer.checkpointing.manifest import FileRecord, InvalidCheckpoint, Manifest
from trainformer.checkpointing.retention import Retention
from trainformer.checkpointing.store import Checkpoint, CheckpointStore, protect
from trainformer.core.types import SharingPattern

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "FileRecord",
    "InvalidCheckpoint",
    "Manifest",
    "Retention",
    "SharingPattern",
    "StateComponent",
    "StateFiles",
    "Stateful",
    "StatefulAdapter",
    "protect",
]
