"""fp8 without the hardware for it: which layers, what is computed, what stays as it was, and who is turned away."""

import dataclasses
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from text_toys import Cut
from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.adapters import LoRA, adapter_state_dict
from trainformer.backends.torch.quantize import EMULATE, FP8_RECIPES, check_fp8_device, restore_linear, use_fp8
from trainformer.core.errors import BadArgument
from trainformer.run import run_of

float8 = pytest.importorskip("torchao.float8")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setenv(EMULATE, "1")


def network(width=32, dropout=0.0):
    torch.manual_seed(1)
    inner = nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 16, bias=False)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), *inner, nn.Tanh(), nn.Linear(16, 3))


def trainer_on(model, folder, **options):
    """In fp32 between the layers, unless the options say otherwise: then a loop without autocast is the same."""
    defaults = {"batch_size": 8, "max_steps": 6, "lr": 0.1, "log": "none", "save_best": 0, "precision": "no"}
    data = classes(dtype=torch.float32)
    return Trainer(MeanTask(model), data, **{**defaults, "run_dir": folder, **options})


def in_fp8(model):
    return [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_training_is_that_of_a_loop_with_torchao(recipe, tmp_path):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model = network()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in ("2", "5"))
    plain = {"optimizer": sgd, "scheduler": None, "gradient_clip": None, "weight_decay": 0.0}
    trainer = trainer_on(network(), tmp_path, fp8_recipe=recipe, **plain).fit()
    assert in_fp8(trainer.task.model) == in_fp8(model) == ["2", "5"]
    optimizer = sgd(model.parameters())
    for batch in islice(run_of(trainer).train_source.batches(0), 6):
        x, y = batch.data
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(trainer.task), weights(MeanTask(model)))
    in_full = trainer_on(network(), tmp_path / "full", **plain).fit()
    assert not same(weights(in_full.task), weights(trainer.task))


def test_unsupported_layers_are_left_and_named():
    model = nn.ModuleDict(
        {
            "good": nn.Linear(32, 48),
            "narrow": nn.Linear(24, 32),
            "odd": nn.Linear(32, 20),
            "still": nn.Linear(32, 32).requires_grad_(False),
            "attention": nn.MultiheadAttention(32, 2),
        }
    )
    layers = use_fp8(model, "rowwise")
    assert layers.chosen == tuple(in_fp8(model)) == ("good",)
    assert layers.skipped == {
        "size not divisible by 16": ("narrow", "odd"),
        "frozen": ("still",),
        "a NonDynamicallyQuantizableLinear": ("attention.out_proj",),
    }
    assert use_fp8(model, "rowwise", alignment=8).chosen == ("good", "narrow")


def test_the_checkpoint_is_that_of_the_plain_model_and_resuming_is_exact(tmp_path):
    options = {"fp8_recipe": "rowwise", "ema": 0.9, "save_every": 1}
    model = network(dropout=0.2)
    parameters = dict(model.named_parameters())
    whole = trainer_on(model, tmp_path / "whole", **options).fit()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        trainer_on(network(dropout=0.2), tmp_path / "cut", callbacks=[Cut()], **options).fit()
    again = trainer_on(network(dropout=0.2), tmp_path / "cut", **options).fit()
    assert same(weights(again.task), weights(whole.task))
    saved = load_file(max((tmp_path / "cut" / "checkpoints").glob("step_*")) / "model.safetensors")
    plain = network()
    plain.load_state_dict(saved)
    assert same(weights(MeanTask(plain)), weights(again.task))
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert "fp8 (rowwise) in 2 linear layers; left unchanged: 2 (size not divisible by 16)" in log


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_between_the_layers_is_bf16(recipe, tmp_path):
    """On the CPU as on a GPU, where torchao's layer heeds autocast by itself."""
    model = network(16)
    seen = []
    trainer = trainer_on(model, tmp_path, precision="auto", fp8_recipe=recipe, max_steps=2)
    model[2].register_forward_hook(lambda part, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    trainer.fit()
    assert run_of(trainer).backend.precision.name == "fp8"
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_precision_fp8_alone_means_tensorwise(tmp_path):
    trainer = trainer_on(network(16), tmp_path, precision="fp8")
    assert run_of(trainer).backend.fp8 == "tensorwise"
    layer = trainer.task.model[2]
    assert layer.config.cast_config_input.scaling_granularity.value == "tensorwise"
    assert trainer.context.config.get("precision_used") == "fp8"


def test_devices_without_fp8_are_refused_before_anything_is_changed(monkeypatch, tmp_path):
    monkeypatch.delenv(EMULATE)
    model = network()
    for options in ({"precision": "fp8"}, {"fp8_recipe": "rowwise"}):
        with pytest.raises(
            BadArgument, match=r"capability 8\.9 or more for fp8 .* received cpu\. Pass precision='bf16'"
        ):
            trainer_on(model, tmp_path, device="cpu", **{"precision": "bf16", **options})
    assert not in_fp8(model)
    monkeypatch.setenv(EMULATE, "0")
    with pytest.raises(BadArgument, match="TRAINFORMER_FP8_EMULATE=1"):
        check_fp8_device(torch.device("cpu"))
    with pytest.raises(BadArgument, match="multiple of 16"):
        use_fp8(model, "rowwise", alignment=24)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp8_recipe": "row-wise"}, "Did you mean 'rowwise'"),
        ({"fp8_recipe": "rowwise", "precision": "fp16"}, "fp8 in a bf16 run, received 'fp16'"),
        ({"precision": "fp4"}, "or 'fp8', received 'fp4'"),
        ({"precision": "fp8", "fp8_dim_alignment": 0}, "fp8_dim_alignment to be a whole number of at least 1"),
        ({"precision": "fp8", "fp8_dim_alignment": 64}, "none of whose layers qualifies"),
    ],
)
def test_refused(options, words, tmp_path):
    with pytest.raises(BadArgument, match=words):
        trainer_on(network(), tmp_path, **options)


def test_layers_of_an_adapter_are_left_alone():
    adapter = LoRA(r=16, target_modules=["2"], modules_to_save=["5"])
    model = adapter.apply(network())
    names = list(adapter_state_dict(model))
    layers = use_fp8(model, "rowwise")
    assert layers.chosen == ("base_model.model.5.modules_to_save.default",)
    assert sum("lora" in name for name in layers.skipped["in an adapter"]) == 2
    assert list(adapter_state_dict(model)) == names
    restore_linear(model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.eval()(x), adapter.merge(model)(x))
