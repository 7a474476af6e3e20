"""The records, metrics and files of whole runs, compared with transformers."""

import os

import pytest
import torch
import transformers
from hf_toys import examples, llama, make, make_theirs, sequences
from tokenizers import Tokenizer, models

NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_a_loss", "eval_b_loss", "train_loss", "total_flos", "epoch")


def both(tmp_path, model, **options):
    return make(tmp_path / "ours", model(), **options), make_theirs(tmp_path / "theirs", model(), **options)


def tokenizer():
    made = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def tokens(count):
    """Rows of equal length: transformers weights a batch by its samples, not by its tokens, when it evaluates."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(2, 23, (7,), generator=generator)} for _ in range(count)]


def test_the_records_of_a_run(tmp_path):
    """Several evaluation datasets, records of several steps, the number of tokens, and the summary."""
    more = {"data_collator": transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)}
    rows = tokens(24)
    ours, theirs = both(
        tmp_path, llama, train=rows, evaluation={"a": rows[:8], "b": rows[8:16]}, more=more, num_train_epochs=2,
        per_device_train_batch_size=4, per_device_eval_batch_size=8, logging_steps=4, eval_strategy="steps",
        eval_steps=6, learning_rate=1e-3, include_num_input_tokens_seen=True,
    )  # fmt: skip
    outputs = ours.train(), theirs.train()
    assert [set(record) for record in ours.state.log_history] == [set(record) for record in theirs.state.log_history]
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for name in set(NUMBERS) & set(mine):
            assert mine[name] == pytest.approx(other[name], rel=1e-4), (name, mine["step"])
    assert ours.state.total_flos == theirs.state.total_flos > 0
    assert outputs[0].metrics.keys() == outputs[1].metrics.keys()
    assert ours.state.num_input_tokens_seen == theirs.state.num_input_tokens_seen


def test_each_evaluation_dataset_has_its_own_events(tmp_path):
    seen = {"ours": [], "theirs": []}

    def recording(kind, base):
        class Recorder(base):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen[kind].append(("on_log", sorted(logs)))

            def on_evaluate(self, args, state, control, metrics=None, **kwargs):
                seen[kind].append(("on_evaluate", sorted(metrics)))

        return Recorder()

    options = {"evaluation": {"a": examples(8), "b": examples(8)}, "eval_strategy": "epoch", "num_train_epochs": 1}
    make(tmp_path / "a", callbacks=[recording("ours", transformers.TrainerCallback)], **options).train()
    make_theirs(tmp_path / "b", callbacks=[recording("theirs", transformers.TrainerCallback)], **options).train()
    assert seen["ours"] == seen["theirs"]
    assert [name for name, _ in seen["ours"]].count("on_evaluate") == 2


def test_flops_continue_when_a_run_resumes(tmp_path):
    rows = [{**row, "labels": row["input_ids"]} for row in tokens(16)]
    options = {"train": rows, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path, llama(), **options)
    whole.train()
    again = make(tmp_path, llama(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.total_flos == whole.state.total_flos > 0


def test_a_user_counts_flops(tmp_path):
    from trainformer import hf

    class Counting(hf.Trainer):
        def floating_point_ops(self, inputs):
            return 10 * len(inputs["labels"])

    trainer = make(tmp_path, trainer=Counting, max_steps=3)
    trainer.train()
    assert trainer.state.total_flos == 3 * 10 * 8


def test_an_overridden_log_sees_the_summary_and_changes_what_callbacks_receive(tmp_path):
    seen = []

    class Recorder(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    def logging_trainer(base):
        class Logging(base):
            def log(self, logs, *args, **kwargs):
                logs["mine"] = 1.0
                super().log(logs, *args, **kwargs)

        return Logging

    from trainformer import hf

    make(tmp_path / "a", trainer=logging_trainer(hf.Trainer), callbacks=[Recorder()], max_steps=2).train()
    ours = [sorted(logs) for logs in seen]
    seen.clear()
    theirs = logging_trainer(transformers.Trainer)
    make_theirs(tmp_path / "b", trainer=theirs, callbacks=[Recorder()], max_steps=2).train()
    assert ours == [sorted(logs) for logs in seen]
    assert all("mine" in logs for logs in ours)


def test_files_of_a_saved_model(tmp_path):
    peft = pytest.importorskip("peft")
    more = {"data_collator": transformers.DataCollatorWithPadding(tokenizer())}  # its tokenizer is saved
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for name, model in (("plain", llama), ("adapter", lambda: peft.get_peft_model(llama(), lora))):
        ours, theirs = both(tmp_path / name, model, train=sequences(8), more=more, max_steps=1)
        for trainer in (ours, theirs):
            trainer.save_model(f"{trainer.args.output_dir}/final")
        files = [set(os.listdir(f"{trainer.args.output_dir}/final")) for trainer in (ours, theirs)]
        assert files[0] == files[1] - {"README.md"}  # peft writes a model card
