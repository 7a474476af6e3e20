"""Where the loss comes from, models with labels of other names or none, and generation, compared with transformers."""

import numpy as np
import pytest
import torch
import transformers
from hf_models import READS, TRANSLATES, pairs
from hf_toys import Classifier, examples, llama, losses, make, make_theirs, sequences
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F

from text_toys import bert, t5
from trainformer import hf
from trainformer.core.errors import BadArgument

OPTIONS = {"max_steps": 4, "logging_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def train_both(folder, build, train, evaluation=None, more=None, **options):
    trained = []
    for maker in (make_theirs, make):
        torch.manual_seed(0)
        trainer = maker(folder / maker.__name__, build(), train=train, evaluation=evaluation, more=more,
                        **{**OPTIONS, **options})  # fmt: skip
        trainer.train()
        trained.append(trainer)
    return trained


class HingeByKeywords(Classifier):
    """Takes its labels in **kwargs, and returns a loss that no trainer would choose."""

    def forward(self, x, **kwargs):
        logits = self.body(x)
        if kwargs.get("labels") is None:
            return {"logits": logits}
        return {"loss": F.multi_margin_loss(logits, kwargs["labels"]), "logits": logits}


class ByTarget(Classifier):
    def forward(self, x, target=None):
        logits = self.body(x)
        return {"loss": F.multi_margin_loss(logits, target), "logits": logits}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return F.mse_loss(self.body(x), x), self.body(x)


def test_the_loss_of_a_model_with_keyword_arguments(tmp_path):
    theirs, ours = train_both(tmp_path, HingeByKeywords, examples(), examples(16, seed=1), remove_unused_columns=False,
                              label_names=["labels"])  # fmt: skip
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[0] != pytest.approx(losses(make_and_train(tmp_path))[0], abs=1e-2)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)


def make_and_train(folder):
    trainer = make(folder / "plain", **OPTIONS)
    trainer.train()
    return trainer


@pytest.mark.parametrize("named", [True, False])
def test_labels_of_another_name(named, tmp_path):
    data = [{"x": e["x"], "target": e["labels"]} for e in examples()]
    names = {"label_names": ["target"]} if named else {}
    theirs, ours = train_both(tmp_path, ByTarget, data, data[:16], **names)
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert ("eval_loss" in ours.evaluate()) == ("eval_loss" in theirs.evaluate()) == named


def test_a_model_that_needs_no_labels(tmp_path):
    data = [{"x": e["x"]} for e in examples()]
    theirs, ours = train_both(tmp_path, Autoencoder, data)
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    missing = make(tmp_path, train=data, **OPTIONS)
    with pytest.raises(BadArgument, match=r"a model that returns its loss.*returns logits"):
        missing.train()


def test_a_masked_autoencoder(tmp_path):
    decoder = {f"decoder_{name}": value for name, value in SIZES.items()}
    config = transformers.ViTMAEConfig(image_size=8, patch_size=4, mask_ratio=0.5, **SIZES, **decoder)
    g = torch.Generator().manual_seed(0)
    data = [{"pixel_values": torch.randn(3, 8, 8, generator=g)} for _ in range(16)]
    build = lambda: transformers.ViTMAEForPreTraining(config)  # noqa: E731
    theirs, ours = train_both(tmp_path, build, data, data[:8], label_names=["pixel_values"], learning_rate=0.01)
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert "eval_loss" in ours.evaluate()


def test_clip_with_return_loss(tmp_path):
    text = {"vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 2, **SIZES}
    vision = {"image_size": 8, "patch_size": 4, **SIZES}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    g = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(3, 30, (5,), generator=g), "pixel_values": torch.randn(3, 8, 8, generator=g)}
        for _ in range(16)
    ]

    def collate(made):
        return {"return_loss": True, **{name: torch.stack([e[name] for e in made]) for name in made[0]}}

    build = lambda: transformers.CLIPModel(config)  # noqa: E731
    more = {"data_collator": collate}
    theirs, ours = train_both(tmp_path, build, data, data[:8], more, learning_rate=0.01)
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-4)


def test_a_loss_function_that_divides_by_the_items_of_the_step(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return total / num_items_in_batch

    from hf_toys import padded

    more = {"data_collator": padded, "compute_loss_func": loss}
    theirs, ours = train_both(tmp_path, llama, sequences(), None, more, gradient_accumulation_steps=2,
                              per_device_train_batch_size=4)  # fmt: skip
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)


def test_special_tokens_are_those_of_the_tokenizer(tmp_path):
    model = transformers.BertForMaskedLM(bert())
    model.config.pad_token_id, model.config.eos_token_id = 3, 4
    before = dict(vars(READS))
    data = [{"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, 6, 7])} for _ in range(8)]
    trainer = make(tmp_path, model, train=data, more={"processing_class": READS}, max_steps=1)
    assert model.config.pad_token_id == 3
    trainer.train()
    assert model.config.pad_token_id == READS.pad_token_id
    assert model.config.eos_token_id == (4 if READS.eos_token_id is None else READS.eos_token_id)
    assert dict(vars(READS)).keys() == before.keys()


def test_an_adapter_with_a_name(tmp_path):
    def build():
        torch.manual_seed(0)
        base = transformers.BertForSequenceClassification(bert(num_labels=3))
        return get_peft_model(base, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"), adapter_name="mine")

    data = [{"input_ids": torch.randint(5, 20, (6,)), "labels": i % 3} for i in range(16)]
    options = {**OPTIONS, "save_strategy": "steps", "save_steps": 2}
    trainer = make(tmp_path / "run", build(), train=data, **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    weights = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora" in n}
    again = make(tmp_path / "run", build(), train=data, **{**options, "max_steps": 6})
    assert again.train(resume_from_checkpoint=True).global_step == 6
    torch.manual_seed(0)
    base = transformers.BertForSequenceClassification(bert(num_labels=3))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "final" / "mine"))
    found = {n.replace(".default.", ".mine."): p for n, p in loaded.named_parameters() if "lora" in n}
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor)


# -- generation --------------------------------------------------------------------------------------------


def seq2seq(package, folder, model, **options):
    quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    args = package.Seq2SeqTrainingArguments(str(folder), predict_with_generate=True, **{**quiet, **OPTIONS, **options})
    collator = transformers.DataCollatorForSeq2Seq(TRANSLATES, model=model)
    return package.Seq2SeqTrainer(
        model, args, train_dataset=pairs(), eval_dataset=pairs().select(range(6)), data_collator=collator,
        processing_class=TRANSLATES, compute_metrics=exact,
    )  # fmt: skip


def exact(prediction):
    tokens, labels = prediction.predictions, prediction.label_ids
    width = min(tokens.shape[1], labels.shape[1])
    return {"exact": float((tokens[:, :width] == labels[:, :width]).mean()), "width": tokens.shape[1]}


@pytest.mark.parametrize(
    "options",
    [{}, {"generation_max_length": 7, "generation_num_beams": 2}, {"eval_strategy": "steps", "eval_steps": 2}],
)
def test_generation_is_that_of_transformers(options, tmp_path):
    found = []
    for package in (transformers, hf):
        torch.manual_seed(0)
        trainer = seq2seq(package, tmp_path, transformers.T5ForConditionalGeneration(t5()), **options)
        trainer.train()
        shorter = trainer.predict(pairs().select(range(5)), max_length=5, num_beams=1)
        found.append((trainer, trainer.evaluate(), trainer.predict(pairs().select(range(5))), shorter))
    (theirs, their_metrics, *their_outputs), (ours, our_metrics, *our_outputs) = found
    assert set(our_metrics) == set(their_metrics)
    for name in ("eval_exact", "eval_width"):
        assert our_metrics[name] == pytest.approx(their_metrics[name], abs=1e-6)
    for one, other in zip(our_outputs, their_outputs, strict=True):
        np.testing.assert_array_equal(one.predictions, other.predictions)
        np.testing.assert_array_equal(one.label_ids, other.label_ids)
    records = [[r["eval_exact"] for r in t.state.log_history if "eval_exact" in r] for t in (theirs, ours)]
    assert records[1] == pytest.approx(records[0], abs=1e-6)


def test_the_generation_config_of_the_arguments(tmp_path):
    config = transformers.GenerationConfig(max_length=9, num_beams=2, decoder_start_token_id=0)
    config.save_pretrained(tmp_path / "saved")
    for given in (config, str(tmp_path / "saved")):
        model = transformers.T5ForConditionalGeneration(t5())
        trainer = seq2seq(hf, tmp_path, model, generation_config=given)
        assert model.generation_config.max_length == 9
        assert model.generation_config is not config
        assert trainer.predict(pairs().select(range(2))).predictions.shape == (2, 9)
    wrong = transformers.GenerationConfig(do_sample=False, temperature=0.5)
    with pytest.raises(BadArgument, match="valid generation_config"):
        seq2seq(hf, tmp_path, model, generation_config=wrong)
