"""LoRA against peft: the same logits from the same adapter, in both directions."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from jax_model_toys import configs, furthest, logits, save_random, tokens, torch_logits, vit_config
from safetensors.numpy import load_file, save_file

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import apply_lora, load_lora, load_model, merge_lora, save_lora
from trainformer.models.jax.huggingface import flat_params


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save_random(vit_config() if name == "vit" else configs()[name], folder)
            made[name] = folder
        return made[name]

    return get


def inputs(name):
    return np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32) if name == "vit" else tokens()


def of_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    vit = json.loads((folder / "config.json").read_text())["model_type"] == "vit"
    return (AutoModelForImageClassification if vit else AutoModelForCausalLM).from_pretrained(folder).eval()


def randomize(model):
    """Make B non-zero, as after training."""
    for number, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        if path[-1] == "lora_b":
            noise = 0.3 * jax.random.normal(jax.random.key(number), variable.shape)
            nnx.update(model, nnx.from_flat_state([(path, variable.replace(noise))]))


TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "qwen2": "all-linear",
    "gpt2": ["c_attn", "mlp.c_proj"],
    "vit": ["q_proj", "mlp.fc1"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_our_adapters_open_in_peft(name, folders, tmp_path):
    model, given = load_model(folders(name)), inputs(name)
    plain = logits(model, given)
    apply_lora(model, r=4, alpha=12, targets=TARGETS[name])
    assert furthest(plain, logits(model, given)) == 0.0
    randomize(model)
    got = logits(model, given)
    save_lora(model, tmp_path, base_model=str(folders(name)))
    theirs = peft.PeftModel.from_pretrained(of_transformers(folders(name)), tmp_path).eval()
    assert furthest(plain, got) > 0.05
    assert furthest(torch_logits(theirs, given), got) <= 1e-4
    again = load_model(folders(name))
    load_lora(again, tmp_path)
    assert furthest(got, logits(again, given)) == 0.0
    assert again.lora == model.lora
    assert furthest(got, logits(merge_lora(again), given)) <= 1e-4
    assert not any("lora" in path for path in flat_params(again))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"target_modules": ["k_proj", "down_proj", "lm_head"], "lora_alpha": 6}),
        ("gpt2", {"target_modules": ["c_attn"], "use_rslora": True, "fan_in_fan_out": True}),
        ("vit", {"target_modules": ["v_proj"], "modules_to_save": ["classifier"]}),
    ],
)
def test_peft_adapters_open_here(name, options, folders, tmp_path):
    theirs = peft.get_peft_model(of_transformers(folders(name)), peft.LoraConfig(r=4, **options)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path / "a")
    model, given = load_model(folders(name)), inputs(name)
    plain, wanted = logits(model, given), torch_logits(theirs, given)
    frozen = load_lora(model, tmp_path / "a")
    assert furthest(plain, wanted) > 0.05
    assert furthest(wanted, logits(model, given)) <= 1e-4
    count = sum(array.size for path, array in flat_params(model).items() if not re.search(frozen, path))
    assert count == sum(parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad)
    save_lora(model, tmp_path / "b")
    before, after = (load_file(tmp_path / side / "adapter_model.safetensors") for side in "ab")
    assert {key for key in before if "base_layer" not in key} == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in after)


def test_gradients_match_peft(folders, tmp_path):
    model = load_model(folders("llama"))
    apply_lora(model, r=4, alpha=12, targets=["o_proj", "gate_proj"])
    randomize(model)
    save_lora(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(of_transformers(folders("llama")), tmp_path, is_trainable=True).eval()
    ids = tokens()
    theirs(torch.as_tensor(ids)).logits.square().mean().backward()
    graph, state = nnx.split(model)
    gradients = jax.jit(jax.grad(lambda state: jnp.mean(nnx.merge(graph, state)(jnp.asarray(ids)) ** 2)))(state)
    layer = theirs.base_model.model.model.layers[1].self_attn.o_proj
    ours = gradients["layers"]["attention"]["o_proj"]
    assert furthest(layer.lora_A["default"].weight.grad.T, ours["lora_a"][...][1]) <= 1e-4
    assert furthest(layer.lora_B["default"].weight.grad.T, ours["lora_b"][...][1]) <= 1e-4
    assert float(jnp.abs(ours["lora_a"][...]).max()) > 1e-2


def test_only_lora_and_modules_to_save_are_trained(folders):
    model = load_model(folders("vit"), num_labels=3)
    frozen = apply_lora(model, r=2, targets=r"layers/attention/(q|v)_proj", modules_to_save=["classifier"])
    trained = sorted(path for path in flat_params(model) if not re.search(frozen, path))
    attention = [f"layers/attention/{name}_proj/lora_{side}" for name in "qv" for side in "ab"]
    assert trained == ["classifier/bias", "classifier/kernel", *attention]
    assert all(re.fullmatch(frozen, path) for path in flat_params(model) if path not in trained)
    assert flat_params(model)["layers/attention/q_proj/lora_a"].shape == (2, 32, 2)


def test_the_default_targets_are_queries_and_values_and_the_seed_decides_the_weights(folders):
    made = []
    for name, seed in (("llama", 0), ("llama", 0), ("llama", 1), ("gpt2", 0)):
        model = load_model(folders(name))
        apply_lora(model, seed=seed)
        made.append({path: array for path, array in flat_params(model).items() if path.endswith("lora_a")})
    assert sorted(made[0]) == ["layers/attention/q_proj/lora_a", "layers/attention/v_proj/lora_a"]
    assert sorted(made[3]) == ["layers/attention/qkv_proj/lora_a"]
    assert furthest(made[0], made[1]) == 0.0
    assert furthest(made[0], made[2]) > 0.01
    query, value = made[0].values()
    assert furthest(query, value) > 0.01
    assert furthest(query[0], query[1]) > 0.01


def test_dropout_applies_to_the_input_of_a_in_training_only(folders):
    model, ids = load_model(folders("llama")), jnp.asarray(tokens())
    apply_lora(model, dropout=0.5)
    run = jax.jit(lambda key: model(ids, deterministic=False, key=key))
    assert furthest(run(jax.random.key(0)), run(jax.random.key(1))) == 0.0  # B is still zero
    randomize(model)
    run = jax.jit(lambda key: model(ids, deterministic=False, key=key))
    assert furthest(run(jax.random.key(0)), run(jax.random.key(1))) > 0.05
    assert furthest(run(None), logits(model, ids)) <= 1e-5


def test_invalid_arguments_are_refused(folders, tmp_path):
    model = load_model(folders("gpt2"))
    for options, message in (
        ({"targets": ["c_atn"]}, "Did you mean 'c_attn'"),
        ({"targets": ["q_proj"]}, "It has|Did you mean"),
        ({"targets": []}, "at least one layer"),
        ({"targets": ["lm_head"]}, "linear layers of this Decoder"),  # tied: there is no such layer
        ({"r": 0}, "r to be a positive integer"),
        ({"dropout": 1.0}, "below 1"),
        ({"modules_to_save": ["classifier"]}, "modules_to_save to name"),
    ):
        with pytest.raises(BadArgument, match=message):
            apply_lora(model, **options)
    with pytest.raises(BadArgument, match="Call apply_lora first"):
        save_lora(model, tmp_path)
    assert not any("lora" in path for path in flat_params(model))
    apply_lora(model)
    with pytest.raises(BadArgument, match="Call merge_lora first"):
        apply_lora(model)
    with pytest.raises(BadArgument, match="merge_lora first for a plain model"):
        model.save_pretrained(tmp_path)


def test_mismatched_adapters_are_refused(folders, tmp_path):
    model = load_model(folders("llama"))
    apply_lora(model, r=2)
    save_lora(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    plain = load_model(folders("llama"))
    for changes, message in (
        ({"use_dora": True}, "without use_dora"),
        ({"rank_pattern": {"q_proj": 3}}, "without rank_pattern"),
        ({"peft_type": "IA3"}, "a LoRA adapter"),
        ({"bias": "all"}, "without trained biases"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(DataError, match=message):
            load_lora(plain, tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="belong to no linear layer"):
        load_lora(load_model(folders("gpt2")), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: array for name, array in weights.items() if name != first}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match=f"every layer or on none.*{re.escape(first)}"):
        load_lora(plain, tmp_path)
    save_file({name: array[..., :5] for name, array in weights.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(DataError, match=r"kernel of shape \[2, 32, 32\]"):
        load_lora(plain, tmp_path)
