"""Sweeps: call a function with many settings, chosen by Optuna, on this machine or on a cluster.

Owns the search spaces, the study of a sweep and its folder, the processes that run trials, and the reading of results.
Optuna decides what to sample and what to prune.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.sweep.api": ["Sweep", "sweep"],
        "trainformer.sweep.reading": ["SweepRecord", "Trial", "find_sweep", "list_sweeps", "read_sweep"],
        "trainformer.sweep.spaces": [
            "Choice", "Grid", "IntUniform", "Uniform", "choice", "grid", "int_uniform", "log_uniform", "uniform",
        ],
        "trainformer.sweep.trials": ["PruneTrial", "current_trial"],
    },
)  # fmt: skip
