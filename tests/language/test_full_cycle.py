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

SUMS = [(a, b) for a, b in itertools.product(range(10), (1, 2)) if a + b < 10]


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


def correct(completions, total):
    return [float(turns[-1]["content"] == str(wanted)) for turns, wanted in zip(completions, total, strict=True)]


def run(task, data, folder, **options):
    return toys.trainer_for(task, data, **{"batch_size": 16, "resume": None, "run_dir": folder, **options}).fit()


def right_answers(task):
    texts = task.generate([question(a, b) for a, b in SUMS], max_new_tokens=3)
    return sum(text == str(a + b) for text, (a, b) in zip(texts, SUMS, strict=True))


def logged(trainer, name):
    return [record[name] for record in trainer.state.log_history if name in record]


@torch.no_grad()
def next_tokens(model, tokenizer):
    """The logits after each question."""
    found = []
    for a, b in SUMS:
        ids = tokenizer.apply_chat_template(question(a, b), add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        found.append(model.eval()(input_ids=ids).logits[0, -1])
    return torch.stack(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The trainers of the four stages; each starts from the checkpoint of the one before."""
    folder = tmp_path_factory.mktemp("cycle")
    common = {"max_length": 16, "cache_dir": folder / "tokens"}
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    texts = [f"{a}+{b}={a + b}" for a, b in SUMS]
    task = CausalLM(toys.llama(tie_word_embeddings=True, **sizes), tokenizer=tokenizer(), **common)
    base = run(task, texts, folder / "base", max_steps=120, lr=5e-3)

    chats = [{"messages": question(a, b) + answer(str(a + b))} for a, b in SUMS]
    low_rank = LoRA(r=16, alpha=32, dropout=0.0, target_modules="all-linear")
    tuned = CausalLM(toys.checkpoint_of(base), low_rank, **common)
    sft = run(tuned, chats, folder / "sft", max_steps=20, lr=5e-3)

    pairs = [
        {"prompt": question(a, b), "chosen": answer(str(a + b)), "rejected": answer(str((a + b + 1) % 10))}
        for a, b in SUMS
    ]
    preferring = DPO(toys.checkpoint_of(sft), **common)
    dpo = run(preferring, pairs, folder / "dpo", max_steps=15, lr=1e-3, log_every=5)

    prompts = [{"prompt": question(a, b), "total": a + b} for a, b in SUMS]
    rewarded = GRPO(
        toys.checkpoint_of(dpo), rewards=correct, num_generations=8, max_completion_length=3, beta=0.01,
        cache_dir=folder / "tokens",
    )  # fmt: skip
    grpo = run(rewarded, prompts, folder / "grpo", max_steps=80, lr=3e-3, log_every=10)
    return base, sft, dpo, grpo


def test_every_stage_learns(trained):
    base, sft, dpo, grpo = trained
    assert logged(base, "train/loss")[-1] < 0.5 * logged(base, "train/loss")[0]
    assert right_answers(sft.task) > len(SUMS) / 2
    margins = logged(dpo, "train/rewards/margin")
    assert margins[0] == pytest.approx(0, abs=1e-5)  # the reference is the adapter that the training continues
    assert margins[-1] > 0.1
    rewards = logged(grpo, "train/reward")
    assert rewards[-1] > max(0.9, rewards[0])
    assert right_answers(grpo.task) == len(SUMS)
    # One adapter, trained three times, on the first model: its weights never changed.
    inner = grpo.task.model.get_base_model().state_dict()
    for name, value in base.task.model.state_dict().items():
        there = inner[name if name in inner else name.replace("_proj.", "_proj.base_layer.")]
        assert torch.equal(there, value), name


def test_the_folder_and_the_gguf_file_predict_the_same_and_the_model_answers(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    grpo = trained[-1]
    finalize(grpo.run_folder, tmp_path / "model", gguf="f32")
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    wanted = next_tokens(grpo.task.model, words)
    for options in ({}, {"gguf_file": "model.gguf"}):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
        found = next_tokens(opened, words)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert [words.decode(token) for token in found.argmax(-1)] == [str(a + b) for a, b in SUMS]

    assert trainformer.load(tmp_path / "model").chat("3+1") == "4"
    assert trainformer.load(grpo.run_folder).chat(question(5, 2)) == "7"
    monkeypatch.setattr("sys.stdin", io.StringIO("2+2\n/reset\n6+1\n"))
    assert main(["chat", str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out.split() == ["4", "7"]
