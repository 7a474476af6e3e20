"""fp8 matmuls against torchao's, and runs that use them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import furthest
from jax_toys import TokenTrainer, arguments, llama, losses, mesh_on, mlp_trainer, texts
from text_trainer_toys import make_folder, pairs, trainer_of
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from trainformer.core.errors import BadArgument
from trainformer.jax import SFTConfig, SFTTrainer
from trainformer.models.jax import DecoderConfig, model_from_config
from trainformer.models.jax.fp8 import EMULATE, check_fp8_device, fp8_matmul
from trainformer.models.jax.layers import Linear


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv(EMULATE, "1")


def test_fp8_matmuls_are_those_of_torchao():
    x, weight, d_y = (
        np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        for seed, shape in enumerate([(2, 16, 32), (48, 32), (2, 16, 48)])
    )
    x[0] *= 100  # one scale per tensor: the other row is coarser
    layer = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False))
    layer[0].weight.data = torch.as_tensor(weight)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    theirs, given = convert_to_float8_training(layer, config=config), torch.tensor(x, requires_grad=True)
    wanted = theirs(given)
    wanted.backward(torch.as_tensor(d_y))
    y, back = jax.vjp(fp8_matmul, jnp.asarray(x), jnp.asarray(weight.T))
    dx, d_kernel = back(jnp.asarray(d_y))
    for own, other in ((y, wanted), (dx, given.grad), (d_kernel, theirs[0].weight.grad.T)):
        other = other.detach().numpy()
        assert furthest(own, other) <= 1e-5 * np.abs(other).max()
    assert 0.01 < furthest(y, x @ weight.T) / np.abs(y).max() < 0.1
    kept = [leaf.dtype.name for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) > 1]
    assert kept == ["float8_e4m3fn"] * 2


def test_zeros_and_non_finite_values_pass_through():
    kernel = jnp.ones((16, 16))
    assert float(jnp.abs(fp8_matmul(jnp.zeros((2, 16)), kernel)).max()) == 0.0
    for value in (jnp.inf, jnp.nan):
        assert not np.isfinite(fp8_matmul(jnp.full((2, 16), value), kernel)).any()


def test_a_run_in_fp8_is_close_to_one_in_bf16(tmp_path, emulated):
    curves = []
    for dtype in ("fp8", "bf16"):
        given = arguments(
            max_steps=3, total_batch_size=4, output_dir=str(tmp_path / dtype), dtype=dtype, learning_rate=1e-3
        )
        trainer = TokenTrainer(
            given, model=lambda rngs: llama(rngs), mesh=mesh_on((1, 1, 1, 1), 1), dataset_train=texts(8)
        )
        model = trainer.model_state.model
        assert {layer.fp8 for _, layer in nnx.iter_graph(model.layers) if isinstance(layer, Linear)} == {dtype == "fp8"}
        assert not model.lm_head.fp8
        state = trainer.train()
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
        curves.append(losses(trainer))
    assert trainer.dtype == jnp.bfloat16
    np.testing.assert_allclose(*curves, rtol=2e-3)
    assert curves[0] != curves[1]


def test_fp8_needs_its_hardware_and_fitting_layers(tmp_path, monkeypatch, emulated):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = model_from_config(DecoderConfig(vocab_size=32, head_dim=8, **sizes))
    with pytest.raises(BadArgument, match="multiples of 16"):
        model.configure(fp8=True)
    with pytest.raises(BadArgument, match="no dtype like this for Mlp"):
        mlp_trainer(dtype="fp8")
    folder = make_folder(tmp_path / "model")
    with pytest.raises(BadArgument, match="these are frozen"):
        trainer_of(SFTTrainer, SFTConfig, str(folder), pairs(), tmp_path, dtype="fp8", options={"lora": True})
    monkeypatch.delenv(EMULATE)
    with pytest.raises(BadArgument, match=r"compute capability 8\.9 or more .* received cpu\. Pass dtype='bf16'"):
        mlp_trainer(dtype="fp8")
    for capability, fits in (("8.9", True), ("8.6", False)):
        client = SimpleNamespace(platform_version="cuda 13")
        fields = {"device_kind": "GPU", "platform": "gpu", "client": client, "compute_capability": capability}
        if fits:
            check_fp8_device(SimpleNamespace(**fields))
        else:
            with pytest.raises(BadArgument, match=r"GPU, which has 8\.6"):
                check_fp8_device(SimpleNamespace(**fields))
    with pytest.raises(BadArgument, match="param_dtype to be"):
        arguments(param_dtype="fp8")
