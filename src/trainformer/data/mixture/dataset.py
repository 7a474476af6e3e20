"""A mixture of datasets with a length: their concatenation, and the source of batches that says which is which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.core.types import DataSource, HostBatch, SampleSources
from trainformer.data.dataset import Concatenation, is_array
from trainformer.data.fetcher import is_in_memory
from trainformer.data.labels import targets_of
from trainformer.data.mixture.order import MixtureSampler
from trainformer.data.mixture.weights import make_weights
from trainformer.data.order import preserved_generators
from trainformer.data.source import WrappedSource

if TYPE_CHECKING:
    from trainformer.data.mixture.mixture import Mixture

#: The column of a NumPy batch with the number of each row's source.
SOURCE = "_source"


class TaggedBatch(NamedTuple):
    """A batch whose samples come from several sources, with the number of the source of each."""

    sources: np.ndarray
    data: Any


class MixtureDataset(Concatenation):
    """The sources of a mixture, one after the other. `sampler` draws from them."""

    def __init__(self, mixture: Mixture, sources: Mapping[str, Any]) -> None:
        super().__init__(list(sources.values()))
        self.mixture = mixture
        self.names = tuple(sources)

    def prepared(self, prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> MixtureDataset:
        """The same mixture with other forms of its sources, such as tokenised ones."""
        return MixtureDataset(self.mixture, prepare(dict(zip(self.names, self.datasets, strict=True))))

    def sampler(self, *, step_size: int, multiple_of: int = 1, shuffle: bool = True) -> MixtureSampler:
        """What an epoch draws, for optimizer steps of `step_size` samples."""
        mixture, sizes = self.mixture, [len(dataset) for dataset in self.datasets]
        weights = make_weights(mixture.weights, self.names, sizes, mixture.temperature)
        epoch = mixture.epoch or ("longest" if weights.is_constant else "total")
        options: Any = {"step_size": step_size, "multiple_of": multiple_of, "shuffle": shuffle}
        return MixtureSampler(sizes, weights, epoch=epoch, mix=mixture.mix, **options)

    def tagged(self) -> TaggedSamples:
        """Samples with the number of their source."""
        return TaggedSamples(self.datasets, self.names)

    def check_forms(self, shapes: bool) -> None:
        """Raise if the samples of two sources could not be in one batch; `shapes`: nothing pads them to one shape."""
        forms = {}
        for name, dataset in zip(self.names, self.datasets, strict=True):
            with preserved_generators(), suppress(Exception):  # a sample that cannot be read is reported when it is due
                forms[name] = form_of(dataset[0], shapes)
        same_forms(forms)


class TaggedSamples(Concatenation):
    """Samples of several sources as (number of the source, sample): what worker processes get of a mixture."""

    def __init__(self, datasets: Sequence[Any], names: Sequence[str]) -> None:
        super().__init__(datasets)
        self.names = tuple(names)

    @property
    def in_memory(self) -> bool:
        """Whether worker processes would not pay off."""
        return all(map(is_in_memory, self.datasets))

    def __getitem__(self, index: int) -> tuple[int, Any]:
        source, place = self.locate(index)
        try:
            return source, self.datasets[source][place]
        except Exception as error:
            error.add_note(f"({self.name_of(index)})")
            raise

    def name_of(self, index: int) -> str:
        """What messages call a sample."""
        source, place = self.locate(index)
        return f"sample {place} of the source {self.names[source]!r}"


class TaggedCollate:
    """Collates (source, sample) pairs: a `TaggedBatch`, or a dict with the column `SOURCE`."""

    def __init__(self, collate: Callable[[list[Any]], Any], as_column: bool = False) -> None:
        self.collate = collate
        self.as_column = as_column

    def __call__(self, pairs: Sequence[tuple[int, Any]]) -> Any:
        sources = np.asarray([source for source, _ in pairs], dtype=np.int64)
        data = self.collate([sample for _, sample in pairs])
        return {**data, SOURCE: sources} if self.as_column else TaggedBatch(sources, data)


def plain_integers(sample: Any) -> Any:
    """A sample with Python's integers instead of scalars of torch or NumPy: only one kind can be collated.

    >>> plain_integers((np.zeros(2), np.int64(3)))
    (array([0., 0.]), 3)
    """
    if isinstance(sample, Mapping):
        return {name: plain_integers(value) for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        parts = [plain_integers(value) for value in sample]
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    is_scalar = hasattr(sample, "dtype") and not sample.shape and "int" in str(sample.dtype)
    return int(sample) if is_scalar else sample


class MixtureSource(WrappedSource):
    """Batches of a mixture that know where their samples come from.

    `source` gives batches of `TaggedCollate`. `keeps_column` leaves the numbers of the sources in NumPy batches.
    """

    def __init__(self, source: DataSource, mixture: Mixture, progress: Progress) -> None:
        super().__init__(source)
        self.names = mixture.names
        self.is_single = mixture.is_single
        self.keeps_column = False
        self._progress = progress

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        for made in self.source.batches(epoch, batch, position):
            if isinstance(made.data, TaggedBatch):
                numbers, data = made.data
            else:
                numbers, data = made.data[SOURCE][: max(1, made.size)], made.data
                if not self.keeps_column:
                    data = {name: value for name, value in data.items() if name != SOURCE}
            yield made._replace(data=data, sources=SampleSources(self.names, numbers, self.is_single))

    def metrics_at(self, epoch: int, position: int) -> dict[str, float]:
        """Passes over each source so far, where its size is known, and weights if they change."""
        passes, weights = self._progress(epoch, position)
        found = {f"passes/{name}": value for name, value in zip(self.names, passes, strict=True) if value is not None}
        if weights is not None:
            found |= {f"weight/{name}": float(value) for name, value in zip(self.names, weights, strict=True)}
        return found

    @contextmanager
    def preserved_position(self) -> Iterator[None]:
        """Afterwards the next epoch starts as if nothing had been read. Only streams have a position of their own."""
        source: Any = self.source
        state = source.state_dict() if hasattr(source, "state_dict") else None
        try:
            yield
        finally:
            if state is not None:
                source.load_state_dict(state)

    def drawn_by(self, step: int) -> dict[str, float]:
        """Passes over each source after so many optimizer steps, if that is known in advance."""
        sampler = getattr(self.source, "sampler", None)
        if not isinstance(sampler, MixtureSampler):
            return {}
        epoch, step = divmod(step, -(-len(sampler) // sampler.step_size))
        passes, _ = self._progress(epoch, step * sampler.step_size)
        return {name: value for name, value in zip(self.names, passes, strict=True) if value is not None}


#: Passes over each source, and their weights if these change, at a position of an epoch.
Progress = Callable[[int, int], tuple[Sequence[float | None], np.ndarray | None]]


def sampler_progress(sampler: MixtureSampler, seed: int) -> Progress:
    """The progress of a mixture of datasets."""

    def progress(epoch: int, position: int) -> tuple[Sequence[float | None], np.ndarray | None]:
        passes = (sampler.drawn(epoch, position, seed) / sampler.sizes).tolist()
        if sampler.weights.is_constant:
            return passes, None
        step = epoch * -(-len(sampler) // sampler.step_size) + position // sampler.step_size
        return passes, sampler.weights.at(np.asarray([step]))[0]

    return progress


# -- whether sources fit together --------------------------------------------------------------------------


def form_of(sample: Any, shapes: bool) -> Any:
    """What samples must share to be in one batch: fields, kinds of values, and with `shapes` their shapes.

    >>> form_of({"x": np.zeros((2, 3), np.float32), "y": 1}, shapes=True)
    {'x': 'float32 (2, 3)', 'y': 'int'}
    >>> form_of(("text", np.zeros(7, np.uint8)), shapes=False)
    ['str', 'uint8, 1 dimension']
    """
    if isinstance(sample, Mapping):
        return {str(name): form_of(value, shapes) for name, value in sample.items()}
    if is_array(sample):
        dtype, sides = str(sample.dtype).removeprefix("torch."), len(sample.shape)
        return f"{dtype} {tuple(sample.shape)}" if shapes else f"{dtype}, {sides} dimension{'s' * (sides != 1)}"
    if isinstance(sample, tuple) or (isinstance(sample, list) and any(map(is_array, sample))):
        return [form_of(value, shapes) for value in sample]
    if hasattr(sample, "dtype"):  # a scalar of NumPy or torch
        return str(sample.dtype).removeprefix("torch.") if "float" in str(sample.dtype) else "int"
    if isinstance(sample, bool | int):
        return "int"
    return type(sample).__name__


def same_forms(forms: Mapping[str, Any]) -> None:
    """Raise if two sources have samples of another form."""
    names = list(forms)
    for name in names[1:]:
        if forms[name] != forms[names[0]]:
            do = "Convert one of them, so that samples of both can be in one batch."
            what = f"samples of one form in all sources ({forms[names[0]]} in {names[0]!r})"
            raise DataError(f"{expected(what, forms[name])[:-1]} in {name!r}. {do}")


def agree_on_classes(sources: Mapping[str, Any]) -> dict[str, Any]:
    """The sources with one numbering of their classes: that of the source which has all of them."""
    named = {name: found for name, data in sources.items() if (found := targets_of(data).names) is not None}
    if not named or all(classes == next(iter(named.values())) for classes in named.values()):
        return dict(sources)
    everything = max(named.values(), key=len)
    agreed = dict(sources)
    for name, classes in named.items():
        unknown = [each for each in classes if each not in everything]
        same = classes == everything[: len(classes)]
        if unknown or (not same and not hasattr(sources[name], "remap_classes")):
            listed = "; ".join(f"{each!r} has {_some(found)}" for each, found in named.items())
            do = "A label would mean different classes. Give all sources one list of classes, in one order."
            raise DataError(f"Expected sources with the same classes, received others: {listed}. {do}")
        if classes != everything and hasattr(sources[name], "remap_classes"):
            agreed[name] = sources[name].remap_classes(everything)
    return agreed


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
