"""MaskedLM: masks that depend on seed, epoch and sample alone, and a loss over the tokens to be predicted."""

import math

import numpy as np
import pytest
import torch
from peft import PeftModel
from torchmetrics.text import Perplexity
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

import text_toys as toys
from text_toys import batches_of, bert, checkpoint_of
from trainformer.adapters import LoRA
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.masking import MaskedDataset, WordEncoder, mask_tokens
from trainformer.run import run_of
from trainformer.tasks.language.masked_lm import MaskedLM

WORDS = ["the", "quick", "brown", "foxes", "jumping", "over", "lazy", "dogs", "while", "seven", "wizards", "baking"]
TEXTS = toys.sentences(WORDS)


@pytest.fixture(scope="module")
def tokenizer():
    return toys.masking_tokenizer(TEXTS)


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, **options):
        defaults = {"max_length": 64, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        return MaskedLM(bert() if model is None else model, **{**defaults, **options})

    return make


def trainer_for(task, data=TEXTS, **options):
    return toys.trainer_for(task, data, **options)


# -- masks -------------------------------------------------------------------------------------------------


def test_the_rates_are_those_that_were_asked_for():
    rng = np.random.default_rng(0)
    ids, words = np.full(200, 7, dtype=np.int32), np.arange(200, dtype=np.int32)
    words[[0, -1]] = -100
    chosen = hidden = replaced = shown = 0
    others = np.arange(10, 60, dtype=np.int32)
    for _ in range(1000):
        masked, labels = mask_tokens(ids, words, rng, 4, others, 0.15)
        assert labels[0] == labels[-1] == -100
        assert np.array_equal(masked[labels == -100], ids[labels == -100])
        assert (labels[labels != -100] == 7).all()
        mine = masked[labels != -100]
        chosen += len(mine)
        hidden += int((mine == 4).sum())
        shown += int((mine == 7).sum())
        replaced += int(np.isin(mine, others).sum())
    assert hidden + shown + replaced == chosen
    assert chosen / 198_000 == pytest.approx(0.15, abs=0.0005)
    # 29,700 draws: the standard error of a share of 0.1 is 0.0017.
    assert hidden / chosen == pytest.approx(0.8, abs=0.01)
    assert shown / chosen == pytest.approx(0.1, abs=0.007)
    assert replaced / chosen == pytest.approx(0.1, abs=0.007)


def test_every_token_is_chosen_as_often_as_the_others():
    rng, counts = np.random.default_rng(1), np.zeros(20)
    for _ in range(4000):
        counts += mask_tokens(np.arange(20), np.arange(20), rng, 4, np.arange(20), 0.15)[1] != -100
    assert np.abs(counts / 4000 - 0.15).max() < 0.03  # 5 standard errors


def test_words_are_masked_as_wholes(tokenizer):
    text = "wizards jumping [SEP] quick unknownword foxesdogs"
    (piece,) = WordEncoder(tokenizer, 64, whole_word=True).encode(text)
    words = tokenizer(text).word_ids()
    special = np.isin(piece.input_ids, tokenizer.all_special_ids)
    assert special.sum() >= 3  # [CLS], [SEP] in the text, [SEP]
    assert (piece.labels == -100).tolist() == special.tolist()
    assert len(set(piece.labels[~special].tolist())) < int((~special).sum())  # some words are several tokens
    rng = np.random.default_rng(0)
    for _ in range(50):
        _, labels = mask_tokens(piece.input_ids, piece.labels, rng, 4, np.arange(5, 60), 0.3)
        chosen = {word for word, label in zip(words, labels, strict=True) if label != -100}
        assert chosen
        for word, label, is_special in zip(words, labels, special, strict=True):
            assert (label != -100) == (word in chosen and not is_special)


def test_long_texts_are_split_and_every_piece_is_whole(tokenizer):
    text = " ".join(WORDS * 12)  # how many tokens a word has depends on the version of tokenizers
    pieces = WordEncoder(tokenizer, 16).encode(text)
    assert len(pieces) > 2
    inside = []
    for piece in pieces:
        assert len(piece.input_ids) <= 16
        assert (piece.input_ids[0], piece.input_ids[-1]) == (2, 3)
        inside += piece.input_ids[1:-1].tolist()
    assert inside == tokenizer(text, add_special_tokens=False)["input_ids"]


def same(left, right):
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)


def test_masks_differ_by_epoch_and_nothing_else(task, tokenizer):
    trainer = trainer_for(task())
    first = batches_of(trainer)
    assert same(first, batches_of(trainer))
    assert same(first, batches_of(trainer_for(task(), num_workers=2)))
    assert same(first[2:], batches_of(trainer, position=8))

    def by_text(batches):
        """The places that are masked, by the text they are masked in."""
        found = {}
        for batch in batches:
            ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
            for row, labels in zip(ids, batch["labels"], strict=True):
                found[tokenizer.decode(row, skip_special_tokens=True)] = (labels != -100).nonzero().flatten().tolist()
        return found

    one, two = by_text(first), by_text(batches_of(trainer, epoch=1))
    assert (
        one.keys() == two.keys() == {" ".join(tokenizer.decode(tokenizer(t)["input_ids"], True).split()) for t in TEXTS}
    )
    assert sum(one[text] != two[text] for text in one) > len(one) / 2
    larger = by_text(batches_of(trainer_for(task(), batch_size=24)))
    assert larger == one


def test_masks_of_an_evaluation_are_always_the_same(task):
    found = []
    for seed, size in ((0, 1), (1, 5), (2, 24)):
        trainer = trainer_for(task(), val_data=TEXTS, eval_batch_size=size, seed=seed)
        rows = [b.data for epoch in (0, 1) for b in run_of(trainer).val_source.batches(epoch)]
        found.append([x[m == 1].tolist() for b in rows for x, m in zip(b["labels"], b["attention_mask"], strict=True)])
    assert found[0] == found[1] == found[2]
    assert found[0][: len(TEXTS)] == found[0][len(TEXTS) :]


def test_reading_does_not_touch_the_store():
    store = [{"input_ids": np.arange(10, dtype=np.int32), "labels": np.arange(10, dtype=np.int32)}]
    for array in store[0].values():
        array.flags.writeable = False
    data = MaskedDataset(store, 4, np.arange(5, 9), 0.5)
    assert (data[0]["labels"] != -100).sum() >= 5


# -- the loss ----------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_single_pieces(task):
    made = task()
    assert toys.check_losses(made, batches_of(trainer_for(made))[:3], toys.masked_sum) == 3


def test_training_is_that_of_a_loop_over_sums_and_tokens(task):
    assert toys.check_training(task(), TEXTS, toys.masked_sum, 3) == 3


def test_evaluation_is_by_tokens_and_does_not_depend_on_the_batch(task):
    made = task()
    results = []
    for size in (1, 5, 24):
        trainer = trainer_for(made, val_data=TEXTS, eval_batch_size=size)
        results.append(trainer.evaluate())
    oracle, right, count = Perplexity(ignore_index=-100), 0, 0
    for batch in (b.data for b in run_of(trainer).val_source.batches(0)):
        logits = made.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
        oracle.update(logits.double(), batch["labels"])
        asked = batch["labels"] != -100
        right, count = right + int((logits.argmax(-1) == batch["labels"])[asked].sum()), count + int(asked.sum())
    for found in results:
        assert found["val/perplexity"] == pytest.approx(float(oracle.compute()), rel=1e-5)
        assert found["val/loss"] == pytest.approx(math.log(found["val/perplexity"]), rel=1e-9)
        assert found["val/accuracy"] == pytest.approx(right / count, rel=1e-6)


@pytest.mark.slow
def test_it_learns(task):
    """Words of which each follows from its neighbours, all equally frequent: without these the perplexity is 12.

    The vocabulary differs from process to process (training of WordPiece is not deterministic): 1.4 to 1.7 was seen.
    """
    text = [" ".join(WORDS[(start + k) % len(WORDS)] for k in range(8)) for start in range(len(WORDS))] * 4
    trainer = trainer_for(
        task(whole_word=True), text, val_data=text, max_steps=500, batch_size=16, lr=4e-3, precision="no"
    )
    assert trainer.evaluate()["val/perplexity"] > 50
    assert trainer.fit().evaluate()["val/perplexity"] < 6


# -- checkpoints, adapters, errors -------------------------------------------------------------------------


def test_a_checkpoint_opens_with_transformers(task, tmp_path, tokenizer):
    made = task()
    trainer = trainer_for(made, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    opened = AutoModelForMaskedLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    made.model.eval()
    torch.testing.assert_close(opened(ids).logits, made.model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("the dogs")["input_ids"] == tokenizer("the dogs")["input_ids"]
    again = MaskedLM(folder, max_length=32, cache_dir=tmp_path / "tokens")
    torch.testing.assert_close(again.model.eval()(ids).logits, opened(ids).logits)
    assert trainer_for(again).check().ok


def test_an_interrupted_run_ends_with_the_same_weights(task, tmp_path):
    AutoModelForMaskedLM.from_config(bert()).save_pretrained(tmp_path / "base")

    def run(folder, **options):
        made = task(str(tmp_path / "base"), adapter=LoRA(r=4, dropout=0.0))
        return trainer_for(made, run_dir=tmp_path / folder, max_steps=8, save_every=2, save_last=5, **options)

    whole, again = toys.check_resuming(run)
    for name, p in again.task.model.named_parameters():
        assert p.requires_grad == ("lora_" in name)
    opened = PeftModel.from_pretrained(
        AutoModelForMaskedLM.from_pretrained(tmp_path / "base"), checkpoint_of(whole)
    ).eval()
    ids = torch.arange(12)[None]
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path / "base").eval()
    whole.task.model.eval()
    torch.testing.assert_close(opened(ids).logits, whole.task.model(ids).logits)
    assert not torch.allclose(opened(ids).logits, plain(ids).logits, atol=1e-4)


def test_tokens_are_taken_as_they_are(task, tokenizer):
    data = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    assert same(batches_of(trainer_for(task(), data)), batches_of(trainer_for(task())))
    with pytest.raises(DataError, match="whose words are unknown"):
        trainer_for(task(whole_word=True), data)


def test_wrong_arguments(task, tokenizer):
    for wrong in (0, 1, 15):
        with pytest.raises(BadArgument, match="mask_prob between 0 and 1"):
            task(mask_prob=wrong)
    with pytest.raises(BadArgument, match="max_length above 2"):
        trainer_for(task(max_length=2))
    with pytest.raises(DataError, match="a record with a 'text'"):
        trainer_for(task(), [{"source": "a", "target": "b"}] * 4)
    with pytest.raises(DataError, match="only special tokens: 4"):
        trainer_for(task(), ["[SEP]"] * 4)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]")
    with pytest.raises(BadArgument, match="a tokenizer with a mask token"):
        trainer_for(task(tokenizer=bare))
