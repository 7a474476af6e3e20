"""Every command on a run on torch and on the same run on JAX, compared with the trainers themselves."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.numpy import load_file
from text_trainer_toys import devices, make_folder, pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainformer
from text_toys import preferences
from trainformer import checkpoint
from trainformer.checkpointing.jax_files import read_arrays
from trainformer.cli import main, recipes
from trainformer.cli.components import find_component, trainer_component
from trainformer.config import load_config
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.builtin import builtin_arrays
from trainformer.data.order import sample_key
from trainformer.jax import SFTConfig, SFTTrainer, make_trainer
from trainformer.jax.tasks import ADAPTERS, REFUSED, TASKS, Settings
from trainformer.run import run_of

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
            run_of(trainer).load(root / "runs" / backend)
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


def test_sampling_is_that_of_the_trainer(runs, capsys, monkeypatch):
    """Whatever the batches; a conversation gives each turn a seed, and an answer that is retried another one."""
    trainer, model = runs.trainers["jax"], trainformer.load(runs["jax"])
    prompts = [pair["prompt"] for pair in pairs()[6:11]]
    options = {"temperature": 3.0, "top_k": 50, "max_new_tokens": 6, "seed": 3}
    wanted = trainer.generate(prompts, **options)
    assert wanted != trainer.generate(prompts, max_new_tokens=6)
    assert [row["text"] for row in model.generate(prompts, 2, **options)] == wanted
    words = ["--temperature", "3", "--top-k", "50", "--max-new-tokens", "6", "--seed", "3"]
    file = str(runs.root / "other.jsonl")
    assert main(["generate", runs["jax"], "--file", file, "--batch-size", "3", *words]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("the red fox\n/retry\n"))
    assert main(["chat", runs["jax"], *words]) == 0
    first = trainer.generate([CHAT], **{**options, "seed": [sample_key(3, 0, 0)]})
    second = trainer.generate([CHAT], **{**options, "seed": [sample_key(3, 1, 0)]})
    assert first != second
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in first + second)


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


def arrays_of(run):
    """The train state in the newest checkpoint of a run, as bytes."""
    newest = checkpoint.list_checkpoints(run)[-1]
    return newest.step, {name: array.tobytes() for name, array in read_arrays(newest.path / "state").items()}


def test_resume_after_sigkill_is_bitwise(runs, tmp_path, capsys):
    """The process dies at a step after the last checkpoint; `resume` ends as the run that nobody disturbed."""
    text = JAX.format(root=runs.root).replace("runs/jax", "runs/killed")
    text += "  callbacks: [{type: commands_toys.DieOnce}]\n"
    (runs.root / "killed.yaml").write_text(text)
    words = [sys.executable, "-m", "trainformer.cli", "run", str(runs.root / "killed.yaml")]
    trust = ["--trust", "text_trainer_toys", "--trust", "commands_toys"]
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "TRAINFORMER_TEST_DIE_AT": "3"}
    done = subprocess.run([*words, *trust], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed = str(runs.root / "runs" / "killed")
    assert [found.step for found in checkpoint.list_checkpoints(killed)] == [2]
    assert main(["resume", killed, *trust]) == 0
    assert arrays_of(killed) == arrays_of(runs["jax"])
    capsys.readouterr()
    assert main(["resume", killed, *trust]) == 0
    assert "has finished at step 4" in capsys.readouterr().out


def test_resume_trains_for_longer_and_keeps_what_was_changed(runs, tmp_path, capsys):
    run = str(shutil.copytree(runs["jax"], tmp_path / "longer"))
    trust = ["--trust", "text_trainer_toys"]
    assert main(["resume", run, "--max-steps", "6", "--set", "save_steps=3", *trust]) == 0
    assert [found.step for found in checkpoint.list_checkpoints(run)] == [2, 4, 6]
    section = load_config(Path(run, recipes.FILE), trust=("text_trainer_toys",))["trainer"]["arguments"]
    assert (section["max_steps"], section["save_steps"]) == (6, 3)
    assert "max_training_steps" not in section
    for name in ("output_dir", "run_dir", "resume"):
        assert main(["resume", run, "--set", f"{name}=elsewhere", *trust]) == 1
        assert "a setting that a resumed run can change" in " ".join(capsys.readouterr().err.split())


LINE = (
    "--task=CausalLM --model={root}/model --data={root}/train.jsonl --val={root}/val.jsonl --max-length=32 "
    "--max-steps=4 --batch-size=16 --lr=0.01 --precision=no --log=none --cache-dir={root}/tokens "
    "--weight-decay=0.1 --gradient-clip=0.5 --save-every=2steps --seed=3"
)


def test_train_means_the_same_on_both_backends(runs, capsys):
    """Learning rate, schedule, decay and clipping are those of torch; a batch has all data, whose order differs."""
    found = {}
    for backend in BACKENDS:
        words = [*LINE.format(root=runs.root).split(), f"--backend={backend}", f"--run-dir=runs/{backend}"]
        assert main(["train", *words]) == 0
        assert Path("runs", backend, recipes.FILE).is_file()
        found[backend] = answer(capsys, "evaluate", f"runs/{backend}")
    shared = ("val/loss", "val/accuracy", "val/perplexity")
    for name in shared:
        assert found["jax"]["metrics"][name] == pytest.approx(found["torch"]["metrics"][name], rel=2e-4), name
    untrained = answer(capsys, "evaluate", "runs/jax", "--data", str(runs.root / "val.jsonl"))  # same checkpoint
    assert untrained["metrics"] == pytest.approx(found["jax"]["metrics"], rel=1e-5)
    rows = {each["name"]: each for each in answer(capsys, "runs", "runs")}
    assert rows["jax"]["task"] == "SFTTrainer"
    assert rows["jax"]["best"] == pytest.approx(found["jax"]["metrics"]["val/loss"], rel=1e-5)


def test_check_on_both_backends(runs, capsys):
    for backend in BACKENDS:
        words = [*LINE.format(root=runs.root).split(), f"--backend={backend}"]
        report = answer(capsys, "check", *words)
        assert report["ok"]
        assert {"gradients", "save and load", "evaluation"} <= {each["question"] for each in report["findings"]}
    assert not Path("runs").exists()


def test_every_option_on_torch_is_mapped_or_refused_by_name(capsys):
    for name, kind in (*TASKS.items(), *ADAPTERS.items()):
        role = "adapter" if name in ADAPTERS else "task"
        there = find_component(role, name).options
        known = {field.name: field.default for field in fields(kind)}
        assert there.keys() <= known.keys() | REFUSED.keys()
        for option in there.keys() & known.keys() - {"backbone", "model_name", "augment"}:
            assert known[option] == there[option].default, option
    settings = {field.name: field for field in fields(Settings)}
    there = trainer_component().options
    assert there.keys() <= settings.keys() | REFUSED.keys()
    for option in there.keys() & settings.keys() - {"data"}:
        assert settings[option].default == there[option].default, option
    for words, said in (
        (["--neftune-noise-alpha=5"], "There is no neftune_noise_alpha for CausalLM on JAX"),
        (["--compile"], "Steps on JAX are always compiled"),
        (["--lrr=1"], "Did you mean"),
        (["--adapter=QLoRA"], "On JAX there is LoRA"),
        (["--adapter=LoRA", "--use-dora"], "There is no use_dora"),
        (["--task=GRPO"], "On JAX there is CausalLM, DPO, ImageClassification"),
        (["--backend=jx"], "Did you mean 'jax'"),
        (["--eval-every={a: 1}"], "eval_every to be a positive number"),
        (["--scheduler={type: x}"], "scheduler to be a name"),
    ):
        with pytest.raises(SystemExit):
            main(["train", "--backend=jax", "--task=CausalLM", "--model=x", "--data=y", *words])
        assert said in " ".join(capsys.readouterr().err.split()), words
    assert answer(capsys, "tasks", "DPO")["backends"] == ["torch", "jax"]
    assert answer(capsys, "tasks", "Seq2Seq")["backends"] == ["torch"]


def test_lora_is_merged_and_dpo_is_evaluated_with_its_reference(runs, tmp_path, capsys):
    """A run of DPO with LoRA and an EMA: everything but the training uses the average; the reference has no adapter."""
    lines = [dict(zip(("prompt", "chosen", "rejected"), each.values(), strict=True)) for each in preferences()]
    write_lines(tmp_path / "pairs.jsonl", lines)
    words = f"--task=DPO --model={runs.root}/model --data=pairs.jsonl --val=pairs.jsonl --max-length=48 --max-steps=4"
    words += " --batch-size=8 --lr=0.01 --log=none --cache-dir=tokens --adapter=LoRA --r=4 --adapter.dropout=0"
    words += " --run-dir=runs/dpo --ema=0.5"
    assert main(["train", "--backend=jax", *words.split()]) == 0
    found = answer(capsys, "evaluate", "runs/dpo")["metrics"]
    trainer = recipes.trainer_of("runs/dpo")
    run_of(trainer).load(Path("runs/dpo"))
    assert found == pytest.approx(metrics_of(trainer), rel=1e-6)
    assert found["val/rewards/margin"] > 0.01  # the reference is not the trained model
    other = answer(capsys, "evaluate", "runs/dpo", "--data", "pairs.jsonl")["metrics"]
    assert other == pytest.approx(found, rel=1e-4)
    assert main(["generate", "runs/dpo", "--prompt=the red", "--max-new-tokens=4"]) == 0
    assert capsys.readouterr().out == f"{SFTTrainer.generate(trainer, 'the red', 4)}\n"
    adapter = answer(capsys, "export", "runs/dpo", "adapter")["path"]
    assert sorted(path.name for path in Path(adapter).glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    made = answer(capsys, "finalize", "dpo", "merged")  # a name under runs/
    assert (made["adapter"], made["ema"]) == ("LoRA", "callback.EMA")
    ids = np.random.default_rng(0).integers(2, 320, (2, 12))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained("merged")(torch.tensor(ids)).logits.numpy()
    with trainer.eval_mode():
        np.testing.assert_allclose(trainer.model_state.model(ids), logits, atol=1e-4)
    assert answer(capsys, "finalize", "runs/dpo", "trained", "--no-ema")["ema"] is None
    with torch.no_grad():
        trained = AutoModelForCausalLM.from_pretrained("trained")(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(trainer.model_state.model(ids), trained, atol=1e-4)
    assert np.abs(trained - logits).max() > 1e-3
    base = AutoModelForCausalLM.from_pretrained(runs.root / "model")
    opened = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        np.testing.assert_allclose(opened(torch.tensor(ids)).logits.numpy(), logits, atol=1e-4)


def test_images_of_python_programs_and_of_files(tmp_path, capsys):
    """A run without a recipe is predicted with, exported and evaluated on named data; images may be files."""
    sample = builtin_arrays("digits").arrays
    images, labels = sample["image"][:48], sample["label"][:48]
    np.savez("digits.npz", image=images, label=labels)
    for number in range(24):
        file = tmp_path / "files" / f"digit{labels[number]}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number, 0]).save(file)
    options = {"batch_size": 16, "max_steps": 6, "lr": 3e-3, "log": "none"}
    names = {"backbone": None, "augment": "none", **options}
    trainer = make_trainer("ImageClassification", "digits.npz", **names, run_dir="runs/arrays")
    trainer.train()
    assert main(["predict", "runs/arrays", "digits.npz", "--batch-size", "20"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = trainer.predict(images)
    assert [row["prediction"] for row in rows] == wanted.argmax(-1).tolist()
    np.testing.assert_allclose([row["probabilities"] for row in rows], wanted, atol=1e-6)
    model = trainformer.load("runs/arrays")
    assert model(images[0, 0])["prediction"] == rows[0]["prediction"]
    assert [row["prediction"] for row in model(images[:5])] == [row["prediction"] for row in rows[:5]]
    found = answer(capsys, "evaluate", "runs/arrays", "--data", "digits.npz")["metrics"]
    assert found["val/accuracy"] == pytest.approx((wanted.argmax(-1) == labels).mean())
    assert main(["evaluate", "runs/arrays"]) == 1
    assert main(["resume", "runs/arrays", "--max-steps", "9"]) == 1
    assert "run that again" in " ".join(capsys.readouterr().err.split())
    assert main(["chat", "runs/arrays"]) == 1
    assert main(["predict", "runs/arrays", "digits.npz", "--which", "best"]) == 1
    made = answer(capsys, "finalize", "runs/arrays", "final")
    assert {"config.json", "model.safetensors"} <= set(made["files"])
    # From a folder with a folder for each class: predictions have the names of classes and files.
    words = "--backend=jax --task=ImageClassification --backbone=None --augment=none --data=files --max-steps=2"
    words += " --batch-size=8 --log=none --run-dir=runs/files"
    assert main(["train", *words.split()]) == 0
    assert main(["predict", "runs/files", "files"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["id"].startswith("digit0/")
    assert {row["class"] for row in rows} <= {f"digit{label}" for label in labels}


def test_what_cannot_be_opened_says_why(runs, tmp_path, capsys):
    """Own trainers and own modules, options of torch, checkpoints of older versions."""

    class Own(SFTTrainer):
        pass

    arguments = SFTConfig(output_dir="runs/own", max_steps=1, total_batch_size=8, log="none", cache_dir="tokens")
    Own(arguments, str(runs.root / "model"), train_dataset=pairs(), mesh=devices()).train()
    with pytest.raises(BadArgument, match="your own class"):
        trainformer.load("runs/own")
    for option in ({"task": "CausalLM"}, {"device": "cpu"}, {"quantize": "int8-weight-only"}, {"base": "x"}):
        with pytest.raises(BadArgument, match=f"no {next(iter(option))} for a run on JAX"):
            trainformer.load(runs["jax"], **option)
    assert main(["chat", runs["jax"], "--dtype", "bf16"]) == 1
    assert main(["lm-eval", runs["jax"], "--tasks", "x"]) in (1, 2)
    with pytest.raises(BadArgument, match="options of sampling, received 'top_q'"):
        trainformer.load(runs["jax"]).generate("the", top_q=0.5)
    newest = checkpoint.list_checkpoints("runs/own")[-1].path
    (newest / "trainer.json").unlink()
    with pytest.raises(DataError, match=r"trainer\.json"):
        trainformer.load(newest)
