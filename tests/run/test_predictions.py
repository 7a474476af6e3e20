"""Predictions: ids of samples, files that are written as predictions are made, all of them or none."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.folder import ImageFiles, ImageFolder
from trainformer.data.ids import sample_ids
from trainformer.data.lists import ImageList
from trainformer.data.text import load_text
from trainformer.run import predictions, run_of


class Predicts(MeanTask):
    """Logits, their argmax and a matrix per sample."""

    class_names = ("a", "b", "c")

    def __init__(self):
        super().__init__()
        self.calls = 0

    def predict_step(self, batch):
        self.calls += 1
        logits = self.model(batch[0])
        return {"prediction": logits.argmax(-1), "logits": logits, "matrix": logits[:, :, None] * torch.ones(2)}


@pytest.fixture
def trainer():
    return Trainer(Predicts(), classes(), batch_size=8, log="none", num_workers=0)


@pytest.mark.parametrize("name", ["out.jsonl", "new/out.csv", "out.parquet"])
def test_a_file_holds_what_is_returned(trainer, name):
    data = classes(21)
    wanted = trainer.predict(data)
    assert trainer.predict(data, out=name, batch_size=5) == Path(name)
    if name.endswith("parquet"):
        rows = parquet.read_table(name).to_pylist()
    elif name.endswith("csv"):
        with open(name, newline="") as file:
            rows = [{k: v if k == "class" else json.loads(v) for k, v in row.items()} for row in csv.DictReader(file)]
    else:
        rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
    assert len(rows) == 21
    for number, (row, want) in enumerate(zip(rows, wanted, strict=True)):
        assert (row["index"], row["id"], want["id"]) == (number, number, number)
        assert row["class"] == "abc"[want["prediction"]]
        assert np.allclose(row["logits"], want["logits"], rtol=1e-12)
        assert np.allclose(row["matrix"], want["matrix"], rtol=1e-12)
    assert [path.name for path in Path().rglob("*") if path.is_file()] == [Path(name).name]


def test_only_one_batch_is_in_memory(trainer):
    batches = run_of(trainer).predicted_columns(classes(400), 4)
    for number, batch in zip(range(5), batches, strict=False):
        assert batch["index"] == list(range(4 * number, 4 * number + 4))
        assert trainer.task.calls <= number + 1


def test_failures_leave_no_file_and_what_was_there(trainer):
    class Rotten(Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, index):
            if index == 20:
                raise OSError("unreadable")
            return classes(1)[0][0], 0

    Path("out.jsonl").write_text("before")
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        with pytest.raises(OSError, match="unreadable"):
            trainer.predict(Rotten(), out=name)
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]
    assert Path("out.jsonl").read_text() == "before"
    with pytest.raises(BadArgument, match=r"ends in .jsonl, .ndjson, .csv, .parquet, .pq, received 'out.xlsx'"):
        trainer.predict(classes(3), out="out.xlsx")
    Path("folder.csv").mkdir()
    with pytest.raises(BadArgument, match=r"a file to write, received 'the folder folder\.csv'"):
        trainer.predict(classes(3), out="folder.csv")
    Path("folder.csv").rmdir()
    with pytest.raises(DataError, match="nothing to write"):
        predictions.write_file([], Path("empty.jsonl"), "jsonl")
    with pytest.raises(DataError, match="the same columns"):
        predictions.write_file([{"a": [1]}, {"b": [1]}], Path("odd.parquet"), "parquet")
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


KILLED = """
import os, signal, sys, torch
sys.path[:0] = sys.argv[1:]
from test_predictions import Predicts
from trainformer import Trainer
from toys import classes

class Deadly(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if index == 3000:
            os.kill(os.getpid(), signal.SIGKILL)
        return classes(1)[0][0], 0

Trainer(Predicts(), classes(), batch_size=8, log="none", num_workers=0).predict(Deadly(), out="out.jsonl")
"""


def test_a_kill_leaves_no_file_that_looks_complete(trainer):
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", KILLED, *places], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = Path().iterdir()
    assert left.name.startswith(".out.jsonl.")
    assert left.stat().st_size > 0
    trainer.predict(classes(3), out="out.jsonl")
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]  # what the killed process left is gone


# -- ids ---------------------------------------------------------------------------------------------------


def test_ids_of_images():
    for name in ("b/2.png", "a/1.png", "a/deep/0.png"):
        Path("root", name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(Path("root", name))
    names = ["a/1.png", "a/deep/0.png", "b/2.png"]
    folder = ImageFolder("root")
    assert list(sample_ids(folder)) == names
    assert list(sample_ids(ImageFiles(Path("root").absolute()))) == names
    assert list(sample_ids(Subset(folder, [2, 0]))) == ["b/2.png", "a/1.png"]
    Path("root/list.csv").write_text("image,label\nb/2.png,0\na/1.png,1\n")
    assert list(sample_ids(ImageList("root/list.csv"))) == ["b/2.png", "a/1.png"]
    from torchvision.datasets import ImageFolder as TorchvisionFolder

    assert list(sample_ids(TorchvisionFolder("root"))) == names


def test_ids_of_records(tmp_path):
    records = [{"id": f"r{n}", "text": "a"} for n in range(3)]
    Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert list(sample_ids(load_text("a.jsonl"))) == ["r0", "r1", "r2"]
    assert list(sample_ids([{"uid": 7}, {"uid": 9}])) == [7, 9]
    assert list(sample_ids([{"id": 1.5}, {"id": 2.5}])) == ["1.5", "2.5"]
    with pytest.raises(DataError, match="ids of one type, as int of the first record"):
        list(sample_ids([{"id": 1}, {"id": "b"}]))
    import datasets

    assert list(sample_ids(datasets.Dataset.from_list(records).select([2, 1]))) == ["r2", "r1"]
    with pytest.raises(DataError, match="record 1 to have 'id'"):
        list(sample_ids([{"id": 1}, {"text": "b"}]))
    for other in (["a", "b"], [{"text": "a"}], ConcatDataset([records, records]), TensorDataset(torch.zeros(3))):
        assert next(sample_ids(other)) == 0

    class Own(Dataset):
        ids = ("x", "y")

    assert list(sample_ids(Own())) == ["x", "y"]


def test_ids_follow_a_loader_that_keeps_the_order(trainer):
    class Named(TensorDataset):
        ids = tuple(f"n{number}" for number in range(10))

    data = Named(*classes(10))
    wanted = [row["id"] for row in trainer.predict(data)]
    assert wanted == list(Named.ids)
    assert [row["id"] for row in trainer.predict(DataLoader(data, batch_size=3))] == wanted
    assert [row["id"] for row in trainer.predict(DataLoader(data, batch_size=3, shuffle=True))] == list(range(10))
