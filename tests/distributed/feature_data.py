"""A small run that every case of `feature_runs` begins with, and those about what users bring as data."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from training_runs import QUIET, deep_mlp, found

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.data.order import epoch_order
from trainformer.run import run_of

SAMPLES = 37
X, Y = classes(SAMPLES)
Values = dict[str, Any]


def trainer(name: str, world: int, task: Any = None, data: Any = None, **options: Any) -> Trainer:
    """A run over the 37 samples in batches of 8, unless it is said otherwise."""
    usual = {"strategy": "auto", "epochs": 3, "batch_size": 8, "lr": 0.02, "log_every": 1, "scheduler": "constant"}
    chosen = {**QUIET, **usual, "warmup_ratio": 0.0, "run_dir": f"{name}-{world}", **options}
    return Trainer(task or MeanTask(deep_mlp()), data or TensorDataset(X, Y), **chosen)


def history(run: Trainer, *names: str) -> dict[str, Tensor]:
    """At which steps a metric was recorded, and its values."""
    rows = {
        name: [[record["step"], record[name]] for record in run.state.log_history if name in record] for name in names
    }
    return {f"history of {name}": torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}


def saved_steps(folder: str) -> list[int]:
    """Steps of the checkpoints that were kept."""
    return sorted(int(path.name.split("_")[1]) for path in Path(folder, "checkpoints").glob("step_*"))


class Positioned:
    """A loader that says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        self.at %= SAMPLES
        while self.at < SAMPLES:
            begin, self.at = self.at, min(self.at + 8, SAMPLES)
            yield [X[begin : self.at], Y[begin : self.at]]

    def state_dict(self) -> Values:
        return {"at": self.at}

    def load_state_dict(self, state: Values) -> None:
        self.at = state["at"]


class Stream(IterableDataset):
    """Samples one by one."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < SAMPLES:
            self.at += 1
            yield X[self.at - 1], Y[self.at - 1]
        self.at = 0


class PositionedStream(Stream):
    """One that says where it is."""

    state_dict, load_state_dict = Positioned.state_dict, Positioned.load_state_dict


class Shuffling(IterableDataset):
    """Draws as it goes, from the random numbers of the process."""

    def __iter__(self) -> Any:
        left = list(range(SAMPLES))
        while left:
            place = left.pop(random.randrange(min(8, len(left))))
            yield X[place], Y[place], torch.tensor(place)


class Noting(MeanTask):
    """Writes down which samples it saw."""

    def __init__(self) -> None:
        super().__init__(deep_mlp())
        self.seen: list[int] = []

    def train_step(self, batch: Any) -> Tensor:
        self.seen += batch[2].tolist()
        return super().train_step(batch[:2])


LOADERS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(TensorDataset(X, Y), 8, shuffle=True),
    "positioned": Positioned,
    "stream": Stream,
    "positioned stream": PositionedStream,
}


def taken_up(kind: str, dispatch: bool) -> Callable[[int, int], Values]:
    """A run over a user's data loader, stopped in the middle of an epoch and resumed."""

    def case(rank: int, world: int) -> Values:
        name = f"{kind.replace(' ', '-')}-{dispatch}"
        for steps in (7, 15):
            options = {"max_steps": steps, "save_every": 3, "resume": "auto", "dispatch_batches": dispatch}
            run = trainer(name, world, data=LOADERS[kind](), **options).fit()
        return found(run) | {"position": run.state.position}

    return case


def shuffled_stream(rank: int, world: int) -> Values:
    """Every sample once, though the stream draws from random numbers that ranks have of their own."""
    task = Noting()
    run = trainer("shuffling", world, task, Shuffling(), epochs=1).fit()
    return {"seen": sorted(place for one in run_of(run).process_group.all_gather_object(task.seen) for place in one)}


def divided(rank: int, world: int) -> Values:
    """A loader that divides the data itself: two ranks together have all of it."""
    data = TensorDataset(X, Y, torch.arange(SAMPLES))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, world, rank) if world > 1 else None)
    task = Noting()
    run = trainer("divided", world, task, loader, epochs=1).fit()
    return {"seen": sorted({place for one in run_of(run).process_group.all_gather_object(task.seen) for place in one})}


def divided_and_dispatched(rank: int, world: int) -> Values:
    data = TensorDataset(X, Y)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank))
    return found(trainer("refused", world, data=loader, dispatch_batches=True).fit())


class Broken(torch.utils.data.Dataset):
    """Some samples cannot be read."""

    def __init__(self, broken: set[int]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.broken:
            raise ValueError(f"sample {index} is broken")
        return X[index], Y[index]


def left_out(dispatch: bool) -> Callable[[int, int], Values]:
    """All samples of one rank's part of a batch, and one of another batch."""

    def case(rank: int, world: int) -> Values:
        order = epoch_order(SAMPLES, 42, 0, shuffle=True)
        broken = Broken({*order[12:16].tolist(), int(order[34])})
        options = {"seed": 42, "epochs": 2, "bad_samples": "skip", "dispatch_batches": dispatch}
        run = trainer(f"broken-{dispatch}", world, data=broken, **options).fit()
        return found(run) | {"bad": run.state.bad_samples}

    return case


def unreadable(rank: int, world: int) -> Values:
    return found(trainer("unreadable", world, data=Broken({9}), dispatch_batches=True).fit())


def sampled(name: str, batch_size: int) -> Callable[[int, int], Values]:
    def case(rank: int, world: int) -> Values:
        data = TensorDataset(X, Y)
        data.targets = Y.tolist()  # type: ignore[attr-defined]
        return found(trainer(name, world, data=data, sampler=name, batch_size=batch_size).fit())

    return case


def tiny(rank: int, world: int) -> Values:
    """Batches of one sample: every other rank is lent one."""
    few = TensorDataset(*classes(3, seed=2))
    return found(trainer("tiny", world, data=TensorDataset(X[:5], Y[:5]), val_data=few, batch_size=1).fit())


#: Those that end like one process.
SAME: dict[str, Callable[[int, int], Values]] = {
    **{f"{kind}, each reads": taken_up(kind, dispatch=False) for kind in LOADERS},
    **{f"{kind}, rank 0 reads": taken_up(kind, dispatch=True) for kind in ("loader", "positioned stream")},
    "shuffled stream": shuffled_stream,
    "divided": divided,
    "left out, each reads": left_out(dispatch=False),
    "left out, rank 0 reads": left_out(dispatch=True),
    "balanced": sampled("balanced", 8),
    "pk": sampled("pk", 6),
    "tiny": tiny,
}

#: Those that fail on every rank.
FAILING: dict[str, Callable[[int, int], Values]] = {
    "dispatched twice": divided_and_dispatched,
    "unreadable": unreadable,
}
