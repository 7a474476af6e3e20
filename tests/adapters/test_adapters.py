"""Every adapter on every architecture: it trains itself alone, saves, loads and merges exactly, or is rejected."""

import subprocess
import sys

import peft
import pytest
import tiny_models
import torch
import transformers
from tiny_models import MODELS, output

from trainformer.adapters import (
    Adapter,
    LoRA,
    PrefixTuning,
    QLoRA,
    adapter_state_dict,
    is_adapted,
    merge_and_export,
)
from trainformer.adapters.base import kind_of
from trainformer.core.errors import BadArgument

ADAPTERS = {
    "lora": LoRA(r=4),
    "all-linear": LoRA(r=4, target_modules="all-linear"),
    "dora": LoRA(r=4, use_dora=True, dropout=0.0),
    "rslora": LoRA(r=4, use_rslora=True, bias="lora_only"),
    "prefix": PrefixTuning(4),
}
# Unsupported combinations, and a part of the error message.
REJECTED = {("clip", "prefix"): "keys and values from outside", ("qwen2_vl", "prefix"): "positions in one dimension"}
TABLE = [(model, adapter) for model in MODELS for adapter in ADAPTERS]


def train_a_little(model, batch, steps=1):
    """Steps towards small outputs, then noise, so that no weight of the adapter stays at its initial value."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(steps):
        output(model, batch).float().square().mean().backward()
        assert all(p.grad is not None for p in trained)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.05 * torch.randn_like(parameter))


@torch.no_grad()
def outputs_of(model, batch):
    return output(model.eval(), batch)


@pytest.mark.parametrize(("name", "choice"), TABLE)
def test_every_adapter_on_every_architecture(name, choice, tmp_path):
    tiny, adapter = MODELS[name], ADAPTERS[choice]
    batch = tiny.batch()
    if (name, choice) in REJECTED:
        with pytest.raises(BadArgument, match=REJECTED[name, choice]):
            adapter.apply(tiny.make(), kind=tiny.kind)
        return
    model = tiny.make()
    plain = outputs_of(model, batch)
    before = {id(p): p.detach().clone() for p in model.parameters()}
    adapted = adapter.apply(model, kind=tiny.kind).eval()
    assert is_adapted(adapted)
    if choice != "prefix":  # LoRA's update starts at zero; DoRA's norm of a weight costs a rounding
        torch.testing.assert_close(outputs_of(adapted, batch), plain)

    train_a_little(adapted, batch)
    biases = {id(p) for n, p in adapted.named_parameters() if n.endswith("bias") and p.requires_grad}
    for parameter in adapted.parameters():
        if id(parameter) in before and id(parameter) not in biases:
            assert not parameter.requires_grad
            assert torch.equal(parameter, before[id(parameter)])
    after = outputs_of(adapted, batch)
    assert (after - plain).abs().max() > 1e-3

    # What is saved is what is trained, and nothing else.
    files = adapter.save(adapted, tmp_path / "adapter")
    assert sorted(files) == sorted(path.name for path in (tmp_path / "adapter").iterdir())
    state, trained = adapter_state_dict(adapted), adapter.trainable(adapted)
    named = dict(adapted.named_parameters())
    assert sum(t.numel() for t in state.values()) == sum(named[n].numel() for n in trained)

    onto_plain = adapter.load(tiny.make(), tmp_path / "adapter")
    onto_adapted = adapter.load(adapter.apply(tiny.make(), kind=tiny.kind), tmp_path / "adapter")
    by_peft = peft.PeftModel.from_pretrained(tiny.make(), tmp_path / "adapter")
    for loaded in (onto_plain, onto_adapted, by_peft):
        torch.testing.assert_close(outputs_of(loaded, batch), after)
    assert adapter.trainable(onto_plain) == trained

    if choice == "prefix":
        with pytest.raises(BadArgument, match="a prefix is an input"):
            merge_and_export(adapted, tmp_path / "merged")
        return
    merge_and_export(adapted, tmp_path / "merged")
    merged = getattr(transformers, tiny.auto).from_pretrained(tmp_path / "merged")
    assert type(merged) is type(tiny.make())
    torch.testing.assert_close(outputs_of(merged, batch), after, atol=1e-5, rtol=1e-5)


def test_adapters_have_the_protocol():
    for adapter in (LoRA(), QLoRA(), PrefixTuning()):
        assert isinstance(adapter, Adapter)
    assert not isinstance(object(), Adapter)


@pytest.mark.parametrize("name", MODELS)
def test_the_kind_is_inferred_from_the_model(name):
    model = MODELS[name].make()
    assert kind_of(model) == MODELS[name].kind
    assert type(LoRA().apply(model)) is type(LoRA().apply(MODELS[name].make(), kind=MODELS[name].kind))


@pytest.mark.parametrize(
    ("adapter", "gain"),
    [
        (LoRA(dropout=0.0, target_modules="all-linear"), 0.5),
        (LoRA(dropout=0.0, target_modules="all-linear", use_dora=True), 0.5),
        (PrefixTuning(8), 0.03),  # all it can move in a model that knows nothing yet
    ],
)
def test_adapters_learn(adapter, gain):
    tiny = MODELS["llama"]
    model = adapter.apply(tiny.make(), kind=tiny.kind).train()
    ids = tiny_models.tokens(4, 12)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - gain


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_lora_matches_the_formulas_of_the_papers(use_dora, use_rslora):
    layer = torch.nn.Linear(6, 5)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    adapter = LoRA(r=4, alpha=3, use_dora=use_dora, use_rslora=use_rslora, target_modules=["0"], init=False)
    model = adapter.apply(torch.nn.Sequential(layer)).eval()
    x = torch.randn(7, 6)
    state = {name.rsplit("0.", 1)[1]: tensor for name, tensor in adapter_state_dict(model).items()}
    if use_dora:
        with torch.no_grad():
            state["lora_magnitude_vector"].add_(torch.rand(5))
    scale = 3 / (4**0.5 if use_rslora else 4)
    whole = weight + scale * state["lora_B.weight"] @ state["lora_A.weight"]
    if use_dora:
        whole = whole * (state["lora_magnitude_vector"] / whole.norm(dim=1))[:, None]
    with torch.no_grad():
        torch.testing.assert_close(model(x), x @ whole.T + bias)
    torch.testing.assert_close(adapter.merge(model)[0].weight.detach(), whole)


@pytest.mark.parametrize("name", ["llama", "t5", "llava", "clip"])
def test_gradient_checkpointing_changes_no_gradient(name):
    tiny, gradients = MODELS[name], []
    for checkpointing in (False, True):
        adapter = LoRA(r=4, dropout=0.0, init=False)
        adapter.check(kind=tiny.kind, gradient_checkpointing=checkpointing)
        base = tiny.make()
        torch.manual_seed(3)
        model = adapter.apply(base, kind=tiny.kind)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        output(model.train(), {**tiny.batch()}).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for one, other in zip(*(g.values() for g in gradients), strict=True):
        # Recomputed activations may lie at another memory alignment, so sums round differently.
        rounding = 64 * torch.finfo(one.dtype).eps * one.abs().max().item()
        torch.testing.assert_close(one, other, atol=rounding, rtol=1e-5)
        assert rounding > 0


def test_lora_runs_in_mixed_precision_with_its_own_weights_in_fp32():
    tiny = MODELS["llama"]
    model = LoRA().apply(tiny.make().to(torch.bfloat16), kind=tiny.kind)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss = output(model, tiny.batch()).float().square().mean()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_a_second_adapter_is_rejected():
    model = LoRA().apply(MODELS["llama"].make())
    for adapter in (LoRA(), PrefixTuning()):
        with pytest.raises(BadArgument, match="a model without an adapter"):
            adapter.apply(model)
    with pytest.raises(BadArgument, match="a model with an adapter"):
        LoRA().merge(MODELS["llama"].make())
    plain = LoRA().merge(model)
    assert not is_adapted(plain)
    assert all(p.requires_grad for p in plain.parameters())
    assert is_adapted(LoRA().apply(plain))


def test_merged_weights_that_are_not_finite_are_an_error():
    from trainformer.core.errors import NonFiniteError

    model = LoRA().apply(MODELS["llama"].make())
    next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        LoRA().merge(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"r": 0}, "r to be a positive integer"),
        ({"r": 2.5}, "r to be a positive integer"),
        ({"alpha": 0}, "alpha to be a positive number"),
        ({"alpha": float("nan")}, "alpha to be a positive number"),
        ({"dropout": 1.0}, "dropout to be from 0 to below 1"),
        ({"dropout": -0.1}, "dropout to be from 0 to below 1"),
        ({"bias": "some"}, "bias to be one of"),
        ({"init": "pissa"}, "would not restore"),
        ({"init": "orthogonal", "r": 3}, "an even r"),
        ({"target_modules": []}, "target_modules to be a list of names"),
        ({"modules_to_save": "head"}, "modules_to_save to be a list of names"),
    ],
)
def test_settings_out_of_range_are_rejected(arguments, message):
    with pytest.raises(BadArgument, match=message):
        LoRA(**arguments)


def test_an_unknown_kind_is_rejected():
    with pytest.raises(BadArgument, match="Did you mean 'causal_lm'"):
        LoRA().check(kind="causallm")


def test_generation_goes_through_the_adapter():
    tiny = MODELS["llama"]
    model = LoRA(init=False, alpha=64).apply(tiny.make(), kind=tiny.kind).eval()
    ids = tiny_models.tokens(1, 5)
    tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    expected = ids
    for _ in range(tokens.shape[1] - 5):
        step = outputs_of(model, {"input_ids": expected})[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, step], 1)
    assert torch.equal(tokens, expected)


@pytest.mark.slow
def test_a_compiled_model_is_one_graph_with_the_same_numbers():
    tiny = MODELS["llama"]
    model = LoRA(dropout=0.0, init=False).apply(tiny.make(), kind=tiny.kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for variant in (model, compiled):
        output(variant, tiny.batch()).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_settings_need_none_of_the_heavy_packages():
    heavy = ("peft", "transformers", "bitsandbytes", "timm")
    code = (
        "import sys; from trainformer.adapters import LoRA, QLoRA, PrefixTuning; LoRA(), QLoRA(), PrefixTuning(); "
        f"assert not set(sys.modules) & set({heavy})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
