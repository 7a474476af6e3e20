"""A model of transformers out of a checkpoint, merged and quantised, as files that `from_pretrained` opens by itself.

Owns the loading, and the proof: the trained model is built from its configuration and the weights of the checkpoint,
with adapters unmerged; the files that were written are opened as anybody would, and must give the same outputs.
torchao's own conversion unties tied weights, and the result cannot be saved; transformers quantises while it loads, and
saves that. So the plain model is written first, and loaded again quantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainformer import tasks
from trainformer.adapters.export import merge_adapter
from trainformer.adapters.qlora import QLoRA
from trainformer.adapters.saved import SavedAdapters, open_adapters
from trainformer.backends.torch.quantize import Layers, Recipe, layers_for, prepare_qat, torchao
from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.tools.finalized import weights_size
from trainformer.checkpointing.tools.listing import AnyPath
from trainformer.checkpointing.tools.states import States
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.models.language import load_model, load_tokenizer
from trainformer.tasks.language.pretrained import find_pretrained
from trainformer.utils.files import decode_json

WEIGHTS = "model.safetensors"
MODEL_CONFIGS = ("config.json", "generation_config.json")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENS = 16
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass(frozen=True)
class Request:
    """What is to be made of which checkpoint, with everything looked up."""

    checkpoint: Checkpoint
    settings: Mapping[str, Any]  # of the run, as its checkpoint has them
    recipe: Recipe | None
    base: AnyPath | None
    ema: str | None
    device: str | None

    @property
    def folder(self) -> Path:
        """Where the checkpoint is."""
        return self.checkpoint.path

    @property
    def trained_for(self) -> str | None:
        """The recipe of quantisation-aware training."""
        return self.settings.get("qat_recipe")

    @property
    def is_adapter(self) -> bool:
        """Whether the checkpoint holds an adapter and not a model."""
        return SavedAdapters.read(self.folder) is not None

    @property
    def kind(self) -> str | None:
        """What transformers loads the model for; None for other models."""
        if not self.is_adapter and not (self.folder / MODEL_CONFIGS[0]).is_file():
            return None
        kind = getattr(getattr(tasks, str(self.settings.get("task_type")), None), "kind", None)
        return kind if isinstance(kind, str) else None


def make(request: Request, draft: Path) -> dict[str, Any]:
    """Fill ``draft/whole`` with what the request asks for. Returns the fields of `Finalized` that say what was done."""
    whole, plain, kind = draft / "whole", draft / "plain", str(request.kind)
    recipe, device = request.recipe, _device(request)
    if recipe is not None:
        _try_out(recipe, device)
    with quiet():
        # The model as it was trained, its adapters unmerged: what is written is compared with its outputs.
        model: Any
        model, adapter = _adapted(request) if request.is_adapter else (_loaded(request), None)
        wanted = _outputs(model, kind)
        model = merge_adapter(model)
        if request.settings.get("gradient_checkpointing"):
            model.config.use_cache = True  # off in training alone
        model.eval()
        before = _outputs(model, kind)
        _check_equal(wanted, before, whole, is_merged=adapter is not None)
        model.save_pretrained(str(plain if recipe else whole))
        if recipe is None:
            _check_equal(before, _outputs(_opened(whole, "cpu"), kind), whole)
            return {"size_before": weights_size(whole), "adapter": adapter}
        layers = layers_for(model, recipe)
        trained = None
        if request.trained_for:
            prepare_qat(model, recipe)
            trained = _outputs(model, kind)
        del model
        quantised = _quantised(plain, kind, recipe, layers, device)
        quantised.save_pretrained(str(whole))
        _mend_names(whole)
        after = _outputs(quantised, kind)
        _check_equal(after, _outputs(_opened(whole, device), kind), whole)
    return {
        "size_before": weights_size(plain),
        "adapter": adapter,
        "recipe": recipe.name,
        "layers": len(layers.chosen),
        "left": {reason: len(names) for reason, names in layers.skipped.items()},
        "difference": _largest(before, after),
        "trained_difference": None if trained is None else _as_trained(trained, after, recipe),
    }


# -- loading -----------------------------------------------------------------------------------------------


def _loaded(request: Request) -> Any:
    """The model of a checkpoint that holds all of it: built from its configuration, with every one of its weights."""
    transformers = require("transformers", "text", "for this model")
    config = transformers.AutoConfig.from_pretrained(request.folder, trust_remote_code=False)
    dtype = getattr(config, "dtype", None)
    model = load_model(config, str(request.kind), dtype=dtype if isinstance(dtype, torch.dtype) else None)
    generation = request.folder / MODEL_CONFIGS[1]
    if generation.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(request.folder)
    _load_state(model, _weights(request), request.folder)
    return model.eval()


def _weights(request: Request) -> Mapping[str, Tensor]:
    states = States(request.checkpoint)
    weights: Mapping[str, Tensor] = states["model"] if request.ema is None else states[request.ema]["model"]
    return weights


def _load_state(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Load weights under exactly the names of the model."""
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        what = f"exactly the weights of {type(model).__name__} in {folder}"
        first = " ".join(str(error).split())[:400]
        raise DataError(
            expected(what, first, "The model was changed after it was built: pass it to its own tools.")
        ) from error


def _adapted(request: Request) -> tuple[Any, str]:
    """The model that an adapter's checkpoint stands for, as it was trained; and what the adapter is called."""
    recorded = str(request.settings.get("task/adapter") or "")
    saved = SavedAdapters.read(request.folder)
    assert saved is not None
    base = request.base or saved.base
    if base is None:
        raise BadArgument(
            "Expected the model that the adapter belongs to, received none: it was not loaded from a name or folder in "
            "training, so the checkpoint does not know it. Pass base= (--base): a hub name, or a folder of the model."
        )
    dtype = _DTYPES.get(str(request.settings.get("task/dtype")), torch.float32)
    options = {**_load_options(recorded, request), **saved.load_options(request.kind)}
    model: Any = load_model(find_pretrained(base).source, str(request.kind), dtype=dtype, **options)
    words = load_tokenizer(request.folder)
    if len(words) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(words))
    model = open_adapters(model, saved)
    if request.ema is not None:
        _load_state(model, _weights(request), request.folder)
    kind = recorded.partition("(")[0] or str(saved.config.get("peft_type", "adapter"))
    return model.eval(), {"LORA": "LoRA"}.get(kind, kind)


def _load_options(recorded: str, request: Request) -> dict[str, Any]:
    """A model that was trained on in 4 bits is merged as it was then: rounded to them first."""
    if not recorded.startswith("QLoRA("):
        return {}
    kind = re.search(r"\bquant_type='(\w+)'", recorded)
    double = re.search(r"\bdouble_quant=(True|False)", recorded)
    adapter = QLoRA(quant_type=kind[1] if kind else "nf4", double_quant=double is None or double[1] == "True")
    return adapter.load_options(request.kind)


# -- quantising --------------------------------------------------------------------------------------------


def _device(request: Request) -> str:
    if request.device is not None:
        return request.device
    return "cuda" if request.recipe is not None and request.recipe.needs_gpu and torch.cuda.is_available() else "cpu"


def _try_out(recipe: Recipe, device: str) -> None:
    """Quantise one small layer first: what this machine cannot do is said in a sentence, and before the work."""
    dtype = torch.bfloat16 if recipe.needs_gpu and device != "cpu" else torch.float32
    layer = nn.Sequential(nn.Linear(128, 128)).to(device, dtype)
    try:
        torchao().quantize_(layer, recipe.base())
        layer(torch.zeros(16, 128, device=device, dtype=dtype))
    except Exception as error:  # missing kernels, an old GPU: torchao raises all sorts
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"a machine that can quantise to {recipe.name!r}" + (" (a recent GPU)" if recipe.needs_gpu else "")
        do = "Choose another recipe, or do it where the model is to run."
        raise BadArgument(expected(what, f"{device}: {first}", do)) from error


def _quantised(plain: Path, kind: str, recipe: Recipe, layers: Layers, device: str) -> Any:
    transformers = require("transformers", "text", "for this model")
    if not layers.chosen:
        raise BadArgument(f"Expected linear layers to quantise to {recipe.name!r}, received a model with {layers}.")
    left = [name for names in layers.skipped.values() for name in names]
    config = transformers.TorchAoConfig(recipe.base(), modules_to_not_convert=left)
    # The kernels of a GPU take bf16 alone.
    dtype = (
        torch.bfloat16
        if recipe.needs_gpu
        else transformers.AutoConfig.from_pretrained(plain, trust_remote_code=False).dtype
    )
    model: Any = load_model(plain, kind, dtype=dtype, quantization_config=config, **_placed(device))
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    found = {name for name, part in linear.items() if type(part.weight.data) is not Tensor}
    if found != set(layers.chosen):
        odd = sorted(found ^ set(layers.chosen))
        raise DataError(f"transformers quantised other layers than were meant, for instance {odd[0]}. Nothing is kept.")
    return model.eval()


def _mend_names(folder: Path) -> None:
    """Take weights at the top of a model (BART's bias of the logits) off the list that torchao 0.18 reads.

    It splits each name at a dot and fails where there is none. They are plain tensors, and found without the list.
    """
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata())
        names = decode_json(metadata.get("tensor_names", "[]"))
        nested = [name for name in names if "." in name]
        if nested != names:
            save_file(load_file(path), path, {**metadata, "tensor_names": json.dumps(nested)})


def _opened(folder: Path, device: str) -> Any:
    """As anybody would open it."""
    transformers = require("transformers", "text", "for this model")
    written = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).architectures[0]
    try:
        return getattr(transformers, written).from_pretrained(str(folder), **_placed(device)).eval()
    except (RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"What was written could not be read back, and nothing is kept. ({error})") from error


def _placed(device: str) -> dict[str, Any]:
    return {} if device == "cpu" else {"device_map": {"": device}}


# -- comparing ---------------------------------------------------------------------------------------------


@torch.no_grad()
def _outputs(model: Any, kind: str) -> Tensor:
    """What a model says to random tokens, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    rows, device = model.get_input_embeddings().weight.shape[0], next(model.parameters()).device
    length = min(_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(0, rows, (2, length), generator=generator)
    for name in _IMAGE_TOKENS:
        tokens[tokens == getattr(model.config, name, None)] = 0  # an image would have to come with it
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = tokens.flip(1)
    if kind == "clip":
        size = model.config.vision_config.image_size
        inputs["pixel_values"] = torch.randn(2, 3, size, size, generator=generator).to(model.dtype)
    answer = model(**{name: value.to(device) for name, value in inputs.items()})
    for name in ("logits_per_image", "logits", "last_hidden_state"):
        if getattr(answer, name, None) is not None:
            output: Tensor = getattr(answer, name)
            return output.detach().cpu()
    raise DataError(f"{type(model).__name__} gives nothing that could be compared.")


def _check_equal(wanted: Tensor, found: Tensor, folder: Path, is_merged: bool = False) -> None:
    # Not bitwise: weights that were read from a file have another memory alignment, and on some CPUs the kernels of
    # matrix products sum in an order that depends on it. A merge rounds every weight to the dtype of the base, and its
    # sums come in another order.
    steps = 16 if is_merged else 4
    rounding = max(1e-4 if is_merged else 1e-5, steps * torch.finfo(wanted.dtype).eps) * float(wanted.abs().max())
    if not (wanted.shape == found.shape and _largest(wanted, found) <= rounding):
        what = f"{folder.name} to give the outputs of the trained model when it is read back"
        raise DataError(expected(what, f"a difference of {_largest(wanted, found):.3g}", "Nothing is kept."))


def _as_trained(trained: Tensor, after: Tensor, recipe: Recipe) -> float:
    """How far the quantised model is from the one that was trained. On the CPU that has to be nothing but rounding."""
    difference = _largest(trained, after)
    if not recipe.needs_gpu and not difference <= 1e-2 * float(trained.abs().max()):
        what = f"the model quantised to {recipe.name!r} to be the one that was trained"
        raise DataError(expected(what, f"outputs that differ by {difference:.3g}", "Nothing is kept."))
    return difference


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and reports of transformers, one for each time a model is loaded or saved."""
    logging = require("transformers", "text", "for this model").utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
