"""The floating-point operations of a function: those of its matrix products and convolutions, from its jaxpr.

XLA's own estimate (`cost_analysis`) counts the body of a scan once, and so one layer of many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """The FLOPs of a call, of which only the shapes of the arguments matter. Nothing is compiled or computed.

    >>> import jax.numpy as jnp
    >>> def layers(x, weights):
    ...     return jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)[0]
    >>> count_flops(layers, jnp.ones((2, 3)), jnp.ones((5, 3, 3)))  # 2 x 2 x 3 x 3 in each of five layers
    180.0
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    return _of_jaxpr(jax.make_jaxpr(function)(*shapes).jaxpr)


def _of_jaxpr(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name, parameters = equation.primitive.name, equation.params
    shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.invars]
    outputs = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        return 2.0 * math.prod(outputs[0]) * math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        features = shapes[1][parameters["dimension_numbers"].rhs_spec[0]]
        inserted = math.prod(parameters["lhs_dilation"])  # zeros between the rows of a gradient
        return 2.0 * math.prod(outputs[0]) * math.prod(shapes[1]) / features / inserted
    if name.startswith("dot_product_attention"):  # cuDNN's: a kernel without a jaxpr
        (batch, queries, heads, width), keys = shapes[0], shapes[1][1]
        products = 5 if "bwd" in name else 2
        return products * 2.0 * batch * heads * queries * keys * width
    inner = [_of_jaxpr(jaxpr) for jaxpr in _jaxprs(parameters)]
    return _repetitions(name, parameters) * (max(inner, default=0.0) if name == "cond" else sum(inner))


def _jaxprs(parameters: dict[str, Any]) -> Iterator[Any]:
    """The functions that an equation calls."""
    for value in parameters.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, core.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, core.Jaxpr):
                yield one


def _repetitions(name: str, parameters: dict[str, Any]) -> int:
    """How often they are called. The length of a `while` is unknown: its body counts once."""
    if name == "scan":
        return int(parameters["length"])
    if name == "pallas_call":
        return math.prod(size for size in parameters["grid_mapping"].grid if isinstance(size, int))
    return int(parameters["mesh"].size) if name == "shard_map" else 1
