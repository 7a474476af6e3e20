"""SFT on JAX: loss and weights of the torch backend, packed or not, on any mesh; folders for transformers."""

import dataclasses
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from encoder_toys import encoder, t5
from flax import nnx
from jax_model_toys import tokens, torch_logits
from text_trainer_toys import batch_of, devices, furthest_weight, make_folder, pairs, torch_run, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import text_toys as toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import SFTConfig, SFTTrainer, TrainingArguments
from trainformer.jax.text_arguments import LoRAConfig
from trainformer.models.jax import DecoderConfig
from trainformer.run import run_of
from trainformer.tasks import CausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


def sft(folder, where, data=None, **given):
    return trainer_of(SFTTrainer, SFTConfig, folder, pairs() if data is None else data, where, **given)


def tiny(vocab_size=320):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return DecoderConfig(vocab_size=vocab_size, **sizes)


def test_two_steps_match_the_torch_backend(folder, tmp_path):
    theirs = torch_run(CausalLM(str(folder), max_length=32, cache_dir=tmp_path / "t"), pairs(), tmp_path / "torch")
    mine = sft(folder, tmp_path, optimizer="sgd", options={"eval_dataset": pairs()})
    before = mine.eval()
    mine.train()
    after, wanted = mine.eval(), theirs.evaluate()
    assert after["eval_loss"] == pytest.approx(wanted["val/loss"], abs=1e-4)
    assert after["eval_accuracy"] == pytest.approx(wanted["val/accuracy"], abs=1e-6)
    assert after["eval_perplexity"] == pytest.approx(wanted["val/perplexity"], rel=1e-4)
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    saved = mine.save_pretrained(tmp_path / "saved")
    assert furthest_weight(saved, theirs.task.model) <= 1e-4
    # The saved model opens in transformers with its tokenizer and has the same loss.
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    total, count = 0.0, 0
    with torch.no_grad():
        for record in pairs():
            prompt = tokenizer(record["prompt"])["input_ids"]
            ids = [*tokenizer(record["prompt"] + record["completion"])["input_ids"], tokenizer.eos_token_id]
            scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            total -= sum(float(scores[place - 1, ids[place]]) for place in range(len(prompt), len(ids)))
            count += len(ids) - len(prompt)
    assert total / count == pytest.approx(after["eval_loss"], abs=1e-4)
    written = mine.generate("the quick", 6)
    ids = model.generate(torch.tensor([tokenizer("the quick")["input_ids"]]), max_new_tokens=6, do_sample=False)[0]
    assert written == tokenizer.decode(ids[len(tokenizer("the quick")["input_ids"]) :], skip_special_tokens=True)


def test_packed_and_chunked_losses_are_the_same(folder, tmp_path):
    data = [*toys.sentences(), *toys.sentences()[:5]]

    def measured(**fields):
        trainer = sft(folder, tmp_path, data, eval_batch_size=8, options={"eval_dataset": data}, **fields)
        return trainer, trainer.eval()

    plain, wanted = measured(chunk_tokens=0)
    packed, found = measured(packing=True, chunk_tokens=50)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert plain._chunks((8, 32)) == 1
    assert packed._chunks((8, 32)) == 6  # of 50 tokens or less
    assert len(run_of(packed).train_source.dataset) < len(run_of(plain).train_source.dataset)
    assert batch_of(packed)["segment_ids"].max() > 1
    with pytest.raises(BadArgument, match="segment_ids"):
        sft(lambda rngs: nnx.Embed(320, 320, rngs=rngs), tmp_path, data, packing=True)


def test_only_supervised_tokens_have_labels(folder, tmp_path):
    text = AutoTokenizer.from_pretrained(folder)

    def learned(data, **fields):
        batch = batch_of(sft(folder, tmp_path, data, shuffle=False, **fields))
        return [text.decode(row[row != -100]) for row in batch["labels"]]

    assert learned(pairs()) == [record["completion"] + "</s>" for record in pairs()]
    assert learned(pairs(), train_on_inputs=True) == [f"{r['prompt']}{r['completion']}</s>" for r in pairs()]
    chats = toys.conversations(turns=2)
    answers = [[turn["content"] for turn in chat["messages"] if turn["role"] == "assistant"] for chat in chats]
    assert learned(chats, max_sequence_length=64) == [f"{first}</s>{second}</s>" for first, second in answers]
    assert learned(chats, max_sequence_length=64, completion_only_loss=True) == [f"{last}</s>" for _, last in answers]
    renamed = [{"body": text, "other": "x"} for text in toys.sentences()]
    whole = learned(toys.sentences())
    assert learned(renamed, dataset_text_field="body") == whole
    formatted = {"formatting_func": lambda record: record["body"]}
    assert learned(renamed, options=formatted) == whole
    with pytest.raises(DataError, match="assistant"):
        sft(folder, tmp_path, toys.sentences(), train_on_inputs=False)


def test_rows_are_as_long_as_the_longest_sequence(folder, tmp_path):
    short = batch_of(sft(folder, tmp_path, max_sequence_length=None, learning_rate=1.0))
    assert short["input_ids"].shape == (16, 64)
    assert batch_of(sft(folder, tmp_path, max_sequence_length=24))["input_ids"].shape == (16, 24)


@pytest.mark.slow
def test_lora_trains_its_matrices_only_and_opens_in_peft(folder, tmp_path):
    peft = pytest.importorskip("peft")
    lora = {"lora": LoRAConfig(r=4, targets=["q_proj", "up_proj"]), "eval_dataset": pairs()}
    trainer = sft(folder, tmp_path, optimizer="adamw", learning_rate=0.02, options=lora)
    before, plain = trainer.eval(), jax.tree.map(np.array, trainer.model_state.params)
    state = trainer.train()
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(state.params), strict=True
        )
        if not np.array_equal(old, new)
    }
    layers = ("attention/q_proj", "mlp/up_proj")
    assert changed == {f"layers/{layer}/lora_{letter}" for layer in layers for letter in "ab"}
    adapter, merged = Path(trainer.save_pretrained("adapter")), trainer.save_pretrained("merged", merge=True)
    assert not (adapter / "model.safetensors").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    np.testing.assert_allclose(torch_logits(opened, tokens()), torch_logits(whole, tokens()), atol=1e-4)
    # Continuing from the adapter starts with the same loss.
    again = sft(folder, tmp_path / "again", options={"lora": adapter, "eval_dataset": pairs()})
    assert again.eval()["eval_loss"] == pytest.approx(trainer.eval()["eval_loss"], abs=1e-5)
    assert again.eval()["eval_loss"] < before["eval_loss"] - 0.01
    built = sft(tiny(), tmp_path / "built", options={"lora": True, "processing_class": folder})
    assert set(built.model_state.trainable) == {f"layers/attention/{p}_proj/lora_{x}" for p in "qv" for x in "ab"}


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_mesh_and_accumulation(folder, tmp_path):
    def curve(dims, accumulation=1):
        seen = []

        class Recorder:
            def on_step_end(self, trainer, step, loss):
                seen.append(float(loss))

        sizes = {"total_batch_size": 8, "gradient_accumulation_steps": accumulation, "max_steps": 3}
        options = {"mesh": devices(dims), "callbacks": [Recorder()]}
        where = tmp_path / str((*dims, accumulation))
        sft(folder, where, optimizer="adamw", learning_rate=0.01, options=options, **sizes).train()
        return seen

    wanted = curve((1, 1, 1, 1))
    assert len(wanted) == 3
    assert wanted[2] < wanted[0]
    assert curve((2, 1, 2, 1), accumulation=2) == pytest.approx(wanted, abs=2e-5)


def test_contradictions_are_refused(folder, tmp_path):
    with pytest.raises(BadArgument, match="train_on_inputs=True, completion_only_loss=True"):
        SFTConfig(train_on_inputs=True, completion_only_loss=True)
    with pytest.raises(BadArgument, match="label_smoothing"):
        SFTConfig(label_smoothing=1.0)
    with pytest.raises(BadArgument, match="truncate"):
        SFTConfig(truncation="truncat")
    with pytest.raises(BadArgument, match="Did you mean 'alpha'"):
        sft(folder, tmp_path, options={"lora": {"alph": 3}})
    with pytest.raises(BadArgument, match="at most 100 tokens"):
        sft(tiny(vocab_size=100), tmp_path, options={"processing_class": folder})
    with pytest.raises(DataError, match="one record at a time"):
        sft(folder, tmp_path, options={"formatting_func": lambda record: [record["prompt"]]})
    with pytest.raises(BadArgument, match="a tokenizer for data"):
        sft(lambda rngs: nnx.Embed(320, 320, rngs=rngs), tmp_path)
    # What was passed to plain arguments is kept, and the rest is as this trainer has it.
    plain = TrainingArguments(learning_rate=0.25, packing=True)
    assert (SFTConfig.from_arguments(plain).learning_rate, SFTConfig.from_arguments(plain).passed) == (
        0.25,
        {"learning_rate", "packing"},
    )


def test_tokens_that_the_model_has_not_are_told_instead_of_made_nan(tmp_path):
    data = [{"input_ids": [1, 2, 3, 320]}] * 8
    with pytest.raises(DataError, match="from 0 to 319, received 320"):
        sft(tiny(), tmp_path, data).train()


def test_a_config_that_could_not_be_saved_is_refused(tmp_path):
    with pytest.raises(BadArgument, match=r"the parameters of 'gpt2'.*embed_positions.*model_from_config"):
        sft(dataclasses.replace(tiny(), model_type="gpt2"), tmp_path, [{"input_ids": [1, 2]}] * 8)


def test_each_device_receives_its_shard_of_the_weights_of_a_folder(folder, tmp_path):
    """No device ever holds all of them, and the trainer does not keep the host copy."""
    read = []

    class Watched(SFTTrainer):
        def read_folder(self, folder, **options):
            read.append(model := super().read_folder(folder, **options))
            return model

    trainer = trainer_of(Watched, SFTConfig, folder, pairs(), tmp_path, options={"mesh": devices((1, 2, 1, 1))})
    (model,) = read
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert trainer.model is not model
    kernel = trainer.model_state.params["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2
    read.clear()
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


def test_a_user_defined_model_is_trained(folder, tmp_path):
    class Bigrams(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(320, 320, rngs=rngs)

        def __call__(self, ids):
            return self.table(ids)

    options = {"processing_class": folder, "eval_dataset": pairs()}
    trainer = sft(lambda rngs: Bigrams(rngs), tmp_path, options=options, optimizer="sgd", learning_rate=10.0)
    before = trainer.eval()["eval_loss"]
    table = np.asarray(trainer.model_state.params["table"]["embedding"], np.float64)
    batch = batch_of(trainer)
    ids, labels = batch["input_ids"][:, :-1], batch["labels"][:, 1:]
    scores = table[ids] - np.log(np.exp(table[ids]).sum(-1, keepdims=True))
    picked = np.take_along_axis(scores, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert before == pytest.approx(-picked[labels != -100].mean(), abs=1e-5)
    trainer.train()
    assert trainer.eval()["eval_loss"] < before - 0.01
    assert jnp.isfinite(trainer.model_state.params["table"]["embedding"]).all()


@pytest.mark.slow
def test_training_on_a_file_imports_no_torch(folder, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in pairs()))
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from reading_without_torch import Forbidden
sys.meta_path.insert(0, Forbidden())
from trainformer.jax import SFTConfig, SFTTrainer
arguments = SFTConfig(max_steps=1, total_batch_size=8, log="none", cache_dir="tokens", output_dir="run")
trainer = SFTTrainer(arguments, {str(folder)!r}, train_dataset={str(data)!r}, lora=True)
trainer.train()
trainer.save_pretrained("saved", merge=True)
print(sorted(name for name in sys.modules if name.split(".")[0] == "torch"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-2000:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.vocab_size == 320


@pytest.mark.parametrize(
    ("saved", "received"),
    [(lambda: encoder("bert MaskedLM", vocab_size=320), "Bert"), (lambda: t5(vocab_size=320), "T5")],
)
def test_models_that_are_not_causal_are_refused(saved, received, tmp_path):
    """An encoder sees the tokens that it would have to predict."""
    saved().save_pretrained(tmp_path / "model")
    with pytest.raises(BadArgument, match=f"a causal language model for SFTTrainer, received '{received}'"):
        sft(tmp_path / "model", tmp_path, options={"processing_class": toys.chat_tokenizer()})
