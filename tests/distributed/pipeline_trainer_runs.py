"""Whole runs of `Trainer` with a pipeline, and of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline_runs import labelled, tower
from torch import Tensor
from torch.utils.data import TensorDataset

from text_toys import llama, reading_tokenizer, sentences
from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.run import run_of
from trainformer.tasks import CausalLM

OPTIONS = {"epochs": 2, "batch_size": 8, "precision": "no", "device": "cpu", "log": "none", "save_last": 9}


def samples(folder: Path, strategy: Any, begin: Path | None = None) -> dict[str, Tensor]:
    """An MLP, perhaps from a checkpoint on: its weights, on rank 0."""
    data, held_out = TensorDataset(*classes(43)), TensorDataset(*classes(13, seed=4))
    options = {"accumulation_steps": 2, "save_every": "2steps", "lr": 0.01}
    trainer = Trainer(MeanTask(tower()), data, held_out, run_dir=folder, strategy=strategy, **OPTIONS, **options)
    if begin is not None:
        trainer.load(begin / "checkpoints" / "step_00000002")
    return weights_of(trainer.fit())


def texts(folder: Path, strategy: Any, packing: bool) -> dict[str, Tensor]:
    """A language model, through the task's own loss."""
    options = {"tokenizer": reading_tokenizer(), "max_length": 32, "cache_dir": folder / "cache", "packing": packing}
    task = CausalLM(llama(num_hidden_layers=4), **options)
    lines = sentences()
    rates = {"optimizer": "sgd", "lr": 0.5, "save_every": "1epochs"}
    trainer = Trainer(task, lines, lines[:7], run_dir=folder, strategy=strategy, **OPTIONS, **rates)
    return weights_of(trainer.fit())


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    strategy = run_of(trainer).backend.strategy
    return strategy.model_state(trainer.task.model.state_dict)


def results(folder: Path, rank: int, world: int) -> dict[str, Tensor]:
    """The weights after each run, under names that begin with the run's."""
    found: dict[str, Tensor] = {}
    for packing in (False, True):
        found |= labelled(f"packing {packing}", texts(folder / f"texts{packing}", "pipeline", packing))
    found |= labelled("straight", samples(folder / "straight", "pipeline"))
    interleaved = {"name": "pipeline", "schedule": "interleaved"}
    return found | labelled("from one", samples(folder / "from one", interleaved, folder / "one"))
