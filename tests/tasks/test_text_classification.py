"""TextClassification: labels of every kind and numbering, the losses of single texts, metrics of the whole set."""

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, f1_score
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, pipeline

from text_toys import (
    batches_of,
    bert,
    chat_tokenizer,
    check_losses,
    check_resuming,
    check_training,
    checkpoint_of,
    gpt2,
    llama,
    masking_tokenizer,
    sentences,
    trainer_for,
)
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.labels import read_labels
from trainformer.eval.classification import multilabel_metrics
from trainformer.tasks.language.text_classification import TextClassification

NAMES = ["animal", "number", "other"]
TEXTS = sentences()


def kind_of(text):
    """What can be learned: the class follows from words of the text."""
    return "animal" if "dog" in text or "fox" in text else "number" if "seven" in text else "other"


RECORDS = [{"text": text, "label": kind_of(text)} for text in TEXTS]
MULTI = [{"text": r["text"], "label": [w for w in ("dog", "fox", "seven") if w in r["text"]]} for r in RECORDS]
SCORED = [{"text": r["text"], "label": len(r["text"]) / 50} for r in RECORDS]


@pytest.fixture(scope="module")
def tokenizer():
    made = masking_tokenizer(TEXTS)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, **options):
        defaults = {"max_length": 64, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        if not {"class_names", "num_classes", "problem"} & options.keys():
            defaults["class_names"] = NAMES
        return TextClassification(bert() if model is None else model, **{**defaults, **options})

    return make


def single_sum(model, batch):
    """Cross-entropy, text by text, without padding."""
    total = 0.0
    for ids, types, mask, label in zip(*(batch[n] for n in INPUTS), batch["labels"], strict=True):
        size = int(mask.sum())
        logits = model(input_ids=ids[None, :size], token_type_ids=types[None, :size]).logits[0].double()
        total = total - logits.log_softmax(-1)[label]
    return total, len(batch["labels"])


INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def written(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


# -- labels ------------------------------------------------------------------------------------------------


def test_classes_are_learned_from_a_file_and_named_in_the_checkpoint(task, tmp_path):
    made = task(num_classes=None)
    trainer = trainer_for(made, written(tmp_path / "data.jsonl", RECORDS), run_dir=tmp_path / "run").fit()
    assert made.class_names == sorted(NAMES)
    assert made.model.config.label2id == {name: place for place, name in enumerate(sorted(NAMES))}
    folder = checkpoint_of(trainer)
    opened = AutoModelForSequenceClassification.from_pretrained(folder)
    assert opened.config.id2label == dict(enumerate(sorted(NAMES)))
    assert opened.config.problem_type == "single_label_classification"
    answers = pipeline("text-classification", model=opened, tokenizer=str(folder), top_k=None)(TEXTS[:5])
    for mine, theirs in zip(made.classify(TEXTS[:5]), answers, strict=True):
        assert list(mine) == [answer["label"] for answer in theirs]
        assert list(mine.values()) == pytest.approx([answer["score"] for answer in theirs], abs=1e-6)
    # The folder brings its classes with it, also for data in which one of them is missing, in another order.
    again = task(str(folder), num_classes=None, tokenizer=None)
    assert again.classify(TEXTS[:5]) == made.classify(TEXTS[:5])
    few = [record for record in RECORDS if record["label"] != "animal"]
    trainer_for(again, written(tmp_path / "few.jsonl", few))
    assert again.class_names == sorted(NAMES)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hub", "tuples"])
def test_labels_mean_the_same_wherever_they_come_from(task, tmp_path, kind):
    import datasets

    data = RECORDS
    if kind == "jsonl":
        data = written(tmp_path / "data.jsonl", RECORDS)
    elif kind == "csv":
        with (tmp_path / "data.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, ["text", "label"])
            table.writeheader()
            table.writerows(RECORDS)
        data = str(tmp_path / "data.csv")
    elif kind == "tuples":
        data = [(r["text"], r["label"]) for r in RECORDS]
    else:
        rows = datasets.Dataset.from_list([{**r, "other": 1} for r in RECORDS])
        data = rows.cast_column("label", datasets.ClassLabel(names=NAMES))
        if kind == "parquet":
            data.to_parquet(tmp_path / "data.parquet")
            data = str(tmp_path / "data.parquet")
    made = task(class_names=NAMES) if kind == "tuples" else task(num_classes=None)
    from trainformer import Trainer

    trainer = Trainer(made, data, batch_size=24, log="none", num_workers=0, max_steps=1)
    (batch,) = batches_of(trainer)
    by_text = {r["text"]: r["label"] for r in RECORDS}
    assert len(batch["labels"]) == 24
    for ids, label in zip(batch["input_ids"], batch["labels"].tolist(), strict=True):
        text = made.text_tokenizer.decode(ids, skip_special_tokens=True).replace(" ##", "")
        assert made.class_names[label] == by_text[text]
    assert sorted(made.class_names) == sorted(NAMES)


def test_validation_labels_are_numbered_by_training(task):
    few = [{"text": r["text"], "label": r["label"]} for r in RECORDS if r["label"] != "animal"]
    trainer = trainer_for(task(class_names=NAMES), RECORDS, val_data=few, eval_batch_size=24)
    (batch,) = batches_of(trainer, train=False)
    assert batch["labels"].tolist() == [NAMES.index(r["label"]) for r in few]
    with pytest.raises(DataError, match=r"(?s)Record 3: .*occurs in the training data.*'plant'"):
        trainer_for(task(), RECORDS, val_data=[*RECORDS[:3], {"text": "a", "label": "plant"}])


def test_what_labels_are():
    assert read_labels([3, 1, 1]).counts == (0, 2, 0, 1)
    assert read_labels(["10", "9", "10"]).names == ("9", "10")
    assert read_labels([True, False]).count == 2
    hot = read_labels([[0, 0, 1], [1, 0, 1]])
    assert (hot.problem, hot.count, hot.multi_hot) == ("multi", 3, True)
    assert not read_labels([[0, 1], [1]]).multi_hot
    assert read_labels([[0.0, 1.0], [1.0, 1.0]]).multi_hot
    assert read_labels(["0.5", "1"]).problem == "regression"
    assert read_labels(["b", "a"], known=["b", "c", "a"]).names == ("b", "c", "a")
    assert read_labels(["b", "x"], known=["b", "c", "a"]).names == ("b", "x")
    one_based = read_labels(["1", "2"])
    assert one_based.index(1) == one_based.index("1") == 0  # the class that is called 1, not the second
    multi = read_labels([["b", "a"], ["c"], []])
    assert multi.decode([multi.encode(["c", "a"]), multi.encode([])]).tolist() == [[1, 0, 1], [0, 0, 0]]
    many = read_labels([list(range(37))])
    assert many.decode([many.encode([0, 36, 8])]).nonzero()[1].tolist() == [0, 8, 36]
    assert many.decode([many.encode([1]), many.encode(None)]) is None
    numbers = read_labels([0.5], count=1)
    assert numbers.decode([numbers.encode(-2.5)]).tolist() == [[-2.5]]
    assert numbers.decode([numbers.encode(None)]) is None
    for wrong in ([-1, 0, 1], [{"a": 1}], []):
        with pytest.raises((DataError, TypeError)):
            read_labels(wrong)


# -- losses ------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_single_texts(task):
    made = task()
    pairs = [{"sentence1": r["text"], "sentence2": TEXTS[i // 2], "label": r["label"]} for i, r in enumerate(RECORDS)]
    assert check_losses(made, batches_of(trainer_for(made, RECORDS))[:2], single_sum) == 2
    batches = batches_of(trainer_for(made, pairs))
    assert all(bool((batch["token_type_ids"] == 1).any()) for batch in batches)
    assert check_losses(made, batches[:2], single_sum) == 2


def test_training_is_that_of_a_loop_over_sums_and_texts(task):
    assert check_training(task(), RECORDS, single_sum, 3) == 3


def test_pairs_are_tokenised_as_the_tokenizer_does(task, tokenizer):
    records = [{"premise": "the dog", "hypothesis": "seven pies", "label": "animal"}]
    (batch,) = batches_of(trainer_for(task(), records))
    made = tokenizer("the dog", "seven pies")
    size = len(made["input_ids"])
    assert batch["input_ids"][0, :size].tolist() == made["input_ids"]
    assert batch["token_type_ids"][0, :size].tolist() == made["token_type_ids"]
    assert set(made["token_type_ids"]) == {0, 1}
    for names in (("text", "text_pair"), ("question", "sentence"), ("Question1", "question2")):
        same = [dict(zip((*names, "label"), records[0].values(), strict=True))]
        (again,) = batches_of(trainer_for(task(), same))
        assert torch.equal(again["input_ids"], batch["input_ids"])


def test_texts_and_pairs_are_classified_together(task, tokenizer):
    made = task()
    made.inspect_dataset(RECORDS)
    mixed = made.classify(["the dog", ("the dog", "seven pies")])
    with torch.no_grad():
        for row, texts in zip(mixed, (("the dog",), ("the dog", "seven pies")), strict=True):
            inputs = tokenizer(*texts, return_tensors="pt")
            scores = made.model.eval()(**inputs).logits.softmax(-1)[0].tolist()
            assert row == pytest.approx(dict(zip(NAMES, scores, strict=True)), abs=1e-6)
    assert made.classify([]) == []


def test_weights_and_smoothing_are_torchs(task):
    weights = [0.5, 2.0, 1.0]
    made = task(class_weights=weights, label_smoothing=0.1)
    batch = batches_of(trainer_for(made, RECORDS, batch_size=8))[0]
    loss = made.train_step(batch)
    logits = made._logits(batch)
    oracle = torch.nn.CrossEntropyLoss(torch.tensor(weights), label_smoothing=0.1)(logits, batch["labels"])
    torch.testing.assert_close(loss.sum / loss.weight, oracle)
    plain = made.eval_step(batch)["loss"]
    torch.testing.assert_close(plain[0] / plain[1], F.cross_entropy(logits, batch["labels"]))
    balanced = task(class_weights="balanced")
    balanced.inspect_dataset(RECORDS)
    trainer_for(balanced, RECORDS)
    counts = np.array([sum(r["label"] == name for r in RECORDS) for name in NAMES])
    assert balanced._weights.tolist() == pytest.approx((24 / (3 * counts)).tolist())


def test_several_labels_and_numbers(task):
    made = task(problem="multi", class_names=["dog", "fox", "seven"])
    batch = batches_of(trainer_for(made, MULTI, batch_size=8))[0]
    loss = made.train_step(batch)
    assert loss.weight == 8
    oracle = F.binary_cross_entropy_with_logits(made._logits(batch), batch["labels"])
    torch.testing.assert_close(loss.sum / 8, oracle)
    assert made.model.config.problem_type == "multi_label_classification"
    scores = task(problem="regression")
    batch = batches_of(trainer_for(scores, SCORED, batch_size=8))[0]
    loss = scores.train_step(batch)
    torch.testing.assert_close(loss.sum / loss.weight, F.mse_loss(scores._logits(batch), batch["labels"]))
    assert batch["labels"].shape == (8, 1)


# -- metrics -----------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_whole_set(task):
    made = task()
    results = [trainer_for(made, RECORDS, val_data=RECORDS, eval_batch_size=size).evaluate() for size in (1, 5, 24)]
    predicted = [max(row, key=row.get) for row in made.classify(TEXTS)]
    wanted = [r["label"] for r in RECORDS]
    for found in results:
        assert found["val/accuracy"] == pytest.approx(np.mean([p == w for p, w in zip(predicted, wanted, strict=True)]))
        assert found["val/f1"] == pytest.approx(f1_score(wanted, predicted, average="macro"), abs=1e-6)
        assert found["val/loss"] == pytest.approx(results[0]["val/loss"], rel=1e-5)
    assert made.confusion.sum() == 24


def test_metrics_of_several_labels_and_of_numbers(task):
    made = task(problem="multi", class_names=["dog", "fox", "seven"])
    trainer = trainer_for(made, MULTI, val_data=MULTI, eval_batch_size=5)
    trainer.fit()
    found = trainer.evaluate()
    # In the same batches, to the last bit: scores that are nearly equal would change their order.
    scores = np.stack([row["probabilities"].numpy() for row in trainer.predict(MULTI)])
    assert made.classify(TEXTS)[3]["fox"] == pytest.approx(scores[3, 1], abs=1e-6)
    wanted = np.array([[name in r["label"] for name in ("dog", "fox", "seven")] for r in MULTI])
    assert found["val/f1_micro"] == pytest.approx(f1_score(wanted, scores > 0.5, average="micro"))
    assert found["val/map"] == pytest.approx(average_precision_score(wanted, scores, average="macro"), abs=1e-6)
    numbers = task(problem="regression")
    trainer = trainer_for(numbers, SCORED, val_data=SCORED, eval_batch_size=5).fit()
    found = trainer.evaluate()
    values = [row["value"].item() for row in trainer.predict(SCORED)]
    assert numbers.classify(TEXTS)[3]["LABEL_0"] == pytest.approx(values[3], abs=1e-6)
    wanted = [r["label"] for r in SCORED]
    assert found["val/pearson"] == pytest.approx(pearsonr(values, wanted).statistic, abs=1e-5)
    assert found["val/spearman"] == pytest.approx(spearmanr(values, wanted).statistic, abs=1e-5)
    assert found["val/mse"] == pytest.approx(np.mean((np.array(values) - np.array(wanted)) ** 2), rel=1e-5)
    assert found["val/mse"] == pytest.approx(found["val/loss"], rel=1e-5)


def test_ties_in_the_metrics():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 4, size=(30, 3)) / 4
        wanted = rng.random((30, 3)) < 0.3
        wanted[0] = True
        found = multilabel_metrics(torch.from_numpy(scores), torch.from_numpy(wanted))
        assert found["map"] == pytest.approx(average_precision_score(wanted, scores, average="macro"))
        assert found["f1"] == pytest.approx(f1_score(wanted, scores > 0.5, average="macro", zero_division=0))


# -- models, adapters, runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "adapter"),
    [(llama, None), (gpt2, None), (llama, LoRA(r=2, dropout=0.0)), (gpt2, PrefixTuning(3))],
)
def test_decoders_read_the_last_token_whatever_the_padding(task, config, adapter):
    made = task(config(), tokenizer=chat_tokenizer(), adapter=adapter)
    made.inspect_dataset(RECORDS)
    made.model.eval()
    together = made.classify(TEXTS, batch_size=24)
    alone = [made.classify(text)[0] for text in TEXTS]
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert len({row["animal"] for row in alone}) > 12  # it looks at the texts
    # The same by hand, without padding.
    inner = made.model if adapter is None else made.model.base_model
    assert inner.config.pad_token_id == made.text_tokenizer.pad_token_id
    if adapter is None:
        ids = torch.tensor([made.text_tokenizer(TEXTS[1])["input_ids"]])
        hidden = made.model.base_model(ids).last_hidden_state[0, -1]
        scores = made.model.score(hidden).softmax(-1).tolist()
        assert alone[1] == pytest.approx(dict(zip(NAMES, scores, strict=True)), abs=1e-5)


def test_padding_changes_nothing(task):
    made = task()
    rows = made.classify(TEXTS, batch_size=24)
    for text, row in zip(TEXTS, rows, strict=True):
        assert made.classify(text)[0] == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("adapter", [LoRA(r=4, dropout=0.0), PrefixTuning(3)])
def test_an_adapter_is_saved_with_the_head(task, tmp_path, adapter):
    AutoModelForSequenceClassification.from_config(bert()).save_pretrained(tmp_path / "base")
    options = {"save_every": 2, "save_last": 5, "max_steps": 6}

    def run(folder, **more):
        made = task(str(tmp_path / "base"), adapter=adapter, model_kwargs={"ignore_mismatched_sizes": True})
        return trainer_for(made, RECORDS, run_dir=tmp_path / folder, **options, **more)

    whole, _ = check_resuming(run)
    trained = {name for name, p in whole.task.model.named_parameters() if p.requires_grad}
    assert any("classifier" in name for name in trained)
    assert all("classifier" in n or "lora_" in n or "prompt_encoder" in n for n in trained)
    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True
    )
    opened = PeftModel.from_pretrained(plain, checkpoint_of(whole)).eval()
    whole.task.model.eval()
    ids = torch.arange(5, 17)[None]
    mask = torch.ones_like(ids)
    torch.testing.assert_close(
        opened(input_ids=ids, attention_mask=mask).logits, whole.task.model(input_ids=ids, attention_mask=mask).logits
    )


def test_an_interrupted_run_ends_with_the_same_weights(task, tmp_path):
    def run(folder, **more):
        return trainer_for(task(), RECORDS, run_dir=tmp_path / folder, save_every=2, save_last=5, **more)

    whole, again = check_resuming(run)
    assert whole.evaluate(RECORDS) == again.evaluate(RECORDS)


def test_other_classes_do_not_go_on_with_a_run(task, tmp_path):
    trainer = trainer_for(task(), RECORDS, run_dir=tmp_path / "run").fit()
    other = trainer_for(task(class_names=NAMES[::-1]), RECORDS)
    with pytest.raises(DataError, match=r"Pass class_names=\['animal', 'number', 'other'\]"):
        other.load(checkpoint_of(trainer))


def test_predictions_need_no_labels(task):
    made = task()
    trainer = trainer_for(made, RECORDS)
    rows = trainer.predict([{"text": text} for text in TEXTS])
    for row, best in zip(rows, made.classify(TEXTS, top=1), strict=True):
        assert best == {NAMES[row["prediction"]]: pytest.approx(row["probability"].item(), abs=1e-6)}
    assert len(trainer.predict([*TEXTS, ""])) == 25
    with pytest.raises(DataError, match="a label with every text"):
        trainer.evaluate([{"text": text} for text in TEXTS])


def test_check_finds_nothing_wrong_and_something(task):
    assert trainer_for(task(), RECORDS, val_data=RECORDS).check().ok
    same = [{"text": text, "label": "animal"} for text in TEXTS]
    report = trainer_for(task(), same, batch_size=12).check(raise_on_failure=False)
    assert "have the same label" in str(report)


def test_wrong_data_and_arguments(task, tmp_path):
    with pytest.raises(DataError, match=r"Record 1: .*a label, received 'none'"):
        trainer_for(task(), [RECORDS[0], {"text": "a", "label": None}])
    with pytest.raises(DataError, match="records with a text"):
        trainer_for(task(), [{"body_": "a", "label": "animal"}])
    with pytest.raises(DataError, match=r"data.jsonl.*line 2.*a text in 'text'"):
        trainer_for(task(), written(tmp_path / "data.jsonl", [RECORDS[0], {"text": 3, "label": "animal"}]))
    with pytest.raises(DataError, match="at least two classes"):
        trainer_for(task(num_classes=None), written(tmp_path / "one.jsonl", [{"text": "a", "label": "x"}] * 4))
    assert trainer_for(task(num_classes=None), RECORDS).task.class_names == NAMES  # found in the records
    with pytest.raises(BadArgument, match="problem to be"):
        task(problem="binary")
    with pytest.raises(BadArgument, match="num_classes=3, as many as class_names"):
        task(class_names=NAMES, num_classes=2)
    with pytest.raises(BadArgument, match="class_weights to be 'balanced'"):
        task(class_weights="even")
    with pytest.raises(BadArgument, match="problem='single' for these arguments"):
        trainer_for(task(problem="regression", label_smoothing=0.1), SCORED)
    with pytest.raises(DataError, match=r"a label from 0 to 2.*received 7"):
        trainer_for(task(), [{"text": "a", "label": 7}] * 4)
    with pytest.raises(BadArgument, match="num_classes=4"):
        trainer_for(task(num_classes=2), [{"text": "a", "label": i} for i in range(4)])
    short = task(max_length=5)
    assert all(batch["input_ids"].shape[1] == 5 for batch in batches_of(trainer_for(short, RECORDS)))


@pytest.mark.slow
def test_it_learns(task):
    made = task()
    trainer = trainer_for(made, RECORDS, val_data=RECORDS, max_steps=400, batch_size=12, lr=2e-3, precision="no")
    assert trainer.evaluate()["val/accuracy"] < 0.8
    found = trainer.fit().evaluate()
    assert found["val/accuracy"] == 1.0
    assert found["val/f1"] == 1.0
