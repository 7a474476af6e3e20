"""What differs between two checkpoints, and by how much."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from trainformer.checkpointing.tools.listing import AnyPath, find
from trainformer.checkpointing.tools.states import States
from trainformer.checkpointing.tools.summary import Shown
from trainformer.core.errors import BadArgument, did_you_mean, expected


@dataclass(frozen=True)
class Difference:
    """A tensor or value that is in both and not the same.

    `largest` is the largest absolute difference, infinite where one side alone is NaN or infinite, and None where
    there is nothing to subtract: another shape, or no numbers. `count` of `total` elements differ.
    """

    name: str
    a: str
    b: str
    largest: float | None = None
    count: int = 1
    total: int = 1


@dataclass(frozen=True)
class PartComparison:
    """One component in both: how many entries are the same, which differ, and which only one side has."""

    key: str
    same: int
    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs, to the bit."""
        return not (self.differences or self.only_a or self.only_b)

    @property
    def largest(self) -> float:
        """The largest difference of all; 0 where there is none."""
        return max((d.largest for d in self.differences if d.largest is not None), default=0.0)


@dataclass(frozen=True)
class Comparison(Shown):
    """What `compare` found, by component."""

    a: str
    b: str
    parts: dict[str, PartComparison]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both have the same components with the same content."""
        return not (self.only_a or self.only_b) and all(part.equal for part in self.parts.values())

    def table(self, most: int = 8) -> Table:
        """The components, with the first differences of each."""
        table = Table(title=f"a: {self.a}\nb: {self.b}", title_justify="left", show_edge=False)
        for name in ("component", "same", "differing", "what"):
            table.add_column(name, justify="right" if name in ("same", "differing") else "left")
        for part in self.parts.values():
            table.add_row(part.key, str(part.same), str(len(part.differences)), "\n".join(_lines(part, most)))
        for side, keys in (("a", self.only_a), ("b", self.only_b)):
            for key in keys:
                table.add_row(key, "", "", f"only in {side}")
        return table


def compare(a: AnyPath, b: AnyPath, components: Collection[str] | None = None) -> Comparison:
    """What differs between two checkpoints or files, component by component; `components` looks at some only.

    A file of weights (``.safetensors``, or a state dict in ``.pt``) counts as the component ``model``.
    """
    one, other = States(find(a)), States(find(b))
    shared = [key for key in one if key in other]
    chosen = _chosen(components, [*one, *(key for key in other if key not in one)])
    return Comparison(
        a=str(one.path),
        b=str(other.path),
        parts={key: _compare_parts(key, one[key], other[key]) for key in shared if key in chosen},
        only_a=tuple(key for key in one if key in chosen and key not in other),
        only_b=tuple(key for key in other if key in chosen and key not in one),
    )


def _chosen(components: Collection[str] | None, known: list[str]) -> list[str]:
    if components is None:
        return known
    for name in components:
        if name not in known:
            what = f"components to be among {', '.join(known)}"
            raise BadArgument(expected(what, name, did_you_mean(name, known)))
    return list(components)


def _compare_parts(key: str, a: Any, b: Any) -> PartComparison:
    left, right = dict(_leaves(a)), dict(_leaves(b))
    shared = [name for name in left if name in right]
    found = [d for name in shared if (d := _difference(name, left[name], right[name])) is not None]
    return PartComparison(
        key=key,
        same=len(shared) - len(found),
        differences=tuple(found),
        only_a=tuple(name for name in left if name not in right),
        only_b=tuple(name for name in right if name not in left),
    )


def _leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """Tensors and plain values of a tree, named by the way to them; an empty container is a value."""
    if isinstance(tree, Mapping) and tree:
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)) and tree:
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return [(name, tree)]
    return [leaf for key, value in items for leaf in _leaves(value, f"{name}.{key}" if name else key)]


def _difference(name: str, a: Any, b: Any) -> Difference | None:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(name, a, b)
    if type(a) is type(b) and (a == b or (a != a and b != b)):
        return None
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b)):
        return Difference(name, _words(a), _words(b))
    gap = float(abs(a - b))
    return Difference(name, _words(a), _words(b), float("inf") if gap != gap else gap)


def _tensor_difference(name: str, a: Tensor, b: Tensor) -> Difference | None:
    total = max(a.numel(), b.numel())
    if a.shape != b.shape:
        return Difference(name, _words(a), _words(b), None, total, total)
    x, y = _wide(a), _wide(b)
    differing = ~((x == y) | (x.isnan() & y.isnan()))
    count = int(differing.sum())
    # The same numbers in another type differ too: the files are not the same.
    if count == 0 and a.dtype == b.dtype:
        return None
    gaps = (x - y).abs()[differing].double().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return Difference(name, _words(a), _words(b), float(gaps.max()) if count else 0.0, count, total)


def _wide(tensor: Tensor) -> Tensor:
    """In a type that holds the numbers exactly and can be compared; torch cannot do that with every small type."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lines(part: PartComparison, most: int) -> list[str]:
    lines = [_line(d) for d in part.differences]
    lines += [f"{name}: only in {side}" for side, names in (("a", part.only_a), ("b", part.only_b)) for name in names]
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _line(d: Difference) -> str:
    if d.largest is None or d.total == 1:
        return f"{d.name}: {d.a} against {d.b}" if d.a != d.b else f"{d.name}: by {d.largest:.3g}"
    types = "" if d.a == d.b else f", {d.a} against {d.b}"
    return f"{d.name}: by up to {d.largest:.3g}, in {d.count:,} of {d.total:,}{types}"
