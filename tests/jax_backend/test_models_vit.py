"""The Vision Transformer against transformers, in and out of its folders, and with a new head."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax_model_toys import furthest, logits, save_random, torch_logits, vit_config
from safetensors.numpy import load_file
from transformers import AutoModelForImageClassification, ViTModel

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import ViT, ViTConfig, load_model, model_from_config


def images(rows=2, channels=3):
    """Channels first, as in torch."""
    return np.random.default_rng(0).normal(size=(rows, channels, 16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    return save_random(vit_config(), folder), folder


def test_logits_match_transformers_in_both_layouts(saved):
    theirs, folder = saved
    model, pixels = load_model(folder), images()
    wanted = torch_logits(theirs, pixels)
    assert np.abs(wanted).max() > 0.3
    assert furthest(wanted, logits(model, pixels.transpose(0, 2, 3, 1))) <= 1e-4
    assert furthest(wanted, logits(model, pixels)) <= 1e-4


def test_without_bias_and_with_one_channel(tmp_path):
    theirs = save_random(vit_config(qkv_bias=False, num_channels=1, hidden_act="gelu_new"), tmp_path)
    assert furthest(torch_logits(theirs, images(channels=1)), logits(load_model(tmp_path), images(channels=1))) <= 1e-4


def test_a_round_trip_is_bitwise_and_opens_in_transformers(saved, tmp_path):
    theirs, folder = saved
    ViT.from_pretrained(folder).save_pretrained(tmp_path)
    before, after = (load_file(side / "model.safetensors") for side in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    opened = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert furthest(torch_logits(theirs, images()), torch_logits(opened, images())) == 0.0


def test_a_new_model_opens_in_transformers(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3, initializer_range=0.3)
    model = model_from_config(config, seed=1)
    model.save_pretrained(tmp_path)
    opened = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert opened.config.num_labels == 3
    assert furthest(torch_logits(opened, images()), logits(model, images())) <= 1e-4


def test_a_new_head_for_other_labels(saved, tmp_path):
    _, folder = saved
    old, new = load_model(folder), load_model(folder, num_labels=7)
    assert logits(new, images()).shape == (2, 7)
    assert furthest(old.layers.mlp.up_proj.kernel[...], new.layers.mlp.up_proj.kernel[...]) == 0.0
    new.save_pretrained(tmp_path)
    opened = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert (opened.config.num_labels, opened.config.id2label[6]) == (7, "LABEL_6")
    assert furthest(torch_logits(opened, images()), logits(new, images())) <= 1e-4
    same = load_model(folder, num_labels=5)
    assert furthest(same.classifier.kernel[...], old.classifier.kernel[...]) == 0.0


def test_a_base_model_needs_num_labels(saved, tmp_path):
    ViTModel.from_pretrained(saved[1]).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"missing: classifier\.weight"):
        load_model(tmp_path)
    model = load_model(tmp_path, num_labels=4)
    assert logits(model, images()).shape == (2, 4)
    assert furthest(model.patches.kernel[...], load_model(saved[1]).patches.kernel[...]) == 0.0


def test_mean_pooling_is_refused_by_transformers(saved, tmp_path):
    cls = load_model(saved[1])
    graph, _ = nnx.split(nnx.eval_shape(lambda: ViT(replace(cls.config, pooling="mean"), rngs=nnx.Rngs(0))))
    mean = nnx.merge(graph, nnx.state(cls))
    mean.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    assert again.config.pooling == "mean"
    states = jax.jit(again.hidden_states)(images())
    assert furthest(again.classifier(states[:, 1:].mean(1)), logits(mean, images())) <= 1e-5
    with pytest.raises(ValueError, match="trainformer_vit"):
        AutoModelForImageClassification.from_pretrained(tmp_path)


def test_invalid_images_and_configs_are_refused(saved):
    model = load_model(saved[1])
    with pytest.raises(BadArgument, match=r"\(batch, 16, 16, 3\), received \(2, 3, 8, 8\)"):
        model(images()[:, :, :8, :8])
    with pytest.raises(BadArgument, match="multiple of patch_size"):
        ViTConfig(image_size=30)
    with pytest.raises(BadArgument, match="one of cls, mean"):
        ViTConfig(pooling="max")
