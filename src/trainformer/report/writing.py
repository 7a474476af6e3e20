"""`write_report`: finds runs and sweeps, collects what the page shows, and renders it to one HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from trainformer import __version__
from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.live.runs import RUNS, is_run, list_runs
from trainformer.report.reading import read_run, read_sweep_trials
from trainformer.report.series import group_plots, points_for
from trainformer.sweep.reading import SWEEPS, is_sweep, list_sweeps
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")

FILE = "report.html"
AnyPath = str | os.PathLike[str]
_SCRIPTS = ("dom", "curves", "overview", "settings", "details", "sweep_plots", "sweeps", "report")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_BANNER = re.compile(r"^/\*!.*?\*/\s*", re.S)


def write_report(
    sources: AnyPath | Iterable[AnyPath],
    out: AnyPath | None = None,
    *,
    title: str | None = None,
    top: int = 0,
    storage: Any = None,
) -> Path:
    """Write one HTML file about runs and sweeps; returns its path.

    `sources` are run folders, sweep folders, folders that contain runs or sweeps, or names under ``runs/`` or
    ``sweeps/``. `out` is a file or a folder; the default is ``report.html`` in the folder of a single run or sweep,
    else in the current folder. `top` adds the runs of that many best trials of each sweep, if they lie in its folder.
    `storage` has the trials of the sweeps; without it, only files in their folders are opened.
    """
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not given:
        raise BadArgument(expected("at least one run or sweep", given, "`trainformer runs` lists the runs."))
    if top < 0:
        raise BadArgument(expected("top to be a number of trials, 0 or more", top))
    runs, sweep_folders = find(given)
    folders = [*sweep_folders, *runs]
    if out is None:
        path = folders[0] / FILE if len(folders) == 1 else Path(FILE)
    else:
        path = Path(out) / FILE if Path(out).is_dir() or str(out).endswith(os.sep) else Path(out)
    sweeps = [read_sweep_trials(folder, storage) for folder in sweep_folders]
    names = [folder.resolve().name for folder in folders]
    title = title or (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")
    for sweep in sweeps:
        best = [Path(trial["run"]) for trial in sweep["trials"] if trial["metric"] is not None and trial["run"]]
        runs = _union(runs, filter(_has_run, _inside(best[:top], Path(sweep["path"]))))
    _write(path, render(collect_content(title, runs, sweeps)))
    return path


def _inside(runs: Iterable[Path], folder: Path) -> list[Path]:
    """Those in the folder of their sweep: one from somebody else must not put other files on the page."""
    found = []
    for run in runs:
        if run.resolve().is_relative_to(folder.resolve()):
            found.append(run)
        else:
            logger.warning("%s is left out: it does not lie in %s. Name it to have it in the report.", run, folder)
    return found


def find(given: Iterable[AnyPath]) -> tuple[list[Path], list[Path]]:
    """The run folders and the sweep folders that sources refer to, each once, in the given order."""
    runs: list[Path] = []
    sweeps: list[Path] = []
    for source in given:
        for path in (Path(source), RUNS / source, SWEEPS / source):
            if is_sweep(path):
                sweeps = _union(sweeps, [path])
                break
            if _has_run(path):
                runs = _union(runs, [path])
                break
            if inside := _runs_in(path):
                runs = _union(runs, inside)
                break
            if inside := list_sweeps(path):
                sweeps = _union(sweeps, inside)
                break
        else:
            raise BadArgument(_not_found(str(source)))
    return runs, sweeps


def _has_run(folder: Path) -> bool:
    """Also for a folder that was copied without its ``status.json``."""
    return is_run(folder) or any((folder / name).is_file() for name in ("metrics.jsonl", "records.jsonl"))


def _runs_in(path: Path) -> list[Path]:
    """The runs in a folder, or in its subfolder ``runs/``, as in an `output_dir` of `hf`."""
    for folder in (path, path / RUNS):
        if folder.is_dir() and (inside := [info.path for info in list_runs(folder)]):
            return inside
    return []


def _not_found(source: str) -> str:
    if any((root / source).is_dir() for root in (Path(), RUNS, SWEEPS)):
        return expected("the folder of a run or of a sweep", source, "It contains neither.")
    known = [path.name for root in (RUNS, SWEEPS) if root.is_dir() for path in root.iterdir() if path.is_dir()]
    hint = did_you_mean(source, known) or "`trainformer runs` and `trainformer sweep show` list runs and sweeps."
    return expected("the folder of a run or sweep, or the name of one under runs/ or sweeps/", source, hint)


def _union(folders: list[Path], more: Iterable[Path]) -> list[Path]:
    known = {folder.resolve(): folder for folder in folders}
    for folder in more:
        known.setdefault(folder.resolve(), folder)
    return list(known.values())


def _write(path: Path, text: str) -> None:
    """Replaces an earlier report, but refuses to overwrite any other kind of file."""
    try:
        if path.suffix.lower() not in (".html", ".htm") and path.is_file():
            with path.open("rb") as file:
                start = file.read(512)
            if start and not start.lstrip().lower().startswith(b"<!doctype html"):
                what = "an HTML file, or a new file, for the report"
                raise BadArgument(expected(what, str(path), "Choose another --out."))
        write_atomically(path, text.encode("utf-8", "replace"))  # a folder name may not be valid text
    except OSError as error:
        do = f"It cannot be written ({error.strerror}). Choose another --out."
        raise BadArgument(expected("a file for the report", str(path), do)) from error


def collect_content(title: str, runs: list[Path], sweeps: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that the page shows."""
    points = points_for(len(runs))
    contents = [read_run(folder, points) for folder in runs]
    _make_names_unique(contents)
    index = {folder.resolve(): number for number, folder in enumerate(runs)}
    for sweep in sweeps:
        for trial in sweep["trials"]:
            trial["page"] = index.get(Path(trial["run"])) if trial["run"] else None
    known = (run["config"].get("val_sets", {}).get("value") for run in contents)
    val_sets = sorted({str(name) for names in known if isinstance(names, list) for name in names})
    return {
        "title": title,
        "written": time.time(),
        "version": __version__,
        "points": points,
        "val_sets": val_sets,
        "plots": group_plots(dict.fromkeys(name for run in contents for name in run["series"]), val_sets),
        "runs": contents,
        "sweeps": sweeps,
    }


def _make_names_unique(contents: list[dict[str, Any]]) -> None:
    """Prefixes runs of the same name with as many of their parent folders as necessary."""
    parts = [Path(run["path"]).resolve().parts for run in contents]
    for run, own in zip(contents, parts, strict=True):
        same_name = [others for others in parts if others[-1] == own[-1] and others != own]
        depth = 1
        while depth < len(own) and any(others[-depth:] == own[-depth:] for others in same_name):
            depth += 1
        run["name"] = "/".join(own[-depth:])


# -- rendering -----------------------------------------------------------------------------------------------


def render(content: dict[str, Any]) -> str:
    """The HTML file.

    Run names and texts are untrusted. The data is JSON in a block that no browser executes, with every character
    escaped that could end it; the script puts it on the page as text, never as HTML. A content security policy allows
    this one script by its digest and forbids all connections.
    """
    # All scripts as one. uPlot's banner is replaced by its full licence, as the licence requires.
    library = _BANNER.sub("", _asset("uPlot.iife.min.js"))
    own = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    script = f'/* uPlot:\n{_asset("uPlot.LICENSE")}*/\n{library}\n(() => {{\n"use strict";\n{own}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "title": html.escape(content["title"]),
        "policy": html.escape(policy),
        "style": _asset("uPlot.min.css") + _asset("report.css"),
        "data": _as_json(content),
        "script": script,
    }
    # In one pass over the template: the name of a run may be {{script}}.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _asset("page.html"))


def _as_json(content: Any) -> str:
    """JSON that is safe inside an HTML file: ASCII, without the special characters of HTML.

    >>> _as_json(["</script>", "é", float("nan")])
    '["\\\\u003c/script\\\\u003e","\\\\u00e9","NaN"]'
    """
    text = json.dumps(jsonable(content), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files("trainformer.report").joinpath("assets", name).read_text(encoding="utf-8")
