"""Benchmarks of lm-evaluation-harness: log-likelihoods by hand, the harness by itself, the callback, the command."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from text_toys import chat_tokenizer, check_equal, gpt2, llama, sentences, trainer_for
from trainformer.callbacks import LMEval, make_callback
from trainformer.checkpoint import finalize
from trainformer.cli import app
from trainformer.core.errors import BadArgument, MissingDependency
from trainformer.eval import lm_evaluate
from trainformer.loggers import read_jsonl
from trainformer.tasks import CausalLM, Seq2Seq

QUESTIONS = [
    {"question": "the quick brown", "choices": ["fox", "a lazy dog", "pies"], "label": 0},
    {"question": "over a lazy", "choices": ["wizards bake", "dog", "fox"], "label": 1},
    {"question": "seven wizards", "choices": ["the", "jumps", "bake pies"], "label": 2},
    {"question": "a dog jumps", "choices": ["over a fox", "while", "seven"], "label": 0},
]
METRICS = ("lm_eval/words/acc", "lm_eval/words/acc_norm")


@pytest.fixture
def tasks(tmp_path):
    """A folder with a task of multiple choice and one of generated text."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    choice = {
        "task": "words",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "words.yaml").write_text(json.dumps({**source, **choice}))  # JSON is YAML
    return folder


def by_hand(model, tokenizer, limit=None):
    """Accuracy, and the same with log-likelihoods per character."""
    right = [0, 0]
    questions = QUESTIONS[:limit]
    for question in questions:
        scores = []
        for choice in question["choices"]:
            context = tokenizer(question["question"])["input_ids"]
            whole = tokenizer(f"{question['question']} {choice}")["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(logits[i - 1, whole[i]]) for i in range(len(context), len(whole))))
        for kind, size in enumerate(([1] * 3, [len(choice) for choice in question["choices"]])):
            ranked = [score / length for score, length in zip(scores, size, strict=True)]
            right[kind] += ranked.index(max(ranked)) == question["label"]
    return [count / len(questions) for count in right]


def task_of(config, folder):
    return CausalLM(config, max_length=32, tokenizer=chat_tokenizer(), cache_dir=folder / "tokens")


# -- without the harness -----------------------------------------------------------------------------------


def test_the_pip_command_is_named_where_it_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    task = task_of(llama(), tmp_path)
    with pytest.raises(MissingDependency, match=r"trainformer\[lm-eval\]"):
        lm_evaluate(task.model, task.text_tokenizer, "words")
    with pytest.raises(MissingDependency, match=r"trainformer\[lm-eval\]"):
        trainer_for(task, sentences(), callbacks=[LMEval("words")])
    assert app.main(["lm-eval", "runs/none", "--tasks=words"]) == 1
    assert "trainformer[lm-eval]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": []}, "the names of tasks"),
        ({"tasks": "a,,b"}, "the names of tasks"),
        ({"tasks": "a", "every": 0}, "at least 1"),
        ({"tasks": "a", "every": "often"}, "500steps"),
        ({"tasks": "a", "every": "10min"}, "steps or epochs"),
        ({"tasks": "a", "limit": 0}, "limit to be a positive"),
        ({"tasks": "a", "num_fewshot": -1}, "num_fewshot"),
        ({"tasks": "a", "batch_size": "many"}, "or 'auto'"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(BadArgument, match=said):
        LMEval(**arguments)


def test_the_callback_needs_a_causal_model():
    from text_toys import reading_tokenizer, t5

    with pytest.raises(BadArgument, match="a causal language model for LMEval"):
        trainer_for(
            Seq2Seq(t5(), tokenizer=reading_tokenizer()), [{"source": "1", "target": "one"}] * 4,
            callbacks=[make_callback({"name": "lm_eval", "tasks": "a"})],
        )  # fmt: skip


# -- with it -----------------------------------------------------------------------------------------------


def test_log_likelihoods_by_hand(tasks, tmp_path):
    pytest.importorskip("lm_eval")
    torch.manual_seed(0)
    task = task_of(gpt2(), tmp_path)
    task.model.train()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    found = lm_evaluate(task.model, task.text_tokenizer, "words", include_path=tasks, batch_size=3)
    limited = lm_evaluate(task.model, task.text_tokenizer, ["words"], include_path=tasks, limit=2)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(module.training for module in task.model.modules())
    task.model.eval()
    assert [found.logged()[name] for name in METRICS] == by_hand(task.model, task.text_tokenizer)
    assert [limited.logged()[name] for name in METRICS] == by_hand(task.model, task.text_tokenizer, 2)
    assert (found.samples, limited.samples, found.fewshot) == ({"words": 4}, {"words": 2}, {"words": 0})
    with pytest.raises(BadArgument, match="include_path to be a folder"):
        lm_evaluate(task.model, task.text_tokenizer, "words", include_path="nowhere")


def test_the_command_gives_what_the_harness_gives_for_the_exported_folder(tasks, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    trainer_for(task_of(llama(), tmp_path), sentences(), run_dir=tmp_path / "run", max_steps=3, lr=3e-2).fit()
    finalize(tmp_path / "run", tmp_path / "final")
    theirs = simple_evaluate(
        model="hf", model_args={"pretrained": str(tmp_path / "final"), "dtype": "float32"}, tasks=["words"],
        device="cpu", batch_size=2, task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    wanted = {f"lm_eval/words/{name}": theirs["results"]["words"][f"{name},none"] for name in ("acc", "acc_norm")}
    capsys.readouterr()
    words = ["lm-eval", str(tmp_path / "run"), "--tasks=words", f"--include-path={tasks}", "--device=cpu"]
    assert app.main(words) == 0
    out, err = capsys.readouterr()
    assert "acc_norm" in out
    assert "words" in out
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert {name: last[name] for name in METRICS} == wanted
    assert last["step"] == 3
    (file,) = (tmp_path / "run" / "lm_eval").iterdir()
    assert str(file) in err.replace("\n", "")
    assert json.loads(file.read_text())["metrics"]["words/acc"] == wanted[METRICS[0]]
    words[1] = str(tmp_path / "final")
    assert app.main([*words, "--json", "--out=found.json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {f"lm_eval/{name}": value for name, value in shown["metrics"].items()} == wanted
    assert json.loads(Path("found.json").read_text())["metrics"] == shown["metrics"]
    assert app.main([*words, "--out=found.json"]) == 1


def test_the_callback_logs_and_does_not_affect_training(tasks, tmp_path):
    pytest.importorskip("lm_eval")

    def run(name, **options):
        trainer = trainer_for(task_of(gpt2(), tmp_path), sentences(), run_dir=tmp_path / name, max_steps=4, **options)
        return trainer.fit()

    plain = run("plain")
    own = run("own", callbacks=[LMEval("words", every="2steps", include_path=tasks, limit=3)])
    check_equal(own.task.model, plain.task.model)
    records = [line for line in read_jsonl(tmp_path / "own" / "metrics.jsonl") if METRICS[0] in line]
    assert [line["step"] for line in records] == [2, 4]
    with own.eval_mode():
        assert [records[-1][name] for name in METRICS] == by_hand(own.task.model, own.task.text_tokenizer, 3)
    each = LMEval("words", every=2, include_path=tasks)
    watched = run(
        "watched", callbacks=[each], val_data=sentences()[:4], eval_every="1steps", monitor_metric=METRICS[0],
        monitor_mode="max", save_best=1,
    )  # fmt: skip
    check_equal(watched.task.model, plain.task.model)
    records = [line for line in read_jsonl(tmp_path / "watched" / "metrics.jsonl") if METRICS[0] in line]
    assert [line["step"] for line in records] == [2, 4]
    with pytest.raises(BadArgument, match="validation data for LMEval"):
        run("none", callbacks=[LMEval("words", include_path=tasks)])
