"""Quantized frozen weights against bitsandbytes and torchao, and LoRA trained on them."""

from __future__ import annotations

import logging
import re

import bitsandbytes.functional as bnb
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_model_toys import furthest, logits, tokens, torch_logits
from jax_toys import Crash, CrashAt
from peft import PeftModel
from text_trainer_toys import batch_of, devices, make_folder, pairs, trainer_of
from torchao.quantization import MappingType
from torchao.quantization.quant_primitives import choose_qparams_affine, dequantize_affine, quantize_affine
from transformers import AutoModelForCausalLM

from trainformer.backends.jax.state import combine, partition, split_model, trainable_paths
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import AutoEasyDeLModelForCausalLM, DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trainformer.models.jax import DecoderConfig, apply_lora, load_model, merge_lora, model_from_config
from trainformer.models.jax.huggingface import flat_params
from trainformer.models.jax.lora import quantize_frozen
from trainformer.models.jax.quantization import QUANTIZATIONS, Quantization, block_size, quantized_matmul

BYTES = {"int8": 1.0, "int4": 0.5, "nf4": 0.5}  # per weight, without scales


def kernel(inputs=128, outputs=24):
    values = np.random.default_rng(0).normal(size=(inputs, outputs)).astype(np.float32)
    values[:64, 3] = 0  # a block without any value
    return values


def test_nf4_is_that_of_bitsandbytes():
    codes, scales = Quantization("nf4", "float32").quantize(kernel())
    theirs, state = bnb.quantize_4bit(torch.as_tensor(kernel().T.copy()), blocksize=64, quant_type="nf4")
    assert np.array_equal(codes.T.reshape(-1), theirs.numpy().reshape(-1))
    assert np.array_equal(scales.T.reshape(-1), state.absmax.numpy())
    wanted = bnb.dequantize_4bit(theirs, state).numpy().T
    np.testing.assert_array_equal(Quantization("nf4", "float32").dequantize(codes, scales), wanted)


@pytest.mark.parametrize(("kind", "limit"), [("int8", 127), ("int4", 7)])
def test_integers_are_those_of_torchao(kind, limit):
    weight, block = torch.as_tensor(kernel().T.copy()), (1, 64)
    options = {"mapping_type": MappingType.SYMMETRIC, "target_dtype": torch.int8, "eps": 1e-30}
    limits = {"quant_min": -limit, "quant_max": limit}
    scale, zero = choose_qparams_affine(weight, block_size=block, **options, **limits)
    theirs = quantize_affine(weight, block, scale, zero, torch.int8, **limits)
    wanted = dequantize_affine(theirs, block, scale, zero, torch.int8, **limits)
    quantization = Quantization(kind, "float32")
    codes, scales = quantization.quantize(kernel())
    np.testing.assert_allclose(scales.T, np.where(scale <= 1e-30, 0, scale), rtol=1e-6)
    np.testing.assert_allclose(quantization.dequantize(codes, scales).T, wanted, atol=1e-6)
    assert int(np.abs(theirs.numpy()).max()) == limit


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_stacks_are_quantized_the_same_on_host_and_device_and_in_place_of_the_kernel(kind):
    quantization, stack = Quantization(kind, "bfloat16"), np.stack([kernel(96), 3 * kernel(96)])
    codes, scales = quantization.quantize(stack)
    assert codes.nbytes == BYTES[kind] * stack.size
    assert scales.shape == (2, 2, 24)  # 96 inputs: two blocks of 48
    traced = jax.jit(quantization.quantize)(stack)
    assert np.array_equal(codes, traced[0])
    np.testing.assert_allclose(scales, traced[1], rtol=1e-6)
    restored = quantization.dequantize(codes, scales)
    assert restored.dtype == jnp.bfloat16
    assert np.array_equal(restored, quantization.dequantize(*map(jnp.asarray, (codes, scales))))
    assert furthest(restored, stack) < {"int8": 0.08, "int4": 0.9, "nf4": 1.6}[kind]


def test_gradients_pass_through_a_quantized_kernel_and_keep_only_its_codes():
    quantization = Quantization("nf4", "float32")
    codes, scales = map(jnp.asarray, quantization.quantize(kernel()))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 128)), jnp.float32)
    y, back = jax.vjp(lambda x: quantized_matmul(x, codes, scales, quantization), x)
    wanted = quantization.dequantize(codes, scales)
    np.testing.assert_allclose(y, x @ wanted, rtol=1e-6)
    np.testing.assert_allclose(back(y)[0], y @ wanted.T, rtol=1e-6)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(back) if hasattr(leaf, "nbytes"))
    assert kept <= codes.nbytes + scales.nbytes


@pytest.mark.parametrize("unroll", [1, True])
def test_the_kernels_of_all_layers_are_never_dequantized_at_once(unroll):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = model_from_config(DecoderConfig(vocab_size=32, **sizes))
    frozen = apply_lora(model, r=2)
    size = sum(value.nbytes for path, value in flat_params(model).items() if path.endswith("_proj/kernel"))
    quantize_frozen(model, "nf4")
    model.configure(unroll=unroll)
    graph, params, *_ = split_model(model)
    trained, rest = partition(params, trainable_paths(params, frozen))

    def loss(trained, rest, ids):
        return jnp.mean(nnx.merge(graph, combine(trained, rest))(ids) ** 2)

    # On CPUs XLA by default computes early what it can, whatever the memory.
    options = {
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    }
    lowered = jax.jit(jax.grad(loss)).lower(trained, rest, jnp.zeros((1, 8), jnp.int32))
    memory = lowered.compile(compiler_options=options).memory_analysis()
    assert memory.argument_size_in_bytes < 0.2 * size
    assert memory.temp_size_in_bytes < 0.3 * size


def test_block_sizes_divide_the_inputs():
    assert [block_size(inputs) for inputs in (4096, 96, 100, 14)] == [64, 48, 50, 14]
    with pytest.raises(BadArgument, match="even number of inputs"):
        block_size(33)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}


def sft(folder, where, *, options=None, **fields):
    options = {"lora": LORA, **(options or {})}
    return trainer_of(SFTTrainer, SFTConfig, str(folder), pairs(), where, options=options, **fields)


def frozen(trainer):
    flat = flat_params(trainer.model_state.model)
    return {path: np.asarray(value) for path, value in flat.items() if "lora" not in path}


def kernels(flat):
    return {path: value for path, value in flat.items() if re.search(r"_proj/kernel", path)}


def test_only_the_adapter_of_a_quantized_model_is_trained(folder, tmp_path, caplog):
    trainer = sft(folder, tmp_path, quantization="nf4", max_steps=3)
    before, plain = frozen(trainer), load_model(folder)
    floats = kernels(flat_params(plain))
    assert sum(value.nbytes for value in kernels(before).values()) == sum(
        value.size * (BYTES["nf4"] + 4 / block_size(value.shape[-2])) for value in floats.values()
    )
    assert {path for path in before if path.endswith("_scale")} == {f"{path}_scale" for path in floats}
    moments = [leaf for leaf in jax.tree.leaves(trainer.model_state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(
        leaf.size for path, leaf in flat_params(trainer.model_state.model).items() if "lora" in path
    )
    trainer.train()
    after = frozen(trainer)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[path], after[path]) and before[path].dtype == after[path].dtype for path in after)
    model, ids = trainer.model_state.model, tokens(length=8)
    got = logits(model, ids)

    # The adapter on a model of transformers with the rounded weights gives the same.
    trainer.save_pretrained(tmp_path / "adapter")
    with caplog.at_level(logging.INFO, "trainformer"):
        trainer.save_pretrained(tmp_path / "merged", merge=True)
    assert "rounded to nf4, plus the adapter" in caplog.text
    base = load_model(folder)
    apply_lora(base)
    quantize_frozen(base, "nf4")
    merge_lora(base).save_pretrained(tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert furthest(torch_logits(adapted, ids), got) <= 1e-4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert furthest(torch_logits(merged, ids), got) <= 1e-4
    assert furthest(logits(plain, ids), got) > 1e-3


def test_scales_stay_exact_in_bf16_and_weights_in_the_dtype_of_parameters(folder, tmp_path):
    exact, rounded = (frozen(sft(folder, tmp_path / n, quantization="nf4", dtype=n)) for n in ("fp32", "bf16"))
    assert all(np.array_equal(exact[path], rounded[path]) for path in exact)
    trainer = sft(folder, tmp_path / "half", quantization="nf4", dtype="bf16", param_dtype="bf16")
    state = trainer.train()
    stored = state.params["layers"]["attention"]["q_proj"] | {"head": state.params["lm_head"]["kernel"]}
    assert {name: str(value.dtype) for name, value in stored.items()} == {
        "kernel": "uint8",
        "kernel_scale": "float32",
        "lora_a": "bfloat16",
        "lora_b": "bfloat16",
        "head": "bfloat16",
    }


def test_resuming_restores_quantized_weights_exactly_and_refuses_another_quantization(folder, tmp_path):
    whole = sft(folder, tmp_path / "whole", quantization="nf4", max_steps=4)
    whole.train()
    again = {"resume": "auto", "output_dir": str(tmp_path / "cut"), "save_strategy": "steps", "save_steps": 2}
    cut = sft(folder, tmp_path, options={"callbacks": [CrashAt(3)]}, quantization="nf4", max_steps=4, **again)
    with pytest.raises(Crash):
        cut.train()
    resumed = sft(folder, tmp_path, quantization="nf4", max_steps=4, **again)
    resumed.train()
    assert int(resumed.model_state.step) == 4
    flat, other = (flat_params(trainer.model_state.model) for trainer in (whole, resumed))
    assert all(np.array_equal(flat[path], other[path]) for path in flat)
    for kind in ("int4", "int8", None):
        with pytest.raises(DataError, match="q_proj/kernel"):
            sft(folder, tmp_path, quantization=kind, max_steps=5, **again).train()


def test_quantized_weights_are_sharded_and_give_the_same_loss(folder, tmp_path):
    plain = sft(folder, tmp_path / "a", quantization="nf4")
    sharded = sft(folder, tmp_path / "b", quantization="nf4", options={"mesh": devices((1, 2, 2, 2))})
    attention = sharded.model_state.params["layers"]["attention"]
    shapes = {
        (name, part): next(iter(attention[name][part].addressable_shards)).data.shape
        for name in ("q_proj", "o_proj")
        for part in ("kernel", "kernel_scale")
    }
    assert shapes == {  # (layers, bytes or blocks, outputs): sharded over fsdp and tp where these divide
        ("q_proj", "kernel"): (2, 8, 16),
        ("q_proj", "kernel_scale"): (2, 1, 16),
        ("o_proj", "kernel"): (2, 8, 16),
        ("o_proj", "kernel_scale"): (2, 1, 16),
    }
    losses = []
    for trainer in (plain, sharded):
        trainer.train()
        losses.append([record["train/loss"] for record in trainer.state.log_history if "train/loss" in record])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_dpo_compares_with_the_quantized_model(folder, tmp_path):
    import text_toys

    data = text_toys.preferences()
    options = {"lora": LORA}
    trainer = trainer_of(DPOTrainer, DPOConfig, str(folder), data, tmp_path, options=options, quantization="int8")
    batch = batch_of(trainer)
    with trainer._run.backend.run_context():
        model = trainer.model_state.model
        value = jax.jit(lambda: trainer.compute_metrics(model, batch, None))()
    # Without any training, policy and reference are equal.
    assert float(value.sum / value.weight) == pytest.approx(np.log(2), abs=1e-5)


def test_quantized_weights_without_lora_are_refused(folder, tmp_path):
    with pytest.raises(BadArgument, match="Pass lora=LoRAConfig"):
        sft(folder, tmp_path, quantization="nf4", options={"lora": None})
    with pytest.raises(BadArgument, match="The trainer quantizes weights"):
        AutoEasyDeLModelForCausalLM.from_pretrained(folder, quantization_config={"dtype": "nf4"})
    with pytest.raises(BadArgument, match="Did you mean 'nf4'"):
        SFTConfig(quantization="nf5")
    with pytest.raises(BadArgument, match="Quantized weights cannot be trained"):
        quantize_frozen(load_model(folder), "nf4")
    state = sft(folder, tmp_path / "state").model_state
    with pytest.raises(BadArgument, match="Expected quantization or model_state"):
        sft(folder, tmp_path, quantization="nf4", options={"lora": None, "model_state": state})
