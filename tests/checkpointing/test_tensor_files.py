"""Components as files: exact, safe, and readable by others."""

import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainformer.checkpointing.torch_files import read_component, write_component
from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax.weight_files import open_weights
from trainformer.utils.tensor_files import read_tensors, read_weights, write_weights
from trainformer.utils.tree_files import read_tree, write_tree


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_weights_are_plain_safetensors_under_their_own_names(tmp_path):
    state = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict()
    assert write_weights(tmp_path, "model", state) == ["model.safetensors"]
    assert equal(load_file(tmp_path / "model.safetensors"), state)
    assert equal(read_weights(tmp_path, ["model.safetensors"]), state)


def test_tied_weights_are_written_once_and_come_back_under_both_names(tmp_path):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    write_weights(tmp_path, "model", model.state_dict())
    assert list(load_file(tmp_path / "model.safetensors")) == ["0.weight"]
    assert equal(read_weights(tmp_path, ["model.safetensors"]), model.state_dict())


def test_views_of_one_memory_are_kept_apart(tmp_path):
    fused = torch.arange(24.0).reshape(4, 6)
    state = {"q": fused[:2], "k": fused[2:], "t": fused.T, "whole": fused}
    write_weights(tmp_path, "model", state)
    assert equal(read_weights(tmp_path, ["model.safetensors"]), state)


def test_large_weights_are_split_with_the_index_that_hf_reads(tmp_path):
    state = {f"layer{i}.weight": torch.randn(100, 10) for i in range(5)}
    names = write_weights(tmp_path, "model", state, most=9000)
    assert names == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 5 * 4000
    assert index["weight_map"]["layer2.weight"] == names[1]
    assert equal(read_weights(tmp_path, names), state)


def test_a_checkpoints_weights_open_with_from_pretrained(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    write_weights(tmp_path, "model", model.state_dict())
    model.config.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "int64", "bool"])
def test_dtypes_empty_and_scalar_tensors_survive(tmp_path, name):
    dtype = getattr(torch, name)
    state = {
        "a": torch.ones(2, 2, dtype=dtype),
        "none": torch.empty(0, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    write_weights(tmp_path, "model", state)
    assert equal(read_weights(tmp_path, ["model.safetensors"]), state)


@pytest.mark.parametrize(
    ("format", "state"),
    [
        ("tensors", {"step": 3, "moments": [torch.ones(2), None], "t": (1, "a"), "nested": {"x": torch.zeros(1)}}),
        ("json", {"step": 3, "loss": 0.1 + 0.2, "history": [{"a": float("inf")}]}),
    ],
)
def test_other_components_come_back_as_they_were(tmp_path, format, state):
    names = write_component(tmp_path, "part", format, state)
    assert str(read_component(tmp_path, names, format)) == str(state)


def test_a_bomb_is_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))

    torch.save({"x": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(DataError, match="could execute code"):
        read_component(tmp_path, ["bomb.pt"], "tensors")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(("format", "name"), [("weights", "m.safetensors"), ("tensors", "m.pt"), ("json", "m.json")])
def test_a_damaged_file_is_named(tmp_path, format, name):
    (tmp_path / name).write_bytes(b"\x01garbage")
    with pytest.raises(DataError, match=name):
        read_component(tmp_path, [name], format)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(BadArgument, match="weights"):
        write_component(tmp_path, "x", "pickle", {})


@pytest.mark.parametrize("aliases", ["", "[1]", "null", '{"a": "nowhere"}', '{"a": []}', "[" * 100_000])
def test_forged_names_of_tied_weights_are_refused(tmp_path, aliases):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors", {"trainformer_aliases": aliases})
    with pytest.raises(DataError, match="damaged"):
        read_weights(tmp_path, ["model.safetensors"])


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(tmp_path):
    """Without reading it: a megabyte of zip can hold a gigabyte of zeros."""
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    np.savez_compressed(tmp_path / "state.npz", **{"0": np.zeros(1_000_000)})
    (tmp_path / "state.json").write_text('{"x": {"__array__": "0"}}')
    with zipfile.ZipFile(tmp_path / "a.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(1 << 20))
    with pytest.raises(DataError, match="unpack to"):
        read_tensors(tmp_path / "a.pt")
    with pytest.raises(DataError, match="unpack to"):
        read_tree(tmp_path, ["state.json", "state.npz"])


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"x": {"__array__": []}}', '{"x": {"__array__": "7"}}'])
def test_a_damaged_tree_is_refused(tmp_path, content):
    write_tree(tmp_path, "state", {"x": np.ones(2)})
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(DataError, match="damaged"):
        read_tree(tmp_path, ["state.json", "state.npz"])


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 1}', '{"weight_map": {"x": "../up.safetensors"}}', "{"])
def test_a_forged_index_of_weights_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DataError, match=r"index\.json is damaged"), open_weights(tmp_path):
        pass
