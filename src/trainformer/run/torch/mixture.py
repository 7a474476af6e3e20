"""Mixtures in torch runs: their sources loaded and prepared by the task, and batches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import DataSource
from trainformer.data.loader import DatasetSource, stream_source
from trainformer.data.mixture.dataset import MixtureDataset, MixtureSource, TaggedCollate, sampler_progress
from trainformer.data.mixture.mixture import Mixture, naming
from trainformer.data.mixture.stream import MixtureStream
from trainformer.run.torch.data_checks import check_kind
from trainformer.tasks.base import provides

if TYPE_CHECKING:
    from trainformer.run.torch.data import LoadOptions


def as_training_data(data: Any) -> Any:
    """A mixture from a mapping of a config; several datasets without weights are refused."""
    data = Mixture.from_mapping(data)
    if type(data) is dict:
        check_kind(data)  # columns in a dict
        names = ", ".join(map(repr, list(data)[:4]))
        do = "To train on several of them, pass Mixture({...}), with weights or without."
        raise BadArgument(expected("one dataset to train on", f"a dict with {names}", do))
    return data


def load_mixture(
    mixture: Mixture, load: Callable[[Any], Any], is_loader: Callable[[Any], bool]
) -> MixtureDataset | MixtureStream:
    """The data of a mixture, whose sources must be samples."""

    def load_source(data: Any) -> Any:
        loaded = load(data)
        if is_loader(loaded):
            do = "Pass a Dataset, or an IterableDataset for a stream of samples."
            raise BadArgument(expected("samples", f"a {type(loaded).__name__}, which yields batches", do))
        return loaded

    return mixture.load(load_source)


def mixture_source(
    task: Any, data: MixtureDataset | MixtureStream, options: LoadOptions, train: bool, collate: Any
) -> DataSource:
    """Batches of a mixture for training; for evaluation, the samples of all sources one after the other."""

    def prepare(sources: Mapping[str, Any]) -> Mapping[str, Any]:
        if not provides(task, "prepare_dataset"):
            return sources
        if train and provides(task, "prepare_sources"):
            of_task: Mapping[str, Any] = task.prepare_sources(sources)
            return of_task
        prepared = {}
        for name, source in sources.items():
            with naming(name):
                prepared[name] = task.prepare_dataset(source, train=train)
        return prepared

    data = data.prepared(prepare)
    if isinstance(data, MixtureStream):
        if not train:
            raise BadArgument("Expected a dataset to evaluate, received a mixture of streams. Pass one of its sources.")
        return _stream_source(data, options, collate)
    data.check_forms(shapes=collate is None)
    if not train:
        return DatasetSource(data, options.batch_size, collate=collate, **options.reading())
    size = options.batch_size
    sampler = data.sampler(step_size=size * options.accumulation, multiple_of=size if options.drop_last else 1)
    tagged = None if collate is None else TaggedCollate(collate)
    given: Any = {"sampler": sampler, "drop_last": options.drop_last, "collate": tagged}
    source = DatasetSource(data.tagged(), size, **given, **options.reading())
    return MixtureSource(source, data.mixture, sampler_progress(sampler, options.seed))


def _stream_source(data: MixtureStream, options: LoadOptions, collate: Any) -> DataSource:
    if options.num_workers:
        do = "Leave num_workers out: the order of a mixture must not depend on them."
        raise BadArgument(expected("num_workers=0 for a mixture with streams", options.num_workers, do))
    size, drop_last = options.batch_size, options.drop_last
    step_size, multiple = size * options.accumulation, size if drop_last else 1
    data.begin(options.seed, step_size, shapes=collate is None, multiple_of=multiple, skip_bad=options.skip_bad)
    given: Any = {"collate": None if collate is None else TaggedCollate(collate), "drop_last": drop_last}
    stream: Any = data
    source = stream_source(stream, size, seed=options.seed, num_workers=0, shard=options.shard, **given)
    return MixtureSource(source, data.mixture, data.progress)
