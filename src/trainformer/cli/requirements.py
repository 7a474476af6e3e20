"""What an installed package declares to need, by its own metadata: so it cannot go stale."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

_FORM = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?\s*\(?(?P<versions>[^;)]*)\)?\s*(?:;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")


@dataclass(frozen=True)
class Requirement:
    """A package, and which versions of it will do."""

    name: str
    versions: str = ""

    @property
    def text(self) -> str:
        """As pip reads it."""
        return self.name + self.versions


def requirements_of(package: str) -> dict[str | None, list[Requirement]]:
    """What each extra of a package needs; under None, what it always needs. Extras of extras are followed."""
    distribution = metadata.distribution(package)
    names = distribution.metadata.get_all("Provides-Extra") or []
    needed: dict[str | None, list[Requirement]] = {None: [], **{name: [] for name in names}}
    others: dict[str | None, list[str]] = {}
    for line in distribution.requires or []:
        match = _FORM.fullmatch(line.strip())
        if match is None:
            continue
        named = _EXTRA.search(match["marker"] or "")
        extra = named[1] if named else None
        if match["name"].lower() == package:
            others.setdefault(extra, []).extend(part.strip() for part in (match["extras"] or "").split(","))
        else:
            needed.setdefault(extra, []).append(Requirement(match["name"], match["versions"].replace(" ", "")))
    return {extra: _collected(extra, needed, others, set()) for extra in needed}


def _collected(
    extra: str | None,
    needed: dict[str | None, list[Requirement]],
    others: dict[str | None, list[str]],
    seen: set[str | None],
) -> list[Requirement]:
    if extra in seen:
        return []
    seen.add(extra)
    found = list(needed.get(extra, []))
    for other in others.get(extra, []):
        found += _collected(other, needed, others, seen)
    return list(dict.fromkeys(found))


def is_met(requirement: Requirement) -> bool:
    """Whether it is installed in a version that will do.

    >>> is_met(Requirement("numpy", ">=1.0")), is_met(Requirement("numpy", ">=99")), is_met(Requirement("no-such"))
    (True, False, False)
    """
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    bounds = re.findall(r">=([\d.]+)", requirement.versions)
    return all(_numbers(version) >= _numbers(bound) for bound in bounds)


def _numbers(version: str) -> list[int]:
    """
    >>> _numbers("2.13.0+cu130"), _numbers("5.0rc1")
    ([2, 13], [5])
    """
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:  # 2.0 is 2
        numbers.pop()
    return numbers
