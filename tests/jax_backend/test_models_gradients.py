"""Gradients of every architecture on a mesh with dp, fsdp and tp are those on one device.

On such a mesh XLA has computed wrong gradients without any message, of a matmul whose input was not constrained.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers as hf
from encoder_toys import relative
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax_family_toys import family_configs
from jax_model_toys import VOCABULARY, configs, vit_config

from trainformer.backends.jax.sharding import make_mesh
from trainformer.losses.jax.tokens import row_sums
from trainformer.models.jax import BertConfig
from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.reward import scored

ROWS, LENGTH, CLASSES = 16, 16, 4
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def mixtral():
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralConfig(**{**_SIZES, "vocab_size": VOCABULARY, **sizes})


def encoder(head, **options):
    return BertConfig(**_SIZES, max_position_embeddings=24, head=head, num_labels=CLASSES, **options)


def read(config):
    return family_of(config.model_type).read_config(config.to_dict())


CONFIGS = {
    "llama": lambda: read(configs()["llama"]),
    "llama-tied": lambda: read(configs()["llama_biased"]),
    "gpt2": lambda: read(configs()["gpt2"]),
    **{
        name: lambda name=name: read(family_configs()[name])
        for name in ("gemma2", "gpt_neox", "gpt_neox_serial", "phi3", "olmo2")
    },
    "mixtral": lambda: read(mixtral()),
    "classifier": lambda: encoder("sequence_classification"),
    "distilbert": lambda: encoder("sequence_classification", model_type="distilbert", type_vocab_size=0),
    "tokens": lambda: encoder("token_classification"),
    "reward": lambda: scored(read(configs()["llama"]), 0),
    "vit": lambda: read(vit_config(num_labels=CLASSES)),
}
# The masked language model and T5 have this test next to their other ones.
FAST = ("llama", "classifier", "reward")


def loss_of(name, model, batch):
    if name in ("classifier", "distilbert", "vit"):
        logits = model(batch["pixels"]) if name == "vit" else model(batch["ids"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"]))
    if name == "reward":
        rewards = model(batch["ids"], batch["last"]).reshape(-1, 2)
        return jnp.mean(-jax.nn.log_sigmoid(rewards[:, 0] - rewards[:, 1]))
    labels = batch["ids"] % CLASSES if name == "tokens" else batch["ids"]
    sums = row_sums(model.hidden_states(batch["ids"]), labels, model.head, shift=name != "tokens").total()
    return sums.sum / sums.weight


def inputs(name, config):
    random = np.random.default_rng(1)
    ids = random.integers(4, getattr(config, "vocab_size", VOCABULARY), (ROWS, LENGTH)).astype(np.int32)
    found = {"ids": ids, "classes": ids[:, 0] % CLASSES, "last": np.linspace(LENGTH - 1, 3, ROWS).astype(np.int32)}
    pixels = random.normal(size=(ROWS, 16, 16, 3)).astype(np.float32)
    return {"pixels": pixels, "classes": found["classes"]} if name == "vit" else found


def spec_of(model, path, shape, mesh):
    """By the model's partition rules, without axes that do not divide."""
    rule = next(spec for pattern, spec in model.partition_rules if re.search(pattern, path))
    padded = (*[None] * (len(shape) - len(rule)), *rule) if rule else ()
    pairs = zip(padded, shape, strict=False)
    return PartitionSpec(
        *(axis if axis and not size % mesh.shape.get(axis, size + 1) else None for axis, size in pairs)
    )


def gradients(name, config, dims):
    """The loss and the gradients by path. Weights are random, norms near one, and no bias is zero."""
    mesh = make_mesh(dims, jax.devices()[: int(np.prod(dims))])
    graph, state = nnx.split(nnx.eval_shape(lambda: family_of(config.model_type).build(config, rngs=nnx.Rngs(0))))
    model, filled = nnx.merge(graph, state), []
    for number, (parts, variable) in enumerate(nnx.to_flat_state(state)):
        path = "/".join(map(str, parts))
        values = np.random.default_rng(number).normal(0.0, 0.2, variable.shape).astype(np.float32)
        values += 1.0 if "norm" in path and path.endswith("scale") else 0.0
        sharding = NamedSharding(mesh, spec_of(model, path, values.shape, mesh))
        filled.append((parts, variable.replace(jax.device_put(values, sharding))))
    params = nnx.from_flat_state(filled)
    batch = jax.device_put(inputs(name, config), NamedSharding(mesh, PartitionSpec(("dp", "fsdp"))))
    with jax.set_mesh(mesh):
        compute = jax.value_and_grad(lambda params: loss_of(name, nnx.merge(graph, params), batch))
        loss, found = jax.jit(compute)(params)
    flat = {"/".join(map(str, parts)): np.asarray(value[...]) for parts, value in nnx.to_flat_state(found)}
    return float(loss), flat


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CONFIGS]
)
def test_gradients_do_not_depend_on_the_mesh(name):
    config = CONFIGS[name]()
    loss, wanted = gradients(name, config, (1, 1, 1, 1))
    sharded, found = gradients(name, config, (2, 2, 2, 1))
    assert sharded == pytest.approx(loss, rel=1e-5)
    # The gradient of a bias of keys is zero but for rounding.
    known = {path: array for path, array in wanted.items() if np.abs(array).max() > 1e-6}
    assert len(known) >= len(wanted) - 1
    assert all(relative(found[path], array) <= 1e-4 for path, array in known.items())
