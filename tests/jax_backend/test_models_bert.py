"""BERT, RoBERTa and DistilBERT against transformers: logits, gradients, folders, heads, meshes."""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest
import transformers as hf
from encoder_toys import batch, encoder, gradients, relative, saved, torch_gradients, torch_loss
from flax import nnx
from jax_model_toys import furthest, logits
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from test_models_sharded import mesh_of, placer

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import (
    Bert,
    BertConfig,
    apply_lora,
    load_model,
    merge_lora,
    model_from_config,
    save_lora,
)

NAMES = [
    *("bert MaskedLM", "bert SequenceClassification", "bert TokenClassification"),
    *("roberta MaskedLM", "roberta SequenceClassification"),
    *("distilbert MaskedLM", "distilbert SequenceClassification"),
]


MASK = batch()["attention_mask"]
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def inputs_and_labels(name, classes):
    """With token types where the model has them; labels at a few tokens, or of the rows."""
    inputs = batch()
    if name.startswith("bert"):
        inputs["token_type_ids"] = (np.arange(12) % 3 * np.ones((4, 1))).astype(np.int32)
    rng = np.random.default_rng(1)
    if "Sequence" in name:
        return inputs, rng.integers(0, classes, 4)
    labels = rng.integers(0, classes, (4, 12))
    return inputs, np.where((inputs["attention_mask"] == 1) & (rng.random((4, 12)) < 0.4), labels, -100)


@pytest.mark.parametrize("name", NAMES)
def test_logits_gradients_and_folders_equal_transformers(name, tmp_path):
    names = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "problem_type": "single_label_classification"}
    classes = 64 if "MaskedLM" in name else 3
    theirs = saved(encoder(name, **({} if "MaskedLM" in name else names)), tmp_path / "a")
    ours = load_model(tmp_path / "a")
    inputs, labels = inputs_and_labels(name, classes)
    wanted, their_loss = torch_loss(theirs, inputs, labels)
    found, loss, grads = gradients(ours, inputs, labels)
    real = slice(None) if "Sequence" in name else inputs["attention_mask"] == 1
    assert relative(found[real], wanted.detach().numpy()[real]) <= 1e-5
    assert loss == pytest.approx(their_loss.item(), rel=1e-5)
    expected = torch_gradients(theirs, their_loss, ours.config)
    assert expected.keys() == grads.keys()
    for path, gradient in expected.items():
        if not path.endswith("k_proj/bias"):  # zero but for rounding: a softmax does not see it
            assert relative(grads[path], gradient) <= 1e-4, path
    ours.save_pretrained(tmp_path / "b")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in "ab")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in "ab"]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_a_new_classifier_opens_in_transformers(kind, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {
        "bert": {},
        "roberta": {"position_offset": 2, "type_vocab_size": 1},
        "distilbert": {"type_vocab_size": 0},
    }
    head = {"head": "sequence_classification", "num_labels": 3, "label_names": ("a", "b", "c")}
    config = BertConfig(vocab_size=64, model_type=kind, initializer_range=0.3, **sizes, **head, **options[kind])
    model = model_from_config(config, seed=2)
    model.save_pretrained(tmp_path)
    opened = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert opened.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert opened.config.max_position_embeddings == 512 + config.position_offset
    wanted, _ = torch_loss(opened, batch(), np.zeros(4, int))
    assert relative(logits(model, batch()["input_ids"], attention_mask=MASK), wanted.detach().numpy()) <= 1e-5
    assert load_model(tmp_path).config.label_names == ("a", "b", "c")


def test_another_head_begins_with_new_weights_and_says_so(tmp_path, caplog):
    theirs = saved(encoder("bert MaskedLM"), tmp_path / "lm")
    with caplog.at_level(logging.WARNING, "trainformer"):
        model = load_model(tmp_path / "lm", head="sequence_classification", num_labels=4)
    assert "has no bert.pooler.dense.weight" in caplog.text
    assert model.output.classifier.kernel.shape == (32, 4)
    kernel = theirs.bert.encoder.layer[1].output.dense.weight.detach().numpy().T
    assert np.array_equal(model.layers.mlp.down_proj.kernel[...][1], kernel)
    model.save_pretrained(tmp_path / "classes")
    assert type(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "classes")).__name__ == (
        "BertForSequenceClassification"
    )
    # Another number of classes keeps the rest; the base model without a prefix needs a head.
    other = load_model(tmp_path / "classes", num_labels=7)
    assert furthest(other.output.pooler.kernel[...], model.output.pooler.kernel[...]) == 0.0
    theirs.bert.save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match=r"missing: cls\.predictions"):
        load_model(tmp_path / "base")
    base = load_model(tmp_path / "base", head="token_classification", num_labels=2)
    assert base.output.classifier.kernel.shape == (32, 2)
    assert furthest(base.layers.mlp.down_proj.kernel[...], model.layers.mlp.down_proj.kernel[...]) == 0.0


def test_weights_of_older_files_are_found(tmp_path):
    saved(encoder("bert MaskedLM"), tmp_path)
    plain = load_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, array in weights.items():
        end = ".".join(name.split(".")[-2:])
        renamed[name.replace(end, old.get(end, end))] = array
    renamed["cls.predictions.decoder.weight"] = renamed["bert.embeddings.word_embeddings.weight"].copy()
    renamed["cls.seq_relationship.weight"] = np.ones((2, 32), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    assert furthest(nnx.state(plain), nnx.state(load_model(tmp_path))) == 0.0


def test_logits_and_gradients_do_not_depend_on_the_mesh(tmp_path):
    saved(encoder("bert MaskedLM"), tmp_path)
    inputs, labels = inputs_and_labels("bert MaskedLM", 64)
    plain, loss, grads = gradients(load_model(tmp_path), inputs, labels)
    mesh = mesh_of(2, 2, 2, 1)
    with jax.set_mesh(mesh):
        ours = load_model(tmp_path, place=placer(Bert, mesh))
        ours.configure(remat=jax.checkpoint_policies.nothing_saveable)
        got = gradients(ours, inputs, labels)
    assert relative(got[0], plain) <= 1e-5
    assert got[1] == pytest.approx(loss, rel=1e-6)
    assert all(relative(got[2][path], grads[path]) <= 1e-4 for path in grads if not path.endswith("k_proj/bias"))
    kernel = ours.layers.attention.q_proj.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 16, 16)}


def test_packed_texts_do_not_see_each_other(tmp_path):
    for name in ("bert MaskedLM", "roberta MaskedLM"):
        saved(encoder(name), tmp_path)
        model, ids = load_model(tmp_path), batch(rows=1)["input_ids"]
        apart = [logits(model, part) for part in (ids[:, :6], ids[:, 6:])]
        together = logits(model, ids, segment_ids=np.array([[1] * 6 + [2] * 6]))
        assert relative(together, np.concatenate(apart, axis=1)) <= 1e-5


def test_dropout_needs_a_key_and_changes_everything(tmp_path):
    saved(encoder("bert SequenceClassification"), tmp_path)
    model, ids = load_model(tmp_path), batch()["input_ids"]
    keys = [jax.random.key(number) for number in (0, 0, 1)]
    first, again, other = (np.asarray(model(ids, deterministic=False, key=key)) for key in keys)
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    assert np.array_equal(np.asarray(model(ids)), np.asarray(model(ids, key=keys[0])))


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_lora_opens_in_peft(kind, tmp_path):
    theirs = saved(encoder(f"{kind} SequenceClassification", num_labels=3), tmp_path / "base")
    model = load_model(tmp_path / "base")
    frozen = apply_lora(model, 2, 4, modules_to_save=("output/pooler", "output/classifier"))
    assert "classifier" in frozen
    for layer in (model.layers.attention.q_proj, model.layers.attention.v_proj):
        layer.lora_b[...] = 0.3 * jax.random.normal(jax.random.key(5), layer.lora_b[...].shape)
    model.output.classifier.kernel[...] = 2 * model.output.classifier.kernel[...]
    save_lora(model, tmp_path / "adapter")
    opened = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    wanted = torch_loss(opened, batch(), np.zeros(4, int))[0].detach().numpy()
    assert relative(logits(merge_lora(model), batch()["input_ids"], attention_mask=MASK), wanted) <= 1e-5


def test_wrong_inputs_and_configs_are_refused(tmp_path):
    saved(encoder("distilbert MaskedLM"), tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(BadArgument, match="at most 20 tokens"):
        model(np.ones((1, 21), np.int32))
    with pytest.raises(BadArgument, match="no token types"):
        model(np.ones((1, 4), np.int32), token_type_ids=np.ones((1, 4), np.int32))
    with pytest.raises(BadArgument, match="a classifier for num_labels"):
        load_model(tmp_path, num_labels=3)
    with pytest.raises(BadArgument, match="head to be one of"):
        load_model(tmp_path, head="regression")
    with pytest.raises(BadArgument, match="3 label_names"):
        model_from_config(BertConfig(**SIZES, head="token_classification", num_labels=3, label_names=("a", "b")))
    with pytest.raises(BadArgument, match="is_decoder=False"):
        model_from_config({**hf.BertConfig(is_decoder=True).to_dict()})
