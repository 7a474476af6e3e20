"""Data sources: the protocol, sharding them over ranks, and loaders that other packages register."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainformer import Trainer
from trainformer.core import BadArgument, DataError, plugins
from trainformer.data import DatasetSource, DataSource, HostBatch, numpy_source
from trainformer.data.hub import load_registered
from trainformer.data.sharding import Shard
from trainformer.data.source import SlicedSource

PLUGIN = """
import torch
from torch.utils.data import TensorDataset

from trainformer.data import HostBatch


class Table:
    batches_per_epoch = 3

    def batches(self, epoch, batch=0, position=0):
        for i in range(batch, 3):
            x = torch.rand(4, 1, generator=torch.Generator().manual_seed(10 * epoch + i))
            yield HostBatch((x, 2 * x), size=4)


def open_table(name):
    scheme, _, table = name.partition("://")
    kinds = {"source": Table(), "rows": TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), "arrays": {"x": [1.0, 2.0]}}
    return kinds.get(table)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that registers the scheme `mydb`: a module and a dist-info folder on sys.path."""
    (tmp_path / "mydb_plugin.py").write_text(PLUGIN)
    info = tmp_path / "mydb_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mydb-plugin\nVersion: 1.0\n")
    entries = "mydb = mydb_plugin:open_table\nhf = mydb_plugin:open_table\nbroken = no_such_module:load\n"
    (info / "entry_points.txt").write_text(f"[trainformer.data_sources]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._registered.cache_clear()
    yield
    plugins._registered.cache_clear()
    sys.modules.pop("mydb_plugin", None)


class Line:
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.train_step(batch)}


class Numbers:
    """Batches of four consecutive numbers."""

    batches_per_epoch = 3

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        for i in range(batch, 3):
            yield HostBatch({"x": np.arange(4) + 4 * i}, size=4)


def test_the_protocol_is_structural() -> None:
    assert isinstance(Numbers(), DataSource)
    assert isinstance(DatasetSource([1, 2], 1), DataSource)
    assert not isinstance([1, 2], DataSource)
    assert not isinstance(torch.utils.data.DataLoader([1, 2]), DataSource)


def test_ranks_take_their_part_of_every_batch() -> None:
    parts = [list(SlicedSource(Numbers(), Shard(rank, 3)).batches(0, 1)) for rank in range(3)]
    assert [[batch.data["x"].tolist() for batch in batches] for batches in zip(*parts, strict=True)] == [
        [[4], [5], [6, 7]],
        [[8], [9], [10, 11]],
    ]
    assert all(batch.global_size == 4 for batches in parts for batch in batches)
    assert SlicedSource(Numbers(), Shard(0, 3)).batches_per_epoch == 3


def test_a_registered_source_trains_evaluates_and_resumes_bitwise(plugin: None, tmp_path: Path) -> None:
    def trainer(folder: str, **options: Any) -> Trainer:
        torch.manual_seed(0)
        options = {"epochs": 2, "run_dir": tmp_path / folder, "save_every": "1steps", "save_last": 9, **options}
        return Trainer(Line(), "mydb://source", val_data="mydb://rows", **options)

    whole = trainer("whole").fit()
    assert whole.state.samples == 24
    trainer("cut").fit()
    middle = next(path for path in sorted((tmp_path / "cut" / "checkpoints").iterdir()) if path.name.endswith("4"))
    resumed = trainer("resumed", resume=str(middle)).fit()
    assert resumed.state.step == whole.state.step == 6
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)
    assert "val/loss" in whole.evaluate()


def test_a_source_cannot_be_split_or_sampled(plugin: None) -> None:
    with pytest.raises(BadArgument, match="val_split with a dataset that has a length"):
        Trainer(Line(), "mydb://source", val_split=0.5, log="none")
    with pytest.raises(BadArgument, match="a data source has an order and batches of its own"):
        Trainer(Line(), Numbers(), sampler="balanced", log="none").fit()


def test_registered_names_and_their_errors(plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(numpy_source("mydb://arrays", 2).batches(0)).data["x"].tolist() == [1.0, 2.0]
    assert load_registered("hf:digits") is None  # built-in names come first
    assert load_registered("other://table") is None
    monkeypatch.chdir(tmp_path)
    Path("mydb").mkdir()
    assert load_registered("mydb") is None  # an existing path comes first
    with pytest.raises(DataError, match="the data source 'mydb' to return data for 'mydb://nothing', received None"):
        load_registered("mydb://nothing")
    with pytest.raises(BadArgument, match=r"The plugin 'broken' .* cannot be imported: ModuleNotFoundError"):
        load_registered("broken://table")
