"""`trainformer.hf.Trainer`: training again, checkpoints, resuming, overrides, and error messages."""

import json
import logging

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset
from hf_toys import Classifier, examples, llama, losses, make, padded, parameters, recorder, sequences
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from text_toys import reading_tokenizer
from trainformer import checkpoint, hf
from trainformer.callbacks import EMA
from trainformer.checkpointing import SharingPattern
from trainformer.core.errors import BadArgument, CheckFailed, DataError

SAVING = {"save_strategy": "steps", "save_steps": 2}


def equal(a, b):
    return all(torch.equal(p, b[name]) for name, p in a.items())


# -- training again, and evaluating what was trained -------------------------------------------------------


def test_evaluate_after_train_uses_the_trained_weights(tmp_path):
    trainer = make(tmp_path, evaluation=examples(), learning_rate=5e-2)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model, data = trainer.model.eval(), examples()
    expected = model(torch.stack([e["x"] for e in data]), torch.stack([e["labels"] for e in data]))["loss"].item()
    assert after == pytest.approx(expected, abs=1e-6)
    assert after < 0.8 * before


def test_a_second_train_starts_from_the_current_weights(tmp_path):
    trainer = make(tmp_path, learning_rate=1e-2, logging_steps=1, num_train_epochs=4)
    first = trainer.train()
    reached = parameters(trainer.model)
    second = trainer.train()
    assert (first.global_step, second.global_step) == (20, 20)
    assert second.training_loss < first.training_loss
    assert not equal(reached, parameters(trainer.model))
    assert trainer.state.global_step == 20


def test_model_init(tmp_path):
    calls = []

    def model_init():
        calls.append(torch.get_default_dtype())
        return Classifier(dtype=torch.get_default_dtype())

    args = hf.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, disable_tqdm=True, save_strategy="no", default_dtype="float64"
    )
    data = examples(16, dtype=torch.float64)
    trainer = hf.Trainer(args=args, model_init=model_init, train_dataset=data, eval_dataset=data)
    assert len(calls) == 1
    first = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    trainer.evaluate()
    trainer.train()  # from the same weights again
    assert calls == [torch.float64] * 3
    assert losses(trainer)[: len(losses(trainer)) // 2] == losses(trainer)[len(losses(trainer)) // 2 :]
    trainer.model_init, before = None, trainer.model
    assert trainer.make_model() is before
    assert any(not torch.equal(tensor, first[name]) for name, tensor in before.state_dict().items())
    assert next(trainer.model.parameters()).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_both_orders_of_model_and_arguments(tmp_path):
    args = hf.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no")
    model = Classifier()
    theirs, forgather = hf.Trainer(model, args), hf.Trainer(args, model)
    assert theirs.model is forgather.model is model
    assert theirs.args is forgather.args is args


def test_arguments_of_transformers_are_used(tmp_path):
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, disable_tqdm=True, learning_rate=1e-3, eval_strategy="steps",
        eval_steps=2, save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = hf.Trainer(Classifier(), args, train_dataset=examples(), eval_dataset=examples(8))
    assert trainer.args is args
    assert (trainer.args.learning_rate, trainer.args.eval_steps) == (1e-3, 2)
    assert trainer.train().global_step == 3


# -- keeping -----------------------------------------------------------------------------------------------


def checkpoints(folder):
    return sorted((p.name for p in folder.glob("checkpoint-*")), key=lambda name: int(name.partition("-")[2]))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 4}, ["checkpoint-4", "checkpoint-8", "checkpoint-10"]),
        ({"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}, ["checkpoint-9", "checkpoint-10"]),
        ({"save_strategy": "epoch"}, ["checkpoint-5", "checkpoint-10"]),
        ({"save_strategy": "epoch", "save_total_limit": 1}, ["checkpoint-10"]),
    ],
)
def test_which_checkpoints_are_kept(options, expected, tmp_path):
    make(tmp_path, num_train_epochs=2, **options).train()
    assert checkpoints(tmp_path) == expected
    assert all(checkpoint.verify(tmp_path / name) == [] for name in expected)


@pytest.mark.parametrize("preserve", [{"preserve_best_model": True}, {"load_best_model_at_end": True}])
def test_the_best_checkpoint_is_not_deleted(preserve, tmp_path):
    """With random labels the evaluation loss rises from the start."""
    chance = [{**e, "labels": torch.tensor(i % 2)} for i, e in enumerate(examples(24, seed=5))]
    options = {"eval_strategy": "steps", "eval_steps": 2, **SAVING, "save_total_limit": 1, "learning_rate": 5e-2}
    trainer = make(tmp_path, evaluation=chance, num_train_epochs=4, **options, **preserve)
    trainer.train()
    scores = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    best = min(scores, key=scores.get)
    assert best < 20
    assert checkpoints(tmp_path) == [f"checkpoint-{best}", "checkpoint-20"]
    kept = trainer.evaluate()["eval_loss"]
    assert kept == pytest.approx(scores[best if "load_best_model_at_end" in preserve else 20], abs=1e-6)


def test_only_improvements_are_saved(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"}
    seen = recorder()
    trainer = make(tmp_path, evaluation=examples(), num_train_epochs=2, callbacks=[seen], learning_rate=1e-2, **options)
    trainer.train()
    scores = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    improved = [s for s in scores if scores[s] == min(v for k, v in scores.items() if k <= s)]
    assert [step for name, step, _ in seen.seen if name == "on_save"] == improved


def test_a_checkpoint_opens_in_transformers_with_its_state(tmp_path):
    tokenizer = reading_tokenizer()
    more = {"data_collator": padded, "processing_class": tokenizer}
    trainer = make(tmp_path, llama(), train=sequences(), more=more, max_steps=4, logging_steps=2, **SAVING)
    trainer.train()
    folder = tmp_path / "checkpoint-4"
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert equal(parameters(trainer.model), parameters(opened))
    assert transformers.AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [r["step"] for r in state["log_history"]] == [2, 4]
    assert hf.TrainerState.load_from_json(folder / "trainer_state.json").global_step == 4
    trainer.save_model(tmp_path / "saved")
    assert equal(parameters(trainer.model), parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")))
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    assert not (tmp_path / "saved" / "optimizer.pt").exists()


def test_a_model_with_an_adapter(tmp_path):
    llama().save_pretrained(tmp_path / "base")

    def adapted():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(1)
        return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    options = {"train": sequences(), "more": {"data_collator": padded}, "learning_rate": 1e-2, **SAVING}
    whole = make(tmp_path / "run", adapted(), max_steps=6, **options)
    whole.train()
    saved = load_file(tmp_path / "run" / "checkpoint-6" / "adapter_model.safetensors")
    opened = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "run" / "checkpoint-6"
    )
    batch = padded(sequences(4, seed=9))
    torch.testing.assert_close(opened.eval()(**batch).logits, whole.model.eval()(**batch).logits)
    assert all("lora_" in name for name in saved)
    cut = make(tmp_path / "cut", adapted(), max_steps=4, lr_scheduler_type="constant", **options)
    cut.train()
    again = make(tmp_path / "cut", adapted(), max_steps=6, lr_scheduler_type="constant", **options)
    again.train(resume_from_checkpoint=True)
    straight = make(tmp_path / "straight", adapted(), max_steps=6, lr_scheduler_type="constant", **options)
    straight.train()
    assert equal(parameters(straight.model), parameters(again.model))


@pytest.mark.parametrize("cut", [1, 3, 5, 8])
def test_an_interrupted_run_ends_with_the_same_weights(cut, tmp_path):
    """With dropout and gradient accumulation, interrupted within an epoch, at its end and after it."""
    options = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    options |= {"per_device_train_batch_size": 4, "logging_steps": 4, "warmup_steps": 2, "learning_rate": 1e-2}
    options |= {"eval_strategy": "epoch", "evaluation": examples(8, seed=1)}

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_abort_without_save = state.global_step == cut + 1

    whole = make(tmp_path / "whole", Classifier(0.3), **options)
    expected = whole.train()
    make(tmp_path / "cut", Classifier(0.3), callbacks=[Stop()], **options).train()
    again = make(tmp_path / "cut", Classifier(0.3), **options)
    output = again.train(resume_from_checkpoint=True)
    assert (output.global_step, output.training_loss) == (expected.global_step, expected.training_loss)
    assert equal(parameters(whole.model), parameters(again.model))
    timed = ("runtime", "per_second")
    records = [
        [{k: v for k, v in r.items() if not k.endswith(timed)} for r in t.state.log_history] for t in (whole, again)
    ]
    assert records[0] == records[1]


def test_save_and_load_checkpoint(tmp_path):
    first = make(tmp_path, Classifier(0.2), max_steps=3, lr_scheduler_type="constant")
    first.train()
    assert first.save_checkpoint() == str(tmp_path / "checkpoint-3")
    elsewhere = first.save_checkpoint(tmp_path / "kept" / "mine")
    assert checkpoint.verify(elsewhere) == []
    for path in (None, elsewhere):
        second = make(tmp_path, Classifier(0.2), max_steps=5, lr_scheduler_type="constant")
        second.load_checkpoint(path)
        assert second.state.global_step == 3
        assert equal(parameters(first.model), parameters(second.model))
        assert second.train().global_step == 5
        straight = make(tmp_path / "straight", Classifier(0.2), max_steps=5, lr_scheduler_type="constant")
        straight.train()
        assert equal(parameters(straight.model), parameters(second.model))


def test_resuming_is_explicit_and_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(DataError, match="No valid checkpoint found"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    options = {"max_steps": 4, **SAVING}
    assert make(tmp_path, **options).train(resume_from_checkpoint="auto").global_step == 4
    seen = recorder()
    make(tmp_path, callbacks=[seen], **options).train(resume_from_checkpoint="auto")
    assert "on_step_end" not in seen.names()
    fresh = recorder()
    make(tmp_path, callbacks=[fresh], **options).train()  # from scratch
    assert fresh.names().count("on_step_end") == 4
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert checkpoints(tmp_path / "abandoned-1") == ["checkpoint-2", "checkpoint-4"]
    named = make(tmp_path, max_steps=6, callbacks=[again := recorder()], save_strategy="no")
    named.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.names().count("on_step_end") == 4


def test_the_components_of_a_checkpoint(tmp_path):
    trainer = make(tmp_path)
    parts = {c.key: c for c in trainer.get_state_components()}
    assert {"model", "optimizer", "scheduler", "trainer", "rng"} <= parts.keys()
    assert parts["model"].required
    assert parts["rng"].sharing_pattern is SharingPattern.PER_RANK
    assert trainer.get_process_groups() == {}
    assert trainer.unwrapped_model() is trainer.model


def test_a_resumed_epoch_keeps_its_first_step(tmp_path):
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(tmp_path, max_steps=4, **options).train()  # 40 samples in batches of 8: an epoch has 3 steps
    resumed = make(tmp_path, max_steps=5, **options, resume_from_checkpoint="auto")
    resumed.train()
    assert resumed.state_dict()["epoch_start_step"] == 3


def test_state_dict_round_trip(tmp_path):
    trainer = make(tmp_path, max_steps=7, logging_steps=2)
    trainer.train()
    state = trainer.state_dict()
    assert (state["global_step"], state["raw_epoch"], state["epoch_start_step"]) == (7, 1, 5)
    assert len(state["log_history"]) == 4
    other = make(tmp_path / "other", max_steps=9)
    other.load_state_dict(state)
    assert other.state.global_step == 7
    assert other.train().global_step == 9


# -- data --------------------------------------------------------------------------------------------------


def table(n=40):
    made = examples(n)
    return Dataset.from_dict(
        {"x": [e["x"].tolist() for e in made], "label": [int(e["labels"]) for e in made], "row": list(range(n))}
    )


def test_unused_columns_of_hf_datasets_are_dropped(tmp_path):
    by_table = make(tmp_path / "a", train=table(), logging_steps=1, train_sampling_strategy="sequential")
    by_list = make(tmp_path / "b", logging_steps=1, train_sampling_strategy="sequential")
    by_table.train()
    by_list.train()
    assert losses(by_table) == pytest.approx(losses(by_list), rel=1e-5)
    kept = make(tmp_path / "c", train=table(), remove_unused_columns=False)
    with pytest.raises(TypeError, match="row"):
        kept.train()


def test_streams_need_a_number_of_steps_and_resume(tmp_path):
    def stream():
        return table().to_iterable_dataset(num_shards=4)

    assert isinstance(stream(), IterableDataset)
    with pytest.raises(BadArgument, match="max_steps"):
        make(tmp_path / "a", train=stream()).train()
    options = {"max_steps": 8, "logging_steps": 1, **SAVING}
    whole = make(tmp_path / "whole", Classifier(0.2), train=stream(), **options)
    assert whole.train().global_step == 8

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_abort_without_save = state.global_step == 5

    make(tmp_path / "cut", Classifier(0.2), train=stream(), callbacks=[Stop()], **options).train()
    again = make(tmp_path / "cut", Classifier(0.2), train=stream(), **options)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)


def test_overridden_dataloaders_are_used_unchanged(tmp_path):
    batches = []

    class Mine(hf.Trainer):
        def get_train_dataloader(self):
            def collate(made):
                batches.append(len(made))
                return {name: torch.stack([e[name] for e in made]) for name in ("x", "labels")}

            return torch.utils.data.DataLoader(examples(12), batch_size=3, collate_fn=collate)

    output = make(tmp_path, trainer=Mine, num_train_epochs=2).train()
    assert output.global_step == 8
    assert set(batches) == {3}


def test_grouping_by_length(tmp_path):
    lengths = []

    def collate(made):
        lengths.append([len(e["input_ids"]) for e in made])
        return padded(made)

    options = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 4, "num_train_epochs": 1}
    make(tmp_path, llama(), train=sequences(56), more={"data_collator": collate}, **options).train()
    spread = sum(max(batch) - min(batch) for batch in lengths) / len(lengths)
    assert spread < 2.5  # about 4.5 for random order
    assert sorted(n for batch in lengths for n in batch) == sorted(len(e["input_ids"]) for e in sequences(56))


# -- what users bring --------------------------------------------------------------------------------------


def test_user_provided_optimizer_and_scheduler(tmp_path):
    def by_hand():
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    model, optimizer, schedule = by_hand()
    passed = make(tmp_path / "a", model, more={"optimizers": (optimizer, schedule)}, max_steps=6, logging_steps=1)
    passed.train()

    class Made(hf.Trainer):
        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            assert num_training_steps == 6
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
            return self.lr_scheduler

    made = make(tmp_path / "b", trainer=Made, max_steps=6, logging_steps=1)
    made.train()
    rates = [r["learning_rate"] for r in made.state.log_history if "learning_rate" in r]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    assert passed.optimizer is optimizer
    assert equal(parameters(passed.model), parameters(made.model))


def test_an_overridden_log_can_add_to_every_record(tmp_path):
    class Telling(hf.Trainer):
        def log(self, logs, start_time=None):
            logs["double"] = 2 * logs.get("loss", 0.0)
            super().log(logs)

    seen = []

    class Reader(hf.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    make(tmp_path, trainer=Telling, callbacks=[Reader()], max_steps=4, logging_steps=2).train()
    assert [r["double"] for r in seen[:2]] == [2 * r["loss"] for r in seen[:2]]


def test_native_hf_and_mini_callbacks_run_in_the_given_order(tmp_path):
    received = []

    class Native:
        def on_step_end(self, trainer, step, loss):
            received.append(("native", step, trainer.state.step))

    class Theirs(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            received.append(("theirs", state.global_step))

    from trainformer.mini import BaseHook

    class Hook(BaseHook):
        def on_after_step(self, trainer):
            received.append(("mini", trainer.step))

    make(tmp_path, callbacks=[Hook(), Theirs(), Native()], max_steps=2).train()
    assert received == [("mini", 1), ("theirs", 1), ("native", 1, 1), ("mini", 2), ("theirs", 2), ("native", 2, 2)]


def test_evaluation_uses_the_ema(tmp_path):
    average = EMA(decay=0.5)
    trainer = make(tmp_path, callbacks=[average], evaluation=examples(), learning_rate=0.1, num_train_epochs=1)
    trainer.train()
    data = examples()
    batch = torch.stack([e["x"] for e in data]), torch.stack([e["labels"] for e in data])
    expected = average.inference_model().eval()(*batch)["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert trainer.model.eval()(*batch)["loss"].item() != pytest.approx(expected, abs=1e-4)


# -- a loop of one's own -----------------------------------------------------------------------------------


class OwnLoop(hf.BaseTrainer):
    """A trainer with a custom loop."""

    def _prepare(self, train_dataset, eval_dataset):
        self.make_model()
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _train_loop(self):
        self._dispatch_event("on_train_begin")
        while self.state.global_step < 6 and not self.control.should_training_stop:
            batch = self.train_dataset[self.state.global_step]
            self.model(batch["x"][None], batch["labels"][None])["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
            self._dispatch_event("on_step_end")
        self._dispatch_event("on_train_end")
        return hf.TrainOutput(self.state.global_step, 0.0, {})

    def _eval_loop(self):
        return {"eval_loss": 1.0}


def test_a_trainer_with_a_custom_loop(tmp_path, caplog):
    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                return hf.TrainerControl(should_training_stop=True)

    args = hf.BaseTrainingArguments(str(tmp_path))
    trainer = OwnLoop(args, Classifier(), train_dataset=examples(), callbacks=[Stop(), seen := recorder()])
    with caplog.at_level(logging.INFO, logger="trainformer"):
        output = trainer.train()
    assert output.global_step == 4
    assert trainer._stop_requested_by == ("Stop", "on_step_end", "stop")
    assert "Stop asked to stop in on_step_end" in caplog.text
    assert seen.names() == ["on_train_begin", *["on_step_end"] * 4, "on_train_end"]
    assert trainer.evaluate() == {"eval_loss": 1.0}
    trainer.log({"mine": 2.0})
    assert trainer.state.log_history == [{"mine": 2.0, "step": 4}]
    path = trainer.save_checkpoint()
    other = OwnLoop(args, Classifier(), train_dataset=examples())
    other._prepare(None, None)
    other.load_checkpoint(path)
    assert other.state.global_step == 4
    assert equal(parameters(trainer.model), parameters(other.model))
    assert other.train().global_step == 6


def test_abstract_methods_must_be_implemented(tmp_path):
    with pytest.raises(TypeError, match="_eval_loop"):
        hf.BaseTrainer(hf.BaseTrainingArguments(str(tmp_path)), Classifier())


def test_check_does_not_change_the_run(tmp_path):
    options = {"evaluation": examples(16, seed=1), "eval_strategy": "epoch", "learning_rate": 1e-2}
    plain, checked = (make(tmp_path / name, Classifier(0.2), **options) for name in ("a", "b"))
    steps = plain.train().global_step
    assert checked.check().ok
    assert checked.train().global_step == steps
    assert equal(parameters(plain.model), parameters(checked.model))


def test_check_knows_the_metrics_of_compute_metrics_and_of_several_datasets(tmp_path):
    def sizes(prediction):
        return {"size": float(len(prediction.label_ids))}

    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    options["more"] = {"compute_metrics": sizes}
    sets = {"a": examples(10, seed=1), "b": examples(12, seed=2)}
    for data, metric in ((examples(9), "size"), (sets, "b_size")):
        trainer = make(tmp_path, evaluation=data, metric_for_best_model=metric, **options)
        assert trainer.check().ok
    wrong = make(tmp_path, evaluation=sets, metric_for_best_model="b_sice", **options)
    with pytest.raises(CheckFailed, match=r"'val/b/sice'.*Did you mean 'val/b/size'"):
        wrong.check()


def test_check_finds_unused_parameters(tmp_path):
    model = Classifier()
    model.forgotten = nn.Linear(2, 2)
    with pytest.raises(CheckFailed, match=r"forgotten\.weight"):
        make(tmp_path, model).check()


# -- process-wide settings, and errors ---------------------------------------------------------------------


def test_process_wide_settings_are_restored(tmp_path):
    inside = {}

    class Look(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            inside["anomaly"] = torch.is_anomaly_enabled()
            inside["deterministic"] = torch.are_deterministic_algorithms_enabled()
            inside["limit"] = torch._dynamo.config.recompile_limit
            inside["matmul"] = torch.get_float32_matmul_precision()

    before = torch._dynamo.config.recompile_limit
    options = {"detect_anomaly": True, "full_determinism": True, "dynamo_recompile_limit": 99}
    options |= {"float32_matmul_precision": "medium", "sdpa_backend": ["math"], "max_steps": 1}
    make(tmp_path, callbacks=[Look()], **options).train()
    assert inside == {"anomaly": True, "deterministic": True, "limit": 99, "matmul": "medium"}
    assert not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch._dynamo.config.recompile_limit == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_compiled_model_trains_the_same(tmp_path):
    plain, compiled = (
        make(tmp_path / name, max_steps=2, logging_steps=1, **options)
        for name, options in (("a", {}), ("b", {"torch_compile": True, "torch_compile_backend": "eager"}))
    )
    plain.train()
    compiled.train()
    assert losses(compiled) == losses(plain)


@pytest.mark.parametrize("method", ["_maybe_log_save_evaluate", "_run_epoch"])
def test_overriding_parts_of_the_hf_loop_is_an_error(method, tmp_path):
    kind = type("Theirs", (hf.Trainer,), {method: lambda self: None})
    with pytest.raises(BadArgument, match=f"overrides {method}"):
        make(tmp_path, trainer=kind)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda args: hf.Trainer(args=args), "a model or model_init"),
        (lambda args: hf.Trainer("gpt2", args), "torch Module"),
        (lambda args: hf.Trainer(Classifier(), {"lr": 1}), "TrainingArguments"),
        (lambda args: hf.Trainer(Classifier(), args).train(), "train_dataset"),
        (lambda args: hf.Trainer(Classifier(), args).evaluate(), "eval_dataset"),
        (lambda args: hf.Trainer(Classifier(), args, train_dataset=examples()).train(ckpt=1), "ckpt"),
        (lambda args: hf.Trainer(args=args, model_init=dict, train_dataset=examples()).train(), "model_init to return"),
        (lambda args: hf.Trainer(nn.Linear(4, 3), args, train_dataset=[{"input": torch.ones(4)}]).train(), "labels"),
    ],
)
def test_mistakes_are_explained(call, message, tmp_path):
    args = hf.TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=1)
    with pytest.raises(BadArgument, match=message):
        call(args)
