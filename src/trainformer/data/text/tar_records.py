"""Records of text in tar shards, as WebDataset has them: one JSON or text file for each record."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError, expected
from trainformer.data.tar_shards import RawSample, find_shards, read_samples
from trainformer.utils.files import decode_json

_ENDINGS = {"json", "txt"}


class TarRecords:
    """A stream of the records in tar shards: the content of each `.json`, or of a `.txt` as `{"text": ...}`.

    Shards are read in order, one record at a time. The position can be saved and restored.

    >>> import io, tarfile
    >>> with tarfile.open("records.tar", "w") as tar:
    ...     for number, record in enumerate((b'{"prompt": "1 + 1 ="}', b'{"prompt": "1 + 2 ="}')):
    ...         member = tarfile.TarInfo(f"{number}.json")
    ...         member.size = len(record)
    ...         tar.addfile(member, io.BytesIO(record))
    >>> [record["prompt"] for record in TarRecords("records.tar")]
    ['1 + 1 =', '1 + 2 =']
    """

    in_memory = True  # read in this process

    def __init__(self, urls: str | Path | Iterable[str | Path]) -> None:
        self.shards = find_shards(urls)
        self._position = (0, 0)  # of the next record: its shard and its offset there
        self._restored = False
        if (torch := sys.modules.get("torch.utils.data")) is not None:
            torch.IterableDataset.register(type(self))  # a DataLoader checks the class

    def __iter__(self) -> Iterator[Any]:
        if not self._restored:
            self._position = (0, 0)
        self._restored = False
        return self._records()

    def _records(self) -> Iterator[Any]:
        first, offset = self._position
        for shard in range(first, len(self.shards)):
            for raw in read_samples(self.shards[shard], shard, offset if shard == first else 0, _ENDINGS):
                self._position = (shard, raw.end)
                yield self._read(raw)

    def _read(self, raw: RawSample) -> Any:
        if not raw.files:
            what = f"a file '{raw.key}.json' or '{raw.key}.txt' in '{self.shards[raw.shard]}'"
            raise DataError(expected(what, ", ".join(sorted(raw.endings))))
        try:
            return decode_json(raw.files["json"]) if "json" in raw.files else {"text": raw.files["txt"].decode()}
        except ValueError as error:  # of JSON or Unicode
            raise DataError(f"'{raw.key}' in '{self.shards[raw.shard]}' cannot be read: {error}.") from error

    def state_dict(self) -> dict[str, Any]:
        """The position of the current iteration."""
        return {"position": list(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there: the next iteration yields the rest."""
        self._position = (int(state["position"][0]), int(state["position"][1]))
        self._restored = True
