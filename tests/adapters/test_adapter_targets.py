"""Which layers are adapted: the language model of a VLM, the head of a classifier, timm models, wrong names."""

import pytest
import timm
import tiny_models
import torch
from safetensors.torch import load_file
from tiny_models import MODELS
from torch import nn

from trainformer.adapters import LoRA, merge_and_export
from trainformer.adapters.targets import linear_names
from trainformer.core.errors import BadArgument


def adapted_names(model):
    """Full names, in the plain model, of the layers with LoRA on them."""
    return {
        name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0]
        for name, p in model.named_parameters()
        if p.requires_grad and ".lora_" in name
    }


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "v_proj"], "q_proj"])
def test_only_the_language_model_of_a_vlm_is_adapted(name, targets):
    model = LoRA(target_modules=targets).apply(MODELS[name].make(), kind="vlm")
    names = adapted_names(model)
    assert names
    assert all("language_model" in name for name in names)
    per_layer = {"all-linear": 7, "q_proj": 1}.get(targets, 2) if isinstance(targets, str) else 2
    if name == "qwen2_vl" and targets is None:
        per_layer = 7  # peft knows no defaults for its language model
    assert len(names) == 2 * per_layer


def test_the_vision_tower_is_adapted_when_it_is_named():
    tower = LoRA(target_modules=r".*vision_tower.*\.q_proj").apply(MODELS["llava"].make(), kind="vlm")
    assert len(adapted_names(tower)) == 2
    assert all("vision_tower" in name for name in adapted_names(tower))
    dotted = LoRA(target_modules=["self_attn.q_proj"]).apply(MODELS["llava"].make(), kind="vlm")
    assert len(adapted_names(dotted)) == 4


def test_names_of_the_vision_tower_alone_need_an_expression():
    with pytest.raises(BadArgument, match=r"layers of the language model .*received 'qkv'.*regular expression"):
        LoRA(target_modules=["q_proj", "qkv"]).apply(MODELS["qwen2_vl"].make(), kind="vlm")


def test_a_name_that_others_end_in_means_itself():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    assert adapted_names(LoRA().apply(model)) == {"0", "1.1"}


def test_all_linear_leaves_out_the_output_layer_alone():
    model = MODELS["llama"].make()
    linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert set(linear_names(model)) == linear - {"lm_head"}
    assert adapted_names(LoRA(target_modules="all-linear").apply(model)) == linear - {"lm_head"}


def test_clip_is_adapted_in_both_towers():
    names = adapted_names(LoRA().apply(MODELS["clip"].make(), kind="clip"))
    assert any(name.startswith("text_model") for name in names)
    assert any(name.startswith("vision_model") for name in names)
    assert len(adapted_names(LoRA(target_modules=["q_proj"]).apply(MODELS["clip"].make(), kind="clip"))) == 4


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_timm_vit_with_its_head_trained_in_full(use_dora, use_rslora, tmp_path):
    def fresh():
        torch.manual_seed(0)
        return timm.create_model("test_vit", num_classes=5).eval()

    adapter = LoRA(r=4, use_dora=use_dora, use_rslora=use_rslora)
    model = adapter.apply(fresh(), kind="vision").eval()
    names = adapted_names(model)
    assert {name.split(".", 2)[2] for name in names} == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    others = [name for name in adapter.trainable(model) if ".lora_" not in name]
    assert others == [f"base_model.model.head.modules_to_save.default.{part}" for part in ("weight", "bias")]
    images = torch.randn(2, 3, 160, 160)
    model.set_grad_checkpointing(True)
    model.train()(images).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
        after = model.eval()(images)
        adapter.save(model, tmp_path / "adapter")
        torch.testing.assert_close(adapter.load(fresh(), tmp_path / "adapter").eval()(images), after)
        assert merge_and_export(model, tmp_path / "merged") == ["model.safetensors"]
        plain = fresh()
        plain.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
        torch.testing.assert_close(plain(images), after, atol=1e-5, rtol=1e-5)


def test_convolutions_are_adapted_when_they_are_named():
    with pytest.raises(BadArgument, match=r"it has Conv2d, Linear.*Name the layers"):
        LoRA().apply(timm.create_model("test_resnet", num_classes=5), kind="vision")
    torch.manual_seed(0)
    adapter = LoRA(r=2, target_modules=["conv2"], init=False)
    model = adapter.apply(timm.create_model("test_resnet", num_classes=5), kind="vision").eval()
    assert adapted_names(model)
    assert any("fc.modules_to_save" in name for name in adapter.trainable(model))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        torch.testing.assert_close(adapter.merge(model)(images), before, atol=1e-5, rtol=1e-4)


def test_the_heads_of_classifiers_are_trained_and_not_adapted():
    cases = {
        "sequence_classification": [
            (lambda: tiny_models.bert("BertForSequenceClassification", num_labels=3), {"classifier"}),
            (tiny_models.distilbert, {"pre_classifier", "classifier"}),
        ],
        "token_classification": [
            (lambda: tiny_models.bert("BertForTokenClassification", num_labels=3), {"classifier"})
        ],
    }
    for kind, models in cases.items():
        for build, heads in models:
            for targets in (None, "all-linear"):
                adapter = LoRA(target_modules=targets)
                model = adapter.apply(build(), kind=kind)
                full = {n.split(".")[2] for n in adapter.trainable(model) if ".lora_" not in n}
                assert full == heads
                assert not any(name.split(".")[0] in heads for name in adapted_names(model))


def test_layers_inside_multihead_attention_are_not_adapted():
    model = nn.TransformerEncoderLayer(16, 2, 32)
    # Its output projection is a linear layer that is never called: LoRA on it would train nothing.
    assert linear_names(model) == ["linear1", "linear2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_modules": ["q_prj"]}, r"modules of LlamaForCausalLM, received 'q_prj'\. Did you mean 'q_proj'"),
        ({"target_modules": "q_prj"}, "Did you mean 'q_proj'"),
        ({"target_modules": ["xyzzy"]}, "Linear layers end in: down_proj"),
        ({"target_modules": ["self_attn"]}, r"self_attn \(LlamaAttention\).*k_proj"),
        ({"target_modules": "(q_proj"}, "a regular expression"),
        ({"modules_to_save": ["lm_heads"]}, "modules_to_save to name modules.*Did you mean 'lm_head'"),
        ({"trainable_token_indices": [64]}, "from 0 to 63"),
        ({"trainable_token_indices": {"embed_token": [1]}}, "Did you mean 'embed_tokens'"),
    ],
)
def test_names_that_a_model_does_not_have(arguments, message):
    with pytest.raises(BadArgument, match=message):
        LoRA(**arguments).apply(MODELS["llama"].make())


def test_tied_embeddings_are_not_adapted():
    with pytest.raises(BadArgument, match=r"modules_to_save=\['wte'\]"):
        LoRA(target_modules=["c_attn", "wte"]).apply(MODELS["gpt2"].make())
    with pytest.raises(BadArgument, match="a model with token embeddings"):
        LoRA(trainable_token_indices=[1]).apply(nn.Sequential(nn.Linear(2, 2)))


def test_errors_of_peft_are_wrapped():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    with pytest.raises(BadArgument, match="received from peft"):
        LoRA(r=3, target_modules=["0"]).apply(model)
