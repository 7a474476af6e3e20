"""A real text that is everywhere: the source of the running Python's standard library. Nothing is downloaded.

Owns which files belong to the sample `"python-stdlib"` and which of them are held out as `"python-stdlib:test"`. The
files of one version of Python are the same wherever it came from, but for what a distribution adds or leaves out. All
of them compile, which a test holds; to find out at every load would take two seconds.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.text.tables import TextFiles

# Tests hold files that are wrong on purpose; packages beside the library are what somebody installed.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}
# What the build or the distribution writes, with paths of the machine.
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "_distutils_system_mod")
_HELD_OUT = 20


def load_corpus(name: str) -> TextFiles:
    """The built-in corpus of this name: documents ``{"text"}``.

    >>> train, test = load_corpus("python-stdlib"), load_corpus("python-stdlib:test")
    >>> len(train) > 10 * len(test) > 0
    True
    """
    if name not in _CORPORA:
        known = f"Built-in corpora: {', '.join(map(repr, corpus_names()))}."
        raise BadArgument(expected("the name of a built-in corpus", name, f"{did_you_mean(name, _CORPORA)} {known}"))
    return _CORPORA[name]()


def corpus_names() -> list[str]:
    """Names that `load_corpus` knows. A name with `:test` is what was held out of that corpus.

    >>> corpus_names()
    ['python-stdlib', 'python-stdlib:test']
    """
    return sorted(_CORPORA)


def _stdlib(held_out: bool) -> TextFiles:
    """One document per file, some 650 files of 11 MB in all (Python 3.11), in the order of their paths.

    A twentieth is held out, chosen by a hash of the path: a file stays where it is when others come and go.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [name for name in sorted(_sources(root)) if _is_held_out(name) == held_out]
    if not files:
        raise DataError(
            f"Expected the source of Python's standard library in '{root}', received no file that can be read. Some "
            "distributions have it in a package of its own, or as compiled files only."
        )
    return TextFiles([root / name for name in files])


def _sources(root: Path) -> Iterator[str]:
    """Paths below the library, with slashes whatever the system, of files that are UTF-8 and not empty."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_FILES) and _is_text(os.path.join(folder, name)):
                yield Path(folder, name).relative_to(root).as_posix()


def _is_text(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return bool(file.read().strip())
    except (OSError, UnicodeDecodeError):
        return False


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT == 0


_CORPORA: dict[str, Callable[[], TextFiles]] = {
    "python-stdlib": partial(_stdlib, held_out=False),
    "python-stdlib:test": partial(_stdlib, held_out=True),
}
