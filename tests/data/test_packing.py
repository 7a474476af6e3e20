"""Packing against a plain best-fit loop and TRL; a packed model against an unpacked one."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

from trainformer.core import BadArgument, DataError
from trainformer.data.loader import DatasetSource
from trainformer.data.text.collate import LengthGroupedSampler, collate_packed, pad
from trainformer.data.text.packing import PackedDataset, pack
from trainformer.data.text.store import TokenStore, lengths_of, tokenize

quick = settings(max_examples=60, deadline=None)
some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def documents(*lengths: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random tokens, some of them not trained on."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        ids = rng.integers(0, 50, length).astype(np.int32)
        made.append({"input_ids": ids, "labels": np.where(rng.random(length) < 0.7, ids, -100).astype(np.int32)})
    return made


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """How full the bins are, by the definition: try every bin."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, load in enumerate(loads) if load + length <= capacity]
        if fitting:
            loads[max(fitting, key=loads.__getitem__)] += length
        else:
            loads.append(length)
    return sorted(loads)


# -- which documents go together ---------------------------------------------------------------------------


@quick
@given(st.integers(1, 300).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1))))
def test_every_document_is_packed_once_and_as_best_fit_would(drawn: tuple[int, list[int]]) -> None:
    capacity, lengths = drawn
    bins = pack(lengths, capacity)
    assert sorted(number for documents in bins for number in documents) == list(range(len(lengths)))
    assert sorted(sum(lengths[i] for i in documents) for documents in bins) == plain_best_fit(lengths, capacity)
    assert all(documents == sorted(documents) for documents in bins)
    assert bins == sorted(bins) == pack(np.array(lengths, dtype=np.int32), capacity)


def test_a_large_capacity_and_many_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 131_073, 3_000)
    bins = pack(lengths, 131_072)
    loads = [int(lengths[documents].sum()) for documents in bins]
    assert sorted(loads) == plain_best_fit(lengths.tolist(), 131_072)
    assert max(loads) <= 131_072


@pytest.mark.slow
def test_as_full_as_trl_packs() -> None:
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl import pack_dataset

    lengths = np.minimum(np.random.default_rng(1).lognormal(3.5, 1, 900).astype(int) + 1, 256)
    theirs = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[1] * n for n in lengths]}), 256, strategy="bfd")
    ours = PackedDataset([{"input_ids": [1] * n, "labels": [1] * n} for n in lengths], 256)
    assert sorted(ours.lengths) == sorted(sum(row) for row in theirs["seq_lengths"])
    assert ours.efficiency > 0.98


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 9, 4], 8, "at most 8 tokens, .* received '9 tokens in document 1'.*max_length"),
        ([3, 0], 8, "at least one token, received 'an empty one, number 1'"),
        ([], 8, "at least one document"),
        ([3], 0, "capacity to be at least 1"),
        ([0.5], 8, "integers"),
    ],
)
def test_packing_errors(lengths: list[Any], capacity: int, message: str) -> None:
    with pytest.raises((BadArgument, DataError), match=message):
        pack(lengths, capacity)


# -- the sequences they make -------------------------------------------------------------------------------


def test_a_sequence_holds_its_documents_one_after_the_other() -> None:
    data = documents(5, 3, 8, 1, 2)
    packed = PackedDataset(data, capacity=8)
    assert (packed.lengths.sum(), len(packed), packed.efficiency) == (19, 3, 19 / 24)
    for item, numbers in zip((packed[i] for i in range(3)), pack([5, 3, 8, 1, 2], 8), strict=True):
        assert item["input_ids"].tolist() == [t for n in numbers for t in data[n]["input_ids"].tolist()]
        assert item["labels"].tolist() == [t for n in numbers for t in [-100, *data[n]["labels"][1:].tolist()]]
        assert item["position_ids"].tolist() == [i for n in numbers for i in range(len(data[n]["input_ids"]))]
        assert item["lengths"].tolist() == [len(data[n]["input_ids"]) for n in numbers]
    assert (packed[-1]["input_ids"] == packed[2]["input_ids"]).all()
    with pytest.raises(IndexError):
        packed[3]
    with pytest.raises(BadArgument, match="bins of at most 8 tokens, received 9"):
        PackedDataset(data, 8, bins=[[0, 1, 3]])


def test_a_packed_store_pickles_small_and_takes_part_of_one(tmp_path: Any) -> None:
    from trainformer.data.text.encode import Encoder

    data = documents(*np.random.default_rng(0).integers(2, 30, 500).tolist())
    store = tokenize(data, Encoder(None, max_length=None), cache_dir=tmp_path, workers=0)
    chosen = Subset(Subset(store, list(range(0, len(store), 2))), [4, 2, 100])
    assert lengths_of(chosen).tolist() == [len(chosen[i]["input_ids"]) for i in range(3)]
    packed = PackedDataset(chosen, capacity=100)
    assert packed[0]["lengths"].tolist() == lengths_of(chosen).tolist()
    whole = PackedDataset(store, capacity=64)
    assert whole.in_memory
    assert len(pickle.dumps(whole)) < 12_000  # 8 bytes for a document, not 60 for its tokens
    copy = pickle.loads(pickle.dumps(whole))
    assert isinstance(copy.store, TokenStore)
    assert all((copy[i]["labels"] == whole[i]["labels"]).all() for i in range(len(whole)))
    with pytest.raises(ValueError, match="read-only"):
        store[0]["labels"][0] = 7  # packing writes into a copy


# -- batches -----------------------------------------------------------------------------------------------


@quick
@given(some_lengths, st.sampled_from([1, 8, 16]), st.sampled_from(["left", "right"]))
def test_padding_is_determined_by_length(lengths: list[int], multiple_of: int, side: str) -> None:
    data = documents(*lengths)
    pad_id = int(data[0]["input_ids"][-1])  # as where the padding token is EOS
    batch = pad(data, pad_id, multiple_of=multiple_of, side=side)
    width = batch["input_ids"].shape[1]
    assert width % multiple_of == 0
    assert max(lengths) <= width < max(lengths) + multiple_of
    for row, (example, length) in enumerate(zip(data, lengths, strict=True)):
        filling = width - length
        filled = {"input_ids": pad_id, "labels": -100, "attention_mask": 0}
        for name, value in {**example, "attention_mask": np.ones(length)}.items():
            expected = [filled[name]] * filling
            expected = [*expected, *value.tolist()] if side == "left" else [*value.tolist(), *expected]
            assert batch[name][row].tolist() == expected
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_padding_stops_at_max_length() -> None:
    assert pad(documents(13, 2), 0, max_length=14)["input_ids"].shape == (2, 14)
    assert pad(documents(13, 2), 0, max_length=64)["input_ids"].shape == (2, 16)
    with pytest.raises(DataError, match="at most 12 tokens, received 13"):
        pad(documents(13, 2), 0, max_length=12)
    with pytest.raises(BadArgument, match="'right' or 'left'"):
        pad(documents(3), 0, side="middle")
    with pytest.raises(BadArgument, match="multiple_of"):
        pad(documents(3), 0, multiple_of=0)


def test_packed_batches() -> None:
    packed = PackedDataset(documents(5, 3, 6, 1, 2), capacity=8)
    items = [packed[i] for i in range(len(packed))]
    rows = collate_packed(items, pad_id=9, length=10)
    assert all(tensor.shape == (3, 10) for tensor in rows.values())
    assert set(rows) == {"input_ids", "labels", "position_ids"}  # a mask would let documents see each other
    for row, item in enumerate(items):
        size = len(item["labels"])
        assert rows["input_ids"][row, size:].tolist() == [9] * (10 - size)
        assert rows["position_ids"][row, size:].tolist() == list(range(10 - size))
        assert (rows["labels"][row, size:] == -100).all()
        assert rows["labels"][row, :size].tolist() == item["labels"].tolist()
    flat = collate_packed(items, flatten=True)
    assert flat["input_ids"].shape == (1, 17)
    edges = flat["cu_seqlens"].tolist()
    assert edges[-1] == 17
    assert flat["cu_seqlens"].dtype == torch.int32
    assert int(flat["max_seqlen"]) == max(np.diff(edges)) == 6
    assert (flat["position_ids"][0, edges[:-1]] == 0).all()
    assert int((flat["position_ids"] == 0).sum()) == len(edges) - 1
    with pytest.raises(BadArgument, match="at most 7 tokens, received 8"):
        collate_packed(items, length=7)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_model_computes_the_same_packed_and_alone(flatten: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    data = documents(5, 3, 6, 1, 2, 7, 4)
    packed = PackedDataset(data, capacity=12)
    batch = collate_packed([packed[i] for i in range(len(packed))], flatten=flatten)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum")

    with torch.no_grad():
        together = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        alone = torch.tensor(0.0)
        for example in data:
            ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)[None]
            alone += loss(model(ids).logits, torch.as_tensor(example["labels"], dtype=torch.int64)[None])
        padded = pad(data, pad_id=0)
        masked = model(padded["input_ids"], attention_mask=padded["attention_mask"]).logits
        contaminated = model(batch["input_ids"], use_cache=False).logits
    torch.testing.assert_close(loss(together, batch["labels"]), alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss(masked, padded["labels"]), alone, rtol=1e-5, atol=1e-5)
    assert (loss(contaminated, batch["labels"]) - alone).abs() > 1e-3  # else the test could not tell


# -- lengths that go together ------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_holds_every_sequence_once_and_the_longest_first(
    lengths: list[int], batch_size: int, megabatch: int, epoch: int
) -> None:
    sampler = LengthGroupedSampler(lengths, batch_size, megabatch=megabatch, seed=3)
    order = sampler.order(epoch)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)
    assert (order == LengthGroupedSampler(lengths, batch_size, megabatch=megabatch, seed=8).order(epoch, seed=3)).all()
    sampler.set_epoch(epoch)
    assert list(sampler) == order.tolist()
    assert len(sampler) == len(lengths)


def test_batches_have_similar_lengths_and_differ_between_epochs() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 4_000)
    sampler = LengthGroupedSampler(lengths, 8)

    def padding(order: np.ndarray) -> float:
        """Share of a batch that is padding."""
        rows = lengths[order].reshape(-1, 8)
        return 1 - rows.sum() / (rows.max(1) * 8).sum()

    grouped, again = sampler.order(0), sampler.order(1)
    for epoch in range(10):  # ten megabatches: by chance the longest would seldom be in the first
        assert lengths[sampler.order(epoch)[0]] == lengths.max()
    assert padding(grouped) < 0.02 < 0.3 < padding(np.random.default_rng(1).permutation(4_000))
    batches, others = ({frozenset(batch) for batch in order.reshape(-1, 8).tolist()} for order in (grouped, again))
    assert not batches & others
    # Within a megabatch lengths come in any order: sorted ones would make the loss rise and fall with them.
    means = lengths[grouped].reshape(-1, 8).mean(1)[1:50]
    assert 0.3 < (np.diff(means) > 0).mean() < 0.7


def test_ranks_get_whole_batches_and_the_loader_resumes() -> None:
    data = documents(*np.random.default_rng(0).integers(1, 40, 64).tolist())
    shares = [list(LengthGroupedSampler(data, 4, num_replicas=2, rank=rank)) for rank in range(2)]
    order = LengthGroupedSampler(data, 4).order(0)
    assert [order[i : i + 4].tolist() for i in range(0, 64, 8)] == np.reshape(shares[0], (-1, 4)).tolist()
    assert sorted(shares[0] + shares[1]) == list(range(64))
    source = DatasetSource(
        data, 4, sampler=LengthGroupedSampler(data, 4), seed=5, collate=lambda rows: pad(rows, 0), num_workers=0
    )
    batches = [batch.data["input_ids"] for batch in source.batches(epoch=2)]
    rest = [batch.data["input_ids"] for batch in source.batches(epoch=2, position=24)]
    assert all(torch.equal(a, b) for a, b in zip(batches[6:], rest, strict=True))
    assert batches[0].shape[1] >= max(len(row["input_ids"]) for row in data)
    loader = DataLoader(data, batch_size=4, sampler=LengthGroupedSampler(data, 4), collate_fn=lambda rows: pad(rows, 0))
    assert sum(len(batch["input_ids"]) for batch in loader) == 64


def test_invalid_lengths() -> None:
    for lengths in ([], np.zeros((2, 2), dtype=int), [0.5]):
        with pytest.raises(DataError, match="integers"):
            LengthGroupedSampler(lengths, 2)
    with pytest.raises(BadArgument, match="batch_size to be a positive integer, received 0"):
        LengthGroupedSampler([1, 2], 0)
