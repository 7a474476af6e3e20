"""GGUF files for llama.cpp and Ollama: weights, tokenizer and chat template of a causal language model in one file.

Owns which models can be written: those of which llama.cpp computes the same. Names of tensors and the format itself
come from the package gguf. Tensors are converted one at a time, and the file is read back and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from trainformer.checkpointing.tools.finalized import GGUF
from trainformer.checkpointing.tools.gguf_tokenizer import write_tokenizer
from trainformer.core.errors import BadArgument, DataError, check_choice, expected
from trainformer.core.optional import require

TYPES = ("f32", "f16", "bf16", "q8_0")
_Q8_BLOCK = 32
_SILU, _GELU = ("silu", "swish"), ("gelu_new", "gelu_pytorch_tanh")
_CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # GPT-2 stores them transposed


@dataclass(frozen=True)
class Family:
    """How models of one kind are written."""

    arch: str  # its name in llama.cpp
    activations: tuple[str, ...] = _SILU
    interleaved: bool = False  # whether llama.cpp rotates neighbouring dimensions, and not two halves


FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gpt2": Family("gpt2", _GELU),
}


def gguf() -> ModuleType:
    """The package gguf, or an error with the pip command."""
    return require("gguf", "gguf", "to write GGUF files")


def check_gguf(kind: str) -> None:
    """Reject a type that cannot be written."""
    check_choice("gguf", kind, TYPES)
    gguf()


def write_gguf(folder: Path, kind: str) -> Path:
    """Write ``model.gguf`` of the model of transformers in a folder into it; returns the path.

    `kind` is the type of the matrices: f32, f16, bf16 or q8_0. Vectors stay in f32.
    """
    check_gguf(kind)
    transformers = require("transformers", "text", "for this model")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    family = _family(config)
    target = folder / GGUF
    writer = gguf().GGUFWriter(target, family.arch)
    try:
        writer.add_name(folder.name)
        writer.add_file_type(_file_type(kind))
        _write_parameters(writer, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        write_tokenizer(writer, tokenizer, config.vocab_size)
        tensors = list(_plan(folder, config, family, kind))
        for tensor in tensors:
            tensor.announce(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.stored())
    finally:
        writer.close()
    _check(target, tensors, kind)
    return target


def _family(config: Any) -> Family:
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise BadArgument(expected(f"a model of {', '.join(FAMILIES)} to write as GGUF", config.model_type))
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    odd = {
        "activation": activation if activation not in family.activations else None,
        "scale_attn_by_inverse_layer_idx": getattr(config, "scale_attn_by_inverse_layer_idx", False) or None,
        "reorder_and_upcast_attn": getattr(config, "reorder_and_upcast_attn", False) or None,
        "scale_attn_weights": False if getattr(config, "scale_attn_weights", True) is False else None,
        "quantization_config": "quantised weights" if getattr(config, "quantization_config", None) else None,
    }
    for name, value in odd.items():
        if value is not None:
            do = "llama.cpp would compute something else."
            raise BadArgument(expected(f"a {config.model_type} without {name}={value!r} to write as GGUF", value, do))
    return family


# -- parameters --------------------------------------------------------------------------------------------


def _write_parameters(writer: Any, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(_context(config))
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    width = _head_width(config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    rope = _rope(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _context(config: Any) -> int:
    """Positions; with a sliding window no more than that: llama.cpp would attend to all tokens."""
    positions: int = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return positions
    return min(positions, int(window))


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> dict[str, Any]:
    given = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadArgument(expected("rotary embeddings of type default, linear or llama3 to write as GGUF", given))
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **given, "rope_type": kind}


def _llama3_factors(config: Any) -> Tensor | None:
    """Factors of the frequencies, as transformers scales them for Llama 3.1."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, _head_width(config), 2).double() / _head_width(config))
    low, high, context = (rope[n] for n in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    waves = 2 * torch.pi / frequencies
    smooth = (context / waves - low) / (high - low)
    scaled = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(waves > context / low, torch.tensor(rope["factor"]).double(), scaled)
    return torch.where(waves < context / high, torch.ones_like(factors), factors).float()


# -- tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """One tensor of the file: where it comes from, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    kind: str
    source: Path | None
    key: str
    transposed: bool = False
    heads: int = 0  # of rows to be reordered for llama.cpp's rotary embeddings
    value: Tensor | None = None

    def announce(self, writer: Any) -> None:
        """Declare name, shape and type."""
        quants, dtype = gguf().quants, _ggml_type(self.kind)
        if self.kind == "f32":
            size = 4 * int(np.prod(self.shape))
            writer.add_tensor_info(self.name, self.shape, np.dtype(np.float32), size, dtype)
            return
        shape = quants.quant_shape_to_byte_shape(self.shape, dtype)
        writer.add_tensor_info(self.name, shape, np.dtype(np.uint8), int(np.prod(shape)), dtype)

    def values(self) -> np.ndarray:
        """The values in float32, as llama.cpp wants them."""
        tensor = self.value
        if tensor is None:
            with safe_open(self.source, framework="pt") as file:
                tensor = file.get_tensor(self.key)
        tensor = tensor.float()
        if self.transposed:
            tensor = tensor.T
        if self.heads:
            rows = tensor.reshape(self.heads, 2, tensor.shape[0] // self.heads // 2, *tensor.shape[1:])
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        array: np.ndarray = tensor.contiguous().numpy()
        return array

    def stored(self) -> np.ndarray:
        """The bytes of the file."""
        array: np.ndarray = gguf().quants.quantize(self.values(), _ggml_type(self.kind))
        return array


def _plan(folder: Path, config: Any, family: Family, kind: str) -> Iterator[_Stored]:
    arch = next(key for key, name in gguf().MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf().get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", 0)}
    for path, key, shape in _weights(folder):
        if key.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            continue  # masks and constants
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BadArgument(expected(f"tensors that llama.cpp knows of a {family.arch}", key))
        transposed = config.model_type == "gpt2" and key.endswith(_CONV1D)
        shape = shape[::-1] if transposed else shape
        part = key.rsplit(".", 2)[-2]
        rotated = heads.get(part, 0) if family.interleaved else 0
        yield _Stored(name, shape, _kind_for(shape, name, kind), path, key, transposed, rotated)
    if config.model_type != "gpt2" and (factors := _llama3_factors(config)) is not None:
        yield _Stored("rope_freqs.weight", tuple(factors.shape), "f32", None, "", value=factors)


def _weights(folder: Path) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                yield path, key, tuple(file.get_slice(key).get_shape())


def _kind_for(shape: tuple[int, ...], name: str, kind: str) -> str:
    """Vectors and position embeddings stay in f32; rows that are no multiple of a block of q8_0 become f16."""
    if len(shape) < 2 or name == "position_embd.weight":
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % _Q8_BLOCK else kind


def _ggml_type(kind: str) -> Any:
    return getattr(gguf().GGMLQuantizationType, kind.upper())


def _file_type(kind: str) -> Any:
    types = gguf().LlamaFileType
    return types.ALL_F32 if kind == "f32" else getattr(types, f"MOSTLY_{kind.upper()}")


# -- reading back ------------------------------------------------------------------------------------------


def _check(path: Path, tensors: list[_Stored], kind: str) -> None:
    """Read the file with gguf's reader, and compare every tensor with what was to be written."""
    found = {tensor.name: tensor for tensor in gguf().GGUFReader(path).tensors}
    wanted = {tensor.name: tensor for tensor in tensors}
    if found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())
        raise DataError(f"{path.name} was read back with other tensors than were written, for instance {odd[0]}.")
    for name, tensor in wanted.items():
        values, read = tensor.values(), found[name]
        again = gguf().quants.dequantize(read.data, read.tensor_type).reshape(values.shape)
        largest = float(np.abs(values).max(initial=0.0))
        rounding = {"f32": 0.0, "f16": 2**-10, "bf16": 2**-7, "q8_0": 1 / 100}[tensor.kind] * largest
        if not float(np.abs(again - values).max(initial=0.0)) <= rounding:
            raise DataError(f"{path.name} was read back with another {name} than was written.")
