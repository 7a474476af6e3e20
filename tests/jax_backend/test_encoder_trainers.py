"""Trainers of encoders and encoder-decoders on JAX: masks, the torch tasks' losses and weights, meshes, resuming."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from encoder_toys import randomised
from flax import nnx
from jax_toys import Crash, CrashAt, losses
from text_trainer_toys import batch_of, devices, torch_run, trainer_of

import text_toys as toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.order import sample_key, seed_generators
from trainformer.data.text.masking import mask_tokens
from trainformer.jax import (
    LoRAConfig,
    MaskedLMConfig,
    MaskedLMTrainer,
    Seq2SeqConfig,
    Seq2SeqTrainer,
    SequenceClassificationConfig,
    SequenceClassificationTrainer,
    SFTConfig,
    SFTTrainer,
)
from trainformer.models.jax import BertConfig, T5Config
from trainformer.models.jax.huggingface import flat_params
from trainformer.run import run_of
from trainformer.tasks import MaskedLM, Seq2Seq, TextClassification

TEXTS = toys.sentences()
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture(scope="module")
def words():
    return toys.masking_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("bert")
    randomised(hf.BertForMaskedLM(toys.bert())).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def masked(model, where, data=None, **given):
    return trainer_of(MaskedLMTrainer, MaskedLMConfig, model, TEXTS if data is None else data, where, **given)


def classifier(model, where, data, **given):
    return trainer_of(SequenceClassificationTrainer, SequenceClassificationConfig, model, data, where, **given)


def seq2seq(model, where, data, **given):
    given = {"max_source_length": 32, "max_target_length": 32, **given}
    return trainer_of(Seq2SeqTrainer, Seq2SeqConfig, model, data, where, max_sequence_length=None, **given)


def difference(folder, model, auto):
    """The largest difference of the weights in a folder, as transformers opens it, from those of a model."""
    mine, theirs = auto.from_pretrained(folder).state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


# -- masked language models ----------------------------------------------------------------------------------------


def test_masked_lm_trains_as_on_torch(bert_folder, tmp_path):
    task = MaskedLM(str(bert_folder), max_length=32, cache_dir=tmp_path / "t")
    theirs = torch_run(task, TEXTS, tmp_path / "torch", seed=42)
    mine = masked(bert_folder, tmp_path, optimizer="sgd", options={"eval_dataset": TEXTS})
    before = mine.eval()["eval_loss"]
    mine.train()
    after, wanted = mine.eval(), theirs.evaluate()
    assert after["eval_loss"] < before - 0.1
    for name in ("loss", "accuracy", "perplexity"):
        assert after[f"eval_{name}"] == pytest.approx(wanted[f"val/{name}"], rel=1e-4)
    saved = mine.save_pretrained(tmp_path / "saved")
    assert difference(saved, theirs.task.model, hf.AutoModelForMaskedLM) <= 1e-4
    assert hf.AutoTokenizer.from_pretrained(saved).mask_token == "[MASK]"


def test_masks_follow_from_seed_epoch_and_sample(bert_folder, tmp_path):
    def of_epoch(epoch, size, dims=(1, 1, 1, 1)):
        options, given = {"mesh": devices(dims)}, {"max_steps": 9, "shuffle": False, "seed": 7}
        trainer = masked(bert_folder, tmp_path, total_batch_size=size, options=options, **given)
        batches = [batch.data for batch in run_of(trainer).train_source.batches(epoch)]
        return {name: np.concatenate([b[name][b["_valid"]] for b in batches]) for name in ("input_ids", "labels")}

    small, large = of_epoch(1, 8), of_epoch(1, 24, (2, 2, 1, 1))
    assert all(np.array_equal(small[name], large[name]) for name in small)
    assert not np.array_equal(small["labels"], of_epoch(0, 8)["labels"])
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_folder)
    special = np.array(sorted(tokenizer.all_special_ids))
    others = np.setdiff1d(np.arange(len(tokenizer)), special)
    for index, text in enumerate(TEXTS):
        ids = np.array(tokenizer(text)["input_ids"])
        words = np.where(np.isin(ids, special), -100, np.arange(len(ids)))
        seed_generators(sample_key(7, 1, index))
        rng = np.random.default_rng(np.random.randint(0, 2**32, 4, dtype=np.uint32))
        wanted = mask_tokens(ids, words, rng, tokenizer.mask_token_id, others, 0.15)
        for name, row in zip(("input_ids", "labels"), wanted, strict=True):
            assert np.array_equal(small[name][index, : len(ids)], row)
        assert (small["labels"][index, len(ids) :] == -100).all()


def test_packing_meshes_and_accumulation_do_not_change_the_loss(words, tmp_path):
    config = BertConfig(vocab_size=96, max_position_embeddings=64, **SMALL, **NO_DROPOUT)
    given = {"total_batch_size": 8, "max_steps": 2, "logging_steps": 1, "max_grad_norm": None}

    def run(dims, **more):
        options = {"processing_class": words, "eval_dataset": TEXTS, "mesh": devices(dims)}
        return masked(config, tmp_path / str(dims), options=options, **given, **more)

    plain = run((1, 1, 1, 1))
    wanted = plain.eval()
    packed = run((1, 1, 1, 1), packing=True)
    assert packed.eval() == pytest.approx(wanted, rel=1e-5)
    assert batch_of(packed)["segment_ids"].max() > 1
    plain.train()
    sharded = run((1, 1, 2, 2), gradient_accumulation_steps=2)
    sharded.train()
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-5)
    assert sharded.eval()["eval_loss"] == pytest.approx(plain.eval()["eval_loss"], rel=1e-5)


def test_a_masked_model_learns_and_resumes_bitwise(words, tmp_path):
    """Each text is a run of one sequence of words: its neighbours tell a hidden one."""
    data = [" ".join(toys.WORDS[(start + k) % 14] for k in range(9)) for start in range(14)] * 4
    sizes = {**SMALL, "max_position_embeddings": 16, "initializer_range": 0.05}
    given = {"total_batch_size": 56, "learning_rate": 1e-2, "max_sequence_length": 16}

    def run(name, *callbacks, rate=0.0, steps=150, **more):
        config = BertConfig(vocab_size=96, **sizes, hidden_dropout=rate, attention_dropout=rate)
        options = {"processing_class": words, "callbacks": callbacks, "eval_dataset": data}
        return masked(config, tmp_path / name, data, options=options, **{**given, "max_steps": steps, **more})

    learned = run("learned")
    assert learned.eval()["eval_accuracy"] < 0.3
    learned.train()
    assert learned.eval()["eval_accuracy"] > 0.6
    saving = {"save_strategy": "steps", "save_steps": 2, "steps": 5, "rate": 0.1, "total_batch_size": 24}
    uninterrupted = run("a", **saving).train()
    with pytest.raises(Crash):
        run("b", CrashAt(3), **saving).train()
    resumed = run("b", **saving, resume="auto").train()
    assert int(resumed.step) == 5
    pairs = zip(jax.tree.leaves(uninterrupted.params), jax.tree.leaves(resumed.params), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


# -- classification ------------------------------------------------------------------------------------------------


def labelled(kind="names"):
    """Texts by their first word; pairs of texts with several labels each."""
    first = sorted({text.split()[0] for text in TEXTS})[:3]
    found = [(text, first.index(text.split()[0])) for text in TEXTS if text.split()[0] in first]
    if kind == "names":
        return [{"text": text, "label": "abc"[label]} for text, label in found]
    if kind == "regression":
        return [{"text": text, "label": label - 0.75} for text, label in found]
    several = [["a"], ["a", "c"], ["b"]]
    return [{"sentence1": text, "sentence2": TEXTS[i], "label": several[c]} for i, (text, c) in enumerate(found)]


@pytest.mark.parametrize("kind", ["names", "multi", "regression"])
def test_classification_trains_as_on_torch(kind, bert_folder, tmp_path):
    data, count = labelled(kind), 1 if kind == "regression" else 3
    base = hf.AutoModelForSequenceClassification.from_pretrained(bert_folder, num_labels=count)
    randomised(base).save_pretrained(tmp_path / "base")
    hf.AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "base")
    smoothing = {"label_smoothing": 0.1} if kind == "names" else {}
    task = TextClassification(str(tmp_path / "base"), max_length=32, cache_dir=tmp_path / "t", **smoothing)
    theirs = torch_run(task, data, tmp_path / "torch", seed=42)
    mine = classifier(tmp_path / "base", tmp_path, data, optimizer="sgd", options={"eval_dataset": data}, **smoothing)
    before = mine.eval()["eval_loss"]
    mine.train()
    after, wanted = mine.eval(), theirs.evaluate()
    assert after["eval_loss"] == pytest.approx(wanted["val/loss"], rel=1e-3)
    assert after["eval_loss"] < before
    if kind == "names":
        assert after["eval_accuracy"] == pytest.approx(wanted["val/accuracy"], abs=1e-6)
    saved = mine.save_pretrained(tmp_path / "saved")
    auto = hf.AutoModelForSequenceClassification
    assert difference(saved, theirs.task.model, auto) <= 1e-3
    opened, tokenizer = auto.from_pretrained(saved).eval(), hf.AutoTokenizer.from_pretrained(saved)
    problems = {"multi": "multi_label_classification", "regression": "regression"}
    assert opened.config.problem_type == problems.get(kind, "single_label_classification")
    if kind == "names":
        assert opened.config.id2label == {0: "a", 1: "b", 2: "c"}
        assert list(mine.classify(TEXTS[:2], top=1)[0]) == ["abc"[int(mine.predict(TEXTS[0]).argmax())]]
    texts = [[row[name] for row in data] for name in ("text", "sentence1", "sentence2") if name in data[0]]
    with torch.no_grad():
        scores = opened(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
    shares = {"multi": scores.sigmoid(), "regression": scores}.get(kind, scores.softmax(-1))
    assert np.abs(mine.predict(data) - shares.numpy()).max() <= 1e-4


def test_a_classifier_learns(words, tmp_path):
    drawn = [np.random.default_rng(i).choice(toys.WORDS[1:], 6).tolist() for i in range(64)]
    data = [{"text": " ".join(words), "label": "with" if "fox" in words else "without"} for words in drawn]
    config = BertConfig(vocab_size=96, max_position_embeddings=32, initializer_range=0.05, **SMALL, **NO_DROPOUT)
    options = {"processing_class": words, "eval_dataset": data}
    trainer = classifier(config, tmp_path, data, max_steps=40, learning_rate=5e-3, options=options)
    trainer.train()
    assert trainer.eval()["eval_accuracy"] > 0.95


def test_lora_trains_the_head_in_full_and_keeps_the_names(bert_folder, tmp_path):
    data = labelled()
    trainer = classifier(bert_folder, tmp_path, data, options={"lora": LoRAConfig(r=2, targets="all-linear")})
    before = {path: np.asarray(value) for path, value in flat_params(trainer.model).items()}
    trainer.train()
    changed = {path for path, value in flat_params(trainer.model).items() if not np.array_equal(value, before[path])}
    assert {path.rsplit("/", 1)[-1] for path in changed if path.startswith("layers")} == {"lora_a", "lora_b"}
    assert {path for path in changed if not path.startswith("layers")} == {
        *("output/pooler/kernel", "output/pooler/bias", "output/classifier/kernel", "output/classifier/bias")
    }
    merged = trainer.save_pretrained(tmp_path / "merged", merge=True)
    opened = hf.AutoModelForSequenceClassification.from_pretrained(merged)
    assert opened.config.label2id == {"a": 0, "b": 1, "c": 2}
    again = classifier(merged, tmp_path / "again", [row for row in data if row["label"] != "a"])
    assert again.labels.names == ("a", "b", "c")
    assert np.abs(again.predict(TEXTS[:4]) - trainer.predict(TEXTS[:4])).max() <= 1e-4


# -- encoder-decoders ----------------------------------------------------------------------------------------------


def test_seq2seq_trains_and_generates_as_on_torch(tmp_path):
    data, text = toys.digit_pairs(12), toys.reading_tokenizer()
    randomised(hf.T5ForConditionalGeneration(toys.t5(feed_forward_proj="gated-gelu"))).save_pretrained(
        tmp_path / "base"
    )
    text.save_pretrained(tmp_path / "base")
    lengths = {"max_source_length": 32, "max_target_length": 32}
    task = Seq2Seq(str(tmp_path / "base"), **lengths, prefix="read: ", cache_dir=tmp_path / "t", label_smoothing=0.1)
    theirs = torch_run(task, data, tmp_path / "torch", seed=42)
    given = {"prefix": "read: ", "label_smoothing": 0.1, "optimizer": "sgd"}
    mine = seq2seq(tmp_path / "base", tmp_path, data, options={"eval_dataset": data}, **given)
    before = mine.eval()["eval_loss"]
    mine.train()
    after, wanted = mine.eval(), theirs.evaluate()
    assert after["eval_loss"] < before - 0.1
    for name in ("loss", "accuracy", "perplexity"):
        assert after[f"eval_{name}"] == pytest.approx(wanted[f"val/{name}"], rel=1e-3)
    saved = mine.save_pretrained(tmp_path / "saved")
    assert difference(saved, theirs.task.model, hf.AutoModelForSeq2SeqLM) <= 1e-3
    opened = hf.AutoModelForSeq2SeqLM.from_pretrained(saved).eval()
    given = text(["read: 1 2", "read: 7"], padding=True, return_tensors="pt")
    ids = opened.generate(given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=5, num_beams=1)
    assert mine.generate(["1 2", "7"], 5) == text.batch_decode(ids, skip_special_tokens=True)


def test_an_encoder_decoder_learns_to_read_digits(tmp_path):
    data, text = toys.digit_pairs(64, longest=2), toys.reading_tokenizer()
    config = T5Config(vocab_size=320, head_dim=16, **{**SMALL, "hidden_size": 64}, dropout_rate=0.0)
    given = {"max_steps": 120, "learning_rate": 1e-2, "total_batch_size": 32, "generate_metrics": True}
    mine = seq2seq(config, tmp_path, data, options={"processing_class": text, "eval_dataset": data[:24]}, **given)
    assert mine.eval()["eval_exact_match"] == 0.0
    mine.train()
    found = mine.eval()
    written = mine.generate([row["source"] for row in data[:24]])
    right = np.mean([made == row["target"] for made, row in zip(written, data, strict=False)])
    assert found["eval_exact_match"] == pytest.approx(right)
    assert right > 0.5


def test_seq2seq_does_not_depend_on_the_mesh(tmp_path):
    data, text = toys.digit_pairs(16), toys.reading_tokenizer()
    config = T5Config(vocab_size=320, head_dim=8, **SMALL, dropout_rate=0.0)
    given = {"total_batch_size": 8, "max_steps": 2, "logging_steps": 1}

    def run(dims, **more):
        options = {"processing_class": text, "mesh": devices(dims)}
        trainer = seq2seq(config, tmp_path / str(dims), data, options=options, **given, **more)
        trainer.train()
        return losses(trainer)

    assert run((1, 2, 1, 2), gradient_accumulation_steps=2) == pytest.approx(run((1, 1, 1, 1)), rel=1e-5)


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_arguments_that_mean_nothing_are_refused(words, bert_folder, tmp_path):
    tiny = BertConfig(vocab_size=96, **SMALL)
    for arguments, kind, match in (
        (MaskedLMConfig, {"mask_prob": 1.5}, "mask_prob"),
        (MaskedLMConfig, {"prompt_template": "{text}"}, "prompt_template"),
        (SequenceClassificationConfig, {"packing": True}, "packing"),
        (SequenceClassificationConfig, {"class_names": ["a", "a"]}, "different names"),
        (Seq2SeqConfig, {"max_sequence_length": 8}, "max_source_length"),
        (Seq2SeqConfig, {"label_smoothing": 1}, "label_smoothing"),
    ):
        with pytest.raises(BadArgument, match=match):
            arguments(output_dir="run", **kind)
    with pytest.raises(BadArgument, match="tokenizer"):
        masked(tiny, tmp_path)
    with pytest.raises(BadArgument, match="mask token"):
        masked(replace(tiny, vocab_size=320), tmp_path, options={"processing_class": toys.reading_tokenizer()})
    with pytest.raises(BadArgument, match="a model for Seq2SeqTrainer"):
        seq2seq(tiny, tmp_path, toys.digit_pairs(4), options={"processing_class": words})
    config = T5Config(vocab_size=320, **SMALL, eos_token_id=5)
    with pytest.raises(BadArgument, match="eos_token_id"):
        seq2seq(config, tmp_path, toys.digit_pairs(4), options={"processing_class": toys.reading_tokenizer()})
    with pytest.raises(BadArgument, match="a causal language model"):
        SFTTrainer(SFTConfig(output_dir="run", log="none"), bert_folder, train_dataset=TEXTS)
    packed = SFTConfig(output_dir="run", packing=True, log="none")
    with pytest.raises(BadArgument, match="supports packing"):
        SFTTrainer(packed, lambda rngs: nnx.Linear(4, 4, rngs=rngs), processing_class=words, train_dataset=TEXTS)
    with pytest.raises(DataError, match="at least two classes"):
        classifier(tiny, tmp_path, [{"text": "the", "label": 0}], options={"processing_class": words})
    data = labelled("multi")
    with pytest.raises(BadArgument, match="problem='single'"):
        classifier(tiny, tmp_path, data, options={"processing_class": words}, label_smoothing=0.1)
