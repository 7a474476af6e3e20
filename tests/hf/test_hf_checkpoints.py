"""Checkpoints in the format of HF: transformers resumes from ours, and we from those of transformers."""

import dataclasses
import json
import logging
import os
import shutil

import pytest
import torch
import transformers
from hf_toys import Classifier, examples
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from trainformer import hf
from trainformer.core.errors import DataError

LIBRARIES = {"transformers": transformers, "trainformer": hf}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def bert():
    """A model with dropout: the random state has to be resumed, too."""
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=2, **SIZES))


def texts(count=22):
    rows = torch.randint(2, 32, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (row.sum() > 100).long()} for row in rows]


class StopAt(transformers.TrainerCallback):
    """Ends a run early without changing its schedule."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


def train(library, folder, resume=None, model=None, stop=10**6, **options):
    options = {
        "num_train_epochs": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "weight_decay": 0.1,
        "logging_steps": 1, "save_steps": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True, **options,
    }  # fmt: skip
    module = LIBRARIES[library]
    trainer = module.Trainer(
        model or bert(), module.TrainingArguments(str(folder), **options), train_dataset=texts(), eval_dataset=texts(6)
    )
    if stop < 10**6:
        trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run of transformers."""
    folder = tmp_path_factory.mktemp("reference")
    return folder, train("transformers", folder)


def test_losses_are_those_of_transformers(reference, tmp_path):
    _, theirs = reference
    ours = train("trainformer", tmp_path)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(weight, theirs.model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_a_run_moves_from_transformers_to_trainformer_and_back(reference, tmp_path):
    folder, whole = reference
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    middle = train("trainformer", tmp_path, resume=True, stop=12)
    assert losses(middle) == pytest.approx({k: v for k, v in losses(whole).items() if k <= 12}, rel=1e-5)
    last = train("transformers", tmp_path, resume=str(tmp_path / "checkpoint-8"))
    assert losses(last) == pytest.approx(losses(whole), rel=1e-5)
    for name, weight in last.model.state_dict().items():
        torch.testing.assert_close(weight, whole.model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_output_dir_holds_what_transformers_writes(reference, tmp_path):
    folder, _ = reference
    train("trainformer", tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(os.listdir(folder))
    theirs = {path.name for path in (folder / "checkpoint-4").iterdir()}
    assert theirs <= {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    states = [json.loads((place / "checkpoint-4/trainer_state.json").read_text()) for place in (folder, tmp_path)]
    assert states[0].keys() == states[1].keys()
    assert [set(r) for r in states[0]["log_history"]] == [set(r) for r in states[1]["log_history"]]
    loaded = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-4/trainer_state.json"))
    assert loaded.global_step == 4
    assert torch.load(tmp_path / "checkpoint-4/training_args.bin", weights_only=False).learning_rate == 1e-2


@pytest.mark.parametrize("library", LIBRARIES)
def test_sharded_weights_are_resumed(library, reference, tmp_path):
    _, whole = reference
    train(library, tmp_path, stop=8)
    folder = tmp_path / "checkpoint-8"
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(state)}
    for shard in set(names.values()):
        save_file({name: state[name] for name in names if names[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    resumed = train("trainformer", tmp_path / "resumed", resume=str(folder))
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)


def test_other_damage_to_a_checkpoint_is_an_error(tmp_path):
    train("trainformer", tmp_path, max_steps=4)
    with (tmp_path / "checkpoint-4/optimizer.pt").open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(DataError, match="optimizer"):
        train("trainformer", tmp_path / "resumed", resume=str(tmp_path / "checkpoint-4"))


def test_checkpoints_that_do_not_exist(tmp_path):
    with pytest.raises(DataError, match="Can't find a valid checkpoint at"):
        train("trainformer", tmp_path, resume=str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="No valid checkpoint found in output directory"):
        train("trainformer", tmp_path, resume=True)


def test_save_only_model(tmp_path):
    train("trainformer", tmp_path, max_steps=4, save_only_model=True)
    files = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "config.json"} <= files
    assert not files & {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    resumed = train("trainformer", tmp_path, resume=True, max_steps=6)
    assert resumed.state.global_step == 6


def test_ignore_data_skip_starts_the_epoch_again(tmp_path):
    seen = []

    class Watching(hf.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append(state.epoch)

    def run(resume=None, **options):
        args = hf.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, save_steps=2, report_to="none", **options
        )
        trainer = hf.Trainer(Classifier(), args, train_dataset=examples(24), callbacks=[Watching()])
        trainer.train(resume_from_checkpoint=resume)

    run(max_steps=2)
    run(resume=True, max_steps=4, ignore_data_skip=True)
    assert seen == [0.0, 0.0]


def test_best_checkpoint_without_loading_it(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss", "max_steps": 12}
    trainer = train("trainformer", tmp_path, save_total_limit=2, **options)
    best = trainer.state.best_global_step
    assert trainer.state.best_model_checkpoint == os.path.join(str(tmp_path), f"checkpoint-{best}")
    assert os.path.isdir(trainer.state.best_model_checkpoint)
    assert len(os.listdir(tmp_path)) == 2
    plain = train("trainformer", tmp_path / "plain", eval_strategy="steps", eval_steps=4, max_steps=4)
    assert (plain.state.best_metric, plain.state.best_model_checkpoint) == (None, None)


@dataclasses.dataclass
class Counter(hf.TrainerCallback, transformers.trainer_callback.ExportableState):
    start: int = 0

    def __post_init__(self):
        self.steps = self.start

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {"start": self.start}, "attributes": {"steps": self.steps}}


def test_states_of_callbacks_come_from_checkpoints_of_transformers(tmp_path):
    class Theirs(Counter, transformers.TrainerCallback):
        pass

    Theirs.__name__ = "Counter"
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=4, save_steps=4, use_cpu=True, report_to="none"
    )
    transformers.Trainer(bert(), args, train_dataset=texts(), callbacks=[Theirs()]).train()
    for restores, total in ((True, 6), (False, 2)):
        counter = Counter()
        args = hf.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=6, save_strategy="no", use_cpu=True,
            restore_callback_states_from_checkpoint=restores,
        )  # fmt: skip
        hf.Trainer(bert(), args, train_dataset=texts(), callbacks=[counter]).train(resume_from_checkpoint=True)
        assert counter.steps == total


def test_changed_arguments_are_reported(tmp_path, caplog):
    train("trainformer", tmp_path, max_steps=4)
    with caplog.at_level(logging.WARNING, "trainformer"):
        train("trainformer", tmp_path / "b", resume=str(tmp_path / "checkpoint-4"), max_steps=6, save_steps=5)
    assert "save_steps: 5 (from args) != 4 (from trainer_state.json)" in caplog.text


def lora(name):
    return get_peft_model(bert(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"), name)


def tied():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def sentences():
    """The first label, which has no prediction, is masked: transformers would count it in the mean."""
    rows = [example["input_ids"] for example in texts()]
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in rows]


MODELS = {
    "adapter": (lambda: lora("default"), texts),
    "named adapter": (lambda: lora("mine"), texts),
    "tied weights": (tied, sentences),
}


@pytest.mark.parametrize("case", MODELS)
def test_adapters_and_tied_weights_move_between_the_libraries(case, tmp_path):
    make, data = MODELS[case]

    def run(library, folder, resume=None):
        module = LIBRARIES[library]
        args = module.TrainingArguments(
            str(tmp_path / folder), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-2,
            logging_steps=1, save_steps=3, use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = module.Trainer(make(), args, train_dataset=data())
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return losses(trainer)

    whole = run("transformers", "theirs")
    assert run("trainformer", "ours") == pytest.approx(whole, rel=1e-5)
    assert run("trainformer", "a", "theirs/checkpoint-3") == pytest.approx(whole, rel=1e-5)
    assert run("transformers", "b", "ours/checkpoint-3") == pytest.approx(whole, rel=1e-5)


def test_the_tokenizer_of_the_collator_is_saved(tmp_path):
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"word{i}": i for i in range(2, 32)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    args = hf.TrainingArguments(str(tmp_path), max_steps=1, save_steps=1, use_cpu=True)
    trainer = hf.Trainer(bert(), args, train_dataset=texts(), data_collator=DataCollatorWithPadding(tokenizer))
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-1", "final"):
        assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / folder)) == len(tokenizer)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == (["BertForSequenceClassification"], "float32")
        assert (tmp_path / folder / "training_args.bin").exists()
