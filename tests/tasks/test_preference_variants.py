"""CPO, and the variants of DPO: TRL's losses on the same batch, the same result however a step is divided, refusals."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import text_toys as toys
from text_toys import batches_of, llama
from toys import weights
from trainformer.core.errors import BadArgument
from trainformer.tasks import CPO, DPO

PAIRS = toys.preferences()
SFT = {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}
DPO_VARIANTS = [
    {"loss": "robust", "label_smoothing": 0.2},
    {"loss": "exo_pair", "label_smoothing": 0.01},
    *({"loss": loss} for loss in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "sigmoid_norm")),
    {"loss": "discopop", "discopop_tau": 0.1},
    *({"f_divergence": name} for name in ("forward_kl", "js_divergence", "alpha_divergence")),
    {"f_divergence": "alpha_divergence", "f_alpha": 1.5, "loss": "hinge"},
    {"ld_alpha": 0.3},
    {"ld_alpha": 0.0, "loss": "ipo"},
    SFT,
    {"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
]
CPO_VARIANTS = [
    {"loss": "sigmoid", "label_smoothing": 0.1},
    {"loss": "hinge", "cpo_alpha": 0.3},
    {"loss": "ipo"},
    {"loss": "simpo", "gamma": 0.8, "cpo_alpha": 0.0},
    {"loss": "simpo", "alpha": 0.25, "beta": 0.7, "cpo_alpha": 0.0},
]


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture(scope="module")
def models():
    """A policy and a reference."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(llama()).eval()
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return policy, reference


@pytest.fixture(scope="module")
def task(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")

    def make(kind, model=None, **options):
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": folder}
        return kind(llama() if model is None else model, **{**defaults, **options})

    return make


def settings(folder, **options):
    common = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": 32}
    return {"output_dir": str(folder), "per_device_train_batch_size": 16, **common, **options}


def names(options):
    return ",".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture(scope="module")
def trl_dpo(models, tokenizer, tmp_path_factory):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    policy, reference = copy.deepcopy(models)
    folder = tmp_path_factory.mktemp("dpo")
    return DPOTrainer(
        policy, reference, DPOConfig(**settings(folder)), train_dataset=Dataset.from_list(PAIRS),
        processing_class=copy.deepcopy(tokenizer),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trl_cpo(models, tokenizer, tmp_path_factory):
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    folder = tmp_path_factory.mktemp("cpo")
    return CPOTrainer(
        copy.deepcopy(models[0]), CPOConfig(**settings(folder)), train_dataset=Dataset.from_list(PAIRS),
        processing_class=copy.deepcopy(tokenizer),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", DPO_VARIANTS, ids=names)
def test_dpo_is_trls(task, models, trl_dpo, options):
    made = task(DPO, copy.deepcopy(models[0]), reference=models[1], beta=0.3, **options)
    (batch,) = batches_of(toys.trainer_for(made, PAIRS, batch_size=16))
    several = isinstance(made.loss, list)
    trl_dpo.loss_types = made.loss if several else [made.loss]
    trl_dpo.loss_weights = made.loss_weights if several else [1.0]
    trl_dpo.beta, trl_dpo.label_smoothing, trl_dpo.ld_alpha = made.beta, made.label_smoothing, made.ld_alpha
    trl_dpo.f_divergence_type, trl_dpo.f_alpha_divergence_coef = made.f_divergence, made.f_alpha
    trl_dpo.args.discopop_tau = made.discopop_tau
    trl_dpo._metrics["eval"].clear()  # the model is in eval mode
    wanted = trl_dpo.compute_loss(trl_dpo.model, next(iter(trl_dpo.get_train_dataloader())))
    found = made.train_step(batch)
    torch.testing.assert_close(found.sum / 16, wanted, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum / 16, [made.model.lm_head.weight])
    (expected,) = torch.autograd.grad(wanted, [trl_dpo.model.lm_head.weight])
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
    if made.losses == ["sigmoid"]:
        for name, theirs in (("rewards/chosen", "rewards/chosen"), ("rewards/margin", "rewards/margins")):
            total, weight = found.metrics[name]
            assert total.item() / weight == pytest.approx(trl_dpo._metrics["eval"][theirs][0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", CPO_VARIANTS, ids=names)
def test_cpo_is_trls(task, models, trl_cpo, options):
    made = task(CPO, copy.deepcopy(models[0]), **options)
    (batch,) = batches_of(toys.trainer_for(made, PAIRS, batch_size=16))
    renamed = {"loss": "loss_type", "gamma": "simpo_gamma"}
    for name in ("loss", "beta", "gamma", "cpo_alpha", "alpha", "label_smoothing"):
        setattr(trl_cpo, renamed.get(name, name), getattr(made, name))
    theirs = {
        f"{part}_{name}": batch[name][:, place]
        for place, part in enumerate(("chosen", "rejected"))
        for name in ("input_ids", "attention_mask", "labels")
    }
    wanted, metrics = trl_cpo.get_batch_loss_metrics(trl_cpo.model, theirs)
    found = made.train_step(batch)
    torch.testing.assert_close(found.sum / 16, wanted, rtol=1e-5, atol=1e-6)
    for name, other in (("chosen", "chosen"), ("rejected", "rejected"), ("margin", "margins")):
        total, weight = found.metrics[f"rewards/{name}"]
        assert total.item() / weight == pytest.approx(metrics[f"rewards/{other}"], rel=1e-4, abs=1e-5)
    if made.cpo_alpha:
        total, weight = found.metrics["nll_loss"]
        assert (total / weight).item() == pytest.approx(metrics["nll_loss"], rel=1e-5)


@pytest.mark.parametrize(("kind", "options"), [(CPO, {}), (DPO, SFT)], ids=["cpo", "dpo"])
def test_accumulation_does_not_change_the_result(task, kind, options):
    """A mean over pairs and one over tokens, whose number differs from micro-batch to micro-batch."""
    ends, losses = [], []
    for size, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer = toys.trainer_for(
            task(kind, **options), PAIRS, batch_size=size, accumulation_steps=accumulation, max_steps=3,
            optimizer="sgd", precision="no", log_every=1,
        )  # fmt: skip
        ends.append(weights(trainer.fit().task))
        losses.append([record["train/loss"] for record in trainer.state.log_history if "train/loss" in record])
    for other, series in zip(ends[1:], losses[1:], strict=True):
        assert series == pytest.approx(losses[0], rel=1e-5)
        for name, p in ends[0].items():
            torch.testing.assert_close(other[name], p, rtol=1e-5, atol=1e-6)


def test_a_run_and_its_evaluation(task, tmp_path):
    def run(folder, **options):
        return toys.trainer_for(
            task(CPO), PAIRS, val_data=PAIRS, run_dir=tmp_path / folder, save_every=2, save_last=5, lr=3e-3, **options
        )

    before = run("before").evaluate()
    whole, _ = toys.check_resuming(run)
    after = whole.evaluate()
    assert after["val/loss"] == pytest.approx(after["val/preference_loss"] + after["val/nll_loss"], rel=1e-6)
    assert after["val/loss"] < before["val/loss"]
    other = toys.trainer_for(whole.task, PAIRS, val_data=PAIRS, eval_batch_size=3).evaluate()
    assert other == pytest.approx(after, rel=1e-5, abs=1e-6)
    assert whole.task.config_dict()["cpo_alpha"] == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DPO, {"loss": "aot"}, "loss to be one of"),
        (DPO, {"loss": ["sft"]}, "a preference loss beside 'sft'"),
        (DPO, {"loss": "sft"}, "loss to be one of"),
        (DPO, {"loss": ["sigmoid", "simpo"]}, "'simpo' to be the only preference loss"),
        (DPO, {"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one number for each"),
        (DPO, {"loss_weights": [1.0]}, "no loss_weights with a single loss"),
        (DPO, {"loss": []}, "a name or a list of names"),
        (DPO, {"loss": "exo_pair"}, "label_smoothing above 0 with 'exo_pair'"),
        (DPO, {"loss": "apo_zero", "label_smoothing": 0.1}, "has no label smoothing"),
        (DPO, {"loss": "nca_pair", "f_divergence": "forward_kl"}, "f_divergence='reverse_kl' with 'nca_pair'"),
        (DPO, {"f_divergence": "kl"}, "f_divergence to be one of"),
        (DPO, {"ld_alpha": 2}, "ld_alpha to be None, or from 0 to 1"),
        (DPO, {"ld_alpha": 0.5, "loss": "simpo"}, "ld_alpha=None with 'orpo', 'simpo' or 'sft'"),
        (CPO, {"loss": "orpo"}, "loss to be one of"),
        (CPO, {"cpo_alpha": -1}, "cpo_alpha to be 0 or a positive number"),
        (CPO, {"alpha": float("nan")}, "alpha to be a number"),
        (CPO, {"truncation": "split"}, "truncation to be"),
    ],
)
def test_wrong_arguments(task, kind, options, message):
    with pytest.raises(BadArgument, match=message):
        task(kind, **options)
