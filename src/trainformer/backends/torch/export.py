"""Exporting models for deployment. Every exported file is loaded again and compared with the model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainformer.core import require
from trainformer.core.errors import BadArgument, TrainformerError, expected

logger = logging.getLogger("trainformer")

# Kernels sum in different orders; a larger difference means another model.
_TOLERANCE = 1e-3


def export_model(model: nn.Module, path: Path, format: str, input_shape: tuple[int, ...] | None) -> Path:
    """Write `model` in a format and return the path. The model itself is not changed."""
    if format not in _FORMATS:
        raise BadArgument(expected(f"format to be one of {', '.join(_FORMATS)}", format))
    write, suffix, needs_shape = _FORMATS[format]
    if path.suffix != suffix:
        path = path.with_name(path.name + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A copy on the CPU: exporting must not move, fuse or change the mode of the model being trained.
    exported = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    if not needs_shape:
        write(exported, torch.empty(0), path)
    else:
        if input_shape is None:
            raise BadArgument(
                f"Exporting to {format} needs the shape of one input, which the data do not provide. "
                "Pass input_shape=(3, 224, 224), for instance."
            )
        # Two samples: with one, the exporter would treat the batch size as a constant.
        example = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))
        write(exported, example, path)
    logger.info("exported %s to %s", format, path)
    return path


def _write_torchscript(model: nn.Module, example: Tensor, path: Path) -> None:
    with torch.no_grad():
        torch.jit.trace(model, example).save(str(path))
    _compare(model, torch.jit.load(str(path)), example, "TorchScript")


def _write_archive(model: nn.Module, example: Tensor, path: Path) -> None:
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    _compare(model, torch.export.load(path).module(), example, "torch.export")


def _write_onnx(model: nn.Module, example: Tensor, path: Path) -> None:
    require("onnx", "onnx", "to export to ONNX")
    require("onnxscript", "onnx", "to export to ONNX")
    runtime = require("onnxruntime", "onnx", "to verify the exported model")
    torch.onnx.export(
        model,
        (example,),
        str(path),
        dynamo=True,
        external_data=False,
        input_names=["input"],
        output_names=["output"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    _compare(model, lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), example, "ONNX")


def _compare(model: nn.Module, other: Callable[[Tensor], Tensor], example: Tensor, format: str) -> None:
    """Raise if the exported file computes something else, for the example batch or one of another size."""
    for batch in (example, torch.cat([example, example.flip(0), example[:1]])):
        with torch.no_grad():
            want, got = model(batch), other(batch)
        error = (want - got).abs().max().item()
        if want.shape != got.shape or not error <= _TOLERANCE * max(1.0, want.abs().max().item()):
            raise TrainformerError(
                f"The {format} file does not compute what the model computes (difference {error:.2e} for a batch of "
                f"{len(batch)}). The model probably branches on its input or uses an operator that is exported wrongly."
            )


_FORMATS: dict[str, tuple[Callable[[nn.Module, Tensor, Path], None], str, bool]] = {
    "pytorch": (lambda model, _, path: torch.save(model.state_dict(), path), ".pt", False),
    "onnx": (_write_onnx, ".onnx", True),
    "torchscript": (_write_torchscript, ".pt", True),
    "torch.export": (_write_archive, ".pt2", True),
}
