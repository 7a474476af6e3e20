"""Several datasets with names on the command line: ``--val clean=DATA --val shifted=DATA``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.run.validation_sets import NAME


def split_name(text: str) -> tuple[str, str]:
    """The name and the data of ``NAME=DATA``; without a name it is all data.

    >>> split_name("clean=data/a=1.csv"), split_name("data/a=1.csv")
    (('clean', 'data/a=1.csv'), ('', 'data/a=1.csv'))
    """
    name, equals, data = text.partition("=")
    return (name, data) if equals and NAME.fullmatch(name) else ("", text)


def named_data(texts: Sequence[str], flag: str) -> Any:
    """The data that an option names: one dataset, or several by name.

    >>> named_data(["a.csv"], "--data"), named_data(["clean=a.csv", "shifted=b.csv"], "--data")
    ('a.csv', {'clean': 'a.csv', 'shifted': 'b.csv'})
    """
    pairs = [split_name(text) for text in texts]
    names = [name for name, _ in pairs]
    if names == [""]:
        return pairs[0][1]
    if "" in names or len(set(names)) < len(names):
        do = f"Give each its own name: {flag} clean=DATA {flag} shifted=DATA."
        raise BadArgument(expected(f"names for several datasets as {flag}", " ".join(texts), do))
    return dict(pairs)
