"""KTO: the loss of single answers, a KL divergence over the whole step, TRL's numbers, and something learned."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

import text_toys as toys
from text_toys import WORDS, batches_of, llama
from toys import weights
from trainformer import Mixture
from trainformer.adapters import LoRA
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.preferences import UnpairedRecords
from trainformer.run import run_of
from trainformer.tasks import KTO

PAIRS = toys.preferences()
ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
    for i, pair in enumerate(PAIRS)
]


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, adapter=None, **options):
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens", "beta": 0.5}
        return KTO(llama() if model is None else model, adapter, **{**defaults, **options})

    return make


def trainer_for(task, data=ANSWERS, **options):
    return toys.trainer_for(task, data, **options)


@pytest.fixture(scope="module")
def reference():
    """A reference that finds arbitrary answers less likely than a new model does: the divergence is positive."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(llama())
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # it is sure of itself, and wrong
    return model.eval()


def log_ratio(task, reference, row, labels):
    """Of one answer alone, without padding, in float64."""
    size = int((row != -1).sum())
    sums = []
    for model in (task.model, reference):
        found, wanted = toys.next_token_log_probs(model, row, labels, torch.ones(size))
        sums.append((found * wanted).sum())
    return sums[0] - sums[1].detach()


def by_hand(task, reference, dataset, weighted=(1.0, 1.0)):
    """The mean over all answers of a dataset, from the formulas of the paper."""
    items = [dataset[i] for i in range(len(dataset))]
    tensors = [{k: torch.tensor(v.tolist()) for k, v in item.items() if k != "label"} for item in items]
    with torch.no_grad():
        others = [log_ratio(task, reference, t["kl_input_ids"], t["kl_labels"]) for t in tensors]
    z = max(0.0, torch.stack(others).mean().item())
    losses = []
    for item, t in zip(items, tensors, strict=True):
        value = log_ratio(task, reference, t["input_ids"], t["labels"])
        gap = value - z if item["label"] else z - value
        losses.append(weighted[not item["label"]] * (1 - torch.sigmoid(task.beta * gap)))
    return torch.stack(losses).mean(), z


def test_the_loss_is_that_of_single_answers(task, reference):
    trainer = trainer_for(task(reference=reference, desirable_weight=0.8, undesirable_weight=1.3), batch_size=16)
    made = trainer.task
    (batch,) = batches_of(trainer)
    dataset = run_of(trainer).train_source.dataset
    wanted, z = by_hand(made, reference, dataset, (0.8, 1.3))
    assert z > 0.1  # otherwise the divergence would not matter
    found = made.train_step(batch)
    assert found.metrics["kl"][0].item() / 16 == pytest.approx(z, rel=1e-4)
    torch.testing.assert_close(found.sum.double() / 16, wanted, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum / 16, [made.model.lm_head.weight])
    (expected,) = torch.autograd.grad(wanted, [made.model.lm_head.weight])
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_prompts_meet_the_answers_of_others(task, tokenizer):
    """Each answer once, and never with a prompt that is its own."""
    doubled = [record for pair in PAIRS for record in UnpairedRecords([pair])]
    for data in (ANSWERS, PAIRS, doubled):
        dataset = run_of(trainer_for(task(), data)).train_source.dataset
        items = [dataset[i] for i in range(len(dataset))]
        assert len(items) == len(data) * (2 if data is PAIRS else 1)
        answers = [tokenizer.decode(item["input_ids"][item["labels"] != -100]) for item in items]
        prompts = [tokenizer.decode(item["input_ids"][item["labels"] == -100]) for item in items]
        others = [tokenizer.decode(item["kl_input_ids"][item["kl_labels"] != -100]) for item in items]
        assert sorted(others) == sorted(answers)
        for place, item in enumerate(items):
            assert tokenizer.decode(item["kl_input_ids"][item["kl_labels"] == -100]) == prompts[place]
            own = {answer for answer, prompt in zip(answers, prompts, strict=True) if prompt == prompts[place]}
            assert others[place] not in own or answers.count(others[place]) > 1
    assert [item["label"] for item in items] == [True, False] * 16


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_accumulation_does_not_change_the_result(task, loss):
    ends, logs = [], []
    for size, accumulation in ((8, 1), (4, 2), (2, 4)):
        trainer = trainer_for(
            task(loss=loss), batch_size=size, accumulation_steps=accumulation, max_steps=3, optimizer="sgd",
            precision="no", lr=0.5, log_every=1,
        )  # fmt: skip
        ends.append(weights(trainer.fit().task))
        logs.append([[r[k] for k in r if k in ("train/kl", "train/loss")] for r in trainer.state.log_history])
    for other, log in zip(ends[1:], logs[1:], strict=True):
        assert log == [pytest.approx(values, abs=1e-5) for values in logs[0]]
        for name, p in ends[0].items():
            torch.testing.assert_close(other[name], p, rtol=1e-5, atol=1e-6)
    assert ("train/kl" in trainer.state.log_history[0]) == (loss == "kto")


def test_evaluation_does_not_depend_on_the_batch(task):
    made = task()
    trainer_for(made, max_steps=4).fit()
    found = [trainer_for(made, val_data=ANSWERS, eval_batch_size=size).evaluate() for size in (1, 5, 16)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    wanted, z = by_hand(made, made._reference, run_of(trainer_for(made)).train_source.dataset)
    assert found[0]["val/loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert found[0]["val/kl"] == pytest.approx(z, abs=1e-5)
    margin = found[0]["val/rewards/chosen"] - found[0]["val/rewards/rejected"]
    assert found[0]["val/rewards/margin"] == pytest.approx(margin)


@pytest.mark.parametrize("adapted", [False, True])
def test_resuming_is_exact(task, tmp_path, adapted):
    AutoModelForCausalLM.from_config(toys.gpt2()).save_pretrained(tmp_path / "base")  # with dropout

    def run(folder, **options):
        made = task(str(tmp_path / "base"), LoRA(r=4) if adapted else None)
        settings = {"run_dir": tmp_path / folder, "save_every": 2, "accumulation_steps": 2, "batch_size": 2}
        return trainer_for(made, save_last=5, **settings, **options)

    _, again = toys.check_resuming(run)
    assert again.state.step == 6
    assert (again.task._reference is None) == adapted


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_answers_that_are_wanted_become_likelier(task, loss):
    """On prompts that were not seen: the answer with the word of the prompt is wanted, another word is not."""
    words = WORDS[:6]
    records = [
        {"prompt": f"{word} {other} :", "completion": f" {word if good else other}", "label": good}
        for word in words
        for other in words
        if word != other
        for good in (True, False)
    ]
    train, held_out = [r for i, r in enumerate(records) if i % 10 > 1], [r for i, r in enumerate(records) if i % 10 < 2]
    made = task(loss=loss)

    def share():
        """How often the desirable of two answers is likelier."""
        made.set_train_mode(False)
        dataset = made.prepare_dataset(held_out, train=False)
        with torch.no_grad():
            found = made.eval_step(made.collate_fn([dataset[i] for i in range(len(dataset))]))["log_prob"]
        return (found[::2] > found[1::2]).double().mean().item()

    before = share()
    trainer_for(made, train, val_data=held_out, max_steps=60, batch_size=16, lr=3e-3, precision="no").fit()
    metrics = trainer_for(made, train, val_data=held_out).evaluate()
    after = share()
    assert metrics["val/rewards/chosen"] > metrics["val/rewards/rejected"] + 0.5
    assert after >= max(0.9, before)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_the_loss_is_trls(task, reference, tokenizer, tmp_path, loss):
    """One batch through TRL's own trainer: its tokens, its pairing, its models, its loss."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    for data in (ANSWERS, PAIRS):
        size = len(UnpairedRecords(data))
        options = {"loss": loss, "beta": 0.3, "desirable_weight": 1.2, "reference": reference}
        trainer = trainer_for(task(**options), data, batch_size=size)
        made = trainer.task
        (batch,) = batches_of(trainer)
        settings = KTOConfig(
            output_dir=str(tmp_path / "trl"), loss_type=loss, beta=0.3, max_length=32, report_to=[], use_cpu=True,
            bf16=False, per_device_train_batch_size=size, gradient_checkpointing=False, desirable_weight=1.2,
        )  # fmt: skip
        theirs = KTOTrainer(
            copy.deepcopy(made.model), copy.deepcopy(reference), settings, train_dataset=Dataset.from_list(data),
            processing_class=copy.deepcopy(tokenizer),
        )  # fmt: skip
        wanted = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
        found = made.train_step(batch)
        torch.testing.assert_close(found.sum / size, wanted, rtol=1e-5, atol=1e-6)
        if loss == "kto":
            assert found.metrics["kl"][0].item() / size == pytest.approx(theirs._metrics["train"]["kl"][0], rel=1e-4)
            assert theirs._metrics["train"]["kl"][0] > 0.05


def test_conversations(task, tokenizer):
    ask, said = {"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}
    more = [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "bake"}]
    forms = [
        {"prompt": [ask], "completion": [said], "label": True},
        {"messages": [ask, said], "label": 1},
        {"messages": [*more, ask, said], "label": "true"},
    ]
    for form in forms:
        dataset = run_of(trainer_for(task(), [form, {**form, "label": False}])).train_source.dataset
        items = [dataset[0], dataset[1]]
        assert [tokenizer.decode(i["input_ids"][i["labels"] != -100]) for i in items] == ["jumps</s>"] * 2
        assert [i["label"] for i in items] == [True, False]
    assert tokenizer.decode(items[0]["input_ids"]).startswith("<|user|>a dog</s><|assistant|>bake")


def test_a_mixture_and_unbalanced_labels(task, caplog):
    trainer = trainer_for(task(), list(ANSWERS), max_steps=1)
    with caplog.at_level(logging.WARNING, "trainformer"):
        data = Mixture({"answers": ANSWERS, "pairs": PAIRS[:4]})
        mixed = toys.Trainer(task(), data, max_steps=3, batch_size=4, log="none", num_workers=0).fit()
    assert mixed.state.step == 3
    assert "10 desirable and 6 undesirable" in caplog.text
    assert "a desirable_weight from 0.6 to 0.8" in caplog.text
    assert trainer.check().ok


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "the fox", "completion": " jumps"}, "the key 'label', received a record with"),
        ({"prompt": "the fox", "completion": " jumps", "label": "good"}, "'label' to be true"),
        ({"prompt": "the fox", "completion": " jumps", "label": 2}, "'label' to be true"),
        ({"text": "the fox", "label": True}, "records with 'prompt', 'completion' and 'label'"),
    ],
)
def test_wrong_records(task, record, message):
    with pytest.raises(DataError, match=message):
        trainer_for(task(), [record] * 4)


def test_wrong_arguments(task):
    with pytest.raises(DataError, match="at least two records"):
        trainer_for(task(), ANSWERS[:1])
    assert len(run_of(trainer_for(task(loss="apo_zero_unpaired"), ANSWERS[:1])).train_source.dataset) == 1
    with pytest.raises(BadArgument, match="Did you mean 'kto'"):
        task(loss="kt")
    with pytest.raises(BadArgument, match="desirable_weight to be 0 or a positive number"):
        task(desirable_weight=-1)
    with pytest.raises(BadArgument, match="truncation"):
        task(truncation="split")
    with pytest.raises(BadArgument, match="reference to be 'base'"):
        task(reference=None)
