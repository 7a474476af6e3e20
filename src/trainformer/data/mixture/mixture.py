"""`Mixture`: what the user passes as training data; loading turns it into a dataset or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, DataError, TrainformerError, check_choice, did_you_mean, expected
from trainformer.data.labels import is_stream, length
from trainformer.data.mixture.dataset import MixtureDataset, agree_on_classes
from trainformer.data.mixture.order import EPOCHS, MIXES
from trainformer.data.mixture.weights import check_weights, describe_weights

if TYPE_CHECKING:
    from trainformer.data.mixture.stream import MixtureStream

_ARGUMENTS = ("sources", "weights", "temperature", "epoch", "mix")
_MOST_SOURCES = 1 << 16  # their numbers are stored in 16 bits


class Mixture:
    """Several sources of training data, drawn from at random by their weights.

    `sources` are anything that can be training data by itself, by name: paths, arrays, datasets, streams. `weights` are

    - a dict with one number per source; they need not add up to 1;
    - None or ``"size"``: proportional to the numbers of samples, or with a `temperature` to
      ``size ** (1 / temperature)``, which favours small sources; ``"equal"``: the same for all;
    - a list of (optimizer step, dict) pairs, between which weights are interpolated linearly;
    - a function of the optimizer step that returns a dict.

    `epoch` is the length of an epoch: a number of samples; ``"longest"``, so many that every source is seen completely
    (smaller sources repeat; the default); ``"shortest"``, so many that no source repeats; ``"total"``, as many as all
    sources have together (the default with weights that change). Each pass over a source is shuffled anew and shows
    each sample once; passes continue from one epoch to the next.

    ``mix="batch"`` fills each optimizer step from one source, instead of choosing the source of each sample.

    >>> mixture = Mixture({"code": ["a", "b"], "web": ["c", "d", "e"]}, weights={"code": 0.4, "web": 0.6})
    >>> mixture
    Mixture(code=0.4, web=0.6)
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Any = None,
        *,
        temperature: float | None = None,
        epoch: str | int | None = None,
        mix: str = "sample",
    ) -> None:
        self.sources = _checked_sources(sources)
        self.names = tuple(self.sources)
        self.weights = check_weights(weights, self.names, temperature)
        self.temperature = temperature
        if epoch is not None and not isinstance(epoch, str):
            if isinstance(epoch, bool) or not isinstance(epoch, Integral) or epoch < 1:
                raise BadArgument(expected(f"epoch to be a number of samples or one of {', '.join(EPOCHS)}", epoch))
            epoch = int(epoch)
        elif epoch is not None:
            check_choice("epoch", epoch, EPOCHS)
        self.epoch = epoch
        check_choice("mix", mix, MIXES)
        self.mix = mix

    @classmethod
    def from_mapping(cls, data: Any) -> Any:
        """A mixture from a config or the command line: a dict with `sources`; any other data unchanged.

        >>> Mixture.from_mapping({"sources": {"a": "a.jsonl", "b": "b.jsonl"}, "weights": "equal"})
        Mixture(a, b, weights='equal')
        """
        if type(data) is not dict or "sources" not in data or not isinstance(data["sources"], Mapping):
            return data
        for name in data:
            if name not in _ARGUMENTS:
                do = did_you_mean(str(name), _ARGUMENTS) or f"They are {', '.join(_ARGUMENTS)}."
                raise BadArgument(expected("the arguments of a mixture", name, do))
        return cls(**data)

    def __repr__(self) -> str:
        if isinstance(self.weights, dict):
            return f"Mixture({', '.join(f'{name}={weight:g}' for name, weight in self.weights.items())})"
        return f"Mixture({', '.join(self.names)}, weights={describe_weights(self.weights)!r})"

    @property
    def is_single(self) -> bool:
        """Whether every batch comes from one source."""
        return self.mix == "batch" or len(self.names) == 1

    def describe(self) -> dict[str, Any]:
        """The arguments besides the data, as JSON."""
        settings = {"weights": describe_weights(self.weights), "temperature": self.temperature}
        return {"sources": list(self.names), **settings, "epoch": self.epoch, "mix": self.mix}

    def load(self, load: Callable[[Any], Any]) -> MixtureDataset | MixtureStream:
        """The data of all sources, which `load` opens one by one; a stream if one of them is."""
        loaded = {}
        for name, data in self.sources.items():
            with naming(name):
                loaded[name] = _checked_data(load(data))
        loaded = agree_on_classes(loaded)
        if any(map(is_stream, loaded.values())):
            from trainformer.data.mixture.stream import MixtureStream

            return MixtureStream(self, loaded)
        return MixtureDataset(self, loaded)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors name the source of the mixture."""
    try:
        yield
    except TrainformerError as error:
        raise type(error)(f"Source {name!r} of the mixture: {error}") from error


def _checked_sources(sources: Any) -> dict[str, Any]:
    if not isinstance(sources, Mapping):
        do = "Pass Mixture({'code': ..., 'web': ...})."
        raise BadArgument(expected("the sources of a mixture as a dict from names to data", type(sources).__name__, do))
    if not 1 <= len(sources) < _MOST_SOURCES:
        raise BadArgument(expected("a mixture of at least one source", len(sources)))
    for name, data in sources.items():
        if not isinstance(name, str) or not name or "/" in name or name != name.strip():
            what = "names of sources that are texts without '/', since metrics are called train/loss/NAME"
            raise BadArgument(expected(what, name))
        if isinstance(data, Mixture):
            do = "List its sources themselves, with their weights multiplied by that of the inner mixture."
            raise BadArgument(expected(f"source {name!r} to be data", "another mixture", do))
        if data is None:
            raise BadArgument(expected(f"data for the source {name!r}", None))
    return dict(sources)


def _checked_data(data: Any) -> Any:
    """A dataset or a stream of samples; not batches."""
    if hasattr(data, "batch_sampler") or hasattr(data, "batches_per_epoch"):
        do = "Pass its dataset: batches are made of samples from several sources."
        raise BadArgument(
            expected("a dataset or a stream of samples", f"a {type(data).__name__}, which makes batches", do)
        )
    if not is_stream(data) and not length(data):
        raise DataError(expected("at least one sample", "none", "Leave the source out of the mixture."))
    return data
