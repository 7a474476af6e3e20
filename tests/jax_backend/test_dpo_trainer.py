"""DPO on JAX: losses and weights of the torch task, and reference log probabilities that are computed once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from step_zero import ON_TORCH, ONE_STEP, assert_same_gradients, assert_same_metrics, metrics_of
from text_trainer_toys import (
    batch_of,
    devices,
    furthest_weight,
    make_folder,
    save_changed,
    torch_run,
    trainer_of,
)
from transformers import AutoModelForCausalLM

import text_toys as toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import DPOConfig, DPOTrainer
from trainformer.jax.text_arguments import LoRAConfig
from trainformer.models.jax import apply_lora, load_model, save_lora
from trainformer.tasks.language.dpo import DPO

PAIRS = toys.preferences()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    """Another model of the same shape."""
    return save_changed(folder, tmp_path_factory.mktemp("other"))


def dpo(folder, where, data=PAIRS, **given):
    return trainer_of(DPOTrainer, DPOConfig, folder, data, where, **given)


def check_against_torch(mine, wanted):
    """All evaluation metrics match those of torch."""
    assert {name.removeprefix("eval_") for name in mine} == {name.removeprefix("val/") for name in wanted}
    for name, value in mine.items():
        assert value == pytest.approx(wanted[f"val/{name.removeprefix('eval_')}"], abs=1e-4), name


def test_two_steps_match_the_torch_task(folder, tmp_path):
    task = DPO(str(folder), max_length=32, cache_dir=tmp_path / "t", label_smoothing=0.1)
    theirs = torch_run(task, PAIRS, tmp_path / "torch")
    mine = dpo(folder, tmp_path, optimizer="sgd", label_smoothing=0.1, options={"eval_dataset": PAIRS})
    assert mine.eval() == pytest.approx({"eval_loss": np.log(2), **_rewards(0.0)}, abs=1e-5)
    mine.train()
    found = mine.eval()
    check_against_torch(found, theirs.evaluate())
    assert found["eval_loss"] < np.log(2) - 0.1
    assert furthest_weight(mine.save_pretrained(tmp_path / "saved"), theirs.task.model) <= 1e-4


def _rewards(value):
    return {f"eval_rewards/{name}": value for name in ("accuracy", "chosen", "margin", "rejected")}


@pytest.mark.parametrize("loss", ["ipo", "orpo", pytest.param("simpo", marks=pytest.mark.slow)])
def test_other_losses_and_references_match_torch(folder, other, tmp_path, loss):
    reference = {"reference": str(other)} if loss == "ipo" else {}
    task = DPO(str(folder), max_length=32, cache_dir=tmp_path / "t", loss=loss, **reference)
    wanted = toys.trainer_for(task, PAIRS, val_data=PAIRS).evaluate()
    named = {"reference_model": str(other)} if loss == "ipo" else {}
    mine = dpo(folder, tmp_path, loss_type=loss, eval_batch_size=16, options={"eval_dataset": PAIRS, **named})
    check_against_torch(mine.eval(), wanted)
    # Ten pairs in batches of 8: padding rows do not count.
    parts = [dpo(folder, tmp_path, loss_type=loss, eval_batch_size=8, options={"eval_dataset": some, **named}).eval()
        for some in (PAIRS[:10], PAIRS[10:])]  # fmt: skip
    for name, value in mine.eval().items():
        assert (10 * parts[0][name] + 6 * parts[1][name]) / 16 == pytest.approx(value, abs=1e-5)


SUMS = {
    "supervised": {
        "loss": ["apo_zero", "nca_pair", "bco_pair", "sppo_hard", "sft"],
        "loss_weights": [1, 2, 0.5, 0.1, 1],
    },
    "smoothed": {"loss": ["robust", "exo_pair", "sigmoid"], "label_smoothing": 0.1, "f_divergence": "alpha_divergence"},
    "others": {"loss": ["sigmoid_norm", "apo_down", "discopop", "hinge"], "beta": 0.3},
}


@pytest.mark.parametrize("name", SUMS)
def test_the_first_step_with_several_losses_is_that_of_torch(folder, other, tmp_path, name):
    given = dict(SUMS[name])
    task = DPO(str(folder), max_length=32, cache_dir=tmp_path / "t", reference=str(other), **given)
    theirs = torch_run(task, PAIRS, tmp_path / "torch", **ON_TORCH)
    if "f_divergence" in given:
        given["f_divergence_type"] = given.pop("f_divergence")
    given["loss_type"] = given.pop("loss")
    sizes = {"gradient_accumulation_steps": 2} if name == "supervised" else {}
    options = {"reference_model": other, "eval_dataset": PAIRS}
    mine = dpo(folder, tmp_path, **ONE_STEP, **sizes, **given, options=options)
    state = mine.train()
    assert_same_metrics(metrics_of(mine), metrics_of(theirs))
    assert_same_gradients(state, folder, theirs.task.model)
    if name == "supervised":
        assert "nll_loss" in metrics_of(mine)
        check_against_torch(mine.eval(), theirs.evaluate())


def test_reference_scores_are_log_probabilities_of_single_answers(folder, other, tmp_path):
    trainer = dpo(folder, tmp_path, shuffle=False, options={"reference_model": load_model(other)})
    batch, model = batch_of(trainer), AutoModelForCausalLM.from_pretrained(other)
    wanted = np.empty((len(PAIRS), 2))
    with torch.no_grad():
        for place in np.ndindex(wanted.shape):
            row = [torch.as_tensor(batch[name][place]) for name in ("input_ids", "labels", "attention_mask")]
            found, learned = toys.next_token_log_probs(model, *row)
            wanted[place] = float((found * learned).sum())
    np.testing.assert_allclose(batch["reference"], wanted, atol=1e-4)


def test_the_reference_is_computed_once_and_a_resumed_run_uses_the_same(folder, tmp_path, monkeypatch):
    def run(model, steps, **options):
        fields = {"max_steps": steps, "resume": "auto", "total_batch_size": 4, "num_train_epochs": 3}
        return dpo(model, tmp_path, optimizer="sgd", **fields, options=options)

    first = run(folder, 2)
    (kept,) = (tmp_path / "tokens").glob("*-reference-*.npy")
    written = kept.stat().st_mtime_ns
    first.train()
    monkeypatch.setattr("trainformer.jax.reference.NumpySource", None)  # nothing may be computed again
    again = run(folder, 4)
    assert kept.stat().st_mtime_ns == written
    np.testing.assert_array_equal(batch_of(again)["reference"], batch_of(first)["reference"])
    assert again.train().step == 4
    monkeypatch.undo()
    # The trained model is another reference.
    changed = run(first.save_pretrained(tmp_path / "trained"), 6)
    with pytest.raises(DataError, match="reference model that the run started with"):
        changed.train()


def test_with_lora_the_reference_is_the_base_model(folder, tmp_path):
    model = load_model(folder)
    apply_lora(model, r=4, targets="all-linear")
    for layer in (model.layers.attention.q_proj, model.layers.mlp.up_proj):
        layer.lora_b[...] = 0.3 + layer.lora_b[...]
    adapter = save_lora(model, tmp_path / "adapter")
    plain = dpo(folder, tmp_path / "plain", shuffle=False, optimizer="sgd")
    options = {"lora": LoRAConfig(folder=adapter), "eval_dataset": PAIRS}
    adapted = dpo(folder, tmp_path / "adapted", shuffle=False, optimizer="sgd", options=options)
    np.testing.assert_allclose(batch_of(adapted)["reference"], batch_of(plain)["reference"], atol=1e-5)
    before = adapted.eval()
    assert abs(before["eval_rewards/chosen"]) > 0.01  # the adapter changes the rewards
    state = adapted.train()
    assert adapted.eval()["eval_loss"] < before["eval_loss"]
    assert all(path.endswith(("lora_a", "lora_b")) for path in state.trainable)
    assert (Path(adapted.save_pretrained(tmp_path / "saved")) / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_metrics_do_not_depend_on_the_mesh(folder, tmp_path):
    def trained(dims):
        options = {"eval_dataset": PAIRS, "mesh": devices(dims)}
        sizes = {"total_batch_size": 8, "gradient_accumulation_steps": 2, "eval_batch_size": 8}
        trainer = dpo(folder, tmp_path / str(dims), optimizer="sgd", options=options, **sizes)
        trainer.train()
        return trainer.eval()

    assert trained((2, 1, 2, 1)) == pytest.approx(trained((1, 1, 1, 1)), abs=1e-4)


def test_reference_free_runs_compute_no_reference(folder, tmp_path):
    trainer = dpo(folder, tmp_path, reference_free=True)
    assert "reference" not in batch_of(trainer)
    assert not list((tmp_path / "tokens").glob("*-reference-*"))


def test_invalid_arguments_are_refused(folder, tmp_path):
    for wrong, words in (
        ({"loss_type": "sigmod"}, "Did you mean 'sigmoid'"),
        ({"beta": 0.0}, "beta to be a positive number"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "which does not support it"),
        ({"packing": True}, "packing=False"),
        ({"truncation": "split"}, "truncate"),
        ({"loss_type": "exo_pair"}, "label_smoothing above 0"),
        ({"loss_type": ["sigmoid", "simpo"]}, "'simpo' to be the only"),
        ({"loss_type": ["sft"]}, "loss_type to be one of"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "one number for each"),
        ({"loss_type": 3}, "loss_type to be a string or a list, received 3"),
        ({"loss_weights": 3.0}, "loss_weights to be a list or None"),
        ({"loss_type": "ipo", "f_divergence_type": "forward_kl"}, "f_divergence_type='reverse_kl' with 'ipo'"),
    ):
        with pytest.raises(BadArgument, match=words):
            DPOConfig(**wrong)
    with pytest.raises(BadArgument, match="no reference_model"):
        dpo(folder, tmp_path, loss_type="simpo", options={"reference_model": folder})
    model = load_model(folder)
    with pytest.raises(BadArgument, match="other than the trained model"):
        dpo(model, tmp_path, options={"reference_model": model, "processing_class": folder})
    with pytest.raises(DataError, match="preference"):
        dpo(folder, tmp_path, [{"text": "nothing to compare"}])
    assert DPOConfig(loss_type="simpo").beta == 2.0
