"""HF folders: bitwise round trips, shards, models that transformers opens, and errors for invalid folders."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import configs, furthest, logits, save_random, tokens, torch_logits
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import Decoder, ViT, load_model, model_from_config, save_model

CONFIGS = configs()
FAMILIES = ("llama_biased", "mistral", "qwen3", "gpt2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return save_random(CONFIGS["llama"], folder), folder


@pytest.fixture
def copied(llama, tmp_path):
    """A copy of the folder to damage."""
    return shutil.copytree(llama[1], tmp_path / "copy")


def _edit(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", [*FAMILIES, "qwen2"])
def test_a_round_trip_is_bitwise_and_opens_in_transformers(name, tmp_path):
    theirs = save_random(CONFIGS[name], tmp_path / "a")
    _edit(tmp_path / "a", my_own_field={"kept": [1, 2]})
    load_model(tmp_path / "a").save_pretrained(tmp_path / "b")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in "ab"]
    assert configs[0] == configs[1]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert furthest(torch_logits(theirs, tokens()), torch_logits(opened, tokens())) == 0.0


@pytest.mark.parametrize("name", [*FAMILIES, "llama3", "qwen2_window"])
def test_a_new_model_opens_in_transformers(name, tmp_path):
    read = model_from_config(CONFIGS[name].to_dict()).config
    made = model_from_config(replace(read, source="", initializer_range=0.3), seed=3)
    made.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    wanted = torch_logits(opened, tokens())
    assert np.abs(wanted).max() > 0.5
    assert furthest(wanted, logits(made, tokens())) <= 1e-4
    again = replace(load_model(tmp_path).config, source="")
    assert again == replace(made.config, head_dim=again.head_dim, num_key_value_heads=again.num_key_value_heads)
    assert (again.head_width, again.kv_heads) == (read.head_width, read.kv_heads)


def test_bf16_files_are_read_and_written_in_bf16(tmp_path):
    save_random(CONFIGS["qwen2"], tmp_path / "a", torch.bfloat16)
    kept = load_model(tmp_path / "a", dtype=None)
    assert kept.norm.scale.dtype == jnp.bfloat16
    kept.save_pretrained(tmp_path / "b")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert all(after[key].dtype == before[key].dtype and np.array_equal(before[key], after[key]) for key in before)
    load_model(tmp_path / "a").save_pretrained(tmp_path / "c")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "float32"
    assert load_file(tmp_path / "c" / "model.safetensors")["model.norm.weight"].dtype == np.float32


def test_shards_with_an_index_are_read_and_written(llama, tmp_path):
    theirs, folder = llama
    theirs.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
    model = load_model(tmp_path / "a")
    assert furthest(nnx.state(model), nnx.state(load_model(folder))) == 0.0
    save_model(model, tmp_path / "b", largest_shard=20_000)
    sizes = [path.stat().st_size for path in (tmp_path / "b").glob("model-*.safetensors")]
    assert len(sizes) > 2
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert furthest(torch_logits(theirs, tokens()), torch_logits(opened, tokens())) == 0.0
    # Saving again removes the shards of the earlier save.
    save_model(model, tmp_path / "b")
    left = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert left == ["config.json", "model.safetensors"]


def test_given_parameters_are_saved_instead_of_the_models_own(llama, tmp_path):
    model = load_model(llama[1])
    params = nnx.to_pure_dict(nnx.state(model))
    params["norm"]["scale"] = params["norm"]["scale"] * 2
    model.save_pretrained(tmp_path / "b", params)
    assert furthest(load_model(tmp_path / "b").norm.scale[...], 2 * model.norm.scale[...]) == 0.0
    del params["norm"]
    with pytest.raises(BadArgument, match="norm/scale"):
        model.save_pretrained(tmp_path / "c", params)


def test_each_parameter_is_placed_by_path(llama):
    seen = {}

    def place(path, array):
        seen[path] = array.shape
        assert isinstance(array, np.ndarray)
        return jnp.asarray(array)

    model = load_model(llama[1], jnp.bfloat16, place=place)
    assert seen["layers/attention/k_proj/kernel"] == (2, 32, 16)
    assert seen["embed_tokens/embedding"] == (320, 32)
    assert len(seen) == 12
    assert model.embed_tokens.embedding.dtype == jnp.bfloat16


def test_a_base_model_without_prefix_and_a_duplicate_tied_head_are_read(tmp_path):
    theirs = save_random(CONFIGS["gpt2"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): array for name, array in weights.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    bare["lm_head.weight"] = bare["wte.weight"]
    save_file(bare, tmp_path / "model.safetensors")
    assert furthest(torch_logits(theirs, tokens()), logits(load_model(tmp_path), tokens())) <= 1e-4


def test_mismatched_weights_are_named(copied):
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.0.mlp.up_projection.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(DataError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.w.*; unexpected: .*Did you mean"):
        load_model(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, r"shape \[300, 32\].*received \[320, 32\]"),
        ({"intermediate_size": 60}, r"mlp\.\w+\.weight of shape"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"unexpected: model\.layers\.1\..* and 6 more"),
        ({"attention_bias": True}, r"missing: .*bias"),
    ],
)
def test_a_config_of_another_model_is_refused(changes, message, copied):
    _edit(copied, **changes)
    with pytest.raises(DataError, match=message):
        load_model(copied)


def test_invalid_folders_are_refused(copied, tmp_path):
    with pytest.raises(DataError, match="a model folder"):
        load_model(copied / "config.json")
    with pytest.raises(DataError, match="a model folder"):
        load_model("/no/such/folder")
    with pytest.raises(DataError, match=r"hub.*'someone/no-such-model'"):
        load_model("someone/no-such-model")
    with pytest.raises(BadArgument, match="a model for ViT"):
        ViT.from_pretrained(copied)
    with pytest.raises(BadArgument, match="a classifier for num_labels"):
        load_model(copied, num_labels=3)
    (copied / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="damaged"):
        load_model(copied)
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin.*Convert"):
        load_model(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        load_model(copied)
    with pytest.raises(DataError, match=r"Expected config\.json"):
        load_model(tmp_path)


def test_a_missing_shard_is_named(llama, tmp_path):
    llama[0].save_pretrained(tmp_path, max_shard_size="20KB")
    gone = min(tmp_path.glob("model-*.safetensors"))
    gone.unlink()
    with pytest.raises(DataError, match=f"{gone.name}.*Is the download complete"):
        load_model(tmp_path)


def test_a_changed_config_updates_the_original_one(llama, tmp_path):
    model = load_model(llama[1])
    smaller = Decoder(replace(model.config, num_hidden_layers=1), rngs=nnx.Rngs(0))
    smaller.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    source = json.loads((llama[1] / "config.json").read_text())
    assert written == {**source, "num_hidden_layers": 1}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 1
