"""optax optimizers by name, and the rules by parameter path: weight decay, Muon, stacked layers.

Parameters that stack many layers in one array are treated layer by layer, so that stacking does not change the update.
Gradient clipping is in `step`, frozen parameters are in `state`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from trainformer.backends.jax.precision import cast_floating
from trainformer.core.errors import BadArgument, did_you_mean, expected

STACKED = r"(^|/)(layers|blocks)/(?!\d)"
"""Paths of stacked parameters, whose first axis is the layer. Separate layers have a number there (`layers/0/...`)."""

_DECAYED = ("kernel", "embedding")
_EXEMPT = ("bias", "scale", "cls_token", "class_token", "positions", "pos_embed", "position_embedding")
_HEADS = re.compile(r"(^|/)(lm_head|head|classifier|score)/")


def layer_ndim(path: str, leaf: Any) -> int:
    """The number of dimensions of a parameter without a stacked layer axis.

    >>> layer_ndim("layers/mlp/kernel", jnp.zeros((2, 4, 4))), layer_ndim("layers/0/mlp/kernel", jnp.zeros((4, 4)))
    (2, 2)
    """
    return jnp.ndim(leaf) - bool(re.search(STACKED, path))


def decays(path: str, leaf: Any) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to biases, norms and positions.

    >>> decays("layers/mlp/up/kernel", jnp.zeros((2, 4, 4))), decays("layers/mlp/up/bias", jnp.zeros((2, 4)))
    (True, False)
    """
    name = path.rsplit("/", 1)[-1]
    if name in _DECAYED or name in _EXEMPT:
        return name in _DECAYED
    return layer_ndim(path, leaf) > 1


def uses_muon(path: str, leaf: Any) -> bool:
    """Whether Muon updates it: the matrices between the embeddings and the head."""
    is_kernel = path.rsplit("/", 1)[-1] == "kernel"
    return is_kernel and layer_ndim(path, leaf) == 2 and not _HEADS.search(path)


def map_with_path(function: Callable[[str, Any], Any], params: Any) -> Any:
    """`function(path, leaf)` of every leaf, with paths such as ``layers/mlp/kernel``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), params
    )


# -- by name -----------------------------------------------------------------------------------------------------


def _adamw(
    lr: Any,
    decay: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nesterov: bool = False,
    mu_dtype: Any = None,
) -> list[Any]:
    scaled = optax.scale_by_adam(*betas, eps, mu_dtype=mu_dtype, nesterov=nesterov)
    return [scaled, decay, optax.scale_by_learning_rate(lr)]


def _adam(
    lr: Any,
    decay: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nesterov: bool = False,
    mu_dtype: Any = None,
) -> list[Any]:
    scaled, _, step = _adamw(lr, decay, betas, eps, nesterov, mu_dtype)
    return [decay, scaled, step]  # weight decay is part of the gradient


def _lion(lr: Any, decay: Any, betas: tuple[float, float] = (0.9, 0.99), mu_dtype: Any = None) -> list[Any]:
    return [optax.scale_by_lion(*betas, mu_dtype=mu_dtype), decay, optax.scale_by_learning_rate(lr)]


def _sgd(lr: Any, decay: Any, momentum: float = 0.9, nesterov: bool = False) -> list[Any]:
    trace = [optax.trace(momentum, nesterov=nesterov)] if momentum else []
    return [decay, *trace, optax.scale_by_learning_rate(lr)]


def _adafactor(
    lr: Any,
    decay: Any,
    decay_rate: float = 0.8,
    clip_threshold: float = 1.0,
    scale_parameter: bool = True,
    eps: float = 1e-30,
    param_eps: float = 1e-3,
) -> list[Any]:
    scaled = scale_by_adafactor(decay_rate, clip_threshold, scale_parameter, eps, param_eps)
    return [scaled, decay, optax.scale_by_learning_rate(lr)]


def _muon(
    lr: Any,
    decay: Any,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    consistent_rms: float = 0.2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> list[Any]:
    """Muon for matrices, AdamW for the rest. At an RMS of 0.2 both have updates of the same size and share the lr."""
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=ns_steps,
        beta=momentum,
        nesterov=nesterov,
        # The last two axes are the matrix; leading axes are layers, each orthogonalised separately.
        weight_dimension_numbers=lambda updates: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates
        ),
    )
    match_rms = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: consistent_rms * math.sqrt(max(u.shape[-2:])) * u, updates)
    )
    parts = {
        "muon": optax.chain(orthogonal, match_rms, decay, optax.scale_by_learning_rate(lr)),
        "adamw": optax.chain(*_adamw(lr, decay, betas, eps)),
    }

    def labels(params: Any) -> Any:
        return map_with_path(lambda path, leaf: "muon" if uses_muon(path, leaf) else "adamw", params)

    return [optax.partition(parts, labels)]


OPTIMIZERS: dict[str, Callable[..., list[Any]]] = {
    "adamw": _adamw,
    "adam": _adam,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}
_ALIASES = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}


def make_optimizer(
    spec: str | Mapping[str, Any] | optax.GradientTransformation | Callable[..., Any],
    learning_rate: float | Callable[[Any], Any],
    weight_decay: float = 0.0,
    **options: Any,
) -> optax.GradientTransformation:
    """An optax `GradientTransformation` from a name, ``{"name": ..., options}``, a factory, or as it is.

    Weight decay means the same as for torch's optimizer of that name: decoupled and scaled by the learning rate, but
    part of the gradient for `adam` and `sgd`. Moments are float32 whatever the parameters are. A factory
    (`optax.adabelief`) is called with the learning rate and the options, and with `weight_decay` and `mask` if it has
    such parameters. A `GradientTransformation` keeps its own learning rate and decay.
    """
    if isinstance(spec, optax.GradientTransformation):
        if options:
            raise BadArgument(expected("optimizer options with an optimizer given by name", sorted(options)))
        return spec
    mask = partial(map_with_path, decays)
    if isinstance(spec, Mapping):
        given = dict(spec)
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise BadArgument(expected("an optimizer with options to have a 'name'", dict(spec)))
        options = {**given, **options}
        spec = name
    if isinstance(spec, str):
        name = _ALIASES.get(spec.lower(), spec.lower())
        if name not in OPTIMIZERS:
            hint = "Pass any other one of optax as a factory: optimizer=optax.adabelief."
            do = did_you_mean(name, OPTIMIZERS) or hint
            raise BadArgument(expected(f"optimizer to be one of {', '.join(OPTIMIZERS)}", name, do))
        make, options = OPTIMIZERS[name], _check_options(name, options)
        decay = optax.add_decayed_weights(weight_decay, mask) if weight_decay else optax.identity()
        return in_float32(optax.chain(*make(learning_rate, decay, **options)))
    if isinstance(spec, type) and spec.__module__.startswith("torch."):
        do = f"Pass its name, for instance {sorted(OPTIMIZERS)[0]!r}, or a factory such as optax.adamw."
        raise BadArgument(expected("an optimizer of optax", f"{spec.__module__}.{spec.__qualname__}", do))
    if callable(spec):
        takes = inspect.signature(spec).parameters
        ours = {key: value for key, value in (("weight_decay", weight_decay), ("mask", mask)) if key in takes}
        made = spec(learning_rate, **{**ours, **options})
        if not isinstance(made, optax.GradientTransformation):
            raise BadArgument(expected("the optimizer factory to return an optax GradientTransformation", made))
        return made
    raise BadArgument(expected("optimizer to be a name, a factory or an optax GradientTransformation", spec))


def _check_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under our names; optax's (b1, b2) and HF's are translated."""
    aliases = {"adam_beta1": "b1", "adam_beta2": "b2", "adam_epsilon": "eps"}
    options = {aliases.get(key, key): value for key, value in options.items()}
    known = tuple(inspect.signature(OPTIMIZERS[name]).parameters)[2:]
    if "betas" in known and {"b1", "b2"} & set(options):
        default = (0.9, 0.99) if name == "lion" else (0.9, 0.999)
        options["betas"] = (options.pop("b1", default[0]), options.pop("b2", default[1]))
    for unknown in sorted(set(options) - set(known)):
        what = f"options that {name} takes"
        raise BadArgument(expected(what, unknown, did_you_mean(unknown, known) or f"It takes {known}."))
    for option, value in options.items():
        _check_option(name, option, value)
    return options


def _check_option(name: str, option: str, value: Any) -> None:
    if option == "mu_dtype":
        fits, words = value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating), "a floating-point dtype or None"
    elif option in ("nesterov", "scale_parameter"):
        fits, words = isinstance(value, bool), "True or False"
    elif option == "betas":
        pair = isinstance(value, (tuple, list)) and len(value) == 2
        fits, words = pair and all(_is_number(v) and 0 <= v < 1 for v in value), "two numbers of at least 0 and below 1"
    elif option == "momentum":
        fits, words = _is_number(value) and 0 <= value < 1, "a number of at least 0 and below 1"
    else:
        fits, words = _is_number(value) and value > 0, "a positive number"
    if not fits:
        raise BadArgument(expected(f"{option} of {name} to be {words}", value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- transformations that optax lacks ------------------------------------------------------------------------------


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimizer in float32, state included, also for bf16 parameters.

    optax takes the dtype of the second moments from the parameters, and in bf16 they stop changing after a few steps.
    """

    def init(params: Any) -> Any:
        return tx.init(cast_floating(params, jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        params = None if params is None else cast_floating(params, jnp.float32)
        return tx.update(cast_floating(updates, jnp.float32), state, params)

    return optax.GradientTransformation(init, update)


class AdafactorState(NamedTuple):
    """Second moments: factored into rows and columns for matrices, full for other parameters (unused ones are (1,))."""

    count: Any
    rows: Any
    columns: Any
    full: Any


def scale_by_adafactor(
    decay_rate: float = 0.8,
    clip_threshold: float = 1.0,
    scale_parameter: bool = True,
    eps: float = 1e-30,
    param_eps: float = 1e-3,
) -> optax.GradientTransformation:
    """Adafactor without the learning rate; `scale_parameter` scales updates by the RMS of the parameter, per layer.

    optax's version would average over the layers of a stacked array, and factor the stacked biases of a deep model.
    """

    def init(params: Any) -> AdafactorState:
        def zeros(part: str) -> Any:
            return map_with_path(lambda path, p: jnp.zeros(shapes(path, p)[part], p.dtype), params)

        return AdafactorState(jnp.zeros((), jnp.int32), zeros("rows"), zeros("columns"), zeros("full"))

    def shapes(path: str, p: Any) -> dict[str, tuple[int, ...]]:
        if layer_ndim(path, p) < 2:
            return {"rows": (1,), "columns": (1,), "full": p.shape}
        return {"rows": p.shape[:-1], "columns": (*p.shape[:-2], p.shape[-1]), "full": (1,)}

    def update(updates: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        assert params is not None, "Adafactor needs the parameters"
        count = optax.safe_increment(state.count)
        keep = 1.0 - count.astype(jnp.float32) ** -decay_rate

        def one(path: str, g: Any, rows: Any, columns: Any, full: Any, p: Any) -> tuple[Any, ...]:
            squares = jnp.square(g) + eps
            if layer_ndim(path, g) < 2:
                full = keep * full + (1 - keep) * squares
                scaled = g * jax.lax.rsqrt(full)
            else:
                rows = keep * rows + (1 - keep) * squares.mean(-1)
                columns = keep * columns + (1 - keep) * squares.mean(-2)
                share = rows / rows.mean(-1, keepdims=True)
                scaled = g * jax.lax.rsqrt(share)[..., :, None] * jax.lax.rsqrt(columns)[..., None, :]
            axes = tuple(range(g.ndim - layer_ndim(path, g), g.ndim))
            scaled = scaled / jnp.maximum(1.0, _rms(scaled, axes) / clip_threshold)
            size = jnp.maximum(_rms(p, axes), param_eps) if scale_parameter else 1.0
            return scaled * size, rows, columns, full

        leaves, tree = jax.tree_util.tree_flatten_with_path(updates)
        others = [jax.tree.leaves(part) for part in (state.rows, state.columns, state.full, params)]
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        done = [one(path, g, *rest) for path, (_, g), *rest in zip(paths, leaves, *others, strict=True)]
        scaled, rows, columns, full = (jax.tree.unflatten(tree, part) for part in zip(*done, strict=True))
        return scaled, AdafactorState(count, rows, columns, full)

    return optax.GradientTransformation(init, update)


def _rms(x: Any, axes: tuple[int, ...]) -> Any:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
