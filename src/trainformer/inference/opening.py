"""`load`: from a folder to a predictor, of torch or of JAX; each is imported for its own models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.tools.choosing import choose_checkpoint
from trainformer.checkpointing.tools.listing import is_of_jax, list_checkpoints
from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from trainformer.inference.jax_models import JaxPredictor
    from trainformer.inference.onnx import OnnxPredictor
    from trainformer.inference.predictor import Predictor

_ADVICE = {
    "task": "The checkpoint has its trainer.",
    "base": "The checkpoint holds the base model too.",
    "device": "Set JAX_PLATFORMS before the program starts.",
    "precision": "That of the run is used.",
    "dtype": "That of the run is used.",
    "quantize": "Nothing quantises a run on JAX.",
}


def load(
    path: str | Path,
    *,
    task: Any = None,
    base: str | Path | None = None,
    which: str = "last",
    ema: bool | str | None = None,
    device: Any = None,
    precision: str | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
) -> Predictor | OnnxPredictor | JaxPredictor:
    """Open a trained model to predict with: a run, a checkpoint, a finalized folder, or an exported ONNX model.

    A folder of transformers or of an adapter of peft works too, and a model of the hub: ``"hf:name"``, or
    ``"owner/name"`` if there is no such path. The model predicts from raw images or texts what `Trainer.predict`
    predicts, without the training data; a causal language model (`TextPredictor`) also chats and streams.

    `which` chooses the ``"last"`` checkpoint of a run or the ``"best"``; `ema` is as in `checkpoint.finalize`. `base`
    is the model that an adapter belongs to, if the run does not say it. `precision` is that of the run by default. For
    language models, `dtype` is that of the weights (fp32, bf16, fp16), and `quantize` a recipe of `finalize`, applied
    in memory. A task of your own, or one with a module of your own, cannot be built from a file: pass it as `task`,
    new and untrained. Nothing in the folder is executed.
    """
    if batch_size is not None:
        check_count("batch_size", batch_size)
    given = {
        "task": task, "base": base, "device": device, "precision": precision, "dtype": dtype, "quantize": quantize,
    }  # fmt: skip
    if is_jax_run(path):
        from trainformer.inference.jax_models import open_jax

        refuse_torch_options(given)
        return open_jax(choose_checkpoint(Path(path).expanduser(), which)[0], Path(path), batch_size, ema)
    require("torch", "torch", "to load a model of torch")
    from trainformer.inference.loading import load_torch
    from trainformer.inference.sources import find_model

    return load_torch(find_model(path), batch_size=batch_size, which=which, ema=ema, **given)


def is_jax_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run on JAX, or of one of its checkpoints."""
    place = Path(path).expanduser()
    found: list[Checkpoint] = list_checkpoints(place) if place.is_dir() else []
    return bool(found) and is_of_jax(found[-1])


def refuse_torch_options(given: dict[str, Any]) -> None:
    """Raise for options that models on JAX do not take."""
    for name, value in given.items():
        if value is not None:
            raise BadArgument(expected(f"no {name} for a run on JAX", str(value), _ADVICE[name]))
