"""A mixture with streams: sources that can only be read forwards, each pass after pass, with one saved position.

All ranks read all samples and take their part of each batch, so the order does not depend on their number. Sources with
a length may be among them. Nothing is read ahead: the position is that of the last sample that was yielded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.hub import has_state
from trainformer.data.labels import HF_STREAM, STREAM, is_instance_of, is_stream, targets_of
from trainformer.data.mixture.dataset import form_of, same_forms
from trainformer.data.mixture.order import MixtureSampler, draw_sources, pass_samples
from trainformer.data.mixture.weights import Weights, make_weights
from trainformer.data.order import preserved_generators, sample_key, seed_generators
from trainformer.data.sharding import is_sharded, unsharded

if TYPE_CHECKING:
    from trainformer.data.mixture.mixture import Mixture

logger = logging.getLogger("trainformer")

_BLOCK = 1024  # positions whose sources are drawn together, in an epoch of unknown length
_END = object()


class MixtureStream:
    """A stream of (number of the source, sample) from sources of which at least one is a stream.

    With sources of known sizes an epoch has the length that a mixture of datasets has. With others it lasts until all
    sources have ended (``"longest"``), or the first has (``"shortest"``). A source that ends starts its next pass, and
    gets `set_epoch` with the number of the pass, by which it may shuffle. The next epoch continues where this one
    ended.
    """

    in_memory = True  # read in this process

    def __init__(self, mixture: Mixture, sources: Mapping[str, Any]) -> None:
        self.mixture = mixture
        self.names = tuple(sources)
        self.sources = list(sources.values())
        streams = [id(source) for source in self.sources if is_stream(source)]
        if len(set(streams)) < len(streams):
            do = "Open it once for each of them."
            raise BadArgument(expected("sources that can be read independently", "one stream under two names", do))
        if (torch := sys.modules.get("torch.utils.data")) is not None:
            torch.IterableDataset.register(type(self))  # a DataLoader checks the class
        self.epoch = 0
        self._readers: list[_Reader] = []
        self._started: int | None = None  # the epoch that the position belongs to
        self._position = self._steps_before = 0
        self._ended = [False] * len(self.names)
        self._begin: list[dict[str, Any]] = []  # the states of the sources at the start of the epoch
        self._resumed = False
        self._drawn: tuple[tuple[int, int, int], np.ndarray] | None = None
        self._forms: dict[str, Any] = {}

    # -- set-up --------------------------------------------------------------------------------------------

    def prepared(self, prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> MixtureStream:
        """The same mixture with other forms of its sources, such as tokenised ones."""
        return MixtureStream(self.mixture, prepare(dict(zip(self.names, self.sources, strict=True))))

    def begin(
        self,
        seed: int,
        step_size: int,
        *,
        shapes: bool,
        multiple_of: int = 1,
        shuffle: bool = True,
        skip_bad: bool = False,
    ) -> None:
        """Set the seed, and the number of samples of an optimizer step. `shapes`: nothing pads samples to one shape.

        `skip_bad` skips unreadable samples of datasets; streams decide that themselves.
        """
        self._seed, self._step_size, self._shapes = seed, step_size, shapes
        for number, source in enumerate(self.sources):
            if not is_stream(source):
                source = DatasetPasses(source, seed, number, shuffle, skip_bad)
            elif is_sharded(source := unsharded(source)):
                do = "Leave out split_dataset_by_node: the ranks share every batch."
                raise BadArgument(expected(f"the whole data as {self.names[number]!r}", "a part for each rank", do))
            if hasattr(source, "reseed"):
                source.reseed(seed)
            self._readers.append(_Reader(self.names[number], source))
        sizes = [_size(reader.source) for reader in self._readers]
        mixture = self.mixture
        self.weights: Weights = make_weights(mixture.weights, self.names, sizes, mixture.temperature)
        self._sizes = sizes
        self._length, self._rule = self._epoch_length(multiple_of)

    def _epoch_length(self, multiple_of: int) -> tuple[int | None, str]:
        """The number of samples of an epoch, if it is known, and what ends it otherwise."""
        rule = self.mixture.epoch or ("longest" if self.weights.is_constant else "total")
        known = [size for size in self._sizes if size is not None]
        if isinstance(rule, int) or len(known) == len(self._sizes):
            options: Any = {"mix": self.mixture.mix, "step_size": self._step_size, "multiple_of": multiple_of}
            return len(MixtureSampler([size or 1 for size in self._sizes], self.weights, epoch=rule, **options)), ""
        if rule == "total" or not self.weights.is_constant:
            unknown = [name for name, size in zip(self.names, self._sizes, strict=True) if size is None]
            do = "Pass epoch= to the Mixture, such as epoch=100_000."
            what = f"epoch to be a number of samples, since the size of {', '.join(map(repr, unknown))} is unknown"
            raise BadArgument(expected(what, rule, do))
        return None, rule

    def __len__(self) -> int:
        if getattr(self, "_length", None) is None:
            raise TypeError("the number of samples of an epoch is unknown")
        return self._length  # type: ignore[return-value]

    @property
    def classes(self) -> list[str]:
        """Class names, if the sources know them."""
        names = next((found for source in self.sources if (found := targets_of(source).names) is not None), None)
        if names is None:  # so that hasattr() works
            raise AttributeError("the sources have no class names")
        return names

    @property
    def num_classes(self) -> int | None:
        """Number of classes, if all sources know it."""
        found = [targets_of(source).num_classes for source in self.sources]
        return None if None in found else max(found)  # type: ignore[type-var]

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of an input, if a source knows it."""
        shapes = (getattr(source, "input_shape", None) for source in self.sources)
        return next((shape for shape in shapes if shape is not None), None)

    # -- reading -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self._resumed:
            self._resumed = False
        elif self._started == self.epoch:  # this epoch from its start
            self._restore(self._begin)
            self._position, self._ended = 0, [False] * len(self.names)
        else:
            self._steps_before += -(-self._position // self._step_size)
            self._begin = [reader.state_dict() for reader in self._readers]
            self._position, self._ended, self._started = 0, [False] * len(self.names), self.epoch
        return self._samples()

    def _samples(self) -> Iterator[tuple[int, Any]]:
        while self._length is None or self._position < self._length:
            number = self._source_at(self._position)
            sample = self._readers[number].read()
            if sample is _END:
                self._ended[number] = True
                used = [ended for ended, weight in zip(self._ended, self.weights.first(), strict=True) if weight > 0]
                if self._rule == "shortest" or (self._rule == "longest" and all(used)):
                    return
                sample = self._readers[number].read()
            name = self.names[number]
            if name not in self._forms:
                self._forms[name] = form_of(sample, self._shapes)
                same_forms(self._forms)
            self._position += 1
            yield number, sample

    def _source_at(self, position: int) -> int:
        """The number of the source at a position of the epoch."""
        size = self._length or -(-_BLOCK // self._step_size) * self._step_size
        block, place = divmod(position, size)
        key = self.epoch, block, self._steps_before
        if self._drawn is None or self._drawn[0] != key:
            first_step = self._steps_before + block * size // self._step_size
            options: Any = {"first_step": first_step, "step_size": self._step_size, "mix": self.mixture.mix}
            drawn = draw_sources(self.weights, size, seed=self._seed, epoch=self.epoch, block=block, **options)
            self._drawn = key, drawn
        return int(self._drawn[1][place])

    def progress(self, epoch: int, position: int) -> tuple[Sequence[float | None], np.ndarray | None]:
        """Passes over each source, and the weights if they change, as far as the stream was read."""
        passes = [reader.passes + (reader.drawn / size if size else 0.0) for reader, size in zip(
            self._readers, self._sizes, strict=True)]  # fmt: skip
        if self.weights.is_constant:
            return passes, None
        step = self._steps_before + self._position // self._step_size
        return passes, self.weights.at(np.asarray([step]))[0]

    # -- position ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which continues where the last one ended."""
        if epoch != self.epoch:
            self.epoch, self._resumed = epoch, False

    def state_dict(self) -> dict[str, Any]:
        """The position in all sources, and that at the start of the epoch."""
        return {
            "names": list(self.names),
            "epoch": self.epoch if self._started is None else self._started,
            "position": self._position,
            "steps_before": self._steps_before,
            "ended": list(self._ended),
            "begin": self._begin,
            "sources": [reader.state_dict() for reader in self._readers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there: the next iteration yields the rest of that epoch."""
        if list(state["names"]) != list(self.names):
            raise DataError(expected(f"the sources {state['names']} that the position was saved for", list(self.names)))
        self._restore(state["sources"])
        self.epoch, self._started = state["epoch"], state["epoch"] if state["begin"] else None
        self._position, self._steps_before = state["position"], state["steps_before"]
        self._ended, self._begin = list(state["ended"]), state["begin"]
        self._resumed = self._started is not None

    def _restore(self, states: Sequence[dict[str, Any]]) -> None:
        for reader, state in zip(self._readers, states, strict=True):
            reader.load_state_dict(state)


class _Reader:
    """One source, read pass after pass. Resumes by the source's own state, or by reading the pass again."""

    def __init__(self, name: str, source: Any) -> None:
        self.name = name
        self.source = source
        self.passes = self.drawn = 0  # whole passes, and samples of the current one
        self._iterator: Iterator[Any] | None = None
        self._saved: Any = None

    def read(self) -> Any:
        """The next sample; `_END` at the end of a pass, after which the next one starts."""
        if self._iterator is None:
            self._iterator = self._open()
        for sample in self._iterator:
            self.drawn += 1
            return sample
        if self.drawn == 0:
            raise DataError(f"Expected at least one sample in the source {self.name!r} of the mixture, received none.")
        self.passes, self.drawn, self._iterator, self._saved = self.passes + 1, 0, None, None
        return _END

    def _open(self) -> Iterator[Any]:
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.passes)
        if self._saved is not None:
            self.source.load_state_dict(self._saved)
            self._saved = None
            return iter(self.source)
        samples = iter(self.source)
        return islice(samples, self.drawn, None) if self.drawn else samples

    def state_dict(self) -> dict[str, Any]:
        state = self._saved
        if self._iterator is not None and has_state(self.source):
            state = self.source.state_dict()
        return {"passes": self.passes, "drawn": self.drawn, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.passes, self.drawn, self._saved = state["passes"], state["drawn"], state["state"]
        self._iterator = None


class DatasetPasses:
    """A dataset with a length as a stream, each pass in a new order; random numbers depend on (seed, pass, sample).

    >>> stream = DatasetPasses(["a", "b", "c"], seed=0, number=0)
    >>> sorted(stream)
    ['a', 'b', 'c']
    """

    def __init__(self, dataset: Any, seed: int, number: int, shuffle: bool = True, skip_bad: bool = False) -> None:
        self.dataset = dataset
        self.seed, self.number, self.shuffle, self.skip_bad = seed, number, shuffle, skip_bad
        self.epoch = self._position = 0
        self._restored = False

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._position, self._restored = self._position if self._restored else 0, False
        return self._samples()

    def _samples(self) -> Iterator[Any]:
        size = len(self.dataset)
        order = pass_samples(size, self.seed, self.number, self.epoch * size, size, self.shuffle)
        while self._position < size:
            index = int(order[self._position])
            self._position += 1
            with preserved_generators():
                seed_generators(sample_key(sample_key(self.seed, self.number, 0), self.epoch, index))
                try:
                    sample = self.dataset[index]
                except Exception as error:
                    if not self.skip_bad:
                        error.add_note(f"(while reading sample {index} of {type(self.dataset).__name__})")
                        raise
                    logger.warning(
                        "sample %d cannot be read and is skipped: %s: %s", index, type(error).__name__, error
                    )
                    continue
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position, self._restored = state["position"], True


def _size(source: Any) -> int | None:
    """The number of samples of a pass, if it is known."""
    if not (isinstance(source, DatasetPasses) or is_instance_of(source, STREAM) or is_instance_of(source, HF_STREAM)):
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
