"""Preference data as streams: the tokens of stored data, batches that resume exactly, and any number of ranks."""

import io
import json
import tarfile

import numpy as np
import pytest
from torch.utils.data import IterableDataset

import text_toys as toys
from trainformer import Mixture, Trainer
from trainformer.core.errors import DataError
from trainformer.data.sharding import Shard
from trainformer.data.text.streams import open_stream
from trainformer.run.torch.data import LoadOptions, make_source
from trainformer.tasks import CPO, DPO, KTO, RewardModel

PAIRS = [{**pair, "margin": 0.1 * i} for i, pair in enumerate(toys.preferences() * 3)]
ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
    for i, pair in enumerate(PAIRS)
]
KINDS = {"dpo": (DPO, PAIRS), "cpo": (CPO, PAIRS), "reward": (RewardModel, PAIRS), "kto": (KTO, ANSWERS)}


class Records(IterableDataset):
    """A stream without a position of its own."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return iter(self.records)


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(kind, **options):
        return kind(toys.llama(), max_length=32, tokenizer=tokenizer, cache_dir=tmp_path / "tokens", **options)

    return make


def trainer_for(task, data, **options):
    defaults = {"batch_size": 4, "max_steps": 6, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0}
    return Trainer(task, data, **{**defaults, **options})


def write_jsonl(folder, records):
    for part in range(2):
        lines = (json.dumps(record) for record in records[part::2])
        (folder / f"part{part}.jsonl").write_text("\n".join(lines))
    return f"stream:{folder}/part*.jsonl"


def write_tar(folder, records):
    for part in range(2):
        with tarfile.open(folder / f"part{part}.tar", "w") as tar:
            for number, record in enumerate(records[part::2]):
                content = json.dumps(record).encode()
                member = tarfile.TarInfo(f"{number:04}.json")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return f"stream:{folder}/part{{0..1}}.tar"


SOURCES = {"iterable": lambda folder, records: Records(records), "hf": write_jsonl, "tar": write_tar}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name])
        else:
            assert np.array_equal(value, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_those_of_stored_data(task, kind):
    make, records = KINDS[kind]
    made = task(make)
    stored, streamed = made.prepare_dataset(records, True), list(made.prepare_dataset(Records(records), True))
    assert len(streamed) == len(stored) == len(records)
    for place, item in enumerate(streamed):
        wanted = stored[place]
        if kind == "kto":  # prompts meet the answers of records nearby
            own = [item.pop(name) for name in ("kl_input_ids", "kl_labels")]
            assert len(own[0]) == len(own[1])
            wanted = {name: value for name, value in wanted.items() if not name.startswith("kl_")}
        same(item, wanted)


def test_pairs_become_single_answers(task, tokenizer):
    items = list(task(KTO).prepare_dataset(Records(PAIRS[:40]), True))
    assert [item["label"] for item in items] == [True] * 32 + [False] * 32 + [True] * 8 + [False] * 8
    for chunk in (items[:64], items[64:]):
        answers = [tokenizer.decode(item["input_ids"][item["labels"] != -100]) for item in chunk]
        others = [tokenizer.decode(item["kl_input_ids"][item["kl_labels"] != -100]) for item in chunk]
        assert sorted(answers) == sorted(others)
        assert answers != others
    alone = task(KTO).prepare_dataset(Records(ANSWERS[:33]), True)
    assert len(list(alone)) == 32  # the last record has no other nearby
    assert "no other record to pair it with" in alone.report.reasons


@pytest.mark.parametrize(
    ("kind", "source"), [("dpo", "hf"), ("reward", "tar"), ("kto", "tar"), ("kto", "hf"), ("cpo", "iterable")]
)
def test_resuming_is_exact(task, tmp_path, kind, source):
    """Cut in the middle of the second 32 records that are tokenised together; then more than one pass."""
    make, records = KINDS[kind]
    data = SOURCES[source](tmp_path, records)

    def run(folder, **options):
        options |= {"save_every": 2, "save_last": 5, "batch_size": 12}
        return trainer_for(task(make), data, run_dir=tmp_path / folder, **options)

    whole, again = toys.check_resuming(run)
    assert again.state.step == 6
    assert whole.state.epoch == 1


def test_ranks_share_the_batches_of_one_process(task):
    for make, records in KINDS.values():
        made = task(make)
        trainer_for(made, records)  # builds the model
        options = {"batch_size": 5, "seed": 0, "num_workers": 0, "pin_memory": False}
        whole = make_source(made, Records(records), LoadOptions(**options), train=True)
        parts = [
            make_source(made, Records(records), LoadOptions(**options, shard=Shard(i, 2)), train=True) for i in (0, 1)
        ]
        for batch, *shares in zip(whole.batches(0), *(part.batches(0) for part in parts), strict=True):
            assert batch.size == sum(share.size for share in shares)
            for name, rows in batch.data.items():
                joined = np.concatenate([share.data[name][: share.size].numpy() for share in shares])
                assert np.array_equal(joined, rows.numpy())


def test_a_mixture_of_streams(task, tmp_path):
    data = {"new": Records(PAIRS[:20]), "old": open_stream(write_tar(tmp_path, PAIRS[20:]))}
    for make in (DPO, KTO):
        trainer = trainer_for(task(make), Mixture(data, {"new": 1, "old": 2}), run_dir=tmp_path / make.__name__).fit()
        assert trainer.state.samples == 24
        assert {"train/loss/new", "train/loss/old"} <= trainer.state.log_history[-1].keys()


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("dpo", {"text": "the fox"}, "a stream of records of the schema 'preference'"),
        (
            "reward",
            {"chosen": "a", "rejected": "b", "margin": "x"},
            "Record 2 of the stream: .*'margin' to be a num",
        ),
        ("kto", {"prompt": "a", "completion": " b"}, "Record 2 of the stream: .*the key 'label'"),
        ("kto", {"prompt": "a", "completion": " b", "label": "no"}, "Record 2 of the stream: .*'label' to be true"),
    ],
)
def test_wrong_records_are_named(task, kind, record, message):
    make, records = KINDS[kind]
    data = [record] * 3 if "text" in record else [*records[:2], {**record}]
    with pytest.raises(DataError, match=message):
        list(task(make).prepare_dataset(Records(data), True))
