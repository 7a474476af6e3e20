"""What users of trainloop, the successor of mini.trainer, know: names, hooks, paths, and its checkpoints."""

import itertools
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mini_toys import Classifier, Keeper, batches_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from toys import MeanTask, classes, largest_difference, mlp, same, weights
from trainformer import Trainer
from trainformer.core.errors import BadArgument
from trainformer.mini import (
    BaseHook,
    BaseTrainer,
    CheckpointingHook,
    EmaHook,
    ImageFileLoggerHook,
    LoggingHook,
    LossNoneWarning,
    NonFiniteGradients,
    ProgressHook,
    WandbHook,
)
from trainformer.mini.utils import flatten_nested_dict, key_average


def steps_on_disk(folder):
    return sorted(int(p.stem.rpartition("_")[2]) for p in Path(folder).glob("checkpoint_step_*.pt"))


class Hears(BaseHook):
    """Keeps what is logged."""

    def __init__(self):
        self.logs = []

    def on_log(self, trainer, records, dry_run=False):
        self.logs.append(records["train"])


# -- gradients ---------------------------------------------------------------------------------------------


class Gradients(BaseHook):
    """Keeps the norm of all gradients before each optimizer step, and scales them."""

    def __init__(self, scale=1.0):
        self.scale, self.norms, self.known = scale, [], []

    def on_before_optimizer_step(self, trainer):
        gradients = [p.grad for p in trainer.model.parameters()]
        self.norms.append((trainer.step, torch.cat([g.flatten() for g in gradients]).norm().item()))
        self.known.append(sorted(trainer.step_info))
        for gradient in gradients:
            gradient.mul_(self.scale)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_hook_sees_complete_gradients_before_they_are_clipped(accumulation):
    hook, keeper = Gradients(), Keeper()
    options = {"grad_clip": 0.05, "gradient_accumulation_steps": accumulation}
    trainer = Classifier(3, hooks=[hook, keeper], **options)
    trainer.train()
    plain = Classifier(3, **options)
    plain.train()
    assert largest_difference(weights(trainer), weights(plain)) < 1e-12
    assert hook.norms == [(i + 1, pytest.approx(float(info["grad_norm"]))) for i, info in enumerate(keeper.infos)]
    assert min(norm for _, norm in hook.norms) > 0.05
    assert hook.known[0] == ["data_time", "loss", "non_finite_grad_retry_count", "records"]


def test_a_hook_may_change_gradients_before_they_are_clipped():
    keeper = Keeper()
    doubled = Classifier(1, hooks=[Gradients(2.0), keeper])
    doubled.train()
    plain = Classifier(1, lr=0.2)
    plain.train()
    assert largest_difference(weights(doubled), weights(plain)) < 1e-12
    clipped, other = Classifier(1, grad_clip=1e-3, hooks=[Gradients(2.0)]), Classifier(1, grad_clip=1e-3)
    clipped.train()
    other.train()
    assert largest_difference(weights(clipped), weights(other)) < 1e-8  # the direction is the same
    assert float(keeper.infos[0]["grad_norm"]) == pytest.approx(2 * float(plain.step_info["grad_norm"]))


@pytest.mark.parametrize(
    "options", [{}, {"max_non_finite_grad_retries": 2}, {"mixed_precision": "fp16"}], ids=["plain", "retries", "fp16"]
)
def test_gradients_that_a_hook_spoils_never_reach_the_weights(options):
    class Spoils(BaseHook):
        def on_before_optimizer_step(self, trainer):
            if trainer.step == 2:
                next(iter(trainer.model.parameters())).grad.fill_(float("nan"))

    class InFloat(Classifier):
        def forward(self, input):
            return super().forward((input[0].float(), input[1]))

    trainer = InFloat(3, hooks=[Spoils()], model=mlp(dtype=torch.float32), **options)
    if "mixed_precision" in options:
        trainer.train()  # the scaler skips the step
    else:
        with pytest.raises(NonFiniteGradients):
            trainer.train()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_the_hook_before_the_optimizer_step_runs_in_the_main_trainer_too():
    hook = Gradients()

    class Sees(Gradients):
        def on_before_optimizer_step(self, trainer):
            self.norms.append(trainer.step)

    sees = Sees()
    Trainer(MeanTask(), classes(), callbacks=[hook, sees], max_steps=2, log="none", device="cpu").fit()
    assert sees.norms == [1, 2]
    assert all(norm > 0 for _, norm in hook.norms)


class Infinite(Classifier):
    """The first call of `forward` gives infinite gradients."""

    def forward(self, input):
        loss, records = super().forward(input)
        return loss * (float("inf") if len(self.seen) == 1 else 1.0), records


def test_retries_are_counted_and_logged():
    hook, keeper, hears = Gradients(), Keeper(), Hears()
    trainer = Infinite(2, max_non_finite_grad_retries=1, hooks=[LoggingHook(2), hook, keeper, hears])
    trainer.train()
    assert [info["non_finite_grad_retry_count"] for info in keeper.infos] == [1, 0]
    assert hears.logs[0]["non_finite_grad_retry_count"] == 0.5
    assert [step for step, _ in hook.norms] == [1, 2]  # not for the attempt that is repeated
    assert len(keeper.infos[0]["loss"]) == len(keeper.infos[0]["records"]) == 1


# -- logs --------------------------------------------------------------------------------------------------


def test_learning_rates_have_the_names_of_their_groups(caplog):
    class Named(Classifier):
        def build_optimizer(self):
            first, last = self.model[0].parameters(), self.model[2].parameters()
            return torch.optim.SGD([{"params": first, "name": "backbone"}, {"params": last, "lr": 0.5}], lr=0.1)

    caplog.set_level("INFO")
    hears = Hears()
    hooks = [LoggingHook(1), ProgressHook(1, show_units=False), hears]
    Named(3, hooks=hooks, schedule=lambda o: StepLR(o, 1, 0.5)).train()
    assert [log["lr"] for log in hears.logs] == [
        {"backbone": 0.1, "group_1": 0.5},
        {"backbone": 0.05, "group_1": 0.25},
        {"backbone": 0.025, "group_1": 0.125},
    ]
    line = next(m for m in caplog.messages if m.startswith("Step 2/3"))
    assert " lr_backbone 5.00e-02 lr_1 2.50e-01" in line
    assert "s data" not in line


def test_values_that_hooks_add_are_logged_if_they_are_numbers():
    class Adds(BaseHook):
        def on_before_step(self, trainer):
            trainer.step_info |= {"depth": trainer.step, "words": "many", "picture": torch.ones(3, 2)}

        def on_after_step(self, trainer):
            trainer.step_info["max_memory"] = float(trainer.step)

    hears = Hears()
    Classifier(3, hooks=[Adds(), LoggingHook(3), ProgressHook(1), hears]).train()
    assert (hears.logs[0]["depth"], hears.logs[0]["max_memory"]) == (2.0, 3.0)  # a mean and a maximum
    assert not hears.logs[0].keys() & {"words", "picture"}


def test_nan_can_be_left_out_of_averages():
    records = [{"a": 1.0, "n": {"x": float("nan")}}, {"a": float("nan"), "n": {"x": float("nan")}}, {"a": 3.0}]
    average = key_average(records, exclude_nan=True)
    assert average["a"] == 2.0
    assert average["n"]["x"] != average["n"]["x"]
    assert key_average(records)["a"] != key_average(records)["a"]
    assert flatten_nested_dict({"a": {"b": 1}, "c": 2}) == {("a", "b"): 1, ("c",): 2}


# -- paths and retention -----------------------------------------------------------------------------------


def test_relative_paths_are_inside_the_workspace():
    class Draws(BaseHook):
        def on_after_step(self, trainer):
            trainer.log_images({"a": {"b": torch.zeros(4, 2, 2)}, "c": torch.zeros(3, 2, 2)})

    def run(workspace, steps):
        formats = ImageFileLoggerHook(image_format=lambda name: "jpg" if name == "b" else "png")
        hooks = [CheckpointingHook(2, path="checkpoints"), Draws(), formats]
        trainer = Classifier(steps, hooks=hooks, workspace=workspace)
        trainer.train()
        return trainer

    assert run("one", 3).step == 3
    assert run(Path("two").absolute(), 2).step == 2  # a run of its own
    assert (steps_on_disk("one/checkpoints"), steps_on_disk("two/checkpoints")) == ([2, 3], [2])
    assert sorted(p.name for p in Path("two/images").iterdir()) == [
        *("a_b_step_1.jpg", "a_b_step_2.jpg", "c_step_1.png", "c_step_2.png"),
    ]
    assert not Path("checkpoints").exists()
    assert not Path("images").exists()
    # A path that begins with the workspace, as in the examples of mini.trainer, is meant as it is.
    Classifier(1, hooks=[CheckpointingHook(1, path=Path("three") / "saved")], workspace="three").train()
    assert steps_on_disk("three/saved") == [1]


def test_chosen_steps_are_saved_and_kept():
    hook = CheckpointingHook(5, keep_previous=1, keep_steps=[3, 5])
    Classifier(8, hooks=[hook]).train()
    assert steps_on_disk("checkpoints") == [3, 5, 8]
    with pytest.raises(BadArgument, match="keep_steps to be an integer of at least 1, received 0"):
        CheckpointingHook(5, keep_steps=[0])


def test_a_checkpoint_is_found_by_its_name():
    Classifier(4, hooks=[CheckpointingHook(2)], workspace="ws").train()
    trainer = Classifier(3, hooks=[CheckpointingHook(5, load="checkpoint_step_2.pt", path="checkpoints")])
    trainer.workspace = Path("ws")
    trainer.train()
    assert len(trainer.seen) == 1


def test_arguments_as_in_trainloop():
    hook = CheckpointingHook(interval=3, exit_signals=signal.SIGTERM, exit_wait=timedelta(minutes=1), keep_interval=0)
    assert hook.exit_signals == (signal.SIGTERM,)
    assert hook.exit_wait == 60.0
    assert BaseTrainer(3, device="cpu", mixed_precision="bf16").mixed_precision is torch.bfloat16
    inner = nn.Linear(1, 1)
    assert BaseTrainer.unwrap(nn.DataParallel(inner)) is inner
    Path("config.json").write_text('{"lr": 0.1}')
    assert WandbHook("project", config="config.json").config == {"lr": 0.1}


# -- state -------------------------------------------------------------------------------------------------


class Shares(BaseHook):
    """Reads the whole state and adds to it, as hooks of trainloop do."""

    def __init__(self, name="shared"):
        self.name, self.loaded = name, None

    def on_state_dict(self, trainer, state_dict):
        state_dict[self.name] = {"step": state_dict["training_state"]["step"], "weights": len(state_dict["model"])}
        state_dict["training_state"]["note"] = "kept"

    def on_load_state_dict(self, trainer, state_dict):
        self.loaded = (state_dict[self.name], state_dict["training_state"]["note"], sorted(state_dict["model"]))


def test_hooks_share_one_state():
    trainer = Classifier(3, hooks=[Shares(), Shares("other"), CheckpointingHook(3), EmaHook(0.9)])
    trainer.train()
    state = trainer.state_dict()
    assert state["shared"] == state["other"] == {"step": 3, "weights": 4}
    assert state["training_state"].keys() == {"step", "optimizer", "lr_scheduler", "grad_scaler", "note"}
    again, other = Shares(), Shares("other")
    Classifier(4, hooks=[again, other, CheckpointingHook(4), EmaHook(0.9)]).train()
    assert again.loaded == other.loaded == ({"step": 3, "weights": 4}, "kept", sorted(mlp().state_dict()))


def trainloop_state(trainer, ema):
    """The state of a trainer in the format of trainloop, which names the optimizer's parameters."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {
        "model": model,
        "training_state": {
            "step": trainer.step,
            "optimizer": optimizer,
            "lr_scheduler": trainer.lr_scheduler.state_dict(),
            "grad_scaler": trainer.grad_scaler.state_dict(),
        },
        "ema_model": ema.ema_model.state_dict(),
    }


@pytest.mark.parametrize("way", ["state", "latest", "name", "path"])
def test_a_checkpoint_of_trainloop_is_continued(way):
    def make(steps, *hooks, skip=0):
        ema = EmaHook(0.75)
        batches = itertools.islice(itertools.cycle(batches_of()), skip, None)
        options = {"schedule": lambda o: StepLR(o, 2, 0.5), "workspace": None if way == "state" else "ws"}
        return Classifier(steps, batches=batches, hooks=[ema, LoggingHook(2), *hooks], **options), ema

    whole, average = make(7)
    whole.train()
    half, half_average = make(3)
    half.train()
    state = trainloop_state(half, half_average)
    folder = Path("ws/checkpoints/3_keep")
    folder.mkdir(parents=True)
    for name, part in state.items():
        torch.save(part, folder / f"{name}.pt")
    Path("ws/checkpoints/latest").symlink_to("3_keep", target_is_directory=True)
    load = {"latest": "latest", "name": "3_keep", "path": folder}.get(way)
    hook = CheckpointingHook(2, load=load)
    again, again_average = make(7, *([] if way == "state" else [hook]), skip=3)
    if way == "state":
        again.load_state_dict(state)
    again.train()
    assert len(again.seen) == 4
    assert same(weights(again), weights(whole))
    assert same(again_average.ema_model.state_dict(), average.ema_model.state_dict())
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    if way != "state":
        assert steps_on_disk("ws/checkpoints") == [4, 6, 7]


# -- one process in a group --------------------------------------------------------------------------------


def test_a_batch_without_a_loss_warns_for_a_ddp_model():
    class Moody(Classifier):
        def forward(self, input):
            loss, records = super().forward(input)
            return (None if len(self.seen) == 2 else loss), records

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Moody(2, model=DistributedDataParallel(mlp()))
        with pytest.warns(LossNoneWarning, match="returned no loss for a DDP or FSDP model"):
            trainer.train()
    finally:
        dist.destroy_process_group()
    assert trainer.step == 2
