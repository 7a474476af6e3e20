"""The confusion matrix that a run records at each evaluation, against that of scikit-learn."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn

from ranks import on_ranks
from text_toys import WORDS, batches_of, bert, masking_tokenizer, sentences, trainer_for
from trainformer import Trainer
from trainformer.report.reading import read_run
from trainformer.tasks import ImageClassification, TextClassification, TokenClassification
from trainformer.tasks.classification_report import confusion_record

NAMES = ["red", "green", "blue"]


def matrices(folder):
    """The recorded ones, and the classes of each."""
    lines = [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()]
    return [(np.array(r["matrix"]), r["labels"]) for r in lines if r["kind"] == "confusion_matrix"]


def pictures(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return images, images.float().mean((2, 3)).argmax(-1)


def painter(**options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    task = ImageClassification(model, num_classes=3, augment="none", image_size=8)
    usual = {"batch_size": 8, "max_steps": 4, "lr": 1e-3, "log": "none", "run_dir": "run", "save_best": 0}
    return Trainer(task, pictures(32), **{"val_data": pictures(37, 1), **usual, **options})


def judged(trainer):
    """Labels and predictions of the validation images, from `predict`."""
    images, labels = pictures(37, 1)
    return labels.tolist(), [int(row["prediction"]) for row in trainer.predict(images)]


@pytest.mark.parametrize("eval_batch_size", [1, 8, 64])
def test_images(eval_batch_size):
    trainer = painter(eval_batch_size=eval_batch_size, eval_every="2steps").fit()
    found = matrices("run")
    assert len(found) == 2
    matrix, labels = found[-1]
    assert np.array_equal(matrix, confusion_matrix(*judged(trainer), labels=range(3)))
    assert matrix.sum() == 37
    assert np.count_nonzero(matrix) > 3  # it is wrong now and then: otherwise rows and columns could be exchanged
    assert labels is None


def test_a_check_or_an_evaluation_of_other_data_is_no_evaluation_of_the_run():
    trainer = painter().fit()
    trainer.evaluate()
    trainer.evaluate(pictures(9, 2))
    assert len(matrices("run")) == 1


def of_ranks(folder, rank, world):
    """Run by each rank: 37 samples in batches of six leave one of them without any in the last batch."""
    painter(run_dir=str(folder / "ranks"), batch_size=4, eval_batch_size=3, lr=1e-12).fit()
    return {"rank": torch.tensor(rank)}


@pytest.mark.slow
def test_two_ranks_record_what_one_does(tmp_path):
    painter(run_dir="one", lr=1e-12).fit()  # next to none: no prediction may hang on the order of additions
    on_ranks(partial(of_ranks, tmp_path), 2, tmp_path)
    (one, _), (two, _) = matrices("one")[-1], matrices(tmp_path / "ranks")[-1]
    assert np.array_equal(one, two)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "ranks" / "records.jsonl").read_text().splitlines()]
    assert kinds == ["began", "confusion_matrix", "evaluated", "saved", "ended"]  # of one rank, not of both


def test_texts():
    texts = sentences()
    records = [{"text": text, "label": NAMES[len(text.split()) % 3]} for text in texts]
    task = TextClassification(bert(), tokenizer=masking_tokenizer(texts), class_names=NAMES, max_length=64)
    trainer = trainer_for(task, records, val_data=records, run_dir="run").fit()
    matrix, labels = matrices("run")[-1]
    predicted = [NAMES[int(row["prediction"])] for row in trainer.predict([{"text": text} for text in texts])]
    assert labels == NAMES
    assert np.array_equal(matrix, confusion_matrix([r["label"] for r in records], predicted, labels=NAMES))


def test_words():
    """Each word counts once, by its first token, in windows of unequal length."""
    names = ["O", "B-ANI", "B-NUM"]
    kinds = {"fox": "B-ANI", "dog": "B-ANI", "seven": "B-NUM"}
    records = [{"tokens": t.split(), "tags": [kinds.get(w, "O") for w in t.split()]} for t in sentences()]
    tokenizer = masking_tokenizer([" ".join(WORDS[::2])])
    task = TokenClassification(bert(), tokenizer=tokenizer, class_names=names, max_length=12)
    trainer = trainer_for(task, records, val_data=records, run_dir="run", max_steps=12, eval_batch_size=5).fit()
    matrix, labels = matrices("run")[-1]
    wanted, predicted = [], []
    with trainer.eval_mode(), torch.no_grad():
        for batch in batches_of(trainer, train=False):
            asked = batch["labels"] >= 0
            logits = task.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            wanted += batch["labels"][asked].tolist()
            predicted += logits.argmax(-1)[asked].tolist()
    assert labels == names
    assert matrix.sum() == sum(len(r["tokens"]) for r in records)
    assert np.array_equal(matrix, confusion_matrix(wanted, predicted, labels=range(3)))


def test_of_many_classes_the_most_mistaken():
    counts = torch.eye(120, dtype=torch.int64) * 50
    counts[7, 3], counts[100, 7] = 9, 4
    record = confusion_record(counts, [f"c{i}" for i in range(120)])["confusion_matrix"]
    assert record["classes"] == 120
    assert len(record["labels"]) == len(record["matrix"]) == len(record["matrix"][0]) == 50
    assert {"c3", "c7", "c100"} <= set(record["labels"])
    place = record["labels"].index
    assert record["matrix"][place("c7")][place("c3")] == 9
    assert record["matrix"][place("c100")][place("c7")] == 4
    assert record["labels"] == sorted(record["labels"], key=lambda name: int(name[1:]))
    assert len(confusion_record(counts[:100, :100], None)["confusion_matrix"]["matrix"]) == 100


def test_each_validation_set_has_its_own_matrix():
    sets = {"a": pictures(37, 1), "b": pictures(20, 2)}
    trainer = painter(val_data=sets, eval_every={"a": "2steps", "b": "4steps"}).fit()
    lines = [json.loads(line) for line in Path("run/records.jsonl").read_text().splitlines()]
    found = [(r["step"], r["key"], np.array(r["matrix"])) for r in lines if r["kind"] == "confusion_matrix"]
    assert [(step, key) for step, key, _ in found] == [(2, "a"), (4, "a"), (4, "b")]
    for _, key, matrix in found[1:]:
        images, labels = sets[key]
        predicted = [int(row["prediction"]) for row in trainer.predict(images)]
        assert np.array_equal(matrix, confusion_matrix(labels.tolist(), predicted, labels=range(3)))
    assert [group["key"] for group in read_run(Path("run"))["confusion"]] == ["a", "b"]
