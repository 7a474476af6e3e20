"""Mixtures of experts: the router loss against transformers' and TRL's, its slices, the log, adapters and packing."""

import copy

import pytest
import torch
from datasets import Dataset
from moe_toys import CONFIGS, TEXTS, double_mixtral, mixtral, noisy_run, trained
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ranks import on_ranks
from text_toys import (
    batches_of,
    causal_maker,
    chat_tokenizer,
    check_equal,
    check_resuming,
    llama,
    preferences,
    trainer_for,
)
from trainformer.adapters import LoRA
from trainformer.callbacks import Throughput
from trainformer.checkpoint import finalize
from trainformer.core.errors import BadArgument
from trainformer.loggers import read_jsonl
from trainformer.tasks import DPO

TEXTS = TEXTS[:12]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    return causal_maker(tokenizer, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_transformers_with_its_router_loss(task, name):
    trainer = trainer_for(task(CONFIGS[name](), router_z_loss_coef=0.1), TEXTS, batch_size=len(TEXTS))
    (batch,) = batches_of(trainer)
    assert (batch["attention_mask"] == 0).any()
    loss = trainer.task.train_step(batch)
    theirs = trainer.task.model(**batch, output_router_logits=True)
    aux = loss.metrics["router_aux_loss"]
    assert (aux[0] / aux[1]).item() == pytest.approx(theirs.aux_loss.item(), rel=1e-5)
    rows = batch["attention_mask"].flatten().bool()
    z = torch.stack([logits[rows].logsumexp(-1).square().mean() for logits in theirs.router_logits]).mean()
    assert (loss.sum / loss.weight).item() == pytest.approx((theirs.loss + 0.1 * z).item(), rel=1e-5)


def test_the_loss_is_that_of_trl(task, tokenizer, tmp_path):
    trainer = trainer_for(task(mixtral()), TEXTS, batch_size=len(TEXTS))
    (batch,) = batches_of(trainer)
    loss = trainer.task.train_step(batch)
    arguments = {"report_to": [], "use_cpu": True, "bf16": False, "per_device_train_batch_size": len(TEXTS)}
    theirs = SFTTrainer(
        trainer.task.model,
        SFTConfig(str(tmp_path / "trl"), max_length=32, gradient_checkpointing=False, **arguments),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tokenizer,
    )
    (given,) = theirs.get_train_dataloader()
    with torch.no_grad():
        wanted = theirs.compute_loss(theirs.model, given).item()
    assert (loss.sum / loss.weight).item() == pytest.approx(wanted, rel=1e-5)


def test_dpo_adds_the_router_loss_as_trl_does(tokenizer, tmp_path):
    pairs = preferences()[:4]
    torch.manual_seed(0)
    task = DPO(mixtral(), max_length=32, tokenizer=tokenizer, cache_dir=tmp_path / "tokens", beta=0.1)
    trainer = trainer_for(task, pairs, batch_size=4)
    (batch,) = batches_of(trainer)
    loss = task.train_step(batch)
    arguments = {"report_to": [], "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4}
    theirs = DPOTrainer(
        task.model,
        ref_model=copy.deepcopy(task.model),
        args=DPOConfig(str(tmp_path / "trl"), beta=0.1, gradient_checkpointing=False, **arguments),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    (given,) = theirs.get_train_dataloader()
    with torch.no_grad():
        wanted = theirs.compute_loss(theirs.model, given).item()
    assert (loss.sum / loss.weight).item() == pytest.approx(wanted, rel=1e-5)
    assert loss.metrics["router_load_max"][0] >= loss.weight


def test_padding_of_packed_rows_does_not_count(task):
    trainer = trainer_for(task(mixtral(), packing=True), TEXTS, batch_size=64)
    (batch,) = batches_of(trainer)
    loss = trainer.task.train_step(batch)
    aux = loss.metrics["router_aux_loss"]
    real = []
    for ids, positions, labels in zip(batch["input_ids"], batch["position_ids"], batch["labels"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        last = slice(starts[-2], starts[-1])
        is_padding = bool((labels[last] == -100).all())
        real.append([True] * starts[-2] + [not is_padding] * (starts[-1] - starts[-2]))
    mask = torch.tensor(real)
    assert not mask.all()
    logits = trainer.task._states.router_logits
    wanted = load_balancing_loss_func(logits, 4, 2, mask)
    assert (aux[0] / aux[1]).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_per_micro_batch_it_is_the_weighted_mean_of_transformers(task):
    """`router_loss="batch"`: what transformers and TRL do, with the weights of the loss."""
    trainer = trainer_for(task(double_mixtral(), router_loss="batch"), TEXTS, batch_size=4, accumulation_steps=3)
    own = trainer.task
    assert not own.wants_window
    batches = batches_of(trainer)
    assert len(batches) == 3
    for batch in batches:
        loss = own.train_step(batch)
        theirs = own.model(**batch, output_router_logits=True)
        assert loss.sum.item() == pytest.approx(theirs.loss.item() * int(loss.weight), rel=1e-6)


def weights(trainer):
    return [p.detach().clone() for p in trainer.task.model.parameters()]


def furthest(first, second):
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def test_gradient_accumulation_changes_nothing_though_the_loss_is_no_sum(tmp_path):
    whole = noisy_run(tmp_path / "whole", scheduler=None)
    before = weights(whole)
    after = weights(whole.fit())
    sliced = noisy_run(tmp_path / "sliced", scheduler=None, batch_size=2, accumulation_steps=4).fit()
    assert furthest(before, after) > 1e-3
    assert furthest(after, weights(sliced)) < 1e-9  # transformers computes norms and routers in float32
    assert whole.evaluate() == pytest.approx(sliced.evaluate(), rel=1e-8)
    logged = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "sliced")]
    first, second = ([row["train/router_load_max"] for row in rows if "train/loss" in row] for rows in logged)
    assert first == pytest.approx(second, rel=1e-12)


def test_two_processes_train_as_one(tmp_path):
    alone = trained(0, 1)
    for found in on_ranks(trained, 2, tmp_path):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-8, atol=1e-8, msg=name)


def test_a_cut_run_resumes_bitwise(tmp_path):
    options = {"max_steps": 5, "save_every": 1, "optimizer": "adamw", "accumulation_steps": 2, "batch_size": 4}
    whole, again = check_resuming(lambda name, **more: noisy_run(tmp_path / name, **options, **more))
    assert whole.evaluate() == again.evaluate()


def test_the_log_and_evaluations_have_the_balance_apart_from_the_loss(task, tmp_path):
    torch.manual_seed(0)
    trainer = trainer_for(
        task(mixtral()), TEXTS, val_data=TEXTS[:7], max_steps=3, log_every=1, run_dir=tmp_path / "run"
    ).fit()
    logged = next(row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row)
    # Uniform routers: two of four experts for each token.
    assert logged["train/router_aux_loss"] == pytest.approx(2.0, abs=0.2)
    assert 1 <= logged["train/router_load_max"] <= 2
    assert 0.5 < logged["train/router_load_entropy"] <= 1
    found = trainer.evaluate()
    assert found["val/router_aux_loss"] == pytest.approx(2.0, abs=0.2)
    trainer.task.model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for batch in batches_of(trainer, train=False):
            theirs = trainer.task.model(**batch, output_router_logits=False)
            count = int((batch["labels"][:, 1:] != -100).sum())
            total, weight = total + theirs.loss.item() * count, weight + count
    assert found["val/loss"] == pytest.approx(total / weight, rel=1e-5)  # without the router loss
    again = trainer_for(task(trainer.task.model), TEXTS, val_data=TEXTS[:7], eval_batch_size=2).evaluate()
    assert {k: v for k, v in again.items() if "router" in k} == pytest.approx(
        {k: v for k, v in found.items() if "router" in k}, rel=1e-5
    )


def test_a_router_loss_balances_the_experts(task):
    def load(coef):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(mixtral())
        for layer in model.model.layers:
            layer.mlp.gate.weight.data[0] += 0.5  # the first expert receives most tokens
            layer.mlp.gate.weight.data[1:] *= 0.1
        trainer = trainer_for(task(model, router_aux_loss_coef=coef), TEXTS, val_data=TEXTS, max_steps=15)
        return trainer.fit().evaluate()["val/router_load_max"]

    without, balanced = load(0.0), load(1.0)
    assert balanced < without - 0.1


def test_adapters_of_attention_and_of_experts_are_merged_and_reopened(task, tokenizer, tmp_path):
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(mixtral()).save_pretrained(base)
    tokenizer.save_pretrained(base)
    ids = torch.arange(2, 12)[None]

    attention = trainer_for(task(str(base), adapter=LoRA(r=2, dropout=0)), TEXTS, max_steps=1)
    trained = {name for name, p in attention.task.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("self_attn" in name for name in trained)

    adapter = LoRA(r=2, dropout=0, target_parameters="experts")
    run = trainer_for(task(str(base), adapter=adapter), TEXTS, max_steps=3, run_dir=tmp_path / "run").fit()
    assert any("experts" in name for name, p in run.task.model.named_parameters() if p.requires_grad)
    run.task.model.eval()
    wanted = run.task.model(ids).logits
    finalize(tmp_path / "run", tmp_path / "final")
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(final(ids).logits, wanted, atol=1e-5, rtol=1e-4)
    assert (final(ids).logits - AutoModelForCausalLM.from_pretrained(base)(ids).logits).abs().max() > 1e-4


def test_gradient_checkpointing_changes_nothing(task):
    def run(**options):
        torch.manual_seed(0)
        return trainer_for(task(mixtral()), TEXTS, max_steps=2, **options).fit().task.model

    plain, saving = run(), run(gradient_checkpointing=True)
    for mine, theirs in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError):
        check_equal(plain, task(mixtral()).model)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (llama, {"router_aux_loss_coef": 0.01}, "mixture of experts that returns router logits"),
        (mixtral, {"router_aux_loss_coef": -1}, "router_aux_loss_coef to be a number"),
        (mixtral, {"router_z_loss_coef": None}, "router_z_loss_coef to be a number"),
        (mixtral, {"router_loss": "micro"}, "router_loss"),
        (llama, {"adapter": LoRA(dropout=0, target_parameters="experts")}, "stacked expert weights"),
        (mixtral, {"adapter": LoRA(dropout=0, target_parameters=["experts.up"])}, "to name stacked weights"),
    ],
)
def test_mistakes_are_named(task, model, options, words):
    with pytest.raises(BadArgument, match=words):
        trainer_for(task(model(), **options), TEXTS)


def test_adapters_of_experts_take_no_dropout():
    with pytest.raises(BadArgument, match="without dropout and DoRA"):
        LoRA(target_parameters="experts")


def test_the_flops_are_those_of_the_experts_that_a_token_chooses(task):
    """torch's counter knows no grouped matrix products, with which transformers computes experts by default."""

    def flops(implementation):
        model = AutoModelForCausalLM.from_config(mixtral(), experts_implementation=implementation)
        monitor = Throughput()
        trainer_for(task(model, router_aux_loss_coef=0.0), TEXTS, max_steps=1, callbacks=[monitor]).fit()
        return monitor.flops_per_sample

    assert flops("grouped_mm") == flops("eager") > 0
