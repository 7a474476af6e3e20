"""Runs of a pipeline on real ranks, and the same runs written by hand for one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import wide_llama
from transformers import AutoModelForCausalLM

from text_toys import gpt2
from toys import classes
from trainformer import Loss
from trainformer.backends.torch.optimizers import make_optimizer
from trainformer.core.errors import BadArgument
from trainformer.distributed.pipeline import Pipeline
from trainformer.utils import distributed

CLIP = 0.3
Windows = list[list[Any]]


class Classify:
    """A mean over samples, with a metric of each kind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train_step(self, batch: Any) -> Loss:
        x, y = batch
        logits = self.model(x)
        right = (logits.argmax(-1) == y).double()
        total = F.cross_entropy(logits, y, reduction="sum")
        return Loss(total, len(y), metrics={"right": (right.sum(), len(y)), "size": logits.detach().abs().mean()})

    def eval_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "prediction": logits.argmax(-1), "total": (logits.sum(), len(y))}


class NextToken:
    """A sum over supervised tokens, computed by hand from the model's logits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def train_step(self, batch: dict[str, Tensor]) -> Loss:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return Loss(total, (labels != -100).sum())

    def eval_step(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        loss = self.train_step(batch)
        return {"loss": (loss.sum, loss.weight)}


# -- models and batches ------------------------------------------------------------------------------------


def tower(width: int = 8) -> nn.Module:
    """Eight layers with parameters, of unequal width, with others in between."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Flatten(1), nn.Linear(4, width), nn.Tanh()]
    for i in range(6):
        layers += [nn.Linear(width + i, width + i + 1), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width + 6, 3)).double()


def windows_of_samples(batch: int = 7, accumulate: int = 2, n: int = 43) -> Windows:
    """Batches of a step together; the last one is smaller than the number of micro-batches."""
    x, y = classes(n)
    batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]


def small_llama() -> nn.Module:
    return wide_llama(seed=5, vocab_size=64)


def tied_gpt2() -> nn.Module:
    torch.manual_seed(6)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return AutoModelForCausalLM.from_config(gpt2(n_layer=4, vocab_size=64, **no_dropout)).double()


def windows_of_tokens(packed: bool = False) -> Windows:
    """Texts of unequal length, padded to the longest of their batch; or packed ones. The last batch is smaller.

    The first step has two of them.
    """
    generator = torch.Generator().manual_seed(7)
    batches = []
    for rows, length in ((6, 9), (6, 12), (6, 12), (3, 9)):
        ids = torch.randint(2, 64, (rows, length), generator=generator)
        lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
        inside = torch.arange(length)[None] < lengths
        batch = {"input_ids": ids, "labels": torch.where(inside, ids, -100)}
        if packed:
            cut = length // 2
            batch["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None].repeat(rows, 1)
        else:
            batch["attention_mask"] = inside.long()
        batches.append(batch)
    return [batches[:2], batches[2:3], batches[3:]]


# -- runs --------------------------------------------------------------------------------------------------


def plain_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay for matrices alone."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def by_hand(task: Any, windows: Windows, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """The run in one process: losses, norms and final weights."""
    optimizer = optimizer or plain_optimizer(task.model)
    losses, norms = [], []
    for window in windows:
        outputs = [task.train_step(batch) for batch in window]
        total, weight = sum(output.sum for output in outputs), sum(output.weight for output in outputs)
        (total / weight).backward()
        norms.append(nn.utils.clip_grad_norm_(task.model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / weight).detach())
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), **unsharded(task.model)}


def unsharded(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Run:
    """A pipeline as a backend drives it."""

    def __init__(self, make: Callable[[], Any], *, autocast: bool = False, **options: Any) -> None:
        self.autocast = autocast
        self.strategy = Pipeline(**options)
        device = self.strategy.setup_environment("cpu", 60)
        self.task = make()
        self.strategy.prepare(self.task, device)
        named = {"name": "adamw", "eps": 1e-3}
        self.optimizer = self.strategy.prepare_optimizer(make_optimizer(named, self.task, lr=0.01, weight_decay=0.1))
        self.strategy.reference = 7.0
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.metrics: list[Any] = []

    def train(self, windows: Windows) -> dict[str, Tensor]:
        """The same steps; losses and norms as this rank knows them, and the whole model on rank 0."""
        step = self.strategy.train_step()
        for window in windows:
            total = weight = torch.zeros((), dtype=torch.float64)
            for i, batch in enumerate(window):
                is_last = i == len(window) - 1
                apart = nullcontext() if is_last else self.strategy.no_sync()
                with apart, torch.autocast("cpu", enabled=self.autocast, dtype=torch.bfloat16):
                    done = step(batch)
                total, weight = total + done.sum, weight + done.weight
                self.metrics.append(done.metrics)
            self.strategy.piggyback_stats(None, torch.stack([weight, total, torch.ones(())]))
            self._step(weight)
        return {"losses": torch.stack(self.losses), "norms": torch.stack(self.norms), **self.weights()}

    def _step(self, weight: Tensor) -> None:
        sums = self.strategy.reduced_stats(None)
        assert sums is not None
        assert sums[0] == weight
        assert sums[2] == self.strategy.process_group.world_size
        grads = [p.grad for p in self.task.model.parameters() if p.grad is not None]
        factor = self.strategy.reference / sums[0]
        norm = self.strategy.total_norm(grads, True) * factor
        factor = factor * torch.clamp(CLIP / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad *= factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sums[1] / sums[0])
        self.norms.append(norm)

    def weights(self) -> dict[str, Tensor]:
        return self.strategy.model_state(self.task.model.state_dict)

    def optimizer_state(self) -> dict[str, Any]:
        return self.strategy.optimizer_state(self.optimizer)

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        self.strategy.load_model_state(weights, self.task.model.load_state_dict)
        self.strategy.load_optimizer_state(self.optimizer, optimizer)


class Drawing(Classify):
    """Draws random numbers before it calls the model."""

    def train_step(self, batch: Any) -> Loss:
        x, y = batch
        return super().train_step((x + torch.rand(()), y))


class Rounded(NextToken):
    """With its forward passes in bf16."""

    def train_step(self, batch: Any) -> Loss:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_step(batch)


class DrawingLast(Classify):
    """Draws one random number after it has called the model."""

    def train_step(self, batch: Any) -> Loss:
        loss = super().train_step(batch)
        return Loss(loss.sum + 0 * torch.rand(()), loss.weight)


class Llama(NextToken):
    def __init__(self) -> None:
        super().__init__(small_llama())


def normed() -> nn.Module:
    """A BatchNorm for every rank."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks[:3], blocks[3][:2], nn.Linear(4, 3)).double()


def checkpointed_gpt2() -> nn.Module:
    model = tied_gpt2()
    model.gradient_checkpointing_enable()
    return model


# -- what a rank finds -------------------------------------------------------------------------------------


def results(folder: str, rank: int, world: int) -> dict[str, Tensor]:
    """Everything that is to be compared, under names that begin with the run's."""
    found: dict[str, Tensor] = {}
    for schedule in ("gpipe", "1f1b", "interleaved"):
        run = Run(lambda: Classify(tower()), schedule=schedule, microbatches=3 if schedule == "gpipe" else None)
        found |= labelled(f"mlp {schedule}", run.train(windows_of_samples()))
        if world == 2 or schedule == "1f1b":
            found |= labelled(f"llama {schedule}", Run(Llama, schedule=schedule).train(windows_of_tokens()))
    with torch.no_grad():
        judged = run.strategy.infer(run.task.eval_step, windows_of_samples()[0][0])
    found |= {"eval loss": judged["loss"], "eval rows": judged["prediction"], "eval total": judged["total"][0]}
    found["own parameters"] = torch.tensor(sum(p.numel() for p in run.task.model.parameters()))
    if rank == 0:
        pairs = [metrics for metrics in run.metrics if metrics is not None]
        found["right"] = torch.stack([metrics["right"][0] for metrics in pairs])
        found["size"] = torch.stack([metrics["size"][0] / metrics["size"][1] for metrics in pairs])
    run = Run(lambda: NextToken(checkpointed_gpt2()), split=[1, 3] if world == 2 else None)
    found |= labelled("gpt2", run.train(windows_of_tokens(packed=True)))
    found |= seen_by_others(run)
    model = run.strategy.unsharded_model()
    if rank == 0:
        found["gpt2 exported"] = NextToken(model).train_step(windows_of_tokens()[0][0]).sum.detach()
        found["gpt2 tied"] = torch.tensor(model.lm_head.weight is model.transformer.wte.weight)
    run = Run(lambda: NextToken(small_llama().float()), autocast=True)
    found |= labelled("bf16", run.train(windows_of_tokens()))
    return found | traces_of_a_batch() | resumed(folder, rank, world) | refusals()


def seen_by_others(run: Run) -> dict[str, Tensor]:
    """What is counted over all stages, and what is each rank's own."""
    rows = distributed.gather_rows(torch.tensor([run.strategy.process_group.rank]))
    counted = run.strategy.count_parameters(run.task.model.parameters())
    return {"counted": torch.tensor(counted), "stream": torch.tensor(run.strategy.random_stream), "rows": rows}


def traces_of_a_batch() -> dict[str, Tensor]:
    """What one batch, the first of its shape, leaves behind in BatchNorm and in the random numbers."""
    run = Run(lambda: DrawingLast(normed()))
    torch.manual_seed(9)
    run.train(windows_of_samples(batch=16)[:1])
    counts = [m.num_batches_tracked for m in run.task.model.modules() if isinstance(m, nn.BatchNorm1d)]
    return {"random state": torch.get_rng_state(), "batches seen": torch.stack(counts)}


def resumed(folder: str, rank: int, world: int) -> dict[str, Tensor]:
    """Runs that begin with the state of another, of one process, or of two."""
    windows = windows_of_samples()
    run = Run(lambda: Classify(tower()))
    run.train(windows[:2])
    state = {"weights": run.weights(), "optimizer": run.optimizer_state()}
    if rank == 0:
        torch.save(state, f"{folder}/{world}.state")
    alone = Classify(tower())
    optimizer = plain_optimizer(alone.model)
    by_hand(alone, windows[:2], optimizer)
    states = {
        "same": run.strategy.process_group.broadcast(state),
        "one": {"weights": unsharded(alone.model), "optimizer": optimizer.state_dict()},
        "two": torch.load(f"{folder}/2.state", weights_only=True) if world > 2 else None,
    }
    found: dict[str, Tensor] = {}
    for name, begin in states.items():
        if begin is not None:
            run = Run(lambda: Classify(tower()), schedule="interleaved", microbatches=world)
            run.load(**begin)
            found |= labelled(f"from {name}", run.train(windows[2:]))
    return found


def refusals() -> dict[str, Tensor]:
    """What is refused on every rank, so that none waits for another."""
    run = Run(lambda: Drawing(tower()))
    with pytest.raises(BadArgument, match="draw no random numbers"):
        run.train(windows_of_samples())
    with pytest.raises(BadArgument, match="no weight averaging"):
        run.strategy.copy_model()
    return {"refused": torch.tensor(2)}


def labelled(label: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{label}: {name}": value for name, value in values.items()}
