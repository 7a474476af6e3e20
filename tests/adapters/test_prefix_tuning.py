"""Prefix tuning: keys and values as computed by hand, classifiers, and everything it does not go with."""

import pytest
import tiny_models
import torch
from tiny_models import MODELS, output
from transformers import DynamicCache

from trainformer.adapters import LoRA, PrefixTuning, adapter_state_dict
from trainformer.core.errors import BadArgument


@pytest.mark.parametrize(("name", "layers", "heads", "width"), [("llama", 2, 2, 8), ("gpt2", 2, 4, 8)])
def test_a_prefix_is_a_key_value_cache(name, layers, heads, width):
    tiny, length = MODELS[name], 5
    model = PrefixTuning(length).apply(tiny.make(), kind=tiny.kind).eval()
    rows = adapter_state_dict(model)["prompt_embeddings"]
    assert rows.shape == (length, layers * 2 * heads * width)
    parts = rows.view(1, length, layers * 2, heads, width).permute(2, 0, 3, 1, 4).expand(-1, 2, -1, -1, -1)
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(parts[2 * layer].contiguous(), parts[2 * layer + 1].contiguous(), layer)
    batch = tiny.batch()
    mask = torch.ones(2, length + 10, dtype=torch.long)
    with torch.no_grad():
        by_hand = tiny.make()(input_ids=batch["input_ids"], attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(output(model, batch), by_hand)


def test_a_prefix_of_zeros_moves_the_model_less_than_a_random_one():
    tiny, distances = MODELS["llama"], {}
    with torch.no_grad():
        plain = output(tiny.make(), tiny.batch())
        for init in ("random", "zero"):
            model = PrefixTuning(init=init).apply(tiny.make(), kind=tiny.kind).eval()
            distances[init] = (output(model, tiny.batch()) - plain).norm()
    assert 0 < distances["zero"] < 0.5 * distances["random"]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("BertForSequenceClassification", "sequence_classification"),
        ("BertForTokenClassification", "token_classification"),
        ("BertModel", "embedding"),
    ],
)
def test_classifiers_and_encoders_take_a_prefix(head, kind, tmp_path):
    adapter, batch = PrefixTuning(3), MODELS["bert"].batch()

    def fresh():
        torch.manual_seed(0)
        return tiny_models.bert(head)

    model = adapter.apply(fresh(), kind=kind).eval()
    output(model, batch).square().mean().backward()
    # The pooler of a bare encoder has no part in its hidden states.
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        after = output(model, batch)
        adapter.save(model, tmp_path)
        torch.testing.assert_close(output(adapter.load(fresh(), tmp_path).eval(), batch), after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "causal_lm", "packing": True}, "share one prefix.*Pass packing=False"),
        ({"kind": "causal_lm", "gradient_checkpointing": True}, "Pass gradient_checkpointing=False"),
        ({"kind": "clip"}, "received one of kind 'clip'"),
        ({"kind": "vision"}, "received one of kind 'vision'"),
        ({"kind": "vlm", "model": "Qwen/Qwen2-VL-2B-Instruct"}, "Qwen-VL family"),
        ({"kind": "vlm", "model": "Qwen/Qwen2.5-VL-7B-Instruct"}, "Qwen-VL family"),
        ({"kind": "speech"}, "kind to be one of"),
    ],
)
def test_what_cannot_work_is_rejected_with_the_reason(arguments, message):
    with pytest.raises(BadArgument, match=message):
        PrefixTuning().check(**arguments)
    if arguments["kind"] != "speech":
        LoRA().check(**arguments)


def is_rejected(**arguments):
    try:
        PrefixTuning().check(**arguments)
    except BadArgument:
        return True
    return False


def test_what_works_is_not_rejected():
    for kind in ("causal_lm", "seq2seq", "masked_lm", "sequence_classification", "embedding", None):
        assert not is_rejected(kind=kind), kind
    assert not is_rejected(kind="vlm", model="llava-hf/llava-1.5-7b-hf")
    assert not is_rejected(kind="causal_lm", model="Qwen/Qwen2.5-7B")
    for name in ("llama", "t5", "bert", "llava"):
        tiny = MODELS[name]
        assert not is_rejected(kind=tiny.kind, model=tiny.make().config), name
        # And it does work: the prefix is trained, and nothing else.
        model = PrefixTuning(3).apply(tiny.make(), kind=tiny.kind)
        output(model, tiny.batch()).square().mean().backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        assert list(gradients) == ["prompt_encoder.default.embedding.weight"]
        assert all(grad.abs().max() > 0 for grad in gradients.values())


def test_models_are_known_by_folder_configuration_and_instance(tmp_path):
    model = MODELS["qwen2_vl"].make()
    model.config.save_pretrained(tmp_path)
    for given in (str(tmp_path), tmp_path, model.config, model):
        with pytest.raises(BadArgument, match="Qwen-VL family"):
            PrefixTuning().check(kind="vlm", model=given)
    with pytest.raises(BadArgument, match="received Linear"):
        PrefixTuning().apply(torch.nn.Linear(2, 2))
    checkpointed = MODELS["llama"].make()
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(BadArgument, match="gradient checkpointing"):
        PrefixTuning().apply(checkpointed)


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_settings_out_of_range(number):
    with pytest.raises(BadArgument, match="num_virtual_tokens to be a positive integer"):
        PrefixTuning(number)
    with pytest.raises(BadArgument, match="init to be one of 'random', 'zero'"):
        PrefixTuning(init="ones")
