"""Models, collators and scripts of transformers with only the import changed, compared with its Trainer."""

import copy
import inspect
import json
import pickle
import signal

import numpy as np
import pytest
import torch
import transformers
from hf_models import (
    CASES,
    READS,
    TRANSLATES,
    classes,
    no_dropout_gpt2,
    padding,
    pairs,
    seq_cls,
    tokenized,
    writing,
    written,
)
from hf_toys import (
    Classifier,
    examples,
    exit_code,
    losses,
    make,
    make_theirs,
    parameters,
    recorder,
    train_in_process,
)
from safetensors.torch import load_file
from torch.nn import functional as F

from text_toys import bert
from trainformer import hf
from trainformer.core.errors import BadArgument

PLAIN = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 64, "num_train_epochs": 1, "logging_steps": 1,
    "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "train_sampling_strategy": "sequential",
}  # fmt: skip


def first(data, count):
    return data[:count] if isinstance(data, list) else data.select(range(count))


def both(case, folder, evaluation=6, subclass=lambda kind: kind, more=None, **options):
    """The trainer of transformers and ours, trained on the same data."""
    build, data, extra = CASES[case]
    torch.manual_seed(0)
    model, train = build(), data()
    trained = []
    for maker, kind in ((make_theirs, transformers.Trainer), (make, hf.Trainer)):
        trainer = maker(
            folder / kind.__module__, copy.deepcopy(model), train=train, evaluation=first(train, evaluation),
            trainer=subclass(kind), more={**extra(), **(more or {})}, **{**PLAIN, **options},
        )  # fmt: skip
        trainer.train()
        trained.append(trainer)
    return trained


def check_alike(theirs, ours, atol=1e-6):
    np.testing.assert_allclose(losses(ours), losses(theirs), atol=atol)
    expected = parameters(theirs.model)
    for name, value in parameters(ours.model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)


def sizes(prediction):
    """Metrics of any predictions and labels."""
    flat = [np.asarray(part) for part in (prediction.predictions, prediction.label_ids) if not isinstance(part, tuple)]
    return {"parts": len(flat), "labels": float(np.sum(flat[-1][flat[-1] != -100])) if flat else 0.0}


# -- the same numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_training_evaluation_and_prediction_match_transformers(case, tmp_path):
    theirs, ours = both(case, tmp_path, more={"compute_metrics": sizes})
    check_alike(theirs, ours)
    wanted, found = theirs.evaluate(), ours.evaluate()
    assert wanted.keys() == found.keys()
    for name in ("eval_loss", "eval_parts", "eval_labels", "epoch"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-5), name
    data = first(ours.train_dataset, 5)
    wanted, found = theirs.predict(data), ours.predict(data)
    torch.testing.assert_close(found.predictions, wanted.predictions, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.label_ids, wanted.label_ids)


@pytest.mark.parametrize("case", ["one label", "several labels", "tokens", "answers", "t5", "llama"])
def test_label_smoothing_matches_transformers(case, tmp_path, caplog):
    theirs, ours = both(case, tmp_path, label_smoothing_factor=0.2)
    check_alike(theirs, ours, atol=3e-6)
    warnings = [r for r in caplog.records if "label_smoothing_factor has no effect" in r.message]
    assert len(warnings) == (
        case == "answers"
    )  # several labels are recognised by the config, with a warning of its own


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 1.5},
        {"max_steps": 14},
        {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "per_device_eval_batch_size": 3},
        {"bf16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
        {"per_device_train_batch_size": 64},
        {"optim": "adamw_torch", "max_grad_norm": 1.0, "weight_decay": 0.1, "warmup_steps": 2, "learning_rate": 1e-3},
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_match_transformers(options, tmp_path):
    theirs, ours = both("one label", tmp_path, **options)
    check_alike(theirs, ours)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-6)


@pytest.mark.parametrize("case", ["one label", "tokens", "t5", "llama"])
def test_gradient_accumulation_equals_a_larger_batch(case, tmp_path):
    """Also for models that ignore num_items_in_batch, for which transformers scales the loss."""
    build, data, extra = CASES[case]
    torch.manual_seed(0)
    model, ended = build(), []
    for size, accumulation in ((8, 1), (2, 4)):
        options = {**PLAIN, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer = make(tmp_path, copy.deepcopy(model), train=data(), more=extra(), **options)
        trainer.train()
        ended.append(trainer)
    check_alike(*ended)
    assert len(losses(ended[0])) == 3


def test_gpt2_weights_its_loss_by_predicted_tokens(tmp_path):
    """Its class name does not show that it shifts labels; transformers also counts the first token of every text."""
    torch.manual_seed(0)
    model = no_dropout_gpt2()
    plain = make(tmp_path, copy.deepcopy(model), train=written(), more=writing(), **{**PLAIN, "max_steps": 1})
    smooth = make(
        tmp_path, copy.deepcopy(model), train=written(), more=writing(), label_smoothing_factor=0.2,
        **{**PLAIN, "max_steps": 1},
    )  # fmt: skip
    batch = next(iter(plain.get_train_dataloader()))
    plain.train()
    smooth.train()
    assert losses(plain)[0] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    logits = model(**batch).logits[:, :-1].reshape(-1, 320)
    expected = F.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), label_smoothing=0.2)
    assert losses(smooth)[0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("case", ["t5", "bart"])
def test_label_smoothing_without_decoder_inputs(case, tmp_path):
    build, data, extra = CASES[case]
    torch.manual_seed(0)
    model, ended = build(), []
    for more in (extra(), {"data_collator": transformers.DataCollatorForSeq2Seq(TRANSLATES)}):
        options = {**PLAIN, "label_smoothing_factor": 0.1}
        ended.append(make(tmp_path, copy.deepcopy(model), train=data(), more=more, **options))
        ended[-1].train()
    assert len(losses(ended[0])) == 6
    check_alike(*ended)


def test_a_masked_language_model_learns(tmp_path):
    torch.manual_seed(0)
    more = {"data_collator": transformers.DataCollatorForLanguageModeling(READS)}
    options = {**PLAIN, "num_train_epochs": 15, "logging_strategy": "epoch"}
    trainer = make(tmp_path, transformers.BertForMaskedLM(bert()), train=tokenized(), more=more, **options)
    trainer.train()
    assert np.mean(losses(trainer)[-3:]) < losses(trainer)[0] - 0.5


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_keep_their_order(workers, tmp_path):
    torch.manual_seed(0)
    model, ended = seq_cls(num_labels=3)(), []
    for maker in (make_theirs, make):
        data = classes().remove_columns("text").to_iterable_dataset(num_shards=2)
        options = {**PLAIN, "max_steps": 8, "dataloader_num_workers": workers}
        ended.append(maker(tmp_path, copy.deepcopy(model), train=data, more=padding(), **options))
        ended[-1].train()
    assert len(losses(ended[1])) == 8
    check_alike(*ended)


# -- evaluation --------------------------------------------------------------------------------------------


def test_predicting_without_labels_computes_no_metrics(tmp_path):
    theirs, ours = both("one label", tmp_path, more={"compute_metrics": sizes})
    data = first(classes(), 5).remove_columns("label")
    wanted, found = theirs.predict(data), ours.predict(data)
    np.testing.assert_allclose(found.predictions, wanted.predictions, atol=1e-6)
    assert found.label_ids is None
    assert found.metrics.keys() | {"test_model_preparation_time"} == wanted.metrics.keys() | {
        "test_model_preparation_time"
    }


def test_ignore_keys_and_include_for_metrics_match_transformers(tmp_path):
    seen = {}

    def look(prediction):
        seen.setdefault("rows", []).append((prediction.inputs, prediction.losses))
        return {"rows": len(prediction.inputs)}

    options = {"include_for_metrics": ["inputs", "loss"], "per_device_eval_batch_size": 4}
    theirs, ours = both("t5", tmp_path, more={"compute_metrics": look}, **options)
    theirs.evaluate()
    ours.evaluate()
    (their_inputs, their_losses), (our_inputs, our_losses) = seen["rows"]
    np.testing.assert_array_equal(our_inputs, their_inputs)
    np.testing.assert_allclose(our_losses, their_losses, atol=1e-6)
    data = first(pairs(), 5)
    keys = ["encoder_last_hidden_state", "past_key_values"]
    wanted, found = theirs.predict(data, ignore_keys=keys), ours.predict(data, ignore_keys=keys)
    assert not isinstance(found.predictions, tuple)
    np.testing.assert_allclose(found.predictions, wanted.predictions, atol=1e-6)


def test_an_overridden_evaluate_is_used_during_training(tmp_path):
    def adding(kind):
        class Adding(kind):
            def evaluate(self, *args, **kwargs):
                metrics = super().evaluate(*args, **kwargs)
                metrics["eval_doubled"] = 2 * metrics["eval_loss"]
                return metrics

        return Adding

    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "doubled", "greater_is_better": True}
    theirs, ours = both("one label", tmp_path, subclass=adding, **options, **best)
    assert ours.state.best_metric == pytest.approx(theirs.state.best_metric, abs=1e-6)
    assert ours.state.best_global_step == theirs.state.best_global_step
    records = [[record for record in t.state.log_history if "eval_loss" in record] for t in (theirs, ours)]
    assert [set(record) for record in records[1]] == [set(record) for record in records[0]]  # as it was logged
    assert len(records[1]) == 2
    check_alike(theirs, ours)


def test_overridden_dataloaders_are_used_for_every_evaluation_and_prediction(tmp_path):
    asked = []

    class Loading(hf.Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            asked.append(("eval", eval_dataset))
            return super().get_eval_dataloader(first(self.eval_dataset if eval_dataset is None else eval_dataset, 3))

        def get_test_dataloader(self, test_dataset):
            asked.append(("test", len(test_dataset)))
            return super().get_test_dataloader(test_dataset[:2])

    trainer = make(tmp_path, evaluation=examples(9), trainer=Loading, more={"compute_metrics": sizes}, max_steps=1)
    trainer.compute_metrics = lambda p: {"rows": len(p.label_ids)}
    trainer.train()
    other = examples(11)
    assert trainer.evaluate()["eval_rows"] == 3
    assert trainer.evaluate(other)["eval_rows"] == 3
    assert asked[-1][1] is other
    assert len(trainer.predict(examples(10)).predictions) == 2
    assert asked[-1] == ("test", 10)


def test_the_default_dataloader_that_a_subclass_wraps_is_shuffled(tmp_path):
    class Wrapping(hf.Trainer):
        def get_train_dataloader(self):
            self.mine = super().get_train_dataloader()
            return self.mine

    shuffled = make(tmp_path, trainer=Wrapping, max_steps=1, dataloader_drop_last=True, train=examples(43))
    in_order = make(tmp_path, trainer=Wrapping, max_steps=1, train_sampling_strategy="sequential", train=examples(43))
    for trainer in (shuffled, in_order):
        trainer.train()
    assert not torch.equal(next(iter(shuffled.mine))["x"], torch.stack([e["x"] for e in examples(43)[:8]]))
    assert torch.equal(next(iter(in_order.mine))["x"], torch.stack([e["x"] for e in examples(43)[:8]]))
    assert (len(shuffled.mine), len(in_order.mine)) == (5, 6)


def test_the_collator_can_be_pickled_for_spawned_workers(tmp_path):
    for model, data, more in ((seq_cls(num_labels=3)(), classes(), padding()), (Classifier(), examples(), {})):
        trainer = make(tmp_path, model, train=data, more=more, train_sampling_strategy="sequential")
        trainer.callback_handler.add_callback(recorder())
        loader = trainer.get_train_dataloader()
        sent = pickle.loads(pickle.dumps(loader.collate_fn))
        batch = sent([data[i] for i in range(8)])
        expected = next(iter(loader))
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


# -- saving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["save_model", "_save"])
def test_files_of_an_overridden_save_are_in_every_checkpoint(method, tmp_path, caplog):
    class Saving(hf.Trainer):
        pass

    def save(self, output_dir=None, *args, **kwargs):
        getattr(super(Saving, self), method)(output_dir, *args, **kwargs)
        with open(f"{output_dir}/more.json", "w") as file:
            json.dump({"step": self.state.global_step}, file)
        torch.save({}, f"{output_dir}/config.json.bak")
        if method == "_save":
            torch.save({}, f"{output_dir}/optimizer.pt")

    setattr(Saving, method, save)
    options = {"trainer": Saving, "save_strategy": "steps", "save_steps": 2}
    make(tmp_path, max_steps=4, **options).train()
    for step in (2, 4):
        assert json.loads((tmp_path / f"checkpoint-{step}" / "more.json").read_text()) == {"step": step}
    assert not list(tmp_path.glob("checkpoint-*/saved_by_user"))
    assert any("optimizer.pt" in r.message for r in caplog.records) == (method == "_save")
    assert load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    again = make(tmp_path, max_steps=6, **options)
    again.train(resume_from_checkpoint=True)  # the files match the manifest
    whole = make(tmp_path / "whole", max_steps=6)
    whole.train()
    assert again.state.global_step == 6
    check_alike(whole, again, atol=1e-3)
    again.save_model(tmp_path / "final")
    assert (tmp_path / "final" / "more.json").exists()


@pytest.mark.slow
def test_killed_and_terminated_runs_resume_to_the_same_weights(tmp_path):
    folders = {name: str(tmp_path / name) for name in ("whole", "killed", "ended")}
    assert exit_code(train_in_process, folders["whole"]) == 0
    assert exit_code(train_in_process, folders["killed"], 6, signal.SIGKILL) == -signal.SIGKILL
    assert exit_code(train_in_process, folders["ended"], 6, signal.SIGTERM) == 143
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-4"]
    assert (tmp_path / "ended" / "checkpoint-6").exists()
    assert (exit_code(train_in_process, folders["killed"]), exit_code(train_in_process, folders["ended"])) == (0, 0)
    weights = {name: load_file(tmp_path / name / "final" / "model.safetensors") for name in folders}
    for name, value in weights["whole"].items():
        assert torch.equal(weights["killed"][name], value)
        assert torch.equal(weights["ended"][name], value)


@pytest.mark.parametrize(
    "options", [{"save_steps": 4, "save_strategy": "steps"}, {"save_strategy": "epoch"}], ids=["steps", "epoch"]
)
def test_events_of_a_resumed_run_match_transformers(options, tmp_path):
    seen = []
    for maker, base in ((make_theirs, transformers.TrainerCallback), (make, hf.TrainerCallback)):

        class Dies(base):
            def on_save(self, args, state, control, **kwargs):
                raise InterruptedError

        plan = {**options, "num_train_epochs": 2, "logging_steps": 2, "train_sampling_strategy": "sequential"}
        with pytest.raises(InterruptedError):
            maker(tmp_path / base.__module__, callbacks=[Dies()], **plan).train()
        watching = recorder(base)
        maker(tmp_path / base.__module__, callbacks=[watching], **plan).train(resume_from_checkpoint=True)
        seen.append(watching.seen)
    assert seen[1] == seen[0]


# -- what scripts call -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_maybe_log_save_evaluate", "get_batch_samples"])
def test_an_override_that_is_never_called_is_an_error(name, tmp_path):
    kind = type("Mine", (hf.Trainer,), {name: lambda self, *args: None})
    assert hasattr(transformers.Trainer, name)
    with pytest.raises(BadArgument, match=f"Mine overrides {name}.*Override"):
        make(tmp_path, trainer=kind)


def test_reports_match_transformers(tmp_path, capsys):
    metrics = {"train_loss": 0.123456789, "train_runtime": 75.25, "epoch": 3.0, "train_samples": 40}
    shown, files = [], []
    for maker in (make_theirs, make):
        folder = tmp_path / maker.__name__
        trainer = maker(folder, max_steps=2, logging_steps=1)
        trainer.train()
        capsys.readouterr()
        trainer.log_metrics("train", metrics)
        shown.append(capsys.readouterr().out)
        trainer.save_metrics("train", metrics)
        trainer.save_metrics("eval", {"eval_loss": 1.5})
        trainer.save_metrics("test", {"test_loss": 2.5}, combined=False)
        trainer.save_state()
        names = ("train_results.json", "eval_results.json", "test_results.json", "all_results.json")
        files.append([json.loads((folder / name).read_text()) for name in names])
        library = transformers if maker is make_theirs else hf
        state = library.TrainerState.load_from_json(str(folder / "trainer_state.json"))
        files[-1].append((state.global_step, state.max_steps, [r["step"] for r in state.log_history]))
    assert shown[1] == shown[0]
    assert files[1] == files[0]


def test_attributes_that_scripts_read(tmp_path):
    trainer = make(tmp_path, train=classes(), model=seq_cls(num_labels=3)(), more=padding(), max_steps=1)
    assert trainer.tokenizer is trainer.processing_class is READS
    assert trainer.num_examples(trainer.get_train_dataloader()) == 24
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())
    trainer.train()
    assert trainer.get_learning_rates() == [group["lr"] for group in trainer.optimizer.param_groups]
    watching = recorder()
    trainer.callback_handler.add_callback(watching)
    assert watching in trainer.callback_handler.callbacks
    trainer.callback_handler.remove_callback(watching)
    assert "Recorder" not in trainer.callback_handler.callback_list


def test_properties_of_arguments_that_scripts_read(tmp_path):
    args = hf.TrainingArguments(str(tmp_path), gradient_checkpointing_kwargs={"use_reentrant": False})
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    assert args.parallel_mode.value == theirs.parallel_mode.value
    assert args.get_process_log_level() == theirs.get_process_log_level()
    with args.main_process_first(desc="tokenizing"):
        assert args.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_signatures_are_inspected_once(tmp_path, monkeypatch):
    looked, real = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function, **o: looked.append(function) or real(function, **o))
    counts = []
    for steps in (3, 30):
        looked.clear()
        make(tmp_path, Classifier(), max_steps=steps).train()
        counts.append(len(looked))
    assert counts[1] <= counts[0]
