"""Tables: reading them from files, frames and arrays, and encoding their columns as numbers."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.tabular.encoder": ["TableEncoder"],
        "trainformer.data.tabular.table": ["Table", "load_table", "sample_names"],
    },
)
