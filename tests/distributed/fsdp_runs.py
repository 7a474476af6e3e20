"""Runs with divided models on real ranks, and the same runs written by hand for one process."""

import copy
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import LlamaForCausalLM

from text_toys import llama
from toys import MeanTask, classes, mlp, tokens
from trainformer import Loss, Trainer
from trainformer.backends.torch.backend import TorchBackend
from trainformer.core.errors import BadArgument
from trainformer.core.types import DeviceBatch
from trainformer.distributed.fsdp import FSDP
from trainformer.distributed.sharded_state import ShardedState, resharded, write_sharded
from trainformer.run import RunSettings
from trainformer.utils.distributed import is_dtensor

LR, DECAY, CLIP, STEPS, HALF = 0.05, 0.1, 0.3, 6, 3
# Each rank divides its sums by 8 / ranks. Parts of Llama compute in fp32 always: by another number than that, times a
# power of two, they would round otherwise.
BATCH = 8
# Micro-batches of two per step. One of a single sample leaves ranks without any.
SIZES = [(7, 5), (6, 1), (4, 9), (8, 8), (5, 3), (1, 6)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Layered(nn.Module):
    """Rows that no number of ranks divides, a frozen layer, a scalar, a buffer, and a norm whose weight is fixed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 7)
        self.body = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.linspace(-1, 1, 7))
        self.body[1].requires_grad_(False)
        self.norm.weight.requires_grad_(False)

    def features(self, x):
        x = self.stem(x) + self.shift
        for layer in self.body:
            x = layer(x)
        return self.scale * self.norm(x)

    def forward(self, x):
        return self.head(self.features(x))


class Evaluated:
    """What a step would cost, without taking it."""

    def eval_step(self, batch):
        total, weight, _ = self.train_step(batch)
        return {"loss": (total, weight)}


class Teaching(Evaluated):
    """Calls parts of the model, twice, beside a momentum network, a loss with weights and a bare parameter."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        self.model = Layered().double()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.centres = nn.Linear(7, 5).double()
        self.temperature = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def parameters(self):
        return [*self.model.parameters(), *self.centres.parameters(), self.temperature]

    def train_step(self, batch):
        x, y = batch
        logits = self.model(x) * self.temperature.mean()
        kept = y != -100
        mirrored = self.centres(self.model.features(-x))
        with torch.no_grad():
            aim = self.centres.weight.mean() + self.teacher.features(x)[..., :5]
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return Loss(total + (((mirrored - aim) ** 2).mean(-1) * kept).sum(), kept.sum())

    def step_end(self):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def beside(self):
        return {
            "teacher": self.teacher.state_dict(),
            "centres": self.centres.state_dict(),
            "temperature": self.temperature.detach(),
            "note": ["plain", 1, 2.5, None],
        }

    def load_beside(self, state):
        self.teacher.load_state_dict(state["teacher"])
        self.centres.load_state_dict(state["centres"])
        self.temperature.data.copy_(state["temperature"])


class Telling(Evaluated):
    """The next token of a small Llama with tied embeddings, of which some layers are frozen."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        config = llama(vocab_size=37, hidden_size=16, intermediate_size=20, tie_word_embeddings=True)
        self.model = LlamaForCausalLM(config).double()
        for name, p in self.model.named_parameters():
            p.requires_grad_("k_proj" not in name and "layers.1.mlp" not in name)

    def train_step(self, batch):
        x, _ = batch
        logits = self.model(input_ids=x[:, :-1], use_cache=False).logits
        labels = x[:, 1:].masked_fill(x[:, 1:] % 5 == 0, -100)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return Loss(total, (labels != -100).sum())

    def step_end(self):
        pass

    def beside(self):
        return {}

    def load_beside(self, state):
        pass


TASKS = {"teaching": Teaching, "telling": Telling}


def windows(task):
    """The micro-batches of all steps, as one process gets them."""
    x, y = tokens(n=sum(map(sum, SIZES)))
    if isinstance(task, Telling):
        x = torch.randint(37, (len(x), 7), generator=torch.Generator().manual_seed(3))
    bounds = [0, *torch.tensor(SIZES).flatten().cumsum(0).tolist()]
    batches = [(x[a:b], y[a:b]) for a, b in pairwise(bounds)]
    return list(zip(batches[::2], batches[1::2], strict=True))


# -- one process, by hand ----------------------------------------------------------------------------------


def optimizer_by_hand(task, make=torch.optim.AdamW):
    given = task.parameters() if hasattr(task, "parameters") else task.model.parameters()
    trained = [p for p in given if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return make(groups, lr=LR)


def by_hand(task, optimizer, first=0, last=STEPS):
    """Losses of the steps; the task is trained in place."""
    losses = []
    for window in windows(task)[first:last]:
        total, weight = 0, 0
        for batch in window:
            output = task.train_step(batch)
            (output.sum / BATCH).backward()
            total, weight = total + output.sum.detach(), weight + output.weight
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for p in trained:
            p.grad *= BATCH / weight.double()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        task.step_end()
        losses.append(total / weight)
    return torch.stack(losses)


def all_weights(task):
    """Everything the task has learned, whole; every rank must take part."""
    named = {f"model.{k}": v for k, v in task.model.state_dict().items()}
    for key, value in task.beside().items():
        if isinstance(value, dict):
            named |= {f"{key}.{k}": v for k, v in value.items()}
        elif isinstance(value, torch.Tensor):
            named[key] = value
    return {k: (v.full_tensor() if is_dtensor(v) else v).detach().clone() for k, v in named.items()}


# -- ranks -------------------------------------------------------------------------------------------------


def backend_of(task, precision="no", optimizer="adamw", **options):
    return backend_with(FSDP(**options), task, precision, optimizer)


def backend_with(strategy, task, precision="no", optimizer="adamw"):
    settings = RunSettings(
        lr=LR,
        weight_decay=DECAY,
        gradient_clip=CLIP,
        scheduler=None,
        precision=precision,
        device="cpu",
        batch_size=BATCH,
        optimizer=optimizer,
    )
    return TorchBackend(task, settings, strategy=strategy)


def part_of(batch, ranks, more):
    """The samples of this rank; one of others' that counts nothing, where there are too few."""
    mine = [torch.tensor_split(t, ranks.dp_world_size)[ranks.dp_rank] for t in batch]
    size = len(mine[0])
    return DeviceBatch(tuple(mine) if size else tuple(t[:1] for t in batch), size, more=more)


def train(backend, first=0, last=STEPS):
    """The same steps on ranks; their losses."""
    losses = []
    for step, window in enumerate(windows(backend.task)[first:last], first):
        for i, batch in enumerate(window):
            assert backend.accumulate(part_of(batch, backend.process_group, more=i < len(window) - 1))
        assert backend.finish()
        (loss,) = backend.update(step).loss
        backend.end_step()
        backend.task.step_end()
        losses.append((loss.value / loss.weight).clone())
    return torch.stack(losses)


def parts_of_run(backend):
    """What a checkpoint holds, by the stem of its files."""
    strategy, task = backend.strategy, backend.task
    return {
        "model": strategy.model_state(task.model.state_dict),
        "optimizer": strategy.optimizer_state(backend.optimizer),
        "beside": task.beside(),
    }


def save(backend, folder):
    if backend.process_group.is_main:
        folder.mkdir()
    dist.barrier()
    for stem, state in parts_of_run(backend).items():
        write_sharded(folder, stem, state, backend.process_group)
    dist.barrier()


def opened(folder, stem):
    return ShardedState(folder, sorted(path.name for path in Path(folder).glob(f"{stem}.*")))


def resume(backend, folder):
    """Take back what `save` wrote, on however many ranks."""
    strategy, task = backend.strategy, backend.task
    strategy.check_model_state(opened(folder, "model"), task.model.state_dict)
    strategy.load_model_state(opened(folder, "model"), task.model.load_state_dict)
    strategy.load_optimizer_state(backend.optimizer, opened(folder, "optimizer"))
    task.load_beside(resharded(opened(folder, "beside"), task.beside()))


def fresh(name):
    """A task whose weights are not those of the others'; rank 0's count where nothing is loaded."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return TASKS[name](seed=1 + rank)


# -- what ranks do together, from beginning to end ---------------------------------------------------------


def on_four(rank, world, folder):
    """Two runs, the second on two replicas of the model, each saved in the middle."""
    found = {}
    for name, options in (("teaching", {}), ("telling", {"replicas": 2})):
        backend = backend_of(fresh(name), **options)
        losses = [train(backend, 0, HALF)]
        save(backend, Path(folder) / f"{name}-four")
        losses.append(train(backend, HALF, STEPS))
        found |= named_results(name, torch.cat(losses), backend.task)
    return found


def on_two(rank, world, folder):
    """Go on with the runs of four ranks, and with one that a single process began."""
    found, folder = {}, Path(folder)
    for name, options in (("teaching", {"reshard_after_forward": False}), ("telling", {"blocks": ()})):
        backend = backend_of(fresh(name), **options)
        train(backend, 0, 1)  # what is loaded takes the place of something
        resume(backend, folder / f"{name}-four")
        found |= named_results(f"{name}-resumed", train(backend, HALF, STEPS), backend.task)
    save(backend, folder / "telling-two")
    torch.save(backend.strategy.unsharded_model().state_dict(), folder / f"whole-{rank}.pt")
    trainer_of(folder, "fsdp", steps=5).fit()
    return found | from_one(folder) | beside_training() | with_fewer_bits() | other_optimizers() | refusals()


def trainer_of(folder, strategy, steps):
    """37 samples in batches of 8, saved in the middle of an epoch."""
    quiet = {"log": "none", "device": "cpu", "precision": "no", "num_workers": 0, "resume": "auto"}
    settings = {"batch_size": 8, "lr": 0.02, "scheduler": "constant", "warmup_ratio": 0.0, "save_every": 3}
    options = {**quiet, **settings, "epochs": 9, "max_steps": steps, "run_dir": folder / "run"}
    return Trainer(MeanTask(mlp()), TensorDataset(*classes(37)), strategy=strategy, **options)


def from_one(folder):
    """A checkpoint of a single process, on ranks; then a few steps that are taken back."""
    ordinary = torch.load(folder / "teaching-one.pt", weights_only=True)
    task = fresh("teaching")
    backend = backend_of(task, blocks=["Block", nn.LayerNorm])
    strategy = backend.strategy
    strategy.check_model_state(ordinary["model"], task.model.state_dict)
    strategy.load_model_state(ordinary["model"], task.model.load_state_dict)
    strategy.check_optimizer_state(backend.optimizer, ordinary["optimizer"])
    strategy.load_optimizer_state(backend.optimizer, ordinary["optimizer"])
    task.load_beside(resharded(ordinary["beside"], task.beside()))
    kept = copies_of(parts_of_run(backend))
    train(backend, 0, 2)
    strategy.load_model_state(kept["model"], task.model.load_state_dict)
    strategy.load_optimizer_state(backend.optimizer, kept["optimizer"])
    task.load_beside(resharded(kept["beside"], task.beside()))
    return named_results("from-one", train(backend, HALF, STEPS), task)


def copies_of(tree):
    if isinstance(tree, dict):
        return {key: copies_of(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def beside_training():
    """Evaluation, an average of the weights that is evaluated as well, and what is exchanged beside gradients."""
    found = {}
    for name in TASKS:
        task = fresh(name)
        backend = backend_of(task)
        strategy, batch = backend.strategy, windows(task)[0][0]
        average = strategy.copy_model()
        train(backend, 0, 2)
        follow(average, task.model)
        with torch.no_grad():
            found[f"{name}/eval"] = torch.stack(strategy.infer(task.eval_step, batch)["loss"])
            trained, task.model = task.model, average
            found[f"{name}/eval-average"] = torch.stack(strategy.infer(task.eval_step, batch)["loss"])
            task.model = trained
        every = [*task.model.parameters(), *average.parameters()]
        here = [p.to_local() for p in every if is_dtensor(p)]
        found[f"{name}/divided"] = torch.tensor([is_dtensor(p) for p in every])
        found[f"{name}/held"] = torch.tensor([sum(p.numel() for p in parts) for parts in (here, every)])
    found["flag"] = torch.tensor(float(backend.process_group.rank == 1))
    strategy.sync_found_inf(found["flag"])
    return found


class Watched(Telling):
    """In float32; notes in which type a step sees a weight."""

    def __init__(self, seed=1):
        super().__init__(seed)
        self.model.float()
        self.seen = set()

    def train_step(self, batch):
        self.seen.add(self.model.lm_head.weight.dtype)
        return super().train_step(batch)


def with_fewer_bits():
    """Losses in fp32, bf16 and fp16, the last with a scale that at first is too large for one rank's gradients."""
    found = {}
    for precision, dtype in (("no", None), ("bf16", torch.bfloat16), ("fp16", None)):
        task = Watched()
        backend = backend_of(task, precision, param_dtype=dtype)
        scaler = backend.precision.scaler
        if scaler is not None:
            scaler._init_scale = 2.0**40
        found[f"{precision}/losses"] = train(backend)
        found[f"{precision}/scale"] = torch.tensor(1.0 if scaler is None else scaler.get_scale())
        assert task.seen == {dtype or torch.float32}
        assert {p.dtype for p in task.model.parameters()} == {torch.float32}
    return found


def other_optimizers():
    """Each with its state saved and loaded in between."""
    found = {}
    for name in ("sgd", "adagrad", "nadam"):
        backend = backend_of(fresh("teaching"), optimizer=name)
        losses = [train(backend, 0, HALF)]
        state = copies_of(backend.strategy.optimizer_state(backend.optimizer))
        backend.strategy.load_optimizer_state(backend.optimizer, state)
        found[f"{name}/losses"] = torch.cat([*losses, train(backend, HALF, STEPS)])
    return found


def refusals():
    """How many things that cannot work were refused, all of them with the right words."""
    mixed, quantized = fresh("teaching"), fresh("teaching")
    mixed.model.head.float()
    quantized.model.head.weight = nn.Parameter(torch.zeros(3, 7, dtype=torch.uint8), requires_grad=False)
    made = fresh("teaching")
    cases = [
        (mixed, {}, "trainable parameters of one dtype"),
        (quantized, {}, "model.head.weight of torch.uint8"),
        (made, {"optimizer": torch.optim.SGD(made.parameters())}, "created after sharding"),
        (fresh("teaching"), {"optimizer": "adafactor"}, "received 'Adafactor'"),
        (fresh("teaching"), {"param_dtype": "bf16"}, "Pass precision='bf16'"),
        (fresh("teaching"), {"blocks": "Blok"}, "Did you mean 'Block'"),
        (fresh("teaching"), {"replicas": 3}, "2 processes can hold 1, 2 replicas"),
    ]
    for task, options, words in cases:
        with pytest.raises(BadArgument, match=re.escape(words)):
            backend_of(task, **options)
    return {"refused": torch.tensor(len(cases))}


@torch.no_grad()
def follow(average, model):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 0.25)


def named_results(name, losses, task):
    return {f"{name}/losses": losses} | {f"{name}/{key}": value for key, value in all_weights(task).items()}
