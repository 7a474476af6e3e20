"""Images streamed from tar shards (the WebDataset layout), and transforms for any stream of images.

The order is a pure function of (seed, epoch) and of the number of ranks and workers. The position can be saved, and
resuming does not read what came before. `MappedStream` is to streams what `ImageDataset` is to datasets with a length.
"""

from __future__ import annotations

import copy
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
from trainformer.data.hub import has_state
from trainformer.data.labels import targets_of
from trainformer.data.lists import LABEL_COLUMNS
from trainformer.data.order import epoch_order, preserved_generators, sample_key, seed_generators
from trainformer.data.pixels import image_tensor, with_channels
from trainformer.data.tar_shards import RawSample, find_shards, read_samples, sample_id
from trainformer.utils.distributed import rank as this_rank
from trainformer.utils.distributed import world_size
from trainformer.utils.files import decode_json

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("trainformer")

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
LABEL_KEYS = ("cls", "label", "json")
_MAX_LABEL = 2**63 - 1  # of the integers of torch
_BUFFER = 1000  # size of the shuffle buffer in samples: about 100 MB of encoded photos per worker


@dataclass
class _Cursor:
    """The position of an iteration: samples drawn, the current shard and offset in it, and the shuffle buffer."""

    split: tuple[int, int, int, int]
    place: int = 0
    offset: int = 0
    drawn: int = 0
    buffer: list[RawSample] = field(default_factory=list)


class WebDataset(IterableDataset):
    """Images and labels streamed from tar files: ``(PIL image, label)``; the label may be None.

    `urls` is a path, a pattern (`"train-{000..012}.tar"`, `"train-*.tar"`), a folder of tar files, or a list of these.
    Consecutive files with the same name up to the first dot are one sample: `0001.jpg` with `0001.cls`. The label is an
    integer, or one of `classes`; in a JSON file it is the whole content or a field with a common name
    (`"json:species"` names another field).

    `shuffle` is the size of the shuffle buffer (True: 1000), with the shards in random order; 1 shuffles only the
    shards. Ranks and workers split the shards between them, so use a multiple of their number, of equal sizes.
    `skip_bad` skips unreadable samples with a warning; otherwise they are an error.

    A stream knows its length and classes only from arguments (`length`, `classes`, `num_classes`) or after `scan`.
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
        self._class_indices = None if classes is None else {name: number for number, name in enumerate(classes)}
        self.num_replicas, self.rank = num_replicas, rank
        self._cursor: _Cursor | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def classes(self) -> list[str]:
        """Class names, if they are known."""
        if self._class_indices is None:  # so that hasattr() works
            raise AttributeError("the class names are unknown: pass `classes`, or call scan()")
        return list(self._class_indices)

    def __len__(self) -> int:
        """Samples per epoch on this rank, if `length` is known; assumes shards of equal size for several ranks."""
        if self.length is None:
            raise TypeError("the length of the stream is unknown: pass `length`, or call scan()")
        return -(-self.length // self._split()[0])

    def __getstate__(self) -> dict[str, Any]:
        # Spawned worker processes know nothing about ranks.
        ranks, rank, _, _ = self._split()
        return self.__dict__ | {"num_replicas": ranks, "rank": rank, "_cursor": None}

    # -- reading -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[Image.Image, int | None]]:
        return (sample for _, sample in self.with_ids())

    def with_ids(self) -> Iterator[tuple[int, tuple[Image.Image, int | None]]]:
        """Samples with an id each, which depends on the sample alone and seeds its random numbers."""
        # Not at the first `next`: state_dict() refers to this iteration from now on.
        self._cursor = self._start()
        self._restored = None
        return self._with_ids(self._cursor)

    def _with_ids(self, cursor: _Cursor) -> Iterator[tuple[int, tuple[Image.Image, int | None]]]:
        for raw in self._drawn(cursor):
            sample = self._read(raw)
            if sample is not None:
                yield sample_id(self.shards[raw.shard], raw.key), sample

    def first(self) -> tuple[Image.Image, int | None]:
        """The first sample of the first shard, independent of order and position."""
        for sample in map(self._read, self._samples(0, 0)):
            if sample is not None:
                return sample
        raise DataError(f"Expected at least one image in '{self.shards[0]}', received none.")

    def scan(self) -> Self:
        """Count samples and classes by reading all headers and labels, and one image for its shape.

        Takes about 100 s for a million samples on a local disk; compressed shards are decompressed completely.
        """
        labels = [label for shard in range(len(self.shards)) for label in self._labels_in(shard)]
        self.length = len(labels)
        names = {label for label in labels if isinstance(label, str)}
        if self._class_indices is None and not all(name.isdigit() for name in names):
            self._class_indices = {name: number for number, name in enumerate(sorted(names))}
        indices = [self._class_index(label, "a shard") for label in labels]
        known = np.asarray([index for index in indices if index is not None], dtype=np.int64)
        if self._class_indices is not None:
            self.num_classes = len(self._class_indices)
        elif len(known) and self.num_classes is None:
            self.num_classes = int(known.max()) + 1
        if len(known) == len(labels) and len(known):
            self.class_counts = np.bincount(known, minlength=self.num_classes or 0).tolist()
        image, _ = self.first()
        self.input_shape = (len(image.getbands()), image.height, image.width)
        return self

    def _labels_in(self, shard: int) -> Iterator[Any]:
        """The labels of a shard, as they are stored."""
        for raw in self._samples(shard, 0, {key.partition(":")[0] for key in self.label_keys}):
            try:
                label = self._stored_label(raw)
                if self._class_indices is not None or not isinstance(label, str):
                    self._class_index(label, self._where(raw))
                yield label
            except DataError:
                if not self.skip_bad:
                    raise

    def remap_classes(self, classes: Sequence[str]) -> WebDataset:
        """A copy with labels that index another list of classes."""
        other = self.shuffled(self.shuffle)
        other._class_indices = {name: number for number, name in enumerate(classes)}
        other.num_classes, other.class_counts = len(classes), None
        if self.class_counts is not None:
            counts = dict(zip(self.classes, self.class_counts, strict=True))
            other.class_counts = [counts.get(name, 0) for name in classes]
        return other

    def shuffled(self, shuffle: int | bool = True, seed: int | None = None) -> WebDataset:
        """A copy in random order."""
        other = copy.copy(self)
        other.shuffle = _BUFFER if shuffle is True else int(shuffle)
        other.seed = self.seed if seed is None else seed
        other.num_replicas, other.rank = self.num_replicas, self.rank  # the rank may still be unknown
        return other

    # -- position ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A restored position is dropped if it belongs to another epoch."""
        if epoch != self.epoch:
            self.epoch, self._cursor, self._restored = epoch, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the current iteration in this process, with the offsets of the samples in its buffer."""
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
        """Resume there: the next iteration yields the rest of that epoch."""
        if state["shards"] != len(self.shards):
            raise DataError(expected(f"the {state['shards']} shards that the position was saved for", len(self.shards)))
        self.epoch, self._restored, self._cursor = state["epoch"], state, None

    def _start(self) -> _Cursor:
        split, state = self._split(), self._restored
        if state is None:
            return _Cursor(split)
        if tuple(state["split"]) != split:
            what = "the (ranks, rank, workers, worker) that the position in the stream was saved with, "
            do = "Resume with as many ranks and workers, or restart the epoch."
            raise DataError(expected(f"{what}{tuple(state['split'])}", split, do))
        found: dict[tuple[int, int], RawSample] = {}
        for shard, offset in sorted(state["buffer"]):  # in order: compressed shards can only be read forwards
            raw = next(self._samples(shard, offset), None)
            if raw is None or raw.offset != offset:
                raise DataError(f"Expected shard '{self.shards[shard]}' as it was, received one that has changed.")
            found[shard, offset] = raw
        buffer = [found[shard, offset] for shard, offset in state["buffer"]]
        return _Cursor(split, state["place"], state["offset"], state["drawn"], buffer)

    def _split(self) -> tuple[int, int, int, int]:
        worker = get_worker_info()
        return (
            world_size() if self.num_replicas is None else self.num_replicas,
            this_rank() if self.rank is None else self.rank,
            1 if worker is None else worker.num_workers,
            0 if worker is None else worker.id,
        )

    # -- order ---------------------------------------------------------------------------------------------

    def _drawn(self, cursor: _Cursor) -> Iterator[RawSample]:
        """The samples in the order of this epoch. The cursor is past a sample before it is yielded."""
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
        """A random position in the buffer. The n-th draw is a function of n, so no generator state has to be saved."""
        _, rank, workers, worker = cursor.split
        cursor.drawn += 1
        key = sample_key(sample_key(self.seed, 0, self.epoch), 0, rank * workers + worker)
        return sample_key(key, 0, cursor.drawn) % len(cursor.buffer)

    def _in_sequence(self, cursor: _Cursor) -> Iterator[RawSample]:
        """The samples of the shards this worker of this rank reads."""
        ranks, rank, workers, worker = cursor.split
        if len(self.shards) < ranks:
            what = f"at least {ranks} shards for {ranks} ranks"
            raise DataError(expected(what, len(self.shards), "Write the data into more tar files."))
        order = epoch_order(len(self.shards), self.seed, self.epoch, shuffle=self.shuffle > 0)
        mine = order[rank::ranks][worker::workers].tolist()
        while cursor.place < len(mine):
            for raw in self._samples(mine[cursor.place], cursor.offset):
                cursor.offset = raw.end
                yield raw
            cursor.place, cursor.offset = cursor.place + 1, 0

    def _samples(self, shard: int, offset: int, wanted: set[str] | None = None) -> Iterator[RawSample]:
        """The samples of a shard from an offset on, with the `wanted` files (None: image and label)."""
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

    def _read(self, raw: RawSample) -> Any:
        try:
            data = next(raw.files[key] for key in self.image_keys if key in raw.files)
            return self._item(decode_image(data, self.channels, self._where(raw)), raw)
        except DataError as error:
            if not self.skip_bad:
                raise
            logger.warning("skipping a sample: %s", error)
            return None

    def _item(self, image: Image.Image, raw: RawSample) -> Any:
        return image, self._class_index(self._stored_label(raw), self._where(raw))

    def _where(self, raw: RawSample) -> str:
        return f"sample '{raw.key}' of shard '{self.shards[raw.shard]}'"

    def _stored_label(self, raw: RawSample) -> Any:
        """The label as it is stored: an integer, a name, or None."""
        for key in self.label_keys:
            ending, _, name = key.partition(":")
            if ending not in raw.files:
                continue
            try:
                text = raw.files[ending].decode("utf-8").strip()
                value = decode_json(text) if ending.endswith("json") else text
            except ValueError as error:
                raise DataError(
                    f"Expected a label in {self._where(raw)}, received an unreadable file: {error}."
                ) from error
            if isinstance(value, Mapping):
                names = (name,) if name else LABEL_COLUMNS
                value = next((value[key] for key in names if key in value), None)
                if name and value is None:
                    raise DataError(f"Expected the field '{name}' in {self._where(raw)}, received none in '.{ending}'.")
            if value is not None:
                return value
        return None

    def _class_index(self, label: Any, where: str) -> int | None:
        if label is None or (isinstance(label, int) and 0 <= label <= _MAX_LABEL):
            return label
        if not isinstance(label, str):
            raise DataError(expected(f"an integer from 0 or a name as the label of {where}", label))
        # Digits may be class names, as in a dataset of letters and digits.
        if self._class_indices is not None and label in self._class_indices:
            return self._class_indices[label]
        if label.isascii() and label.isdigit() and len(label) < len(str(_MAX_LABEL)):
            return int(label)
        if self._class_indices is not None:
            raise DataError(expected(f"one of the {len(self._class_indices)} classes as the label of {where}", label))
        what = f"known class names, for the label of {where}"
        raise DataError(expected(what, label, "Pass classes=[...] to WebDataset, or call its scan() first."))


class MappedStream(IterableDataset):
    """Any stream of images as ``(tensor, label)``, or the tensor alone if there is no label, with a transform.

    `transform` is called with a PIL image or a tensor with `channels` channels. Its random numbers depend on (seed,
    epoch, sample): for a `WebDataset` neither order, workers nor resuming change them; for other streams the position
    in the worker stands for the sample. `shuffle` is the size of the shuffle buffer, if the stream has one. Epoch and
    position are passed to the stream; one without `state_dict` is read again up to the position.

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
        size = _BUFFER if shuffle is True else int(shuffle)
        self.source: Any = stream
        if size and hasattr(stream, "shuffled"):
            self.source = stream.shuffled(size, seed)
        elif size and hasattr(stream, "shuffle"):  # HF datasets
            self.source = stream.shuffle(seed=seed, buffer_size=size)
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
        if hasattr(self.source, "with_ids"):
            return self._mapped(self.source.with_ids(), in_worker=worker is not None)
        first = 0 if has_state(self.source) else self._position  # without a state it starts from the beginning
        number = (0 if worker is None else worker.id << 40) + self._position
        samples = enumerate(islice(iter(self.source), first, None), number)
        return self._mapped(samples, in_worker=worker is not None)

    def _mapped(self, samples: Iterable[tuple[int, Any]], in_worker: bool) -> Iterator[Any]:
        from trainformer.data.image import split_sample  # which imports this module

        for number, sample in samples:
            self._position += 1
            image, label = split_sample(sample)
            image = with_channels(image, self.channels)
            if self.transform is not None:
                # A worker process owns its generators; the main process shares them with the model's dropout.
                with nullcontext() if in_worker else preserved_generators():
                    seed_generators(sample_key(self.seed, self.epoch, number))
                    image = self.transform(image)
            tensor = image_tensor(image)
            yield tensor if label is None else (tensor, label)

    def __len__(self) -> int:
        return len(self.source)  # TypeError if the stream has no length

    @property
    def classes(self) -> list[str]:
        """Class names of the stream."""
        names = targets_of(self.source).names
        if names is None:  # so that hasattr() works
            raise AttributeError(f"{type(self.source).__name__} has no class names")
        return names

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the stream."""
        return targets_of(self.source).num_classes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, of the stream as well."""
        if epoch != self.epoch:
            self.epoch, self._position, self._resume_at = epoch, 0, None
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """Use the seed of the run, for the order and the transforms."""
        self.seed = seed
        if isinstance(self.source, WebDataset):
            self.source.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """The position of the current iteration in this process."""
        source = self.source.state_dict() if has_state(self.source) else None
        return {"epoch": self.epoch, "position": self._position, "source": source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there: the next iteration yields the rest of that epoch."""
        self.set_epoch(state["epoch"])
        self._position = self._resume_at = state["position"]
        if state["source"] is not None:
            self.source.load_state_dict(state["source"])
