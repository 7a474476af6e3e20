"""`RewardModel`: a decoder with a head of one output, transformers' ``...ForSequenceClassification`` of any family.

The `model_type` of its config has a suffix (``llama/score``), by which `families` finds its variant of the family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families.family import SCORED, Family, Weight
from trainformer.models.jax.layers import Linear

_LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
Config = TypeVar("Config", bound=DecoderConfig)


class RewardModel(Decoder):
    """``model(input_ids, last)`` returns a score for each row, (rows,): that of the token at the position `last`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.lm_head = nnx.data(None)
        self.score = Linear(config.hidden_size, 1, rngs=rngs, bias=False, scale=config.initializer_range)

    def __call__(self, input_ids: jax.Array, last: jax.Array, **options: Any) -> jax.Array:  # type: ignore[override]
        """The scores in float32. Options as for `hidden_states`."""
        states = self.hidden_states(input_ids, **options)
        # Not a gather: this keeps a sharded sequence where it is.
        is_last = jnp.arange(input_ids.shape[1]) == last[:, None]
        chosen = jnp.sum(jnp.where(is_last[..., None], states, 0), axis=1)
        return self.score(chosen)[:, 0].astype(jnp.float32)

    def head(self, states: jax.Array) -> jax.Array:
        do = "Train it with RewardTrainer, or pass a causal language model."
        raise BadArgument(expected("a model that predicts tokens", "a reward model", do))


def last_tokens(input_ids: jax.Array, pad_id: int) -> jax.Array:
    """The position of the rightmost token of each row that is no padding, as transformers finds it.

    >>> last_tokens(jnp.array([[5, 6, 0], [7, 0, 0]]), pad_id=0).tolist()
    [1, 0]
    """
    return jnp.max(jnp.where(input_ids != pad_id, jnp.arange(input_ids.shape[1]), 0), axis=1)


def scored(config: Config, pad_id: int | None = None) -> Config:
    """The config of a reward model from that of a decoder. `pad_id` is written to its ``config.json``."""
    base = replace(config, model_type=config.model_type.removesuffix(SCORED))
    if pad_id is not None:
        from trainformer.models.jax.families.family import family_of

        source = json.loads(base.source) if base.source else family_of(base.model_type).write_config(base)
        base = replace(base, source=json.dumps({**source, **_LABELS, "pad_token_id": pad_id}))
    return replace(base, model_type=base.model_type + SCORED)


def scored_family(family: Family) -> Family:
    """The variant of a family with a head of one output."""

    def read_config(config: Mapping[str, Any]) -> Any:
        return scored(family.read_config({**config, **_LABELS}))

    def plain(config: Any) -> Any:
        return replace(config, model_type=config.model_type.removesuffix(SCORED))

    def write_config(config: Any) -> dict[str, Any]:
        written = family.write_config(plain(config))
        name = re.sub(r"(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", written["architectures"][0])
        return {**written, **_LABELS, "architectures": [name]}

    def weights(config: Any) -> list[Weight]:
        kept = [weight for weight in family.weights(plain(config)) if not weight.path.startswith("lm_head/")]
        return [*kept, Weight("score/kernel", "score.weight", (1, 0))]

    return replace(
        family,
        read_config=read_config,
        write_config=write_config,
        weights=weights,
        build=RewardModel,
        task_type="SEQ_CLS",
        ignored=(*family.ignored, r"^(lm_head|embed_out)\."),
    )
