"""Tabular tasks: encoding, leakage, missing values, files and frames, and metrics against scikit-learn."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pandas as pd
import pytest
import torch
from promise_toys import settings, table
from sklearn.linear_model import LinearRegression
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from sklearn.preprocessing import StandardScaler
from torch import nn

from trainformer import Trainer
from trainformer.core import BadArgument, DataError
from trainformer.data.tabular import Table, TableEncoder, load_table
from trainformer.eval.tabular import macro_auc, regression_scores, roc_auc
from trainformer.run import run_of
from trainformer.tasks import TabularClassification, TabularRegression


def frame(rows: int = 60) -> pd.DataFrame:
    return pd.DataFrame(table(rows))


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_regression_metrics_are_those_of_scikit_learn():
    data = frame()
    trainer = Trainer(
        TabularRegression(target=["price", "x1"], ignore=["sold"]), data, val_data=data, **settings(eval_batch_size=7)
    ).fit()
    found, rows = trainer.evaluate(), trainer.predict(data)
    guesses, values = torch.stack([row["prediction"] for row in rows]).numpy(), data[["price", "x1"]].to_numpy()
    assert found["val/r2"] == pytest.approx(r2_score(values, guesses), abs=1e-6)
    assert found["val/rmse"] == pytest.approx(root_mean_squared_error(values, guesses), abs=1e-5)
    assert found["val/mae"] == pytest.approx(mean_absolute_error(values, guesses), abs=1e-5)
    scaled = ((guesses - values) / values.std(0)) ** 2
    assert found["val/loss"] == pytest.approx(scaled.mean(), rel=1e-5)


@pytest.mark.parametrize("data", ["wine", "breast-cancer"])
def test_classification_metrics_are_those_of_scikit_learn(data):
    task = TabularClassification()
    trainer = Trainer(task, data, val_data=data, **settings(max_steps=2, eval_batch_size=50, optimizer="adamw")).fit()
    found, rows = trainer.evaluate(), trainer.predict(data)
    shares = torch.stack([row["probabilities"] for row in rows]).double()
    shares = (shares / shares.sum(1, keepdim=True)).numpy()
    labels = load_table(data).columns["target"]
    guesses = [task.class_names[row["prediction"]] for row in rows]
    scores = {"multi_class": "ovr"} if shares.shape[1] > 2 else {}
    auc = roc_auc_score(labels, shares if scores else shares[:, 1], **scores)
    assert found["val/accuracy"] == pytest.approx(accuracy_score(labels, guesses))
    assert found["val/f1"] == pytest.approx(f1_score(labels, guesses, average="macro"), abs=1e-6)
    assert found["val/auc"] == pytest.approx(auc, abs=1e-6)
    assert found["val/loss"] == pytest.approx(log_loss(labels, shares), rel=1e-5)


def test_auc_with_ties_and_single_classes():
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, labels = rng.integers(0, 5, 40) / 4, rng.integers(0, 2, 40)
        assert roc_auc(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(roc_auc_score(labels, scores))
    assert np.isnan(roc_auc(torch.rand(4), torch.ones(4)))
    assert np.isnan(macro_auc(torch.rand(4, 3), torch.tensor([0, 1, 0, 1])))
    assert np.isnan(regression_scores(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))["r2"])


# -- encoding --------------------------------------------------------------------------------------------------------


def test_the_encoding_is_learned_from_the_training_rows_only():
    data = frame()
    rest = data.iloc[:40].copy()
    trainer = Trainer(TabularRegression(target="price"), rest, val_data=data.iloc[40:], **settings())
    scaler = StandardScaler().fit(rest[["x0"]])
    column = trainer.task.encoder.numeric[0]
    assert (column.name, column.mean, column.std) == (
        "x0",
        pytest.approx(scaler.mean_[0]),
        pytest.approx(scaler.scale_[0]),
    )
    split = Trainer(TabularRegression(target="price"), data, val_split=20, **settings()).task.encoder
    whole = Trainer(TabularRegression(target="price"), data, **settings()).task.encoder
    assert split.numeric[0].mean != whole.numeric[0].mean
    assert split.numeric[0].name == whole.numeric[0].name


def test_missing_and_unknown_values_have_their_own_codes():
    train = Table({"a": [1.0, None, 3.0], "b": [1, 2, 3], "c": ["x", None, "y"]})
    encoder = TableEncoder.learn(train, ["a", "b"], ["c"])
    assert (encoder.width, encoder.cardinalities) == (3, [4])
    numbers, categories = encoder.encode(Table({"b": [None, 2], "c": ["new", "y"], "a": [2, None], "more": [0, 0]}))
    assert numbers.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert categories.tolist() == [[0], [3]]
    assert TableEncoder.from_state(encoder.state_dict()) == encoder
    with pytest.raises(DataError, match="the columns c in the table"):
        encoder.encode(Table({"a": [1], "b": [2]}))


def test_integers_can_be_categories():
    data = frame().assign(kind=np.arange(60) % 4)
    plain = Trainer(TabularRegression(target="price"), data, **settings()).task.encoder
    named = Trainer(TabularRegression(target="price", categorical=["kind"]), data, **settings()).task.encoder
    assert "kind" in [column.name for column in plain.numeric]
    assert {c.name: c.categories for c in named.categorical}["kind"] == ("0", "1", "2", "3")


def test_a_loaded_checkpoint_brings_its_encoding(tmp_path):
    data = frame()
    first = Trainer(TabularRegression(target="price"), data.iloc[:40], **settings()).fit()
    first.save(tmp_path / "first.pt")
    wanted = [row["prediction"].item() for row in first.predict(data)]
    score = first.evaluate(data.iloc[40:])
    other = Trainer(TabularRegression(target="price"), data.iloc[20:], val_data=data.iloc[40:], **settings())
    other.load(tmp_path / "first.pt")
    assert [row["prediction"].item() for row in other.predict(data)] == wanted
    assert other.evaluate() == pytest.approx(score)  # the validation rows were encoded before
    fewer = Trainer(TabularRegression(target="price"), data.drop(columns="city"), **settings())
    with pytest.raises(DataError, match=r"does not fit|columns of the checkpoint"):
        fewer.load(tmp_path / "first.pt")


# -- where tables come from ------------------------------------------------------------------------------------------


def test_all_forms_of_a_table_are_the_same(tmp_path):
    data = frame(30)
    data.to_csv(tmp_path / "rows.csv", index=False)
    data.to_csv(tmp_path / "rows.tsv", index=False, sep="\t")
    data.to_parquet(tmp_path / "rows.parquet")
    datasets = pytest.importorskip("datasets")
    forms = [
        data,
        table(30),
        datasets.Dataset.from_pandas(data),
        data.convert_dtypes(),
        data.astype({"city": "category"}),
    ]
    forms += [str(tmp_path / f"rows.{suffix}") for suffix in ("csv", "tsv", "parquet")]
    ways = [Trainer(TabularRegression(target="price"), form, **settings()).fit() for form in forms]
    first = [row["prediction"].item() for row in ways[0].predict(data)]
    for trainer in ways[1:]:
        assert trainer.task.encoder == ways[0].task.encoder
        assert [row["prediction"].item() for row in trainer.predict(data)] == first


def test_arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = x @ [1.0, -2.0, 0.5] + 3
    trainer = Trainer(
        TabularRegression(depth=0), (x, y), val_data=(x, y), **settings(max_steps=60, lr=0.1, optimizer="adamw")
    ).fit()
    assert trainer.evaluate()["val/r2"] > 0.99  # without hidden layers it is a linear regression
    classes = Trainer(TabularClassification(), (x, (y > 3).astype(int)), **settings()).fit()
    assert classes.task.class_names == ["0", "1"]
    assert classes.predict(x[:5])[0]["probabilities"].shape == (2,)


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        (lambda d: d, {"target": "prize"}, BadArgument, "Did you mean 'price'"),
        (lambda d: d.drop(columns="price"), {"target": None}, BadArgument, "Pass the name of the column to predict"),
        (lambda d: d, {"target": "city"}, DataError, "Use TabularClassification"),
        (lambda d: d, {"ignore": ["sol"]}, BadArgument, "Did you mean 'sold'"),
        (lambda d: d.assign(price=d.price.where(d.index != 3)), {}, DataError, "missing value in row 3"),
        (lambda d: d.assign(x0=d.x0.where(d.index != 7, np.inf)), {}, DataError, "'inf in row 7'"),
        (
            lambda d: d.assign(day=pd.Timestamp("2024-01-01")),
            {},
            DataError,
            "column 'day' .*list the column in `ignore`",
        ),
        (lambda d: d.assign(empty=None), {"categorical": []}, None, ""),
        (lambda d: d[["price"]], {}, DataError, "columns beside the target"),
        (lambda d: d.assign(tags=[[1]] * len(d)), {}, DataError, "column 'tags' .*received 'a list'"),
    ],
)
def test_plausible_mistakes(change, options, error, match):
    task = TabularRegression(**{"target": "price", **options})
    if error is None:
        Trainer(task, change(frame()), **settings()).fit()
        return
    with pytest.raises(error, match=match):
        Trainer(task, change(frame()), **settings()).fit()


def test_rows_to_predict_may_lack_the_target():
    data = frame()
    for task, name in ((TabularRegression(target="price"), "price"), (TabularClassification(target="sold"), "sold")):
        trainer = Trainer(task, data, **settings()).fit()
        wanted = [row["prediction"].item() for row in trainer.predict(data)]
        gaps = data.assign(**{name: data[name].where(data.index > 3)})
        for rows in (data.drop(columns=name), gaps):
            assert [row["prediction"].item() for row in trainer.predict(rows)] == wanted
            with pytest.raises(DataError, match="Expected rows with their target"):
                trainer.evaluate(rows)
        with pytest.raises(DataError, match="a missing value in row 0"):
            Trainer(type(task)(target=name), gaps, **settings())


def test_dates_can_be_ignored():
    data = frame().assign(day=pd.Timestamp("2024-01-01"))
    ignoring = TabularRegression(target="price", ignore=["day"])
    trainer = Trainer(ignoring, data, val_split=0.2, **settings()).fit()
    without = Trainer(TabularRegression(target="price"), data.drop(columns="day"), val_split=0.2, **settings()).fit()
    wanted = [row["prediction"].item() for row in without.predict(data.drop(columns="day"))]
    assert [row["prediction"].item() for row in trainer.predict(data)] == wanted


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TabularRegression("mpl"), "Did you mean 'mlp'"),
        (lambda: TabularRegression(dropout=1.0), "dropout to be"),
        (lambda: TabularRegression(ignore="id"), "ignore to be a list of columns"),
        (lambda: TabularRegression(loss="rmse"), "loss to be one of"),
        (lambda: TabularRegression(target=1), "target to be the name of a column"),
        (lambda: TabularClassification(target=["a", "b"]), "one column"),
        (lambda: TabularClassification(class_weights="equal"), "class_weights to be"),
    ],
)
def test_bad_arguments(make, match):
    with pytest.raises(BadArgument, match=match):
        make()


def test_csv_files_that_are_broken(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3\n")
    with pytest.raises(DataError, match=r"2 values in line 3 .* received 1"):
        load_table(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("x,x\n1,2\n")
    with pytest.raises(DataError, match=r"names of their own, received \['x'\]"):
        load_table(str(tmp_path / "b.csv"))
    with pytest.raises(DataError, match="Did you mean 'diabetes'"):
        load_table("diabetis")


def test_identifiers_are_warned_of(caplog):
    data = frame().assign(name=[f"n{i}" for i in range(60)])
    with caplog.at_level(logging.WARNING):
        Trainer(TabularRegression(target="price"), data, **settings())
    assert "column 'name' has 60 categories in 60 rows" in caplog.text


def test_validation_classes_are_matched_by_name():
    data = pd.DataFrame({"x": np.arange(30.0), "label": ["a", "b", "c"] * 10})
    trainer = Trainer(TabularClassification(), data, val_data=data[data.label != "a"], **settings())
    labels = [int(label) for label in run_of(trainer).val_source.dataset.tensors[2][:2]]
    assert labels == [1, 2]
    with pytest.raises(DataError, match="received others: d"):
        trainer.evaluate(pd.DataFrame({"x": [1.0], "label": ["d"]}))


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "ft-transformer"])
def test_each_network_learns(name):
    task = TabularClassification(name, "sold", ignore=["price"], width=32)
    data = frame(120)
    trainer = Trainer(
        task, data, val_data=data, **settings(max_steps=40, lr=5e-3, batch_size=40, optimizer="adamw")
    ).fit()
    assert trainer.evaluate()["val/accuracy"] > 0.9
    copy.deepcopy(task)


def test_a_module_gets_the_numbers():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    task = TabularRegression(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), scale=False)
    Trainer(task, (x, x[:, 0]), **settings()).fit()
    with pytest.raises(BadArgument, match="outputs of shape"):
        Trainer(TabularRegression(nn.Linear(3, 2)), (x, x[:, 0]), **settings()).fit()


def test_quality_on_the_samples():
    """As good as linear regression on "diabetes" (R² of 0.48 seen), and nearly perfect on "wine"."""
    data, order = load_table("diabetes"), np.random.default_rng(0).permutation(442)
    train, val = data.take(order[:350]), data.take(order[350:])
    options = settings(max_steps=150, batch_size=64, lr=2e-3, optimizer="adamw")
    diabetes = Trainer(TabularRegression(), train, val_data=val, **options).fit()

    def arrays(part):
        return np.stack([values for name, values in part.columns.items() if name != "target"], 1), part.columns[
            "target"
        ]

    linear = LinearRegression().fit(*arrays(train)).score(*arrays(val))
    assert diabetes.evaluate()["val/r2"] > linear - 0.1
    wine = Trainer(
        TabularClassification(),
        "wine",
        val_split=0.3,
        **settings(max_steps=60, batch_size=32, lr=5e-3, optimizer="adamw"),
    ).fit()
    assert wine.evaluate()["val/accuracy"] > 0.9
