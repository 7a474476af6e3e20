"""What a run can do beside training, on any number of ranks; what each found is compared with one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import feature_data
import ssl_toys
import torch
from feature_data import SAMPLES, Values, X, Y, history, saved_steps, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training_runs import deep_mlp, found, run_mlp
from transformers import TrainerCallback

from toys import MeanTask, TokenTask, classes, tokens
from trainformer import Loss
from trainformer.backends.torch.state import gathered
from trainformer.callbacks import (
    EMA,
    EarlyStopping,
    GradientMonitor,
    LRFinder,
    ModelCheckpoint,
    OnlineKNN,
    OnlineLinear,
    Throughput,
)
from trainformer.core.types import Mean
from trainformer.run import folder as run_folder
from trainformer.run import run_of

# -- callbacks ---------------------------------------------------------------------------------------------


def with_callbacks(strategy: str) -> Callable[[int, int], Values]:
    """An average of the weights, files of the best, gradient norms, saves behind the loop's back; then from a file."""

    def case(rank: int, world: int) -> Values:
        folder = f"callbacks-{strategy}-{world}"
        ema, best = (
            EMA(decay=0.9, compare=True),
            ModelCheckpoint(save_top_k=2, save_dir=f"{folder}/best", filename="{step}"),
        )
        callbacks = [ema, EarlyStopping(patience=2), best, GradientMonitor(log_every=3), Throughput()]
        run = run_mlp(
            strategy,
            run_dir=folder,
            save_every=2,
            save_last=2,
            save_async=True,
            eval_every="4steps",
            callbacks=callbacks,
        ).fit()
        norms = ("train/grad_norm_max", "train/grad_norm_largest_parameter")
        values: Values = found(run) | history(run, "val/without_ema/loss", *norms)
        values |= {f"average {key}": value for key, value in gathered(ema.model.state_dict()).items()}
        values["kept"] = saved_steps(folder), sorted(path.name for path in Path(folder, "best").iterdir())
        values["predicted"] = torch.stack([row["logits"] for row in run.predict(TensorDataset(*classes(11)))])
        run.predict(TensorDataset(*classes(11)), batch_size=3, out=f"{folder}.jsonl")  # with a rank without samples
        rows = [json.loads(line) for line in Path(f"{folder}.jsonl").read_text().splitlines()]
        values["written"] = torch.tensor([row["logits"] for row in rows], dtype=torch.float64)
        values["ids"] = [row["id"] for row in rows]
        values["elsewhere"] = torch.tensor(list(run.evaluate(TensorDataset(*classes(9, seed=5))).values()))
        again = run_mlp(strategy, run_dir=f"{folder}-again", callbacks=[EMA(decay=0.9)], max_steps=14)
        again.load(best.best_path).fit()
        return values | {f"again {key}": value for key, value in found(again).items()}

    return case


def finding_a_rate(strategy: str) -> Callable[[int, int], Values]:
    """Trial steps of all ranks, of which nothing is left."""

    def case(rank: int, world: int) -> Values:
        finder = LRFinder(num_steps=20)
        run = run_mlp(strategy, run_dir=f"rate-{strategy}-{world}", epochs=1, callbacks=[finder])
        run.fit()
        return found(run) | {
            "losses": torch.tensor(finder.losses),
            "suggested": torch.tensor(finder.suggested_lr or 0.0),
        }

    return case


def checked(strategy: str, task: type, data: Callable[[int], Any], samples: int) -> Callable[[int, int], Values]:
    """The pre-flight, and a run after it."""

    def case(rank: int, world: int) -> Values:
        dataset, few = TensorDataset(*data(samples)), TensorDataset(*data(5))
        name = f"check-{strategy}-{task.__name__}-{samples}"
        run = trainer(name, world, task(), dataset, val_data=few, strategy=strategy, batch_size=min(8, samples))
        report = run.check(raise_on_failure=False)
        told = [(f.question, f.status, "" if f.question == "cost" else f.message) for f in report.findings]
        return found(run.fit()) | {"told": told}

    return case


def self_supervised(method: str) -> Callable[[int, int], Values]:
    """A classifier that is trained beside the run, on the features of all ranks."""

    def case(rank: int, world: int) -> Values:
        data = TensorDataset(ssl_toys.pixels(30), ssl_toys.labels(30))
        data.targets, data.num_classes = ssl_toys.labels(30).tolist(), 3  # type: ignore[attr-defined]
        beside = OnlineLinear()
        options = {"augment": ssl_toys.two_views} if method == "simclr" else {}
        run = trainer(
            *(method, world, ssl_toys.make(method, **options), data),
            val_data=data, epochs=2, batch_size=12, lr=1e-3, drop_last=False, callbacks=[beside, OnlineKNN(k=3)],
        ).fit()  # fmt: skip
        assert beside.classifier is not None
        values = history(run, "val/online_linear", "val/online_knn")
        return values | {"beside": (beside.classifier[1].weight.detach().double() * 1e3).round()}

    return case


# -- requests ----------------------------------------------------------------------------------------------


class Asks:
    """Asks for everything, if this is the rank that does."""

    def __init__(self, does: bool) -> None:
        self.does = does

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        control, wanted = trainer.control, step if self.does else 0
        control.should_log |= wanted == 2
        control.should_save |= wanted == 3
        control.should_evaluate |= wanted == 4
        control.should_end_epoch |= wanted == 6
        if wanted == 9:
            trainer.stop("enough")


class StopsLate:
    """Asks to stop, having come in the middle of a run."""

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step >= 6:
            trainer.stop("late")


class Adds:
    """Adds a callback on one rank during the run."""

    sets_control = False

    def __init__(self, does: bool) -> None:
        self.does = does

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step == 3 and self.does:
            trainer.add_callback(StopsLate())


class Aborts:
    def __init__(self, does: bool) -> None:
        self.does = does

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step == 5 and self.does:
            trainer.control.abort("broken", by="Aborts")


class ForeignStop(TrainerCallback):
    """In the words of transformers."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_evaluate |= state.global_step == 2
        control.should_training_stop |= state.global_step == 4


def asked(which: str) -> Callable[[int, int], Values]:
    """One rank asks: the last one, or the first, which alone has the callback."""

    def case(rank: int, world: int) -> Values:
        last, first = rank == world - 1, rank == 0
        callbacks = {
            "last": [Asks(last)],
            "first": [Asks(True)] if first else [],
            "added": [Adds(last)],
            "abort": [Aborts(last)],
            "foreign": [ForeignStop()] if first else [],
        }[which]
        options = {"log_every": 100, "eval_every": None, "epochs": 9, "save_last": 10}
        if which == "abort":
            options["save_every"] = 2
        run = run_mlp("auto", run_dir=f"ask-{which}-{world}", callbacks=callbacks, **options).fit()
        values: Values = found(run) | history(run, "train/loss", "val/loss")
        return values | {"kept": saved_steps(f"ask-{which}-{world}"), "why": run.control.stop_reason}

    return case


def by_the_clock(rank: int, world: int) -> Values:
    """Cadences in seconds, and SIGUSR1 to one rank: every rank saves and logs at the same steps, or none would end."""

    class Slow:
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            time.sleep(0.03)
            if step == 4 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    options = {"log_every": "0.1s", "save_every": "0.2s", "save_last": 50, "save_async": True}
    run = trainer("clock", world, callbacks=[Slow()], **options).fit()
    steps, logged = saved_steps(f"clock-{world}"), history(run, "train/loss")["history of train/loss"]
    return {"signal obeyed": bool({4, 5} & set(steps)), "several": len(steps) > 2 < len(logged), "end": run.state.step}


# -- steps -------------------------------------------------------------------------------------------------


class Explodes(torch.autograd.Function):
    """0, with infinite gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.new_full(ctx.shape, float("inf"))


class Poisoned(MeanTask):
    """Not finite where one sample is seen, so on one rank only; a few times, or always."""

    def __init__(self, kind: str, times: int) -> None:
        super().__init__(deep_mlp())
        self.kind, self.times = kind, times

    def train_step(self, batch: Any) -> Tensor:
        loss = super().train_step(batch)
        if self.times and bool((batch[0] == X[5]).all(1).any()):
            self.times -= 1
            return loss * float("nan") if self.kind == "loss" else loss + Explodes.apply(self.model[0].weight)
        return loss


def poisoned(kind: str, policy: str, times: int) -> Callable[[int, int], Values]:
    def case(rank: int, world: int) -> Values:
        name = f"poison-{kind}-{policy.replace(':', '')}"
        run = trainer(name, world, Poisoned(kind, times), nonfinite=policy).fit()
        return found(run) | {"skipped": run_of(run).backend.guard.skipped}

    return case


class Metrics(MeanTask):
    """One metric of every step, and one of those with a certain sample: on one rank only."""

    def train_step(self, batch: Any) -> Loss:
        loss, size = super().train_step(batch), len(batch[0])
        rare = {"rare": (torch.tensor(2.0), 1)} if bool((batch[0] == X[3]).all(1).any()) else {}
        return Loss(loss * size, size, {"always": loss.detach(), **rare})


class Bare(MeanTask):
    """A parameter outside any module, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__(deep_mlp())
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.model[0].weight.requires_grad_(False)

    def train_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]) * self.scale, batch[1])


class Partly(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = deep_mlp(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Idle(MeanTask):
    """A step without a loss."""

    def train_step(self, batch: Any) -> Any:
        return Mean(None, 0)


class Noisy(MeanTask):
    """Writes down what dropout left out."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(deep_mlp(), nn.Dropout(0.5)))
        self.masks: list[list[bool]] = []

    def train_step(self, batch: Any) -> Tensor:
        logits = self.model(batch[0])
        self.masks.append((logits[0] == 0).tolist())
        return F.cross_entropy(logits, batch[1])


def dropped_out(rank: int, world: int) -> Values:
    """Masks differ between ranks, and go on after a file was loaded as they would have without."""

    class Saves:
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            if step == 6:
                trainer.save(f"dropout-{world}.pt")

    whole, rest = Noisy(), Noisy()
    run = trainer("dropout", world, whole, max_steps=10, callbacks=[Saves()]).fit()
    trainer("dropout-rest", world, rest, max_steps=10).load(f"dropout-{world}.pt").fit()
    masks = run_of(run).process_group.all_gather_object(whole.masks)
    same = all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), rest.model.parameters(), strict=True))
    return {"own masks": world == 1 or masks[0] != masks[1], "the same again": rest.masks == whole.masks[6:] and same}


def precise(precision: str) -> Callable[[int, int], Values]:
    def case(rank: int, world: int) -> Values:
        data = TensorDataset(X.float(), Y)
        values = found(trainer(precision, world, MeanTask(deep_mlp().float()), data, precision=precision).fit())
        return {"losses": (values["train/loss"] * 20).round(), "counts": values["counts"]}

    return case


def unlike(strategy: str) -> Callable[[int, int], Values]:
    """Ranks that begin with other weights and buffers: those of rank 0 count."""

    def case(rank: int, world: int) -> Values:
        torch.manual_seed(100 + rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        model[1].running_mean.normal_()
        return found(trainer(f"unlike-{strategy}", world, MeanTask(model), strategy=strategy).fit())

    return case


def once_more(rank: int, world: int) -> Values:
    """Further epochs, in the same process and in the next; then only the weights, for another run."""
    first = trainer("more", world, epochs=1).fit()
    first.epochs = 2
    second = trainer("more", world, epochs=3, resume="auto")
    third = trainer("weights", world, epochs=1, resume=f"more-{world}", load_components=["model"])
    runs = enumerate([first.fit(), second.fit(), third.fit()])
    return {f"{number} {key}": value for number, run in runs for key, value in found(run).items()}


def drifting(rank: int, world: int) -> Values:
    """A weight that is changed on one rank only."""

    class Drift:
        def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
            if step == 3 and rank == world - 1:
                with torch.no_grad():
                    trainer.task.model[2].bias[1] += 1e-3

    return found(trainer("drift", world, save_every=4, callbacks=[Drift()]).fit())


def blind(rank: int, world: int) -> Values:
    """The last of several ranks does not see what rank 0 writes."""
    sees = run_folder._appears
    run_folder._appears = (lambda mark: False) if 0 < rank == world - 1 else sees
    try:
        return found(trainer("blind", world).fit())
    finally:
        run_folder._appears = sees


def with_task(name: str, task: Callable[[], Any], **options: Any) -> Callable[[int, int], Values]:
    def case(rank: int, world: int) -> Values:
        made = task()
        run = trainer(name, world, made, **options).fit()
        bare = {"scale": made.scale.detach().clone()} if hasattr(made, "scale") else {}
        return found(run) | history(run, "train/always", "train/rare") | bare

    return case


UNUSED = {"name": "ddp", "find_unused_parameters": True}

#: Those that end like one process.
SAME: dict[str, Callable[[int, int], Values]] = {
    **{f"callbacks, {name}": with_callbacks(name) for name in ("ddp", "fsdp")},
    **{f"rate, {name}": finding_a_rate(name) for name in ("ddp", "fsdp")},
    "check, ddp": checked("ddp", MeanTask, classes, SAMPLES),
    "check, tokens": checked("ddp", TokenTask, tokens, SAMPLES),
    "check, fsdp": checked("fsdp", MeanTask, classes, SAMPLES),
    "check, one sample": checked("ddp", MeanTask, classes, 1),
    **{name: self_supervised(name) for name in ("simclr", "dino")},
    **{f"asks, {which}": asked(which) for which in ("last", "first", "added", "abort", "foreign")},
    "clock": by_the_clock,
    **{f"NaN, {kind}, {policy}": poisoned(kind, policy, times)
       for kind in ("loss", "gradient") for policy, times in (("skip", 99), ("retry:2", 1))},
    "metrics": with_task("metrics", lambda: Metrics(deep_mlp()), log_every=3, accumulation_steps=2),
    "bare": with_task("bare", Bare),
    "unused, looked for": with_task("looked-for", lambda: MeanTask(Partly()), strategy=UNUSED),
    "dropout": dropped_out,
    **{name: precise(name) for name in ("bf16", "fp16")},
    **{f"unlike, {name}": unlike(name) for name in ("ddp", "fsdp")},
    "once more": once_more,
    **feature_data.SAME,
}  # fmt: skip

#: Those that fail on every rank; what one process makes of them is its own business.
FAILING: dict[str, Callable[[int, int], Values]] = {
    "NaN, loss, raise": poisoned("loss", "raise", 99),
    "NaN, gradient, raise": poisoned("gradient", "raise", 99),
    "NaN, loss, retry:1": poisoned("loss", "retry:1", 99),
    "unused": with_task("unused", lambda: MeanTask(Partly()), strategy="ddp"),
    "idle": with_task("idle", lambda: Idle(deep_mlp())),
    "drift": drifting,
    "blind": blind,
    **feature_data.FAILING,
}  # fmt: skip


def features(rank: int, world: int) -> dict[str, Any]:
    """Everything, in this order on every rank."""
    os.chdir(os.environ["RUNS_FOLDER"])
    results = {f"{name}: {key}": value for name, case in SAME.items() for key, value in case(rank, world).items()}
    for name, case in FAILING.items() if world > 1 else ():
        try:
            case(rank, world)
        except Exception as error:
            results[f"{name}!"] = f"{type(error).__name__}: {error}"
    return results
