"""Losses on JAX: tokens, preferences, policies, divergences, and the balance of experts. Never imports torch."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"trainformer.losses.jax.tokens": ["IGNORE_INDEX", "Head", "RowSums", "row_sums", "token_loss"]}
)
