"""Mixtures: which sample of which source comes when, for any ranks, workers and steps; and what is refused."""

import io
import pickle
import tarfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset, WeightedRandomSampler

from trainformer.core.errors import BadArgument, DataError
from trainformer.data import MappedStream, Mixture, NumpySource, WebDataset, numpy_source
from trainformer.data.loader import DatasetSource
from trainformer.data.mixture.dataset import MixtureSource, sampler_progress
from trainformer.data.mixture.order import MixtureSampler
from trainformer.data.mixture.weights import check_weights, make_weights
from trainformer.data.sharding import WHOLE, Shard


def weights_of(weights, sizes, temperature=None):
    names = [f"s{number}" for number in range(len(sizes))]
    return make_weights(check_weights(weights, names, temperature), names, sizes, temperature)


def sampler_of(weights, sizes, **options):
    return MixtureSampler(sizes, weights_of(weights, sizes), **{"epoch": "longest", **options})


def draws_by_source(sampler, epochs, seed=0):
    """The indices of each source in the order in which they are drawn."""
    order = np.concatenate([sampler.order(epoch, seed) for epoch in range(epochs)])
    sources = np.searchsorted(sampler.offsets, order, side="right") - 1
    return [order[sources == number] - sampler.offsets[number] for number in range(len(sampler.sizes))]


# -- shares ----------------------------------------------------------------------------------------------------


def test_realised_shares_of_a_million_draws_are_within_the_binomial_error():
    shares = np.array([0.62, 0.3, 0.079, 0.001])
    sampler = sampler_of(shares.tolist(), [1000, 300, 77, 5], epoch=1_000_000)
    found = np.bincount(sampler.sources(0, seed=3), minlength=4) / 1e6
    assert (np.abs(found - shares) < 3 * np.sqrt(shares * (1 - shares) / 1e6)).all()
    ramp = [(0, {"s0": 0.9, "s1": 0.1}), (10_000, {"s0": 0.2, "s1": 0.8})]
    changing = MixtureSampler([50, 50], weights_of(ramp, [50, 50]), epoch=1_000_000, step_size=64)
    parts = changing.sources(0, seed=3)[: 15_000 * 64].reshape(15, -1).mean(axis=1)
    steps = np.arange(15_000).reshape(15, -1)
    wanted = np.interp(steps, [0, 10_000], [0.1, 0.8]).mean(axis=1)
    assert (np.abs(parts - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 64_000)).all()


def test_draws_near_each_other_are_as_independent_as_those_of_a_weighted_random_sampler():
    ours = sampler_of([0.3, 0.7], [10, 10], epoch=400_000).sources(0, seed=0)
    generator = torch.Generator().manual_seed(0)
    theirs = np.array(list(WeightedRandomSampler([0.3, 0.7], 400_000, generator=generator)))
    counts = [draws.reshape(-1, 50).sum(axis=1) for draws in (ours, theirs)]
    assert counts[0].var() == pytest.approx(counts[1].var(), rel=0.08)
    assert counts[0].mean() == pytest.approx(counts[1].mean(), rel=0.01)
    assert abs(np.corrcoef(ours[1:], ours[:-1])[0, 1]) < 0.01


def test_a_temperature_and_sizes_give_weights():
    sizes = [100, 400, 900]
    np.testing.assert_allclose(weights_of(None, sizes).first(), np.array(sizes) / 1400)
    np.testing.assert_allclose(weights_of(None, sizes, 2.0).first(), np.array([10, 20, 30]) / 60)
    np.testing.assert_allclose(weights_of("size", sizes, float("inf")).first(), weights_of("equal", sizes).first())
    np.testing.assert_allclose(weights_of([3, 0, 1], sizes).first(), [0.75, 0, 0.25])


# -- passes ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    raw=st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
    epoch=st.sampled_from(["longest", "shortest", "total", 37]),
    mix=st.sampled_from(["sample", "batch"]),
    seed=st.integers(0, 99),
)
def test_each_pass_over_a_source_has_each_sample_once_and_a_new_order(sizes, raw, epoch, mix, seed):
    sampler = sampler_of(raw[: len(sizes)], sizes, epoch=epoch, mix=mix, step_size=5)
    for size, drawn in zip(sizes, draws_by_source(sampler, epochs=4, seed=seed), strict=True):
        passes = [drawn[begin : begin + size].tolist() for begin in range(0, len(drawn), size)]
        assert all(sorted(one) == list(range(size)) for one in passes[:-1])
        assert not passes or len(set(passes[-1])) == len(passes[-1])
        if size > 20:
            assert all(one != other for one, other in pairwise(passes))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    raw=st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
)
def test_the_longest_epoch_sees_everything_and_the_shortest_repeats_nothing(sizes, raw):
    longest = sampler_of(raw[: len(sizes)], sizes, epoch="longest")
    assert [set(drawn) for drawn in draws_by_source(longest, 1)] == [set(range(size)) for size in sizes]
    shortest = sampler_of(raw[: len(sizes)], sizes, epoch="shortest")
    counts = [len(drawn) for drawn in draws_by_source(shortest, 1)]
    assert all(count <= size for count, size in zip(counts, sizes, strict=True)) or len(shortest) == 1
    # Rounded to whole samples, one more would be too many for one source.
    wanted = weights_of(raw[: len(sizes)], sizes).first()
    assert len(shortest) >= min(size / weight for size, weight in zip(sizes, wanted, strict=True)) - len(sizes)
    assert len(longest) <= max(size / weight for size, weight in zip(sizes, wanted, strict=True)) + 3 * len(sizes)


def test_epochs_of_all_kinds():
    assert len(sampler_of([1, 1], [10, 30])) == 60
    assert len(sampler_of([1, 1], [10, 30], epoch="shortest")) == 20
    assert len(sampler_of([1, 1], [10, 30], epoch="total")) == 40
    assert len(sampler_of([1, 1], [10, 30], epoch=7)) == 7
    assert len(sampler_of([1, 0], [10, 30])) == 10  # a source that is switched off does not count
    assert len(sampler_of([1, 1], [10, 30], multiple_of=16)) == 48
    by_step = sampler_of([1, 1], [10, 30], mix="batch", step_size=8)
    sources = by_step.sources(0, seed=0).reshape(-1, 8)
    assert (sources == sources[:, :1]).all()
    assert len(set(sources[:, 0])) == 2
    changing = [(0, {"s0": 1, "s1": 0}), (9, {"s0": 0, "s1": 1})]
    with pytest.raises(BadArgument, match="'total' or a number, with weights that change, received 'longest'"):
        sampler_of(changing, [10, 30])


def test_a_fresh_sampler_gives_any_epoch_without_those_before():
    ramp = [(0, {"s0": 1, "s1": 1}), (20, {"s0": 1, "s1": 9})]
    for weights, mix in (
        (ramp, "sample"),
        (ramp, "batch"),
        ([1, 2], "batch"),
        (lambda step: {"s0": 1, "s1": step}, "sample"),
    ):
        options = {"epoch": 40, "mix": mix, "step_size": 4}
        whole = sampler_of(weights, [7, 11], **options)
        wanted = [whole.order(epoch, 5) for epoch in range(4)]
        np.testing.assert_array_equal(sampler_of(weights, [7, 11], **options).order(3, 5), wanted[3])
        assert not np.array_equal(wanted[2], wanted[3])


# -- batches ---------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """A stream without a state or a length: (source, number, pass)."""

    def __init__(self, source, size):
        self.source, self.size, self.epoch = source, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(self.source, (number * 7 + self.epoch) % self.size, self.epoch) for number in range(self.size)])


class Stateful(Numbers):
    """The same with a saved position. Counts what it reads."""

    reads = 0

    def __iter__(self):
        self.position, self.start = self.__dict__.pop("start", 0), 0
        return self._rest()

    def _rest(self):
        for sample in list(super().__iter__())[self.position :]:
            self.position += 1
            type(self).reads += 1
            yield sample

    def state_dict(self):
        return {"position": self.position, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start, self.epoch = state["position"], state["epoch"]


def tensors(source, size):
    return TensorDataset(torch.full((size,), source), torch.arange(size), torch.zeros(size, dtype=torch.long))


def source_of(mixture, batch_size=6, accumulation=1, shard=WHOLE, workers=0):
    """Batches of a mixture, as a torch run makes them."""
    from trainformer.run.torch.data import LoadOptions, make_source

    class Plain:
        pass

    loaded = mixture.load(lambda data: data)
    options = LoadOptions(batch_size, 11, workers, pin_memory=False, accumulation=accumulation, shard=shard)
    return make_source(Plain(), loaded, options, train=True)


def rows(batch):
    """(source, number, pass) of each sample that counts."""
    return list(zip(*(column[: batch.size].tolist() for column in batch.data), strict=True))


def sequence(source, epochs=2):
    found = [[row for batch in source.batches(epoch) for row in rows(batch)] for epoch in range(epochs)]
    return [row for one in found for row in one]


KINDS = {
    "datasets": lambda: Mixture({"a": tensors(0, 10), "b": tensors(1, 33)}, {"a": 0.4, "b": 0.6}),
    "lists": lambda: Mixture({"a": list(tensors(0, 10)), "b": tensors(1, 33)}, {"a": 0.4, "b": 0.6}),
    "one source per step": lambda: Mixture({"a": tensors(0, 10), "b": tensors(1, 33)}, "equal", mix="batch", epoch=70),
    "changing": lambda: Mixture(
        {"a": tensors(0, 10), "b": tensors(1, 33)}, [(0, {"a": 1, "b": 0}), (8, {"a": 0, "b": 1})]
    ),
    "streams": lambda: Mixture({"a": Numbers(0, 10), "b": Stateful(1, 33)}, {"a": 0.4, "b": 0.6}),
    "a stream and a dataset": lambda: Mixture({"a": tensors(0, 10), "b": Stateful(1, 33)}, "equal", epoch="shortest"),
    "changing streams": lambda: Mixture(
        {"a": Numbers(0, 10), "b": Stateful(1, 33)}, [(0, {"a": 1, "b": 0}), (8, {"a": 0, "b": 1})], epoch=50
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_sequence_is_the_same_for_any_ranks_workers_and_micro_batches(kind):
    wanted = sequence(source_of(KINDS[kind]()))
    assert len({row[0] for row in wanted}) == 2
    for count in (2, 4):
        parts = [source_of(KINDS[kind](), shard=Shard(rank, count)) for rank in range(count)]
        found = []
        for epoch in range(2):
            for batches in zip(*(part.batches(epoch) for part in parts), strict=True):
                assert all(len(batch.sources.numbers) == max(1, batch.size) for batch in batches)
                found += [row for batch in batches for row in rows(batch)]
        assert found == wanted
    assert sequence(source_of(KINDS[kind](), batch_size=2, accumulation=3)) == wanted
    if "stream" not in kind:
        assert sequence(source_of(KINDS[kind](), workers=2 if kind == "lists" else 0)) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=["one rank", "another world size"])
def test_resuming_at_any_batch_continues_the_sequence(kind, shard):
    whole = source_of(KINDS[kind]())
    states, batches, edges = [], [], []
    for epoch in range(2):
        for number, batch in enumerate(whole.batches(epoch), 1):
            batches.append(batch)
            states.append(whole.state_dict() if hasattr(whole, "state_dict") else None)
            edges.append((epoch, number))
    lengths = [sum(1 for epoch, _ in edges if epoch == one) for one in range(2)]
    for place, ((epoch, number), state) in list(enumerate(zip(edges, states, strict=True)))[:-1]:
        if place % 3:
            continue
        resumed = source_of(KINDS[kind](), shard=shard)
        if state is not None:
            resumed.load_state_dict(state)
        position = sum(batch.size for batch in batches[place - number + 1 : place + 1])
        at = (epoch + 1, 0, 0) if number == lengths[epoch] else (epoch, number, position)
        found = list(resumed.batches(*at))
        for later in range(at[0] + 1, 2):
            found += resumed.batches(later)
        wanted = [shard.slice(batch._replace(data=tuple(batch.data))) for batch in batches[place + 1 :]]
        assert [rows(batch) for batch in found] == [rows(batch) for batch in wanted]


def test_a_stream_resumes_by_its_state_without_reading_again():
    source = source_of(Mixture({"a": Stateful(0, 400), "b": Stateful(1, 900)}, "equal", epoch=600))
    reading = source.batches(0)
    for _ in range(80):
        next(reading)
    state = source.state_dict()
    resumed, Stateful.reads = source_of(Mixture({"a": Stateful(0, 400), "b": Stateful(1, 900)}, "equal", epoch=600)), 0
    resumed.load_state_dict(state)
    assert rows(next(resumed.batches(0, 80, 480))) == rows(next(reading))
    assert Stateful.reads <= 2 * 6 + 2


def tar_shards(folder, size):
    """Images whose label is their number, in three tar files; read as in training, with random noise."""
    folder.mkdir()
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, size, 3):
                png = io.BytesIO()
                Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(png, "png")
                for ending, content in (("png", png.getvalue()), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:03}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return lambda: MappedStream(WebDataset(folder, length=size), with_noise, shuffle=5)


def with_noise(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() + torch.rand(3, 1, 1)


def test_tar_shards_and_images_in_memory_resume_together(tmp_path):
    opened = tar_shards(tmp_path / "shards", 20)
    memory = TensorDataset(torch.zeros(7, 3, 2, 2), torch.arange(100, 107))
    make = lambda: source_of(Mixture({"tar": opened(), "memory": memory}, {"tar": 2, "memory": 1}, epoch=32))  # noqa: E731
    found = lambda batch: (batch.data[1].tolist(), batch.data[0].sum(dim=(1, 2, 3)).tolist())  # noqa: E731
    source, batches, states = make(), [], []
    for epoch in range(2):
        for batch in source.batches(epoch):
            batches.append(found(batch))
            states.append(source.state_dict())
    labels = [label for batch in batches for label in batch[0] if label < 100]
    assert sorted(labels[:20]) == sorted(labels[20:40]) == list(range(20))  # two passes
    assert labels[:20] != labels[20:40]
    for place in (0, 3, 5, 8):
        resumed = make()
        resumed.load_state_dict(states[place])
        at = (0, place + 1, 6 * place + 6) if place < 5 else (1, place - 5, 6 * (place - 5))
        rest = [found(batch) for batch in resumed.batches(*at)]
        rest += [found(batch) for batch in resumed.batches(1)] if at[0] == 0 else []
        assert rest == batches[place + 1 :]


def test_streams_of_unknown_size_end_with_the_first_or_the_last_source():
    both = {"a": lambda: Numbers(0, 10), "b": lambda: Numbers(1, 30)}
    seen = {}
    for epoch in ("shortest", "longest"):
        mixture = Mixture({name: make() for name, make in both.items()}, {"a": 0.5, "b": 0.5}, epoch=epoch)
        source = source_of(mixture)
        assert source.batches_per_epoch is None
        seen[epoch] = [[row for batch in source.batches(number) for row in rows(batch)] for number in range(2)]
    assert sum(row[0] == 0 for row in seen["shortest"][0]) == 10
    assert sum(row[0] == 1 for row in seen["longest"][0]) == 30
    assert {row[2] for row in seen["longest"][0] if row[0] == 0} >= {0, 1}  # small sources start further passes
    for rows_of in seen.values():  # passes continue over the end of an epoch: each sample once per pass
        for number, size in ((0, 10), (1, 30)):
            drawn = [row[1] for one in rows_of for row in one if row[0] == number]
            for begin in range(0, len(drawn) - size + 1, size):
                assert sorted(drawn[begin : begin + size]) == list(range(size))


def test_an_epoch_that_is_read_again_is_the_same():
    source = source_of(KINDS["streams"]())
    first = [rows(batch) for batch in source.batches(0)]
    again = [rows(batch) for batch in source.batches(0)]
    assert again == first
    assert [rows(batch) for batch in source.batches(1)] != first


def test_numpy_batches_have_the_order_of_torch_batches_and_name_their_sources():
    data = {"a": {"x": np.arange(10)}, "b": {"x": 100 + np.arange(33)}}
    mixture = Mixture(data, {"a": 0.4, "b": 0.6})
    from trainformer.data.numpy_loader import as_data

    source = numpy_source(mixture.load(as_data), 6, shuffle=True, seed=11, pad_last=True)
    assert isinstance(source, MixtureSource)
    assert isinstance(source.source, NumpySource)
    source.keeps_column = True
    found = []
    for batch in source.batches(0):
        assert (len(batch.data["_source"]), batch.data["_valid"].sum()) == (6, batch.size)
        assert (batch.sources.numbers == batch.data["_source"][: batch.size]).all()
        found += [(int(x >= 100), int(x % 100)) for x in batch.data["x"][: batch.size]]
    assert found == [row[:2] for row in sequence(source_of(KINDS["datasets"]()), epochs=1)]
    source.keeps_column = False
    assert "_source" not in next(source.batches(0)).data


def test_worker_processes_get_the_data_alone():
    sources = {"a": list(tensors(0, 10)), "b": tensors(1, 33)}
    mixture = Mixture(sources, lambda step: {"a": 1, "b": 1}, epoch=np.int64(20))
    samples = pickle.loads(pickle.dumps(mixture.load(lambda data: data).tagged()))  # as if they were spawned
    assert (len(samples), samples[12][0], samples[12][1][1].item()) == (43, 1, 2)


def test_large_tensors_are_read_without_a_copy(monkeypatch):
    wanted = sequence(source_of(KINDS["datasets"]()))
    monkeypatch.setattr("trainformer.data.loader._MOST_JOINED_BYTES", 0)
    assert sequence(source_of(KINDS["datasets"]())) == wanted


def test_passes_and_weights_at_a_position():
    sampler = MixtureSampler([10, 30], weights_of([1, 1], [10, 30]), epoch="longest", step_size=6)
    source = MixtureSource(DatasetSource(A, 6), Mixture({"a": A, "b": B}), sampler_progress(sampler, 3))
    drawn = sampler.order(1, 3)[:24]
    wanted = {"passes/a": 3 + (drawn < 10).sum() / 10, "passes/b": 1 + (drawn >= 10).sum() / 30}
    assert source.metrics_at(1, 24) == pytest.approx(wanted)
    assert source.metrics_at(2, 0) == pytest.approx({"passes/a": 6.0, "passes/b": 2.0})


# -- mistakes --------------------------------------------------------------------------------------------------

A, B = ["x"] * 4, ["y"] * 6
TWO = {"code": A, "web": B}
MISTAKES = {
    "a misspelt source": (
        lambda: Mixture(TWO, {"code": 1, "wbe": 1}),
        "received 'wbe'. Did you mean 'web'",
    ),
    "a missing weight": (
        lambda: Mixture(TWO, {"code": 1}),
        "for all sources, received none for 'web'",
    ),
    "a negative weight": (
        lambda: Mixture(TWO, {"code": -1, "web": 1}),
        "at least 0, received {'code': -1}",
    ),
    "NaN": (lambda: Mixture(TWO, {"code": float("nan"), "web": 1}), "finite numbers"),
    "a text as weight": (lambda: Mixture(TWO, {"code": "0.3", "web": 1}), "finite numbers"),
    "only zeros": (lambda: Mixture(TWO, {"code": 0, "web": 0}), "at least one is positive"),
    "too few weights": (lambda: Mixture(TWO, [0.3]), "one weight for each of the 2 sources"),
    "a word": (lambda: Mixture(TWO, "sizes"), "Did you mean 'size'"),
    "temperature 0": (lambda: Mixture({"code": A}, temperature=0), "temperature to be a positive number, received 0"),
    "temperature NaN": (lambda: Mixture({"code": A}, temperature=float("nan")), "temperature to be a positive number"),
    "both": (lambda: Mixture({"code": A}, {"code": 1}, temperature=2), "weights or temperature, received both"),
    "steps in disorder": (lambda: Mixture({"code": A}, [(5, {"code": 1}), (5, {"code": 1})]), "ascending order"),
    "a negative step": (lambda: Mixture({"code": A}, [(-1, {"code": 1})]), "integers from 0, received -1"),
    "no pairs": (lambda: Mixture({"code": A}, [{"code": 1}]), r"a list of \(step, weights\) pairs"),
    "a function that forgets": (
        lambda: Mixture(TWO, lambda step: {"web": 1}),
        r"weights\(0\) for all",
    ),
    "no sources": (lambda: Mixture({}), "at least one source"),
    "a list of sources": (lambda: Mixture([A, B]), "as a dict from names to data, received 'list'"),
    "a slash": (lambda: Mixture({"a/b": A}), "without '/'"),
    "no data": (lambda: Mixture({"a": None}), "data for the source 'a', received None"),
    "a nested mixture": (lambda: Mixture({"a": Mixture({"b": A})}), "'another mixture'. List its sources themselves"),
    "an epoch of 0": (lambda: Mixture({"a": A}, epoch=0), "epoch to be a number of samples"),
    "an unknown epoch": (lambda: Mixture({"a": A}, epoch="long"), "Did you mean 'longest'"),
    "an unknown mix": (lambda: Mixture({"a": A}, mix="batches"), "Did you mean 'batch'"),
    "an unknown argument": (lambda: Mixture.from_mapping({"sources": {"a": A}, "weight": 1}), "Did you mean 'weights'"),
    "an empty source": (
        lambda: Mixture({"a": A, "b": []}).load(lambda d: d),
        "'b' of the mixture: Expected at least one",
    ),
    "a loader": (
        lambda: Mixture({"a": torch.utils.data.DataLoader(A)}).load(lambda d: d),
        "'a' of the mixture: Expected a dataset or a stream of samples, received 'a DataLoader, which makes batches'",
    ),
    "other fields": (
        lambda: source_of(Mixture({"a": [{"x": 1, "y": 2}], "b": [{"x": 1}]})),
        "'x': 'int', 'y': 'int'} in 'a'.*, received {'x': 'int'} in 'b'",
    ),
    "another dtype": (
        lambda: source_of(Mixture({"a": [torch.zeros(2)], "b": [torch.zeros(2, dtype=torch.uint8)]})),
        "float32",
    ),
    "another shape": (
        lambda: source_of(Mixture({"a": [torch.zeros(2)], "b": [torch.zeros(3)]})),
        r"float32 \(3,\)' in 'b'",
    ),
    "other fields in a stream": (
        lambda: list(source_of(Mixture({"a": Numbers(0, 9), "b": list(range(9))}, "equal", epoch=9)).batches(0)),
        "samples of one form",
    ),
    "streams by size": (lambda: source_of(Mixture({"a": Numbers(0, 9), "b": A})), "since the sizes of 'a' are unknown"),
    "streams in total": (
        lambda: source_of(Mixture({"a": Numbers(0, 9)}, "equal", epoch="total")),
        "epoch to be a number of samples, since the size of 'a' is unknown",
    ),
    "one stream twice": (
        lambda: (lambda stream: source_of(Mixture({"a": stream, "b": stream}, "equal")))(Numbers(0, 9)),
        "'one stream under two names'",
    ),
    "workers": (lambda: source_of(KINDS["streams"](), workers=2), "num_workers=0 for a mixture with streams"),
    "a huge epoch": (lambda: sampler_of([1e-6, 1], [1000, 10]), "at most 268,435,456 samples, received '1,000,0"),
    "an empty stream": (
        lambda: list(source_of(Mixture({"a": Numbers(0, 0)}, "equal", epoch=3)).batches(0)),
        "at least one sample in the source 'a'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_with_advice(name):
    make, message = MISTAKES[name]
    with pytest.raises((BadArgument, DataError), match=message.replace("{", r"\{").replace("[", r"\[")):
        make()


class Named:
    """Images with class names, which may be renumbered."""

    def __init__(self, classes):
        self.classes = classes
        self.targets = list(range(len(classes)))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.zeros(2), self.targets[index]


class Renumbered(Named):
    def remap_classes(self, classes):
        other = Renumbered(self.classes)
        other.targets = [classes.index(name) for name in self.classes]
        other.classes = classes
        return other


def test_labels_mean_the_same_class_in_all_sources():
    loaded = Mixture({"few": Renumbered(["b", "c"]), "all": Named(["a", "b", "c"])}).load(lambda data: data)
    assert [loaded[index][1] for index in range(5)] == [1, 2, 0, 1, 2]
    for other in (Named(["b", "c"]), Named(["c", "b", "a"]), Renumbered(["a", "d"])):
        with pytest.raises(DataError, match="sources with the same classes, received others: 'x' has"):
            Mixture({"x": other, "all": Named(["a", "b", "c"])}).load(lambda data: data)
    Mixture({"x": Named(["a", "b"]), "all": Named(["a", "b", "c"])}).load(lambda data: data)  # same numbers
