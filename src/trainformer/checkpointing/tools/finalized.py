"""`finalize`: from a run to a folder that can be deployed: one model, its tokenizer, and nothing of the training.

Owns what is reported, and that the folder appears whole or not at all. How the folder is filled is in `finalizing` for
runs on torch, and in `jax_finalizing` for runs on JAX; each is imported for its own runs.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from trainformer.checkpointing.tools.choosing import choose_checkpoint
from trainformer.checkpointing.tools.listing import AnyPath, is_of_jax
from trainformer.checkpointing.tools.summary import Shown, in_words
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.files import sync
from trainformer.utils.processes import is_alive

NO_QUANTISATION = "none"
REPORT = "finalized.json"
GGUF = "model.gguf"
_GGUF_TYPE = "f16"


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
    ``model.gguf`` of a language model, for llama.cpp and Ollama. Runs on JAX take `which`, `ema` and `gguf`: their
    checkpoints hold the base model, and nothing quantises them. ``README.md`` is a model card made of the run's
    records. Models of transformers open with ``from_pretrained(out)``; of any other, the weights are written. The
    result is read from disk and compared with the trained model before it gets its name: if anything is wrong, `out`
    does not appear.
    """
    target = Path(out).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadArgument(expected("a folder to make, which is empty or not there", str(out), "Choose another."))
    checkpoint, note = choose_checkpoint(run, which)
    gguf = _GGUF_TYPE if gguf is True else gguf or None
    if is_of_jax(checkpoint):
        from trainformer.checkpointing.tools.jax_finalizing import finalize_jax

        given = {"quantize": None if quantize == NO_QUANTISATION else quantize, "base": base, "device": device}
        return finalize_jax(checkpoint, target, note, given, gguf, ema)
    from trainformer.checkpointing.tools.finalizing import finalize_torch

    return finalize_torch(checkpoint, target, note, quantize=quantize, base=base, ema=ema, device=device, gguf=gguf)


def weights_size(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextmanager
def drafting(target: Path) -> Iterator[Path]:
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


def publish(folder: Path, target: Path) -> None:
    """Give a complete folder its name."""
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
