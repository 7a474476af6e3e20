"""From random weights to a model that answers: pretraining, LoRA, DPO, GRPO, finalize, GGUF, chat; each by a folder.

A toy language of sums: a question "3+4" has the answer "7". What every stage learns is measured, and the deployed
folder and the GGUF file (as transformers opens it) predict the same next tokens as the trained model.
"""

import io
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import text_toys as toys
import trainformer
from trainformer.adapters import LoRA
from trainformer.checkpoint import finalize
from trainformer.cli import main
from trainformer.tasks import DPO, GRPO, CausalLM

pytestmark = pytest.mark.slow

SUMS = [(a, b) for a, b in itertools.product(range(10), repeat=2) if a + b < 10]


def question(a, b):
    return [{"role": "user", "content": f"{a}+{b}"}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def tokenizer():
    texts = [f"{a}+{b}={a + b}" for a, b in SUMS]
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    made = PreTrainedTokenizerFast(
        tokenizer_object=toys.byte_pairs(texts, special, 261), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = toys.CHATML
    return made


def correct(completions, total, **_):
    return [float(text[-1]["content"] == str(wanted)) for text, wanted in zip(completions, total, strict=True)]


PROMPTS = [{"prompt": question(a, b), "total": a + b} for a, b in SUMS]


def run(task, data, folder, **options):
    common = {"batch_size": 16, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0, "resume": None}
    return toys.trainer_for(task, data, **{**common, "run_dir": folder, **options}).fit()


def reward(task, folder):
    """The share of right answers, greedy."""
    texts = task.generate([question(a, b) for a, b in SUMS], max_new_tokens=3)
    return sum(text == str(a + b) for text, (a, b) in zip(texts, SUMS, strict=True)) / len(SUMS)


def test_from_random_weights_to_a_model_that_answers(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    common = {"max_length": 16, "cache_dir": tmp_path / "tokens"}
    texts = [f"{a}+{b}={a + b}" for a, b in SUMS]
    config = toys.llama(vocab_size=264, hidden_size=64, intermediate_size=128, tie_word_embeddings=True)

    pretrained = run(CausalLM(config, tokenizer=tokenizer(), **common), texts, tmp_path / "base", max_steps=60)
    base = toys.checkpoint_of(pretrained)

    chats = [{"messages": question(a, b) + answer(str(a + b))} for a, b in SUMS]
    low_rank = LoRA(r=16, alpha=32, dropout=0.0, target_modules="all-linear")
    tuned = run(CausalLM(base, low_rank, **common), chats, tmp_path / "sft", max_steps=40)
    before = reward(tuned.task, tmp_path)

    pairs = [
        {"prompt": question(a, b), "chosen": answer(str(a + b)), "rejected": answer(str((a + b + 1 + a % 3) % 10))}
        for a, b in SUMS
    ]
    preferred = run(DPO(toys.checkpoint_of(tuned), **common), pairs, tmp_path / "dpo", max_steps=20, lr=3e-3)
    margins = [record["train/rewards/margin"] for record in preferred.state.log_history if "train/rewards/margin" in record]

    task = GRPO(
        toys.checkpoint_of(preferred), rewards=correct, num_generations=8, max_completion_length=3, beta=0.01,
        cache_dir=tmp_path / "tokens",
    )  # fmt: skip
    reinforced = run(task, PROMPTS, tmp_path / "grpo", max_steps=40, lr=5e-3)
    after = reward(reinforced.task, tmp_path)
    print(before, margins, after, [r.get("train/reward") for r in reinforced.state.log_history])
