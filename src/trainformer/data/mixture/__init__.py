"""Mixtures of data: several sources with weights, as one deterministic and resumable source of batches."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.mixture.mixture": ["Mixture"],
        "trainformer.data.mixture.dataset": ["MixtureDataset"],
        "trainformer.data.mixture.stream": ["MixtureStream"],
    },
)
