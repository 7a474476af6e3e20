"""Methods of the HF Trainer that subclasses override, and what subclasses call, compared with transformers."""

import numpy as np
import pytest
import torch
import transformers
from hf_toys import Classifier, examples, losses, make, make_theirs, parameters
from torch.utils.data import DataLoader, Sampler

from trainformer import hf
from trainformer.core.errors import BadArgument

OPTIONS = {"max_steps": 4, "logging_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}


def both(subclass, folder, **options):
    """A subclass of either Trainer, trained on the same data."""
    trained = []
    for maker, kind in ((make_theirs, transformers.Trainer), (make, hf.Trainer)):
        trainer = maker(folder / maker.__name__, trainer=subclass(kind), **{**OPTIONS, **options})
        trainer.train()
        trained.append(trainer)
    return trained


def assert_same_training(theirs, ours):
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)  # transformers rounds
    for expected, found in zip(parameters(theirs.model).values(), parameters(ours.model).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- steps -------------------------------------------------------------------------------------------------


def counting_step(kind):
    class Counting(kind):
        calls = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.calls += 1
            return super().training_step(model, inputs, num_items_in_batch)

    return Counting


def own_step(kind):
    class Own(kind):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    return Own


def adversarial_step(kind):
    """A second backward pass with changed weights, whose gradients are added."""

    class Adversarial(kind):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            weight = model.body[0].weight
            change = 0.01 * weight.grad.sign()
            weight.data.add_(change)
            again = self.compute_loss(model, self._prepare_inputs(inputs)) / self.current_gradient_accumulation_steps
            self.accelerator.backward(again)
            weight.data.sub_(change)
            return loss

    return Adversarial


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("subclass", [counting_step, own_step, adversarial_step])
def test_training_step(subclass, accumulation, tmp_path):
    theirs, ours = both(subclass, tmp_path, gradient_accumulation_steps=accumulation)
    assert_same_training(theirs, ours)
    if subclass is counting_step:
        assert ours.calls == theirs.calls >= 4 * accumulation - 1  # the last step of an epoch is smaller


def test_a_training_step_without_a_loss_is_an_error(tmp_path):
    kind = type("Silent", (hf.Trainer,), {"training_step": lambda self, *args: None})
    with pytest.raises(BadArgument, match=r"training_step to return its loss.*accelerator\.backward"):
        make(tmp_path, trainer=kind, **OPTIONS).train()


def test_inputs_are_prepared(tmp_path):
    def subclass(kind):
        class Scaled(kind):
            def _prepare_inputs(self, inputs):
                inputs = super()._prepare_inputs(inputs)
                return {**inputs, "x": inputs["x"] * 2}

        return Scaled

    theirs, ours = both(subclass, tmp_path, evaluation=examples(12, seed=1))
    assert_same_training(theirs, ours)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)


def test_num_items_in_batch_is_counted_as_in_transformers(tmp_path):
    from hf_toys import llama

    labels = torch.tensor([[1, 2, 3, -100], [4, 5, -100, -100]])
    shifted = {"labels": labels, "shift_labels": torch.tensor([[2, 3, -100, -100], [5, -100, -100, -100]])}
    for batches in ([{"labels": labels}], [{"labels": labels}, shifted], [{"x": labels}], []):
        found = [
            maker(tmp_path, llama())._get_num_items_in_batch(batches, torch.device("cpu"))
            for maker in (make_theirs, make)
        ]
        assert found[0] == found[1]


# -- data --------------------------------------------------------------------------------------------------


class Backwards(Sampler):
    def __init__(self, data):
        self.length = len(data)

    def __iter__(self):
        return iter(range(self.length - 1, -1, -1))

    def __len__(self):
        return self.length


def reversed_data(kind):
    class Reversed(kind):
        def _get_train_sampler(self, train_dataset=None):
            return Backwards(self.train_dataset)

        def _get_eval_sampler(self, eval_dataset):
            return Backwards(eval_dataset)

    return Reversed


def test_samplers(tmp_path):
    theirs, ours = both(reversed_data, tmp_path)
    assert_same_training(theirs, ours)
    data = examples(12, seed=1)
    np.testing.assert_allclose(ours.predict(data).predictions, theirs.predict(data).predictions, atol=1e-5)
    assert ours.predict(data).label_ids.tolist() == [int(e["labels"]) for e in reversed(data)]


def test_an_evaluation_loader_receives_the_dataset(tmp_path):
    received = []

    def subclass(kind):
        class Halved(kind):
            def get_eval_dataloader(self, eval_dataset=None):
                received.append(eval_dataset)
                data = eval_dataset if isinstance(eval_dataset, list) else self.eval_dataset["b"]
                return DataLoader(data[: len(data) // 2], batch_size=2, collate_fn=self.data_collator)

        return Halved

    parts = {"a": examples(8, seed=1), "b": examples(12, seed=2)}
    theirs, ours = both(subclass, tmp_path, evaluation=parts, eval_strategy="steps", eval_steps=2)
    half = len(received) // 2
    assert received[:half] == received[half:] == ["a", "b", "a", "b"]
    for data in (None, parts["a"]):
        found, expected = ours.evaluate(data), theirs.evaluate(data)
        assert set(found) == set(expected)
        assert {n: v for n, v in found.items() if n.endswith("loss")} == pytest.approx(
            {n: v for n, v in expected.items() if n.endswith("loss")}, abs=1e-5
        )


def test_loaders_of_a_subclass_in_one_run(tmp_path):
    """Evaluations with loaders of the user's own do not disturb the run."""

    def subclass(kind):
        class Loading(kind):
            def get_train_dataloader(self):
                return DataLoader(self.train_dataset, batch_size=8, collate_fn=self.data_collator)

            def get_eval_dataloader(self, eval_dataset=None):
                return DataLoader(self.eval_dataset, batch_size=4, collate_fn=self.data_collator)

        return Loading

    options = {"evaluation": examples(8, seed=1), "eval_strategy": "steps", "eval_steps": 2, "max_steps": 7}
    theirs, ours = both(subclass, tmp_path, **options)
    assert_same_training(theirs, ours)
    assert [sorted(r) for r in ours.state.log_history] == [sorted(r) for r in theirs.state.log_history]


def test_columns_that_a_subclass_keeps(tmp_path):
    seen = []

    def collate(made):
        seen.append(set(made[0]))
        return transformers.default_data_collator([{n: e[n] for n in ("x", "labels")} for e in made])

    class Keeping(hf.Trainer):
        def _set_signature_columns_if_needed(self):
            super()._set_signature_columns_if_needed()
            self._signature_columns.append("name")

    train = [{**example, "name": str(i), "other": i} for i, example in enumerate(examples(16))]
    for kind in (hf.Trainer, Keeping):
        make(tmp_path, trainer=kind, train=train, more={"data_collator": collate}, **OPTIONS).train()
    assert {frozenset(s) for s in seen} == {frozenset({"x", "labels"}), frozenset({"x", "labels", "name"})}


# -- evaluation --------------------------------------------------------------------------------------------


def test_evaluation_loop(tmp_path):
    def subclass(kind):
        class Marked(kind):
            def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
                output = super().evaluation_loop(
                    dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
                )
                output.metrics[f"{metric_key_prefix}_samples"] = output.num_samples
                output.metrics[f"{metric_key_prefix}_what"] = description
                return output

        return Marked

    data = examples(11, seed=1)
    theirs, ours = both(subclass, tmp_path, evaluation=data, eval_strategy="steps", eval_steps=2)
    records = [[r for r in t.state.log_history if "eval_samples" in r] for t in (theirs, ours)]
    assert [len(r) for r in records] == [2, 2]
    for expected, found in zip(*records, strict=True):
        assert set(found) == set(expected)
        assert (found["eval_samples"], found["eval_what"]) == (11, "Evaluation")
    assert ours.predict(data).metrics["test_what"] == theirs.predict(data).metrics["test_what"] == "Prediction"


def test_a_trainer_with_its_own_evaluation(tmp_path):
    """In the manner of question answering: predictions first, metrics of post-processed predictions afterwards."""

    def subclass(kind):
        class Processing(kind):
            def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
                loader = self.get_eval_dataloader(self.eval_dataset)
                metric, self.compute_metrics = self.compute_metrics, None
                try:
                    output = self.evaluation_loop(
                        loader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys,
                        metric_key_prefix=metric_key_prefix,
                    )  # fmt: skip
                finally:
                    self.compute_metrics = metric
                found = self.compute_metrics((output.predictions.argmax(-1), output.label_ids))
                metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()} | output.metrics
                self.log(metrics)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
                return metrics

        return Processing

    more = {"compute_metrics": lambda pair: {"right": float((pair[0] == pair[1]).mean())}}
    data = examples(12, seed=1)
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "right", "greater_is_better": True}
    stopper = transformers.EarlyStoppingCallback
    trained = []
    for maker, kind in ((make_theirs, transformers.Trainer), (make, hf.Trainer)):
        trainer = maker(
            tmp_path / maker.__name__, trainer=subclass(kind), evaluation=data, more=more,
            callbacks=[stopper(early_stopping_patience=2)], **{**OPTIONS, "max_steps": 30}, **options,
        )  # fmt: skip
        trainer.train()
        trained.append(trainer)
    theirs, ours = trained
    assert ours.state.global_step == theirs.state.global_step
    assert [r["eval_right"] for r in ours.state.log_history if "eval_right" in r] == pytest.approx(
        [r["eval_right"] for r in theirs.state.log_history if "eval_right" in r]
    )


def test_metrics_of_any_kind(tmp_path):
    def metrics(prediction):
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"right": right.mean(), "each": right[:3], "note": "fine", "nested": {"a": np.float32(1)}, "none": None}

    data = examples(12, seed=1)
    theirs, ours = both(lambda kind: kind, tmp_path, evaluation=data, more={"compute_metrics": metrics},
                        eval_strategy="steps", eval_steps=2)  # fmt: skip
    for record in (r for r in ours.state.log_history if "eval_right" in r):
        assert record["eval_note"] == "fine"
        assert record["eval_nested"] == {"a": 1.0}
        assert len(record["eval_each"]) == 3
        assert all(isinstance(value, bool) for value in record["eval_each"])
    assert set(ours.evaluate()) == set(theirs.evaluate())
    ours.save_state()  # JSON
    nothing = make(tmp_path, evaluation=data, more={"compute_metrics": lambda prediction: None})
    assert "eval_loss" in nothing.evaluate()
    wrong = make(tmp_path, evaluation=data, more={"compute_metrics": lambda prediction: 0.5})
    with pytest.raises(BadArgument, match="compute_metrics to return a dict"):
        wrong.evaluate()


class Nested(Classifier):
    """Outputs as nested as those of models that return hidden states."""

    def forward(self, x, labels=None):
        found = super().forward(x, labels)
        found["states"] = (found["logits"] * 2, {"half": found["logits"] / 2, "list": [x, x + 1]})
        return found


@pytest.mark.parametrize("concat", [True, False])
def test_nested_predictions(concat, tmp_path):
    data = examples(11, seed=1)
    outputs = []
    for maker in (make_theirs, make):
        trainer = maker(tmp_path, Nested(), per_device_eval_batch_size=4, eval_do_concat_batches=concat)
        outputs.append(trainer.predict(data))

    def compare(found, expected):
        if isinstance(expected, np.ndarray):
            np.testing.assert_allclose(found, expected, atol=1e-6)
        elif isinstance(expected, dict):
            assert set(found) == set(expected)
            for name in expected:
                compare(found[name], expected[name])
        else:
            assert type(found) is type(expected)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                compare(one, other)

    compare(outputs[1].predictions, outputs[0].predictions)
    compare(outputs[1].label_ids, outputs[0].label_ids)
    ignoring = make(tmp_path, Nested()).predict(data, ignore_keys=["states"])
    np.testing.assert_array_equal(ignoring.predictions.shape, (11, 3))


def test_metrics_batch_by_batch(tmp_path):
    seen = []

    def metrics(prediction, compute_result):
        seen.append((len(prediction.label_ids), compute_result))
        return {"right": 0.5} if compute_result else None

    options = {"batch_eval_metrics": True, "per_device_eval_batch_size": 4, "more": {"compute_metrics": metrics}}
    for maker in (make_theirs, make):
        trainer = maker(tmp_path, evaluation=examples(11, seed=1), **options)
        assert trainer.evaluate()["eval_right"] == 0.5
        assert trainer.predict(examples(5)).predictions.shape == (5, 3)
    half = len(seen) // 2
    assert seen[half:] == seen[:half]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(examples(10, seed=1))


def test_a_stream_can_be_evaluated_alone(tmp_path):
    expected = make(tmp_path, evaluation=examples(10, seed=1)).evaluate()["eval_loss"]
    trainer = hf.Trainer(Classifier(), hf.TrainingArguments(str(tmp_path), use_cpu=True), eval_dataset=Stream())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    assert trainer.predict(Stream()).predictions.shape == (10, 3)
    also = make(tmp_path, train=Stream(), evaluation=Stream(), max_steps=2)  # evaluated before it is trained
    also.evaluate()
    assert also.train().global_step == 2


def test_evaluation_before_training_changes_nothing(tmp_path):
    options = {**OPTIONS, "evaluation": examples(8, seed=1)}
    plain, evaluated = make(tmp_path / "a", **options), make(tmp_path / "b", **options)
    assert not evaluated.is_in_train
    evaluated.evaluate()
    plain.train()
    evaluated.train()
    assert losses(evaluated) == losses(plain)
    assert not evaluated.is_in_train


def test_keys_that_evaluations_during_training_ignore(tmp_path):
    shapes = []

    def metrics(prediction):
        shapes.append(type(prediction.predictions))
        return {}

    options = {**OPTIONS, "evaluation": examples(8), "eval_strategy": "steps", "eval_steps": 2}
    for maker in (make_theirs, make):
        trainer = maker(tmp_path, Nested(), more={"compute_metrics": metrics}, **options)
        trainer.train(trial=None, ignore_keys_for_eval=["states"])
        trainer.evaluate()
    assert shapes == [np.ndarray, np.ndarray, tuple] * 2


# -- checkpoints, logs and the accelerator -----------------------------------------------------------------


def test_saving_a_checkpoint(tmp_path):
    class Noting(hf.Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            folder = self.args.output_dir + f"/checkpoint-{self.state.global_step}"
            (tmp_path / f"saved-{self.state.global_step}").write_text(folder)

    trainer = make(tmp_path / "run", trainer=Noting, **OPTIONS, save_strategy="steps", save_steps=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-2", "saved-4"]
    assert make(tmp_path / "run", **{**OPTIONS, "max_steps": 6}).train(resume_from_checkpoint=True).global_step == 6


def test_a_log_knows_evaluations_by_the_mode_of_the_model(tmp_path):
    def subclass(kind):
        class Adding(kind):
            def log(self, logs, start_time=None):
                super().log({**logs, "mode": "train" if self.model.training else "eval"}, start_time)

        return Adding

    options = {"evaluation": examples(8, seed=1), "eval_strategy": "steps", "eval_steps": 2}
    theirs, ours = both(subclass, tmp_path, **options)
    found = [[(r["step"], r.get("mode")) for r in t.state.log_history if "train_loss" not in r] for t in (theirs, ours)]
    assert found[1] == found[0]
    assert {mode for _, mode in found[1]} == {"train", "eval"}


def test_files_that_a_subclass_saves_and_loads(tmp_path):
    """A model in a format of its own, as sentence-transformers saves it."""

    class Own(hf.Trainer):
        loaded = ()

        def _save(self, output_dir=None, state_dict=None):
            torch.save(self.model.state_dict(), f"{output_dir}/own.pt")
            with open(f"{output_dir}/model.safetensors", "w") as file:
                file.write("mine")

        def _load_from_checkpoint(self, checkpoint_path):
            self.loaded = (*self.loaded, checkpoint_path)
            self.model.load_state_dict(torch.load(f"{checkpoint_path}/own.pt"))

    options = {**OPTIONS, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2, "trainer": Own}
    whole = make(tmp_path / "whole", **{**options, "max_steps": 6})
    whole.train()
    make(tmp_path / "cut", **options).train()
    assert (tmp_path / "cut" / "checkpoint-4" / "model.safetensors").read_text() == "mine"
    resumed = make(tmp_path / "cut", **{**options, "max_steps": 6})
    resumed.train(resume_from_checkpoint=True)
    assert [path.rsplit("/", 1)[-1] for path in resumed.loaded] == ["checkpoint-4"]
    assert losses(resumed) == losses(whole)


def test_logs_are_printed_without_a_progress_bar(tmp_path, capsys):
    make(tmp_path, **OPTIONS).train()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(shown) == 5
    assert "'loss':" in shown[0]
    assert "'train_runtime':" in shown[-1]


def test_the_accelerator(tmp_path):
    theirs, ours = make_theirs(tmp_path), make(tmp_path)
    for name in ("num_processes", "is_main_process", "gradient_accumulation_steps", "device", "even_batches"):
        assert getattr(ours.accelerator, name) == getattr(theirs.accelerator, name)
    assert ours.accelerator.unwrap_model(ours.model) is ours.model is ours.model_wrapped
    assert ours.accelerator.gather_for_metrics(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    other = torch.nn.Linear(2, 2)
    assert ours.accelerator.prepare(other) is other
