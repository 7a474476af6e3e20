"""Runs with layers divided over real ranks. The same runs by hand, for one process, are those of `fsdp_runs`."""

from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_runs import (
    HALF,
    STEPS,
    Telling,
    backend_with,
    copies_of,
    named_results,
    parts_of_run,
    resume,
    save,
    train,
)
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInputOutput, RowwiseParallel, SequenceParallel
from training_runs import average_of, found, run_llama
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from text_toys import llama
from toys import TokenTask
from trainformer.core.errors import BadArgument
from trainformer.distributed.tensor_parallel import TensorParallel
from trainformer.utils import distributed
from trainformer.utils.distributed import is_dtensor

# A vocabulary that no number of ranks divides.
SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 20, "pad_token_id": 3}


class Language(Telling):
    """The next token of any model; all of it is trained."""

    def __init__(self, kind, config):
        self.model = kind(config).double()


def tied_llama():
    return Language(LlamaForCausalLM, llama(**SIZES, tie_word_embeddings=True))


def untied_llama():
    return Language(LlamaForCausalLM, llama(**SIZES, num_key_value_heads=4, tie_word_embeddings=False))


def qwen(config, kind):
    """Heads are not all of the hidden size, two of them share keys and values; biases are not zero."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    task = Language(kind, config(**SIZES, **heads, tie_word_embeddings=False))
    with torch.no_grad():
        for name, p in task.model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    return task


class Divisible(nn.Module):
    """Layers to be divided, with a norm between two of them and one along the sequence, and whole ones.

    One shares the weight of another.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.along = nn.Sequential(nn.LayerNorm(6))
        self.up = nn.ModuleList(nn.Linear(6, 16) for _ in range(2))
        self.between = nn.LayerNorm(4)
        self.down = nn.ModuleList(nn.Linear(16, 6) for _ in range(2))
        self.again = nn.Linear(6, 16)
        self.again.weight = self.up[1].weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.along(self.stem(x))
        for up, down in zip(self.up, self.down, strict=True):
            heads = up(x).tanh().unflatten(-1, (-1, 4))
            x = x + down(self.between(heads).flatten(-2))
        return self.head(x + self.again(x)[..., 1:7])


PLAN = {
    "along": PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(1),
        output_layouts=Shard(1),
        desired_output_layouts=Replicate(),
    ),
    "along.0": SequenceParallel(),
    "up.*": "colwise",
    "between": "replicated_with_grad_allreduce",
    "down.0": RowwiseParallel(),
    "down.1": "rowwise",
}


class ByHand(TokenTask):
    """A model that says nothing of how it is divided, and a parameter outside of it."""

    def __init__(self):
        super().__init__(Divisible().double())
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def parameters(self):
        return [*self.model.parameters(), self.gain]

    def train_step(self, batch):
        x, y = batch
        return super().train_step((x * self.gain, y))

    def step_end(self):
        pass

    def beside(self):
        return {"gain": self.gain.detach()}

    def load_beside(self, state):
        self.gain.data.copy_(state["gain"])


MAKE = {
    "tied": tied_llama,
    "untied": untied_llama,
    "qwen2": lambda: qwen(Qwen2Config, Qwen2ForCausalLM),
    "qwen3": lambda: qwen(Qwen3Config, Qwen3ForCausalLM),
    "by-hand": ByHand,
}
PLANS = {"by-hand": PLAN}


def fresh(name, seed=1):
    torch.manual_seed(seed)
    return MAKE[name]()


def backend_of(name, size, plan=None):
    """On a rank; its weights are not those of others, of which rank 0's count where nothing is loaded."""
    strategy = TensorParallel(size=size, plan=plan or PLANS.get(name))
    return backend_with(strategy, fresh(name, seed=1 + dist.get_rank()))


def whole_run(name, size, folder=None):
    """All steps; saved in the middle, if there is a folder."""
    backend = backend_of(name, size)
    losses = [train(backend, 0, HALF)]
    if folder is not None:
        save(backend, folder)
    losses.append(train(backend, HALF, STEPS))
    return named_results(f"{name}/{size}", torch.cat(losses), backend.task), backend


def resumed_run(name, size, folder):
    backend = backend_of(name, size)
    train(backend, 0, 1)  # what is loaded takes the place of something
    resume(backend, folder)
    return named_results(f"{name}-resumed/{size}", train(backend, HALF, STEPS), backend.task)


def taken_back(backend, folder):
    """Steps after those that were saved, which are undone with what was kept of the state."""
    resume(backend, folder)
    kept = copies_of(parts_of_run(backend))
    train(backend, 0, 2)
    backend.strategy.load_model_state(kept["model"], backend.task.model.load_state_dict)
    backend.strategy.load_optimizer_state(backend.optimizer, kept["optimizer"])
    return named_results("untied-again/2", train(backend, HALF, STEPS), backend.task)


def on_two(rank, world, folder):
    """Two ranks that hold one model, and once a model each."""
    folder = Path(folder)
    results, backend = whole_run("untied", 2, folder / "untied-two")
    torch.save(backend.strategy.unsharded_model().state_dict(), folder / f"whole-{rank}.pt")
    results |= taken_back(backend, folder / "untied-two") | copied(backend)
    for name in ("qwen2", "qwen3"):
        results |= whole_run(name, None)[0]
    results |= whole_run("by-hand", 1)[0]
    results["refused"] = torch.tensor(refuses_a_wrong_plan())
    return results | trained_by_trainer(folder, {"name": "tp"})


def on_four(rank, world, folder):
    """Two models of two ranks each, or one of four."""
    folder = Path(folder)
    results, backend = whole_run("tied", 2, folder / "tied-four")
    results |= asked_by_one(backend) | copied(backend)
    results |= whole_run("by-hand", 2)[0] | whole_run("by-hand", 4)[0]
    results |= resumed_run("untied", 4, folder / "untied-two")
    return results | trained_by_trainer(folder, {"name": "tp", "size": 2})


@torch.no_grad()
def copied(backend):
    """What a copy of the model says, in which weights are tied as in the model, and how much of the model is here."""
    model, copy = backend.task.model, backend.strategy.copy_model()
    tied = [m.lm_head.weight is m.model.embed_tokens.weight for m in (model, copy)]
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    for p in model.parameters():
        p.add_(1.0)
    held = [[p.to_local() if here and is_dtensor(p) else p for p in model.parameters()] for here in (True, False)]
    numbers = [sum(p.numel() for p in parameters) for parameters in held]
    results = {"copy": copy(input_ids=ids).logits, "copied": before, "held": torch.tensor(numbers)}
    return results | {"tied": torch.tensor(tied)}


def asked_by_one(backend):
    """Whether a rank hears what the last one asks, and which ranks share rows with it."""
    quiet = backend.any_rank_has_request()
    backend.has_request = lambda: backend.process_group.rank == backend.process_group.world_size - 1
    train(backend, 0, 1)
    rows = distributed.gather_rows(torch.tensor([backend.process_group.rank]))
    return {"requests": torch.tensor([quiet, backend.any_rank_has_request()]), "rows": rows}


def refuses_a_wrong_plan():
    """A norm of which each rank sees its own heads, and that the plan does not name."""
    backend = backend_of("by-hand", 2, {key: style for key, style in PLAN.items() if key != "between"})
    try:
        train(backend, 0, 1)
    except BadArgument as error:
        return "different ones for between.weight" in str(error)
    return False


def trained_by_trainer(folder, strategy):
    """The task for language models, which computes its loss without all logits where the model is whole.

    It is evaluated with an average of its weights.
    """
    trainer = run_llama(strategy, run_dir=folder / f"runs-{dist.get_world_size()}", ema=0.9).fit()
    return {f"trainer/{key}": value for key, value in {**found(trainer), **average_of(trainer)}.items()}
