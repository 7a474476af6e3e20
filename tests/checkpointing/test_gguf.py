"""GGUF files and Modelfiles from `finalize`: read back with gguf, and where it is installed, run by llama.cpp."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers

from text_toys import CHATML, bert, chat_tokenizer, gpt2, llama, masking_tokenizer, sentences, trainer_for
from trainformer.checkpoint import finalize
from trainformer.checkpointing.tools.gguf_files import TYPES, write_gguf
from trainformer.checkpointing.tools.ollama import turn_texts, write_modelfile
from trainformer.cli import main
from trainformer.cli.trained import GGUF_TYPES
from trainformer.core.errors import BadArgument
from trainformer.tasks import CausalLM, MaskedLM

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 330,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=48),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
    "gpt2": gpt2(vocab_size=330, n_embd=64, n_positions=128),
}


@pytest.fixture
def folder(request, tmp_path):
    """A model of transformers and its tokenizer, as `finalize` writes them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path, model


def field(reader, name):
    return reader.get_field(name).contents()


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_the_file_holds_the_model_and_its_tokenizer(folder):
    gguf = pytest.importorskip("gguf")
    place, model = folder
    tokenizer, config = chat_tokenizer(), model.config
    reader = gguf.GGUFReader(write_gguf(place, "f32"))
    arch = field(reader, "general.architecture")
    assert arch == {"mistral": "llama"}.get(config.model_type, config.model_type)
    assert field(reader, f"{arch}.block_count") == 2
    window = 48 if config.model_type == "mistral" else 128  # llama.cpp would attend beyond it
    assert field(reader, f"{arch}.context_length") == window
    assert field(reader, "tokenizer.chat_template") == CHATML
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == 330
    assert (field(reader, "tokenizer.ggml.eos_token_id"), field(reader, "tokenizer.ggml.add_bos_token")) == (1, False)
    stored = sum(int(np.prod(tensor.shape)) for tensor in reader.tensors if tensor.name != "rope_freqs.weight")
    assert stored == sum(parameter.numel() for parameter in model.parameters())
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    embedded = model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(found["token_embd.weight"], embedded)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
def test_llama_cpp_computes_the_same(folder):
    pytest.importorskip("gguf")
    llama_cpp = pytest.importorskip("llama_cpp")
    place, model = folder
    ids = [3, 50, 7, 200, 121, 9, 300, 44] * 4
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    for kind, tolerance in (("f32", 1e-3 if model.config.model_type == "gpt2" else 1e-5), ("q8_0", 0.2)):
        options = {"type_k": 0, "type_v": 0, "n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False}
        runtime = llama_cpp.Llama(str(write_gguf(place, kind)), **options)
        runtime.eval(ids)
        assert np.abs(runtime.scores[: len(ids)] - wanted).max() < tolerance * np.abs(wanted).max()
        for text in ("the quick", "Hello, wörld!  123 it's\n\nnew 你好", " lead"):
            encoded = runtime.tokenize(text.encode(), add_bos=False, special=True)
            assert encoded == chat_tokenizer()(text)["input_ids"]
        runtime.close()


READ = {
    "llama": CONFIGS["llama"],
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": CONFIGS["mistral"],
    "qwen2": CONFIGS["qwen2"],
    "qwen2, tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES),  # transformers reads no other width of heads than the default
    "qwen3, tied": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same_model_and_tokenizer_from_the_file(name, tmp_path):
    """It has a reader of its own, with its own names of tensors and order of rotated rows."""
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(READ[name]).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "alone").mkdir()
    write_gguf(tmp_path / "model", "f32").rename(tmp_path / "alone" / "model.gguf")
    options = {"gguf_file": "model.gguf"}
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone", dtype=torch.float32, **options).eval()
    ids = torch.randint(2, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "alone", **options)
    for text in ("the quick", "Hello, wörld!  123 it's\n\nnew 你好", " lead"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat_tokenizer()(text)["input_ids"]


def sentencepiece_tokenizer():
    """As that of Llama 2: spaces are part of the words, and unknown characters are bytes."""
    plain = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    plain.train_from_iterator(
        sentences(), trainers.BpeTrainer(vocab_size=330, special_tokens=special[:3], show_progress=False)
    )
    content = json.loads(plain.to_str())
    vocabulary = content["model"]["vocab"]
    for token in special[3:]:
        vocabulary[token] = len(vocabulary)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_tokenizer_like_sentencepieces(tmp_path):
    gguf = pytest.importorskip("gguf")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.chat_template = CHATML
    sizes = {**SIZES, "vocab_size": len(tokenizer) + 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reader = gguf.GGUFReader(write_gguf(tmp_path, "f16"))
    assert field(reader, "tokenizer.ggml.model") == "llama"
    assert field(reader, "tokenizer.ggml.add_space_prefix") is True
    assert field(reader, "tokenizer.chat_template") == CHATML
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    scores = field(reader, "tokenizer.ggml.scores")
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert sum(kind == gguf.TokenType.BYTE for kind in types) == 256
    assert sum(kind == gguf.TokenType.UNUSED for kind in types) == 2
    assert types[tokenizer.unk_token_id] == gguf.TokenType.UNKNOWN
    # Pairs are merged in the order of their scores, which is that of the merges.
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    ranked = [scores[tokens.index("".join(pair))] for pair in merges]
    assert ranked == sorted(ranked, reverse=True)


def test_finalize_makes_a_folder_for_llama_cpp_and_ollama(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    task = CausalLM(llama(), max_length=32, tokenizer=chat_tokenizer(), cache_dir=tmp_path / "tokens")
    trainer = trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=2).fit()
    result = finalize(tmp_path / "run", tmp_path / "out", gguf="f16")
    assert (result.gguf, result.notes) == ("f16", ())
    assert {"model.gguf", "Modelfile", "generation_config.json", "chat_template.jinja"} <= set(result.files)
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    want = trainer.task.model.lm_head.weight.detach().half().numpy()
    assert np.array_equal(found["output.weight"], want)
    assert (tmp_path / "out" / "Modelfile").read_text() == (
        'FROM ./model.gguf\nTEMPLATE """{{- range .Messages }}{{ if eq .Role "system" }}<|system|>{{ .Content }}</s>'
        '{{ else if eq .Role "user" }}<|user|>{{ .Content }}</s>{{ else if eq .Role "assistant" }}<|assistant|>'
        '{{ .Content }}</s>{{ end }}{{- end }}<|assistant|>"""\nPARAMETER stop "</s>"\n'
    )
    assert main(["finalize", str(tmp_path / "run"), str(tmp_path / "default"), "--json", "--gguf"]) == 0
    assert json.loads(capsys.readouterr().out)["gguf"] == "f16"
    assert finalize(tmp_path / "run", tmp_path / "true", gguf=True).gguf == "f16"
    words = ["finalize", str(tmp_path / "run"), str(tmp_path / "again"), "--gguf", "q8_0", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["gguf"] == "q8_0"
    assert (tmp_path / "again" / "model.gguf").stat().st_size < (tmp_path / "out" / "model.gguf").stat().st_size
    with pytest.raises(BadArgument, match="full precision"):
        finalize(tmp_path / "run", tmp_path / "third", gguf="f16", quantize="int8-weight-only")
    with pytest.raises(BadArgument, match="gguf to be one of 'f32', 'f16', 'bf16', 'q8_0'"):
        finalize(tmp_path / "run", tmp_path / "third", gguf="q4")
    assert not (tmp_path / "third").exists()
    assert GGUF_TYPES == TYPES


def test_what_llama_cpp_would_compute_differently_is_refused(tmp_path):
    pytest.importorskip("gguf")
    task = MaskedLM(bert(), max_length=32, tokenizer=masking_tokenizer(sentences()), cache_dir=tmp_path / "tokens")
    trainer_for(task, sentences(), run_dir=tmp_path / "masked", max_steps=1).fit()
    with pytest.raises(BadArgument, match="a causal language model to write as GGUF, received 'MaskedLM'"):
        finalize(tmp_path / "masked", tmp_path / "out", gguf="f16")
    odd = {
        "activation": llama(hidden_act="gelu"),
        "rotary": llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        "scale_attn": gpt2(scale_attn_by_inverse_layer_idx=True),
        "a model of llama": transformers.OPTConfig(
            vocab_size=330,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        ),
    }
    for said, config in odd.items():
        place = tmp_path / said.replace(" ", "_")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
        chat_tokenizer().save_pretrained(place)
        with pytest.raises(BadArgument, match=said):
            write_gguf(place, "f32")
    place = tmp_path / "split"
    transformers.AutoModelForCausalLM.from_config(llama()).save_pretrained(place)
    masking_tokenizer(sentences()).save_pretrained(place)
    with pytest.raises(BadArgument, match="a BPE tokenizer"):
        write_gguf(place, "f32")


def test_a_chat_template_that_does_more_than_joining_turns_is_not_guessed(tmp_path):
    tokenizer = chat_tokenizer("{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}")
    assert turn_texts(tokenizer) is None
    tokenizer.save_pretrained(tmp_path)
    assert "no TEMPLATE" in str(write_modelfile(tmp_path, "."))
    assert "TEMPLATE" not in (tmp_path / "Modelfile").read_text()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    tokenizer = chat_tokenizer()
    wanted = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert turn_texts(tokenizer).render(turns) == wanted
