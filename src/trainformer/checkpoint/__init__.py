"""Checkpoints for people: list, inspect, verify, compare, export weights, make what is deployed, protect.

Every path may be a run's folder or its folder of checkpoints (both mean the newest), the folder of one checkpoint, or,
where that makes sense, a single file. Nothing here changes a run, and nothing that is read is executed.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.engine.checkpoint": ["Checkpoint", "InvalidCheckpoint"],
        "trainformer.checkpoint.places": ["list_checkpoints", "protect", "unprotect"],
        # The modules are not named like their functions: importing one would put it in the function's place.
        "trainformer.checkpoint.verifying": ["verify"],
        "trainformer.checkpoint.summary": ["Part", "Summary", "inspect"],
        "trainformer.checkpoint.comparison": ["Comparison", "Difference", "PartComparison", "compare"],
        "trainformer.checkpoint.weights": ["export_weights"],
        "trainformer.checkpoint.finalizing": ["Finalized", "finalize"],
    },
)
