"""Exporting models for deployment. Every exported file is loaded again and compared with the model."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from trainformer.core import require
from trainformer.core.errors import BadArgument, TrainformerError, expected

logger = logging.getLogger("trainformer")

# Kernels sum in different orders; a larger difference means another model.
_TOLERANCE = 1e-3
_SIZES = ((61, 47), (36, 95))  # of the images to compare with


@dataclass(frozen=True)
class Signature:
    """Input and output of an exported graph. `shape` is that of one sample; None is a size that may vary."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32
    input: str = "input"
    output: str = "output"

    def example(self, count: int, sizes: tuple[int, ...] = ()) -> Tensor:
        """A random batch; `sizes` are those that may vary."""
        given = iter(sizes)
        shape = (count, *(next(given) if side is None else side for side in self.shape))
        generator = torch.Generator().manual_seed(0)
        if self.dtype == torch.uint8:
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return torch.randn(shape, generator=generator)

    def batches(self) -> list[Tensor]:
        """Batches to compare with; the first is the example to export with."""
        # Two samples at least: with one, the exporter would treat the batch size as a constant.
        first = self.example(2, _SIZES[0])
        return [first, torch.cat([first, first.flip(0), first[:1]]), self.example(3, _SIZES[1])]

    @property
    def dynamic(self) -> tuple[dict[int, torch.export.Dim]]:
        """The dimensions that may vary, as torch.export wants them."""
        names = iter(("height", "width", *(f"size{i}" for i in range(8))))
        varying = {i: torch.export.Dim(next(names)) for i, side in enumerate(self.shape, 1) if side is None}
        return ({0: torch.export.Dim("batch"), **varying},)


def export_path(path: Path, format: str) -> Path:
    """The path with the suffix of a format."""
    if format not in _FORMATS:
        raise BadArgument(expected(f"format to be one of {', '.join(_FORMATS)}", format))
    suffix = _FORMATS[format][1]
    return path if path.suffix == suffix else path.with_name(path.name + suffix)


def export_model(
    model: nn.Module, path: Path, format: str, signature: Signature | tuple[int, ...] | None = None
) -> Path:
    """Write `model` in a format and return the path. The model itself is not changed.

    `signature` may be the shape of one sample. A file that computes something else does not appear.
    """
    path = export_path(path, format)
    write, suffix, needs_shape = _FORMATS[format]
    if signature is None and needs_shape:
        raise BadArgument(
            f"Exporting to {format} needs the shape of one input, which the data do not provide. "
            "Pass input_shape=(3, 224, 224), for instance."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A copy on the CPU: exporting must not move, fuse or change the mode of the model being trained.
    exported = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    known = signature if isinstance(signature, Signature) else Signature(tuple(signature or ()))
    if needs_shape:
        _try_out(exported, known)
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp{suffix}")
    try:
        with warnings.catch_warnings():  # exporters warn of what the comparison finds
            warnings.simplefilter("ignore")
            write(exported, known, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    logger.info("exported %s to %s", format, path)
    return path


def _try_out(model: nn.Module, signature: Signature) -> None:
    batch = signature.batches()[0]
    try:
        with torch.no_grad():
            output = model(batch)
    except Exception as error:  # a model may raise anything at an input that it does not take
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"a model that takes a batch of shape {tuple(batch.shape)}"
        do = "Pass input_shape=..., the shape of one sample as the model takes it."
        raise BadArgument(expected(what, f"{type(error).__name__}: {first}", do)) from error
    if not isinstance(output, Tensor):
        what = "a model that returns one tensor"
        do = "Define export_module(model) on the task, and return a module that does."
        raise BadArgument(expected(what, type(output).__name__, do))


def _write_torchscript(model: nn.Module, signature: Signature, path: Path) -> None:
    with torch.no_grad():
        torch.jit.trace(model, signature.batches()[0], check_trace=False).save(str(path))
    _compare(model, torch.jit.load(str(path)), signature, "TorchScript")


def _write_archive(model: nn.Module, signature: Signature, path: Path) -> None:
    program = torch.export.export(model, (signature.batches()[0],), dynamic_shapes=signature.dynamic)
    torch.export.save(program, path)
    _compare(model, torch.export.load(path).module(), signature, "torch.export")


def _write_onnx(model: nn.Module, signature: Signature, path: Path) -> None:
    require("onnx", "onnx", "to export to ONNX")
    require("onnxscript", "onnx", "to export to ONNX")
    runtime = require("onnxruntime", "onnx", "to verify the exported model")
    torch.onnx.export(
        model,
        (signature.batches()[0],),
        str(path),
        dynamo=True,
        external_data=False,
        input_names=[signature.input],
        output_names=[signature.output],
        dynamic_shapes=signature.dynamic,
        verbose=False,
    )
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    _compare(model, lambda x: torch.from_numpy(session.run(None, {signature.input: x.numpy()})[0]), signature, "ONNX")


def _compare(model: nn.Module, other: Callable[[Tensor], Tensor], signature: Signature, format: str) -> None:
    """Raise if the exported file computes something else, for the example or for batches of another size."""
    for batch in signature.batches():
        with torch.no_grad():
            want, got = model(batch), other(batch)
        error = (want - got).abs().max().item() if want.shape == got.shape else float("inf")
        if not error <= _TOLERANCE * max(1.0, want.abs().max().item()):
            raise TrainformerError(
                f"The {format} file does not compute what the model computes (difference {error:.2e} for a batch of "
                f"shape {tuple(batch.shape)}). The model probably branches on its input or uses an operator that is "
                "exported wrongly."
            )


_FORMATS: dict[str, tuple[Callable[[nn.Module, Signature, Path], None], str, bool]] = {
    "pytorch": (lambda model, _, path: torch.save(model.state_dict(), path), ".pt", False),
    "onnx": (_write_onnx, ".onnx", True),
    "torchscript": (_write_torchscript, ".pt", True),
    "torch.export": (_write_archive, ".pt2", True),
}
