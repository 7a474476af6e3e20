"""Quantization-aware training: the trained model is the one torchao converts to, and nothing else in a run changes."""

import copy
import json
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from text_toys import Cut, chat_tokenizer, checkpoint_of, llama, sentences, trainer_for
from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.adapters import LoRA
from trainformer.backends.torch.quantize import RECIPES, layers_for, prepare_qat, recipe_named, restore_linear
from trainformer.core.errors import BadArgument
from trainformer.run import run_of
from trainformer.tasks import CausalLM

quantization = pytest.importorskip("torchao.quantization")
qat = pytest.importorskip("torchao.quantization.qat")

NAME = "int8-dynamic-act-int4-weight"
ON_CPU = [name for name, recipe in RECIPES.items() if not recipe.needs_gpu]


def network(width=128, seed=1):
    torch.manual_seed(seed)
    sizes = [(32, width), (width, width), (width, 3)]
    layers = [part for size in sizes for part in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 32), *layers[:-1])


def fit(model, **options):
    defaults = {"batch_size": 8, "max_steps": 5, "lr": 0.1, "log": "none", "save_best": 0, "optimizer": "sgd"}
    plain = {"scheduler": None, "gradient_clip": None, "weight_decay": 0.0}
    data = classes(dtype=torch.float32)
    return Trainer(MeanTask(model), data, **{**defaults, **plain, **options}).fit()


def fake(model):
    return [name for name, part in model.named_modules() if isinstance(part, qat.FakeQuantizedLinear)]


@pytest.mark.parametrize("name", ON_CPU)
def test_the_trained_model_is_the_converted_one(name, tmp_path):
    model = fit(network(), qat_recipe=name, run_dir=tmp_path).task.model.eval()
    x = torch.randn(16, 4)
    with torch.no_grad():
        trained = model(x)
        plain = copy.deepcopy(model)
        restore_linear(plain)
        converted = copy.deepcopy(model)
        quantization.quantize_(converted, qat.QATConfig(RECIPES[name].base(), step="convert"))
        assert type(converted[3].weight.data) is not torch.Tensor  # really quantised
        torch.testing.assert_close(converted(x), trained)
        assert not torch.allclose(plain(x), trained, atol=1e-4)
        quantization.quantize_(plain, RECIPES[name].base(), lambda part, at: at in fake(model))
        # Post-training quantization of the same layers gives the same model.
        torch.testing.assert_close(plain(x), trained)


@pytest.mark.parametrize("name", [NAME, "int4-weight-only"])
def test_training_is_that_of_a_loop_with_torchao(name, tmp_path):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    trainer = fit(network(), qat_recipe=name, run_dir=tmp_path, optimizer=sgd)
    model = network()
    wanted = [at for at, part in model.named_modules() if isinstance(part, nn.Linear) and part.in_features >= 32]
    quantization.quantize_(model, qat.QATConfig(RECIPES[name].base(), step="prepare"), lambda _, at: at in wanted)
    assert wanted == fake(model) == fake(trainer.task.model)
    optimizer = sgd(model.parameters())
    for batch in islice(run_of(trainer).train_source.batches(0), trainer.state.step):
        x, y = batch.data
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(trainer.task), weights(MeanTask(model)))


@pytest.mark.parametrize("name", ["float8-dynamic-act-float8-weight", "float8-dynamic-act-int4-weight"])
def test_float8_passes_gradients_on(name):
    """torchao's own, which it stands for, is zero for all but the largest value of each row."""

    def gradient(model):
        F.cross_entropy(model(x), y).backward()
        return model[1].weight.grad.flatten()

    x, y = classes(dtype=torch.float32)
    plain, ours, theirs = (nn.Sequential(nn.Linear(4, 128), *network()[3:]) for _ in range(3))
    for model in (ours, theirs):
        model.load_state_dict(plain.state_dict())
    prepare_qat(ours, RECIPES[name])
    config = qat.QATConfig(RECIPES[name].base(), step="prepare")
    quantization.quantize_(theirs, config, lambda part, at: at in fake(ours))
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    right = gradient(plain)
    assert F.cosine_similarity(gradient(ours), right, dim=0) > 0.85
    assert F.cosine_similarity(gradient(theirs), right, dim=0) < 0.5


def test_parameters_names_and_random_numbers_stay():
    model = network()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    torch.manual_seed(3)
    layers = prepare_qat(model.eval(), RECIPES[NAME])
    drawn = torch.rand(1)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == names
    assert not any(part.training for part in model.modules())
    assert drawn == torch.rand(1, generator=torch.Generator().manual_seed(3))
    assert layers.chosen == tuple(fake(model)) == ("1", "3", "5")
    assert layers.skipped == {"width not divisible by 32": ("0",)}


def test_a_layer_under_two_names_is_rounded_under_both():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"first": shared, "second": nn.ModuleDict({"again": shared})})
    prepare_qat(model, RECIPES[NAME])
    x = torch.randn(2, 32)
    assert model["first"].weight is model["second"]["again"].weight
    assert torch.equal(model["first"](x), model["second"]["again"](x))
    assert not torch.equal(model["first"](x), shared(x))


def test_preparing_again_replaces_what_was_there(tmp_path):
    model = fit(network(), qat_recipe=NAME, run_dir=tmp_path / "a", max_steps=1).task.model
    fit(model, qat_recipe="int8-weight-only", run_dir=tmp_path / "b", max_steps=1)
    assert fake(model) == ["0", "1", "3", "5"]
    assert model[3].activation_fake_quantizer is None
    restore_linear(model)
    assert {type(part) for part in model.modules()} == {nn.Sequential, nn.Linear, nn.Tanh}


def test_a_transformer_is_evaluated_as_it_is_trained():
    """The fast path of torch's layer for evaluation reads weights without calling the layers that hold them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    layers = prepare_qat(layer, RECIPES[NAME])
    assert layers.chosen == ("linear1", "linear2")
    assert list(layers.skipped.values()) == [("self_attn.out_proj",)]
    x = torch.randn(2, 5, 32)
    trained = layer.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained, rtol=0, atol=1e-5)


def test_the_classifier_of_a_timm_model_is_left_out(tmp_path):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    assert layers_for(model, RECIPES[NAME]).skipped == {"an output layer": ("head",)}
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8) % 5
    trainer = Trainer(MeanTask(model), (x, y), qat_recipe=NAME, max_steps=2, batch_size=4, log="none", run_dir=tmp_path)
    trainer.fit()
    assert fake(model) == [f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


# -- through a language model ------------------------------------------------------------------------------


def language_run(folder, config=None, **options):
    adapter = options.pop("adapter", None)
    task = CausalLM(config or llama(), adapter, 32, tokenizer=chat_tokenizer(), cache_dir=folder / "tokens")
    return trainer_for(task, sentences(), **{"qat_recipe": NAME, **options})


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_opens_as_the_plain_model(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    trainer = language_run(tmp_path, llama(tie_word_embeddings=tied), run_dir=tmp_path / "run", max_steps=2).fit()
    model = trainer.task.model
    assert len(fake(model)) == 14
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    opened = AutoModelForCausalLM.from_pretrained(checkpoint_of(trainer))
    assert not fake(opened)
    assert same(dict(opened.named_parameters()), dict(model.named_parameters()))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["qat_recipe"] == {"value": NAME, "source": "user", "depends_on": []}
    assert (
        f"quantization-aware training for {NAME}: 14 linear layers; left unchanged: 1 (an output layer)"
        in (tmp_path / "run" / "log.txt").read_text()
    )


def test_resuming_is_exact(tmp_path):
    options = {"ema": 0.9, "accumulation_steps": 2, "gradient_checkpointing": True, "save_every": 1}
    whole = language_run(tmp_path, run_dir=tmp_path / "whole", **options).fit()
    cut = language_run(tmp_path, run_dir=tmp_path / "cut", callbacks=[Cut()], **options)
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    again = language_run(tmp_path, run_dir=tmp_path / "cut", **options).fit()
    assert again.state.step == whole.state.step == 6
    assert same(weights(again.task), weights(whole.task))
    assert same(weights(again.task), weights(cut.task)) is False


def test_the_run_passes_its_own_checks(tmp_path):
    report = language_run(tmp_path, max_steps=2, run_dir=tmp_path / "run").check(raise_on_failure=False)
    assert report.ok, str(report)


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"qat_recipe": "int8-dynamic-act-int4-weights"}, "Did you mean 'int8-dynamic-act-int4-weight'"),
        ({"qat_recipe": "everything"}, "Known: int8-dynamic-act-int4-weight"),
        ({"qat_recipe": NAME, "precision": "fp8"}, "fp8 or qat_recipe, received both"),
        ({"qat_recipe": NAME, "fp8_recipe": "rowwise"}, "fp8 or qat_recipe, received both"),
        ({"qat_recipe": "float8-dynamic-act-int4-weight", "width": 96}, "2 .width not divisible by 128"),
    ],
)
def test_refused(options, words, tmp_path):
    options = dict(options)
    model = nn.Sequential(*list(network(options.pop("width", 128)))[1:4])
    with pytest.raises(BadArgument, match=words):
        Trainer(MeanTask(model), classes(inputs=32), log="none", run_dir=tmp_path, **options)
    assert not fake(model)


def test_an_adapter_is_refused_with_the_reason(tmp_path):
    with pytest.raises(BadArgument, match=r"the merged weight, which does not exist .* finalize RUN OUT --quantize"):
        language_run(tmp_path, adapter=LoRA(r=2), run_dir=tmp_path / "run")


def test_recipes_are_those_of_torchao():
    for name, recipe in RECIPES.items():
        assert recipe_named(name, "quantize") is recipe
        base = recipe.base()
        size = getattr(base, "group_size", None)
        granularity = getattr(base, "weight_granularity", getattr(base, "granularity", None))
        size = getattr(granularity, "group_size", size)
        if not name.startswith("float8"):
            assert size == recipe.group
