"""Every command on a run on torch and on the same run on JAX, compared with the trainers themselves."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from text_trainer_toys import make_folder, pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainformer
from trainformer.cli import main, recipes

TORCH = """\
trainer:
  type: trainformer.Trainer
  task: {{type: trainformer.tasks.CausalLM, model_name: {root}/model, max_length: 32, cache_dir: {root}/tokens}}
  data: {root}/train.jsonl
  val_data: {root}/val.jsonl
  run_dir: {root}/runs/torch
  max_steps: 4
  batch_size: 8
  eval_batch_size: 4
  lr: 0.01
  save_every: 2steps
  save_last: 9
  device: cpu
  precision: fp32
  log: none
"""
JAX = """\
trainer:
  type: trainformer.jax.SFTTrainer
  arguments:
    type: trainformer.jax.SFTConfig
    output_dir: {root}/runs/jax
    max_training_steps: 4
    total_batch_size: 8
    eval_batch_size: 4
    learning_rate: 0.01
    save_steps: 2
    max_sequence_length: 32
    sharding_array: [1, 1, 1, 1]
    cache_dir: {root}/tokens
    log: none
  model: {root}/model
  train_dataset: {root}/train.jsonl
  eval_dataset: {root}/val.jsonl
  mesh: {{type: text_trainer_toys.devices}}
"""
BACKENDS = ("torch", "jax")
CHAT = [{"role": "user", "content": "the red fox"}]


@dataclass
class Runs:
    root: Path
    trainers: dict[str, Any]  # rebuilt in Python, with the weights of the last checkpoint

    def __getitem__(self, backend: str) -> str:
        return str(self.root / "runs" / backend)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs by `trainformer run`, of the same model on the same data."""
    root = tmp_path_factory.mktemp("commands")
    make_folder(root / "model")
    write_lines(root / "train.jsonl", pairs())
    write_lines(root / "val.jsonl", pairs()[:6])
    write_lines(root / "other.jsonl", pairs()[6:11])
    trainers = {}
    for backend, text in (("torch", TORCH), ("jax", JAX)):
        (root / f"{backend}.yaml").write_text(text.format(root=root))
        assert main(["run", str(root / f"{backend}.yaml"), "--trust", "text_trainer_toys"]) == 0
        trainer = recipes.trainer_of(str(root / "runs" / backend), trust=("text_trainer_toys",))
        if backend == "torch":
            trainer.load(root / "runs" / backend)
        else:
            trainer._run.load(root / "runs" / backend)
        trainers[backend] = trainer
    return Runs(root, trainers)


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def metrics_of(trainer, data=None):
    """The metrics of a trainer, under the names of the log."""
    if hasattr(trainer, "fit"):
        return trainer.evaluate(data)
    return {name.replace("eval_", "val/"): value for name, value in trainer.eval().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluate(runs, backend, capsys):
    trust = ["--trust", "text_trainer_toys"]
    found = answer(capsys, "evaluate", runs[backend], *trust)
    assert found["step"] == 4
    assert found["metrics"] == pytest.approx(metrics_of(runs.trainers[backend]), rel=1e-6)
    assert {"val/loss", "val/accuracy", "val/perplexity"} <= found["metrics"].keys()
    named = answer(capsys, "evaluate", runs[backend], *trust, "--batch-size", "3")
    assert named["metrics"] == pytest.approx(found["metrics"], rel=1e-5)
    # Other data need neither the training data nor the recipe.
    file = runs.root / ("torch.yaml", "jax.yaml")[backend == "jax"]
    recipe = Path(runs[backend], recipes.FILE)
    text = recipe.read_text()
    recipe.unlink()
    try:
        assert main(["evaluate", runs[backend]]) == 1
        assert "--data DATA" in " ".join(capsys.readouterr().err.split())
        other = answer(capsys, "evaluate", runs[backend], "--data", str(runs.root / "val.jsonl"))
    finally:
        recipe.write_text(text)
    assert file.is_file()
    assert other["metrics"] == pytest.approx(found["metrics"], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_predict_and_generate(runs, backend, capsys):
    file = str(runs.root / "other.jsonl")
    assert main(["predict", runs[backend], file, "--max-new-tokens", "6", "--batch-size", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompts = [pair["prompt"] for pair in pairs()[6:11]]
    assert [row["prompt"] for row in rows] == prompts
    assert [row["target"] for row in rows] == [pair["completion"] for pair in pairs()[6:11]]
    trainer = runs.trainers[backend]
    wanted = (
        [row["text"] for row in trainer.predict(file, max_new_tokens=6)]
        if backend == "torch"
        else trainer.generate(prompts, max_new_tokens=6)
    )
    assert [row["text"] for row in rows] == wanted
    assert main(["generate", runs[backend], "--prompt", prompts[0], "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == f"{wanted[0]}\n"
    assert main(["generate", runs[backend], "--file", file, "--out", "texts.csv", "--max-new-tokens", "6"]) == 0
    assert len(Path("texts.csv").read_text().splitlines()) >= 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_chat(runs, backend, capsys, monkeypatch):
    model = trainformer.load(runs[backend])
    wanted = model.chat(CHAT, max_new_tokens=5)
    assert wanted == "".join(model.stream(CHAT, max_new_tokens=5))
    monkeypatch.setattr("sys.stdin", io.StringIO("the red fox\n/save turns.jsonl\n"))
    assert main(["chat", runs[backend], "--max-new-tokens", "5", "--system", "none"]) == 0
    capsys.readouterr()
    turns = json.loads(Path("turns.jsonl").read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]
    monkeypatch.setattr("sys.stdin", io.StringIO("the red fox\n"))
    assert main(["chat", runs[backend], "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == f"{wanted}\n"


def test_answers_equal_those_of_transformers(runs, tmp_path):
    """A conversation, with the tokens that the chat template ends an answer with; a batch of unequal prompts."""
    model = trainformer.load(runs["jax"])
    folder = model.export(tmp_path / "model")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in (CHAT, [{"role": "system", "content": "a"}, *CHAT]):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert model.count_tokens(prompt) == ids.shape[1]
        with torch.no_grad():
            new = theirs.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
        answer = model.generate(prompt, max_new_tokens=6)
        assert tokenizer.decode(new, skip_special_tokens=True).startswith(answer["text"])
    rows = model.generate(["the", "the red fox and the old dog"], max_new_tokens=4)
    assert [row["text"] for row in rows] == [model.generate(row["prompt"], max_new_tokens=4)["text"] for row in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_export(runs, backend, tmp_path, capsys):
    trainer = runs.trainers[backend]
    name = {"torch": "model.pt", "jax": "model.safetensors"}[backend]
    found = answer(capsys, "export", runs[backend], str(tmp_path / name))
    if backend == "torch":
        weights = torch.load(found["path"], weights_only=True)
        assert all(torch.equal(weights[name], value) for name, value in trainer.task.model.state_dict().items())
        assert main(["export", runs[backend], "out", "--format", "huggingface"]) == 1
        return
    assert found["format"] == "safetensors"
    params = trainer.model_state.params
    assert np.array_equal(load_file(found["path"])["embed_tokens/embedding"], params["embed_tokens"]["embedding"])
    folder = answer(capsys, "export", runs[backend], str(tmp_path / "folder"))["path"]
    ids = np.random.default_rng(0).integers(2, 320, (2, 12))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(trainer.model_state.model(ids), logits, atol=2e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    for words in (["out.onnx"], ["out", "--format", "onnx"], ["out", "--preprocess"], ["out", "--input-shape", "3"]):
        assert main(["export", runs[backend], *words]) == 1
        assert "run on JAX" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("backend", BACKENDS)
def test_finalize(runs, backend, tmp_path, capsys):
    found = answer(capsys, "finalize", runs[backend], str(tmp_path / "out"))
    assert found["step"] == 4
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(found["files"])
    assert "trained with trainformer" in (tmp_path / "out" / "README.md").read_text()
    opened = trainformer.load(tmp_path / "out")  # as a model of transformers
    rows = opened.generate("the red", max_new_tokens=4)
    assert rows["text"] == trainformer.load(runs[backend]).generate("the red", max_new_tokens=4)["text"]
    assert main(["finalize", runs[backend], str(tmp_path / "out")]) == 1  # it is there
    if backend == "jax":
        for words in (["--quantize", "int8-weight-only"], ["--base", "x"], ["--device", "cpu"]):
            assert main(["finalize", runs[backend], str(tmp_path / "other"), *words]) == 1
            assert "for a run on JAX" in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "other").exists()
