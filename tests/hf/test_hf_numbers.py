"""Losses, weights, evaluations and predictions compared with the Trainer of transformers."""

import numpy as np
import pytest
import torch
import transformers
from hf_toys import Classifier, examples, llama, losses, make, make_theirs, padded, parameters, sequences
from torch import nn
from torch.nn import functional as F

from trainformer import hf
from trainformer.core.errors import BadArgument
from trainformer.report.reading import read_run

SEQUENTIAL = {"train_sampling_strategy": "sequential", "logging_steps": 1, "num_train_epochs": 2}


def both(tmp_path, model, **options):
    """The same run in both trainers."""
    made = []
    for name, build in (("ours", make), ("theirs", make_theirs)):
        trainer = build(tmp_path / name, model(), **{**SEQUENTIAL, **options})
        made.append((trainer, trainer.train()))
    return made


def assert_same(made, tolerance=1e-6):
    (ours, out), (theirs, expected) = made
    assert out.global_step == expected.global_step
    assert losses(ours) == pytest.approx(losses(theirs), abs=tolerance)
    assert out.training_loss == pytest.approx(expected.training_loss, abs=tolerance)
    for name, p in parameters(theirs.model).items():
        torch.testing.assert_close(parameters(ours.model)[name], p, rtol=0, atol=tolerance)
    return True


CASES = {
    "as it is": {},
    "decay, momentum of its own": {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "accumulating, the last window smaller": {"gradient_accumulation_steps": 2},
    "cosine with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "a share of warm-up": {"warmup_steps": 0.3},
    "constant": {"lr_scheduler_type": "constant"},
    "options of a schedule": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    "no clipping": {"max_grad_norm": 0.0},
    "much clipping": {"max_grad_norm": 0.01},
    "plain SGD": {"optim": "sgd"},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "the last batch left out": {"dataloader_drop_last": True, "per_device_train_batch_size": 6},
    "steps": {"max_steps": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_training_a_classifier_matches_transformers(name, tmp_path):
    assert assert_same(both(tmp_path, Classifier, learning_rate=1e-2, **CASES[name]))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_a_language_model_matches_transformers(accumulation, tmp_path):
    """Batches have different numbers of supervised tokens: a mean of means would differ by far more."""
    options = {"train": sequences(), "gradient_accumulation_steps": accumulation, "learning_rate": 1e-3}
    options |= {"per_device_train_batch_size": 2, "more": {"data_collator": padded}, "adam_epsilon": 1e-5}
    made = both(tmp_path, llama, **options)
    assert assert_same(made)


def sum_over_items(outputs, labels, num_items_in_batch=None):
    """In the dtype of the model; transformers computes losses in fp32."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    total = F.cross_entropy(logits[..., :-1, :].flatten(0, 1), labels[..., 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def test_gradient_accumulation_does_not_change_the_result(tmp_path):
    """8 x 1 = 1 x 8, also with different numbers of supervised tokens."""
    runs = {}
    for size, accumulation in ((8, 1), (1, 8), (2, 4)):
        model = llama().double()
        options = {**SEQUENTIAL, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        more = {"data_collator": padded, "compute_loss_func": sum_over_items}
        trainer = make(tmp_path / str(size), model, train=sequences(), more=more, **options)
        trainer.train()
        runs[size] = losses(trainer), parameters(model)
    for size in (1, 2):
        assert runs[size][0] == pytest.approx(runs[8][0], abs=1e-9)
        for name, p in runs[8][1].items():
            torch.testing.assert_close(runs[size][1][name], p, rtol=0, atol=1e-8)


def test_label_smoothing(tmp_path):
    options = {"train": sequences(), "label_smoothing_factor": 0.2, "more": {"data_collator": padded}}
    assert assert_same(both(tmp_path, llama, learning_rate=1e-3, adam_epsilon=1e-5, **options))


def test_compute_loss_func(tmp_path):
    more = {"data_collator": padded, "compute_loss_func": sum_over_items}
    options = {"train": sequences(), "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    assert assert_same(both(tmp_path, llama, learning_rate=1e-3, adam_epsilon=1e-5, more=more, **options))


def test_compute_loss_func_without_num_items(tmp_path):
    """It returns a mean over samples, weighted by their number."""

    def plain(outputs, labels):
        return F.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)

    trainer = make(tmp_path, Classifier(), more={"compute_loss_func": plain}, **SEQUENTIAL, learning_rate=1e-2)
    trainer.train()
    model, data = Classifier(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(10):
        batch = data[step % 5 * 8 :][:8]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / 10)
        logits = model(torch.stack([e["x"] for e in batch]))["logits"]
        plain({"logits": logits}, torch.stack([e["labels"] for e in batch])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in parameters(model).items():
        torch.testing.assert_close(parameters(trainer.model)[name], p, rtol=0, atol=1e-6)


def overriding(base):
    class Weighted(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
            return (loss, outputs) if return_outputs else loss

    return Weighted


def test_compute_loss_can_be_overridden(tmp_path):
    options = {**SEQUENTIAL, "learning_rate": 1e-2, "evaluation": examples(16, seed=1)}
    ours = make(tmp_path / "a", trainer=overriding(hf.Trainer), **options)
    theirs = make_theirs(tmp_path / "b", trainer=overriding(transformers.Trainer), **options)
    assert assert_same([(ours, ours.train()), (theirs, theirs.train())])
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-6)


class Plain(nn.Module):
    """A model whose forward has no labels."""

    def __init__(self, outputs=3):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, outputs)

    def forward(self, x):
        return self.layer(x)


def test_a_model_without_labels_in_forward_uses_cross_entropy(tmp_path):
    trainer = make(tmp_path, Plain(), **SEQUENTIAL, learning_rate=1e-2)
    batch = examples()[:8]
    logits = Plain()(torch.stack([e["x"] for e in batch]))
    expected = F.cross_entropy(logits, torch.stack([e["labels"] for e in batch]))
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(float(expected), abs=1e-6)
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_float_labels_use_mse(tmp_path):
    data = [{"x": e["x"], "labels": e["x"].sum()} for e in examples()]
    trainer = make(tmp_path, Plain(1), train=data, **SEQUENTIAL)
    x = torch.stack([e["x"] for e in data[:8]])
    expected = F.mse_loss(Plain(1)(x)[:, 0], x.sum(-1))
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(float(expected), abs=1e-6)


def test_tuple_batches(tmp_path):
    data = torch.utils.data.TensorDataset(
        torch.stack([e["x"] for e in examples()]), torch.stack([e["labels"] for e in examples()])
    )
    by_name = make(tmp_path / "a", Plain(), **SEQUENTIAL)
    by_place = make(tmp_path / "b", Plain(), train=data, **SEQUENTIAL)
    by_name.train()
    by_place.train()
    assert losses(by_place) == losses(by_name)


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    """In transformers it does, if batches have different numbers of supervised tokens."""
    data = sequences(11, seed=2)
    results = []
    for size in (1, 3, 11):
        more = {"data_collator": padded}
        trainer = make(tmp_path / str(size), llama(), evaluation=data, more=more, per_device_eval_batch_size=size)
        results.append(trainer.evaluate()["eval_loss"])
    whole = padded(data)
    expected = llama()(**whole).loss.item()
    assert results == pytest.approx([expected] * 3, abs=1e-6)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_metrics_and_predictions_match_transformers(tmp_path):
    options = {**SEQUENTIAL, "learning_rate": 1e-2, "evaluation": examples(21, seed=1), "per_device_eval_batch_size": 4}
    (ours, _), (theirs, _) = both(tmp_path, Classifier, more={"compute_metrics": accuracy}, **options)
    mine, expected = ours.evaluate(), theirs.evaluate()
    assert mine["eval_accuracy"] == expected["eval_accuracy"]
    assert mine["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"} <= mine.keys()
    test = examples(13, seed=2)
    mine, expected = ours.predict(test), theirs.predict(test)
    np.testing.assert_allclose(mine.predictions, expected.predictions, atol=1e-5)
    assert (mine.label_ids == expected.label_ids).all()
    assert mine.metrics["test_accuracy"] == expected.metrics["test_accuracy"]


def test_padding_of_predictions_matches_transformers(tmp_path):
    more = {"data_collator": padded, "compute_metrics": lambda p: {"rows": float(len(p.predictions))}}
    data = sequences(10, seed=4)
    made = []
    for name, build in (("ours", make), ("theirs", make_theirs)):
        trainer = build(tmp_path / name, llama(), evaluation=data, more=more, per_device_eval_batch_size=3)
        made.append((trainer.predict(data), trainer.evaluate()))
    (ours, metrics), (theirs, expected) = made
    np.testing.assert_allclose(ours.predictions, theirs.predictions, atol=1e-5)
    assert (ours.label_ids == theirs.label_ids).all()
    assert metrics["eval_rows"] == expected["eval_rows"] == 10


def test_preprocess_logits_for_metrics(tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"share": float((prediction.predictions == prediction.label_ids).mean())}

    more = {"compute_metrics": metrics, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = make(tmp_path, Classifier(), evaluation=examples(10, seed=1), more=more)
    share = trainer.evaluate()["eval_share"]
    assert seen == [(10,)]
    assert (
        share
        == make(tmp_path / "b", evaluation=examples(10, seed=1), more={"compute_metrics": accuracy}).evaluate()[
            "eval_accuracy"
        ]
    )


def test_several_eval_datasets(tmp_path):
    sets = {"near": examples(10, seed=1), "far": examples(12, seed=2)}
    options = {**SEQUENTIAL, "evaluation": sets, "eval_strategy": "epoch", "learning_rate": 1e-2}
    options |= {"load_best_model_at_end": True, "save_strategy": "epoch", "metric_for_best_model": "near_loss"}
    (ours, _), (theirs, _) = both(tmp_path, Classifier, **options)
    mine, expected = ours.evaluate(), theirs.evaluate()
    for name in ("eval_near_loss", "eval_far_loss"):
        assert mine[name] == pytest.approx(expected[name], abs=1e-6)
    during = [r for r in ours.state.log_history if "eval_near_loss" in r]
    assert len(during) >= 2
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric, abs=1e-6)
    assert ours.evaluate("far")["eval_loss"] == pytest.approx(expected["eval_far_loss"], abs=1e-6)


def test_records_best_model_and_report_of_several_eval_datasets_agree(tmp_path):
    sets = {"near": examples(10, seed=1), "near_by": examples(12, seed=2)}  # one name begins with the other
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 4, "learning_rate": 0.3}
    options |= {"metric_for_best_model": "eval_near_by_loss", "load_best_model_at_end": True, "preserve_n_best": 1}
    trainer = make(tmp_path, evaluation=sets, logging_dir=str(tmp_path / "logs"), **options)
    trainer.train()
    losses = {r["step"]: r["eval_near_by_loss"] for r in trainer.state.log_history if "eval_near_by_loss" in r}
    best = min(losses, key=losses.get)
    assert trainer.state.best_metric == losses[best]
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.evaluate()["eval_near_by_loss"] == pytest.approx(losses[best], abs=1e-6)
    found = read_run(tmp_path / "logs")
    assert (found["best"]["name"], found["best"]["step"]) == ("val/near_by/loss", best)
    assert found["config"]["val_sets"]["value"] == ["near", "near_by"]
    assert found["series"]["val/near_by/loss"][0] == list(losses)
    assert "val/near/loss" in found["series"]


def test_a_metric_of_no_eval_dataset_is_refused_before_training(tmp_path):
    sets = {"near": examples(10, seed=1), "far": examples(12, seed=2)}
    trainer = make(tmp_path, evaluation=sets, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
    with pytest.raises(BadArgument, match="Such as eval_near_loss, eval_far_loss"):
        trainer.train()
    assert trainer.state.global_step == 0

    class Mean(hf.Trainer):
        def evaluate(self, *args, **kwargs):
            found = super().evaluate(*args, **kwargs)  # calls itself for each of them
            losses = [found[name] for name in ("eval_near_loss", "eval_far_loss") if name in found]
            return found | ({"eval_loss": sum(losses) / 2} if len(losses) == 2 else {})

    trainer = make(tmp_path, evaluation=sets, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
                   trainer=Mean)  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric is not None


def test_evaluation_can_be_limited_and_delayed(tmp_path):
    data = examples(20, seed=1)
    few = make(tmp_path / "a", evaluation=data, max_eval_steps=1, per_device_eval_batch_size=8)
    assert few.evaluate()["eval_loss"] == make(tmp_path / "b", evaluation=data[:8]).evaluate()["eval_loss"]
    late = make(tmp_path / "c", evaluation=data, eval_strategy="steps", eval_steps=2, eval_delay=5, max_steps=8)
    late.train()
    assert [r["step"] for r in late.state.log_history if "eval_loss" in r] == [6, 8]
    first = make(tmp_path / "d", evaluation=data, eval_on_start=True, max_steps=2)
    first.train()
    assert first.state.log_history[0]["step"] == 0
    assert "eval_loss" in first.state.log_history[0]
