"""Training with JAX on a GPU: kernels, precision, no reading between log points, exact resuming."""

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1500)]
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

from trainformer.core.types import Loss  # noqa: E402
from trainformer.jax import BaseTrainer, TrainingArguments  # noqa: E402
from trainformer.models.jax import Decoder, DecoderConfig  # noqa: E402
from trainformer.models.jax.attention_kernels import choose_kernel  # noqa: E402
from trainformer.run import run_of  # noqa: E402

CONFIG = DecoderConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


class Tokens(BaseTrainer):
    """The next token, as a sum over tokens."""

    def compute_loss(self, model, batch, key):
        logits = model(batch["input_ids"]).astype(jnp.float32)[:, :-1]
        labels = batch["input_ids"][:, 1:]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return Loss(losses.sum(), losses.size)


def texts(count=64, length=128):
    starts = np.random.default_rng(0).integers(0, 256, (count, 1))
    return {"input_ids": ((starts + 3 * np.arange(length)) % 256).astype(np.int32)}


def trainer(folder, callbacks=None, **options):
    chosen = {"max_steps": 12, "total_batch_size": 16, "learning_rate": 1e-3, "log": "none", "logging_steps": 1}
    arguments = TrainingArguments(output_dir=str(folder), **{**chosen, **options})
    return Tokens(arguments, model=Decoder(CONFIG, rngs=nnx.Rngs(0)), dataset_train=texts(), callbacks=callbacks or [])


def losses(run):
    return np.array([record["train/loss"] for record in run.state.log_history if "train/loss" in record])


def test_a_gpu_computes_in_bf16_with_cudnn_by_itself_and_close_to_fp32(tmp_path):
    fast = trainer(tmp_path / "bf16")
    assert fast.dtype == jnp.bfloat16
    assert run_of(fast).backend.state.model.execution.attention == "auto"
    heads = jnp.zeros((16, 128, 4, 64), jnp.bfloat16)
    assert choose_kernel("auto", heads, heads) == "cudnn"
    fast.train()
    assert {leaf.dtype for leaf in jax.tree.leaves(fast.model_state.params)} == {jnp.dtype("float32")}
    exact = trainer(tmp_path / "fp32", dtype="fp32")
    exact.train()
    assert np.abs(losses(fast) - losses(exact)).max() < 0.05
    assert losses(fast)[-1] < losses(fast)[0] - 1


@pytest.mark.parametrize("kernels", [True, False])
def test_accumulation_does_not_change_the_curve(tmp_path, kernels):
    curves = []
    for accumulation in (1, 4):
        run = trainer(tmp_path / str(accumulation), gradient_accumulation_steps=accumulation, use_fast_kernels=kernels)
        run.train()
        curves.append(losses(run))
    assert np.abs(curves[0] - curves[1]).max() < 0.02


class Forbid:
    """Reading from the device is an error from the second step on."""

    def on_step_end(self, trainer, step, loss):
        if step == 2:
            jax.config.update("jax_transfer_guard_device_to_host", "disallow_explicit")

    def on_log(self, trainer, metrics):
        jax.config.update("jax_transfer_guard_device_to_host", "allow")


def test_nothing_is_read_between_two_log_points(tmp_path):
    try:
        run = trainer(tmp_path, [Forbid()], logging_steps=100, max_steps=30)
        with pytest.raises(Exception, match=r"[Dd]isallowed"):  # the last record is read while it is still forbidden
            run.train()
        assert run.state.step == 30
    finally:
        jax.config.update("jax_transfer_guard_device_to_host", "allow")


class Lines(BaseTrainer):
    """Matrix products alone: adding up the gradients of embeddings is not deterministic on a GPU."""

    def compute_loss(self, model, batch, key):
        kept = jax.random.bernoulli(key, 0.9, batch["x"].shape)
        return jnp.mean((model(batch["x"] * kept) - batch["y"]) ** 2)


class Cut:
    """Ends the run in the middle of an epoch, after a checkpoint."""

    def on_step_end(self, trainer, step, loss):
        if step == 7:
            raise RuntimeError("cut")


def lines(folder, callbacks=()):
    x = np.random.default_rng(0).standard_normal((44, 64), np.float32)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=12, total_batch_size=8, save_steps=5, dtype="fp32", log="none"
    )
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(64, 3, rngs=nnx.Rngs(1)))
    return Lines(arguments, model=model, dataset_train={"x": x, "y": x[:, :3]}, callbacks=callbacks)


def test_a_run_that_was_cut_short_ends_in_the_same_weights(tmp_path):
    whole = lines(tmp_path / "whole").train()
    with pytest.raises(RuntimeError, match="cut"):
        lines(tmp_path / "cut", [Cut()]).train()
    again = lines(tmp_path / "cut").train()
    pairs = zip(jax.tree.leaves(whole.params), jax.tree.leaves(again.params), strict=True)
    assert all(bool((a == b).all()) for a, b in pairs)
    assert int(again.step) == 12
