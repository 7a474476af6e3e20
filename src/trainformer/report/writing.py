"""From the names of runs and sweeps to a report on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainformer import __version__
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.live.runs import RUNS, is_run, list_runs
from trainformer.report import sweeps
from trainformer.report.page import page
from trainformer.report.reading import read_run
from trainformer.report.series import plots_of, points_for
from trainformer.sweep.reading import SWEEPS, is_sweep
from trainformer.utils.files import write_atomically

FILE = "report.html"
AnyPath = str | os.PathLike[str]


def write_report(
    sources: AnyPath | Iterable[AnyPath], out: AnyPath | None = None, *, title: str | None = None, top: int = 0
) -> Path:
    """Write one HTML file about runs and sweeps; its path.

    `sources` are folders of runs, folders of sweeps, folders with runs or sweeps in them, or names under ``runs/`` or
    ``sweeps/``. `out` is a file or a folder; by default ``report.html`` in the folder of the run or sweep if it is
    one, else here. `top`: with each sweep also the runs of its so many best trials.
    """
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not given:
        raise BadArgument(expected("at least one run or sweep", given, "`trainformer runs` lists the runs there are."))
    if top < 0:
        raise BadArgument(expected("top to be a number of trials, 0 or more", top))
    runs, searched = find(given)
    path = _target(out, [*runs, *searched])
    found = [sweeps.read(folder) for folder in searched]
    title = title or _title([folder.resolve().name for folder in (*searched, *runs)])
    for sweep in found:
        runs = _together(runs, _runs_of_best(sweep, top))
    _write(path, page(content_of(title, runs, found)))
    return path


def find(given: Iterable[AnyPath]) -> tuple[list[Path], list[Path]]:
    """The folders that are meant: of runs, and of sweeps. Each once, in the order given."""
    runs: list[Path] = []
    searched: list[Path] = []
    for source in given:
        for place in (Path(source), RUNS / source, SWEEPS / source):
            if is_sweep(place):
                searched = _together(searched, [place])
                break
            if _has_run(place):
                runs = _together(runs, [place])
                break
            if inside := _runs_in(place):
                runs = _together(runs, inside)
                break
            if place.is_dir() and (inside := sorted(path for path in place.iterdir() if is_sweep(path))):
                searched = _together(searched, inside)
                break
        else:
            raise BadArgument(_not_found(str(source)))
    return runs, searched


def _has_run(folder: Path) -> bool:
    """Also a folder that somebody copied without its ``status.json``."""
    return is_run(folder) or any((folder / name).is_file() for name in ("metrics.jsonl", "records.jsonl"))


def _runs_in(place: Path) -> list[Path]:
    """Those of a folder of runs, or of one in which there is such a folder, as in an `output_dir` of `hf`."""
    for folder in (place, place / RUNS):
        if folder.is_dir() and (inside := [info.path for info in list_runs(folder)]):
            return inside
    return []


def _not_found(source: str) -> str:
    if any((place / source).is_dir() for place in (Path(), RUNS, SWEEPS)):
        return expected("the folder of a run or of a sweep", source, "There is neither in it.")
    known = [path.name for place in (RUNS, SWEEPS) if place.is_dir() for path in place.iterdir() if path.is_dir()]
    hint = did_you_mean(source, known) or "`trainformer runs` and `trainformer sweep show` list what there is."
    return expected("the folder of a run or sweep, or the name of one under runs/ or sweeps/", source, hint)


def _together(folders: list[Path], more: Iterable[Path]) -> list[Path]:
    known = {folder.resolve(): folder for folder in folders}
    for folder in more:
        known.setdefault(folder.resolve(), folder)
    return list(known.values())


def _runs_of_best(sweep: dict[str, Any], top: int) -> list[Path]:
    best = [trial["run"] for trial in sweep["trials"] if trial["metric"] is not None and trial["run"]]
    return [Path(run) for run in best[:top] if _has_run(Path(run))]


def _target(out: AnyPath | None, folders: list[Path]) -> Path:
    if out is None:
        return folders[0] / FILE if len(folders) == 1 else Path(FILE)
    path = Path(out)
    return path / FILE if path.is_dir() or str(out).endswith(os.sep) else path


def _write(path: Path, text: str) -> None:
    """A page that is there is replaced. A file of any other kind was hardly meant."""
    try:
        if path.suffix.lower() not in (".html", ".htm") and path.is_file() and not _is_page(path):
            raise BadArgument(
                expected("a page, or no file yet, where the report goes", str(path), "Choose another --out.")
            )
        write_atomically(path, text.encode("utf-8", "replace"))  # the name of a folder may be no text
    except OSError as error:
        do = f"It cannot be written ({error.strerror}). Choose another --out."
        raise BadArgument(expected("a file for the report", str(path), do)) from error


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(512)
    return not beginning or beginning.lstrip().lower().startswith(b"<!doctype html")


def _title(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def content_of(title: str, runs: list[Path], found: list[dict[str, Any]]) -> dict[str, Any]:
    """All that the page shows."""
    points = points_for(len(runs))
    pages = [read_run(folder, points) for folder in runs]
    _tell_apart(pages)
    place = {folder.resolve(): number for number, folder in enumerate(runs)}
    for sweep in found:
        for trial in sweep["trials"]:
            trial["page"] = place.get(Path(trial["run"])) if trial["run"] else None
    return {
        "title": title,
        "written": time.time(),
        "version": __version__,
        "points": points,
        "plots": plots_of(dict.fromkeys(name for run in pages for name in run["series"])),
        "runs": pages,
        "sweeps": found,
    }


def _tell_apart(pages: list[dict[str, Any]]) -> None:
    """Runs of one name get those of the folders they are in, as many as it takes."""
    parts = [Path(run["path"]).resolve().parts for run in pages]
    for run, own in zip(pages, parts, strict=True):
        alike = [others for others in parts if others[-1] == own[-1] and others != own]
        depth = 1
        while depth < len(own) and any(others[-depth:] == own[-depth:] for others in alike):
            depth += 1
        run["name"] = "/".join(own[-depth:])
