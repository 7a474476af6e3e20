"""Every family of decoders against transformers: logits, gradients, meshes, folders and adapters.

All inputs of a family are rows of one batch (whole, padded, packed), so that it is compiled once per mesh.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax_family_toys import family_configs
from jax_model_toys import furthest, logits, pairs_of, tokens, torch_logits
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from trainformer.backends.jax.sharding import make_mesh
from trainformer.jax.text_trainer import TextTrainer
from trainformer.models.jax import apply_lora, load_model, merge_lora, save_lora
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import flat_params, flat_paths

CONFIGS = family_configs()
IDS = tokens(rows=4, length=12)
# Row 1 is padded on the left, row 2 on the right, row 3 has two texts.
MASK = np.ones((4, 12), np.int64)
MASK[1, :3] = MASK[2, 10:] = 0
SEGMENTS = MASK.copy()
SEGMENTS[3, 7:] = 2
POSITIONS = np.maximum(np.cumsum(MASK, 1) - 1, 0)
POSITIONS[3, 7:] -= 7
SUPERVISED = np.arange(12) % 3 != 0
# Computed on sharded sequences, too: windows, soft-caps, and positions that depend on the layer or the text.
MESHED = ("smollm3", "olmo3", "phi3", "gemma2")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pairs_of(CONFIGS, tmp_path_factory)


def of_transformers(model, config):
    """Loss, logits, and gradients by our paths. Each row by itself, since only texts without padding can be packed."""
    logits = []
    for row in range(4):
        inputs = {"input_ids": torch.as_tensor(IDS[row : row + 1]), "position_ids": torch.as_tensor(POSITIONS[[row]])}
        if row != 3:
            inputs["attention_mask"] = torch.as_tensor(MASK[[row]])
        logits.append(model(**inputs, use_cache=False).logits)
    logits = torch.cat(logits)
    chosen = torch.as_tensor(SUPERVISED[None] & (MASK == 1))
    loss = torch.nn.functional.cross_entropy(logits[chosen], torch.as_tensor(IDS)[chosen], reduction="mean")
    model.zero_grad()
    loss.backward()
    named = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    gradients = {}
    for weight in family_of(config.model_type).weights(config):
        count = config.num_hidden_layers if weight.stacked else 1
        names = [weight.name.format(number) for number in range(count)]
        arrays = [weight.from_hf(named[re.sub("^embed_out", "lm_head", name)]) for name in names]
        gradients[weight.path] = np.stack(arrays) if weight.stacked else arrays[0]
    return float(loss.detach()), logits.detach().numpy(), gradients


@partial(jax.jit, static_argnums=0)
def _loss_logits_gradients(graph, state, ids, mask, segments):
    def loss_of(state):
        logits = nnx.merge(graph, state)(ids, attention_mask=mask, segment_ids=segments)
        logs = jax.nn.log_softmax(logits)
        chosen = jnp.asarray(SUPERVISED) & (mask == 1)
        picked = jnp.take_along_axis(logs, ids[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(chosen, picked, 0.0)) / jnp.sum(chosen), logits

    (loss, logits), gradients = jax.value_and_grad(loss_of, has_aux=True)(state)
    return loss, logits, gradients


def of_ours(model, place=jnp.asarray):
    graph, state = nnx.split(model)
    loss, logits, gradients = _loss_logits_gradients(graph, state, place(IDS), place(MASK), place(SEGMENTS))
    return float(loss), np.asarray(logits), flat_paths(nnx.to_pure_dict(gradients))


def assert_close(wanted, got):
    """Loss, logits and gradients in float32, each relative to its largest value."""
    assert got[0] == pytest.approx(wanted[0], rel=3e-5)
    real = MASK == 1
    assert np.abs(wanted[1][real]).max() > 1.0
    assert furthest(wanted[1][real], got[1][real]) <= 3e-5 * np.abs(wanted[1]).max()
    assert wanted[2].keys() == got[2].keys()
    for path, gradient in wanted[2].items():
        largest = np.abs(gradient).max()
        assert largest > 0.0, path
        assert furthest(gradient, got[2][path]) <= 1e-4 * max(largest, 1e-2), path


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_match_transformers_on_one_device_and_on_a_mesh(name, pair):
    theirs, ours, folder = pair(name)
    wanted = of_transformers(theirs, ours.config)
    got = of_ours(ours)
    assert_close(wanted, got)
    mesh = make_mesh((1, 2, 2, 2), jax.devices())
    sharded = {}

    def place(path, array):
        spec = next(spec for rule, spec in ours.partition_rules if re.search(rule, path))
        assert len(spec) in (0, array.ndim - path.startswith("layers/")), path
        assert spec or re.search(r"norm/|(o|down)_proj/bias$", path), path
        sharded[path] = NamedSharding(mesh, PartitionSpec(*[None] * (array.ndim - len(spec)), *spec))
        return jax.device_put(array, sharded[path])

    with jax.set_mesh(mesh):
        model = load_model(folder, place=place)
        assert sharded.keys() == flat_params(ours).keys()
        if name in MESHED:
            data = NamedSharding(mesh, PartitionSpec(("dp", "fsdp"), "sp"))
            assert_close(got, of_ours(model, lambda array: jax.device_put(array, data)))


@pytest.mark.slow
def test_layers_of_different_kinds_can_be_recomputed_and_unrolled(pair):
    _, ours, folder = pair("gemma3")
    model = load_model(folder)
    model.configure(unroll=2, remat=jax.checkpoint_policies.nothing_saveable)
    assert_close(of_ours(ours), of_ours(model))


def test_padding_does_not_make_a_text_long(pair):
    """Phi-3 has other frequencies beyond 8 tokens; 7 of these 12 are text."""
    _, ours, _ = pair("phi3")
    assert ours.needs_attention_mask
    assert not pair("gemma")[1].needs_attention_mask
    trainer = object.__new__(TextTrainer)
    trainer._chunks = lambda shape: 1

    @jax.jit
    def loss(ids, mask):
        batch = {"input_ids": ids, "labels": jnp.where(mask == 1, ids, -100), "attention_mask": mask}
        return trainer.token_sums(ours, batch).loss

    real = np.arange(12)[None] < 7
    padded = loss(IDS[:1], real.astype(int))
    assert furthest(padded, loss(IDS[:1, :7], np.ones((1, 7), int))) <= 1e-4


def test_gemma_in_bf16_is_as_accurate_as_in_transformers(pair):
    theirs, _, folder = pair("gemma2")
    exact = torch_logits(theirs, IDS)
    wanted = torch_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), IDS)
    got = logits(load_model(folder, jnp.bfloat16), IDS)
    assert got.dtype == jnp.bfloat16
    assert furthest(exact, got) <= 2 * furthest(exact, wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_are_read_and_written(name, pair, tmp_path):
    theirs, ours, folder = pair(name)
    ours.save_pretrained(tmp_path / "same")
    before, after = (json.loads((side / "config.json").read_text()) for side in (folder, tmp_path / "same"))
    assert before == after
    before, after = (load_file(side / "model.safetensors") for side in (folder, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    # Without the original config.json every field that matters is written.
    bare = load_model(folder)
    bare.config = replace(ours.config, source="")
    bare.save_pretrained(tmp_path / "new")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert type(opened) is type(theirs)
    assert furthest(torch_logits(theirs, IDS), torch_logits(opened, IDS)) == 0.0
    again = load_model(tmp_path / "new").config
    assert replace(again, source="", head_dim=None) == replace(bare.config, head_dim=None)
    assert again.head_width == ours.config.head_width


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_open_in_peft(name, pair, tmp_path):
    theirs, _, folder = pair(name)
    model = load_model(folder)
    apply_lora(model, r=2, alpha=6, targets="all-linear")
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    noise = np.random.default_rng(0)
    fill = {path: 0.3 * noise.normal(size=leaf.shape) for path, leaf in flat_params(model).items() if "lora_b" in path}
    for path, array in fill.items():
        *parents, last = path.split("/")
        place = params
        for parent in parents:
            place = place[parent]
        place[last] = jnp.asarray(array, jnp.float32)
    nnx.update(model, params)
    save_lora(model, tmp_path / "adapter", base_model=str(folder))
    merge_lora(model).save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    wanted = torch_logits(adapted, IDS)
    assert len(fill) >= 4
    assert furthest(wanted, torch_logits(theirs, IDS)) > 0.05
    assert furthest(wanted, torch_logits(merged, IDS)) <= 2e-5 * np.abs(wanted).max()
