"""The objects that a config describes, as a tree to read or a graph to draw. Plain values are left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainformer.config.nodes import Call, Config, as_call, holds_calls, is_shared, names_of_shared, parts


@dataclass(frozen=True)
class _Row:
    """One line of the tree: what stands at a step, below which row."""

    depth: int
    step: str
    text: str
    number: int  # of the object
    above: int | None
    again: bool  # shown further up


def to_tree(config: Config) -> str:
    """Step, kind and class of every object, indented; `-> name` where an object is used again.

    >>> print(to_tree(Config({"model": {"type": "Net", "head": {"type": "torch.nn.Linear", "in_features": 8}}})))
    model: Net
      head: torch.nn.Linear
    """
    return "\n".join(f"{'  ' * row.depth}{row.step}: {row.text}" for row in _rows(config))


def to_dot(config: Config) -> str:
    """The graph in the language of Graphviz."""
    lines = ["digraph config {", "  rankdir=LR;", "  node [shape=box];"]
    for row in _rows(config):
        if not row.again:
            label = f"{row.step}\n{row.text}" if row.above is None else row.text
            lines.append(f"  n{row.number} [label={json.dumps(label, ensure_ascii=False)}];")
        if row.above is not None:
            step = json.dumps(row.step, ensure_ascii=False)
            lines.append(f"  n{row.above} -> n{row.number} [label={step}];")
    return "\n".join([*lines, "}"])


def _rows(config: Config) -> Iterator[_Row]:
    names = names_of_shared(config)
    numbers: dict[int, int] = {}
    count = iter(range(1 << 30))

    def walk(value: Any, step: str, depth: int, above: int | None) -> Iterator[_Row]:
        if not holds_calls(value):
            return
        name = names.get(id(value)) if is_shared(value) else None
        if name is not None and id(value) in numbers:
            yield _Row(depth, step, f"-> {name}", numbers[id(value)], above, again=True)
            return
        number = next(count)
        if name is not None:
            numbers[id(value)] = number
        own = getattr(value, "name", None) or name
        yield _Row(depth, step, _described(value, own if own != step else None), number, above, again=False)
        for inner, part in parts(as_call(value) or value):
            yield from walk(part, str(inner), depth + 1, number)

    for key, value in config.items():
        yield from walk(value, str(key), 0, None)


def _described(value: Any, name: str | None) -> str:
    call = as_call(value)
    if call is None:
        text = "dict" if isinstance(value, dict) else "list"
    else:
        text = f"{call.kind} {call.title}" if isinstance(value, Call) else call.title
    return f"{text} ({name})" if name else text
