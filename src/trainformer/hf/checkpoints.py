"""Checkpoints that transformers' Trainer and this one resume from, in both directions.

Ours have the files of HF (`model.safetensors`, `optimizer.pt`, `scheduler.pt`, `rng_state.pth`, `trainer_state.json`,
`training_args.bin`), and beside them the rest of the state and a manifest. A folder without a manifest is read as HF
would: the position in the data follows from the step.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.adapters.state import adapter_file
from trainformer.callbacks.compat.huggingface import HuggingFaceCallback, from_hf_name
from trainformer.callbacks.compat.huggingface_types import TrainerState
from trainformer.checkpointing.components import StateComponent
from trainformer.checkpointing.manifest import MANIFEST, Manifest
from trainformer.checkpointing.store import CheckpointStore, is_named, step_of
from trainformer.checkpointing.torch_files import TorchFiles
from trainformer.core.errors import DataError, expected
from trainformer.engine.state import RunState
from trainformer.utils.files import decode_json
from trainformer.utils.tensor_files import read_tensors, read_weights

if TYPE_CHECKING:
    from trainformer.hf.run import HfRun

logger = logging.getLogger("trainformer")

STATE, ARGUMENTS, SCALER = "trainer_state.json", "training_args.bin", "scaler.pt"
_INDEX = "model.safetensors.index.json"
OWN_WEIGHTS = "run_weights.safetensors"  # the weights of a run whose trainer overrides `save_model` or `_save`
_WEIGHTS = ("model.safetensors", _INDEX, "adapter_model.safetensors", "pytorch_model.bin")
# How an optimizer computes, which is not part of its state.
_IMPLEMENTATION = ("fused", "foreach", "capturable")


class HfFiles(TorchFiles):
    """Files under the names that transformers and peft read."""

    def __init__(self, model: nn.Module, on_device: bool = False, is_saved_by_user: bool = False) -> None:
        super().__init__(on_device)
        self._model = model
        self._is_saved_by_user = is_saved_by_user  # whether `model.safetensors` is for the user to write

    def write(self, folder: Path, component: StateComponent, state: Any, process_group: Any) -> list[str]:
        names = super().write(folder, component, state, process_group)
        renamed = {"schedule.pt": "scheduler.pt"}
        if component.key == "model" and is_adapted(self._model) and names == ["model.safetensors"]:
            return [place_adapter(folder, self._model)]
        if component.key == "rng" and process_group.is_single_process:
            torch.save({**state, "cpu": state["torch"]}, folder / names[0])
            renamed[names[0]] = "rng_state.pth"
        if component.key == "model" and self._is_saved_by_user:
            renamed["model.safetensors"] = OWN_WEIGHTS
        for name in names:
            if name in renamed:
                (folder / name).rename(folder / renamed[name])
        return [renamed.get(name, name) for name in names]


def find_checkpoint(wanted: Any, output_dir: str | None) -> str | None:
    """The checkpoint that `resume_from_checkpoint` names; None to start from scratch.

    `wanted` is a path, True for the newest in `output_dir`, or "auto" for the newest if there is one.
    """
    if wanted in (None, False, "False", "false"):
        return None
    if wanted in (True, "True", "true", "auto"):
        newest = newest_checkpoint(Path(str(output_dir)))
        if newest is None and wanted != "auto":
            raise DataError(
                f"No valid checkpoint found in output directory ({output_dir}). Pass 'auto' to resume only if there is "
                "one."
            )
        return None if newest is None else str(newest)
    path = Path(wanted).expanduser()
    if not path.exists() or (path.is_dir() and not has_weights(path)):
        raise DataError(
            f"Can't find a valid checkpoint at {wanted}: expected a folder written by a trainer, received "
            f"{'a folder without weights' if path.exists() else 'a path that does not exist'}."
        )
    return str(path)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, of ours or of HF; damaged ones are skipped with a warning."""
    own = CheckpointStore(folder, skips_deleted=True).newest()
    others = [p for p in folder.glob("checkpoint-*") if is_named(p) and not (p / MANIFEST).exists()]
    complete = sorted((p for p in others if (p / STATE).exists() and has_weights(p)), key=step_of)
    if complete and (own is None or step_of(complete[-1]) > own.step):
        return complete[-1]
    return None if own is None else own.path


def has_weights(path: Path) -> bool:
    """Whether a folder has weights, of ours, of HF or of Forgather."""
    found = (path / MANIFEST).exists() or any((path / name).exists() for name in _WEIGHTS)
    return found or any(path.glob("*/adapter_model.safetensors")) or any(path.glob("step_*"))


def place_adapter(folder: Path, model: nn.Module) -> str:
    """Rename the weights of an adapter to what peft reads; the new name."""
    name = adapter_file(model)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder / name)
    return name


# -- reading ---------------------------------------------------------------------------------------------------


def read_checkpoint_states(path: Path, run: HfRun) -> dict[str, Any] | None:
    """The states in a checkpoint of HF, or in one of ours that was changed; None if it is an unchanged one of ours."""
    if not path.is_dir() or not (path / STATE).exists():
        return None
    own: dict[str, Any] = {}
    if (path / MANIFEST).exists():
        manifest = Manifest.read(path)
        replaced = not (path / "model.safetensors").exists() and (path / _INDEX).exists()
        if "run" in manifest.components and not (replaced and "model" in manifest.components):
            return None
        unchanged = {key: records for key, records in manifest.components.items() if key != "model"}
        kept = Manifest(**{**vars(manifest), "components": unchanged})
        kept.verify(path)
        if replaced:
            logger.info("reading the weights from the shards that replaced those of the checkpoint %s", path)
        own = {
            key: run.files.read(path, [record.name for record in records], manifest.formats[key])
            for key, records in unchanged.items()
            if key in manifest.formats
        }
    return _read_theirs(path, run) | own


def _read_theirs(path: Path, run: HfRun) -> dict[str, Any]:
    states: dict[str, Any] = {"model": model_weights(path, run.task.model)}
    saved = TrainerState.load_from_json(path / STATE)
    states["run"] = _progress(saved, run)
    if (path / "optimizer.pt").exists():
        states["optimizer"] = _optimizer(read_tensors(path / "optimizer.pt"), run.backend.optimizer)
    if (path / "scheduler.pt").exists():
        states["schedule"] = read_tensors(path / "scheduler.pt")
    if (path / SCALER).exists():
        states["backend"] = {"scaler": read_tensors(path / SCALER), "skipped_steps": 0, "pieces": 1}
    ranks = run.process_group
    rng = path / ("rng_state.pth" if ranks.is_single_process else f"rng_state_{ranks.rank}.pth")
    if rng.exists():
        states["rng"] = _random(rng)
    absent = [name for name in ("optimizer", "schedule", "rng") if name not in states]
    if absent:
        logger.warning("the checkpoint %s has no %s; they start afresh", path, ", ".join(absent))
    return states


def model_weights(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights in a folder, whole or in shards; weights that HF does not write are filled in from the model."""
    if is_adapted(model):
        places = [path / adapter_file(model), path / "adapter_model.safetensors"]
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise DataError(expected(f"the weights of an adapter in {path}", "none"))
        return read_weights(found.parent, [found.name])
    if (path / "model.safetensors").exists():
        state = read_weights(path, ["model.safetensors"])
    elif (path / _INDEX).exists():
        index = decode_json((path / _INDEX).read_bytes())["weight_map"]
        state = read_weights(path, sorted({str(Path(name).name) for name in index.values()}))
    elif (path / "pytorch_model.bin").exists():
        state = read_tensors(path / "pytorch_model.bin")
    else:
        raise DataError(expected(f"the weights of a model in {path}", "none"))
    return _with_tied(state, unwrap_model(model))


def _with_tied(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """HF writes tied weights once, and leaves out those that the model can compute."""
    own = model.state_dict()
    by_memory: dict[int, Tensor] = {own[name].data_ptr(): state[name] for name in own if name in state}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, tensor in own.items():
        if name not in state and tensor.data_ptr() in by_memory:
            state[name] = by_memory[tensor.data_ptr()]
        elif name not in state and name in ignored:
            state[name] = tensor
    return state


def _optimizer(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """A state with the implementation of the current optimizer: HF may have used another."""
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    for saved, current in zip(groups, optimizer.param_groups, strict=False):
        saved |= {name: current[name] for name in _IMPLEMENTATION if name in current}
    return state


def _random(path: Path) -> dict[str, Any]:
    """The random state of HF, whose NumPy state is an array: the classes of arrays are allowed, and nothing else."""
    dtype = type(np.dtype(np.uint32))
    reconstruct = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([reconstruct, np.ndarray, np.dtype, dtype]):
        state = read_tensors(path)
    kind, keys, *rest = state["numpy"]
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    cuda = state.get("cuda", [])
    return {
        "python": state["python"],
        "numpy": (str(kind), numbers, *rest),
        "torch": state["cpu"],
        "cuda": list(cuda) if isinstance(cuda, (list, tuple)) else [cuda],
    }


def _progress(saved: TrainerState, run: HfRun) -> dict[str, Any]:
    """The progress of our run at the step of an HF checkpoint."""
    settings, per_epoch = run.settings, run.steps_per_epoch()
    step = saved.global_step
    epoch, steps = divmod(step, per_epoch) if per_epoch else (0, step)
    batches = steps * settings.accumulation_steps
    history = [
        {from_hf_name(k) if k not in ("epoch", "step") else k: v for k, v in r.items()} for r in saved.log_history
    ]
    best = {} if saved.best_metric is None else {settings.monitor_metric: float(saved.best_metric)}
    state = RunState(
        step=step,
        epoch=epoch,
        batch=batches,
        position=batches * settings.batch_size,
        samples=step * settings.accumulation_steps * settings.batch_size,
        tokens=saved.num_input_tokens_seen,
        best_metrics=best,
        best_step=saved.best_global_step if best and saved.best_global_step is not None else -1,
        log_history=history,
        log_records=len(history),
    )
    return state.state_dict()


def callback_states(saved: TrainerState, callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """The states of callbacks in `trainer_state.json`, by the names of the callbacks of a run."""
    states: dict[str, Any] = {}
    stored = {name: list(data) if isinstance(data, list) else [data] for name, data in saved.stateful_callbacks.items()}
    stored.pop("TrainerControl", None)
    for name, callback in callbacks.items():
        if isinstance(callback, HuggingFaceCallback) and stored.get(type(callback.wrapped).__name__):
            data = stored[type(callback.wrapped).__name__].pop(0)
            own = {**data.get("args", {}), **data.get("attributes", {})}
            states[name] = {"own": own, "epoch_end_pending": False}
    left = [name for name, data in stored.items() if data]
    if left:
        logger.warning("the checkpoint has states of callbacks that this run does not have: %s", ", ".join(left))
    return states


def report_changes(args: Any, path: Path) -> None:
    """Warn of arguments that differ from those of the run that wrote a checkpoint."""
    if not (path / STATE).exists():
        return
    saved = TrainerState.load_from_json(path / STATE)
    pairs = {
        name: (getattr(args, name), getattr(saved, name)) for name in ("logging_steps", "eval_steps", "save_steps")
    }
    pairs["per_device_train_batch_size"] = args.per_device_train_batch_size, saved.train_batch_size
    lines = [
        f"{name}: {now} (from args) != {before} (from {STATE})"
        for name, (now, before) in pairs.items()
        if now is not None and before is not None and now != before
    ]
    if lines:
        logger.warning("arguments differ from those of the checkpoint %s: %s", path, "; ".join(lines))


# -- writing ---------------------------------------------------------------------------------------------------


def write_trainer_files(front: Any, folder: Path) -> list[str]:
    """Write the state and the arguments of a trainer as HF does; the names of the files."""
    state = front.state
    state.stateful_callbacks = exported_states([*front.callbacks, front.control])
    state.save_to_json(folder / STATE)
    torch.save(front.args, folder / ARGUMENTS)
    names = [STATE, ARGUMENTS]
    scaler = None if front._run is None else front._run.backend.precision.scaler
    if scaler is not None:
        torch.save(scaler.state_dict(), folder / SCALER)
        names.append(SCALER)
    return names


def exported_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """The states of callbacks with HF's `state()` method, by class; a list if there are several of a class."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        if callable(getattr(callback, "state", None)):
            name, state = type(callback).__name__, callback.state()
            if name in found:
                found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), state]
            else:
                found[name] = state
    return found


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link to a file, or a copy where there are no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
