"""Rotary position embeddings: their frequencies and angles, and how HF configs describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainformer.core.errors import BadArgument, expected
from trainformer.models.jax.families.family import refuse_unsupported, required

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
Tables = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: the base, the rotated share of each head, and the scaling for longer contexts.

    Options of the scalings are named as in HF configs. `attention_factor` multiplies cosines and sines.
    """

    theta: float = 10_000.0
    kind: str = "default"
    partial: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            do = f"The JAX models support {', '.join(map(repr, KINDS))}."
            if self.kind == "dynamic":
                do += " The frequencies of 'dynamic' depend on the longest text so far; 'yarn' has fixed ones."
            raise BadArgument(expected("a supported rotary scaling (rope_type)", self.kind, do))

    def check(self, width: int) -> None:
        """Raise if the options do not fit heads of this width."""
        pairs = -(-int(width * self.partial) // 2)
        if not 0 < pairs <= width // 2:
            what = f"partial_rotary_factor to rotate between 2 and {width} of the {width} features of a head"
            raise BadArgument(expected(what, self.partial))
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            if len(getattr(self, name)) != pairs:
                what = f"{name} with {pairs} numbers, one per pair of rotated features"
                raise BadArgument(expected(what, len(getattr(self, name))))

    def frequencies(self, width: int) -> jax.Array:
        """One frequency per pair of rotated features, in float32; for longrope those of short texts."""
        rotated = int(width * self.partial)
        base = 1.0 / (self.theta ** (jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated))
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            # Keep high frequencies, scale low ones, and interpolate between the two limits.
            turns = self.original_positions * base / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = jnp.clip(blend, 0.0, 1.0)
            return base / self.factor * (1 - blend) + base * blend
        if self.kind == "yarn":
            scaled = self._yarn_ramp(rotated)
            return base / self.factor * scaled + base * (1 - scaled)
        if self.kind == "longrope":
            return base / jnp.asarray(self.short_factor, jnp.float32)
        return base

    def _yarn_ramp(self, rotated: int) -> jax.Array:
        """How much of each frequency YaRN scales: 0 for features of many turns, 1 for those of few."""

        def feature(turns: float) -> float:
            return rotated * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = feature(self.beta_fast), feature(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        high += 0.001 if low == high else 0
        return jnp.clip((jnp.arange(rotated // 2, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)

    def tables(self, positions: jax.Array, width: int) -> Tables:
        """Cosines and sines (batch, sequence, 1, pairs of rotated features)."""
        frequencies = self.frequencies(width)
        if self.kind == "longrope":
            ratio = jnp.asarray(self.short_factor, jnp.float32) / jnp.asarray(self.long_factor, jnp.float32)
            is_long = text_lengths(positions) > self.original_positions
            frequencies = jnp.where(is_long[..., None, None], frequencies * ratio, frequencies)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def text_lengths(positions: jax.Array) -> jax.Array:
    """For each position, the length of the text it belongs to. A text ends where the next position is not larger."""
    index = jnp.broadcast_to(jnp.arange(positions.shape[1], dtype=jnp.int32), positions.shape)
    is_last = jnp.concatenate(
        [positions[:, 1:] <= positions[:, :-1], jnp.ones_like(positions[:, :1], jnp.bool_)], axis=1
    )
    last = jax.lax.cummin(jnp.where(is_last, index, positions.shape[1] - 1), axis=1, reverse=True)
    return jnp.take_along_axis(positions, last, axis=1) + 1


def rotate(x: jax.Array, tables: Tables) -> jax.Array:
    """Apply rotary embeddings to (first half, second half) pairs of the rotated features, as in HF checkpoints."""
    cos, sin = tables
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


# -- HF configs ------------------------------------------------------------------------------------------------------


def read_rope(config: Mapping[str, Any], *, theta: float = 10_000.0, partial: float | None = None) -> Rope:
    """transformers 5 writes ``rope_parameters``; earlier versions ``rope_theta`` and ``rope_scaling``.

    `theta` and `partial` are the family's defaults; a family without `partial` rotates whole heads.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [name for name, value in given.items() if isinstance(value, Mapping)]
    if nested:
        do = "This model has the same rotary embeddings in all layers."
        raise BadArgument(expected("rope_parameters without layer types", nested, do))
    if partial is None:
        refuse_unsupported(config, {"partial_rotary_factor": 1.0})
        refuse_unsupported(given, {"partial_rotary_factor": 1.0})
    share = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or partial or 1.0
    base = float(given.get("rope_theta") or config.get("rope_theta") or theta)
    kind = given.get("rope_type") or given.get("type") or "default"
    options: dict[str, Any] = {"theta": base, "kind": kind, "partial": float(share)}
    if kind in ("linear", "llama3"):
        options["factor"] = float(given.get("factor") or 1.0)
    if kind in ("llama3", "yarn", "longrope"):
        places = (config.get("original_max_position_embeddings"), given.get("original_max_position_embeddings"))
        original = next((value for value in places if value), None)
        options["original_positions"] = int(original or required(config, "max_position_embeddings"))
    if kind == "llama3":
        options |= {name: float(required(given, name)) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        options |= _yarn_options(config, given, options["original_positions"])
    elif kind == "longrope":
        options |= _longrope_options(config, given, options["original_positions"])
    return Rope(**options)


def _factor(config: Mapping[str, Any], given: Mapping[str, Any], original: int) -> float:
    return float(given.get("factor") or required(config, "max_position_embeddings") / original)


def _yarn_options(config: Mapping[str, Any], given: Mapping[str, Any], original: int) -> dict[str, Any]:
    factor = _factor(config, given, original)

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = given.get("attention_factor")
    if attention is None:
        upper, lower = given.get("mscale"), given.get("mscale_all_dim")
        attention = growth(upper) / growth(lower) if upper and lower else growth(1.0)
    return {
        "factor": factor,
        "attention_factor": float(attention),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "truncate": bool(given.get("truncate", True)),
    }


def _longrope_options(config: Mapping[str, Any], given: Mapping[str, Any], original: int) -> dict[str, Any]:
    factor, attention = _factor(config, given, original), given.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {name: tuple(map(float, required(given, name))) for name in ("short_factor", "long_factor")}
    return {**factors, "factor": factor, "attention_factor": float(attention)}


def write_rope(rope: Rope) -> dict[str, Any]:
    """The ``rope_parameters`` of transformers 5."""
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.partial != 1.0:
        written["partial_rotary_factor"] = rope.partial
    if rope.kind != "default":
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        written["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "llama3":
        written |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind in ("yarn", "longrope"):
        written["attention_factor"] = rope.attention_factor
    if rope.kind == "yarn":
        written |= {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "truncate")}
    if rope.kind == "longrope":
        written |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    return written
