"""The model card of `finalize` says what the records of the run say, and nothing that they do not."""

import hashlib
import json

import huggingface_hub
import pytest
import transformers
import yaml

from text_toys import chat_tokenizer, llama, sentences, trainer_for
from toys import MeanTask, classes, mlp
from trainformer import Trainer
from trainformer.adapters import LoRA
from trainformer.checkpoint import finalize, list_checkpoints
from trainformer.tasks import CausalLM


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def card_of(folder):
    """The metadata and the text."""
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    text = (folder / "README.md").read_text("utf-8")
    assert yaml.safe_load(text.split("---")[1]) == card.data.to_dict()
    return card.data.to_dict(), card.text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    transformers.LlamaForCausalLM(llama()).save_pretrained(folder / "base")
    chat_tokenizer().save_pretrained(folder / "base")
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences()))
    return folder


def test_a_card_has_data_settings_metrics_and_digests(place, tmp_path):
    task = CausalLM(place / "base", LoRA(r=2), max_length=32, cache_dir=tmp_path / "tokens")
    options = {"val_data": sentences(), "eval_every": "1steps", "max_steps": 2, "lr": 3e-3}
    trainer = trainer_for(task, str(place / "train.jsonl"), run_dir=tmp_path / "run", **options).fit()
    result = finalize(tmp_path / "run", tmp_path / "out")
    assert "README.md" in result.files
    metadata, text = card_of(tmp_path / "out")
    # A local folder is no model of the hub.
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["trainformer", "causallm", "lora"],
    }
    assert f"| train.jsonl |  | {sha256(place / 'train.jsonl')} |" in text
    assert f"| model.safetensors | {sha256(tmp_path / 'out' / 'model.safetensors')} |" in text
    assert "starting from `base`, with LoRA, merged" in text
    assert "24 samples" in text
    for setting in ("| lr | 0.003 |", "| max_steps | 2 |", "| seed | 42 |", "| max_length | 32 |"):
        assert setting in text
    assert "| epochs |" not in text  # the steps ended the training
    loss = list_checkpoints(trainer.run_folder)[-1].manifest.metrics["val/loss"]
    assert f"| val/loss | {loss:.6g} |" in text
    assert str(tmp_path) not in text
    assert str(place) not in text


def test_a_card_claims_nothing_that_was_not_recorded(tmp_path):
    """No metrics without an evaluation, none of the average for the trained weights, and no base of a new model."""
    task = CausalLM(llama(), max_length=32, tokenizer=chat_tokenizer(), cache_dir=tmp_path / "tokens")
    trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=1).fit()
    finalize(tmp_path / "run", tmp_path / "out")
    metadata, text = card_of(tmp_path / "out")
    assert not {"base_model", "datasets", "model-index", "license", "language"} & set(metadata)
    assert "## Metrics" not in text
    assert "starting from" not in text
    digest = hashlib.sha256("".join(f"{json.dumps(line)}\n" for line in sentences()).encode()).hexdigest()
    assert f"| records in memory | 24 | {digest} |" in text
    averaged = CausalLM(llama(), max_length=32, tokenizer=chat_tokenizer(), cache_dir=tmp_path / "tokens")
    options = {"val_data": sentences(), "eval_every": "1steps", "ema": 0.5, "max_steps": 1}
    trainer_for(averaged, sentences(), run_dir=tmp_path / "averaged", **options).fit()
    finalize(tmp_path / "averaged", tmp_path / "average")
    finalize(tmp_path / "averaged", tmp_path / "trained", ema=False)
    assert "val/loss" in card_of(tmp_path / "average")[1]
    assert "val/loss" not in card_of(tmp_path / "trained")[1]


def test_names_of_the_hub_are_metadata(place, tmp_path):
    task = CausalLM(place / "base", LoRA(r=2), max_length=32, cache_dir=tmp_path / "tokens")
    trainer = trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=1)
    trainer.task.model.peft_config["default"].base_model_name_or_path = "org/small-model"
    trainer.fit()
    finalize(tmp_path / "run", tmp_path / "out", base=place / "base")
    assert "base_model" not in card_of(tmp_path / "out")[0]  # merged into another one
    metadata, _ = card_of(_of_hub(tmp_path))
    assert (metadata["base_model"], metadata["datasets"]) == ("org/small-model", ["org/texts"])


def _of_hub(folder):
    """A card as of a run with data of the hub."""
    from trainformer.checkpointing.tools.model_card import write_card

    checkpoint = list_checkpoints(folder / "run")[-1]
    place = folder / "hub"
    place.mkdir()
    record = json.loads((checkpoint.path / "task.json").read_text())
    record["info"]["extra"]["training_data"] = [{"name": "stream:hf:org/texts@en:train"}]
    (place / "task.json").write_text(json.dumps(record))
    facts = {"name": "hub", "kind": "causal_lm", "base": "org/small-model", "step": 1}
    write_card(place, checkpoint, {"task_type": "CausalLM"}, facts)
    return place


def test_other_models_have_a_card_as_well(tmp_path):
    Trainer(MeanTask(mlp()), classes(), max_steps=1, log="none", run_dir=tmp_path / "run").fit()
    finalize(tmp_path / "run", tmp_path / "out")
    metadata, text = card_of(tmp_path / "out")
    assert metadata == {"tags": ["trainformer", "meantask"]}
    assert sha256(tmp_path / "out" / "model.safetensors") in text
    assert "from_pretrained" not in text
