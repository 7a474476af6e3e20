"""Losses on JAX: tokens, with or without all logits at once, and preferences. Torch is never imported."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.losses.jax.preference": [
            "PreferenceRewards",
            "dpo_loss",
            "orpo_loss",
            "preference_rewards",
            "simpo_loss",
        ],
        "trainformer.losses.jax.tokens": [
            "RowSums",
            "TokenLoss",
            "head_cross_entropy",
            "row_sums",
            "token_cross_entropy",
        ],
    },
)
