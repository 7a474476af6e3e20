"""Token streams: nothing is lost or read twice, however a stream is packed, interrupted and resumed."""

import gzip
import json
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.encode import Encoder
from trainformer.data.text.packing import pack
from trainformer.data.text.sources import load_text
from trainformer.data.text.streams import TokenStream, open_stream

RECORDS = [{"input_ids": list(range(1000 * n, 1000 * n + 2 + n * 7 % 23))} for n in range(150)]


class Plain(IterableDataset):
    """Can be iterated again, and says nothing of where it is."""

    def __iter__(self):
        return iter(RECORDS)


class DeviceBatch(Plain):
    """Says where it is; counts what is read."""

    def __init__(self):
        self.place = 0
        self.start = 0
        self.read = 0

    def __iter__(self):
        start, self.start = self.start, 0
        self.place = start
        for record in RECORDS[start:]:
            self.place += 1
            self.read += 1
            yield record

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]


def streamed(**options):
    def generate():
        yield from RECORDS

    return datasets.IterableDataset.from_generator(generate, **options)


SOURCES = {"plain": Plain, "placed": DeviceBatch, "hf": streamed}


def make(source, max_length=16, **options):
    return TokenStream(SOURCES[source](), Encoder(None, max_length=max_length), **options)


def as_lists(items):
    return [{name: np.asarray(value).tolist() for name, value in item.items()} for item in items]


@pytest.mark.parametrize("source", SOURCES)
def test_every_token_comes_once_in_order(source):
    expected = [token for record in RECORDS for token in record["input_ids"]]
    stream = make(source)
    for epoch in range(2):
        stream.set_epoch(epoch)
        pieces = as_lists(stream)
        assert [token for piece in pieces for token in piece["input_ids"]] == expected
        assert max(len(piece["input_ids"]) for piece in pieces) <= 16


@pytest.mark.parametrize("source", SOURCES)
def test_packing_loses_nothing_and_mixes_nothing(source):
    sequences = as_lists(make(source, max_length=32, capacity=32))
    found = Counter()
    for sequence in sequences:
        assert len(sequence["input_ids"]) <= 32
        starts = [place for place, position in enumerate(sequence["position_ids"]) if position == 0]
        assert [sequence["labels"][start] for start in starts] == [-100] * len(starts)
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            found[tuple(sequence["input_ids"][start:end])] += 1
            assert sequence["labels"][start + 1 : end] == sequence["input_ids"][start + 1 : end]
    assert found == Counter(tuple(record["input_ids"]) for record in RECORDS)
    best = len(pack([len(record["input_ids"]) for record in RECORDS], 32))
    assert len(sequences) <= best * 1.1  # almost as few as if all documents were known at once


@pytest.mark.parametrize("capacity", [None, 32])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("epoch", [0, 1])
def test_resumes_at_any_position(source, capacity, epoch):
    whole = as_lists(make(source, max_length=32, capacity=capacity))
    for cut in (0, 1, 2, 31, 32, 33, 60, len(whole) - 1, len(whole)):
        stream = make(source, max_length=32, capacity=capacity)
        for before in range(epoch):
            stream.set_epoch(before)
            assert len(list(stream)) == len(whole)
        stream.set_epoch(epoch)
        iterator = iter(stream)
        head = as_lists(next(iterator) for _ in range(cut))
        state = json.loads(json.dumps(stream.state_dict()))
        if cut == 60:  # as checkpoints of earlier versions hold it
            state["waiting"] = [[torch.tensor(part, dtype=torch.int32) for part in p] for p in state["waiting"]]
        other = make(source, max_length=32, capacity=capacity)
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert head + as_lists(other) == whole


def test_a_stateful_source_is_not_read_again():
    stream = make("placed")
    iterator = iter(stream)
    for _ in range(120):
        next(iterator)
    other = make("placed")
    other.load_state_dict(stream.state_dict())
    list(other)
    assert other.source.read < len(RECORDS) - stream.source.place + 40  # at most the chunk in hand again


def test_workers_share_a_stream():
    stream = make("plain")
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    tokens = Counter(token for item in loader for token in np.asarray(item["input_ids"]).tolist())
    assert tokens == Counter(token for record in RECORDS for token in record["input_ids"])


def test_invalid_streams():
    with pytest.raises(BadArgument, match="iterated again, received 'a generator"):
        TokenStream((record for record in RECORDS), Encoder(None, max_length=16))
    nothing = [{"input_ids": [1, 2], "labels": [-100, -100]}] * 40
    with pytest.raises(DataError, match=r"something to train on.*none in the first 40.*40 dropped"):
        list(TokenStream(nothing, Encoder(None, max_length=16)))
    bad = [{"input_ids": [1, 2, 3]}] * 40 + [{"input_ids": ["x"]}]
    with pytest.raises(DataError, match="Record 40: Expected input_ids to be a list of integers"):
        list(TokenStream(bad, Encoder(None, max_length=16)))
    with pytest.raises(DataError, match=r"a file, or a glob pattern, received 'nowhere/\*.jsonl'"):
        open_stream("stream:nowhere/*.jsonl")


def test_every_record_of_a_stream_is_read_for_what_it_holds(tmp_path):
    """Fields that appear late, in a list and in a file, and a schema that changes."""
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool['name'] }} {% endfor %}{{ style }}"
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    late = {"system": "be brief", "tools": [{"name": "eye"}], "chat_template_kwargs": {"style": "calm "}}
    records = [{"messages": messages}] * 40 + [{"messages": messages, **late}] * 20
    path = tmp_path / "late.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for source in (records, load_text(f"stream:{path}")):
        items = list(TokenStream(source, Encoder(tokenizer, max_length=None)))
        texts = [tokenizer.decode(item["input_ids"]) for item in items]
        assert (
            texts
            == ["user: hi</s>assistant: ho</s>"] * 40
            + ["eye calm system: be brief</s>user: hi</s>assistant: ho</s>"] * 20
        )
    with pytest.raises(DataError, match="Record 60 of the stream: Expected the key 'messages'"):
        list(TokenStream([*records, {"text": "a"}], Encoder(tokenizer, max_length=None)))


def test_files_are_streamed_by_pattern(tmp_path):
    texts = [f"text {n}" for n in range(30)]
    for part in range(3):
        with gzip.open(tmp_path / f"part{part}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[part * 10 : part * 10 + 10])
    (tmp_path / "plain.txt").write_text("\n".join(texts))
    assert [record["text"] for record in load_text(f"stream:{tmp_path}/part*.jsonl.gz")] == texts
    assert [record["text"] for record in load_text(f"stream:{tmp_path}/plain.txt")] == texts
