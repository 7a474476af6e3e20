"""The embedding of a padding token that is also a token of the text."""

from __future__ import annotations

import logging
from typing import Any

import torch

from trainformer.models.generation import stop_token_ids

logger = logging.getLogger("trainformer")


def use_padding_row(model: Any, tokenizer: Any, *, is_new: bool) -> None:
    """Make the embedding of the padding token trainable if that token also occurs in texts, as with pad = eos.

    transformers sets the row of the padding token to zero and excludes it from training. Where the token starts a
    sequence, the hidden states are then zero in every layer, and each RMSNorm multiplies their gradient by
    1 / sqrt(eps), about 1,000: after a dozen layers it overflows, and all gradients are NaN. New models get a random
    row that is trained; padding has no influence on the loss either way. Given models are left alone, with a warning.
    """
    embedding = model.get_input_embeddings()
    index = getattr(embedding, "padding_idx", None)
    real = {*stop_token_ids(model, tokenizer), getattr(tokenizer, "bos_token_id", None)}
    if index is None or index not in real or embedding.weight.is_meta or bool(embedding.weight[index].any()):
        return
    if not is_new:
        logger.warning(
            "token %d pads and also ends or begins texts, but its embedding is zero and is not trained (padding_idx): "
            "a sequence that starts with it can make gradients overflow. Build the model with pad_token_id=None.",
            index,
        )  # fmt: skip
        return
    embedding.padding_idx = None
    config = getattr(model.config, "text_config", model.config)
    spread = getattr(config, "initializer_range", 0.02)
    with torch.no_grad():
        row = torch.randn(embedding.weight.shape[1], generator=torch.Generator().manual_seed(index)) * spread
        embedding.weight[index] = row.to(embedding.weight)
