"""Loading models of transformers: what real files contain besides the weights is no error, what is missing is."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertForPreTraining, GPTNeoConfig, GPTNeoForCausalLM, LlamaForCausalLM

import text_toys as toys
from trainformer.core import BadArgument
from trainformer.models.language import load_model


def test_an_encoder_that_was_saved_for_several_purposes(tmp_path):
    """Files of BERT have a pooler and a head for pairs of sentences, and say that they are of BertForMaskedLM."""
    saved = BertForPreTraining(toys.bert())
    saved.config.architectures = ["BertForMaskedLM"]
    saved.save_pretrained(tmp_path)
    model = load_model(tmp_path, "masked_lm")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, saved.eval()(ids).prediction_logits)
    with pytest.raises(BadArgument, match="unused"):
        load_model(tmp_path, "causal_lm")


def test_buffers_of_older_files(tmp_path):
    """GPT-Neo used to save its masks."""
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "max_position_embeddings": 16}
    saved = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]]))
    saved.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        place = f"transformer.h.{layer}.attn.attention"
        state |= {f"{place}.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool), f"{place}.masked_bias": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path, "causal_lm")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, saved.eval()(ids).logits)


def test_weights_that_are_missing_or_unused_are_named(tmp_path):
    saved = LlamaForCausalLM(toys.llama())
    saved.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        save_file({k: v for k, v in whole.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(BadArgument, match=rf"1 missing \({name}\)"):
            load_model(tmp_path, "causal_lm")
    save_file({**whole, "model.layers.2.extra.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadArgument, match=r"1 unused \(model.layers.2.extra.weight\)"):
        load_model(tmp_path, "causal_lm")
