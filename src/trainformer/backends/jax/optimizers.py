"""Optimizers of the JAX side by name, and which parameters each part of them treats.

Owns the names, their options and the rules by path: what decays, what Muon orthogonalises, which parameters hold many
layers in one array. Those arrays are treated layer by layer, so that stacking changes no number. Clipping is the step's
business, frozen parameters are the state's.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from trainformer.backends.jax.precision import cast_floating
from trainformer.core.errors import BadArgument, did_you_mean, expected

STACKED = r"(^|/)(layers|blocks)/(?!\d)"
"""Paths of arrays whose first axis is the layer. A list of separate layers has a number there (`layers/0/...`)."""

_DECAYED = ("kernel", "embedding")
_EXEMPT = ("bias", "scale", "cls_token", "class_token", "positions", "pos_embed", "position_embedding")
_HEADS = re.compile(r"(^|/)(lm_head|head|classifier|score)/")


def own_ndim(path: str, leaf: Any, stacked: str = STACKED) -> int:
    """Dimensions of a parameter without the axis of its layers.

    >>> own_ndim("layers/mlp/kernel", jnp.zeros((2, 4, 4))), own_ndim("layers/0/mlp/kernel", jnp.zeros((4, 4)))
    (2, 2)
    """
    return jnp.ndim(leaf) - bool(re.search(stacked, path))


def decays(path: str, leaf: Any, stacked: str = STACKED) -> bool:
    """Whether weight decay applies: to matrices and embeddings, never to biases, norms and positions.

    >>> decays("layers/mlp/up/kernel", jnp.zeros((2, 4, 4))), decays("layers/mlp/up/bias", jnp.zeros((2, 4)))
    (True, False)
    """
    name = path.rsplit("/", 1)[-1]
    if name in _DECAYED or name in _EXEMPT:
        return name in _DECAYED
    return own_ndim(path, leaf, stacked) > 1


def takes_muon(path: str, leaf: Any, stacked: str = STACKED) -> bool:
    """Whether Muon treats it: the matrices between the embeddings and the head."""
    is_kernel = path.rsplit("/", 1)[-1] == "kernel"
    return is_kernel and own_ndim(path, leaf, stacked) == 2 and not _HEADS.search(path)


def by_path(judge: Callable[[str, Any], Any], params: Any) -> Any:
    """A tree like `params` with what `judge` says of each path and leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: judge(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), params
    )


# -- by name -----------------------------------------------------------------------------------------------------


def _adam(rate: Any, decay: optax.GradientTransformation, decoupled: bool, **options: Any) -> list[Any]:
    b1, b2 = options.get("betas", (0.9, 0.999))
    moments = optax.scale_by_adam(b1, b2, options.get("eps", 1e-8), nesterov=options.get("nesterov", False))
    return [moments, decay, _scale(rate)] if decoupled else [decay, moments, _scale(rate)]


def _lion(rate: Any, decay: optax.GradientTransformation, **options: Any) -> list[Any]:
    return [optax.scale_by_lion(*options.get("betas", (0.9, 0.99))), decay, _scale(rate)]


def _sgd(rate: Any, decay: optax.GradientTransformation, **options: Any) -> list[Any]:
    momentum = options.get("momentum", 0.9)
    trace = [optax.trace(momentum, nesterov=options.get("nesterov", False))] if momentum else []
    return [decay, *trace, _scale(rate)]


def _adafactor(rate: Any, decay: optax.GradientTransformation, **options: Any) -> list[Any]:
    return [scale_by_adafactor(**options), decay, _scale(rate)]


def _muon(rate: Any, decay: optax.GradientTransformation, stacked: str, **options: Any) -> list[Any]:
    """Muon for matrices, AdamW for the rest. At 0.2 an update is as large as one of AdamW, so both share a rate."""
    rms = options.get("consistent_rms", 0.2)
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=options.get("ns_steps", 5),
        beta=options.get("momentum", 0.95),
        nesterov=options.get("nesterov", True),
        # The last two axes are the matrix; any before them are layers, each orthogonalised by itself.
        weight_dimension_numbers=lambda updates: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates
        ),
    )
    same_size = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: rms * math.sqrt(max(u.shape[-2:])) * u, updates)
    )
    others = {name: options[name] for name in ("betas", "eps") if name in options}
    parts = {
        "muon": optax.chain(orthogonal, same_size, decay, _scale(rate)),
        "adamw": optax.chain(*_adam(rate, decay, decoupled=True, **others)),
    }
    labels = lambda params: by_path(lambda p, x: "muon" if takes_muon(p, x, stacked) else "adamw", params)  # noqa: E731
    return [optax.partition(parts, labels)]


def _scale(rate: Any) -> optax.GradientTransformation:
    return optax.scale_by_learning_rate(rate)


_ADAM_OPTIONS = ("betas", "eps", "nesterov")
_ADAFACTOR_OPTIONS = ("decay_rate", "clip_threshold", "scale_parameter", "eps", "param_eps")
_MUON_OPTIONS = ("momentum", "nesterov", "ns_steps", "consistent_rms", "betas", "eps")
OPTIMIZERS: dict[str, tuple[Callable[..., list[Any]], tuple[str, ...]]] = {
    "adamw": (lambda rate, decay, stacked, **o: _adam(rate, decay, decoupled=True, **o), _ADAM_OPTIONS),
    "adam": (lambda rate, decay, stacked, **o: _adam(rate, decay, decoupled=False, **o), _ADAM_OPTIONS),
    "adafactor": (lambda rate, decay, stacked, **o: _adafactor(rate, decay, stacked=stacked, **o), _ADAFACTOR_OPTIONS),
    "lion": (lambda rate, decay, stacked, **o: _lion(rate, decay, **o), ("betas",)),
    "muon": (_muon, _MUON_OPTIONS),
    "sgd": (lambda rate, decay, stacked, **o: _sgd(rate, decay, **o), ("momentum", "nesterov")),
}
_ALIASES = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}


def make_optimizer(
    spec: str | Mapping[str, Any] | optax.GradientTransformation | Callable[..., Any],
    learning_rate: float | Callable[[Any], Any],
    weight_decay: float = 0.0,
    *,
    stacked: str = STACKED,
    **options: Any,
) -> optax.GradientTransformation:
    """A transformation of optax from a name, ``{"name": ..., options}``, a factory or one that is made already.

    Weight decay means what it means to torch's optimizer of that name: decoupled and times the rate, but a part of the
    gradient for `adam` and `sgd`. Moments are float32 whatever the parameters are. A factory (`optax.adabelief`) is
    called with the rate and the options, and gets `weight_decay` and a `mask` of what decays if it has such parameters.
    One that is made already keeps its own rate and decay.
    """
    if isinstance(spec, optax.GradientTransformation):
        if options:
            raise BadArgument(expected("options with an optimizer that is made by name", sorted(options)))
        return spec
    mask = lambda params: by_path(lambda path, leaf: decays(path, leaf, stacked), params)  # noqa: E731
    if isinstance(spec, Mapping):
        given = dict(spec)
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise BadArgument(expected("an optimizer with options to have a 'name'", dict(spec)))
        options = {**given, **options}
        spec = name
    if isinstance(spec, str):
        name = _ALIASES.get(spec.lower(), spec.lower())
        make, options = OPTIMIZERS[_known(name)][0], _checked(name, options)
        decay = optax.add_decayed_weights(weight_decay, mask) if weight_decay else optax.identity()
        return in_float32(optax.chain(*make(learning_rate, decay, stacked=stacked, **options)))
    if callable(spec):
        return _made(spec, learning_rate, weight_decay, mask, options)
    raise BadArgument(expected("optimizer to be a name, a factory or a GradientTransformation of optax", spec))


def _known(name: str) -> str:
    if name not in OPTIMIZERS:
        do = did_you_mean(name, OPTIMIZERS) or "Others can be passed as optax makes them: optimizer=optax.adabelief."
        raise BadArgument(expected(f"optimizer to be one of {', '.join(OPTIMIZERS)}", name, do))
    return name


def _checked(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names this side has; those of optax (b1, b2) are understood."""
    given = {"adam_beta1": "b1", "adam_beta2": "b2", "adam_epsilon": "eps"}
    options = {given.get(key, key): value for key, value in options.items()}
    known = OPTIMIZERS[name][1]
    if "betas" in known and {"b1", "b2"} & set(options):
        usual = (0.9, 0.99) if name == "lion" else (0.9, 0.999)
        options["betas"] = (options.pop("b1", usual[0]), options.pop("b2", usual[1]))
    for unknown in sorted(set(options) - set(known)):
        raise BadArgument(
            expected(f"options that {name} takes", unknown, did_you_mean(unknown, known) or f"It takes {known}.")
        )
    for option, value in options.items():
        _check_option(name, option, value)
    return options


def _check_option(name: str, option: str, value: Any) -> None:
    if option in ("nesterov", "scale_parameter"):
        fits, words = isinstance(value, bool), "True or False"
    elif option == "betas":
        pair = isinstance(value, (tuple, list)) and len(value) == 2
        fits, words = pair and all(_is_number(v) and 0 <= v < 1 for v in value), "two numbers from 0 and below 1"
    elif option == "momentum":
        fits, words = _is_number(value) and 0 <= value < 1, "a number from 0 and below 1"
    else:
        fits, words = _is_number(value) and value > 0, "a positive number"
    if not fits:
        raise BadArgument(expected(f"{option} of {name} to be {words}", value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _made(spec: Callable[..., Any], rate: Any, weight_decay: float, mask: Any, options: Mapping[str, Any]) -> Any:
    takes = inspect.signature(spec).parameters
    ours = {name: value for name, value in (("weight_decay", weight_decay), ("mask", mask)) if name in takes}
    made = spec(rate, **{**ours, **options})
    if not isinstance(made, optax.GradientTransformation):
        raise BadArgument(expected("the optimizer factory to return a GradientTransformation of optax", made))
    return made


# -- parts that optax does not have ------------------------------------------------------------------------------


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with all its arithmetic and state in float32, also for parameters in bf16.

    optax takes the format of its second moments from the parameters, and in bf16 those stop moving after a few steps.
    """

    def init(params: Any) -> Any:
        return tx.init(cast_floating(params, jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        params = None if params is None else cast_floating(params, jnp.float32)
        return tx.update(cast_floating(updates, jnp.float32), state, params)

    return optax.GradientTransformation(init, update)


class AdafactorState(NamedTuple):
    """Second moments: of rows and columns for matrices, of every element for the others (else one zero)."""

    count: Any
    rows: Any
    columns: Any
    full: Any


def scale_by_adafactor(
    *,
    decay_rate: float = 0.8,
    clip_threshold: float = 1.0,
    scale_parameter: bool = True,
    eps: float = 1e-30,
    param_eps: float = 1e-3,
    stacked: str = STACKED,
) -> optax.GradientTransformation:
    """Adafactor without the rate: updates as large as the parameter (`scale_parameter`), each layer for itself.

    optax's own would take means over all the layers of an array, and factor the biases of a deep model.
    """

    def init(params: Any) -> AdafactorState:
        def zeros(part: str) -> Any:
            return by_path(lambda path, p: jnp.zeros(shapes(path, p)[part], p.dtype), params)

        return AdafactorState(jnp.zeros((), jnp.int32), zeros("rows"), zeros("columns"), zeros("full"))

    def shapes(path: str, p: Any) -> dict[str, tuple[int, ...]]:
        if own_ndim(path, p, stacked) < 2:
            return {"rows": (1,), "columns": (1,), "full": p.shape}
        return {"rows": p.shape[:-1], "columns": (*p.shape[:-2], p.shape[-1]), "full": (1,)}

    def update(updates: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        assert params is not None, "Adafactor looks at the parameters"
        count = optax.safe_increment(state.count)
        keep = 1.0 - count.astype(jnp.float32) ** -decay_rate

        def one(path: str, g: Any, rows: Any, columns: Any, full: Any, p: Any) -> tuple[Any, ...]:
            squares = jnp.square(g) + eps
            if own_ndim(path, g, stacked) < 2:
                full = keep * full + (1 - keep) * squares
                scaled = g * jax.lax.rsqrt(full)
            else:
                rows = keep * rows + (1 - keep) * squares.mean(-1)
                columns = keep * columns + (1 - keep) * squares.mean(-2)
                share = rows / rows.mean(-1, keepdims=True)
                scaled = g * jax.lax.rsqrt(share)[..., :, None] * jax.lax.rsqrt(columns)[..., None, :]
            axes = tuple(range(g.ndim - own_ndim(path, g, stacked), g.ndim))
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
