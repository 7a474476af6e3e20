"""From a run to a folder that can be deployed: one model, its tokenizer and its settings, and nothing of the training.

Owns which checkpoint and which weights are meant, that the folder appears whole or not at all, and what is reported.
How a model of transformers is loaded, merged, quantised and compared is in `deployable`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from trainformer.adapters.saved import FILE as ADAPTERS
from trainformer.adapters.saved import SavedAdapters
from trainformer.adapters.state import CONFIG_FILE as ADAPTER_CONFIG
from trainformer.adapters.state import WEIGHTS_FILE as ADAPTER_WEIGHTS
from trainformer.backends.torch.quantize import RECIPES, Recipe, recipe_named
from trainformer.checkpointing import Checkpoint, Retention
from trainformer.checkpointing.tools.deployable import MODEL_CONFIGS, WEIGHTS, Request, make, quiet, weights_size
from trainformer.checkpointing.tools.gguf_files import FILE as GGUF
from trainformer.checkpointing.tools.gguf_files import check_gguf, write_gguf
from trainformer.checkpointing.tools.listing import AnyPath, find, is_checkpoint, list_checkpoints
from trainformer.checkpointing.tools.model_card import base_model, write_card
from trainformer.checkpointing.tools.ollama import write_modelfile
from trainformer.checkpointing.tools.states import STATE, States, export_weights
from trainformer.checkpointing.tools.summary import Shown, in_words
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.utils.files import sync
from trainformer.utils.processes import is_alive

NO_QUANTISATION = "none"
GGUF_TYPE = "f16"
REPORT = "finalized.json"
_WHICH = ("last", "best")


@dataclass(frozen=True)
class Finalized(Shown):
    """What `finalize` made. Differences are the largest between outputs for random tokens; None: there is no other.

    `difference` is that of the quantised model to the same model before, `trained_difference` to the model as it
    was trained with a `qat_recipe`. `compared` says what was the same when the files were read back.
    """

    out: Path
    checkpoint: Path
    step: int
    files: tuple[str, ...]
    size_before: int
    size: int
    adapter: str | None = None
    ema: str | None = None
    recipe: str | None = None
    trained_for: str | None = None
    layers: int = 0
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    difference: float | None = None
    trained_difference: float | None = None
    compared: str = "outputs"
    gguf: str | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        paths = {"out": str(self.out), "checkpoint": str(self.checkpoint)}
        return {**dataclasses.asdict(self), **paths, "files": list(self.files), "notes": list(self.notes)}

    def facts(self) -> dict[str, str]:
        """What was done, in words."""
        left = ", ".join(f"{count} ({reason})" for reason, count in self.left.items())
        everything = {
            "from": f"{self.checkpoint} (step {self.step:,})",
            "weights": "" if self.ema is None else f"the average kept by {self.ema}",
            "adapter": "" if self.adapter is None else f"{self.adapter}, merged",
            "quantised": "" if self.recipe is None else f"{self.recipe}, in {self.layers} linear layers",
            "left as they are": left,
            "size": f"{in_words(self.size_before)} before, {in_words(self.size)} now",
            "outputs differ": _number(self.difference, "at most, from before quantisation"),
            "from training": _number(self.trained_difference, "at most, from the model as it was trained"),
            "read back": f"the files give the very same {self.compared}"
            + (" as the trained model" if self.recipe is None and self.compared == "outputs" else ""),
            "gguf": "" if self.gguf is None else f"{GGUF} in {self.gguf}, read back with the same tensors",
            "files": ", ".join(self.files),
        }
        return {name: text for name, text in everything.items() if text}

    def table(self) -> Table:
        """The facts, then the notes."""
        table = Table(title=str(self.out), title_justify="left", show_edge=False, show_header=False)
        table.add_column("what", no_wrap=True)
        table.add_column("is", overflow="fold")
        for name, text in self.facts().items():
            table.add_row(name, text)
        for note in self.notes:
            table.add_row("note", note)
        return table


def finalize(
    run: AnyPath,
    out: AnyPath,
    *,
    quantize: str | None = None,
    base: AnyPath | None = None,
    which: str = "last",
    ema: bool | str | None = None,
    device: str | None = None,
    gguf: str | bool | None = None,
) -> Finalized:
    """Make the folder `out` to be deployed from a run or one of its checkpoints; what was done.

    Adapters are merged into `base` (by default the model that they were trained on). Weights are the average that the
    run exports, if it keeps one; ``ema=False`` takes the trained ones, a key (``"callback.EMA-2"``) one of several.
    `quantize` is the name of a recipe, or ``"none"``; by default that of the run's `qat_recipe`. `which` chooses the
    ``"last"`` checkpoint of a run or the ``"best"``. `gguf` (f32, f16, bf16 or q8_0; True: f16) also writes
    ``model.gguf`` of a language model, for llama.cpp and Ollama. ``README.md`` is a model card made of the run's
    records. Models of transformers open with ``from_pretrained(out)``; of any other, the weights are written. The
    result is read from disk and compared with the trained model before it gets its name: if anything is wrong, `out`
    does not appear.
    """
    target = Path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadArgument(expected("a folder to make, which is empty or not there", str(out), "Choose another."))
    checkpoint, note = choose_checkpoint(run, which)
    gguf = GGUF_TYPE if gguf is True else gguf or None
    if gguf is not None:
        check_gguf(gguf)
    states = States(checkpoint)
    if STATE in states:
        raise BadArgument(
            f"{checkpoint.path} is a checkpoint of a run on JAX. Its trainer writes a model that opens elsewhere "
            "(save_pretrained), and export_weights its weights alone."
        )
    settings = states["context"]["config"] if "context" in states else {}
    request = Request(checkpoint, settings, _recipe(quantize, settings), base, choose_ema(states, ema), device)
    if base is not None and not request.is_adapter:
        raise BadArgument(expected("a base for an adapter's run alone", str(base), "This run holds a whole model."))
    _check_gguf_fits(request, gguf)
    with _drafting(target) as draft:
        folder = draft / "whole"
        folder.mkdir()
        made = _weights_alone(request, quantize, folder) if request.kind is None else make(request, draft)
        # The tokenizer and whatever else the task put beside the weights; the model's own files are new.
        for record in checkpoint.manifest.components.get("assets", []):
            if Path(record.name).name not in {*MODEL_CONFIGS, ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS}:
                shutil.copyfile(request.folder / record.name, folder / record.name)
        notes = (*made.pop("notes", ()), *([note] if note else []), *_for_runtimes(request, folder, gguf))
        _describe(request, folder, target.name, made.get("adapter"))
        result = Finalized(
            out=target,
            checkpoint=request.folder,
            step=checkpoint.step,
            files=tuple(sorted([*(path.name for path in folder.iterdir()), REPORT])),
            size=weights_size(folder),
            ema=request.ema,
            trained_for=request.trained_for,
            gguf=gguf,
            notes=notes,
            **made,
        )
        (folder / REPORT).write_text(json.dumps(result.as_dict(), indent=2))
        _publish(folder, target)
    return result


def _describe(request: Request, folder: Path, name: str, adapter: str | None) -> None:
    """Write the model card."""
    saved = SavedAdapters.read(request.folder)
    base = base_model(folder, str(request.base) if request.base else None if saved is None else saved.base)
    recipe = None if request.recipe is None or request.kind is None else request.recipe.name
    facts: dict[str, Any] = {"name": name, "kind": request.kind, "base": base, "adapter": adapter, "recipe": recipe}
    facts |= {"ema": request.ema, "step": request.checkpoint.step}
    write_card(folder, request.checkpoint, request.settings, facts)


def _check_gguf_fits(request: Request, gguf: str | None) -> None:
    if gguf is None:
        return
    if request.kind != "causal_lm":
        what = request.settings.get("task_type", "a task")
        raise BadArgument(expected("a causal language model to write as GGUF", what, "Leave gguf out."))
    if request.recipe is not None:
        do = "Pass quantize='none', and gguf='q8_0' for weights of 8 bits."
        raise BadArgument(expected("a model in full precision to write as GGUF", request.recipe.name, do))


def _for_runtimes(request: Request, folder: Path, gguf: str | None) -> list[str]:
    """Write what llama.cpp and Ollama need besides; returns notes."""
    if request.kind != "causal_lm" or request.recipe is not None:
        return []
    with quiet():
        if gguf is not None:
            write_gguf(folder, gguf)
        note = write_modelfile(folder, f"./{GGUF}" if gguf is not None else ".")
    return [note] if note else []


def choose_checkpoint(run: AnyPath, which: str) -> tuple[Checkpoint, str | None]:
    """The checkpoint that is meant, and a note if another is better."""
    if which not in _WHICH:
        raise BadArgument(expected(f"which to be {' or '.join(map(repr, _WHICH))}", which))
    found = find(run)
    if not isinstance(found, Checkpoint):
        do = "A file has no settings and no tokenizer beside it: see Trainer.export and export_weights."
        raise BadArgument(expected("the folder of a run or of one of its checkpoints", str(found), do))
    files = {key: found.manifest.components.get(key, []) for key in ("model", "assets")}
    dataclasses.replace(found.manifest, components=files).verify(found.path)
    if is_checkpoint(Path(run)):
        return found, None
    states = States(found)
    settings = states["context"]["config"] if "context" in states else {}
    monitor, mode = settings.get("monitor_metric", "val/loss"), settings.get("monitor_mode", "min")
    ranked = Retention(monitor=monitor, mode=mode).ranked(list_checkpoints(run))
    if which == "best":
        if not ranked:
            what = f"a checkpoint with {monitor} to find the best by"
            raise DataError(expected(what, f"none in {run}", "Pass which='last', or the folder of one checkpoint."))
        return ranked[0], None
    if ranked and ranked[0].step != found.step:
        score = ranked[0].manifest.metrics[monitor]
        return found, f"step {ranked[0].step} has the best {monitor} ({score:.4g}): which='best' takes that"
    return found, None


def _recipe(quantize: str | None, settings: Mapping[str, Any]) -> Recipe | None:
    trained_for = settings.get("qat_recipe")
    if quantize == NO_QUANTISATION or (quantize is None and trained_for is None):
        return None
    if quantize is None:
        return RECIPES.get(str(trained_for))
    recipe = recipe_named(quantize, "quantize")
    if trained_for not in (None, quantize):
        what = f"quantize to be {trained_for!r}, for which the run was trained"
        do = "The weights suit that rounding and no other. Pass 'none' for a model that is not quantised."
        raise BadArgument(expected(what, quantize, do))
    return recipe


def choose_ema(states: States, ema: bool | str | None) -> str | None:
    """The component with the average to take; None for the trained weights."""
    averages = [key for key in states if key.removeprefix("callback.").split("-")[0] == "EMA"]
    if ema is False or (ema is None and not averages):
        return None
    if isinstance(ema, str):
        averages = [key for key in averages if key == ema]
    if len(averages) != 1:
        raise BadArgument(
            expected("ema to say which average to take", f"{ema!r} for a run with {', '.join(averages) or 'none'}")
        )
    return averages[0]


def _weights_alone(request: Request, quantize: str | None, folder: Path) -> dict[str, Any]:
    """Of a model that nothing on disk can build again: its weights under its own names."""
    wanted = request.recipe is not None and quantize is not None
    if wanted or request.is_adapter:
        raise BadArgument(
            f"Expected a model of transformers to {'quantise' if wanted else 'merge an adapter into'}, received the "
            f"weights of a {request.settings.get('task_type', 'task')}: they do not say how to build the model again. "
            "Do it where the model is: see docs/quantization.md, 'Other models'."
        )
    export_weights(request.folder, folder / WEIGHTS, ema=request.ema or False)
    states = States(request.checkpoint)
    meant = states["model"] if request.ema is None else states[request.ema]["model"]
    found = States(folder / WEIGHTS)["model"]
    if found.keys() != meant.keys() or not all(torch.equal(found[name], meant[name]) for name in meant):
        raise DataError(f"{folder / WEIGHTS} was read back with other weights than were written.")
    recipe = request.recipe
    note = () if recipe is None else (f"trained for {recipe.name}, and not quantised: see docs/quantization.md",)
    return {"size_before": weights_size(folder), "compared": "weights", "notes": note}


@contextmanager
def _drafting(target: Path) -> Iterator[Path]:
    """A folder beside the target that is gone afterwards; also those that killed processes left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = f".finalizing-{target.name}-"
    for left in target.parent.glob(f"{stem}*"):
        number = left.name.removeprefix(stem)
        if number.isdigit() and not is_alive(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    draft = target.parent / f"{stem}{os.getpid()}"
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)
        sync(path)
    sync(folder)
    if target.exists():
        target.rmdir()  # refuses, should anything have been put there meanwhile
    folder.rename(target)
    sync(target.parent)


def _number(value: float | None, words: str) -> str:
    return "" if value is None else f"{value:.3g} {words}"
