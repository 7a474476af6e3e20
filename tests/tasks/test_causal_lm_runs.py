"""Runs of CausalLM beyond its loss: streams, lengths, bits per byte, and texts for people to read."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
import vlm_toys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from text_toys import Cut, batches_of, causal_maker, chat_tokenizer, gpt2, sentences, trainer_for
from trainformer import Trainer
from trainformer.callbacks import EMA, TextSamples
from trainformer.core.errors import BadArgument
from trainformer.data.text.tokenizer import token_bytes
from trainformer.loggers import read_jsonl
from trainformer.run import run_of
from trainformer.tasks import ImageClassification

TEXTS = sentences()


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    return causal_maker(tokenizer, tmp_path)


class Corpus(IterableDataset):
    def __iter__(self):
        return ({"content": text} for text in TEXTS)


# -- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_over_a_stream_resumes_at_its_position(task, tmp_path, packing):
    options = {"batch_size": 2, "max_steps": 14, "log": "none", "num_workers": 0, "save_best": 0, "lr": 1e-2}

    def run(name, callbacks=()):
        return Trainer(
            task(gpt2(), packing=packing), Corpus(), run_dir=tmp_path / name, callbacks=list(callbacks), **options
        )

    whole = run("whole").fit()
    with pytest.raises(KeyboardInterrupt):
        run("cut", [Cut()]).fit()
    other = run("cut")
    other.fit()
    assert other.state.step == whole.state.step == 14
    assert whole.state.epoch >= 1  # more than the stream has: it starts from the beginning again
    for name, p in whole.task.model.state_dict().items():
        assert torch.equal(p, other.task.model.state_dict()[name]), name


def test_a_stream_is_what_its_list_is(task):
    streamed = Trainer(task(), Corpus(), batch_size=4, max_steps=6, log="none", num_workers=0)
    found = [
        row[mask.bool()].tolist()
        for batch in batches_of(streamed)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    store = run_of(trainer_for(task(), TEXTS)).train_source.dataset
    assert found == [store[place]["input_ids"].tolist() for place in range(len(TEXTS))]


# -- lengths -----------------------------------------------------------------------------------------------


def test_batches_are_of_like_lengths_by_default(task):
    texts = TEXTS * 20
    grouped = batches_of(trainer_for(task(), texts))
    shuffled = batches_of(
        trainer_for(task(), texts, sampler=lambda data: np.random.default_rng(0).permutation(len(data)))
    )

    def padding(batches):
        return sum(int((1 - batch["attention_mask"]).sum()) for batch in batches)

    def contents(batches):
        rows = [(row, mask.bool()) for b in batches for row, mask in zip(*map(b.get, names), strict=True)]
        return sorted(tuple(row[mask].tolist()) for row, mask in rows)

    names = ("input_ids", "attention_mask")
    assert padding(grouped) < 0.6 * padding(shuffled)
    assert contents(grouped) == contents(shuffled)  # every text once
    assert trainer_for(task(packing=True), texts).sampler is None
    assert trainer_for(task(), texts, sampler="repeated:2").sampler == "repeated:2"


def test_a_step_holds_the_same_texts_whatever_its_micro_batches(task):
    def steps(size, accumulation):
        trainer = trainer_for(task(), TEXTS * 3, batch_size=size, accumulation_steps=accumulation)
        batches = batches_of(trainer)
        rows = [[tuple(row[row != 1].tolist()) for row in batch["input_ids"]] for batch in batches]
        return [sorted(chain(*rows[at : at + accumulation])) for at in range(0, len(rows), accumulation)]

    assert steps(8, 1) == steps(4, 2) == steps(1, 8)


# -- bits per byte -----------------------------------------------------------------------------------------


def test_bits_per_byte_are_those_of_the_text(task, tokenizer):
    texts = [*TEXTS, "Grüße — 世界 🎉"]
    made = trainer_for(task(), TEXTS, val_data=texts)
    metrics = made.evaluate()
    nll, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            log_probs = made.task.model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        nll -= log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]].sum().item()
        size += len(text.encode()) - len(tokenizer.decode(ids[0, :1]).encode())  # nothing predicts the first token
    assert metrics["val/bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("text", ["plain", "Grüße — 世界", "a\n\tb  c", "🎉🎉", "the<|user|>fox", "a<new>b"])
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>"])
    plain = text.replace("<|user|>", "") if "<|user|>" in tokenizer.all_special_tokens else text
    assert token_bytes(tokenizer)[tokenizer(text)["input_ids"]].sum() == len(plain.encode())
    assert token_bytes(tokenizer)[tokenizer.eos_token_id] == 0


def test_the_bytes_of_pieces():

    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("\u2581", -1.0),
        ("\u2581the", -1.0),
        ("<0x0A>", -2.0),
        ("ü", -2.0),
        ("x", -2.0),
    ]
    plain = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="</s>")
    assert token_bytes(tokenizer).tolist() == [0, 0, 1, 4, 1, 2, 1]


# -- samples -----------------------------------------------------------------------------------------------


def test_samples_reach_the_loggers_and_leave_no_trace(task, tmp_path):
    def run(name, callbacks):
        # Dropout draws from the same generators as sampling would.
        trainer = trainer_for(
            task(gpt2()), TEXTS, val_data=TEXTS[:4], eval_every="2steps", run_dir=tmp_path / name, callbacks=callbacks
        )
        return trainer.fit()

    sampler = TextSamples(["the quick", "seven"], max_new_tokens=5, every=2, options={"do_sample": True})
    written = run("written", [sampler])
    silent = run("silent", [])
    for name, p in silent.task.model.state_dict().items():
        assert torch.equal(p, written.task.model.state_dict()[name]), name
    records = [r for r in read_jsonl(tmp_path / "written" / "metrics.jsonl") if any(k.startswith("text/") for k in r)]
    assert [(r["step"], k) for r in records for k in r if k.startswith("text/")] == [
        (4, "text/samples/1"),
        (4, "text/samples/2"),
    ]
    assert records[0]["text/samples/1"].startswith("the quick⟶")


def test_samples_are_written_by_the_average_that_is_judged(task, tmp_path):
    sampler = TextSamples("the quick", max_new_tokens=6)
    trainer = trainer_for(
        task(), TEXTS, val_data=TEXTS[:4], eval_every="6steps", run_dir=tmp_path, callbacks=[EMA(decay=0.0), sampler]
    ).fit()
    with trainer.eval_mode():
        wanted = trainer.task.generate("the quick", max_new_tokens=6)[0]
    record = next(r for r in read_jsonl(tmp_path / "metrics.jsonl") if "text/samples" in r)
    assert record["text/samples"] == f"the quick⟶{wanted}"


def test_samples_that_cannot_be():
    with pytest.raises(BadArgument, match="texts of at least one character"):
        TextSamples([])
    with pytest.raises(BadArgument, match="max_new_tokens to be at least 1"):
        TextSamples(["a"], max_new_tokens=0)
    with pytest.raises(BadArgument, match=r"a task with generate.*received 'VLM'"):
        vlm_toys.trainer_for(vlm_toys.make(), callbacks=[TextSamples(["a"])])
    images = [(torch.zeros(3, 8, 8), label % 2) for label in range(4)]
    with pytest.raises(BadArgument, match=r"a task with generate.*received 'ImageClassification'"):
        Trainer(ImageClassification("resnet18", pretrained=False), images, callbacks=[TextSamples(["a"])])
