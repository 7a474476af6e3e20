"""Checkpoint tools: list, inspect, verify, compare, export weights, finalize for deployment, protect.

Every path may be a run folder or its checkpoints folder (both mean the newest checkpoint), the folder of one
checkpoint, or, where that makes sense, a single file. Nothing here modifies a run, and nothing that is loaded is
executed. Implemented in `trainformer.checkpointing.tools`.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.checkpointing": ["Checkpoint", "InvalidCheckpoint"],
        "trainformer.checkpointing.tools.listing": ["list_checkpoints", "protect", "unprotect", "verify"],
        # Modules must not be named like their functions: importing one would shadow the function.
        "trainformer.checkpointing.tools.summary": ["Part", "Summary", "inspect"],
        "trainformer.checkpointing.tools.comparison": ["Comparison", "Difference", "PartComparison", "compare"],
        "trainformer.checkpointing.tools.states": ["export_weights"],
        "trainformer.checkpointing.tools.finalized": ["Finalized", "finalize"],
    },
)
