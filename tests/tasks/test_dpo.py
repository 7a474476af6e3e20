"""DPO: the losses of single answers, however they are batched; a reference that never changes; exact resuming."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import text_toys as toys
from text_toys import WORDS, batches_of, checkpoint_of, gpt2, llama
from toys import weights
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.prepare import answers as answers_of
from trainformer.run import run_of
from trainformer.tasks.language.dpo import DPO

PAIRS = toys.preferences()
LOSSES = ["sigmoid", "ipo", "hinge", "orpo", "simpo"]


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, adapter=None, **options):
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        return DPO(llama() if model is None else model, adapter, **{**defaults, **options})

    return make


def trainer_for(task, data=PAIRS, **options):
    return toys.trainer_for(task, data, **options)


def shaken(task, seed=1):
    """Weights other than the reference's, as after some training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in task.model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))


def single(model, row, labels, mask):
    """Sum of the log probabilities of one answer's tokens, and their number: alone, without padding, in float64."""
    found, wanted = toys.next_token_log_probs(model, row, labels, mask)
    return (found * wanted).sum(), wanted.sum()


def by_hand(policy, reference, batch, loss, beta):
    """The mean over pairs, each computed alone from the formulas of the papers."""
    losses = []
    for rows in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        (chosen, c_size), (rejected, r_size) = (single(policy, *answer) for answer in zip(*rows, strict=True))
        with torch.no_grad():
            ref_chosen, ref_rejected = (single(reference, *answer)[0] for answer in zip(*rows, strict=True))
        gap = (chosen - ref_chosen) - (rejected - ref_rejected)
        if loss == "sigmoid":
            losses.append(-torch.log(torch.sigmoid(beta * gap)))
        elif loss == "hinge":
            losses.append(torch.clamp(1 - beta * gap, min=0))
        elif loss == "ipo":
            gap = (chosen - ref_chosen) / c_size - (rejected - ref_rejected) / r_size
            losses.append((gap - 0.5 / beta) ** 2)
        elif loss == "orpo":
            p, q = (chosen / c_size).exp(), (rejected / r_size).exp()
            odds = (p / (1 - p)) / (q / (1 - q))
            losses.append(-chosen / c_size - beta * torch.log(torch.sigmoid(torch.log(odds))))
        else:
            losses.append(-torch.log(torch.sigmoid(beta * (chosen / c_size - rejected / r_size) - 1.0)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("loss", "chunk_tokens"), [*((loss, None) for loss in LOSSES), ("sigmoid", 5), ("sigmoid", 0), ("simpo", 5)]
)
def test_the_loss_is_that_of_single_answers(task, loss, chunk_tokens):
    trainer = trainer_for(task(loss=loss, chunk_tokens=chunk_tokens))
    made = trainer.task
    before = copy.deepcopy(made.model)
    shaken(made)
    batch = batches_of(trainer)[0]
    found = made.train_step(batch)
    (found.sum / found.weight).backward()
    gradients = {name: p.grad.clone() for name, p in made.model.named_parameters()}
    made.model.zero_grad()
    wanted = by_hand(made.model, before, batch, loss, made.beta)
    wanted.backward()
    assert found.weight == 4
    torch.testing.assert_close(found.sum.double() / 4, wanted.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-5)


def test_prompts_are_not_trained_on(task, tokenizer):
    trainer = trainer_for(task(), batch_size=16)
    (batch,) = batches_of(trainer)
    answers = {(p["prompt"], p["chosen"], p["rejected"]) for p in PAIRS}
    for rows, labels, masks in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        texts = [tokenizer.decode(row[label != -100]) for row, label in zip(rows, labels, strict=True)]
        asked = tokenizer.decode(rows[0][(labels[0] == -100) & (masks[0] == 1)])
        assert all(text.endswith("</s>") for text in texts)
        assert (asked, *(text.removesuffix("</s>") for text in texts)) in answers
    assert trainer.check().ok


def test_conversations_share_their_beginning(task, tokenizer):
    ask = {"role": "user", "content": "the fox"}
    good, bad = ({"role": "assistant", "content": text} for text in ("jumps", "bake pies"))
    rest = {"role": "system", "content": "a dog"}
    forms = [
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"prompt": "the fox", "chosen": [ask, good], "rejected": [ask, bad]},
        {"chosen": [ask, good], "rejected": [ask, bad]},
        {"prompt": [ask], "chosen": "jumps", "rejected": "bake pies"},
    ]
    for form in forms:
        (batch,) = batches_of(trainer_for(task(), [form] * 2, batch_size=2))
        learned = [
            tokenizer.decode(r[k != -100]) for r, k in zip(batch["input_ids"][0], batch["labels"][0], strict=True)
        ]
        assert learned == ["jumps</s>", "bake pies</s>"]
        whole = tokenizer.decode(batch["input_ids"][0, 0][batch["attention_mask"][0, 0] == 1])
        assert whole == "<|user|>the fox</s><|assistant|>jumps</s>"
    with_system = answers_of({"prompt": "the fox", "chosen": [rest, ask, good], "rejected": [rest, ask, bad]})
    assert with_system == [{"prompt": [rest, ask], "completion": [said]} for said in (good, bad)]


def test_tools_systems_and_options_reach_the_chat_template(task, tokenizer):
    """Also where only later records have them; the tokens are those of `apply_chat_template`, as in TRL."""
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = (
        "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }} {% endif %}"
        "{% for tool in tools or [] %}{{ tool['name'] }} {% endfor %}" + tokenizer.chat_template
    )
    ask, rest = {"role": "user", "content": "the fox"}, {"role": "system", "content": "a dog"}
    good, bad = ({"role": "assistant", "content": text} for text in ("jumps", "bake pies"))
    plain = {"prompt": [ask], "chosen": [good], "rejected": [bad]}
    passed = {"tools": [{"name": "lazy"}], "chat_template_kwargs": {"enable_thinking": False}}
    forms = [
        plain | passed,
        {"chosen": [ask, good], "rejected": [ask, bad], **passed},
        plain | passed | {"system": "a dog"},
        {"prompt": "the fox", "chosen": [good], "rejected": [bad], "system": "a dog", **passed},
    ]
    for form in forms:
        first = {name: value for name, value in form.items() if name in ("prompt", "chosen", "rejected")}
        data = task(tokenizer=shown).prepare_dataset([first] * 9 + [form], True)
        messages = [*([rest] if "system" in form else []), ask]
        for answer, part in ((good, "chosen"), (bad, "rejected")):
            options = {"tools": passed["tools"], "enable_thinking": False, "tokenize": True, "return_dict": False}
            prompt = shown.apply_chat_template(messages, add_generation_prompt=True, **options)
            whole = shown.apply_chat_template([*messages, answer], **options)
            assert data[9][part]["input_ids"].tolist() == whole
            assert (data[9][part]["labels"] == -100).sum() == len(prompt)
            assert data[0][part]["input_ids"].tolist() != whole
    texts = {"prompt": "the fox", "chosen": " jumps", "rejected": " pies"}
    data = task(tokenizer=shown).prepare_dataset([texts] * 9 + [texts | {"system": "a dog"}], True)
    assert shown.decode(data[9]["chosen"]["input_ids"]) == "a dog\n\nthe fox jumps</s>"
    with pytest.raises(DataError, match="record 9: Expected a conversation as messages with 'tools', received 'texts'"):
        task(tokenizer=shown).prepare_dataset([texts] * 9 + [texts | passed], True)


def test_pairs_stay_together_when_an_answer_is_dropped(task):
    odd = [
        {"prompt": "the fox", "chosen": " jumps", "rejected": " jumps"},
        {"prompt": " ".join(WORDS * 4), "chosen": " dog", "rejected": " pies"},  # leaves no room for an answer
        {"prompt": "the fox", "chosen": " dog", "rejected": " ".join(WORDS * 4)},  # one of two is too long
        *PAIRS[:3],
    ]
    trainer = trainer_for(task(truncation="drop"), odd, batch_size=3)
    dataset = run_of(trainer).train_source.dataset
    report = dataset.store.report
    assert (len(dataset), report.records, report.dropped, report.pieces) == (3, 6, 3, 6)
    assert "both answers are the same" in report.reasons
    plain = run_of(trainer_for(task(), PAIRS[:3], batch_size=3)).train_source.dataset
    for mine, theirs in zip((dataset[i] for i in range(3)), (plain[i] for i in range(3)), strict=True):
        assert all(np.array_equal(mine[part]["input_ids"], theirs[part]["input_ids"]) for part in mine)


def test_the_reference_never_changes_and_is_kept_nowhere(task, tmp_path):
    trainer = trainer_for(task(gpt2()), run_dir=tmp_path / "run", val_data=PAIRS, save_every=3)
    made = trainer.task
    start = weights(made)
    trainer.fit()
    reference = made._reference
    assert not reference.training
    held = {id(p) for group in trainer.active_optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in made.model.parameters()}
    for name, p in reference.named_parameters():
        assert torch.equal(p, start[name])
        assert not p.requires_grad
        assert p.grad is None
    assert any(not torch.equal(p, start[name]) for name, p in made.model.named_parameters())
    folder = checkpoint_of(trainer)
    saved = load_file(folder / "model.safetensors")
    trained = made.model.state_dict()
    assert set(saved) <= set(trained)
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(12)[None]
    torch.testing.assert_close(opened(ids).logits, made.model.eval()(ids).logits)


@pytest.mark.parametrize("adapter", [LoRA(r=4, dropout=0.3), PrefixTuning(4)], ids=["lora", "prefix"])
def test_an_adapter_switched_off_is_the_base_model(task, tmp_path, adapter):
    base = AutoModelForCausalLM.from_config(gpt2()).eval()
    base.save_pretrained(tmp_path / "base")
    trainer = trainer_for(task(str(tmp_path / "base"), adapter), precision="no").fit()
    made = trainer.task
    assert made._reference is None
    made.set_train_mode(True)
    modes = [module.training for module in made.model.modules()]
    trainable = [p.requires_grad for p in made.model.parameters()]
    batch = {name: tensor.flatten(0, 1) for name, tensor in batches_of(trainer)[0].items()}
    found = made._reference_log_probs(batch).sum
    torch.testing.assert_close(found.flatten(), made._reference_scores(base, batch).sum)
    assert not torch.allclose(found.flatten(), made._policy_scores(made.model.eval(), batch).sum, atol=1e-4)
    made.set_train_mode(True)
    assert [module.training for module in made.model.modules()] == modes
    assert [p.requires_grad for p in made.model.parameters()] == trainable


def test_half_precision_reaches_every_parameter(task):
    """To run a model without gradients first, in the same autocast block, could leave casts without them behind."""
    for adapter in (None, LoRA(r=4, dropout=0.0)):
        trainer = trainer_for(task(adapter=adapter), precision="bf16", max_steps=3)
        before = weights(trainer.task)
        trainer.fit()
        for name, p in trainer.task.model.named_parameters():
            assert torch.equal(p, before[name]) is not p.requires_grad, name


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_accumulation_does_not_change_the_result(task, loss):
    ends = []
    for size, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer = trainer_for(
            task(loss=loss), batch_size=size, accumulation_steps=accumulation, max_steps=3, optimizer="sgd",
            precision="no",
        )  # fmt: skip
        ends.append(weights(trainer.fit().task))
    for other in ends[1:]:
        for name, p in ends[0].items():
            torch.testing.assert_close(other[name], p, rtol=1e-5, atol=1e-6)


def test_evaluation_does_not_depend_on_the_batch(task):
    made = task(label_smoothing=0.1)
    trainer_for(made).fit()
    found = [trainer_for(made, val_data=PAIRS, eval_batch_size=size).evaluate() for size in (1, 5, 16)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    made.set_train_mode(False)
    (batch,) = batches_of(trainer_for(made, batch_size=16))
    wanted = by_hand(made.model, made._reference, batch, "sigmoid", 0.1)
    assert found[0]["val/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    margin = found[0]["val/rewards/chosen"] - found[0]["val/rewards/rejected"]
    assert found[0]["val/rewards/margin"] == pytest.approx(margin, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_training_raises_the_margin(task, loss):
    made = task(loss=loss)
    before = trainer_for(made, val_data=PAIRS).evaluate()
    trainer = trainer_for(made, val_data=PAIRS, max_steps=40, batch_size=8, lr=3e-3, precision="no").fit()
    after = trainer.evaluate()
    assert after["val/rewards/margin"] > before["val/rewards/margin"]
    assert after["val/rewards/accuracy"] >= 0.9
    assert after["val/loss"] < before["val/loss"]


@pytest.mark.parametrize("adapted", [False, True])
def test_resuming_is_exact(task, tmp_path, adapted):
    AutoModelForCausalLM.from_config(gpt2()).save_pretrained(tmp_path / "base")

    def run(folder, model=None, **options):
        made = task(str(tmp_path / "base") if model is None else model, LoRA(r=4) if adapted else None)
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    _, again = toys.check_resuming(run)
    assert again.state.step == 6

    # With another reference the run would go on, towards something else.
    with pytest.raises(KeyboardInterrupt):
        run("other", callbacks=[toys.Cut()]).fit()
    with pytest.raises(DataError, match="reference model that the run started with"):
        run("other", AutoModelForCausalLM.from_config(gpt2()), resume=tmp_path / "other").fit()


def test_the_reference_may_be_another_model(task, tmp_path):
    other = AutoModelForCausalLM.from_config(llama()).eval()
    other.save_pretrained(tmp_path / "other")
    for reference in (str(tmp_path / "other"), other):
        trainer = trainer_for(task(reference=reference))
        batch = batches_of(trainer)[0]
        found = trainer.task.train_step(batch)
        wanted = by_hand(trainer.task.model, other, batch, "sigmoid", 0.1)
        torch.testing.assert_close(found.sum.double() / 4, wanted, rtol=1e-5, atol=1e-5)
    assert isinstance(trainer.task.config_dict()["reference"], str)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_the_loss_is_trls(task, tokenizer, tmp_path, loss):
    """One batch through TRL's own trainer: its tokens, its models, its loss."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = trainer_for(task(loss=loss, beta=0.3), batch_size=16)
    made = trainer.task
    reference = copy.deepcopy(made.model)
    shaken(made)
    (batch,) = batches_of(trainer)
    settings = DPOConfig(
        output_dir=str(tmp_path / "trl"), loss_type=loss, beta=0.3, max_length=32, report_to=[], use_cpu=True,
        bf16=False, per_device_train_batch_size=16, gradient_checkpointing=False,
    )  # fmt: skip
    theirs = DPOTrainer(
        copy.deepcopy(made.model), reference, settings, train_dataset=Dataset.from_list(PAIRS),
        processing_class=copy.deepcopy(tokenizer),
    )  # fmt: skip
    wanted = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
    found = made.train_step(batch)
    torch.testing.assert_close(found.sum / 16, wanted, rtol=1e-5, atol=1e-6)


def test_wrong_arguments(task):
    with pytest.raises(BadArgument, match="Did you mean 'sigmoid'"):
        task(loss="sigmoids")
    with pytest.raises(BadArgument, match="a reference with loss='ipo'"):
        task(loss="ipo", reference=None)
    with pytest.raises(BadArgument, match="no reference with loss='simpo'"):
        task(loss="simpo", reference="gpt2")
    with pytest.raises(BadArgument, match="reference to be 'base'"):
        task(reference=llama())
    with pytest.raises(BadArgument, match="which has no label smoothing"):
        task(loss="orpo", label_smoothing=0.1)
    with pytest.raises(BadArgument, match="beta to be a positive number"):
        task(beta=-1.0)
    with pytest.raises(BadArgument, match="can be disabled"):
        task(adapter=LoRA(bias="all"))
    with pytest.raises(BadArgument, match="truncation"):
        task(truncation="split")
    with pytest.raises(BadArgument, match="chunk_tokens"):
        task(chunk_tokens=-1)
    model = AutoModelForCausalLM.from_config(llama())
    with pytest.raises(BadArgument, match="other than the model that is trained"):
        task(model, reference=model)
    assert task(loss="orpo", reference=None).beta == 0.1
    assert task(loss="simpo").beta == 2.0


def test_wrong_records(task):
    with pytest.raises(DataError, match="schema 'preference'"):
        trainer_for(task(), [{"text": "the fox"}] * 4)
    with pytest.raises(DataError, match="a prompt, or two whole conversations"):
        trainer_for(task(), [{"chosen": "the fox", "rejected": "a dog"}] * 4)
    with pytest.raises(DataError, match=r"with 'prompt', 'chosen'\. The key 'rejected' is missing"):
        trainer_for(task(), [{"prompt": "the fox", "chosen": "jumps"}] * 4)
    with pytest.raises(DataError, match=r"record 3: Expected the key 'rejected', received a record with: 'prompt'"):
        trainer_for(task(), [*PAIRS[:3], {"prompt": "the fox", "chosen": "jumps"}])
