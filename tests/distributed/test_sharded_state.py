"""Files of divided states: any number of ranks to any other, and nothing in them is executed."""

import json
import os
import pickle
import shutil
import threading
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_ranks import COUNTS, every_pair, truth

from ranks import on_ranks
from trainformer.core.errors import BadArgument, DataError
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import ShardedState, resharded, write_sharded


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of states that 1, 2 and 4 ranks wrote, and what the ranks found when they read them."""
    folder = tmp_path_factory.mktemp("states")
    return folder, on_ranks(partial(every_pair, folder=str(folder)), 4, tmp_path_factory.mktemp("ranks"))


def opened(folder):
    return ShardedState(folder, sorted(path.name for path in folder.iterdir()))


@pytest.mark.slow
def test_any_world_size_reads_what_any_other_wrote(written):
    _, found = written
    assert [result["wrong"].item() for result in found] == [0, 0, 0, 0]
    # The first rank writes the tree as well. No rank writes for another.
    assert [result["wrote"].tolist() for result in found] == [[2, 2, 2], [1, 1], [1], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("world", COUNTS)
def test_one_process_without_a_process_group_reads_the_full_state(written, world):
    state = opened(written[0] / str(world)).unsharded()
    values = truth()
    assert all(torch.equal(state["tensors"][name], value) for name, value in values.items())
    assert state["tensors"]["tied"] is state["tensors"]["uneven"]
    assert state["note"] == {"steps": 3, "names": ("a", None)}
    assert all(state["tensors"][name].dtype == value.dtype for name, value in values.items())


@pytest.mark.slow
def test_each_value_is_in_one_file_only(written):
    for world in COUNTS:
        pieces = [load_file(path) for path in (written[0] / str(world)).glob("*.safetensors")]
        stored = sum(tensor.numel() for shard in pieces for tensor in shard.values())
        assert stored == sum(value.numel() for value in truth().values()) + 1


@pytest.mark.slow
def test_missing_or_foreign_shards_are_named(written, tmp_path):
    folder = tmp_path / "four"
    shutil.copytree(written[0] / "4", folder)
    shard = folder / "model.shard-00002-of-00004.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(DataError, match="4 processes wrote, but the shards of 3"):
        opened(folder)
    shutil.copy(written[0] / "2" / "model.shard-00001-of-00002.safetensors", shard)
    with pytest.raises(DataError, match=r"(twice|to another checkpoint)"):
        opened(folder)
    for damaged in (kept[:40], b"", kept[:-8]):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=r"model\.shard-00002-of-00004\.safetensors.*damaged"):
            opened(folder)
    (folder / "model.tree.pt").unlink()
    with pytest.raises(DataError, match=r"lacks the file \*\.tree\.pt"):
        opened(folder)


# -- one process -------------------------------------------------------------------------------------------


def a_state():
    return {"weight": torch.arange(6.0).reshape(3, 2), "step": torch.tensor(3.0), "note": [1, None, "x"]}


def saved(folder, state=None):
    write_sharded(folder, "model", a_state() if state is None else state, TorchProcessGroup())
    return folder


def test_names_shapes_and_plain_values_are_known_before_a_tensor_is_read(tmp_path):
    state = opened(saved(tmp_path))
    assert list(state) == ["weight", "step", "note"]
    assert state["weight"].is_meta
    assert state["note"] == [1, None, "x"]
    assert state["weight"].shape == (3, 2)


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_nothing_in_a_file_is_executed(tmp_path):
    mark = tmp_path / "executed"
    folder = tmp_path / "state"
    folder.mkdir()
    saved(folder)
    tree, shard = folder / "model.tree.pt", folder / "model.shard-00000-of-00001.safetensors"
    kept = shard.read_bytes()
    shard.write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(DataError, match=r"shard-00000-of-00001\.safetensors.*damaged"):
        opened(folder)
    shard.write_bytes(kept)
    torch.save({"format": 1, "world": 1, "aliases": {}, "tree": Harmful(mark)}, tree)
    with pytest.raises(DataError, match=r"model\.tree\.pt holds objects other than tensors"):
        opened(folder)
    tree.write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(DataError, match=r"model\.tree\.pt"):
        opened(folder)
    assert not mark.exists()
    pickle.loads(tree.read_bytes())  # it would have
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"format": 1, "world": "1", "aliases": {}, "tree": {}},
        {"format": 1, "world": 1, "aliases": {"weight": "nothing"}, "tree": a_state()},
    ],
)
def test_an_invalid_tree_is_refused(tmp_path, content):
    saved(tmp_path)
    torch.save(content, tmp_path / "model.tree.pt")
    with pytest.raises(DataError, match=r"model\.tree\.pt does not describe"):
        opened(tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    saved(tmp_path)
    torch.save({"format": 2, "world": 1, "aliases": {}, "tree": {}}, tmp_path / "model.tree.pt")
    with pytest.raises(DataError, match="newer trainformer"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "offsets", [{"weight": [2, 0]}, {"weight": [0]}, {"weight": "no"}, {"nobody": [0, 0]}, 3, None]
)
def test_pieces_that_do_not_fit_are_refused(tmp_path, offsets):
    saved(tmp_path)
    shard = tmp_path / "model.shard-00000-of-00001.safetensors"
    note = {} if offsets is None else {"trainformer_offsets": json.dumps(offsets)}
    save_file(load_file(shard), shard, note)
    with pytest.raises(DataError, match=r"shard-00000-of-00001\.safetensors.*damaged"):
        opened(tmp_path)


def test_missing_values_are_detected(tmp_path):
    saved(tmp_path)
    shard = tmp_path / "model.shard-00000-of-00001.safetensors"
    pieces = load_file(shard)
    places = {"trainformer_offsets": json.dumps({"weight": [0, 0], "step": []})}
    save_file({**pieces, "weight": pieces["weight"][:2].clone()}, shard, places)
    with pytest.raises(DataError, match="hold 4 of the 6 values of weight"):
        opened(tmp_path)


def test_any_key_keeps_its_tensor(tmp_path):
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1), 3: torch.full((1,), 3.0)}, "a~1b": torch.full((1,), 2.0)}
    found = opened(saved(tmp_path, state)).unsharded()
    values = [found["a/b"], found["a"]["b"], found["a~1b"], found["a"][3]]
    assert torch.cat(values).tolist() == [1, 0, 2, 3]
    with pytest.raises(BadArgument, match="keys of a state to differ as strings, received 'a/3'"):
        write_sharded(tmp_path, "model", {"a": {"3": torch.zeros(1), 3: torch.zeros(1)}}, TorchProcessGroup())


def test_views_of_shared_memory_are_written_correctly(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"base": base, "rows": base[1:], "turned": base.t(), "same": base}
    found = opened(saved(tmp_path, state)).unsharded()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found["same"] is found["base"]


def test_a_state_is_written_in_a_thread_while_training_continues(tmp_path):
    state = a_state()
    snapshot = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    thread = threading.Thread(target=write_sharded, args=(tmp_path, "model", snapshot, TorchProcessGroup()))
    thread.start()
    state["weight"].zero_()
    thread.join()
    found = resharded(opened(tmp_path), a_state())
    assert torch.equal(found["weight"], a_state()["weight"])
