"""Models cut into stages, in one process: every stage runs the model's own forward pass, as far as it goes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers
from pipeline_runs import Classify, tower
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from text_toys import bert, gpt2, t5
from toys import largest_difference
from trainformer.core.errors import BadArgument
from trainformer.core.types import Loss, Mean
from trainformer.distributed.pipeline import Pipeline
from trainformer.distributed.pipeline.microbatches import loss_terms, split_batch
from trainformer.distributed.pipeline.stages import StagedModel, balanced_boundaries

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": WINDOWED,
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
}


def decoder(family):
    torch.manual_seed(0)
    if family == "GPT2":
        return AutoModelForCausalLM.from_config(gpt2(n_layer=4, vocab_size=64)).eval()
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).eval()


def batches():
    ids = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None].repeat(3, 1)
    yield {"input_ids": ids, "labels": ids}
    yield {"input_ids": ids, "labels": ids, "attention_mask": mask}
    yield {"input_ids": ids, "labels": ids, "position_ids": positions}


def gradients_of(model, loss):
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", [*FAMILIES, "GPT2"])
def test_stages_of_a_decoder_compute_what_the_model_does(family):
    model = decoder(family)
    staged = StagedModel(model)
    staged.split(3, None)
    assert staged.boundaries == [0, 1, 3, 4]
    for batch in batches():
        step = lambda batch: model(**batch).loss  # noqa: E731
        whole = step(batch)
        wanted = gradients_of(model, whole)
        hidden = None
        for stage in range(3):
            hidden = staged.run(stage, step, batch, hidden)
        assert torch.equal(hidden, whole)
        found = gradients_of(model, hidden)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_layers_of_other_ranks_are_on_meta_and_names_stay():
    model, whole = decoder("Llama"), decoder("Llama")
    staged = StagedModel(model)
    staged.split(2, [1, 3])
    staged.keep_stages({1})
    names = set(model.state_dict())
    assert names < set(whole.state_dict())
    assert "model.embed_tokens.weight" not in names
    assert "model.layers.3.mlp.up_proj.weight" in names
    batch = next(iter(batches()))
    hidden = whole.model.layers[0]
    received = {}
    handle = hidden.register_forward_hook(lambda layer, args, output: received.update(hidden=output))
    wanted = whole(**batch).loss
    handle.remove()
    assert torch.equal(staged.run(1, lambda batch: model(**batch).loss, batch, received["hidden"]), wanted)
    with pytest.raises(BadArgument, match="on another rank"):
        model(**batch)
    with pytest.raises(BadArgument, match="another trainer has split into stages"):
        StagedModel(model)


def test_a_split_can_be_given_in_numbers_or_names():
    staged = StagedModel(tower())
    staged.split(3, [4, 4, 8])
    assert staged.boundaries == [0, 4, 8, 16]
    staged.split(3, ["3", "9"])
    assert staged.boundaries == [0, 3, 9, 16]
    nested = StagedModel(decoder("GPT2"))
    nested.split(2, ["transformer.h.0", "transformer.h.3"])
    assert nested.boundaries == [0, 3, 4]


@pytest.mark.parametrize(
    ("stages", "split", "message"),
    [
        (9, None, "at least 9 layers that have parameters"),
        (2, [4, 4], "sum is 16"),
        (2, [4, 4, 8], "2 numbers"),
        (2, ["5", "3"], "in their order"),
        (2, ["3", "nine"], "names of layers, received 'nine'"),
        (2, [15, 1.0], "numbers of layers, or names"),
        (3, [1, 7, 8], "stage 0 .layers 0 to 0. without any"),
    ],
)
def test_a_bad_split_is_refused(stages, split, message):
    with pytest.raises(BadArgument, match=message):
        StagedModel(tower()).split(stages, split)


def test_stages_are_balanced_by_parameters():
    sizes = [7, 1, 1, 3, 3, 9, 2, 2]
    edges = balanced_boundaries(sizes, [True] * 8, 3)
    largest = max(sum(sizes[low:high]) for low, high in pairwise(edges))
    ways = [[0, a, b, 8] for a in range(1, 7) for b in range(a + 1, 8)]
    assert largest == min(max(sum(sizes[w[i] : w[i + 1]]) for i in range(3)) for w in ways)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layers = tower()

    def forward(self, x):
        return self.layers(self.flatten(x))


@pytest.mark.parametrize("make", [Branching, lambda: nn.Linear(2, 2), "bert", "t5", "router"])
def test_models_that_cannot_be_split_are_refused(make):
    models = {
        "bert": lambda: AutoModelForCausalLM.from_config(bert(is_decoder=True)),
        "t5": lambda: AutoModelForSeq2SeqLM.from_config(t5()),
        "router": lambda: decoder_with_router(),
    }
    model = models[make]() if isinstance(make, str) else make()
    with pytest.raises(BadArgument, match=r"Sequential|output_router_logits=False"):
        StagedModel(model)


def decoder_with_router():
    options = {**SIZES, **HEADS, "num_local_experts": 2, "output_router_logits": True}
    return AutoModelForCausalLM.from_config(transformers.MixtralConfig(**options))


def test_a_model_around_one_sequential_is_split_there():
    model = Wrapped()
    staged = StagedModel(model)
    staged.split(2, None)
    x = torch.randn(3, 2, 2, dtype=torch.float64)
    assert torch.equal(staged.run(1, model, x, staged.run(0, model, x, None)), model(x))
    assert staged.layers[0] is model.layers[0]


def test_a_task_that_calls_the_model_twice_or_never_is_refused():
    model = tower()
    staged = StagedModel(model)
    staged.split(2, None)
    x = torch.zeros(2, 4, dtype=torch.float64)
    hidden = staged.run(0, model, x, None)
    with pytest.raises(BadArgument, match="a second call"):
        staged.run(1, lambda x: model(x) + model(x), x, hidden)
    for stage, received in ((0, None), (1, hidden)):
        with pytest.raises(BadArgument, match="to call the model"):
            staged.run(stage, lambda x: x.sum(), x, received)
    assert torch.equal(staged.run(1, model, x, hidden), model(x))  # nothing is left behind by the failures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpip"}, "Did you mean 'gpipe'"),
        ({"microbatches": 0}, "microbatches to be an integer of at least 1"),
        ({"stages_per_rank": True}, "stages_per_rank to be an integer"),
        ({"stages_per_rank": 2}, "schedule='interleaved'"),
        ({"split": "layers.3"}, "a list of layer counts"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        Pipeline(**options)


class WithHead(Classify):
    """Trains a parameter beside the model."""

    def __init__(self):
        super().__init__(tower())
        self.scale = nn.Linear(1, 1)

    def parameters(self):
        yield from self.model.parameters()
        yield from self.scale.parameters()


def test_what_a_pipeline_cannot_train_is_refused():
    with pytest.raises(BadArgument, match=r"in the model.*scale\.weight"):
        Pipeline().prepare(WithHead(), torch.device("cpu"))
    half = Pipeline()
    half.precision = "fp16"
    with pytest.raises(BadArgument, match="'bf16' or 'no'"):
        half.prepare(Classify(tower()), torch.device("cpu"))


@pytest.mark.slow  # seconds, to import what compiles
def test_a_compiled_model_is_refused():
    compiled = Classify(tower())
    compiled.model.compile()
    with pytest.raises(BadArgument, match="compile=False"):
        Pipeline().prepare(compiled, torch.device("cpu"))


def test_one_process_is_an_ordinary_run():
    strategy, task = Pipeline(), Classify(tower())
    strategy.setup_environment("cpu", 60)
    strategy.prepare(task, torch.device("cpu"))
    assert strategy.train_step() is None
    assert list(strategy.model_state(task.model.state_dict)) == list(tower().state_dict())
    assert strategy.unsharded_model() is task.model
    copied = strategy.copy_model()
    assert copied is not task.model
    assert largest_difference(copied.state_dict(), task.model.state_dict()) == 0


def test_batches_are_split_into_micro_batches_of_nearly_equal_size():
    batch = {"x": torch.arange(10), "names": list("abcdefghij")}
    pieces = split_batch(batch, 4)
    assert [piece.rows for piece in pieces] == [2, 3, 2, 3]
    assert torch.equal(torch.cat([piece.data["x"] for piece in pieces]), batch["x"])
    assert "".join(name for piece in pieces for name in piece.data["names"]) == "abcdefghij"
    assert [piece.rows for piece in split_batch({"x": torch.arange(2)}, 4)] == [0, 1, 0, 1]


def test_every_kind_of_loss_becomes_a_sum_and_a_weight():
    two = torch.tensor(2.0)
    for output, total, weight in ((two, 6, 3), (Loss(two, 5), 2, 5), (Mean(two, torch.tensor(5)), 10, 5)):
        value, result = loss_terms(output, 3)
        assert (value, result.sum, result.weight) == (total, total, weight)
    with pytest.raises(BadArgument, match="NoneType"):
        loss_terms(None, 3)
