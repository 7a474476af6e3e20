"""One HTML file of the content: style, scripts and data are in it, and nothing else is ever asked for.

Owns the safety of the page. The data are JSON in a block that no browser executes, with every character escaped that
could end it; the scripts put them on the page as text, never as HTML. A content security policy names the one script
by its digest and forbids all connections, so that whatever a run is called, nothing of it is executed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

from trainformer.live.runs import plain

_SCRIPTS = ("dom", "curves", "overview", "settings", "details", "sweep_plots", "sweeps", "report")
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_BANNER = re.compile(r"^/\*!.*?\*/\s*", re.S)


def page(content: dict[str, Any]) -> str:
    """The file."""
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(content["title"]),
        "policy": html.escape(policy),
        "style": _asset("uPlot.min.css") + _asset("report.css"),
        "data": as_json(content),
        "script": script,
    }
    # In one pass over the template: a run may be called {{script}}.
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def as_json(content: Any) -> str:
    """JSON that can stand in an HTML file: ASCII, without the characters that HTML knows.

    >>> as_json(["</script>", "é", float("nan")])
    '["\\\\u003c/script\\\\u003e","\\\\u00e9","NaN"]'
    """
    text = json.dumps(plain(content), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _script() -> str:
    """One script of all. The name of its home in the banner of uPlot gives way to its licence, as that asks for."""
    library = _BANNER.sub("", _asset("uPlot.iife.min.js"))
    own = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'/* uPlot:\n{_asset("uPlot.LICENSE")}*/\n{library}\n(() => {{\n"use strict";\n{own}\n}})();\n'


def _asset(name: str) -> str:
    return resources.files("trainformer.report").joinpath("assets", name).read_text(encoding="utf-8")
