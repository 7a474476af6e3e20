"""Texts for JAX: the tokens, masks and packing of the torch tasks in batches of one shape, and without torch."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reading_without_torch import read
from transformers import AutoTokenizer

from text_toys import chat_tokenizer, conversations, llama, preferences, sentences
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.loader import DatasetSource
from trainformer.data.numpy_loader import NumpySource
from trainformer.data.text.collate import pair_batch, token_batch
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import PairEncoder, causal_tokens, preference_tokens
from trainformer.data.text.streams import TokenStream
from trainformer.data.text.tokenizer import open_tokenizer
from trainformer.tasks import DPO, CausalLM

LENGTH = 48


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def check_against_torch(mine, theirs, names):
    """The same samples in the same rows, whatever the width; beyond the torch batch there is only padding."""
    pairs = list(zip(mine, theirs, strict=True))
    for one, other in pairs:
        assert one.origin.samples.tolist() == other.origin.samples.tolist()
        for name in names:
            ours, wanted = one.data[name], other.data[name].numpy()
            width = wanted.shape[-1]
            assert ours.dtype == np.int32
            assert ours.shape == (*wanted.shape[:-1], LENGTH)
            assert np.array_equal(ours[..., :width], wanted)
        assert (one.data["labels"][..., width:] == -100).all()
        assert (one.data["attention_mask"][..., width:] == 0).all()
    return len(pairs)


DATA = {
    "texts": sentences(),
    "chats": conversations(2),
    "prompts": [{"prompt": f"{text} and", "completion": " so on"} for text in sentences()],
}


@pytest.mark.parametrize("position", [0, 8])
@pytest.mark.parametrize("kind", DATA)
def test_batches_are_those_of_the_torch_task(kind, position, tokenizer, tmp_path):
    task = CausalLM(llama(), tokenizer=tokenizer, max_length=LENGTH, cache_dir=tmp_path)
    theirs = DatasetSource(
        task.prepare_dataset(DATA[kind], train=True), 4, shuffle=True, seed=7, collate=task.collate_fn
    )
    tokens = causal_tokens(DATA[kind], Encoder(tokenizer, max_length=LENGTH), cache_dir=tmp_path / "own")
    pad = task.text_tokenizer.pad_token_id
    mine = NumpySource(tokens, 4, shuffle=True, seed=7, collate=lambda found: token_batch(found, LENGTH, pad))
    names = ("input_ids", "labels", "attention_mask")
    batches = mine.batches(2, position // 4, position), theirs.batches(2, position // 4, position)
    assert check_against_torch(*batches, names) >= 2


def test_packed_batches_are_those_of_the_torch_task(tokenizer, tmp_path):
    task = CausalLM(llama(), tokenizer=tokenizer, max_length=LENGTH, cache_dir=tmp_path, packing=True)
    theirs = DatasetSource(task.prepare_dataset(DATA["texts"], train=True), 2, shuffle=True, collate=task.collate_fn)
    tokens = causal_tokens(DATA["texts"], Encoder(tokenizer, max_length=LENGTH), packing=True, cache_dir=tmp_path)
    pad = task.text_tokenizer.pad_token_id
    mine = NumpySource(tokens, 2, shuffle=True, collate=lambda found: token_batch(found, LENGTH, pad))
    names = ("input_ids", "labels", "position_ids")
    assert check_against_torch(mine.batches(1), theirs.batches(1), names) > 1
    assert len(tokens) < len(DATA["texts"]) / 2  # several documents in a sequence
    for batch in mine.batches(1):
        segments, places = batch.data["segment_ids"], batch.data["position_ids"]
        assert np.array_equal(batch.data["attention_mask"], segments > 0)
        assert (segments > 0).sum(1).tolist() == tokens.lengths[batch.origin.samples].tolist()
        for row, marks, labels in zip(places, segments, batch.data["labels"], strict=True):
            starts = np.flatnonzero(row == 0)
            begun = np.searchsorted(starts, np.arange(LENGTH), side="right")  # documents begun so far, filling included
            filling = marks == 0
            assert np.array_equal(marks[~filling], begun[~filling])
            assert not filling[: (~filling).sum()].any()
            assert (labels[starts] == -100).all()


def test_pairs_are_those_of_the_torch_task(tokenizer, tmp_path):
    task = DPO(llama(), tokenizer=tokenizer, max_length=LENGTH, cache_dir=tmp_path)
    theirs = DatasetSource(task.prepare_dataset(preferences(), train=True), 4, shuffle=True, collate=task.collate_fn)
    encoder = PairEncoder(tokenizer, max_length=LENGTH, train_on="completion")
    pairs = preference_tokens(preferences(), encoder, cache_dir=tmp_path / "own")
    pad = task.text_tokenizer.pad_token_id
    mine = NumpySource(pairs, 4, shuffle=True, collate=lambda found: pair_batch(found, LENGTH, pad))
    names = ("input_ids", "labels", "attention_mask")
    assert check_against_torch(mine.batches(0), theirs.batches(0), names) >= 2
    first = next(mine.batches(0)).data
    learned = first["labels"] != -100
    prompts = learned.argmax(-1)
    assert (prompts > 0).all()
    assert (prompts[:, 0] == prompts[:, 1]).all()  # the two answers follow one prompt
    assert (first["input_ids"][learned] == first["labels"][learned]).all()


def test_a_sequence_that_is_too_long_is_an_error():
    with pytest.raises(DataError, match="at most 3 tokens"):
        token_batch([{"input_ids": [1, 2, 3, 4]}], 3, 0)


def test_a_stream_is_tokenised_as_it_is_read(tokenizer):
    read_so_far = []

    class Texts:
        def __iter__(self):
            for text in sentences() * 100:
                read_so_far.append(text)
                yield {"text": text}

    stream = causal_tokens(Texts(), Encoder(tokenizer, max_length=LENGTH), packing=True)
    assert isinstance(stream, TokenStream)
    batch = token_batch([next(iter(stream))], LENGTH, 0)
    assert batch["input_ids"].shape == (1, LENGTH)
    assert len(read_so_far) < len(sentences() * 100)


def test_a_tokenizer_opens_as_transformers_opens_it(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "right")
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "right"), open_tokenizer(tmp_path / "right")
    assert ours("some words, and others")["input_ids"] == theirs("some words, and others")["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map
    messages = conversations()[0]["messages"]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert open_tokenizer(ours) is ours
    with pytest.raises(BadArgument, match="Did you mean 'right'"):
        open_tokenizer(tmp_path / "rigth")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadArgument, match=r"a tokenizer\.json in .*save_pretrained"):
        open_tokenizer(tmp_path / "empty")
    with pytest.raises(BadArgument, match="a tokenizer, or the folder or name of one"):
        open_tokenizer(None)


def without_torch(*words):
    """What a process prints in which to import torch fails."""
    program = Path(__file__).with_name("reading_without_torch.py")
    # HF `datasets` import torch themselves to stream, unless this forbids it.
    environment = {**os.environ, "USE_TORCH": "0"}
    words = [sys.executable, str(program), *map(str, words)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_readers_and_sources_are_imported_without_torch():
    assert set(without_torch()) >= {"trainformer.data.numpy_loader", "trainformer.data.text.prepare"}


@pytest.mark.slow
def test_everything_is_read_without_torch(tokenizer, tmp_path):
    """In a process where to import torch fails; the batches are those that are made beside it."""
    pytest.importorskip("datasets")
    with open(tmp_path / "chats.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in conversations(2))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(sentences()):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "pairs.json").write_text(json.dumps(preferences()))
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in sentences()[:5])])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    without = without_torch(tmp_path)
    beside = json.loads(json.dumps(read(tmp_path)))
    assert without == beside
    assert {name: len(batches) > 1 for name, batches in without.items()} == dict.fromkeys(without, True)
