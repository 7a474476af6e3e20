"""Text, and images with text, on a GPU: each task learns, in bf16 too, resumes bitwise, and says where it waits."""

import warnings
from functools import cache

import clip_toys
import pytest
import torch
import vlm_toys

import text_toys as toys
from toys import same, weights
from trainformer.tasks import (
    CPO,
    DPO,
    KTO,
    CausalLM,
    Distillation,
    MaskedLM,
    RewardModel,
    Seq2Seq,
    TextClassification,
    TextEmbedding,
    TokenClassification,
)

pytestmark = pytest.mark.gpu

TEXTS = toys.sentences()
LABELLED = [{"text": text, "label": "animal" if "dog" in text or "fox" in text else "other"} for text in TEXTS]
TAGGED = [{"tokens": text.split(), "ner_tags": ["B-X" if w == "fox" else "O" for w in text.split()]} for text in TEXTS]
SIMILAR = [{"anchor": text, "positive": " ".join(reversed(text.split()))} for text in TEXTS]


@cache
def words():
    """One for all: to train it again on the same texts gives another."""
    return toys.masking_tokenizer(TEXTS)


def of_text(task, config, data, tokenizer, **options):
    def make():
        torch.manual_seed(0)
        return task(config(), tokenizer=tokenizer(), **{"max_length": 64, **options}), data

    return make


def pairs():
    task = Seq2Seq(toys.t5(), max_source_length=16, max_target_length=12, tokenizer=toys.reading_tokenizer())
    return task, toys.digit_pairs(24)


TASKS = {
    "causal": of_text(CausalLM, toys.llama, toys.conversations(), toys.chat_tokenizer),
    "packed": of_text(CausalLM, toys.llama, toys.conversations(), toys.chat_tokenizer, packing=True),
    "gpt2": of_text(CausalLM, toys.gpt2, toys.conversations(), toys.chat_tokenizer),
    "distillation": of_text(
        Distillation, toys.llama, toys.conversations(), toys.chat_tokenizer, teacher="base", alpha=0.5, beta=0.5
    ),
    "dpo": of_text(DPO, toys.llama, toys.preferences(), toys.chat_tokenizer),
    "kto": of_text(KTO, toys.llama, toys.preferences(), toys.chat_tokenizer, beta=1.0),
    "cpo": of_text(CPO, toys.llama, toys.preferences(), toys.chat_tokenizer),
    "reward": of_text(RewardModel, toys.llama, toys.preferences(), toys.chat_tokenizer),
    "t5": pairs,
    "masked": of_text(MaskedLM, toys.bert, TEXTS, words),
    "classes": of_text(TextClassification, toys.bert, LABELLED, words),
    "tags": of_text(TokenClassification, toys.bert, TAGGED, words),
    "embedding": of_text(TextEmbedding, toys.bert, SIMILAR, words),
    "clip": lambda: (clip_toys.make(), None),
    "siglip": lambda: (clip_toys.make("siglip"), None),
    "llava": lambda: (vlm_toys.make("llava"), None),
    "qwen2-vl": lambda: (vlm_toys.make("qwen2"), None),
}
# transformers asks the device whether anything is masked, once for each model that is called with an attention mask;
# and Qwen-VL for the sizes of images.
WAITING = {"t5", "masked", "classes", "tags", "embedding", "reward", "llava", "qwen2-vl"}


def run(name, folder, **options):
    task, data = TASKS[name]()
    defaults = {"max_steps": 10, "batch_size": 4, "lr": 1e-3, "log": "none", "save_best": 0, "num_workers": 0}
    defaults |= {"run_dir": folder, "log_every": 9, "precision": "no"}
    if data is None:
        toy = clip_toys if name in ("clip", "siglip") else vlm_toys
        return toy.trainer_for(task, **{**defaults, **options})
    return toys.trainer_for(task, data, **{**defaults, **options})


class Waits:
    """Counts how often the host waits in some steps in the middle of a run, and remembers where."""

    def __init__(self):
        self.places = []
        self._caught = None

    def on_step_begin(self, trainer, step):
        if step == 3:
            torch.cuda.set_sync_debug_mode("warn")
            self._catch = warnings.catch_warnings(record=True)
            self._caught = self._catch.__enter__()
            warnings.simplefilter("always")
        elif step == 7:
            self.on_error(trainer)

    def on_error(self, trainer, *rest):
        torch.cuda.set_sync_debug_mode("default")
        if self._caught is not None:
            self._catch.__exit__(None, None, None)
            told = [w for w in self._caught if "synchroniz" in str(w.message)]
            self.places, self._caught = [f"{w.filename}:{w.lineno}" for w in told], None

    on_train_end = on_error


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", TASKS)
def test_it_learns(name, precision, tmp_path):
    losses = []

    class Listen:
        def on_step_end(self, trainer, step, loss):
            losses.append(float(loss))

    trainer = run(name, tmp_path, precision=precision, max_steps=30, callbacks=[Listen()])
    trainer.fit()
    assert all(torch.isfinite(p).all() for p in trainer.task.model.parameters())
    assert sum(losses[-6:]) < sum(losses[:6])


@pytest.mark.parametrize("name", TASKS)
def test_who_waits_for_the_device(name, tmp_path):
    waits = Waits()
    run(name, tmp_path, callbacks=[waits]).fit()
    ours = [place for place in waits.places if "trainformer" in place]
    assert not ours, ours
    if name not in WAITING:
        assert not waits.places, waits.places


_RESUMED = ["causal", "packed", "distillation", "dpo", "kto", "reward", "classes", "embedding", "clip", "llava"]


@pytest.mark.parametrize("name", _RESUMED)
def test_a_run_goes_on_bitwise(name, tmp_path):
    plain = {"sdpa_backend": "math"}  # other kernels may have a backward pass that is not the same twice
    whole = run(name, tmp_path / "whole", **plain).fit()
    with pytest.raises(KeyboardInterrupt):
        run(name, tmp_path / "cut", callbacks=[toys.Cut()], **plain).fit()
    again = run(name, tmp_path / "cut", **plain).fit()
    assert same(weights(whole.task), weights(again.task))
