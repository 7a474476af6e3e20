"""Which parts of a model are divided one by one."""

import pytest
import timm
from torch import nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration

from text_toys import gpt2, llama, t5
from trainformer.core.errors import BadArgument
from trainformer.distributed.fsdp import find_blocks


def kinds(model, wanted=None):
    return [type(block).__name__ for block in find_blocks(model, wanted)]


def test_hugging_face_models_name_their_blocks():
    assert kinds(LlamaForCausalLM(llama())) == ["LlamaDecoderLayer"] * 2
    assert kinds(GPT2LMHeadModel(gpt2())) == ["GPT2Block"] * 2
    assert set(kinds(T5ForConditionalGeneration(t5()))) == {"T5Block"}


def test_repeated_modules_of_other_models_are_blocks():
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32)
    assert kinds(vit) == ["Block"] * 12
    resnet = timm.create_model("resnet18", num_classes=3)
    found = find_blocks(resnet)
    assert {type(block).__name__ for block in found} == {"BasicBlock"}
    inside = {id(p) for block in found for p in block.parameters()}
    assert sum(p.numel() for p in resnet.parameters() if id(p) in inside) > 0.7 * sum(
        p.numel() for p in resnet.parameters()
    )


def test_single_layers_lists_and_small_heads_are_no_blocks():
    assert kinds(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))) == []
    assert kinds(nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(3))) == []
    part = nn.Sequential(nn.Linear(40, 40), nn.Tanh())
    head = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    model = nn.ModuleDict({"body": nn.ModuleList(nn.Sequential(part[0], nn.Tanh()) for _ in range(1)), "head": head})
    assert find_blocks(model) == []


def test_a_block_that_shares_a_weight_with_the_outside_is_left_out():
    body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    model = nn.ModuleDict({"body": body, "head": nn.Linear(4, 4)})
    model["head"].weight = body[1][0].weight
    assert find_blocks(model) == [body[2], body[0]]


def test_blocks_can_be_selected_by_name_class_and_function():
    model = LlamaForCausalLM(llama())
    by_name = find_blocks(model, ["LlamaMLP", "LlamaDecoderLayer"])
    assert [type(b).__name__ for b in by_name] == ["LlamaMLP", "LlamaDecoderLayer"] * 2
    assert by_name == find_blocks(model, [type(by_name[0]), "LlamaDecoderLayer"])
    assert find_blocks(model, lambda name, module: name.endswith("layers.1.mlp")) == by_name[:1]
    assert find_blocks(model, ()) == []


def test_a_wrong_selection_is_refused():
    model = LlamaForCausalLM(llama())
    with pytest.raises(BadArgument, match="'LlamaDecoderLayr'\\. Did you mean 'LlamaDecoderLayer'"):
        find_blocks(model, "LlamaDecoderLayr")
    with pytest.raises(BadArgument, match="class names, classes or a function"):
        find_blocks(model, [3])
    with pytest.raises(BadArgument, match="a list has no forward pass"):
        find_blocks(model, nn.ModuleList)
    with pytest.raises(BadArgument, match="a function that selected none"):
        find_blocks(model, lambda name, module: False)
