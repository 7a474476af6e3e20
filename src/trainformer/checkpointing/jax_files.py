"""Components of a JAX run as files: arrays through orbax, everything else as JSON.

The train state is written as a flat mapping of names (``params/layers/kernel``) to arrays, with an index of shapes and
dtypes beside it. The index is compared before anything is read: orbax itself would cast silently. Static parts
(graph, optimizer) are not written; they come from the program, so that reading executes nothing.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainformer.backends.jax.backend import JaxBackend, root_logger_untouched
from trainformer.backends.jax.state import TrainState
from trainformer.checkpointing.components import StateComponent, StatefulAdapter
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.engine import RunState
from trainformer.utils.files import decode_json, sync
from trainformer.utils.tree_files import read_tree, write_tree

with root_logger_untouched():  # importing orbax logs through absl
    import orbax.checkpoint as ocp

INDEX = "leaves.json"
_COMMITTED = "commit_success.txt"  # holds the folder's name, which the store changes afterwards
_MAX_NAMES = 6  # listed in a message


@dataclass(frozen=True)
class SavedArrays:
    """Arrays that are still in their files: they are read once their shardings are known."""

    folder: Path


class JaxFiles:
    """`StateFiles` for JAX."""

    def __init__(self) -> None:
        self._begun = 0  # writes, which all processes begin in the same order

    def snapshot(self, component: StateComponent, state: Any, folder: Path | None = None) -> Any:
        # On the host: the next step donates the memory of these arrays, and callbacks keep counting.
        if component.format != "orbax":
            return copy.deepcopy(state)
        if folder is None or jax.process_count() == 1:
            return snapshot(state)
        self._begun += 1
        with _as_os_error(folder / component.key):
            return PendingWrite(folder / component.key, state, f"{folder.name}-{self._begun}")

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: Any) -> list[str]:
        if component.format != "orbax":
            return write_tree(folder, component.stem(process_group.rank), state)
        with _as_os_error(folder / component.key):
            return state.finish() if isinstance(state, PendingWrite) else write_state(folder / component.key, state)

    def read(self, folder: Path, names: list[str], format: str) -> Any:
        if format not in ("orbax", "tree", "json"):
            raise DataError(
                f"{folder} is not a checkpoint of a JAX run, but of a torch run: {names[0]} is stored as {format!r}."
            )
        if format == "orbax":
            return SavedArrays(folder / Path(names[0]).parts[0])
        return read_tree(folder, names)

    def read_file(self, path: Path, rank: int) -> dict[str, Any]:
        raise BadArgument(expected("a run folder, a checkpoint folder, or one that save_pretrained wrote", str(path)))

    def check_replicas(self, states: Mapping[StateComponent, Any], process_group: Any) -> None:
        """Arrays are global: no process has a replica of its own that could differ."""

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}


def jax_components(
    backend: JaxBackend,
    source: Any,
    progress: RunState,
    common: Iterable[StateComponent],
    callbacks: Iterable[tuple[str, StatefulAdapter]],
) -> list[StateComponent]:
    """Everything needed to resume exactly. The PRNG key is part of the train state, and a function of the step."""

    components = [
        arrays_component("state", backend, "state"),
        *(replace(c, format="tree") if c.format == "tensors" else c for c in common),
    ]
    if hasattr(source, "state_dict"):

        def load_position(position: Any) -> None:
            if progress.batch:  # an epoch that has not started yet starts from its first batch
                source.load_state_dict(position)

        # Batches prefetched to the devices were read, but not trained on.
        adapter = StatefulAdapter(lambda: source.state_dict(unused=backend.batches_ahead), load_position)
        components.append(StateComponent("data", adapter, required=False, format="tree"))
    return [*components, *(StateComponent(key, a, required=False, format="tree") for key, a in callbacks)]


def arrays_component(key: str, owner: Any, name: str, required: bool = True) -> StateComponent:
    """The pytree of arrays in an attribute of an object as a component, read into the shardings that it has."""

    def load(saved: Any) -> None:
        like = _shapes(getattr(owner, name))
        setattr(owner, name, None)  # free the memory: there need not be room for two of them
        setattr(owner, name, read_state(saved.folder, like))

    def check(saved: Any) -> None:
        if not isinstance(saved, SavedArrays):
            raise DataError(f"The checkpoint is not one of a JAX run: its {key} holds no arrays written by orbax.")
        check_fits(saved.folder, _shapes(getattr(owner, name)))

    adapter = StatefulAdapter(lambda: getattr(owner, name), load, check)
    return StateComponent(key, adapter, required=required, format="orbax")


def _shapes(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


@contextmanager
def _as_os_error(folder: Path) -> Iterator[None]:
    """tensorstore wraps the system's error (a full disk) in its own; another process that fails is a timeout here."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        raise OSError(f"writing {folder} failed: {error}") from error


class Snapshot(NamedTuple):
    """Arrays of a state by name, which no later step changes, and their dtypes and shapes."""

    arrays: dict[str, Any]
    kinds: dict[str, str]


def snapshot(state: Any) -> Snapshot:
    """Copy a state so that it can be written while training continues; waits for the steps in flight.

    The copy is in host memory.
    """
    leaves = _named(state)
    arrays = {name: _plain(leaf) for name, leaf in leaves.items()}
    for array in arrays.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    # np.asarray would share the memory of a CPU device.
    return Snapshot({name: np.array(array) for name, array in arrays.items()}, _kinds(leaves))


class PendingWrite:
    """A state that several processes write to a new folder in the background, each its shards, through orbax.

    It is created on all processes in the main thread, and returns once the arrays are on the host. The rest
    synchronises through jax's coordination service alone, so it may run beside training steps. `name` is one that no
    other write of the run has.
    """

    def __init__(self, folder: Path, state: Any, name: str) -> None:
        self._folder = Path(folder).absolute()
        leaves = _named(state)
        self._kinds = _kinds(leaves)
        arrays = {name: _plain(leaf) for name, leaf in leaves.items()}
        if jax.default_backend() == "cpu":  # where the host copy shares the memory that the next step donates
            arrays = {name: jnp.copy(a) if isinstance(a, jax.Array) else a for name, a in arrays.items()}
        names = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
        with root_logger_untouched():
            self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=names)
            self._writer.save(self._folder, args=ocp.args.PyTreeSave(_not_empty(arrays)))

    def finish(self) -> list[str]:
        """Wait until all processes have written. Returns the names of the files, on process 0."""
        with root_logger_untouched():
            try:
                self._writer.wait_until_finished()
            finally:
                self._writer.close()
        return _finish(self._folder, self._kinds)


def write_state(folder: Path, state: Any) -> list[str]:
    """Write a state, or a snapshot of one, to a new folder; the names of its files relative to the parent folder.

    Every process of a run must call this; orbax lets each write its shards.
    """
    folder = Path(folder).absolute()
    if not isinstance(state, Snapshot):
        leaves = _named(state)
        state = Snapshot({name: _plain(leaf) for name, leaf in leaves.items()}, _kinds(leaves))
    with root_logger_untouched(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(_not_empty(state.arrays)))
    return _finish(folder, state.kinds)


def _not_empty(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Without empty arrays, which orbax refuses."""
    return {name: array for name, array in arrays.items() if array.size}


def _finish(folder: Path, kinds: Mapping[str, str]) -> list[str]:
    """Add the index to what orbax has written; the names of all files, on process 0."""
    if jax.process_index() == 0:
        (folder / INDEX).write_text(json.dumps({"format": 1, "leaves": dict(kinds)}, indent=1, sort_keys=True))
        (folder / _COMMITTED).unlink(missing_ok=True)
    places = sorted(folder.rglob("*"))
    for place in (folder, *places):
        if place.is_dir():  # the store syncs the files
            sync(place)
    if jax.process_index() > 0:
        return []  # process 0 lists all of them: orbax returns when every process is done
    return [place.relative_to(folder.parent).as_posix() for place in places if place.is_file()]


def read_state(folder: Path, like: TrainState) -> TrainState:
    """The state in a folder, with the shardings of the arrays (or `jax.ShapeDtypeStruct`s) of `like`.

    `like` may be on another mesh than the one the state was written on. Any mismatch (name, shape, dtype) is an error.
    """
    folder, wanted = Path(folder).absolute(), _named(like)
    _compare(folder, _index(folder), _kinds(wanted))
    templates = {name: _template(leaf) for name, leaf in wanted.items()}
    full = {name: template for name, template in templates.items() if template.size}
    arguments = ocp.args.PyTreeRestore(
        item=full, restore_args=ocp.checkpoint_utils.construct_restore_args(full), partial_restore=True
    )
    try:
        with root_logger_untouched(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(folder, args=arguments)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"The arrays in {folder} cannot be read: {error}") from error
    leaves = []
    for name, leaf in wanted.items():
        array = arrays[name] if name in arrays else jnp.zeros(templates[name].shape, templates[name].dtype)
        leaves.append(jax.random.wrap_key_data(array, impl=_implementation(leaf)) if _is_key(leaf) else array)
    state: TrainState = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return state


def read_arrays(folder: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, np.ndarray]:
    """The arrays of a folder by name, on the host; those with one of the prefixes. PRNG keys come as plain integers."""
    folder = Path(folder).absolute()
    saved = [name for name in _index(folder) if name.startswith(prefixes)]
    try:
        with (
            root_logger_untouched(),
            warnings.catch_warnings(),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            warnings.simplefilter("ignore", UserWarning)  # that no sharding is given: arrays stay on the host
            names = [name for name in checkpointer.metadata(folder).item_metadata if name.startswith(prefixes)]
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            arguments = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=kinds, partial_restore=True)
            arrays = checkpointer.restore(folder, args=arguments)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"The arrays in {folder} cannot be read: {error}") from error
    return {name: arrays.get(name, np.zeros((0,))) for name in saved}


def check_fits(folder: Path, like: Any) -> None:
    """Raise if the content of a folder does not match `like` exactly. No array is read."""
    folder = Path(folder).absolute()
    _compare(folder, _index(folder), _kinds(_named(like)))


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        return dict(decode_json(path.read_bytes())["leaves"])
    except FileNotFoundError as error:
        raise DataError(f"Expected the arrays of a training state in {folder}: it has no {INDEX}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: it cannot be read ({error}).") from error


def _compare(folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise if names, shapes or dtypes differ, listing those that do."""
    problems = []
    if missing := sorted(wanted.keys() - saved.keys()):
        problems.append(f"it lacks {_some(missing)}")
    if unexpected := sorted(saved.keys() - wanted.keys()):
        problems.append(f"it also has {_some(unexpected)}")
    others = sorted(name for name in wanted.keys() & saved.keys() if wanted[name] != saved[name])
    if others:
        problems.append(_some([f"{name} is {saved[name]} there and {wanted[name]} here" for name in others]))
    if problems:
        raise DataError(
            f"The state in {folder} does not fit this run: {'; '.join(problems)}. "
            "Use the model, optimizer and dtypes it was written with."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def _template(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the plain array that is stored for a leaf."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _kinds(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape as text; for a PRNG key also its implementation."""
    return {
        name: f"{f'key<{_implementation(leaf)}>' if _is_key(leaf) else leaf.dtype}{list(leaf.shape)}"
        for name, leaf in leaves.items()
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _implementation(leaf: Any) -> str:
    """The implementation of a PRNG key, or of its shape."""
    found: list[str] = []

    def ask(key: Any) -> Any:  # only available while tracing
        found.append(str(jax.random.key_impl(key)))
        return key

    jax.eval_shape(ask, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def _plain(leaf: Any) -> Any:
    """The array that is stored for a leaf."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf
