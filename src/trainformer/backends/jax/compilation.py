"""Jitted train and eval steps on a mesh, and a record of how often and why they were compiled."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainformer.backends.jax.gradient_norms import NORMS
from trainformer.backends.jax.sharding import batch_sharding, constrain_rows, data_shards
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step_metrics import PACKED
from trainformer.core.errors import BadArgument, expected

logger = logging.getLogger("trainformer")

_MAX_CHANGES = 4  # that one warning lists


class JittedStep:
    """A jitted step on a mesh. Counts its compilations (`compilations.count`) and warns about recompilations.

    Those of loops (`run_loop`) are counted on their own, in `loop_compilations`.

    A train step donates its input state: use only the state that it returns. `constants` are arrays that are no part
    of the state, such as a frozen model: the step receives them as a third argument.
    """

    is_pure = True  # False: a call does more than this step, so `run_loop` cannot replace it

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        shardings: TrainState,
        *,
        train: bool,
        name: str | None = None,
        constants: Any = None,
    ) -> None:
        self.mesh = mesh
        self.constants = () if constants is None else (constants,)
        self.compilations = Compilations(name or ("train step" if train else "eval step"))
        self.loop_compilations = Compilations(self.compilations.name)
        self._train = train
        self._step = step
        self._options: dict[str, Any] = {}
        self._shardings = shardings
        self._reset()

    def _reset(self) -> None:
        """Drop what was compiled for the previous shardings."""
        self._loops: dict[Any, Any] = {}
        self._jitted = self._jit(self.compilations.count_traces(self.pure(None)), batch_sharding(self.mesh))

    def pure(self, batch: Any) -> Callable[..., Any]:
        """The function of (state, batch, *constants) that is compiled for a batch, a new object in every call."""
        return _with_options(self._step, self._options)

    def compute_gradient_norms(self) -> None:
        """Have the step return the gradient norm of each parameter, too. It is compiled again if it was before."""
        if not self._options:
            self._options = {"gradient_norms": True}
            self._reset()

    def _jit(self, step: Callable[..., Any], *batch: NamedSharding) -> Any:
        replicated = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(
            step,
            in_shardings=(self._shardings, *batch, *jax.tree.map(lambda leaf: leaf.sharding, self.constants)),
            out_shardings=(self._shardings, replicated) if self._train else replicated,
            donate_argnums=0 if self._train else (),
            compiler_options=_compiler_options(self.mesh.devices.flat[0].platform),
        )

    def _function_for(self, batch: Any) -> Any:
        return self._jitted

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Dispatch the step. Returns before the devices have finished."""
        self._follow(state)
        with jax.set_mesh(self.mesh):
            return self._function_for(batch)(state, batch, *self.constants)

    def run_loop(self, state: TrainState, batches: Sequence[Any], limit: int) -> Any:
        """Dispatch the steps of up to `limit` batches of one shape as one program, a loop. Returns (state, output).

        The program is the same for every number of batches, so that results do not depend on how steps are grouped.
        `output` has the packed metrics (and gradient norms) of all steps, stacked, and the names of the metrics.
        """
        self._follow(state)
        function, sharding = self._loop_for(batches[0], limit)
        stacked = {name: _stack([batch[name] for batch in batches], limit, sharding) for name in batches[0]}
        with jax.set_mesh(self.mesh):
            return function(state, stacked, np.int32(len(batches)), *self.constants)

    def _loop_for(self, batch: Any, limit: int) -> Any:
        key = self._program_of(batch), limit
        if key not in self._loops:
            axes = (None, *batch_sharding(self.mesh).spec) if _is_even(batch, self.mesh) else ()
            traced = self.loop_compilations.count_traces(_loop(self.pure(batch), limit))
            count = NamedSharding(self.mesh, PartitionSpec())
            sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
            self._loops[key] = self._jit(traced, sharding, count), sharding
        return self._loops[key]

    def _program_of(self, batch: Any) -> Any:
        """Batches with the same value have the same program."""
        return None

    def compiled(self, state: TrainState, batch: Any) -> Any:
        """The compiled program for these arguments, which knows the memory that it needs."""
        with jax.set_mesh(self.mesh):
            return self._function_for(batch).lower(state, batch, *self.constants).compile()

    def _follow(self, state: TrainState) -> None:
        """Use the same shardings for a state with different static fields; may cause a recompilation."""
        known = self._shardings
        if state.tx is known.tx and state.graphdef is known.graphdef and state.trainable is known.trainable:
            return
        structure: Any = jax.tree.structure(state)
        shardings = jax.tree.leaves(self._shardings)
        is_equal = structure == jax.tree.structure(self._shardings)
        if structure.num_leaves != len(shardings):
            what = f"a state with {len(shardings)} arrays, as at the start of the run"
            raise BadArgument(expected(what, structure.num_leaves, "Create a new step."))
        self._shardings = jax.tree.unflatten(structure, shardings)
        if not is_equal:
            self._reset()


class DynamicBatchStep(JittedStep):
    """A jitted step that accepts any number of rows and is compiled once per batch size.

    For loss functions that do not mask padding rows: padding the smaller last batch of an epoch would change its mean
    and the statistics of a BatchNorm. Rows that do not divide evenly over the devices are sharded unevenly by XLA,
    which pads and masks every operation itself. So any model computes what it computes on one device.

    A batch is split into as few micro-batches as fit, which differ by one row at most. None is larger than that of a
    full batch, so that no batch size needs more memory.

    `make(accumulation)` returns the pure function; `per_device` is the number of rows of a micro-batch on one device.
    """

    def __init__(
        self,
        make: Callable[[int], Callable[..., Any]],
        mesh: Mesh,
        shardings: TrainState,
        *,
        per_device: int,
        train: bool,
        name: str | None = None,
    ) -> None:
        self._make = make
        self._max_rows = per_device * data_shards(mesh)
        super().__init__(make, mesh, shardings, train=train, name=name)

    def _reset(self) -> None:
        self._loops = {}
        self._by_rows: dict[int, Any] = {}

    def pure(self, batch: Any) -> Callable[..., Any]:
        return _with_options(self._make(math.ceil(_rows(batch) / self._max_rows)), self._options)

    def _program_of(self, batch: Any) -> Any:
        return _rows(batch)

    def _function_for(self, batch: Any) -> Any:
        rows = _rows(batch)
        if rows not in self._by_rows:
            step, sharding = self.pure(batch), batch_sharding(self.mesh)
            if not _is_even(batch, self.mesh):  # arguments of a jitted function must be, but not arrays in it
                step, sharding = _shard_rows(step), NamedSharding(self.mesh, PartitionSpec())
            # A smaller last batch is expected: without one the evaluation data would have to be cut.
            traced = self.compilations.count_traces(step, is_expected=not self._train)
            self._by_rows[rows] = self._jit(traced, sharding)
        return self._by_rows[rows]


def _loop(step: Callable[..., Any], limit: int) -> Callable[..., Any]:
    """Steps of (state, batches, count, *constants) with stacked batches, of which the first `count` are executed."""

    def steps(state: TrainState, batches: Any, count: Any, *constants: Any) -> Any:
        def one(state: TrainState, number: Any) -> tuple[TrainState, dict[str, Any], list[str]]:
            batch = constrain_rows(jax.tree.map(lambda leaf: leaf[number], batches))
            state, output = step(state, batch, *constants)
            arrays = {name: output[name] for name in (PACKED, NORMS) if name in output}
            return state, arrays, sorted(output["metrics"])

        def body(number: Any, carry: Any) -> Any:
            state, arrays = carry
            state, new, _ = one(state, number)
            return state, jax.tree.map(lambda all_, array: all_.at[number].set(array), arrays, new)

        names: list[str] = []

        def shapes(state: TrainState) -> Any:
            _, arrays, found = one(state, 0)
            names.extend(found)
            return arrays

        arrays = jax.tree.map(lambda a: jnp.zeros((limit, *a.shape), a.dtype), jax.eval_shape(shapes, state))
        state, arrays = jax.lax.fori_loop(0, count, body, (state, arrays))
        return state, {**arrays, "metrics": dict.fromkeys(names)}

    steps.__name__ = getattr(step, "__name__", "step")
    return steps


def _stack(arrays: Sequence[Any], limit: int, sharding: NamedSharding) -> Any:
    """Arrays of one shape, stacked to `limit` rows. Those beyond the arrays have any content."""
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return jax.device_put(jnp.stack([*arrays, *[arrays[-1]] * (limit - len(arrays))]), sharding)
    # In the dtype on the devices: a conversion of any content might overflow, which NumPy warns about.
    stacked = np.empty((limit, *arrays[0].shape), jax.dtypes.canonicalize_dtype(arrays[0].dtype))
    for number, array in enumerate(arrays):
        stacked[number] = array
    return stacked


def _rows(batch: Any) -> int:
    leaves = batch.values() if type(batch) is dict else jax.tree.leaves(batch)
    return next(leaf.shape[0] for leaf in leaves if leaf.ndim)


def _is_even(batch: Any, mesh: Mesh) -> bool:
    """Whether each array of a batch has rows that divide evenly over the data shards."""
    return _rows(batch) % data_shards(mesh) == 0 and all(leaf.ndim for leaf in jax.tree.leaves(batch))


def _with_options(step: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def configured(state: TrainState, batch: Any, *constants: Any) -> Any:
        return step(state, batch, *constants, **options)

    configured.__name__ = getattr(step, "__name__", "step")
    return configured


def _shard_rows(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with the rows of its batch sharded inside of it, also if they do not divide evenly."""

    def sharded(state: TrainState, batch: Any) -> Any:
        return step(state, constrain_rows(batch))

    sharded.__name__ = getattr(step, "__name__", "step")
    return sharded


_CACHE_BYTES = 5 << 30  # the least recently used programs are removed beyond it


def enable_compilation_cache(folder: Path, platform: str | None = None) -> bool:
    """Keep compiled programs in a folder, so that a restarted run does not compile again. Returns whether it does.

    Not if jax has a cache or was told to have none (``JAX_COMPILATION_CACHE_DIR``, ``JAX_ENABLE_COMPILATION_CACHE``),
    and not on CPUs: programs for one CPU can crash on another that shares the folder.
    """
    is_cpu = (platform or jax.default_backend()) == "cpu"
    options = jax.config.values
    if is_cpu or options["jax_compilation_cache_dir"] or not options["jax_enable_compilation_cache"]:
        return False
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    compilation_cache.reset_cache()  # jax looks at its settings only once, when it compiles for the first time
    return True


_TRITON = "xla_gpu_enable_triton_gemm"


@functools.cache
def _compiler_options(platform: str) -> dict[str, Any]:
    """On GPUs matmuls use cuBLAS only: steps of decoders are 1 to 4 % faster, and compile in half the time.

    The user's ``XLA_FLAGS`` take precedence; a version of XLA without the option is left as it is.
    """
    if platform != "gpu" or _TRITON in os.environ.get("XLA_FLAGS", ""):
        return {}
    options = {_TRITON: False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        logger.debug("XLA has no option %s: %s", _TRITON, error)
        return {}
    return options


class _Signature(NamedTuple):
    """What jax keys its compilation cache on: shapes and dtypes by path, tree structure, static fields."""

    leaves: dict[str, str]
    structure: Any
    statics: dict[str, Any]


class Compilations:
    """Counts how often a function is traced, once per compilation, and warns from the second time on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: list[_Signature] = []

    @property
    def count(self) -> int:
        """How often the function was compiled."""
        return len(self._seen)

    def count_traces(self, function: Callable[..., Any], is_expected: bool = False) -> Callable[..., Any]:
        """Wrap a function so that every trace is counted. Pass the result to `jax.jit`.

        With `is_expected`, its first trace is no reason for a warning, whatever was traced before.
        """
        is_first = True

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            self._record((*args, *kwargs.values()), is_expected and is_first)
            is_first = False
            return function(*args, **kwargs)

        counted.__name__ = getattr(function, "__name__", "step")  # shown in profiles
        return counted

    def _record(self, args: Iterable[Any], is_expected: bool) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(args)
        # Static fields are kept by reference: jax keeps them alive anyway, with what it compiled for them.
        statics = {
            field.name: getattr(arg, field.name)
            for arg in args
            for field in getattr(arg, "__dataclass_fields__", {}).values()
            if field.metadata.get("pytree_node") is False
        }
        described = {
            jax.tree_util.keystr(path[1:] or path, simple=True, separator="/"): _describe(leaf) for path, leaf in leaves
        }
        signature = _Signature(described, structure, statics)
        self._seen.append(signature)
        if len(self._seen) == 1 or is_expected:
            return
        # Report the changes against the most similar earlier signature; the latest one if several are.
        changes = min((_changes(before, signature) for before in self._seen[-2::-1]), key=len)
        more = f" and {len(changes) - _MAX_CHANGES} more changes" if len(changes) > _MAX_CHANGES else ""
        same = "shapes and dtypes are the same, but the mesh, a jax setting or what it returns changed"
        what = "; ".join(changes[:_MAX_CHANGES]) + more or same
        logger.warning("Recompiling the %s (compilation %d): %s.", self.name, self.count, what)


def _describe(leaf: Any) -> str:
    shape = ", ".join(str(size) for size in getattr(leaf, "shape", ()))
    weak = ", weakly typed (a Python number)" if getattr(leaf, "weak_type", False) else ""
    mesh = " outside the mesh" if jax.typeof(leaf).sharding.mesh.empty else ""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{shape}]{weak}{mesh}"


_STATIC_CHANGES = {
    "tx": "the optimizer is a different object (create it once and keep it)",
    "graphdef": "the model's static graph changed",
    "trainable": "the set of trainable parameters changed",
}


def _changes(before: _Signature, after: _Signature) -> list[str]:
    changes = [
        f"{name} changed from {before.leaves[name]} to {now}"
        for name, now in after.leaves.items()
        if before.leaves.get(name, now) != now
    ]
    changes += [f"{name} is new" for name in after.leaves.keys() - before.leaves.keys()]
    changes += [f"{name} is missing" for name in before.leaves.keys() - after.leaves.keys()]
    for name, value in after.statics.items():
        if name in before.statics and before.statics[name] != value:
            changes.append(_STATIC_CHANGES.get(name, f"the static field {name} changed"))
    if not changes and before.structure != after.structure:
        changes.append("a static part of the arguments changed")
    return changes
