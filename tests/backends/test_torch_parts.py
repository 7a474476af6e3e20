"""Precision, optimizers, memory options, placement, random state."""

import random

import numpy as np
import pytest
import timm
import torch
from torch.nn.attention import SDPBackend

from toys import MeanTask, classes, largest_difference, mlp, same, weights
from trainformer import Trainer
from trainformer.backends.torch.memory import make_precision, process_settings, sdpa_backends
from trainformer.backends.torch.optimizers import decay_groups, named_parameters
from trainformer.backends.torch.placement import apply_to_inputs, count_tokens, map_tensors, resolve_device
from trainformer.backends.torch.state import capture_random, restore_random
from trainformer.core.errors import BadArgument

CPU = torch.device("cpu")


def fit(task, data=None, **options):
    data = data or classes(32, dtype=torch.float32)
    defaults = {"batch_size": 8, "epochs": 1, "lr": 1e-2, "log": "none", "save_best": 0}
    return Trainer(task, data, **{**defaults, **options}).fit()


class Pictures(MeanTask):
    """A classifier of pictures, to try what only real models have."""

    def __init__(self, name="test_vit", **kwargs):
        torch.manual_seed(0)
        self.model = timm.create_model(name, pretrained=False, num_classes=3, **kwargs)


def pictures(n=8, size=160):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, size, size, generator=g), torch.arange(n) % 3


@pytest.mark.parametrize(
    ("name", "used", "dtype"),
    [
        ("no", "fp32", torch.float32),
        ("auto", "fp32", torch.float32),
        ("bf16", "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.float16),
    ],
)
def test_precision_is_that_of_the_forward_pass(name, used, dtype):
    precision = make_precision(name, CPU)
    with precision.forward():
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
    assert precision.name == used
    assert (precision.scaler is not None) == (name == "fp16")


def test_bf16_training_is_close_to_fp32_and_not_equal():
    full, half = MeanTask(mlp(dtype=torch.float32)), MeanTask(mlp(dtype=torch.float32))
    fit(full, precision="no")
    fit(half, precision="bf16")
    assert 0 < largest_difference(weights(full), weights(half)) < 0.05
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


def test_bad_precision_and_device_are_explained():
    with pytest.raises(BadArgument, match="bf16"):
        make_precision("fp12", CPU)
    with pytest.raises(BadArgument, match="device='cpu'"):
        resolve_device("cuda:99")
    with pytest.raises(BadArgument, match="device"):
        resolve_device("gpu")


def test_norms_and_biases_are_not_decayed():
    model = timm.create_model("test_vit", num_classes=3)
    named = dict(model.named_parameters())
    groups = decay_groups(named, 0.1, model.no_weight_decay())
    decayed = {id(p) for p in groups[0]["params"]}
    assert {g["weight_decay"] for g in groups} == {0.1, 0.0}
    for name, p in named.items():
        exempt = "norm" in name or name.endswith("bias") or name in ("pos_embed", "cls_token", "reg_token")
        assert (id(p) in decayed) == (not exempt), name
    assert sum(len(g["params"]) for g in groups) == len(named)


@pytest.mark.parametrize("spec", ["adamw", "adam", "sgd", "rmsprop", "adagrad", "nadam", "lamb", torch.optim.Adam])
def test_optimizers_by_name_and_class_train(spec):
    task = MeanTask(mlp(dtype=torch.float32))
    before = weights(task)
    trainer = fit(task, optimizer=spec)
    assert not same(before, weights(task))
    if isinstance(spec, str):
        assert type(trainer.active_optimizer).__name__.lower() == spec


def test_optimizer_as_factory_and_instance():
    trainer = fit(
        MeanTask(mlp(dtype=torch.float32)), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.3), scheduler=None
    )
    assert trainer.active_optimizer.param_groups[0]["lr"] == 0.3
    task = MeanTask(mlp(dtype=torch.float32))
    mine = torch.optim.SGD(task.model[2].parameters(), lr=0.1)
    frozen = task.model[0].weight.detach().clone()
    trainer = fit(task, optimizer=mine)
    assert trainer.active_optimizer is mine
    assert torch.equal(frozen, task.model[0].weight)
    assert task.model[0].weight.grad is None  # gradients nobody uses do not pile up


def test_bad_optimizers_are_explained():
    with pytest.raises(BadArgument, match="Did you mean 'adamw'"):
        fit(MeanTask(), optimizer="adamww")
    with pytest.raises(BadArgument, match="Optimizer"):
        fit(MeanTask(), optimizer=lambda groups: None)
    task = MeanTask()
    task.model.requires_grad_(False)
    with pytest.raises(BadArgument, match="requires_grad=False"):
        fit(task)


def test_tied_parameters_are_optimized_once():
    task = MeanTask(mlp(4, 4, 4))
    task.model[2].weight = task.model[0].weight
    assert len(named_parameters(task)) == 3


def test_gradient_checkpointing_changes_memory_not_numbers():
    plain, saving = Pictures(), Pictures()
    fit(plain, pictures(), max_steps=2)
    fit(saving, pictures(), max_steps=2, gradient_checkpointing=True)
    assert largest_difference(weights(plain), weights(saving)) < 1e-6
    assert saving.model.grad_checkpointing


def test_gradient_checkpointing_of_a_transformers_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    class Text(MeanTask):
        def __init__(self):
            torch.manual_seed(0)
            config = GPT2Config(
                vocab_size=64,
                n_positions=16,
                n_embd=16,
                n_layer=2,
                n_head=2,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
            )
            self.model = GPT2LMHeadModel(config)

        def train_step(self, batch):
            (ids,) = batch
            return self.model(input_ids=ids, labels=ids).loss

        eval_step = None

    Text.eval_step = lambda self, batch: {"loss": self.train_step(batch)}
    data = (torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0)),)
    plain, saving = Text(), Text()
    fit(plain, data, max_steps=2)
    fit(saving, data, max_steps=2, gradient_checkpointing=True)
    assert saving.model.is_gradient_checkpointing
    assert largest_difference(weights(plain), weights(saving)) < 1e-6


def test_a_model_without_checkpointing_is_refused():
    with pytest.raises(BadArgument, match="set_grad_checkpointing"):
        fit(MeanTask(), gradient_checkpointing=True)


def test_activation_offload_changes_no_numbers():
    plain, offloaded = MeanTask(), MeanTask()
    fit(plain, classes(32))
    fit(offloaded, classes(32), activation_offload=True)
    assert same(weights(plain), weights(offloaded))


def test_channels_last_reaches_model_and_batches():
    formats = []

    class Look(Pictures):
        def train_step(self, batch):
            formats.append(batch[0].is_contiguous(memory_format=torch.channels_last))
            return super().train_step(batch)

    task = Look("test_resnet")
    fit(task, pictures(), max_steps=1, channels_last=True)
    assert formats == [True]
    conv = next(p for p in task.model.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1)
    assert conv.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_compiling_keeps_keys_and_numbers():
    plain, compiled = MeanTask(mlp(dtype=torch.float32)), MeanTask(mlp(dtype=torch.float32))
    fit(plain, max_steps=3)
    fit(compiled, max_steps=3, compile=True)
    assert compiled.model._compiled_call_impl is not None
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    assert largest_difference(weights(plain), weights(compiled)) < 1e-6


def test_process_wide_settings_are_restored():
    before = torch.get_float32_matmul_precision()
    seen = []

    class Look:
        def on_step_end(self, trainer, step, loss):
            seen.append(torch.get_float32_matmul_precision())

    fit(MeanTask(), classes(8), matmul_precision="medium", sdpa_backend="math", callbacks=[Look()])
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError, match="inside"), process_settings(["math"], "high"):
        raise RuntimeError("inside")
    assert torch.get_float32_matmul_precision() == before


def test_attention_backends_by_name_and_enum():
    assert sdpa_backends("flash") == [SDPBackend.FLASH_ATTENTION]
    assert sdpa_backends([SDPBackend.MATH, "cudnn"]) == [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]
    with pytest.raises(BadArgument, match="efficient"):
        fit(MeanTask(), sdpa_backend="flush")
    with pytest.raises(BadArgument, match="medium"), process_settings(None, "low"):
        pass


def test_transforms_reach_the_inputs_of_any_batch():
    double = torch.nn.Module()
    double.forward = lambda x: x * 2
    x = torch.ones(2)
    assert torch.equal(apply_to_inputs(double, x), x * 2)
    assert torch.equal(apply_to_inputs(double, (x, "label"))[0], x * 2)
    assert torch.equal(apply_to_inputs(double, {"pixel_values": x, "labels": x})["pixel_values"], x * 2)
    with pytest.raises(BadArgument, match="pixel_values"):
        apply_to_inputs(double, {"text": x})


def test_task_transforms_are_applied_in_training_and_evaluation():
    class Scaled(MeanTask):
        def get_train_transforms(self):
            return torch.nn.Sequential(Shift(100.0))

        def get_eval_transforms(self):
            return Shift(-100.0)

        def train_step(self, batch):
            seen.append(("train", batch[0].mean().item() > 50))
            return super().train_step(batch)

        def eval_step(self, batch):
            seen.append(("eval", batch[0].mean().item() < -50))
            return {"loss": 0.0}

    class Shift(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x + self.by

    seen = []
    fit(Scaled(), classes(8), val_data=classes(8))
    assert set(seen) == {("train", True), ("eval", True)}


def test_tokens_are_counted_from_shapes():
    assert count_tokens({"input_ids": torch.zeros(3, 7)}) == 21
    assert count_tokens((torch.zeros(3),)) == 0


def test_map_tensors_keeps_structure():
    from collections import namedtuple

    Pair = namedtuple("Pair", "a b")
    out = map_tensors(lambda t: t + 1, {"x": [torch.zeros(1), "text"], "p": Pair(torch.zeros(1), 3)})
    assert out["x"][1] == "text"
    assert isinstance(out["p"], Pair)
    assert out["p"].a.item() == out["x"][0].item() == 1.0


def test_random_state_round_trip_through_a_safe_file(tmp_path):
    draw = lambda: (random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn())  # noqa: E731
    draw()
    torch.save(capture_random(), tmp_path / "r.pt")
    first = draw()
    restore_random(torch.load(tmp_path / "r.pt", weights_only=True))
    assert draw() == first
