"""T5 and mT5 against transformers: logits, gradients, folders, generation, meshes."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf
from encoder_toys import batch, gradients, relative, saved, t5, torch_gradients, torch_loss
from jax_model_toys import furthest
from peft import PeftModel
from safetensors.numpy import load_file
from test_models_sharded import mesh_of, placer
from transformers.models.t5.modeling_t5 import T5Attention

from trainformer.core.errors import BadArgument
from trainformer.models.jax import T5, T5Config, apply_lora, load_model, merge_lora, model_from_config, save_lora
from trainformer.models.jax.t5 import relative_buckets

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VERSIONS = {
    "t5": {},
    "t5 1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {},
}


def made(version, untied=False):
    model = t5(version.split()[0], **VERSIONS[version])
    if untied:  # as in the files of T5 1.1: transformers ties them only if they are equal
        torch.manual_seed(1)
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn_like(model.lm_head.weight))
        model.config.tie_word_embeddings = False
    return model


def inputs_and_labels():
    inputs, rng = batch(), np.random.default_rng(1)
    target = rng.integers(4, 64, (4, 7))
    target[1, 5:] = target[3, 2:] = -100
    shifted = np.concatenate([np.zeros((4, 1), int), np.maximum(target[:, :-1], 0)], axis=1)
    return {**inputs, "decoder_input_ids": shifted.astype(np.int32)}, target


@pytest.mark.parametrize(("version", "untied"), [("t5", False), ("t5 1.1", True), ("mt5", False)])
def test_logits_gradients_and_folders_equal_transformers(version, untied, tmp_path):
    theirs = saved(made(version, untied), tmp_path / "a")
    ours = load_model(tmp_path / "a")
    assert ours.config.tie_word_embeddings != untied
    assert ours.config.scale_outputs == (version == "t5")
    inputs, labels = inputs_and_labels()
    assert np.array_equal(ours.shift_right(jnp.asarray(labels)), inputs["decoder_input_ids"])
    wanted, their_loss = torch_loss(theirs, inputs, labels)
    logits, loss, grads = gradients(ours, inputs, labels)
    assert relative(logits, wanted.detach().numpy()) <= 1e-5
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    expected = torch_gradients(theirs, their_loss, ours.config)
    assert expected.keys() == grads.keys()
    assert all(relative(grads[path], gradient) <= 1e-4 for path, gradient in expected.items())
    ours.save_pretrained(tmp_path / "b")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in "ab"]
    assert configs[0] == configs[1] or untied
    opened = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "b").eval()
    assert torch.equal(torch_loss(opened, inputs, labels)[0], wanted)


@pytest.mark.parametrize("gated", [False, True])
def test_a_new_model_opens_in_transformers(gated, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = {"gated": True, "hidden_act": "gelu_new", "tie_word_embeddings": False, "scale_outputs": False}
    config = T5Config(vocab_size=64, head_dim=8, **sizes, **(kind if gated else {}))
    model = model_from_config(config, seed=1)
    model.save_pretrained(tmp_path)
    inputs, labels = inputs_and_labels()
    opened = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    wanted = torch_loss(opened, inputs, labels)[0].detach().numpy()
    assert relative(np.asarray(jax.jit(lambda: model(**inputs))()), wanted) <= 1e-5
    assert load_model(tmp_path).config.gated == gated


def test_logits_and_gradients_do_not_depend_on_the_mesh(tmp_path):
    saved(made("t5"), tmp_path)
    inputs, labels = inputs_and_labels()
    logits, loss, grads = gradients(load_model(tmp_path), inputs, labels)
    mesh = mesh_of(2, 2, 2, 1)
    with jax.set_mesh(mesh):
        ours = load_model(tmp_path, place=placer(T5, mesh))
        ours.configure(remat=jax.checkpoint_policies.nothing_saveable)
        got = gradients(ours, inputs, labels)
    assert relative(got[0], logits) <= 1e-5
    assert got[1] == pytest.approx(loss, rel=1e-6)
    assert all(relative(got[2][path], grads[path]) <= 1e-4 for path in grads)
    kernel = ours.decoder.layers.cross_attention.k_proj.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 16, 12)}


def test_generation_equals_transformers_and_stops(tmp_path):
    # transformers cannot generate with a decoder that is deeper than the encoder.
    theirs, inputs = t5("mt5", num_decoder_layers=2), batch()
    given = {name: torch.as_tensor(value).long() for name, value in inputs.items()}
    free = theirs.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1)[:, 1:]
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = int(free[0, 2])
    ended = theirs.generate(**given, max_new_tokens=6, do_sample=False, num_beams=1)[:, 1:].numpy()
    assert (ended[0, 3:] == 0).all()
    saved(theirs, tmp_path / "ended")
    ours = load_model(tmp_path / "ended")
    got = np.asarray(ours.generate(inputs["input_ids"], 6, inputs["attention_mask"]))
    assert np.array_equal(got[:, : ended.shape[1]], ended)
    with pytest.raises(BadArgument, match="max_new_tokens"):
        ours.generate(inputs["input_ids"], 0)


def test_lora_of_both_stacks_opens_in_peft(tmp_path):
    theirs = saved(made("t5"), tmp_path / "base")
    model = load_model(tmp_path / "base")
    apply_lora(model, 2, 4)
    attentions = model.encoder.layers.attention, model.decoder.layers.attention, model.decoder.layers.cross_attention
    for number, part in enumerate(attentions):
        part.q_proj.lora_b[...] = 0.3 * jax.random.normal(jax.random.key(number), part.q_proj.lora_b[...].shape)
    save_lora(model, tmp_path / "adapter")
    inputs, labels = inputs_and_labels()
    opened = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    wanted = torch_loss(opened, inputs, labels)[0].detach().numpy()
    merged = merge_lora(model)
    assert relative(np.asarray(jax.jit(lambda: merged(**inputs))()), wanted) <= 1e-5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 10)])
def test_buckets_equal_transformers(bidirectional, buckets, longest):
    distance = torch.arange(200)[None] - torch.arange(200)[:, None]
    wanted = T5Attention._relative_position_bucket(distance, bidirectional, buckets, longest)
    assert furthest(relative_buckets(200, bidirectional, buckets, longest), wanted.numpy()) == 0


def test_wrong_inputs_and_configs_are_refused():
    with pytest.raises(BadArgument, match="even number"):
        T5Config(**SIZES, relative_attention_num_buckets=5)
    with pytest.raises(BadArgument, match="is_encoder_decoder=True"):
        model_from_config({**hf.T5Config().to_dict(), "is_encoder_decoder": False})
    model = model_from_config(T5Config(**SIZES, head_dim=4))
    with pytest.raises(BadArgument, match="decoder_input_ids"):
        model(np.ones((1, 4), np.int32))
