"""The scan over stacked layers: layers of several kinds (window, rotary embeddings) are compiled once per pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LayerKind(NamedTuple):
    """What may differ between the layers of a stack: the window, and which rotary embeddings (None: no positions)."""

    window: int | None = None
    rope: int | None = 0


def layer_groups(kinds: Sequence[LayerKind]) -> list[tuple[tuple[LayerKind, ...], int]]:
    """Layers as patterns with repetitions, so that each pattern is compiled once.

    It is the shortest pattern that repeats over all layers and a rest, or runs of equal layers: whichever compiles
    fewer layers.

    >>> local, whole = LayerKind(window=4), LayerKind()
    >>> [(len(pattern), count) for pattern, count in layer_groups([local, local, whole] * 8 + [local] * 2)]
    [(3, 8), (1, 2)]
    >>> [(len(pattern), count) for pattern, count in layer_groups([whole] * 28 + [local] * 8)]
    [(1, 28), (1, 8)]
    """
    kinds = tuple(kinds)
    runs = _runs(kinds)
    for size in range(1, len(kinds)):
        if size >= len(runs):
            break
        count = len(kinds) // size
        if kinds[: size * count] == kinds[:size] * count and kinds[size * count :] == kinds[: len(kinds) % size]:
            periodic = [(kinds[:size], count), *_runs(kinds[size * count :])]
            return min(periodic, runs, key=lambda groups: sum(len(pattern) for pattern, _ in groups))
    return runs


def _runs(kinds: Sequence[LayerKind]) -> list[tuple[tuple[LayerKind, ...], int]]:
    return [((kind,), len(list(same))) for kind, same in groupby(kinds)]


def scan_layers(
    step: Callable[[Any, Any, LayerKind], tuple[Any, Any]],
    x: Any,
    stacked: Any,
    kinds: Sequence[LayerKind],
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of ``step(x, layer, kind) -> (x, output)`` over stacked layers; outputs are stacked as well.

    `unroll` is the number of layers per iteration; a pattern of several kinds is never split. Weights of layers outside
    the repeated pattern are sliced off, which copies the stack once per step.
    """
    outputs, start = [], 0
    for pattern, count in layer_groups(kinds):
        size, end = len(pattern), start + len(pattern) * count

        def body(x: Any, layers: Any, pattern: tuple[LayerKind, ...] = pattern) -> tuple[Any, Any]:
            made = []
            for number, kind in enumerate(pattern):
                x, output = step(x, jax.tree.map(itemgetter(number), layers), kind)
                made.append(output)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)

        part = jax.tree.map(itemgetter(slice(start, end)), stacked)
        if count == 1:
            x, output = body(x, part)
        else:
            part = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), part)  # noqa: B023
            x, output = jax.lax.scan(body, x, part, unroll=min(count, -(-unroll // size)))
            output = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), output)
        outputs.append(output)
        start = end
    return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)
