"""A padding token that is also the end of a text: its zero embedding would make gradients overflow."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import text_toys as toys
from trainformer.tasks import CausalLM


def config(tokenizer):
    ends = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), tokenizer.eos_token_id)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 16, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, **sizes, **ends)


def are_finite(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def tokenizer():
    made = toys.chat_tokenizer()
    made.pad_token = made.eos_token
    return made


def test_new_models_get_a_row_that_is_trained(tokenizer, caplog):
    end = tokenizer.eos_token_id
    ids = torch.tensor([[end, 5, 6, 7, end, 8], [5, 6, 7, end, 8, 9]])
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config(tokenizer))
    assert not plain.get_input_embeddings().weight[end].any()
    assert are_finite(plain, ids[1:])
    assert not are_finite(plain, ids)  # what transformers does

    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, "trainformer"):
        made = CausalLM(config(tokenizer), tokenizer=tokenizer, max_length=16).model
    assert not caplog.messages
    assert are_finite(made, ids)
    row = made.get_input_embeddings().weight[end]
    assert 0.5 < float(row.detach().std()) / 0.2 < 1.5
    assert bool(made.get_input_embeddings().weight.grad[end].any())
    for name, value in plain.state_dict().items():  # the other weights are the same
        there = made.state_dict()[name].clone()
        if name == "model.embed_tokens.weight":
            there[end] = 0
        assert torch.equal(there, value), name


def test_given_models_are_left_alone_with_a_warning(tokenizer, caplog, tmp_path):
    plain = LlamaForCausalLM(config(tokenizer))
    plain.save_pretrained(tmp_path)
    for source in (plain, tmp_path):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainformer"):
            made = CausalLM(source, tokenizer=tokenizer, max_length=16).model
        assert any("gradients overflow" in message for message in caplog.messages)
        assert not made.get_input_embeddings().weight[tokenizer.eos_token_id].any()
    with torch.no_grad():
        plain.get_input_embeddings().weight[tokenizer.eos_token_id] = 0.1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainformer"):
        assert CausalLM(plain, tokenizer=tokenizer, max_length=16).model is plain
    assert not caplog.messages
