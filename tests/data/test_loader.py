"""Loading: every sample once, in an order that depends only on (seed, epoch), from any position."""

import os
import random
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.data import loader as loader_module
from trainformer.data.loader import (
    DatasetSource,
    LoaderSource,
    batch_length,
    default_num_workers,
    loader_source,
    stream_source,
)


class Noisy(Dataset):
    """Samples that draw from all three generators, as augmentations do."""

    def __init__(self, n=20):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {
            "i": i,
            "noise": torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64),
        }


def table(source, epoch=0, **where):
    """Noise by sample, over what is left of an epoch."""
    return {
        int(i): noise
        for data, *_ in source.batches(epoch, **where)
        for i, noise in zip(data["i"], data["noise"], strict=True)
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def seen(source, epoch=0, **where):
    return [int(i) for (data,), *_ in source.batches(epoch, **where) for i in data]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 50), batch=st.integers(1, 12), position=st.integers(0, 50), seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 5), other=st.integers(1, 12),
)  # fmt: skip
def test_an_epoch_visits_every_sample_once_and_resumes_anywhere(n, batch, position, seed, epoch, other):
    data = TensorDataset(torch.arange(n))
    whole = seen(DatasetSource(data, batch, shuffle=True, seed=seed), epoch)
    assert sorted(whole) == list(range(n))
    position = min(position, n)
    rest = seen(DatasetSource(data, other, shuffle=True, seed=seed), epoch, position=position)
    assert rest == whole[position:]


def test_epochs_and_seeds_differ_and_evaluation_is_in_order():
    data = TensorDataset(torch.arange(100))
    source = DatasetSource(data, 10, shuffle=True, seed=1)
    assert seen(source, 0) != seen(source, 1)
    assert seen(source, 0) != seen(DatasetSource(data, 10, shuffle=True, seed=2), 0)
    assert seen(DatasetSource(data, 10), 3) == list(range(100))


def test_augmentation_depends_neither_on_workers_nor_batch_size_nor_position():
    reference = table(DatasetSource(Noisy(), 4, shuffle=True, seed=7, num_workers=0), epoch=2)
    with_workers = DatasetSource(Noisy(), 3, shuffle=True, seed=7, num_workers=2)
    assert equal(reference, table(with_workers, epoch=2))
    late = table(with_workers, epoch=2, position=11)
    assert len(late) == 9
    assert all(torch.equal(reference[i], noise) for i, noise in late.items())
    # persistent workers see the new epoch
    again = table(with_workers, epoch=3)
    assert not any(torch.equal(again[i], reference[i]) for i in again)


def test_every_sample_has_its_own_random_numbers():
    noises = torch.stack(list(table(DatasetSource(Noisy(), 20, seed=0, num_workers=0)).values()))
    assert len(torch.unique(noises, dim=0)) == 20
    assert (noises.std(0) > 0.1).all()


def test_loading_preserves_the_generators():
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    table(DatasetSource(Noisy(), 4, shuffle=True, num_workers=0))
    list(LoaderSource(DataLoader(TensorDataset(torch.arange(9)), 2, shuffle=True)).batches(0))
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_subsets_are_read_through_to_the_tensors():
    data = TensorDataset(torch.arange(100) * 10, torch.arange(100))
    nested = Subset(Subset(data, range(50, 100)), [0, 5, 10])
    (batch,) = DatasetSource(nested, 8).batches(0)
    assert batch.data[0].tolist() == [500, 550, 600]
    assert batch.size == 3


def test_huggingface_datasets_are_read_in_one_call_unless_transformed():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(10)), "y": [float(i) for i in range(10)]})
    batches = list(DatasetSource(data, 4, num_workers=0).batches(0))
    assert [b.data["x"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    noisy = data.with_transform(lambda rows: {"i": rows["x"], "noise": [torch.rand(1).double() for _ in rows["x"]]})
    assert equal(
        table(DatasetSource(noisy, 10, seed=3, num_workers=0)), table(DatasetSource(noisy, 3, seed=3, num_workers=0))
    )


def test_in_memory_data_need_no_workers():
    assert default_num_workers(TensorDataset(torch.arange(3))) == 0
    assert default_num_workers(Subset(TensorDataset(torch.arange(3)), [0])) == 0
    assert default_num_workers([(1, 2)]) == 0
    assert default_num_workers(Noisy()) >= 1


def test_a_custom_collation_is_used():
    source = DatasetSource(TensorDataset(torch.arange(4)), 2, collate=lambda samples: ("mine", len(samples)))
    assert [b.data for b in source.batches(0)] == [("mine", 2), ("mine", 2)]


def test_an_unreadable_sample_is_named():
    class Broken(Noisy):
        def __getitem__(self, i):
            if i == 3:
                raise OSError("disk on fire")
            return super().__getitem__(i)

    with pytest.raises(OSError, match="disk on fire") as caught:
        list(DatasetSource(Broken(), 4, num_workers=0).batches(0))
    assert "sample 3 of Broken" in caught.value.__notes__[0]
    with pytest.raises(OSError, match=r"(?s)disk on fire.*sample 3 of Broken"):
        list(DatasetSource(Broken(), 4, num_workers=1).batches(0))


def test_an_empty_dataset_raises():
    with pytest.raises(DataError, match="at least one sample"):
        DatasetSource(TensorDataset(torch.empty(0)), 4)


def test_a_users_loader_is_used_unchanged():
    weights = torch.zeros(10)
    weights[3] = 1.0
    sampler = torch.utils.data.WeightedRandomSampler(weights, 12)
    source = LoaderSource(DataLoader(TensorDataset(torch.arange(10)), batch_size=5, sampler=sampler))
    assert seen(source) == [3] * 12
    assert [b.size for b in source.batches(0)] == [5, 5, 2]
    assert source.batches_per_epoch == 3


def test_a_users_shuffled_loader_has_one_order_per_epoch_and_resumes():
    def source():
        return LoaderSource(DataLoader(TensorDataset(torch.arange(30)), batch_size=4, shuffle=True), seed=5)

    torch.manual_seed(1)
    whole = seen(source(), 2)
    torch.manual_seed(99)
    assert seen(source(), 2) == whole
    assert seen(source(), 1) != whole
    assert seen(source(), 2, batch=3) == whole[12:]
    assert seen(source(), 2, batch=8) == []


def test_epochs_reach_a_distributed_sampler():
    sampler = torch.utils.data.DistributedSampler(range(20), num_replicas=2, rank=0, seed=0)
    source = LoaderSource(DataLoader(TensorDataset(torch.arange(20)), batch_size=5, sampler=sampler))
    first, second = seen(source, 0), seen(source, 1)
    assert sampler.epoch == 1
    assert first != second


def test_streams_and_plain_iterables():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(7))

    source = stream_source(Stream(), 3, seed=0, collate=None, num_workers=0)
    assert [(b.data.tolist(), b.size) for b in source.batches(0)] == [([0, 1, 2], 3), ([3, 4, 5], 3), ([6], 1)]
    assert source.batches_per_epoch is None
    ready_made = LoaderSource([torch.zeros(2, 1), torch.zeros(3, 1)])
    assert [b.size for b in ready_made.batches(0)] == [2, 3]


@pytest.mark.parametrize(
    ("data", "n"),
    [
        (torch.zeros(5, 2), 5), ((torch.zeros(4), torch.zeros(4)), 4), ({"a": torch.zeros(3)}, 3), (["a", "b"], 2),
        ([{"x": torch.zeros(6)}], 6),
    ],
)  # fmt: skip
def test_the_size_of_a_batch(data, n):
    assert batch_length(data) == n


def test_a_batch_without_size_is_explained():
    with pytest.raises(BadArgument, match="first dimension"):
        batch_length(object())


# -- faults ------------------------------------------------------------------------------------------------


class Rotten(Noisy):
    """Some samples cannot be read."""

    def __init__(self, n=20, bad=(3, 7)):
        super().__init__(n)
        self.bad = set(bad)

    def __getitem__(self, i):
        if i in self.bad:
            raise OSError(f"cannot decode picture {i}")
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped_counted_and_logged(workers, caplog):
    source = DatasetSource(Rotten(), 4, shuffle=True, seed=1, num_workers=workers, skip_bad=True)
    batches = list(source.batches(0))
    seen_ids = sorted(int(i) for b in batches for i in b.data["i"])
    assert seen_ids == [i for i in range(20) if i not in (3, 7)]
    assert sum(b.bad for b in batches) == 2
    assert sum(b.size + b.bad for b in batches) == 20
    assert "sample 3 cannot be read and is skipped: OSError: cannot decode picture 3" in caplog.text
    list(source.batches(1))
    assert caplog.text.count("sample 3 cannot be read") == 1


def test_skipping_a_sample_does_not_change_the_others():
    whole = table(DatasetSource(Noisy(), 4, shuffle=True, seed=1, num_workers=0))
    holed = table(DatasetSource(Rotten(), 4, shuffle=True, seed=1, num_workers=0, skip_bad=True))
    assert all(torch.equal(whole[i], noise) for i, noise in holed.items())


def test_a_batch_of_bad_samples_only_is_counted_with_the_next():
    source = DatasetSource(Rotten(12, bad=range(4)), 4, num_workers=0, skip_bad=True)
    assert [(b.size, b.bad) for b in source.batches(0)] == [(4, 4), (4, 0)]


class Mortal(Noisy):
    """Kills the process that reads a certain sample, as often as there are lives in a file."""

    def __init__(self, folder, deaths):
        super().__init__(24)
        self.folder = folder
        for i in range(deaths):
            (folder / f"death{i}").touch()

    def __getitem__(self, i):
        if i == 11 and torch.utils.data.get_worker_info() is not None:
            for ticket in sorted(self.folder.glob("death*")):
                ticket.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@pytest.fixture
def impatient(monkeypatch):
    """Let torch look for dead workers every 0.2 seconds instead of every 5."""
    iterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator._try_get_data, "__defaults__", (0.2,))


@pytest.mark.usefixtures("impatient")
def test_dead_workers_are_restarted_and_no_sample_is_lost(tmp_path, caplog):
    reference = table(DatasetSource(Noisy(24), 4, shuffle=True, seed=2, num_workers=0))
    source = DatasetSource(Mortal(tmp_path, 2), 4, shuffle=True, seed=2, num_workers=2)
    assert equal(reference, table(source))
    assert caplog.text.count("DataLoader worker died (") == 2


@pytest.mark.usefixtures("impatient")
def test_workers_that_keep_dying_are_an_error(tmp_path):
    source = DatasetSource(Mortal(tmp_path, 9), 4, num_workers=1)
    with pytest.raises(DataError, match=r"died 4 times.*num_workers"):
        list(source.batches(0))


def test_a_worker_may_die_during_the_check(monkeypatch):
    """Torch's handler of dead children, which any other loader sets, raises wherever the program is at that moment."""

    class Worker:
        def is_alive(self):
            return True  # it has closed its pipes and is about to go

    def interrupted(seconds):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    monkeypatch.setattr(loader_module.time, "sleep", interrupted)
    assert loader_module._has_dead_worker(SimpleNamespace(_workers=[Worker()]))


def test_a_stateful_loader_is_not_read_again():
    class Stateful:
        def __init__(self):
            self.at, self.reads = 0, 0

        def __iter__(self):
            while self.at < 6:
                self.at += 1
                self.reads += 1
                yield torch.tensor([self.at])
            self.at = 0

        def __len__(self):
            return 6

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    first = loader_source(Stateful(), 0)
    batches = first.batches(0)
    assert [next(batches).data.item() for _ in range(4)] == [1, 2, 3, 4]
    other = loader_source(Stateful(), 0)
    other.load_state_dict(first.state_dict())
    assert [b.data.item() for b in other.batches(0, batch=4)] == [5, 6]
    assert other.loader.reads == 2
    assert [b.data.item() for b in other.batches(1)] == [1, 2, 3, 4, 5, 6]
