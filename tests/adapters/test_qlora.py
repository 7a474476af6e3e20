"""QLoRA on the CPU: quantised on loading, trained, saved, loaded and merged in full precision, or rejected."""

import peft
import pytest
import tiny_models
import torch
import transformers
from tiny_models import MODELS, output

from trainformer.adapters import LoRA, QLoRA, adapter_state_dict, is_adapted, merge_and_export
from trainformer.adapters.qlora import is_quantised, prepare_quantised
from trainformer.core.errors import BadArgument, MissingDependency

bitsandbytes = pytest.importorskip("bitsandbytes")


def loaded(name, folder, adapter, dtype=torch.float32):
    """The tiny model in 4 bits; bitsandbytes quantises while loading, so it is saved first."""
    if not (folder / "config.json").exists():
        MODELS[name].make().to(dtype).save_pretrained(folder)
    auto = getattr(transformers, MODELS[name].auto)
    return auto.from_pretrained(folder, **adapter.load_options(MODELS[name].kind))


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def outputs_of(model, batch):
    return output(model.eval(), batch)


@pytest.mark.parametrize("name", MODELS)
def test_qlora_on_every_architecture(name, tmp_path):
    tiny, adapter = MODELS[name], QLoRA(r=4)
    batch = tiny.batch()
    model = loaded(name, tmp_path / "base", adapter)
    assert is_quantised(model)
    adapted = adapter.apply(model, kind=tiny.kind)
    output(adapted.train(), batch).square().mean().backward()
    assert all((p.grad is not None) == p.requires_grad for p in adapted.parameters())
    assert all(".lora_" in n for n in adapter.trainable(adapted))
    after = outputs_of(perturbed(adapted), batch)

    adapter.save(adapted, tmp_path / "adapter")
    torch.testing.assert_close(
        outputs_of(adapter.load(loaded(name, tmp_path / "base", adapter), tmp_path / "adapter"), batch), after
    )
    base = loaded(name, tmp_path / "base", adapter)
    prepare_quantised(base)
    torch.testing.assert_close(outputs_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), batch), after)

    merge_and_export(adapted, tmp_path / "merged")
    merged = getattr(transformers, tiny.auto).from_pretrained(tmp_path / "merged")
    assert not is_quantised(merged)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(outputs_of(merged, batch), after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arguments", [{"use_dora": True}, {"trainable_token_indices": [3, 4]}, {"quant_type": "fp4"}])
def test_variants_merge_too(arguments, tmp_path):
    adapter, batch = QLoRA(**arguments), MODELS["llama"].batch()
    batch["input_ids"][:, 0] = 3
    model = perturbed(adapter.apply(loaded("llama", tmp_path, adapter)))
    before = outputs_of(model, batch)
    plain = adapter.merge(model)
    assert type(plain) is transformers.LlamaForCausalLM
    assert not is_adapted(plain)
    torch.testing.assert_close(outputs_of(plain, batch), before, atol=1e-5, rtol=1e-5)


def test_adding_to_four_bits_would_lose_the_update(tmp_path):
    """What peft's own merge does to the same adapter: the sum is rounded to 16 values per block again."""
    adapter, batch = QLoRA(), MODELS["llama"].batch()
    model = perturbed(adapter.apply(loaded("llama", tmp_path / "base", adapter)))
    adapter.save(model, tmp_path / "adapter")
    after = outputs_of(model, batch)
    rounded = model.merge_and_unload()
    again = adapter.load(loaded("llama", tmp_path / "base", adapter), tmp_path / "adapter")
    errors = [float((outputs_of(m, batch) - after).abs().max()) for m in (rounded, adapter.merge(again))]
    assert errors[0] > 100 * errors[1]


def test_an_evaluation_does_not_change_what_is_trained(tmp_path):
    """On some CPUs bitsandbytes repacks weights when it evaluates, and later steps have no gradients below them."""
    adapter, batch = QLoRA(init=False, dropout=0.0), MODELS["llama"].batch()
    gradients = []
    for evaluate in (False, True):
        base = loaded("llama", tmp_path, adapter)
        torch.manual_seed(1)
        model = adapter.apply(base)
        if evaluate:
            outputs_of(model, batch)
        output(model.train(), batch).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)


def test_the_norms_of_a_half_precision_model_compute_in_fp32(tmp_path):
    adapter, batch = QLoRA(compute_dtype="bfloat16"), MODELS["llama"].batch()
    model = adapter.apply(loaded("llama", tmp_path, adapter, torch.bfloat16))
    dtypes = {n: p.dtype for n, p in model.named_parameters() if not p.requires_grad and "proj" not in n}
    assert {t for n, t in dtypes.items() if "norm" in n} == {torch.float32}
    assert {t for n, t in dtypes.items() if "norm" not in n} == {torch.bfloat16}
    # Both with autocast (training) and without (generation).
    with torch.autocast("cpu", torch.bfloat16):
        output(model.train(), batch).float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    assert outputs_of(model, batch).dtype == torch.bfloat16
    assert model.generate(input_ids=batch["input_ids"], max_new_tokens=2).shape == (2, 12)
    before = outputs_of(perturbed(model), batch)
    plain = adapter.merge(model)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    torch.testing.assert_close(outputs_of(plain, batch), before, atol=2e-2, rtol=2e-2)


def test_gradient_checkpointing(tmp_path):
    adapter, batch = QLoRA(init=False, dropout=0.0), MODELS["llama"].batch()
    gradients = []
    for checkpointing in (False, True):
        base = loaded("llama", tmp_path, adapter)
        torch.manual_seed(1)
        model = adapter.apply(base).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        output(model, batch).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_the_head_of_a_classifier_is_neither_quantised_nor_frozen(tmp_path):
    adapter = QLoRA()
    tiny_models.distilbert().save_pretrained(tmp_path / "base")

    def fresh():
        auto = transformers.AutoModelForSequenceClassification
        return auto.from_pretrained(tmp_path / "base", **adapter.load_options("sequence_classification"))

    model = fresh()
    four_bit = [name for name, part in model.named_modules() if isinstance(part, bitsandbytes.nn.Linear4bit)]
    assert four_bit
    assert not any("classifier" in name for name in four_bit)
    adapted = adapter.apply(model, kind="sequence_classification")
    batch = MODELS["bert"].batch()
    output(adapted.train(), batch).square().mean().backward()
    heads = [name for name in adapter.trainable(adapted) if ".lora_" not in name]
    assert len(heads) == 4
    before = outputs_of(perturbed(adapted), batch)
    adapter.save(adapted, tmp_path / "adapter")
    torch.testing.assert_close(outputs_of(adapter.load(fresh(), tmp_path / "adapter"), batch), before)
    torch.testing.assert_close(outputs_of(adapter.merge(adapted), batch), before, atol=1e-5, rtol=1e-5)


def test_the_checkpoint_has_no_quantised_weights(tmp_path):
    adapter = QLoRA(r=4)
    state = adapter_state_dict(adapter.apply(loaded("llama", tmp_path, adapter)))
    same = adapter_state_dict(LoRA(r=4).apply(MODELS["llama"].make()))
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in same.items()}


def test_the_quantisation_config_follows_the_settings():
    config = QLoRA(quant_type="fp4", double_quant=False, compute_dtype="bfloat16").load_options()["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "fp4", False)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert QLoRA().load_options()["quantization_config"].bnb_4bit_quant_type == "nf4"
    assert QLoRA().optimizer == "paged_adamw_8bit"
    assert QLoRA(paged_optimizer=False).optimizer is None
    assert LoRA().load_options() == {}


def test_a_model_in_full_precision_is_rejected_with_advice(tmp_path):
    for use in (lambda m: QLoRA().apply(m), lambda m: QLoRA().check(model=m), lambda m: QLoRA().load(m, tmp_path)):
        with pytest.raises(BadArgument, match=r"LlamaForCausalLM in torch\.float32.*load_options\(\)"):
            use(MODELS["llama"].make())
    with pytest.raises(BadArgument, match="Use LoRA"):
        QLoRA().check(kind="vision")
    with pytest.raises(BadArgument, match="quant_type to be one of 'nf4', 'fp4'"):
        QLoRA(quant_type="int4")
    with pytest.raises(BadArgument, match="compute_dtype to be one of"):
        QLoRA(compute_dtype="int8")
    with pytest.raises(BadArgument, match="r to be a positive integer"):
        QLoRA(r=0)


def test_without_bitsandbytes_it_is_rejected_before_anything_is_loaded(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for use in (lambda: QLoRA().check(kind="causal_lm"), lambda: QLoRA().load_options()):
        with pytest.raises(MissingDependency, match=r"pip install 'trainformer\[adapters\]'"):
            use()
    LoRA().check(kind="causal_lm")
