"""What a checkpoint of an adapter holds: the adapter alone, with resized embeddings where they are in no base."""

import json

import peft
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import MODELS, VOCAB, output

from trainformer.adapters import (
    LoRA,
    PrefixTuning,
    adapter_state_dict,
    load_adapter_state_dict,
    merge_and_export,
)
from trainformer.core.errors import BadArgument, DataError

NEW = [VOCAB, VOCAB + 1]
BATCH = {"input_ids": torch.tensor([[1, 5, *NEW, 3]])}


def stored(folder, tied):
    """A Llama on disk, with or without an output layer of its own."""
    torch.manual_seed(0)
    config = tiny_models.llama().config
    config.tie_word_embeddings = tied
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def resized(folder, rows=VOCAB + 2):
    """The model with two more tokens, whose embeddings are random each time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows)
    return model.eval()


def perturbed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def outputs_of(model):
    return output(model.eval(), BATCH)


CASES = {
    "frozen": LoRA(),
    "rows": LoRA(trainable_token_indices=NEW),
    "rows of both": LoRA(trainable_token_indices={"embed_tokens": NEW, "lm_head": NEW}),
    "input in full": LoRA(modules_to_save=["embed_tokens"]),
    "output in full": LoRA(modules_to_save=["lm_head"]),
    "both in full": LoRA(modules_to_save=["embed_tokens", "lm_head"]),
    "input adapted": LoRA(target_modules=["q_proj", "embed_tokens"]),
    "prefix": PrefixTuning(4),
}


# LoRA on tied embeddings is rejected.
@pytest.mark.parametrize(
    ("tied", "case"),
    [(tied, case) for tied in (True, False) for case in CASES if not (tied and case == "input adapted")],
)
def test_tokens_that_were_added_are_not_lost(tied, case, tmp_path):
    base, adapter = stored(tmp_path / "base", tied), CASES[case]
    assert not torch.equal(outputs_of(resized(base)), outputs_of(resized(base)))  # the new rows are random
    model = perturbed(adapter.apply(resized(base), kind="causal_lm"))
    after = outputs_of(model)
    adapter.save(model, tmp_path / "adapter")
    torch.testing.assert_close(outputs_of(adapter.load(resized(base), tmp_path / "adapter")), after)
    torch.testing.assert_close(outputs_of(adapter.load(adapter.apply(resized(base)), tmp_path / "adapter")), after)
    torch.testing.assert_close(outputs_of(peft.PeftModel.from_pretrained(resized(base), tmp_path / "adapter")), after)
    if case != "prefix":
        merge_and_export(model, tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(outputs_of(merged), after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tied", "case", "whole"),
    [(True, "rows", 0), (False, "rows of both", 0), (True, "frozen", 1), (False, "frozen", 2), (False, "rows", 2)],
)
def test_embeddings_are_saved_in_full_only_where_new_rows_would_be_lost(tied, case, whole, tmp_path):
    model = CASES[case].apply(resized(stored(tmp_path, tied)))
    state = adapter_state_dict(model)
    assert sum(tensor.shape == (VOCAB + 2, 32) for tensor in state.values()) == whole
    assert not any(tensor.shape == (VOCAB + 2, 32) for tensor in adapter_state_dict(model, embeddings=False).values())


def test_embeddings_of_their_old_size_are_not_saved(tmp_path):
    base = stored(tmp_path, True)
    state = adapter_state_dict(LoRA().apply(transformers.AutoModelForCausalLM.from_pretrained(base)))
    assert all(".lora_" in name for name in state)
    forced = adapter_state_dict(LoRA().apply(transformers.AutoModelForCausalLM.from_pretrained(base)), embeddings=True)
    assert len(forced) == len(state) + 1


def test_untrained_added_tokens_are_reported(tmp_path, caplog):
    base = stored(tmp_path, True)
    LoRA(trainable_token_indices=NEW).apply(resized(base))
    assert "tokens were added" not in caplog.text
    LoRA().apply(resized(base))
    assert f"trainable_token_indices=list(range({VOCAB}, {VOCAB + 2}))" in caplog.text


def test_an_adapter_is_a_small_part_of_its_model(tmp_path):
    tiny = MODELS["llama"]
    tiny.make().save_pretrained(tmp_path / "base")
    model = LoRA(r=1).apply(tiny.make(), kind="causal_lm")
    LoRA().save(model, tmp_path / "adapter")
    sizes = [(tmp_path / p).stat().st_size for p in ("base/model.safetensors", "adapter/adapter_model.safetensors")]
    assert sizes[1] < 0.1 * sizes[0]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == adapter_state_dict(model).keys()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["inference_mode"] is True
    assert not model.peft_config["default"].inference_mode


def test_a_saved_state_dict_resumes_training_bitwise():
    tiny = MODELS["llama"]

    def run(model, optimizer, steps):
        for _ in range(steps):
            output(model, tiny.batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin(seed):
        base = tiny.make()
        torch.manual_seed(seed)
        model = LoRA(dropout=0.0).apply(base)
        return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, optimizer = begin(1)
    run(model, optimizer, 2)
    saved = {name: tensor.clone() for name, tensor in adapter_state_dict(model).items()}
    saved_optimizer = {**optimizer.state_dict()}
    again, second = begin(2)
    load_adapter_state_dict(again, saved)
    second.load_state_dict(torch.load(_file(saved_optimizer), weights_only=True))
    run(model, optimizer, 2)
    run(again, second, 2)
    for one, other in zip(adapter_state_dict(model).values(), adapter_state_dict(again).values(), strict=True):
        assert torch.equal(one, other)


def _file(state):
    torch.save(state, "optimizer.pt")
    return "optimizer.pt"


def test_wrappers_are_unwrapped():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = LoRA().apply(MODELS["llama"].make())
    names = list(adapter_state_dict(model))
    assert list(adapter_state_dict(torch.compile(model, backend="eager"))) == names
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        assert list(adapter_state_dict(torch.nn.parallel.DistributedDataParallel(model))) == names
    finally:
        torch.distributed.destroy_process_group()


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    tiny = MODELS["llama"]
    model = LoRA(r=4).apply(tiny.make())
    before = {name: tensor.clone() for name, tensor in adapter_state_dict(model).items()}
    other = adapter_state_dict(LoRA(r=2).apply(tiny.make()))
    first = next(iter(before))
    for state, message in (
        (other, "of another shape"),
        ({name: tensor + 1 for name, tensor in before.items() if name != first}, "1 missing"),
        ({**before, "stranger": torch.zeros(1)}, r"1 not in the model \(stranger\)"),
    ):
        with pytest.raises(DataError, match=message):
            load_adapter_state_dict(model, state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_state_dict(model).items())
    with pytest.raises(DataError, match=r"with adapter_config\.json"):
        LoRA().load(tiny.make(), tmp_path)
    with pytest.raises(BadArgument, match="a model with an adapter"):
        adapter_state_dict(tiny.make())


def test_the_error_names_the_size_of_a_resized_vocabulary(tmp_path):
    base = stored(tmp_path / "base", True)
    adapter = LoRA()
    adapter.save(adapter.apply(resized(base)), tmp_path / "adapter")
    with pytest.raises(DataError, match=rf"resize_token_embeddings\({VOCAB + 2}\)"):
        adapter.load(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")


def test_an_adapter_of_another_architecture_is_rejected(tmp_path):
    LoRA().save(LoRA().apply(MODELS["gpt2"].make()), tmp_path)
    with pytest.raises(BadArgument, match="the model that the adapter in"):
        LoRA().load(MODELS["bert"].make(), tmp_path)
