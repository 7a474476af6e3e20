"""Sweeps: a function is tried with many settings, which Optuna chooses, here or on a cluster.

Owns the spaces, the study of a sweep and its folder, the processes in which trials run, and the reading of results.
What is sampled and what is pruned is decided by Optuna; what a trial trains is the business of its function.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.sweep.pruning": ["PruneTrial"],
        "trainformer.sweep.reading": ["SweepRecord", "Trial", "find_sweep", "list_sweeps", "read_sweep"],
        "trainformer.sweep.running": ["Sweep", "sweep"],
        "trainformer.sweep.spaces": [
            "Choice", "Grid", "IntUniform", "Uniform", "choice", "grid", "int_uniform", "log_uniform", "uniform",
        ],
        "trainformer.sweep.trials": ["current_trial"],
    },
)  # fmt: skip
