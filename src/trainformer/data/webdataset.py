"""Images streamed from tar shards (the WebDataset layout), and transforms for streams of any kind.

Owns what the files of a sample mean, the order of an epoch, how ranks and workers share the shards, and the position,
which can be saved and found again without reading what came before. Tar files are read in `shards`. `MappedStream`
does for a stream what `ImageDataset` does for data with a length.

The order is a pure function of (seed, epoch) and of how many ranks and workers share the work.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from trainformer.core.errors import DataError, expected
from trainformer.data.folder import decode_image
from trainformer.data.labels import targets_of
from trainformer.data.lists import LABEL_COLUMNS
from trainformer.data.order import epoch_order, preserved_generators, sample_key, seed_generators
from trainformer.data.pixels import image_tensor, with_channels
from trainformer.data.shards import RawSample, find_shards, read_samples, sample_number
from trainformer.utils.distributed import rank as this_rank
from trainformer.utils.distributed import world_size

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("trainformer")

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
LABEL_KEYS = ("cls", "label", "json")
_BUFFER = 1000  # samples to shuffle among: some 100 MB of encoded photos in every worker


@dataclass
class _Cursor:
    """Where an iteration is: past `drawn` samples, at an offset in the shard whose turn it is, with these in hand."""

    split: tuple[int, int, int, int]
    place: int = 0
    offset: int = 0
    drawn: int = 0
    buffer: list[RawSample] = field(default_factory=list)


class WebDataset(IterableDataset):
    """Images and labels streamed from tar files: ``(PIL image, label)``; the label is None where there is none.

    `urls` is a path, a pattern (`"train-{000..012}.tar"`, `"train-*.tar"`), a folder of tar files, or a list of these.
    Neighbouring files that differ only in what follows the first dot of their names are one sample: `0001.jpg` with
    `0001.cls`. The label is a whole number, or the name of one of `classes`; in a JSON file it is the whole content or
    a field with a usual name (`"json:species"` names another).

    `shuffle` is the number of samples to shuffle among (True: 1000), with the shards in random order; 1 shuffles the
    shards alone. Ranks and workers share the shards, so there should be a multiple of them, of equal sizes. With
    `skip_bad` a sample that cannot be read is left out with a warning; else it is an error that names it.

    A stream knows neither its length nor its classes, unless told (`length`, `classes`, `num_classes`) or by `scan`.
    """

    def __init__(
        self,
        urls: str | Path | Iterable[str | Path],
        *,
        image_key: str | Sequence[str] = IMAGE_KEYS,
        label_key: str | Sequence[str] = LABEL_KEYS,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        length: int | None = None,
        shuffle: int | bool = False,
        seed: int = 0,
        channels: int | None = 3,
        skip_bad: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.shards = find_shards(urls)
        self.image_keys = (image_key,) if isinstance(image_key, str) else tuple(image_key)
        self.label_keys = (label_key,) if isinstance(label_key, str) else tuple(label_key)
        self.shuffle = _BUFFER if shuffle is True else int(shuffle)
        self.seed = seed
        self.channels = channels
        self.skip_bad = skip_bad
        self.num_classes = num_classes if classes is None else len(classes)
        self.length = length
        self.class_counts: list[int] | None = None
        self.input_shape: tuple[int, ...] | None = None
        self.epoch = 0
        self._numbers = None if classes is None else {name: number for number, name in enumerate(classes)}
        self.num_replicas, self.rank = num_replicas, rank
        self._cursor: _Cursor | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def classes(self) -> list[str]:
        """Names of the classes, where they are known."""
        if self._numbers is None:  # hasattr() is how everybody asks
            raise AttributeError("the names of the classes are not known: pass `classes`, or call scan()")
        return list(self._numbers)

    def __len__(self) -> int:
        """Samples of an epoch on this rank, if `length` is known; exact for one rank, else as if shards were equal."""
        if self.length is None:
            raise TypeError("the length of a stream is not known: pass `length`, or call scan()")
        return -(-self.length // self._split()[0])

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes that are started afresh know nothing of the ranks.
        ranks, rank, _, _ = self._split()
        return self.__dict__ | {"num_replicas": ranks, "rank": rank, "_cursor": None}

    # -- reading -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Image.Image, int | None]]:
        return (sample for _, sample in self.numbered())

    def numbered(self) -> Iterator[tuple[int, tuple[Image.Image, int | None]]]:
        """Samples with a number each that belongs to the sample alone: for random numbers that do, too."""
        # Not at the first `next`: from now on, state_dict() speaks of this iteration.
        self._cursor = self._start()
        self._restored = None
        return self._numbered(self._cursor)

    def _numbered(self, cursor: _Cursor) -> Iterator[tuple[int, tuple[Image.Image, int | None]]]:
        for raw in self._drawn(cursor):
            sample = self._read(raw)
            if sample is not None:
                yield sample_number(self.shards[raw.shard], raw.key), sample

    def first(self) -> tuple[Image.Image, int | None]:
        """The first sample of the first shard, whatever the order and the position."""
        for raw in self._samples(0, 0):
            sample = self._read(raw)
            if sample is not None:
                return sample
        raise DataError(f"Expected at least one image in '{self.shards[0]}', received none.")

    def scan(self) -> Self:
        """Count samples and classes by reading all headers and labels, but no image except one for its shape.

        Takes some 100 s for a million samples on a local disk; compressed shards are decompressed as a whole.
        """
        labels = [label for shard in range(len(self.shards)) for label in self._scanned(shard)]
        self.length = len(labels)
        names = {label for label in labels if isinstance(label, str)}
        if self._numbers is None and not all(name.isdigit() for name in names):
            self._numbers = {name: number for number, name in enumerate(sorted(names))}
        numbers = [self._as_number(label, "a shard") for label in labels]
        known = np.asarray([number for number in numbers if number is not None], dtype=np.int64)
        if self._numbers is not None:
            self.num_classes = len(self._numbers)
        elif len(known) and self.num_classes is None:
            self.num_classes = int(known.max()) + 1
        if len(known) == len(labels) and len(known):
            self.class_counts = np.bincount(known, minlength=self.num_classes or 0).tolist()
        image, _ = self.first()
        self.input_shape = (len(image.getbands()), image.height, image.width)
        return self

    def _scanned(self, shard: int) -> Iterator[Any]:
        """The labels of a shard, as they are written."""
        for raw in self._samples(shard, 0, {key.partition(":")[0] for key in self.label_keys}):
            try:
                label = self._given_label(raw)
                if self._numbers is not None or not isinstance(label, str):
                    self._as_number(label, self._where(raw))
                yield label
            except DataError:
                if not self.skip_bad:
                    raise

    def renumber(self, classes: Sequence[str]) -> WebDataset:
        """The same stream with the numbers that its classes have in another list of names."""
        other = self.shuffled(self.shuffle)
        other._numbers = {name: number for number, name in enumerate(classes)}
        other.num_classes, other.class_counts = len(classes), None
        if self.class_counts is not None:
            counts = dict(zip(self.classes, self.class_counts, strict=True))
            other.class_counts = [counts.get(name, 0) for name in classes]
        return other

    def shuffled(self, shuffle: int | bool = True, seed: int | None = None) -> WebDataset:
        """The same stream in random order."""
        other = copy.copy(self)
        other.shuffle = _BUFFER if shuffle is True else int(shuffle)
        other.seed = self.seed if seed is None else seed
        other.num_replicas, other.rank = self.num_replicas, self.rank  # ranks may still have to be asked for
        return other

    # -- position ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. A position that was restored belongs to its own epoch and is then dropped."""
        if epoch != self.epoch:
            self.epoch, self._cursor, self._restored = epoch, None, None

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration in this process is, the samples in its buffer included (as places, not bytes)."""
        if self._restored is not None:
            return self._restored
        cursor = self._cursor or _Cursor(self._split())
        return {
            "epoch": self.epoch,
            "shards": len(self.shards),
            "split": list(cursor.split),
            "place": cursor.place,
            "offset": cursor.offset,
            "drawn": cursor.drawn,
            "buffer": [[raw.shard, raw.offset] for raw in cursor.buffer],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there: the next iteration gives the rest of that epoch."""
        if state["shards"] != len(self.shards):
            raise DataError(expected(f"the {state['shards']} shards that the position was saved for", len(self.shards)))
        self.epoch, self._restored, self._cursor = state["epoch"], state, None

    def _start(self) -> _Cursor:
        cursor = _Cursor(self._split())
        state = self._restored
        if state is None:
            return cursor
        if tuple(state["split"]) != cursor.split:
            raise DataError(
                expected(
                    "the (ranks, rank, workers, worker) that the position in the stream was saved with, "
                    f"{tuple(state['split'])}",
                    cursor.split,
                    "Resume with as many ranks and workers, or begin the epoch anew.",
                )
            )
        cursor.place, cursor.offset, cursor.drawn = state["place"], state["offset"], state["drawn"]
        cursor.buffer = self._reread([(shard, offset) for shard, offset in state["buffer"]])
        return cursor

    def _reread(self, places: list[tuple[int, int]]) -> list[RawSample]:
        found: dict[tuple[int, int], RawSample] = {}
        for shard, offset in sorted(places):  # forwards: compressed shards cannot be read in any other way
            raw = next(self._samples(shard, offset), None)
            if raw is None or raw.offset != offset:
                raise DataError(f"Expected shard '{self.shards[shard]}' as it was, received one that has changed.")
            found[shard, offset] = raw
        return [found[place] for place in places]

    def _split(self) -> tuple[int, int, int, int]:
        worker = get_worker_info()
        return (
            world_size() if self.num_replicas is None else self.num_replicas,
            this_rank() if self.rank is None else self.rank,
            1 if worker is None else worker.num_workers,
            0 if worker is None else worker.id,
        )

    def _order(self, split: tuple[int, int, int, int]) -> list[int]:
        """Numbers of the shards that this worker of this rank reads."""
        ranks, rank, workers, worker = split
        if len(self.shards) < ranks:
            raise DataError(
                expected(
                    f"at least {ranks} shards for {ranks} ranks",
                    len(self.shards),
                    "Write the data into more tar files.",
                )
            )
        order = epoch_order(len(self.shards), self.seed, self.epoch, shuffle=self.shuffle > 0)
        return order[rank::ranks][worker::workers].tolist()

    # -- order ---------------------------------------------------------------------------------------------

    def _drawn(self, cursor: _Cursor) -> Iterator[RawSample]:
        """The samples of an epoch in the order of this epoch. Before one is given out, the cursor is past it."""
        if self.shuffle <= 1:
            for raw in self._in_sequence(cursor):
                cursor.drawn += 1
                yield raw
            return
        for raw in self._in_sequence(cursor):
            if len(cursor.buffer) < self.shuffle:
                cursor.buffer.append(raw)
                continue
            place = self._draw(cursor)
            drawn, cursor.buffer[place] = cursor.buffer[place], raw
            yield drawn
        while cursor.buffer:
            place = self._draw(cursor)
            drawn, cursor.buffer[place] = cursor.buffer[place], cursor.buffer[-1]
            cursor.buffer.pop()
            yield drawn

    def _draw(self, cursor: _Cursor) -> int:
        """A place in the buffer, by lot: the n-th draw depends on n, so no generator's state need be saved."""
        _, rank, workers, worker = cursor.split
        cursor.drawn += 1
        key = sample_key(sample_key(self.seed, 0, self.epoch), 0, rank * workers + worker)
        return sample_key(key, 0, cursor.drawn) % len(cursor.buffer)

    def _in_sequence(self, cursor: _Cursor) -> Iterator[RawSample]:
        order = self._order(cursor.split)
        while cursor.place < len(order):
            for raw in self._samples(order[cursor.place], cursor.offset):
                cursor.offset = raw.end
                yield raw
            cursor.place, cursor.offset = cursor.place + 1, 0

    def _samples(self, shard: int, offset: int, wanted: set[str] | None = None) -> Iterator[RawSample]:
        """The samples of a shard from an offset on, with the files that are `wanted` (None: image and label)."""
        path = self.shards[shard]
        if wanted is None:
            wanted = {*self.image_keys, *(key.partition(":")[0] for key in self.label_keys)}
        others: set[str] = set()
        found = False
        for raw in read_samples(path, shard, offset, wanted):
            if any(key in raw.endings for key in self.image_keys):
                found = True
                yield raw
            others |= raw.endings
        if not found and offset == 0:
            raise DataError(
                f"Expected images in '{path}' (files ending in {', '.join(self.image_keys[:4])}, ...), received "
                f"{'files ending in: ' + ', '.join(sorted(others)) if others else 'no files'}. Pass image_key='...'."
            )

    # -- one sample ----------------------------------------------------------------------------------------

    def _read(self, raw: RawSample) -> tuple[Image.Image, int | None] | None:
        try:
            data = next(raw.files[key] for key in self.image_keys if key in raw.files)
            image = decode_image(data, self.channels, self._where(raw))
            return image, self._as_number(self._given_label(raw), self._where(raw))
        except DataError as error:
            if not self.skip_bad:
                raise
            logger.warning("a sample is left out: %s", error)
            return None

    def _where(self, raw: RawSample) -> str:
        return f"sample '{raw.key}' of shard '{self.shards[raw.shard]}'"

    def _given_label(self, raw: RawSample) -> Any:
        """The label as it is written: a number, a name, or None."""
        for key in self.label_keys:
            ending, _, name = key.partition(":")
            if ending not in raw.files:
                continue
            try:
                text = raw.files[ending].decode("utf-8").strip()
                value = json.loads(text) if ending.endswith("json") else text
            except ValueError as error:
                raise DataError(
                    f"Expected a label in {self._where(raw)}, received a file that is none: {error}."
                ) from error
            if isinstance(value, Mapping):
                names = (name,) if name else LABEL_COLUMNS
                value = next((value[usual] for usual in names if usual in value), None)
                if name and value is None:
                    raise DataError(f"Expected the field '{name}' in {self._where(raw)}, received none in '.{ending}'.")
            if value is not None:
                return value
        return None

    def _as_number(self, label: Any, where: str) -> int | None:
        if label is None or (isinstance(label, int) and label >= 0):
            return label
        if not isinstance(label, str):
            raise DataError(expected(f"a whole number from 0 or a name as the label of {where}", label))
        # Digits may be names: of the classes that letters and digits are.
        if self._numbers is not None and label in self._numbers:
            return self._numbers[label]
        if label.isascii() and label.isdigit():
            return int(label)
        if self._numbers is not None:
            raise DataError(expected(f"one of the {len(self._numbers)} classes as the label of {where}", label))
        raise DataError(
            expected(
                f"the names of the classes to be known, for the label of {where}",
                label,
                "Pass classes=[...] to WebDataset, or call its scan() first.",
            )
        )


class MappedStream(IterableDataset):
    """Any stream of images as ``(tensor, label)``, or the tensor alone where there is no label, with a transform.

    What `ImageDataset` is for data with a length: `transform` is called with a PIL image or a tensor of `channels`
    channels. Its random numbers belong to (seed, epoch, sample): of a `WebDataset` they stay the same whatever the
    order, the workers and the place where a run was resumed; in other streams the place among those of the worker
    stands for the sample. `shuffle` is how many samples to shuffle among, where the stream can do that. Epochs and
    positions go through to the stream; one that has no `state_dict` is read again up to the place.

    >>> stream = MappedStream([(np.zeros((4, 4), dtype=np.uint8), 7)], channels=3)
    >>> [(tuple(image.shape), label) for image, label in stream]
    [((3, 4, 4), 7)]
    """

    def __init__(
        self,
        stream: Iterable[Any],
        transform: Callable[[Any], Any] | None = None,
        *,
        channels: int | None = None,
        seed: int = 0,
        shuffle: int | bool = False,
    ) -> None:
        self.source: Any = _shuffled(stream, _BUFFER if shuffle is True else int(shuffle), seed)
        self.transform = transform
        self.channels = channels
        self.seed = seed
        self.epoch = 0
        self._position = 0
        self._resume_at: int | None = None

    def __iter__(self) -> Iterator[Any]:
        resume_at, self._resume_at = self._resume_at, None
        self._position = resume_at or 0
        worker = get_worker_info()
        return self._mapped(self._numbered(0 if worker is None else worker.id), in_worker=worker is not None)

    def _mapped(self, samples: Iterable[tuple[int, Any]], in_worker: bool) -> Iterator[Any]:
        from trainformer.data.image import split_sample  # which loads shards with this module

        for number, sample in samples:
            self._position += 1
            image, label = split_sample(sample)
            image = with_channels(image, self.channels)
            if self.transform is not None:
                # A worker process has its generators to itself; the main process shares them with the model's dropout.
                with nullcontext() if in_worker else preserved_generators():
                    seed_generators(sample_key(self.seed, self.epoch, number))
                    image = self.transform(image)
            tensor = image_tensor(image)
            yield tensor if label is None else (tensor, label)

    def __len__(self) -> int:
        return len(self.source)  # a TypeError where the stream has no length

    @property
    def classes(self) -> list[str]:
        """Names of the classes, as the stream has them."""
        names = targets_of(self.source).names
        if names is None:  # hasattr() is how everybody asks
            raise AttributeError(f"{type(self.source).__name__} does not say its classes")
        return names

    @property
    def num_classes(self) -> int | None:
        """Number of classes, as the stream says it."""
        return targets_of(self.source).num_classes

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, to the stream as well."""
        if epoch != self.epoch:
            self.epoch, self._position, self._resume_at = epoch, 0, None
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Take the seed of the run, for the order and for the transforms."""
        self.seed = seed
        if isinstance(self.source, WebDataset):
            self.source.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration in this process is."""
        source = self.source.state_dict() if hasattr(self.source, "state_dict") else None
        return {"epoch": self.epoch, "position": self._position, "source": source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there: the next iteration gives the rest of that epoch."""
        self.epoch, self._position = state["epoch"], state["position"]
        self._resume_at = self._position
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        if state["source"] is not None:
            self.source.load_state_dict(state["source"])

    def _numbered(self, worker: int) -> Iterable[tuple[int, Any]]:
        if hasattr(self.source, "numbered"):
            return self.source.numbered()
        start = self._position
        first = 0 if hasattr(self.source, "state_dict") else start  # of what the stream will give
        return enumerate(islice(iter(self.source), first, None), (worker << 40) + start)


def _shuffled(stream: Any, size: int, seed: int) -> Any:
    if size and hasattr(stream, "shuffled"):
        return stream.shuffled(size, seed)
    if size and hasattr(stream, "shuffle"):  # HF datasets
        return stream.shuffle(seed=seed, buffer_size=size)
    return stream
