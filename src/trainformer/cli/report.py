"""`trainformer report RUN`: see `trainformer.report`."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    what = "the folder of a run, of a sweep, or of several runs; or a name under runs/ or sweeps/"
    parser.add_argument("sources", metavar="RUN", nargs="+", help=what)
    where = "the file to write (default: report.html in the folder of the run; here, if there are several)"
    parser.add_argument("--out", metavar="FILE", help=where)
    parser.add_argument("--title", help="what stands at the top (default: the names)")
    top = "of each sweep, show the runs of the N best trials, too (default: 0)"
    parser.add_argument("--top", metavar="N", type=int, default=0, help=top)
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--json", action="store_true", help="say in JSON what was written")


def run(args: argparse.Namespace) -> int:
    """Write it, and say where it is."""
    from trainformer.report import write_report

    path = write_report(args.sources, args.out, title=args.title, top=args.top)
    size = path.stat().st_size
    if args.json:
        print(json.dumps({"report": str(path), "bytes": size}))
    else:
        print(f"wrote {path} ({size / 1e6:.1f} MB)")
    if args.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            print("no browser could be opened here", file=sys.stderr)
    return 0
