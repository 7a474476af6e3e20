"""`trainformer.load` of text models: the same text and probabilities as in training; transformers; adapters."""

import dataclasses
import json
import shutil

import pytest
import torch

import trainformer
from text_toys import (
    bert,
    chat_tokenizer,
    digit_pairs,
    llama,
    masking_tokenizer,
    reading_tokenizer,
    sentences,
    t5,
    trainer_for,
)
from trainformer.adapters import LoRA
from trainformer.checkpoint import finalize
from trainformer.checkpointing.manifest import FileRecord, Manifest
from trainformer.cli import main
from trainformer.core.errors import BadArgument
from trainformer.tasks import CausalLM, Seq2Seq, TextClassification, TextEmbedding

transformers = pytest.importorskip("transformers")
LABELLED = [{"id": f"t{n}", "text": text, "label": ("even", "odd")[n % 2]} for n, text in enumerate(sentences())]


def generated(trainer, prompts, **options):
    with trainer.eval_mode():
        return trainer.task.generate(prompts, **options)


def test_a_language_model_generates_as_in_training(tmp_path):
    task = CausalLM(llama(), max_length=32, tokenizer=chat_tokenizer(), cache_dir=tmp_path / "tokens")
    trainer = trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=4, ema=0.5).fit()
    prompts = ["the quick", "a", "seven wizards bake"]
    wanted = generated(trainer, prompts, max_new_tokens=6)
    shutil.rmtree(tmp_path / "tokens")
    finalize(tmp_path / "run", tmp_path / "final")
    for folder in ("run", "final"):
        model = trainformer.load(tmp_path / folder)
        assert [row["text"] for row in model(prompts, max_new_tokens=6, batch_size=2)] == wanted
        assert model("the quick", max_new_tokens=6) == {"prompt": "the quick", "text": wanted[0]}
    turns = [{"role": "user", "content": "a"}]
    prompt = "<|user|>a</s><|assistant|>"
    assert model(turns)["prompt"] == model({"messages": turns})["prompt"] == prompt
    (tmp_path / "asked.jsonl").write_text('{"id": "q1", "prompt": "the quick"}\n{"id": "q2", "prompt": "a"}\n')
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "asked.jsonl"), "--max-new-tokens", "6"]
    assert main([*words, "--out", str(tmp_path / "said.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert rows[1] == {"index": 1, "id": "q2", "prompt": "a", "text": wanted[1]}


@pytest.mark.parametrize("problem", ["single", "multi", "regression"])
def test_a_classifier_predicts_as_in_training(tmp_path, problem):
    label = {
        "single": lambda r: r["label"],
        "multi": lambda r: [r["label"], "any"],
        "regression": lambda r: len(r["text"]),
    }
    data = [{**record, "label": label[problem](record)} for record in LABELLED]
    data = [{**record, "label": float(record["label"])} for record in data] if problem == "regression" else data
    task = TextClassification(
        bert(), max_length=32, tokenizer=masking_tokenizer(sentences()), cache_dir=tmp_path / "tokens"
    )
    trainer = trainer_for(task, data, run_dir=tmp_path / "run", max_steps=3).fit()
    texts = [record["text"] for record in data]
    wanted = trainer.predict(texts)
    model = trainformer.load(tmp_path / "run")
    key = "value" if problem == "regression" else "probabilities"
    rows = model(texts)
    assert all(torch.equal(row[key], want[key]) for row, want in zip(rows, wanted, strict=True))
    if problem == "single":
        assert rows[3]["class"] == model.class_names[int(rows[3]["prediction"])]
        assert [row["id"] for row in trainer.predict(data)] == [record["id"] for record in data]
    assert model.evaluate(data) == pytest.approx(trainer.evaluate(data))
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(write(tmp_path, data)), "--json"]) == 0


def write(folder, records):
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_an_adapter_is_loaded_onto_its_base(tmp_path):
    transformers.LlamaForCausalLM(llama()).save_pretrained(tmp_path / "base")
    chat_tokenizer().save_pretrained(tmp_path / "base")
    task = CausalLM(str(tmp_path / "base"), LoRA(r=4), max_length=32, cache_dir=tmp_path / "tokens")
    trainer = trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=4, lr=1e-2).fit()
    wanted = generated(trainer, ["the quick"], max_new_tokens=6)
    base = shutil.move(tmp_path / "base", tmp_path / "other")
    with pytest.raises(BadArgument, match="a folder that exists"):
        trainformer.load(tmp_path / "run")
    model = trainformer.load(tmp_path / "run", base=base)
    assert [row["text"] for row in model(["the quick"], max_new_tokens=6)] == wanted
    with pytest.raises(BadArgument, match="a base for an adapter alone"):
        trainformer.load(base, base=base)
    # A folder of transformers, of which nothing else is known.
    plain = trainformer.load(base)
    assert type(plain.task).__name__ == "CausalLM"
    for options, said in (({"trust_remote_code": True}, "numbers"), ({"weights_only": False}, "numbers")):
        file = next((tmp_path / "run").glob("checkpoints/step_*/task.json"))
        content = json.loads(file.read_text())
        content["arguments"]["model_kwargs"] = options
        stranger = shutil.copytree(file.parent, tmp_path / "stranger", dirs_exist_ok=True)
        (stranger / "task.json").write_text(json.dumps(content))
        manifest = Manifest.read(stranger)
        files = {key: [r.name for r in records] for key, records in manifest.components.items()}
        components = {key: [FileRecord.of(stranger, name) for name in names] for key, names in files.items()}
        (stranger / "manifest.json").write_bytes(dataclasses.replace(manifest, components=components).to_bytes())
        with pytest.raises(BadArgument, match=said):
            trainformer.load(stranger, base=base)


def test_other_text_tasks(tmp_path):
    task = Seq2Seq(t5(), tokenizer=reading_tokenizer(), max_target_length=8, cache_dir=tmp_path / "tokens")
    trainer = trainer_for(task, digit_pairs(20), run_dir=tmp_path / "pairs", max_steps=2).fit()
    model = trainformer.load(tmp_path / "pairs")
    assert [model("1 2")["text"]] == generated(trainer, ["1 2"])
    pairs = digit_pairs(3)
    tokens = [row["generated"] for row in trainer.predict(pairs)]
    assert [row["text"] for row in model(pairs)] == task.text_tokenizer.batch_decode(tokens, skip_special_tokens=True)
    words = masking_tokenizer(sentences())
    task = TextEmbedding(bert(), max_length=32, tokenizer=words, cache_dir=tmp_path / "tokens")
    data = [{"anchor": text, "positive": text} for text in sentences()]
    trainer = trainer_for(task, data, run_dir=tmp_path / "embedding", max_steps=2).fit()
    row = trainformer.load(tmp_path / "embedding")("the fox")
    assert torch.equal(row["embedding"], trainer.predict(["the fox"])[0]["embedding"])
