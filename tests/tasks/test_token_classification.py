"""TokenClassification: tags at the first token of each word, windows of long texts, entities of the whole set."""

import json
import random
import re

import numpy as np
import pytest
import torch
from peft import PeftModel
from sklearn.metrics import f1_score
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast, pipeline

import trainformer
from text_toys import (
    WORDS,
    batches_of,
    bert,
    byte_pairs,
    check_losses,
    check_resuming,
    check_training,
    checkpoint_of,
    llama,
    masked_sum,
    masking_tokenizer,
    sentences,
    trainer_for,
)
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.eval.classification import TagScheme, entity_scores
from trainformer.run import run_of
from trainformer.tasks.language.token_classification import TokenClassification

NAMES = ["O", "B-ANI", "I-ANI", "B-NUM"]


def tags_of(words):
    """Animals, with the words that describe them, and numbers."""
    tags = ["O"] * len(words)
    for place, word in enumerate(words):
        if word in ("fox", "dog"):
            begins = place > 0 and words[place - 1] in ("brown", "lazy", "quick")
            tags[place - begins] = "B-ANI"
            tags[place] = "I-ANI" if begins else "B-ANI"
        elif word == "seven":
            tags[place] = "B-NUM"
    return tags


RECORDS = [{"tokens": text.split(), "ner_tags": tags_of(text.split())} for text in sentences()]


@pytest.fixture(scope="module")
def tokenizer():
    return masking_tokenizer([" ".join(WORDS[::2])])  # the other words are several tokens, or unknown


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, **options):
        defaults = {"max_length": 64, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens", "class_names": NAMES}
        return TokenClassification(bert() if model is None else model, **{**defaults, **options})

    return make


# -- entities ----------------------------------------------------------------------------------------------


def brute_force(tags):
    """Every stretch that is an entity, tried one by one, by the definition of the CoNLL evaluation."""
    found = []

    def parts(place):
        return tags[place].split("-", 1) if 0 <= place < len(tags) and tags[place] != "O" else ("O", "")

    def begins(place):
        (before, old), (now, kind) = parts(place - 1), parts(place)
        return now != "O" and (now in "BSU" or before == "O" or before in "ESLU" or old != kind)

    for begin in range(len(tags)):
        for end in range(begin + 1, len(tags) + 1):
            inner = range(begin, end)
            one = begins(begin) and all(parts(i)[0] != "O" for i in inner)
            if one and not any(begins(i) for i in inner[1:]) and (end == len(tags) or begins(end) or tags[end] == "O"):
                found.append((parts(begin)[1], begin, end))
    return found


@pytest.mark.parametrize("places", ["BI", "BIES", "BILU", "I"])
def test_entities_are_those_of_the_definition(places):
    rng = random.Random(0)
    tags = ["O", *(f"{place}-{kind}" for place in places for kind in ("PER", "LOC"))]
    scheme = TagScheme(tags)
    assert scheme.types == ["LOC", "PER"]
    total = 0
    for _ in range(300):
        row = [rng.choice(tags) for _ in range(rng.randint(0, 9))]
        found = [tuple(entity) for entity in scheme.entities(row)]
        assert found == brute_force(row)
        total += len(found)
    assert total > 300


def test_entities_of_valid_tags_and_of_plain_ones():
    scheme = TagScheme(NAMES)
    for record in RECORDS:
        spelled = "".join({"O": "o", "B-ANI": "b", "I-ANI": "i", "B-NUM": "n"}[tag] for tag in record["ner_tags"])
        wanted = [(m.start(), m.end()) for m in re.finditer("bi*|n", spelled)]
        assert [(e.begin, e.end) for e in scheme.entities(record["ner_tags"])] == wanted
    plain = TagScheme(["O", "PER", "LOC"])
    row = ["PER", "PER", "O", "LOC", "PER"]
    assert [tuple(e) for e in plain.entities(row)] == [("PER", 0, 2), ("LOC", 3, 4), ("PER", 4, 5)]
    assert TagScheme(["NOUN", "VERB"]).types == []
    assert TagScheme(["B", "I"]).types == []
    counts = scheme.counts(["B-ANI", "I-ANI", "B-NUM"], ["B-ANI", "O", "B-NUM"])
    assert dict(zip(scheme.types, counts.tolist(), strict=True)) == {"ANI": [0, 1, 1], "NUM": [1, 1, 1]}
    assert entity_scores(*counts.sum(0).tolist()) == (0.5, 0.5, 0.5)


# -- tokens ------------------------------------------------------------------------------------------------


def test_the_first_token_of_a_word_has_its_tag(task, tokenizer):
    batches = batches_of(trainer_for(task(), RECORDS, batch_size=24, sampler=None))
    spread = batches_of(trainer_for(task(label_all_subtokens=True), RECORDS, batch_size=24, sampler=None))
    wanted = {}
    for record in RECORDS:
        made = tokenizer(record["tokens"], is_split_into_words=True)
        words = made.word_ids()
        first = [w if w is not None and w != before else None for w, before in zip(words, [None, *words], strict=False)]
        alone = [-100 if w is None else NAMES.index(record["ner_tags"][w]) for w in first]
        inside = [
            -100
            if w is None
            else NAMES.index(record["ner_tags"][w].replace("B-ANI", "I-ANI" if f is None else "B-ANI"))
            for w, f in zip(words, first, strict=True)
        ]
        wanted[tuple(made["input_ids"])] = alone, inside
    assert any(alone.count(-100) > 2 for alone, _ in wanted.values())
    for chosen, batch in ((0, batches[0]), (1, spread[0])):
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
            size = int(mask.sum())
            assert labels[:size].tolist() == wanted[tuple(ids[:size].tolist())][chosen]
            assert bool((labels[size:] == -100).all())


def test_long_texts_are_split_between_words(task, tokenizer):
    words = [WORDS[(3 * i) % len(WORDS)] for i in range(40)]
    data = [{"words": words, "tags": tags_of(words)}]
    made = task(max_length=12)
    store = run_of(trainer_for(made, data)).train_source.dataset
    found = [made.labels.name(tag) for i in range(len(store)) for tag in store[i]["labels"] if tag != -100]
    assert found == tags_of(words)
    inside = [token for i in range(len(store)) for token in store[i]["input_ids"][1:-1].tolist()]
    assert inside == tokenizer(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert max(store.lengths) <= 12
    assert (store.report.split, store.report.records) == (1, 1)
    cut = run_of(trainer_for(task(max_length=12, long="truncate"), data)).train_source.dataset
    assert len(cut) == 1
    assert np.array_equal(cut[0]["input_ids"], store[0]["input_ids"])
    assert cut.report.truncated == 1


def test_every_word_has_a_tag(task):
    made = task(max_length=12)
    made.inspect_dataset(RECORDS)
    texts = [["the", "", "dog", "\x00", "wizardswizardswizardswizardswizards", "fox"], "the lazy dog", []]
    found = made.tag(texts)
    assert [[word for word, _ in row] for row in found] == [texts[0], texts[1].split(), []]
    assert all(tag in NAMES for row in found for _, tag in row)


# -- losses and metrics ------------------------------------------------------------------------------------


def test_the_loss_is_that_of_single_texts(task):
    made = task()
    assert check_losses(made, batches_of(trainer_for(made, RECORDS))[:2], masked_sum) == 2


def test_training_is_that_of_a_loop_over_sums_and_words(task):
    assert check_training(task(), RECORDS, masked_sum, 4) == 3


def test_metrics_are_those_of_the_whole_set(task):
    made = task()
    trainer = trainer_for(made, RECORDS, val_data=RECORDS, max_steps=60, batch_size=12, lr=5e-3, precision="no").fit()
    results = [trainer.evaluate(RECORDS, batch_size=size) for size in (1, 5, 24)]
    predicted = [[tag for _, tag in row] for row in made.tag([r["tokens"] for r in RECORDS])]
    right = [p == w for row, r in zip(predicted, RECORDS, strict=True) for p, w in zip(row, r["ner_tags"], strict=True)]
    pairs = [
        ({(i, *e) for e in brute_force(row)}, {(i, *e) for e in brute_force(r["ner_tags"])})
        for i, (row, r) in enumerate(zip(predicted, RECORDS, strict=True))
    ]
    hits, made_up, wanted = (sum(map(len, sets)) for sets in ([a & b for a, b in pairs], *zip(*pairs, strict=True)))
    assert hits > 0
    for found in results:
        assert found["val/accuracy"] == pytest.approx(np.mean(right))
        assert found["val/precision"] == pytest.approx(hits / made_up)
        assert found["val/recall"] == pytest.approx(hits / wanted)
        assert found["val/f1"] == pytest.approx(2 * hits / (made_up + wanted))
        assert found["val/loss"] == pytest.approx(results[0]["val/loss"], rel=1e-5)
        assert "val/perplexity" not in found
    assert set(made.per_type) == {"ANI", "NUM"}


def test_tags_that_are_no_entities(task):
    names = ["DET", "NOUN", "REST"]
    data = [
        {
            "tokens": r["tokens"],
            "pos_tags": [0 if w in ("the", "a") else 1 if w in ("fox", "dog") else 2 for w in r["tokens"]],
        }
        for r in RECORDS
    ]
    made = task(class_names=names)
    trainer = trainer_for(made, data, val_data=data, eval_batch_size=7).fit()
    predicted = [tag for row in made.tag([r["tokens"] for r in data]) for _, tag in row]
    wanted = [names[tag] for r in data for tag in r["pos_tags"]]
    found = trainer.evaluate()
    assert found["val/f1"] == pytest.approx(f1_score(wanted, predicted, average="macro", zero_division=0))
    assert "val/precision" not in found


# -- models, adapters, runs --------------------------------------------------------------------------------


def test_a_checkpoint_opens_with_its_names(task, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in RECORDS))
    made = task(class_names=None)
    trainer = trainer_for(made, str(path), run_dir=tmp_path / "run").fit()
    assert made.class_names == sorted(NAMES)
    folder = checkpoint_of(trainer)
    opened = AutoModelForTokenClassification.from_pretrained(folder)
    assert opened.config.id2label == dict(enumerate(sorted(NAMES)))
    answers = pipeline("token-classification", model=opened, tokenizer=str(folder))("the quick dog bake")
    found = made.tag("the quick dog bake")[0]
    first = {answer["start"]: answer["entity"] for answer in answers if not answer["word"].startswith("##")}
    places = [match.start() for match in re.finditer(r"\w+", "the quick dog bake")]
    assert [tag for _, tag in found] == [first.get(place, "O") for place in places]


def test_names_come_from_a_data_set(task):
    import datasets

    kind = datasets.List(datasets.ClassLabel(names=NAMES))
    rows = datasets.Dataset.from_list(RECORDS).cast_column("ner_tags", kind)
    made = task(class_names=None)
    made.inspect_dataset(rows)
    assert made.labels.names == tuple(NAMES)
    from trainformer import Trainer

    trainer = Trainer(made, rows, batch_size=24, log="none", num_workers=0, max_steps=1, sampler=None)
    (batch,) = batches_of(trainer)
    found = sorted([tag for tag in row.tolist() if tag != -100] for row in batch["labels"])
    assert found == sorted([NAMES.index(tag) for tag in r["ner_tags"]] for r in RECORDS)


@pytest.mark.parametrize("adapter", [LoRA(r=4, dropout=0.0), PrefixTuning(3)])
def test_an_adapter_is_saved_with_the_head(task, tmp_path, adapter):
    AutoModelForTokenClassification.from_config(bert(num_labels=4)).save_pretrained(tmp_path / "base")

    def run(folder, **more):
        made = task(str(tmp_path / "base"), adapter=adapter)
        return trainer_for(made, RECORDS, run_dir=tmp_path / folder, save_every=2, save_last=5, **more)

    whole, _ = check_resuming(run)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "base")
    ids = torch.arange(5, 17)[None]
    mask = torch.ones_like(ids)
    opened = PeftModel.from_pretrained(plain, checkpoint_of(whole)).eval()
    whole.task.model.eval()
    mine = whole.task.model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(opened(input_ids=ids, attention_mask=mask).logits, mine)


def test_decoders_and_byte_level_tokenizers(task):
    plain = byte_pairs([" " + text for text in sentences()], ["</s>"])
    plain.pre_tokenizer.add_prefix_space = True
    wrapped = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    made = task(llama(), tokenizer=wrapped)
    made.inspect_dataset(RECORDS)
    texts = [r["tokens"] for r in RECORDS]
    together = made.tag(texts, batch_size=24)
    assert together == [made.tag([text])[0] for text in texts]
    assert [len(row) for row in together] == [len(text) for text in texts]


def test_predictions_need_no_tags(task):
    made = task()
    trainer = trainer_for(made, RECORDS)
    rows = trainer.predict([{"tokens": r["tokens"]} for r in RECORDS])
    tagged = made.tag([r["tokens"] for r in RECORDS])
    for row, wanted in zip(rows, tagged, strict=True):
        assert [NAMES[tag] for tag in row["prediction"].tolist() if tag != -100] == [tag for _, tag in wanted]
        assert row["tags"] == [tag for _, tag in wanted]  # one per word
        assert row["prediction"].shape == row["probability"].shape == (len(wanted),)
    with pytest.raises(DataError, match="a tag with every word"):
        trainer.evaluate([{"tokens": r["tokens"]} for r in RECORDS])


def test_predictions_have_a_tag_for_every_word_of_every_record(task, tmp_path):
    """Records of no, one and several windows, with batches that cut between the windows of one."""
    words = [word for record in RECORDS for word in record["tokens"]]
    data = [{"id": f"r{size}", "tokens": words[:size]} for size in (0, 3, 100, 1, 0, 40)]
    made = task(max_length=16)
    trainer = trainer_for(made, RECORDS, run_dir=tmp_path / "run").fit()
    rows = trainer.predict(data, batch_size=2)
    assert [row["id"] for row in rows] == [record["id"] for record in data]
    wanted = made.tag([record["tokens"] for record in data])
    assert [row["tags"] for row in rows] == [[tag for _, tag in pairs] for pairs in wanted]
    assert [len(row["probability"]) for row in rows] == [len(record["tokens"]) for record in data]
    assert all((row["probability"] > 1 / len(NAMES)).all() for row in rows)
    # The same in a file, and from the folder of the run.
    lines = trainer.predict(data, batch_size=3, out=tmp_path / "tags.jsonl").read_text().splitlines()
    assert [json.loads(line)["tags"] for line in lines] == [row["tags"] for row in rows]
    opened = trainformer.load(tmp_path / "run")
    assert [row["tags"] for row in opened.predict(data)] == [row["tags"] for row in rows]
    # Words beyond the end of a truncated record have no tag.
    made.long = "truncate"
    cut = trainer.predict(data)
    assert [len(row["tags"]) for row in cut] == [len(record["tokens"]) for record in data]
    kept = [tag for tag in cut[2]["tags"] if tag is not None]
    assert 0 < len(kept) < 16
    assert cut[2]["tags"] == rows[2]["tags"][: len(kept)] + [None] * (100 - len(kept))
    assert (cut[2]["prediction"][len(kept) :] == -100).all()


def test_check_finds_nothing_wrong(task):
    assert trainer_for(task(), RECORDS, val_data=RECORDS).check().ok


def test_wrong_data_and_arguments(task, tokenizer):
    with pytest.raises(DataError, match=r"Record 1: .*as many tags as words \(2\)"):
        trainer_for(task(), [RECORDS[0], {"tokens": ["a", "b"], "ner_tags": ["O"]}])
    with pytest.raises(DataError, match=r"Record 1: .*'B-PER'"):
        trainer_for(task(), [RECORDS[0], {"tokens": ["a"], "ner_tags": ["B-PER"]}])
    with pytest.raises(DataError, match="a list of words"):
        trainer_for(task(), [{"tokens": "a b", "ner_tags": ["O", "O"]}] * 4)
    with pytest.raises(DataError, match=r"tokens .* and tags"):
        trainer_for(task(), [{"tokens": ["a"]}] * 4)
    with pytest.raises(DataError, match="tag_column"):
        trainer_for(task(tag_column="pos"), RECORDS)
    with pytest.raises(BadArgument, match="long to be"):
        task(long="drop")
    with pytest.raises(BadArgument, match="special tokens"):
        trainer_for(task(max_length=2), RECORDS)
    named = task().class_names
    assert sorted(trainer_for(task(class_names=None), RECORDS).task.class_names) == sorted(named)


@pytest.mark.slow
def test_it_learns(task):
    made = task(tokenizer=masking_tokenizer(sentences()))
    trainer = trainer_for(made, RECORDS, val_data=RECORDS, max_steps=150, batch_size=12, lr=5e-3, precision="no")
    assert trainer.evaluate()["val/f1"] < 0.3
    assert trainer.fit().evaluate()["val/f1"] > 0.95
