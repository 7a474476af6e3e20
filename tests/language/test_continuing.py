"""Training that continues from models and adapters, all given as `model_name`: what is trained, saved, merged, opened.

Every row of `WAYS` is a run that starts from the same adapter. What it saved is opened by peft, by `trainformer.load`
and by transformers after `finalize`, and gives the outputs of the trained model.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers

import text_toys as toys
import trainformer
from text_toys import checkpoint_of, llama, preferences, sentences
from toys import same
from trainformer.adapters import LoRA, PrefixTuning, QLoRA, adapter_state_dict
from trainformer.checkpoint import finalize
from trainformer.core.errors import BadArgument, DataError
from trainformer.tasks import DPO, CausalLM, TextClassification
from trainformer.tasks.language.pretrained import load_whole

IDS = torch.randint(2, 300, (2, 12), generator=torch.Generator().manual_seed(4))
NEW = LoRA(r=2, dropout=0.0, target_modules=["q_proj", "up_proj"])


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def close(found, wanted):
    torch.testing.assert_close(logits(found), logits(wanted), rtol=0, atol=2e-5)


class Place:
    """A base model, and an adapter that was trained on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(llama()).save_pretrained(folder / "base")
        toys.chat_tokenizer().save_pretrained(folder / "base")
        self.run = folder / "sft"
        trainer = self.train(folder / "base", LoRA(r=4, dropout=0.0), run_dir=self.run, lr=3e-2)
        self.adapter = checkpoint_of(trainer)

    def task(self, model, adapter=None, kind=CausalLM, **options):
        return kind(model, adapter, max_length=32, cache_dir=self.folder / "tokens", **options)

    def train(self, model, adapter=None, kind=CausalLM, task_options=None, **options):
        data = preferences() if kind is DPO else sentences()
        task = self.task(model, adapter, kind, **(task_options or {}))
        return toys.trainer_for(task, data, **{"max_steps": 3, **options}).fit()

    def base(self):
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / "base")

    def opened(self, name="default", **options):
        """The adapter as peft opens it."""
        return peft.PeftModel.from_pretrained(self.base(), self.adapter, adapter_name=name, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("continuing"))


def two_adapters(place):
    """One that is frozen and off, and one that is trained."""
    model = place.opened("first")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    return model


def both_active(place):
    """Two that are on, of which one is trained."""
    model = two_adapters(place)
    model.base_model.set_adapter(["first", "second"])
    for name, parameter in model.named_parameters():
        if ".first." in name:
            parameter.requires_grad_(False)
    return model


TOKENIZER = object()
# The model, the new adapter, other arguments, and how peft opens the adapters of the checkpoint: (merged, active).
WAYS = {
    "the run": (lambda place: place.run, None, {}, ([], ["."])),
    "the checkpoint": (lambda place: place.adapter, None, {}, ([], ["."])),
    "merged": (lambda place: place.adapter, NEW, {}, (["merged_1"], ["default"])),
    "stacked": (lambda place: place.adapter, NEW, {"on_adapter": "stack"}, ([], ["default", "adapter_2"])),
    "a PeftModel": (lambda place: place.opened(is_trainable=True), None, {"tokenizer": TOKENIZER}, ([], ["."])),
    "named": (lambda place: place.opened("sft", is_trainable=True), None, {"tokenizer": TOKENIZER}, ([], ["sft"])),
    "two": (two_adapters, None, {"tokenizer": TOKENIZER}, ([], ["second"])),
    "two active": (both_active, None, {"tokenizer": TOKENIZER}, ([], ["first", "second"])),
    "PeftModel merged": (
        lambda place: place.opened(),
        NEW,
        {"tokenizer": TOKENIZER, "on_adapter": "merge"},
        (["merged_1"], ["default"]),
    ),
}


def opened_by_peft(place, folder, merged, active):
    model = place.base()
    for name in merged:
        model = peft.PeftModel.from_pretrained(model, folder / name).merge_and_unload()
    model = peft.PeftModel.from_pretrained(model, folder / active[0], adapter_name="a0")
    for number, name in enumerate(active[1:], 1):
        model.load_adapter(folder / name, adapter_name=f"a{number}")
    model.base_model.set_adapter([f"a{number}" for number in range(len(active))])
    return model


@pytest.mark.parametrize("way", WAYS)
def test_what_continues_from_an_adapter(place, tmp_path, way):
    model, adapter, options, layout = WAYS[way]
    options = {k: str(place.folder / "base") if v is TOKENIZER else v for k, v in options.items()}
    start = model(place)
    trainer = place.train(start, adapter, task_options=options, run_dir=tmp_path / "run", lr=3e-2)
    trained, folder = trainer.task.model, checkpoint_of(trainer)
    assert (logits(trained) - logits(place.base())).abs().max() > 0.01
    wanted = place.base() if way == "two" else place.opened()
    close(trainformer_start(place, start, adapter, options, wanted), wanted)
    close(opened_by_peft(place, folder, *layout), trained)
    finalize(tmp_path / "run", tmp_path / "out")
    close(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), trained)
    close(trainformer.load(tmp_path / "run").task.model, trained)
    close(trainformer.load(tmp_path / "out").task.model, trained)
    # Its checkpoint can be continued in turn, under a new adapter.
    close(place.task(folder, NEW).model, trained)


def trainformer_start(place, start, adapter, options, wanted):
    """The model before the first step; that of an object is trained by now."""
    return wanted if isinstance(start, torch.nn.Module) else place.task(start, adapter, **options).model


@pytest.mark.parametrize("way", ["the checkpoint", "merged", "stacked"])
def test_resuming_is_exact(place, tmp_path, way):
    model, adapter, options, _ = WAYS[way]

    def run(folder, **more):
        task = place.task(model(place), adapter, **options)
        return toys.trainer_for(task, sentences(), run_dir=tmp_path / folder, save_every=2, save_last=5, **more)

    whole = run("whole").fit()
    with pytest.raises(KeyboardInterrupt):
        run("cut", callbacks=[toys.Cut()]).fit()
    again = run("cut").fit()
    assert again.state.step == 6
    assert same(adapter_state_dict(again.task.model), adapter_state_dict(whole.task.model))
    frozen = [
        {n: p.detach() for n, p in t.task.model.named_parameters() if not p.requires_grad} for t in (whole, again)
    ]
    assert same(*frozen)


def test_stacked_adapters_stay_frozen(place):
    task = place.task(place.adapter, NEW, DPO, on_adapter="stack", reference="base")
    before = {name: p.detach().clone() for name, p in task.model.named_parameters() if ".default." in name}
    toys.trainer_for(task, preferences(), max_steps=2).fit()
    after = dict(task.model.named_parameters())
    assert before
    for name, value in before.items():
        assert torch.equal(after[name], value)
        assert not after[name].requires_grad
        assert after[name].grad is None


# -- references --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [None, "merge", "stack"])
@pytest.mark.parametrize("reference", ["start", "base"])
def test_the_reference_of_a_training_that_starts_from_an_adapter(place, adapter, reference):
    options = {} if adapter is None else {"on_adapter": adapter}
    task = place.task(place.adapter, None if adapter is None else NEW, DPO, reference=reference, **options)
    trainer = toys.trainer_for(task, preferences(), max_steps=2, lr=3e-2)
    first = task.train_step(toys.batches_of(trainer)[0])
    assert (abs(first.sum.item() / first.weight - 0.693147) < 1e-5) == (reference == "start")
    trainer.fit()
    wanted = place.opened() if reference == "start" else place.base()
    trained = logits(task.model)
    with task.reference_model() as model:
        close(model, wanted)
    assert torch.equal(logits(task.model), trained)
    assert (trained - logits(wanted)).abs().max() > 1e-3


def test_the_reference_is_trls(place, tmp_path):
    """TRL keeps a copy of the adapter that it continues; the base is its reference if it is given one."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    settings = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.1, max_length=32, report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=16, gradient_checkpointing=False,
    )  # fmt: skip
    for reference in ("start", "base"):
        task = place.task(place.adapter, None, DPO, reference=reference)
        trainer = toys.trainer_for(task, preferences(), batch_size=16)
        theirs = trl.DPOTrainer(
            place.opened(is_trainable=True), place.base() if reference == "base" else None, settings,
            train_dataset=datasets.Dataset.from_list(preferences()), processing_class=toys.chat_tokenizer(),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for (_, own), (_, other) in zip(trainable(task.model), trainable(theirs.model), strict=True):
            noise = 0.5 * torch.randn(own.shape, generator=generator)
            own.data.add_(noise)
            other.data.copy_(own.data)
        wanted = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
        found = task.train_step(toys.batches_of(trainer)[0])
        torch.testing.assert_close(found.sum / found.weight, wanted, rtol=1e-5, atol=1e-6)
        assert abs(wanted.item() - 0.693147) > 1e-4


def trainable(model):
    return [(name, p) for name, p in model.named_parameters() if ".default." in name]


def test_another_adapter_is_a_reference(place):
    task = place.task(place.folder / "base", None, DPO, reference=place.adapter)
    trainer = toys.trainer_for(task, preferences())
    assert trainer.task._reference is not None
    with task.reference_model() as model:
        close(model, place.opened())


def test_a_model_that_is_not_trained_has_nothing_new(place):
    close(load_whole(place.run, "causal_lm"), place.opened())
    with pytest.raises(BadArgument, match=r"all weights of the model.*none for score\.weight"):
        load_whole(place.folder / "base", "sequence_classification")


# -- embeddings --------------------------------------------------------------------------------------------

EMBEDDINGS = {
    "input": {"modules_to_save": ["embed_tokens"]},
    "output": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows": {"trainable_token_indices": [3, 5, 7]},
    "rows of both": {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_that_are_trained_with_an_adapter(tmp_path, tied, case):
    transformers.LlamaForCausalLM(llama(tie_word_embeddings=tied)).save_pretrained(tmp_path / "base")
    toys.chat_tokenizer().save_pretrained(tmp_path / "base")
    adapter = LoRA(r=2, dropout=0.0, **EMBEDDINGS[case])
    task = CausalLM(tmp_path / "base", adapter, max_length=32, cache_dir=tmp_path / "tokens")
    trainer = toys.trainer_for(task, sentences(), run_dir=tmp_path / "run", max_steps=2).fit()
    folder = checkpoint_of(trainer)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(base)
    close(peft.PeftModel.from_pretrained(base, folder), task.model)
    assert (logits(task.model) - before).abs().max() > 1e-3
    finalize(tmp_path / "run", tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    close(merged, task.model)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    close(CausalLM(folder, max_length=32).model, task.model)


def test_rows_of_one_of_two_tied_layers_are_refused():
    model = transformers.LlamaForCausalLM(llama(tie_word_embeddings=True))
    for rows in ({"lm_head": [3]}, {"embed_tokens": [3], "lm_head": [4]}):
        with pytest.raises(BadArgument, match="Pass a list of rows: it is for both"):
            LoRA(trainable_token_indices=rows).apply(copy.deepcopy(model))


# -- classifiers -------------------------------------------------------------------------------------------


def test_the_head_of_a_classifier_and_what_else_is_new_belong_to_its_adapter(tmp_path):
    """A masked language model has no pooler: a classifier gets a random one, which no file of the base has."""
    transformers.BertForMaskedLM(toys.bert()).save_pretrained(tmp_path / "bert")
    toys.masking_tokenizer(sentences()).save_pretrained(tmp_path / "bert")
    records = [{"text": text, "label": "abc"[number % 3]} for number, text in enumerate(sentences())]

    def run(model, adapter, name, data=records):
        task = TextClassification(model, adapter, max_length=32, cache_dir=tmp_path / "tokens")
        toys.trainer_for(task, data, run_dir=tmp_path / name, max_steps=3).fit()
        finalize(tmp_path / name, tmp_path / f"{name}-out")
        for folder in (tmp_path / name, tmp_path / f"{name}-out"):
            loaded = trainformer.load(folder)
            assert list(loaded.class_names) == ["a", "b", "c"]
            torch.testing.assert_close(answers(loaded.task), answers(task), rtol=0, atol=1e-5)
        return task

    first = run(tmp_path / "bert", LoRA(r=2, dropout=0.0), "first")
    # Classes keep their numbers, whatever the new data have.
    continued = TextClassification(tmp_path / "first", max_length=32, cache_dir=tmp_path / "tokens")
    toys.trainer_for(continued, records[1:3] * 4, run_dir=tmp_path / "second")
    torch.testing.assert_close(answers(continued), answers(first))
    run(tmp_path / "first", LoRA(r=2, dropout=0.0), "third", records[1:3] * 4)
    # An adapter that peft saved without the pooler would be opened with another one each time.
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert", num_labels=3)
    peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS")).save_pretrained(tmp_path / "peft")
    with pytest.raises(BadArgument, match=r"neither for bert\.pooler\.dense\.bias"):
        toys.trainer_for(TextClassification(tmp_path / "peft", max_length=32), records)


@torch.no_grad()
def answers(task):
    return task.model.eval()(input_ids=IDS % 90).logits


# -- what peft and transformers leave to find out ----------------------------------------------------------


def test_adapters_of_peft_alone(place, tmp_path):
    """Without a tokenizer beside them, and with two in one folder."""
    both_active(place).save_pretrained(tmp_path / "two")
    second = trainformer.load(tmp_path / "two" / "first")
    close(second.task.model, place.opened())
    assert second("the quick", max_new_tokens=2)["text"] is not None


def test_a_model_in_4_bits_is_continued_in_4_bits(place, tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers.LlamaForCausalLM(llama(hidden_size=64)).save_pretrained(tmp_path / "base")
    toys.chat_tokenizer().save_pretrained(tmp_path / "base")
    options = {"optimizer": "adamw", "max_steps": 2}
    place.train(tmp_path / "base", QLoRA(r=2, dropout=0.0, quant_type="fp4"), run_dir=tmp_path / "sft", **options)
    with pytest.raises(BadArgument, match=r"in full precision to merge.*on_adapter='stack'"):
        place.train(tmp_path / "sft", QLoRA(r=2))
    for name, adapter, how in (("more", None, None), ("stack", QLoRA(r=2, dropout=0.0, quant_type="fp4"), "stack")):
        chosen = {"task_options": {"on_adapter": how}, "run_dir": tmp_path / name, **options}
        trainer = place.train(tmp_path / "sft", adapter, **chosen)
        layer = trainer.task.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        assert type(layer.weight).__name__ == "Params4bit"
        finalize(tmp_path / name, tmp_path / f"{name}-out")
        close(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-out"), trainer.task.model)


# -- mistakes ----------------------------------------------------------------------------------------------


def test_mistakes_are_said(place, tmp_path):
    moved = shutil.copytree(place.adapter, tmp_path / "moved")
    content = json.loads((moved / "adapter_config.json").read_text())
    no_base = shutil.copytree(moved, tmp_path / "no-base")
    for folder, base in ((moved, str(tmp_path / "gone")), (no_base, None)):
        (folder / "adapter_config.json").write_text(json.dumps({**content, "base_model_name_or_path": base}))
    on_adapter = shutil.copytree(moved, tmp_path / "on-adapter")
    path = {**content, "base_model_name_or_path": str(place.adapter)}
    (on_adapter / "adapter_config.json").write_text(json.dumps(path))
    empty = tmp_path / "run"
    (empty / "checkpoints").mkdir(parents=True)
    injected = transformers.AutoModelForCausalLM.from_pretrained(place.folder / "base")
    injected.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tokenizer = {"tokenizer": toys.chat_tokenizer()}
    both = place.opened("one", is_trainable=True)
    both.add_adapter("two", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    both.base_model.set_adapter(["one", "two"])
    cases = [
        (moved, None, {}, r"the base model of the adapter in .*moved to be a folder that exists.*Pass base="),
        (no_base, None, {}, r"the model that the adapter in .*no-base belongs to.*Pass base="),
        (on_adapter, None, {}, r"a whole model as the base of the adapter.*finalize"),
        (empty, None, {}, "a run with a complete checkpoint"),
        (injected, None, tokenizer, "a PeftModel or a model without adapters"),
        (both, None, tokenizer, "one adapter to train, received 'trainable weights in one, two'"),
        (place.folder / "base", NEW, {"on_adapter": "stack"}, "a model with an adapter for on_adapter"),
        (place.folder / "base", None, {"base": "gpt2"}, "a base for the folder of an adapter alone"),
        (
            place.adapter,
            LoRA(use_dora=True),
            {"on_adapter": "stack"},
            r"use_dora in the new adapter.*on_adapter='merge'",
        ),
        (place.adapter, PrefixTuning(2), {"on_adapter": "stack"}, "a LoRA to stack"),
    ]
    for model, adapter, options, said in cases:
        with pytest.raises(BadArgument, match=said):
            assert place.task(model, adapter, **options).model is None
    frozen = place.task(place.opened(), None, **tokenizer)  # may be evaluated
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    with pytest.raises(BadArgument, match="is_trainable=True"):
        toys.trainer_for(frozen, toys.conversations())
    for options, said in (
        ({"on_adapter": "stack"}, "together with a new adapter"),
        ({"on_adapter": "mix"}, "on_adapter"),
    ):
        with pytest.raises(BadArgument, match=said):
            place.task(place.adapter, **options)
    close(place.task(moved, base=place.folder / "base").model, place.opened())
    good = {"version": 1, "merged": [], "active": ["default"], "inactive": [], "trained": "default"}
    good |= {"model_config": {}, "quantization": None}
    (moved / "adapters.json").write_text(json.dumps(good))
    close(place.task(moved, base=place.folder / "base").model, place.opened())
    # From a stranger: paths to elsewhere, and arguments of `from_pretrained` that execute code.
    changes = [
        ({"active": ["../x"]}, "no name of a folder"),
        ({"model_config": {"trust_remote_code": True}}, "trust_remote_code in model_config"),
        ({"quantization": {"load_in_8bit": True}}, "load_in_8bit in quantization"),
        ({"trained": "other"}, "not active"),
        ({"version": 9}, "another version"),
    ]
    for change, said in changes:
        (moved / "adapters.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(DataError, match=f"the description of adapters.*{said}"):
            assert place.task(moved, base=place.folder / "base").model is None
