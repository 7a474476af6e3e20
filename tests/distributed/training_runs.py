"""The same runs on any number of ranks: what each of them found, to be compared with one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ssl_toys
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from text_toys import chat_tokenizer, llama, preferences
from toys import MeanTask, classes
from trainformer import Mixture, Trainer, log_metric
from trainformer.adapters import LoRA
from trainformer.backends.torch.state import gathered
from trainformer.run import run_of
from trainformer.tasks import CPO, KTO, CausalLM, RewardModel

QUIET = {"log": "none", "device": "cpu", "precision": "no", "resume": None, "save_every": None, "num_workers": 0}


class RowsTask(MeanTask):
    """Has metrics of every kind, and one of the whole set that depends on the order of its rows."""

    logs = True  # values of its own, which a pipeline refuses

    def train_step(self, batch: Any) -> Tensor:
        if self.logs:
            log_metric("positive", (batch[0][batch[1] > 0].sum(), (batch[1] > 0).sum()))
        return super().train_step(batch)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = self.model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        if self.logs:
            log_metric("logged", losses.mean())
        return {"loss": losses.mean(), "pair": (losses[y > 0].sum(), (y > 0).sum()), "logits": logits, "label": y}

    def on_eval_end(self, rows: dict[str, Tensor]) -> dict[str, float]:
        places = torch.arange(1, len(rows["label"]) + 1, dtype=torch.float64)
        return {"rows": len(places), "ordered": float((rows["logits"].sum(-1) * places).sum())}


def deep_mlp() -> nn.Sequential:
    """Enough layers for four stages."""
    torch.manual_seed(1)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *hidden, nn.Linear(8, 3)).double()


def run_mlp(strategy: Any, **options: Any) -> Trainer:
    """37 samples in batches of 8: the last one has 5; 13 to evaluate on in batches of 4: the last one has 1."""
    settings = {"epochs": 3, "batch_size": 8, "eval_batch_size": 4, "lr": 0.02, "log_every": 1, "gradient_clip": 0.5}
    settings["val_data"] = TensorDataset(*classes(13, seed=1))
    task = RowsTask(deep_mlp())
    task.logs = strategy != "pipeline"
    return Trainer(task, TensorDataset(*classes(37)), strategy=strategy, **{**QUIET, **settings, **options})


def run_sets(strategy: Any, **options: Any) -> Trainer:
    """Two validation sets with their own cadences, and schedulers that follow them and count epochs."""
    sets = {"clean": TensorDataset(*classes(13, seed=1)), "small": TensorDataset(*classes(3, seed=2))}
    plateau = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 0.2, "factor": 0.5}
    settings = {
        "val_data": sets,
        "eval_every": {"clean": "2steps", "small": 1},
        "monitor_metric": "val/small/loss",
        "scheduler": [
            "constant",
            {**plateau, "monitor": "val/clean/loss"},
            {"name": "StepLR", "step_size": 1, "gamma": 0.9, "interval": "epoch"},
        ],
    }
    return run_mlp(strategy, **{**settings, **options})


def wide_llama(seed: int = 0, kind: Any = LlamaForCausalLM, **sizes: Any) -> Any:
    """One that computes everything in float64: its own norms go through fp32, whatever they are given."""
    torch.manual_seed(seed)
    model = kind(llama(**{"num_hidden_layers": 4, **sizes}))
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon))
    return model.double()


def run_llama(strategy: Any, adapter: LoRA | None = None, **options: Any) -> Trainer:
    """Token-weighted losses of texts of unequal length; the last batch has two of them."""
    model = wide_llama()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (14,), generator=generator).tolist()
    ids = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in lengths]
    data = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids]
    settings = {"epochs": 2, "batch_size": 4, "lr": 3e-3, "log_every": 1}
    return Trainer(
        CausalLM(model, tokenizer=chat_tokenizer(), adapter=adapter),
        data,
        data[:5],
        strategy=strategy,
        **{**QUIET, **settings, **options},
    )


def run_mixture(strategy: Any, **options: Any) -> Trainer:
    """Two sources of texts, the smaller one repeated, with weights that change; 22 samples in batches of 4."""
    generator = torch.Generator().manual_seed(0)
    sources: dict[str, list[dict[str, list[int]]]] = {}
    for name, size, length in (("short", 5, 3), ("long", 14, 12)):
        ids = torch.randint(5, 200, (size, length), generator=generator).tolist()
        sources[name] = [{"input_ids": row, "labels": row} for row in ids]
    changing = [(0, {"short": 1, "long": 2}), (6, {"short": 2, "long": 1})]
    settings = {"epochs": 2, "batch_size": 4, "lr": 3e-3, "log_every": 1}
    task = CausalLM(wide_llama(), tokenizer=chat_tokenizer())
    data = Mixture(sources, changing, epoch=22)
    return Trainer(task, data, strategy=strategy, **{**QUIET, **settings, **options})


def run_preferences(task: Any, strategy: Any, **options: Any) -> Trainer:
    """Pairs, or twice as many single answers; the last batch has one pair or two answers, less than one for a rank."""
    settings = {"epochs": 2, "batch_size": 4, "lr": 3e-3, "log_every": 1}
    records = [{**record, "margin": 0.1 * place} for place, record in enumerate(preferences()[:13])]
    return Trainer(task, records, records[:5], strategy=strategy, **{**QUIET, **settings, **options})


def run_kto(strategy: Any, **options: Any) -> Trainer:
    """The KL divergence is a mean over the step."""
    task = KTO(wide_llama(num_hidden_layers=2), tokenizer=chat_tokenizer(), max_length=32, beta=0.5)
    return run_preferences(task, strategy, **options)


def run_cpo(strategy: Any, **options: Any) -> Trainer:
    """A mean over pairs, and one over tokens."""
    task = CPO(wide_llama(num_hidden_layers=2), tokenizer=chat_tokenizer(), max_length=32)
    return run_preferences(task, strategy, **options)


def run_reward(strategy: Any, **options: Any) -> Trainer:
    model = wide_llama(kind=LlamaForSequenceClassification, num_hidden_layers=2, num_labels=1)
    return run_preferences(RewardModel(model, tokenizer=chat_tokenizer(), max_length=32), strategy, **options)


def wide_views(images: Tensor) -> list[Tensor]:
    """Two views in float64."""
    return ssl_toys.two_views(images.double())


def run_simclr(strategy: Any, **options: Any) -> Trainer:
    """Negatives of all ranks, BatchNorm over all of them; the last batch has 6 of 30 images."""
    task = ssl_toys.make("simclr", augment=wide_views)
    task.model.double()
    images = ssl_toys.pixels(30)
    settings = {"epochs": 2, "batch_size": 12, "lr": 1e-3, "log_every": 1, "drop_last": False}
    return Trainer(task, TensorDataset(images), strategy=strategy, **{**QUIET, **settings, **options})


RUNS = {"mlp": run_mlp, "llama": run_llama, "mixture": run_mixture, "simclr": run_simclr, "sets": run_sets}
RUNS |= {"kto": run_kto, "cpo": run_cpo, "reward": run_reward}
_SOURCES = [f"train/{kind}/{name}" for kind in ("loss", "share", "passes", "weight") for name in ("short", "long")]


def found(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and every record of a run."""
    history = trainer.state.log_history
    measured = [
        f"{name}{metric}"
        for name in ("", "clean/", "small/")
        for metric in ("loss", "logged", "pair", "rows", "ordered")
    ]
    own = ("train/loss", "train/lr", "train/grad_norm", "train/positive", "train/kl", "train/nll_loss", *_SOURCES)
    names = (*own, *(f"val/{name}" for name in measured))
    values = {name: [record[name] for record in history if name in record] for name in names}
    state = run_of(trainer).backend.strategy.unsharded_model().state_dict()
    tensors = {name: torch.tensor(series, dtype=torch.float64) for name, series in values.items() if series}
    # A model whose layers are on different ranks is put together on the first.
    tensors |= {f"weight {name}": value.detach().clone() for name, value in state.items() if not value.is_meta}
    counts = [trainer.state.step, trainer.state.samples, trainer.state.tokens, trainer.state.epoch]
    return {**tensors, "counts": torch.tensor(counts)}


def average_of(trainer: Trainer) -> dict[str, Tensor]:
    """The average of the weights (EMA), whole. Every rank must take part."""
    average = next(cb for cb in run_of(trainer).callbacks if type(cb).__name__ == "EMA").model
    return {f"average {name}": value.clone() for name, value in gathered(average.state_dict()).items()}


def training(rank: int, world: int, specs: Sequence[str]) -> dict[str, Tensor]:
    """Runs with the strategies they name, and some settings more."""
    results: dict[str, Tensor] = {}
    for spec in specs:
        name, strategy, *options = spec.split(",")
        settings = {key: int(value) for key, value in (option.split("=") for option in options)}
        trainer = RUNS[name](strategy, **settings, run_dir=spec.replace(",", "-")).fit()
        results |= {f"{spec} {key}": value for key, value in found(trainer).items()}
    return results


def kept(rank: int, world: int) -> dict[str, Tensor]:
    """A divided language model with an average of its weights: what it was left with, saved and exported by all."""
    trainer = run_llama("fsdp", ema=0.9, run_dir="divided", save_every=2, epochs=1).fit()
    trainer.save("all.pt")
    trainer.export("average")
    whole = run_of(trainer).backend.strategy.unsharded_model().state_dict()
    found = {f"weight {name}": value.clone() for name, value in whole.items()}
    small = run_llama("fsdp", LoRA(r=4), run_dir="adapted", epochs=1, save_every=2).fit()
    adapted = run_of(small).backend.strategy.unsharded_model().state_dict()
    found |= {f"adapted {name}": value.clone() for name, value in adapted.items()}
    return found | average_of(trainer)
