"""The arrays of a training state in files, through orbax, and back onto any mesh.

A state is written as a flat mapping of names (``params/layers/kernel``) to arrays, with a list of their shapes and
formats beside it. That list is compared before anything is read: orbax itself would cast silently. Static parts (graph,
optimizer) are not written; they come from the program, so that reading executes nothing. When a folder counts as a
checkpoint is the business of `engine.checkpoint`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.backends.jax.orbax_import import ocp, quiet
from trainformer.backends.jax.state import TrainState
from trainformer.core.errors import DataError
from trainformer.utils.files import sync

INDEX = "leaves.json"
_COMMITTED = "commit_success.txt"  # holds the folder's name at the time, which the store changes afterwards
_MOST = 6  # names that a message lists


class Snapshot(NamedTuple):
    """Arrays of a state by name, which no later step changes, and their kinds as `read_state` compares them."""

    arrays: dict[str, Any]
    kinds: dict[str, str]


def snapshot(state: Any) -> Snapshot:
    """Copy a state so that it can be written while training goes on; waits until the steps before are done.

    The copy is in the memory of the host. Where several processes share arrays, each device copies its part instead.
    """
    leaves = _named(state)
    arrays = {name: _plain(leaf) for name, leaf in leaves.items()}
    for array in arrays.values():
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            array.copy_to_host_async()
    return Snapshot({name: _copy(array) for name, array in arrays.items()}, _kinds(leaves))


def write_state(folder: Path, state: Any) -> list[str]:
    """Write a state, or a snapshot of one, to a new folder. Names of its files, as seen from the folder above it.

    Every process of a run calls this; orbax lets each write its part.
    """
    folder = Path(folder).absolute()
    if not isinstance(state, Snapshot):
        leaves = _named(state)
        state = Snapshot({name: _plain(leaf) for name, leaf in leaves.items()}, _kinds(leaves))
    full = {name: array for name, array in state.arrays.items() if array.size}  # orbax refuses empty ones
    with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(full))
    if jax.process_index() == 0:
        (folder / INDEX).write_text(json.dumps({"format": 1, "leaves": state.kinds}, indent=1, sort_keys=True))
        (folder / _COMMITTED).unlink(missing_ok=True)
    places = sorted(folder.rglob("*"))
    for place in (folder, *places):
        if place.is_dir():  # the store syncs the files
            sync(place)
    if jax.process_index() > 0:
        return []  # process 0 knows all of them: orbax returns when every process is done
    return [place.relative_to(folder.parent).as_posix() for place in places if place.is_file()]


def read_state(folder: Path, like: TrainState) -> TrainState:
    """The state in a folder, placed as the arrays (or `jax.ShapeDtypeStruct`s) of `like` are.

    `like` may be on another mesh than the one the state was written on. Anything that does not fit exactly (a name, a
    shape, a format) is an error.
    """
    return _read(Path(folder).absolute(), like, prefix="")


def read_params(folder: Path, like: Any) -> Any:
    """The parameters alone, to begin another run with them. `like` is a nested dictionary as `TrainState.params`."""
    return _read(Path(folder).absolute(), like, prefix="params/")


def read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a folder by name, on the host, whatever run wrote them. Random keys come as plain numbers."""
    folder = Path(folder).absolute()
    saved = _index(folder)
    try:
        with quiet(), warnings.catch_warnings(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            warnings.simplefilter("ignore", UserWarning)  # that nobody says on which devices: on none
            names = checkpointer.metadata(folder).item_metadata.keys()
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            arrays = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=kinds))
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"The arrays in {folder} cannot be read: {error}") from error
    return {name: arrays.get(name, np.zeros((0,))) for name in saved}


def check_fits(folder: Path, like: Any) -> None:
    """Raise if what is in a folder is not exactly what `like` asks for. No array is read."""
    folder = Path(folder).absolute()
    _compare(folder, _index(folder), _kinds(_named(like)))


def like_of(shapes: Any, shardings: Any) -> Any:
    """What `read_state` takes as its second argument, from `jax.eval_shape` and the shardings: no memory is used."""
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)


# -- reading -----------------------------------------------------------------------------------------------------


def _read(folder: Path, like: Any, prefix: str) -> Any:
    wanted = {prefix + name: leaf for name, leaf in _named(like).items()}
    saved = {name: kind for name, kind in _index(folder).items() if name.startswith(prefix)}
    _compare(folder, saved, _kinds(wanted))
    templates = {name: _template(leaf) for name, leaf in wanted.items()}
    full = {name: template for name, template in templates.items() if template.size}
    arguments = ocp.args.PyTreeRestore(
        item=full, restore_args=ocp.checkpoint_utils.construct_restore_args(full), partial_restore=True
    )
    try:
        with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(folder, args=arguments)
    except (ValueError, KeyError, OSError) as error:
        raise DataError(f"The arrays in {folder} cannot be read: {error}") from error
    leaves = [
        _like(leaf, arrays[name] if name in arrays else jnp.zeros(templates[name].shape, templates[name].dtype))
        for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        return dict(json.loads(path.read_bytes())["leaves"])
    except FileNotFoundError as error:
        raise DataError(f"Expected the arrays of a training state in {folder}: it has no {INDEX}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: it cannot be read ({error}).") from error


def _compare(folder: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise if names, shapes or formats differ, naming those that do."""
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
            "Use the model, the optimizer and the number formats it was written with."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _template(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, format and place of the plain array that stands for a leaf in the files."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _like(leaf: Any, array: Any) -> Any:
    return jax.random.wrap_key_data(array, impl=_implementation(leaf)) if _is_key(leaf) else array


# -- leaves ------------------------------------------------------------------------------------------------------


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _kinds(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Format and shape as text; for a random key also how it makes numbers."""
    return {
        name: f"{f'key<{_implementation(leaf)}>' if _is_key(leaf) else leaf.dtype}{list(leaf.shape)}"
        for name, leaf in leaves.items()
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _implementation(leaf: Any) -> str:
    """How a key, or the shape of one, makes random numbers."""
    found: list[str] = []

    def ask(key: Any) -> Any:  # a shape can be asked only while it is traced
        found.append(str(jax.random.key_impl(key)))
        return key

    jax.eval_shape(ask, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return found[0]


def _plain(leaf: Any) -> Any:
    """The array that stands for a leaf in the files."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _copy(array: Any) -> Any:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jnp.copy(array)
    return np.array(array)  # np.asarray would share the memory of a CPU device
