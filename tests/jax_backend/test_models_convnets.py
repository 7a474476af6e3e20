"""ResNet and ConvNeXt against transformers: outputs, a training step, folders, meshes, and the trainer."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from jax_model_toys import furthest, logits, torch_logits
from safetensors.numpy import load_file
from text_trainer_toys import QUIET, devices
from transformers import AutoModelForImageClassification

from trainformer.core.errors import BadArgument
from trainformer.jax import ImageClassificationTrainer, TrainingArguments
from trainformer.models.jax import ResNetConfig, load_model
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import flat_params, flat_weights

SIZES = {"hidden_sizes": [16, 32], "depths": [2, 1], "num_labels": 5}
CONFIGS = {
    "resnet": transformers.ResNetConfig(**SIZES, embedding_size=8),
    "basic": transformers.ResNetConfig(
        **SIZES, embedding_size=16, layer_type="basic", downsample_in_first_stage=True, hidden_act="gelu"
    ),
    "convnext": transformers.ConvNextConfig(**SIZES, num_stages=2, patch_size=2, layer_scale_init_value=0.5),
}
IMAGES = np.random.default_rng(0).normal(size=(8, 3, 32, 32)).astype(np.float32)
LABELS = np.arange(8) % 5


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    """A model of transformers with random weights and statistics, and its folder."""
    torch.manual_seed(0)
    theirs = AutoModelForImageClassification.from_config(CONFIGS[request.param]).eval()
    with torch.no_grad():
        for name, weight in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "running_var" in name:
                weight.uniform_(0.5, 2.0)
            elif "num_batches" in name:
                weight.fill_(12)
            else:
                weight.normal_(0.0, 0.2).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


def gradients(model, images, labels, valid=None):
    """The gradient of the summed loss in training mode by path, and the statistics afterwards."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest = (state.to_pure_dict() for state in states)
    has_statistics = model.config.model_type == "resnet"

    def loss(params, rest, images, labels, valid):
        merged = nnx.merge(graph, params, rest)
        options = {"valid": valid} if has_statistics else {}
        rows = jax.nn.log_softmax(merged(images, deterministic=False, **options))
        picked = jnp.take_along_axis(rows, labels[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(valid, picked, 0.0)), nnx.state(merged, nnx.BatchStat).to_pure_dict()

    valid = np.ones(len(labels), bool) if valid is None else valid
    grads, statistics = jax.jit(jax.grad(loss, has_aux=True))(params, rest, images, labels, valid)
    return nnx.merge(graph, grads, rest), statistics


def test_outputs_and_a_training_step_match_transformers(saved):
    theirs, folder = saved
    ours = load_model(folder)
    wanted = torch_logits(theirs, IMAGES)
    assert np.abs(wanted).max() > 0.3
    assert furthest(wanted, logits(ours, IMAGES)) <= 1e-4
    model = AutoModelForImageClassification.from_pretrained(folder).train()
    torch.nn.functional.cross_entropy(
        model(torch.tensor(IMAGES)).logits, torch.tensor(LABELS), reduction="sum"
    ).backward()
    table = {weight.path: weight for weight in family_of(ours.config.model_type).weights(ours.config)}
    grads, statistics = gradients(ours, IMAGES, LABELS)
    named = dict(model.named_parameters())
    for path, grad in flat_params(grads).items():
        theirs_grad = named[table[path].name].grad.numpy()
        np.testing.assert_allclose(table[path].to_hf(np.asarray(grad)), theirs_grad, rtol=1e-3, atol=2e-3, err_msg=path)
    nnx.update(ours, statistics)
    buffers = dict(model.named_buffers())
    for path in flat_weights(ours).keys() - flat_params(ours).keys():
        found = flat_weights(ours)[path]
        np.testing.assert_allclose(found, buffers[table[path].name].numpy(), rtol=1e-4, atol=1e-5, err_msg=path)


def test_a_round_trip_is_bitwise_and_opens_in_transformers(saved, tmp_path):
    theirs, folder = saved
    load_model(folder).save_pretrained(tmp_path)
    before, after = (load_file(side / "model.safetensors") for side in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    opened = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert furthest(torch_logits(theirs, IMAGES), torch_logits(opened, IMAGES)) == 0.0
    assert logits(load_model(folder, num_labels=7), IMAGES).shape == (8, 7)


def test_padding_rows_and_remat_change_nothing(saved):
    _, folder = saved
    wanted = gradients(load_model(folder), IMAGES[:6], LABELS[:6])
    model = load_model(folder)
    model.configure(remat=jax.checkpoint_policies.nothing_saveable)
    found = gradients(model, IMAGES, LABELS, np.arange(8) < 6)
    for ours, expected in zip(found, wanted, strict=True):
        ours, expected = (
            jax.tree.leaves(nnx.state(side) if isinstance(side, nnx.Module) else side) for side in (ours, expected)
        )
        for a, b in zip(ours, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def trainer_of(model, mesh, rows=23, **fields):
    images = np.random.default_rng(1).normal(size=(rows, 32, 32, 3)).astype(np.float32)
    data = {"image": images, "label": np.arange(rows) % 5}
    options = {
        "total_batch_size": 16,
        "eval_batch_size": 16,
        "learning_rate": 1e-2,
        "num_train_epochs": 1,
        "optimizer": "sgd",
    }
    arguments = TrainingArguments(**{**QUIET, **options, "weight_decay": 0.0, **fields})
    return ImageClassificationTrainer(arguments, model, dataset_train=data, dataset_eval=data, mesh=devices(mesh))


def test_training_on_eight_devices_equals_one_and_saves_for_transformers(saved, tmp_path):
    _, folder = saved
    results = []
    for mesh in ((1, 1, 1, 1), (2, 2, 2, 1)):
        trainer = trainer_of(folder, mesh)
        trainer.train()
        results.append((flat_weights(trainer.model_state.model), trainer.eval()["eval_loss"]))
    (one, loss_one), (eight, loss_eight) = results
    assert loss_eight == pytest.approx(loss_one, rel=1e-4)
    for path, value in one.items():
        np.testing.assert_allclose(np.asarray(eight[path]), np.asarray(value), rtol=1e-3, atol=1e-4, err_msg=path)
    kernel = trainer.model_state.params["classifier"]["kernel"]
    assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {16}
    written = trainer.save_pretrained(tmp_path / "saved")
    opened = AutoModelForImageClassification.from_pretrained(written).eval()
    wanted = torch.tensor(torch_logits(opened, IMAGES)).softmax(-1).numpy()
    np.testing.assert_allclose(trainer.predict(IMAGES), wanted, atol=1e-4)


def test_invalid_images_and_configs_are_refused():
    with pytest.raises(BadArgument, match="depths with one positive number per stage"):
        ResNetConfig(depths=(1, 2))
    with pytest.raises(BadArgument, match="basic, bottleneck"):
        ResNetConfig(layer_type="wide")
    trainer = trainer_of(ResNetConfig(embedding_size=4, hidden_sizes=(8,), depths=(1,)), (1, 1, 1, 1), rows=16)
    assert trainer.model_state.model.config.num_labels == 5
    with pytest.raises(BadArgument, match=r"\(batch, height, width, 3\)"):
        trainer.model_state.model(np.zeros((1, 8, 8, 2)))
