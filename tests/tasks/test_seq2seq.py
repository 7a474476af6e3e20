"""Seq2Seq: a loss by target token, however pairs are padded or accumulated, and generations judged as a whole set."""

import json
import math

import pytest
import sacrebleu
import torch
from peft import PeftModel
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer, processors
from torchmetrics.text import Perplexity
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast

import text_toys as toys
import trainformer
from text_toys import DIGITS, bart, batches_of, checkpoint_of, digit_pairs, t5
from trainformer.adapters import LoRA
from trainformer.cli import main
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.encode import EncodingReport
from trainformer.data.text.source_target import PairEncoder
from trainformer.tasks.language.seq2seq import Seq2Seq

PAIRS = digit_pairs(24)


@pytest.fixture(scope="module")
def tokenizer():
    return toys.reading_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, **options):
        lengths = {"max_source_length": 16, "max_target_length": 12}
        defaults = {**lengths, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        return Seq2Seq(t5() if model is None else model, **{**defaults, **options})

    return make


def trainer_for(task, data=PAIRS, **options):
    return toys.trainer_for(task, data, **options)


# -- data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"), [("source", "target"), ("prompt", "completion"), ("article", "highlights")]
)
def test_pairs_become_sources_and_targets_that_end(task, tokenizer, source, target):
    data = [{source: pair["source"], target: pair["target"]} for pair in PAIRS]
    found = []
    for batch in batches_of(trainer_for(task(), data)):
        for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            ids, wanted = row[mask == 1], labels[labels != -100]
            assert ids[-1] == wanted[-1] == tokenizer.eos_token_id
            assert (row[mask == 0] == tokenizer.pad_token_id).all()
            found.append((tokenizer.decode(ids[:-1]), tokenizer.decode(wanted[:-1])))
    assert sorted(found) == sorted((pair["source"], pair["target"]) for pair in PAIRS)


def test_a_target_has_exactly_one_eos(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    bare.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
    assert bare("1")["input_ids"] == tokenizer("1")["input_ids"][:-1]
    for mine in (tokenizer, bare):
        (piece,) = PairEncoder(mine, 16, 16).encode({"source": "1 2", "target": "one two"})
        wanted = tokenizer("one two")["input_ids"]
        assert piece.labels[piece.labels != -100].tolist() == wanted
        assert piece.input_ids[piece.labels == -100].tolist() == mine("1 2")["input_ids"]


def test_long_pairs_are_cut_and_counted(tokenizer):
    report = EncodingReport()
    long = {"source": " ".join("1234567890"), "target": " ".join(DIGITS)}
    records = [long, {"source": "1", "target": ""}, {"source": "", "target": "one"}]
    encoder = PairEncoder(tokenizer, 6, 5)
    (piece,), *none = encoder.encode_all(records, report)
    assert none == [[], []]
    assert piece.input_ids[:6].tolist() == [*tokenizer(long["source"])["input_ids"][:5], 1]
    assert piece.labels.tolist() == [-100] * 6 + tokenizer(long["target"])["input_ids"][:5]  # no false end
    assert encoder.sources([long["source"]]) == [piece.input_ids[:6].tolist()]
    assert (report.records, report.pieces, report.truncated, report.dropped) == (3, 1, 2, 2)
    expected = {
        "source longer than 6 tokens": 1,
        "target longer than 5 tokens": 1,
        "empty source": 1,
        "empty target": 1,
    }
    assert report.reasons == expected


def test_tokens_prefixes_and_instructions(task, tokenizer):
    data = [
        {"input_ids": tokenizer(p["source"])["input_ids"], "labels": tokenizer(p["target"])["input_ids"]} for p in PAIRS
    ]
    ready, made = batches_of(trainer_for(task(), data)), batches_of(trainer_for(task()))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(ready, made, strict=True) for name in a)
    prefixed = PairEncoder(tokenizer, 32, 16, prefix="say: ")
    (piece,) = prefixed.encode({"instruction": "Count.", "input": "1 2", "output": "one two"})
    assert tokenizer.decode(piece.input_ids[piece.labels == -100][:-1]) == "say: Count.\n1 2"
    assert prefixed.fingerprint() != PairEncoder(tokenizer, 32, 16).fingerprint()
    assert tokenizer.decode(prefixed.sources(["1 2"])[0][:-1]) == "say: 1 2"


# -- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [t5, bart])
def test_the_loss_is_that_of_single_pairs(task, config):
    made = task(config())
    assert toys.check_losses(made, batches_of(trainer_for(made))[:3], toys.target_sum, atol=2e-6) == 3


def test_training_is_that_of_a_loop_over_sums_and_tokens(task):
    assert toys.check_training(task(), PAIRS, toys.target_sum, 3, atol=2e-6) == 3


def test_evaluation_is_by_tokens_and_does_not_depend_on_the_batch(task, tokenizer):
    made = task(bart(), generate_metrics=True)
    trainer_for(made, max_steps=60, batch_size=24).fit()
    results = [trainer_for(made, val_data=PAIRS, eval_batch_size=size).evaluate() for size in (1, 5, 24)]
    made.model.eval()
    oracle = Perplexity(ignore_index=-100)
    for batch in batches_of(trainer_for(made, batch_size=3)):
        begun = made.model.prepare_decoder_input_ids_from_labels(batch["labels"])
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        oracle.update(made.model(**inputs, decoder_input_ids=begun).logits.detach().double(), batch["labels"])
    # The same by transformers and the libraries of the metrics, one source at a time.
    texts, rights = [], [pair["target"] for pair in PAIRS]
    for pair in PAIRS:
        ids = made.model.generate(torch.tensor([tokenizer(pair["source"])["input_ids"]]), max_new_tokens=12)
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert made.generate([pair["source"] for pair in PAIRS]) == texts
    scorer = RougeScorer(["rougeL"])
    wanted = {
        "val/exact_match": sum(a.strip() == b for a, b in zip(texts, rights, strict=True)) / len(texts),
        "val/bleu": sacrebleu.corpus_bleu(texts, [rights]).score,
        "val/chrf": sacrebleu.corpus_chrf(texts, [rights]).score,
        "val/rougeL": sum(scorer.score(b, a)["rougeL"].fmeasure for a, b in zip(texts, rights, strict=True))
        / len(texts),
        "val/perplexity": float(oracle.compute()),
    }
    assert 0 < wanted["val/rougeL"] < 1  # something was learned, and not everything
    for found in results:
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
        assert found["val/loss"] == pytest.approx(math.log(found["val/perplexity"]), rel=1e-9)
        assert 0 <= found["val/accuracy"] <= 1


def test_nothing_is_generated_unless_asked_for(task):
    found = trainer_for(task(), val_data=PAIRS).evaluate()
    assert set(found) == {"val/loss", "val/accuracy", "val/perplexity"}


# -- generating --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [t5, bart])
def test_padded_sources_give_what_single_ones_give(task, config):
    made = task(config())
    trainer = trainer_for(made, max_steps=20).fit()
    sources = ["1", "2 3 4", "9 8"]
    made.model.train()
    assert made.generate(sources) == [made.generate(source)[0] for source in sources]
    assert made.model.training
    short, long = (made.generate(sources, max_new_tokens=count) for count in (1, 12))
    assert all(b.startswith(a) for a, b in zip(short, long, strict=True))
    rows = trainer.predict(PAIRS[:5])
    assert [row["generated"].shape for row in rows] == [(12,)] * 5
    decoded = made.text_tokenizer.batch_decode([row["generated"] for row in rows], skip_special_tokens=True)
    assert decoded == made.generate([pair["source"] for pair in PAIRS[:5]])


def test_predictions_need_sources_alone(task, tmp_path, capsys):
    made = task()
    trainer = trainer_for(made, max_steps=20, run_dir=tmp_path / "run").fit()
    sources = ["1", "", "2 3 4", "9 8"]
    wanted = [made.generate(source or " ")[0] for source in sources]
    records = [{"id": f"r{place}", "source": source} for place, source in enumerate(sources)]
    for data in (sources, records, [{"question": source} for source in sources]):
        rows = trainer.predict(data)
        texts = made.text_tokenizer.batch_decode([row["generated"] for row in rows], skip_special_tokens=True)
        assert len(rows) == 4  # also for the empty source
        assert [texts[place] for place in (0, 2, 3)] == [wanted[place] for place in (0, 2, 3)]
    assert [row["id"] for row in trainer.predict(records)] == ["r0", "r1", "r2", "r3"]
    # A target, even an empty one, changes nothing.
    targets = [{**record, "target": target} for record, target in zip(records, ("one", "", "x", "y"), strict=True)]
    assert [row["generated"].tolist() for row in trainer.predict(targets)] == [
        row["generated"].tolist() for row in trainer.predict(records)
    ]
    # From the folder of the run, and from the command line.
    assert [row["text"] for row in trainformer.load(tmp_path / "run").predict(records)] == texts
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "asked.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], line["text"]) for line in lines] == [*zip(("r0", "r1", "r2", "r3"), texts, strict=True)]
    with pytest.raises(DataError, match="'pairs' with 'target'"):
        trainer.evaluate(records)
    with pytest.raises(DataError, match="records with a source"):
        trainer.predict([{"foo": "1"}])


# -- checkpoints, adapters, errors -------------------------------------------------------------------------


@pytest.mark.parametrize("config", [t5, bart])
def test_a_checkpoint_opens_with_transformers(task, tmp_path, tokenizer, config):
    made = task(config())
    trainer = trainer_for(made, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    opened = AutoModelForSeq2SeqLM.from_pretrained(folder)
    inputs = {"input_ids": torch.arange(12)[None], "decoder_input_ids": torch.arange(7)[None]}
    made.model.eval()
    torch.testing.assert_close(opened(**inputs).logits, made.model(**inputs).logits)
    assert AutoTokenizer.from_pretrained(folder)("1 2")["input_ids"] == tokenizer("1 2")["input_ids"]
    again = Seq2Seq(folder, max_source_length=16, max_target_length=12, cache_dir=tmp_path / "tokens")
    assert again.generate(["1 2", "3"]) == made.generate(["1 2", "3"])
    assert trainer_for(again).check().ok


@pytest.mark.parametrize("config", [t5, bart])
def test_an_adapter_is_all_that_is_trained_and_saved(task, tmp_path, config):
    AutoModelForSeq2SeqLM.from_config(config()).save_pretrained(tmp_path / "base")

    def run(folder, **options):
        made = task(str(tmp_path / "base"), adapter=LoRA(r=4, dropout=0.0))
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole, again = toys.check_resuming(run)
    folder = checkpoint_of(whole)
    opened = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), folder).eval()
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base").eval()
    inputs = {"input_ids": torch.arange(12)[None], "decoder_input_ids": torch.arange(7)[None]}
    whole.task.model.eval()
    torch.testing.assert_close(opened(**inputs).logits, whole.task.model(**inputs).logits)
    assert not torch.allclose(opened(**inputs).logits, plain(**inputs).logits, atol=1e-4)
    assert len(whole.task.generate(["1 2", "3"])) == 2
    for name, p in again.task.model.named_parameters():
        assert p.requires_grad == ("lora_" in name)


def test_wrong_arguments_and_data(task):
    for name in ("max_source_length", "max_target_length"):
        with pytest.raises(BadArgument, match=name):
            task(**{name: 1})
    with pytest.raises(BadArgument, match="sources of at least one character"):
        task().generate(["", "x"])
    unstarted = t5()
    unstarted.decoder_start_token_id = None
    with pytest.raises(BadArgument, match="a model with a decoder_start_token_id"):
        trainer_for(task(unstarted))
    with pytest.raises(DataError, match="a pair of texts"):
        trainer_for(task(), ["a text", "another"])
    with pytest.raises(DataError, match="labels, the tokens of the target"):
        trainer_for(task(), [{"input_ids": [5, 6]}] * 4)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match="to be texts"):
        trainer_for(task(), [{"prompt": messages, "completion": messages}] * 4)
    with pytest.raises(DataError, match="empty target: 4"):
        trainer_for(task(), [{"source": "1", "target": ""}] * 4)
