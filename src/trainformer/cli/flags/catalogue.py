"""What there is to train, adapt, observe, log and optimise with: names and a line about each. torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainformer.cli.flags import source

CLASSES = ("tasks", "adapters", "callbacks", "loggers")
KINDS = (*CLASSES, "optimizers", "schedulers")

_OPTIMIZERS = "trainformer.backends.torch.optimizer_names"
_SCHEDULES = "trainformer.backends.torch.schedules"


@dataclass(frozen=True)
class Entry:
    """Something that can be named. `module` is where its class is."""

    kind: str
    name: str
    summary: str
    module: str = ""

    @property
    def target(self) -> str:
        """How a config names it."""
        return f"trainformer.{self.kind}:{self.name}"


def entries(kind: str) -> list[Entry]:
    """All of a kind, in alphabetical order where they have no other."""
    if kind == "optimizers":
        return list(_optimizers())
    if kind == "schedulers":
        names = source.read_table(_SCHEDULES, "SCHEDULES")
        return [Entry(kind, name, source.summary_of_function(_SCHEDULES, made)) for name, made in names.items()]
    return sorted(_classes(kind), key=lambda entry: entry.name)


def _classes(kind: str) -> Iterator[Entry]:
    for name, module in source.exports_of(f"trainformer.{kind}").items():
        found = None if module.endswith(".base") else source.read(module, name)  # of which others are made
        if found is None:
            continue
        for entry in [f"{name}.{maker}" for maker in found.makers] or [name]:
            told = source.read(module, entry)
            of_class = f"{found.summary.partition(':')[0]}; " if entry != name else ""
            yield Entry(kind, entry, f"{of_class}{told.summary}" if told else "", module)


def _optimizers() -> Iterator[Entry]:
    for name, written in source.read_table(_OPTIMIZERS, "_TORCH").items():
        yield Entry("optimizers", name, written.strip("()").split(",")[0])
    for name, written in source.read_table(_OPTIMIZERS, "_BNB").items():
        yield Entry("optimizers", name, f"bitsandbytes.optim.{written.split(chr(39))[1]}")


def find(kind: str, name: str) -> Entry | None:
    """An entry by its name; also a class of which the list shows the class methods only (`SSL`)."""
    found = next((entry for entry in entries(kind) if entry.name == name), None)
    if found is not None or kind not in CLASSES:
        return found
    home = next((entry.module for entry in entries(kind) if entry.name.partition(".")[0] == name), None)
    told = source.read(home, name) if home is not None else None
    return None if home is None or told is None else Entry(kind, name, told.summary, home)


def paper_options(name: str) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Options of a self-supervised method with their values when left out, and the options of other methods.

    >>> options, others = paper_options("SSL.mae")
    >>> options["mask_ratio"], "queue_size" in others
    (0.75, True)
    """
    task, _, method = name.rpartition(".")
    if task != "SSL":
        return {}, frozenset()
    from trainformer.tasks.vision.ssl.options import DEFAULTS

    known = {**DEFAULTS.get(f"{method}_v3", {}), **DEFAULTS.get(method, {})}
    everything = {option for options in DEFAULTS.values() for option in options}
    others = everything - known.keys() | ({"version"} if f"{method}_v3" not in DEFAULTS else set())
    return known, frozenset(others)


def fields_of(entry: Entry) -> dict[str, source.Field]:
    """What the constructor takes, as it is written; with the values of the paper for a self-supervised method."""
    told = source.read(entry.module, entry.name) if entry.module else None
    if told is None:
        return {}
    values, others = paper_options(entry.name)
    fixed = {"method"} if "." in entry.name else set()
    kept = {name: known for name, known in told.fields.items() if name not in others and name not in fixed}
    return {
        name: known
        if values.get(name) is None
        else source.Field(name, known.annotation, repr(values[name]), known.section, known.about)
        for name, known in kept.items()
    }
