"""Hooks: when they are called, what they receive, and mixing hooks, native and HF callbacks in any run."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from mini_toys import Classifier, Keeper, Teller, batches_of, by_hand
from PIL import Image
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from toys import MeanTask, classes, largest_difference, mlp, same, weights
from trainformer import Trainer
from trainformer.core.errors import BadArgument
from trainformer.loggers.jsonl import read_jsonl
from trainformer.mini import (
    BaseHook,
    CheckpointingHook,
    CudaMaxMemoryHook,
    EmaHook,
    ImageFileLoggerHook,
    LoggingHook,
    ProgressHook,
    WandbHook,
    key_average,
)
from trainformer.mini.hooks import as_image
from trainformer.run import run_of


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Step ")]


def collecting(trainer_class=Classifier):
    """A trainer that records its logs."""

    class Collecting(trainer_class):
        def log(self, records, dry_run=False):
            self.logged = [*getattr(self, "logged", []), (self.step, records["train"])]
            super().log(records, dry_run)

    return Collecting


# -- order and steps ---------------------------------------------------------------------------------------


def test_order_and_step_of_hook_calls():
    hook = Teller()
    trainer = Classifier(2, hooks=[hook])
    before = trainer.step
    steps_in_forward = []
    forward = trainer.forward
    trainer.forward = lambda input: (steps_in_forward.append(trainer.step), forward(input))[1]
    trainer.train()
    assert before == 0
    assert steps_in_forward == [1, 2]
    assert [(what, step) for _, what, step in hook.story] == [
        ("before_train", 0),
        ("before_step", 1),
        ("after_step", 1),
        ("before_step", 2),
        ("after_step", 2),
        ("after_train", 2),
    ]


class Native:
    """A native callback."""

    def __init__(self, story):
        self.story = story

    def on_step_end(self, trainer, step, loss):
        self.story.append(("native", "after_step", trainer.state.step))
        assert float(loss) > 0
        assert trainer.total_steps == 2


class Foreign(transformers.TrainerCallback):
    """An HF callback."""

    def __init__(self, story):
        self.story = story

    def on_step_end(self, args, state, control, **kwargs):
        self.story.append(("huggingface", "after_step", state.global_step))
        assert state.max_steps == args.max_steps == 2
        assert kwargs["model"] is not None
        assert args.gradient_accumulation_steps == 1


def steps_told(story):
    return [(who, step) for who, what, step in story if what == "after_step"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("way", ["mini", "main"])
def test_hooks_native_and_hf_callbacks_run_in_the_given_order(way, order):
    story = []
    callbacks = [Teller("hook", story), Native(story), Foreign(story)]
    chosen = [callbacks[i] for i in order]
    if way == "mini":
        Classifier(2, hooks=chosen).train()
    else:
        Trainer(MeanTask(), classes(), callbacks=chosen, max_steps=2, log="none", device="cpu").fit()
    names = [("hook", "native", "huggingface")[i] for i in order]
    assert steps_told(story) == [(name, step) for step in (1, 2) for name in names]


def test_any_callback_can_stop_a_mini_run():
    class Stops(Foreign):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    trainer = Classifier(8, hooks=[Stops([])])
    trainer.train()
    assert trainer.step == 3

    class StopsToo(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step == 2:
                trainer.stop("enough")

    trainer = Classifier(8, hooks=[StopsToo()])
    trainer.train()
    assert trainer.step == 2


def test_hooks_in_the_main_trainer():
    seen = {}

    class Looks(BaseHook):
        def on_before_step(self, trainer):
            seen.setdefault("before", trainer.step)

        def on_after_step(self, trainer):
            seen.update(
                after=trainer.step,
                most=trainer.max_steps,
                model=trainer.model,
                inner=trainer.unwrapped_model,
                same=trainer.unwrap(trainer.model) is trainer.model,
                optimizer=trainer.optimizer,
                rate=trainer.lr_scheduler.get_last_lr()[0],
                device=trainer.device,
                workspace=trainer.workspace,
                length=len(trainer.data_loader),
                info=trainer.step_info,
                hooks=trainer.hooks,
            )
            trainer.log({"a": 1}, dry_run=True)

        def on_log(self, trainer, records, dry_run):
            seen["log"] = records, dry_run

        def on_log_images(self, trainer, records, dry_run):
            seen["images"] = records, dry_run

        def on_after_train(self, trainer):
            trainer.log_images({"b": 2})

    task, looks = MeanTask(), Looks()
    trainer = Trainer(task, classes(), callbacks=[looks], max_steps=3, batch_size=16, log="none", device="cpu")
    trainer.fit()
    assert (seen["before"], seen["after"], seen["most"], seen["length"]) == (1, 3, 3, 4)
    assert seen["model"] is seen["inner"] is task.model
    assert seen["same"]
    assert seen["optimizer"] is trainer.active_optimizer
    assert seen["workspace"] == trainer.run_folder
    assert seen["device"] == torch.device("cpu")
    assert seen["hooks"] == [looks]
    assert seen["log"] == ({"a": 1}, True)
    assert seen["images"] == ({"b": 2}, False)
    info = key_average([{name: value for name, value in seen["info"].items() if name != "records"}])
    assert info.keys() == {"loss", "grad_norm", "lr_0", "lr_1", "step_time"}  # matrices and biases
    assert len(seen["info"]["loss"]) == 1
    assert seen["info"]["records"] == []
    assert info["lr_0"] == seen["rate"]
    assert info["grad_norm"] > 0


@pytest.mark.parametrize("scheduler", ["linear", lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / 4)])
def test_learning_rates_are_those_of_the_step_in_the_main_trainer_too(scheduler):
    keeper = Keeper()
    options = {"max_steps": 4, "lr": 0.1, "warmup_ratio": 0.0, "log": "none", "device": "cpu"}
    Trainer(MeanTask(), classes(), callbacks=[keeper], scheduler=scheduler, **options).fit()
    assert [info["lr_0"] for info in keeper.infos] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_the_built_in_hooks_work_in_the_main_trainer_too(caplog):
    logged = []

    class Hears(BaseHook):
        def on_log(self, trainer, records, dry_run):
            logged.append((trainer.step, records["train"]["loss"]))

    ema = EmaHook(decay=0.5)
    caplog.set_level(logging.INFO)
    hooks = [ProgressHook(interval=2), LoggingHook(interval=2), ema, Hears()]
    Trainer(MeanTask(), classes(), callbacks=hooks, max_steps=4, log="none", device="cpu").fit()
    assert [step for step, _ in logged] == [2, 4]
    assert [line.split(":")[0] for line in lines_of(caplog)] == ["Step 2/4", "Step 4/4"]
    assert ema.ema_model is not None
    with pytest.raises(BadArgument, match=r"CheckpointingHook in a mini\.BaseTrainer.*save_every"):
        Trainer(MeanTask(), classes(), callbacks=[CheckpointingHook()], max_steps=4, log="none", device="cpu").fit()


class Counts(BaseHook):
    """Counts steps, across restarts."""

    def __init__(self):
        self.count = 0

    def on_after_step(self, trainer):
        self.count += 1

    def on_state_dict(self, trainer, state_dict):
        state_dict["count"] = self.count

    def on_load_state_dict(self, trainer, state_dict):
        self.count = state_dict["count"]


def test_hook_state_is_resumed_in_mini_and_main_runs():
    first, second = Counts(), Counts()  # two of one class do not collide
    trainer = Classifier(3, hooks=[first, second])
    trainer.train()
    second.count = 70
    hooks = [Counts(), Counts()]
    Classifier(3, hooks=hooks).load_state_dict(trainer.state_dict())
    assert [hook.count for hook in hooks] == [3, 70]

    options = {"batch_size": 16, "log": "none", "device": "cpu", "run_dir": "run", "save_every": 2}
    Trainer(MeanTask(), classes(), callbacks=[Counts()], max_steps=3, **options).fit()
    again = Counts()
    Trainer(MeanTask(), classes(), callbacks=[again], max_steps=5, **options).fit()
    assert again.count == 5


# -- progress ----------------------------------------------------------------------------------------------


def test_the_format_of_the_progress_line():
    hook = ProgressHook()
    values = {"step_time": 0.25, "data_time": 0.01, "loss": 0.52341, "grad_norm": 2.3456, "lr_0": 1e-3}
    line = hook.line(100, 10_000, values)
    assert re.sub(r"eta \d+:\d\d:\d\d", "eta 6:00:00", line) == (
        "Step   100/10000: step 0.2500s data 0.0100s eta 6:00:00 loss 0.5234 grad_norm 2.3456 lr_0 1.00e-03"
    )


def test_progress_at_intervals_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    Classifier(7, hooks=[ProgressHook(interval=3, with_records=False)]).train()
    lines = lines_of(caplog)
    assert [line.split(":")[0] for line in lines] == ["Step 3/7", "Step 6/7", "Step 7/7"]
    form = r"Step \d/7: step \d+\.\d{4}s data \d+\.\d{4}s eta 0:00:00 loss \d\.\d{4} grad_norm \d\.\d{4} lr_0 1.00e-01"
    assert all(re.fullmatch(form, line) for line in lines)
    _, losses = by_hand(batches_of(), 7)
    assert [f"{losses[i]:.4f}" for i in (2, 5, 6)] == [re.search(r"loss (\S+)", line)[1] for line in lines]


def test_progress_with_records_and_values_added_by_hooks(caplog):
    class Adds(BaseHook):
        def on_after_step(self, trainer):
            trainer.step_info["max_memory"] = 1.5

    caplog.set_level(logging.INFO)
    Classifier(1, hooks=[Adds(), CudaMaxMemoryHook(), ProgressHook(interval=1)]).train()
    assert re.search(r"lr_0 1.00e-01 accuracy \d\.\d{4} nested\.rows 8\.0000 max_memory 1\.5000$", lines_of(caplog)[0])


def test_the_eta_uses_steps_after_the_warmup(monkeypatch):

    from trainformer.mini import hooks

    clock = [0.0]
    monkeypatch.setattr(hooks.time, "perf_counter", lambda: clock[0])
    hook = ProgressHook(interval=1, eta_warmup=2)
    trainer = Classifier(12)
    trainer._build()
    hook.on_before_train(trainer)
    left = {}
    for step in range(1, 7):
        clock[0] += 100.0 if step <= 2 else 1.0
        run_of(trainer).state.step = step
        left[step] = hook.eta(step, 12)
        hook.on_after_step(trainer)
    assert left[2] == "0:16:40"  # nothing better is known yet
    assert left[3] == "0:00:09"
    assert left[6] == "0:00:06"
    assert hook.eta(6, 360_006) == "100:00:00"


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from mini_toys import Classifier
from trainformer.mini import ProgressHook
for workspace in (None, "ws"):
    Classifier(4, hooks=[ProgressHook(interval=2)], workspace=workspace).train()
"""


@pytest.mark.slow
def test_messages_are_printed_once_by_default(tmp_path):
    here = str(Path(__file__).parent)
    code = SCRIPT.format(path=[here, str(Path(here).parent)])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    shown = [line for line in (run.stdout + run.stderr).splitlines() if line]
    assert len(shown) == 6
    for first in (0, 3):
        assert shown[first].startswith("training Classifier on cpu in fp32")
        assert [line.split(":")[0] for line in shown[first + 1 : first + 3]] == ["Step 2/4", "Step 4/4"]


def test_a_user_logger(caplog):
    caplog.set_level(logging.INFO, "mine")
    Classifier(2, hooks=[ProgressHook(interval=1)], logger=logging.getLogger("mine")).train()
    assert [record.name for record in caplog.records if record.getMessage().startswith("Step")] == ["mine", "mine"]


# -- logging -----------------------------------------------------------------------------------------------


def test_means_are_logged_at_intervals_and_the_rest_at_the_end():
    logged = []

    class Hears(BaseHook):
        def on_log(self, trainer, records, dry_run):
            logged.append((trainer.step, records["train"]["loss"], dry_run))

    trainer = collecting()(7, hooks=[LoggingHook(interval=3), Hears()])
    trainer.train()
    _, losses = by_hand(batches_of(), 7)
    means = [sum(losses[0:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert [(step, pytest.approx(records["loss"])) for step, records in trainer.logged] == list(
        zip((3, 6, 7), means, strict=True)
    )
    assert logged == [(step, records["loss"], False) for step, records in trainer.logged]
    assert trainer.logged[0][1]["nested"] == {"rows": 8}
    assert trainer.logged[0][1].keys() == {
        *("accuracy", "nested", "loss", "grad_norm", "lr", "step_time", "data_time", "non_finite_grad_retry_count"),
    }
    assert trainer.logged[0][1]["lr"] == {"group_0": 0.1}


def test_records_with_reserved_names_are_kept_separate():
    class SaysLoss(Classifier):
        def forward(self, input):
            return super().forward(input)[0], {"loss": 7.0, "grad_norm": 8, "lr": 9}

    trainer = collecting(SaysLoss)(2, hooks=[LoggingHook(interval=2)], workspace="ws")
    trainer.train()
    assert trainer.logged[0][1]["records"] == {"loss": 7.0, "grad_norm": 8.0, "lr": 9.0}
    assert trainer.logged[0][1]["loss"] < 2
    (record,) = read_jsonl("ws/metrics.jsonl")
    assert (record["train/records.loss"], record["train/records.grad_norm"]) == (7.0, 8.0)


def test_metrics_are_on_disk_whatever_log_does():
    trainer = collecting()(4, hooks=[LoggingHook(interval=2)], workspace="ws")
    trainer.train()
    records = read_jsonl("ws/metrics.jsonl")
    assert [(r["step"], r["train/loss"]) for r in records] == [
        (step, pytest.approx(logged["loss"])) for step, logged in trainer.logged
    ]
    assert records[0]["train/nested.rows"] == 8.0


# -- the others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu"])
def test_ema_of_the_weights(device):
    hook, keeper = EmaHook(decay=0.75, update_interval=2, device=device), []

    class Keeps(BaseHook):
        def on_after_step(self, trainer):
            keeper.append(weights(trainer))

    trainer = Classifier(6, hooks=[Keeps(), hook])
    trainer.train()
    average = keeper[1]  # the first update copies the weights
    for step in (4, 6):
        average = {name: 0.75 * a + 0.25 * keeper[step - 1][name] for name, a in average.items()}
    assert isinstance(hook.ema_model, AveragedModel)
    assert largest_difference(average, dict(trainer.unwrap(hook.ema_model).named_parameters())) < 1e-12
    assert not any(p.requires_grad for p in hook.ema_model.parameters())

    state = trainer.state_dict()["ema_model"]
    assert state.keys() == {"n_averaged", *(f"module.{name}" for name in average)}
    assert state["n_averaged"] == 3
    fresh = AveragedModel(mlp())  # as a script for evaluation reads it
    fresh.load_state_dict(state)
    again = EmaHook(decay=0.75, update_interval=2)
    Classifier(6, hooks=[again]).load_state_dict(trainer.state_dict())
    assert same(dict(again.ema_model.named_parameters()), dict(hook.ema_model.named_parameters()))
    assert again.ema_model.n_averaged == 3


def test_the_average_of_16_bit_weights_is_in_fp32():
    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)

    class Bf16(Classifier):
        def forward(self, input):
            return super().forward((input[0].to(torch.bfloat16), input[1]))

    hook = EmaHook(decay=0.5)
    Bf16(2, model=model, hooks=[hook]).train()
    assert {p.dtype for p in hook.ema_model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("image", "mode"),
    [
        (torch.ones(3, 2, 4), "RGB"),
        (torch.ones(1, 2, 4), "L"),
        (torch.full((2, 4), 255, dtype=torch.uint8), "L"),
        (np.ones((2, 4, 3), dtype=np.float32), "RGB"),
        (np.full((2, 4, 4), 255, dtype=np.uint8), "RGBA"),
        (torch.ones(3, 2, 4, dtype=torch.bfloat16) * 7, "RGB"),
        (Image.new("L", (4, 2), 255), "L"),
    ],
)
def test_images_of_all_kinds(image, mode):
    made = as_image(image)
    assert (made.size, made.mode) == ((4, 2), mode)
    assert np.asarray(made).min() == 255


def test_ambiguous_images_are_channels_first_for_tensors_and_last_for_arrays():
    assert as_image(torch.zeros(3, 5, 4)).size == (4, 5)
    assert as_image(np.zeros((3, 5, 4))).size == (5, 3)


def test_image_files_are_numbered_limited_and_safely_named():
    class Draws(BaseHook):
        def on_after_step(self, trainer):
            trainer.log_images(
                {"a": torch.zeros(3, 1, 4, 4), "b/c": [np.zeros((2, 2))] * 3, "d": {"e": np.zeros((2, 2))}}
            )

    Classifier(1, hooks=[Draws(), ImageFileLoggerHook(interval=1, path="pictures", max_images=5)]).train()
    names = {p.name for p in Path("pictures").iterdir()}
    assert names == {*(f"a_{i}_step_1.png" for i in range(3)), "b_c_0_step_1.png", "b_c_1_step_1.png"}
    trainer = Classifier(1, hooks=[ImageFileLoggerHook(interval=1, path="none")])
    trainer.log_images({"a": torch.zeros(2, 2)}, dry_run=True)
    assert not Path("none").exists()
    with pytest.raises(BadArgument, match=r"image 'x' to be a PIL image.*received 'str'"):
        trainer.log_images({"x": "a file name"})


@pytest.mark.slow
def test_wandb_receives_metrics_and_images(monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    seen = {}

    class Looks(BaseHook):
        def on_after_step(self, trainer):
            trainer.log_images({"picture": torch.zeros(3, 2, 2)})

        def on_after_train(self, trainer):
            run = wandb.run
            seen.update(summary=dict(run.summary), group=run.group, config=dict(run.config))

    hook = WandbHook(project="p", name="n", config={"lr": 0.1}, group="g", dir=str(tmp_path))
    trainer = collecting()(4, hooks=[LoggingHook(interval=2), Looks(), hook])
    trainer.train()
    assert (seen["group"], seen["config"]) == ("g", {"lr": 0.1})
    summary = seen["summary"]  # of the rows before the last, which is complete when the run ends
    assert summary["train/loss"] == pytest.approx(trainer.logged[0][1]["loss"])
    assert summary["train/nested/rows"] == 8.0
    assert summary["train/lr/group_0"] == 0.1
    assert summary["vis"]["captions"] == ["picture"]
    assert wandb.run is None
    assert trainer.state_dict()["callback.WandbHook"].keys() == {"run_id"}


def test_step_info_has_consistent_times():
    keeper = Keeper()
    Classifier(5, hooks=[keeper]).train()
    for info in keeper.infos:
        assert 0 <= sum(info["data_time"]) <= info["step_time"] < 60


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProgressHook(interval=0),
        lambda: LoggingHook(interval=1.5),
        lambda: ImageFileLoggerHook(max_images=0),
        lambda: EmaHook(decay=1.5),
        lambda: EmaHook(update_interval=0),
        lambda: CheckpointingHook(keep_previous=-1),
        lambda: CheckpointingHook(exit_code="sometimes"),
        lambda: CheckpointingHook(exit_signals=["SIGTERMM"]),
        lambda: CheckpointingHook(exit_wait=-1),
    ],
)
def test_invalid_hook_arguments_are_refused(make):
    with pytest.raises(BadArgument, match="Expected"):
        make()
