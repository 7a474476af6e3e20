"""Attention kernels: ring and splash attention against plain attention, and which kernel is chosen when."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_model_toys import furthest
from jax_toys import TokenTrainer, arguments, llama, losses, mesh_on, mlp_trainer, texts

from trainformer.core.errors import BadArgument
from trainformer.models.jax import attention_kernels, ring_attention
from trainformer.models.jax.attention import attend
from trainformer.models.jax.attention_kernels import choose_kernel
from trainformer.models.jax.splash_attention import splash_attention
from trainformer.run import run_of


def inputs(length, heads, kv_heads, width, dtype=jnp.float32):
    """Queries, keys and values, and a gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return [jax.random.normal(key, (2, length, n, width), dtype) for key, n in zip(keys, counts, strict=True)]


def packed(length):
    """Segments of all lengths, with padding (0) at the end."""
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 5, (2, length)), axis=1)[:, ::-1].copy())


def value_and_gradients(attention, inputs, segments, **options):
    q, k, v, d_out = inputs

    def value(q, k, v):
        out = attention(q, k, v, segments, **options)
        return jnp.sum(out.astype(jnp.float32) * d_out), out

    (_, out), gradients = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *gradients


def mesh_of(dims):
    return mesh_on(dims, int(np.prod(dims)))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(ring_attention, "_CHUNK", 8)
    monkeypatch.setattr(ring_attention, "_MIN_CHUNK", 4)


# (dp, fsdp, tp, sp), heads, key-value heads, causal, window, packed, blocks that a device sees, striped
RINGS = {
    "causal": ((1, 1, 1, 4), 4, 2, True, None, False, 4, True),
    "packed": ((2, 1, 2, 2), 4, 2, True, None, True, 2, True),
    "narrow window": ((1, 2, 1, 4), 4, 4, True, 5, True, 2, False),
    "wide window": ((1, 1, 1, 4), 2, 1, True, 24, True, 3, False),
    "a window over all": ((1, 1, 1, 2), 2, 2, True, 40, False, 2, True),
    "more tensor parallelism than heads": ((1, 1, 4, 2), 4, 2, False, None, True, 2, False),
    "window to both sides": ((1, 1, 1, 4), 4, 1, False, 7, True, 4, False),
}


@pytest.mark.parametrize("name", RINGS)
def test_ring_attention_equals_full_attention(name, small_chunks):
    dims, heads, kv_heads, causal, window, is_packed, steps, striped = RINGS[name]
    given, segments = inputs(64, heads, kv_heads, 8), packed(64) if is_packed else None
    options = {"causal": causal, "window": window}
    wanted = value_and_gradients(attend, given, segments, **options)
    ring = ring_attention.Ring.make(64, dims[3], causal, window)
    assert (ring.steps, ring.striped, ring.chunk) == (steps, striped, 8)
    with jax.set_mesh(mesh_of(dims)):
        got = value_and_gradients(attend, given, segments, **options)
    assert furthest(wanted, got) <= 1e-5
    assert min(float(jnp.abs(gradient).max()) for gradient in got) > 0.1


def test_ring_attention_in_bf16_and_of_odd_lengths():
    given = inputs(36, 2, 1, 8, jnp.bfloat16)  # 9 tokens per device: no stripes, a single chunk
    exact = value_and_gradients(attend, [x.astype(jnp.float32) for x in given], None)
    with jax.set_mesh(mesh_of((1, 1, 1, 4))):
        got = value_and_gradients(attend, given, None)
    assert {x.dtype.name for x in got} == {"bfloat16"}
    assert furthest(exact, got) <= 0.1  # gradients are up to 6: 2^-7 of it, twice


def compiled(length, kernel):
    shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3

    def value(q, k, v):
        return jnp.sum(attend(q, k, v, None, implementation=kernel))

    with jax.set_mesh(mesh_of((1, 1, 1, 4))):
        sequences = jax.sharding.NamedSharding(mesh_of((1, 1, 1, 4)), jax.sharding.PartitionSpec(None, "sp"))
        return jax.jit(jax.grad(value, argnums=(0, 1, 2)), in_shardings=sequences).lower(*shapes).compile()


def test_the_memory_of_ring_attention_grows_linearly_with_the_length(small_chunks):
    grown = {}
    for kernel in ("ring", "xla"):
        short, long = (compiled(length, kernel) for length in (1024, 4096))
        grown[kernel] = long.memory_analysis().temp_size_in_bytes / short.memory_analysis().temp_size_in_bytes
        assert ("collective-permute" in long.as_text()) == (kernel == "ring")
        assert ("all-gather" in long.as_text()) == (kernel == "xla")
    assert grown["ring"] < 5 < 12 < grown["xla"]  # of four times the length


@pytest.mark.parametrize(
    ("dims", "heads", "kv_heads", "causal", "window", "is_packed"),
    [
        ((1, 1, 1, 1), 4, 2, True, None, True),
        ((1, 1, 1, 1), 2, 1, False, 30, False),
        ((2, 1, 4, 1), 4, 2, True, 40, True),
    ],
)
def test_splash_attention_equals_plain_attention(dims, heads, kv_heads, causal, window, is_packed, monkeypatch):
    given, segments = inputs(256, heads, kv_heads, 64), packed(256) if is_packed else None
    options = {"causal": causal, "window": window}
    wanted = value_and_gradients(attend, given, segments, **options)
    monkeypatch.setattr(attention_kernels, "platform", lambda: "tpu")  # the kernel itself is interpreted
    assert choose_kernel("auto", *given[:2], **options) == "splash"
    with jax.set_mesh(mesh_of(dims)):
        got = value_and_gradients(attend, given, segments, **options)
    assert furthest(wanted, got) <= 2e-5
    assert furthest(wanted, got) > 0  # it was another kernel


def test_splash_attention_scales_in_the_dtype_of_the_model():
    given = inputs(128, 2, 2, 64, jnp.bfloat16)
    exact = value_and_gradients(attend, [x.astype(jnp.float32) for x in given], None)
    got = value_and_gradients(splash_attention, given, None, interpret=True)
    assert {x.dtype.name for x in got} == {"bfloat16"}
    assert furthest(exact, got) <= 0.1


def fake(monkeypatch, name, capability="9.0", version="cuda 13"):
    monkeypatch.setattr(attention_kernels, "platform", lambda: name)
    client = SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(client=client, compute_capability=capability)])


def q_and_k(length=128, width=64, dtype=jnp.bfloat16, keys=None):
    return jnp.zeros((2, length, 4, width), dtype), jnp.zeros((2, keys or length, 4, width), dtype)


def test_the_fast_kernel_of_the_platform_is_the_default(monkeypatch):
    assert choose_kernel("auto", *q_and_k()) == "xla"
    fake(monkeypatch, "gpu")
    assert choose_kernel("auto", *q_and_k()) == choose_kernel("auto", *q_and_k(dtype=jnp.float16)) == "cudnn"
    assert choose_kernel("xla", *q_and_k()) == "xla"
    assert choose_kernel("auto", *q_and_k(width=256), window=7) == "cudnn"
    for shapes, options in (
        ({"dtype": jnp.float32}, {}),
        ({"width": 12}, {}),
        ({"width": 264}, {}),
        ({"length": 127}, {"masked": True}),
        ({"keys": 256}, {}),
        ({}, {"drops": True}),
        ({}, {"window": 7, "causal": False}),
        ({}, {"window": jnp.ones(())}),
    ):
        assert choose_kernel("auto", *q_and_k(**shapes), **options) == "xla"
    assert choose_kernel("auto", *q_and_k(length=127)) == "cudnn"
    fake(monkeypatch, "gpu", capability="8.6")
    assert choose_kernel("auto", *q_and_k(width=256)) == "xla"
    assert choose_kernel("auto", *q_and_k(width=128)) == "cudnn"
    fake(monkeypatch, "gpu", capability="gfx942", version="rocm 7")
    assert choose_kernel("auto", *q_and_k()) == "xla"
    fake(monkeypatch, "tpu")
    assert choose_kernel("auto", *q_and_k(), window=7, masked=True) == "splash"
    assert choose_kernel("auto", *q_and_k(length=192)) == choose_kernel("auto", *q_and_k(width=80)) == "xla"


def test_ring_attention_is_the_default_for_sharded_sequences():
    with jax.set_mesh(mesh_of((1, 1, 2, 2))):
        assert choose_kernel("auto", *q_and_k()) == "ring"
        assert choose_kernel("cudnn", *q_and_k()) == "ring"
        assert choose_kernel("xla", *q_and_k()) == "xla"
        assert choose_kernel("auto", *q_and_k(), drops=True) == "xla"
        assert choose_kernel("auto", *q_and_k(length=7)) == "xla"


def test_the_log_says_once_why_a_kernel_is_not_used(caplog):
    attention_kernels._explain.cache_clear()
    with caplog.at_level(logging.INFO, "trainformer"):
        for _ in range(2):
            assert choose_kernel("cudnn", *q_and_k()) == "xla"
            assert choose_kernel("ring", *q_and_k()) == "xla"
            assert choose_kernel("auto", *q_and_k()) == "xla"
            with jax.set_mesh(mesh_of((1, 1, 1, 2))):
                assert choose_kernel("auto", *q_and_k(), drops=True) == "xla"
    assert [record.getMessage() for record in caplog.records] == [
        "cudnn attention is not used (it needs an NVIDIA GPU, and this is a cpu): xla instead",
        "ring attention is not used (sequences are not sharded: the sp axis has size 1): xla instead",
        "ring attention is not used (it has no dropout on attention weights): xla instead, which gathers the keys and "
        "values of all devices",
    ]


def trained(folder, **options):
    given = arguments(max_steps=2, total_batch_size=4, output_dir=str(folder), **options)
    trainer = TokenTrainer(given, model=lambda rngs: llama(rngs), mesh=mesh_of((1, 1, 1, 2)), dataset_train=texts(8, 9))
    trainer.train()
    return trainer


def test_the_argument_chooses_the_kernel_of_a_run(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(
        "trainformer.models.jax.attention.ring_attention",
        lambda *given, **options: used.append(1) or ring_attention.ring_attention(*given, **options),
    )
    gathered = trained(tmp_path / "a", attention_kernel="xla")
    assert run_of(gathered).backend.state.model.execution.attention == "xla"
    assert not used
    np.testing.assert_allclose(
        losses(gathered), losses(trained(tmp_path / "b", gradient_checkpointing="nothing_saveable")), rtol=1e-5
    )
    assert used


def test_invalid_kernels_are_refused():
    with pytest.raises(BadArgument, match="Did you mean 'splash'"):
        arguments(attention_kernel="slash")
    with pytest.raises(BadArgument, match="Leave out use_fast_kernels"):
        arguments(attention_kernel="ring", use_fast_kernels=False)
    assert arguments(attention_kernel="xla", use_fast_kernels=False).attention_kernel == "xla"
    with pytest.raises(BadArgument, match="no attention_kernel like this for Mlp"):
        mlp_trainer(attention_kernel="ring")
