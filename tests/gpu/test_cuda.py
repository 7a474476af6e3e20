"""What only a GPU shows: no synchronisation between log points, overlap of copies, native precisions, exact resume."""

import io
import time

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from toys import MeanTask, TokenTask, classes, largest_difference, mlp, same, tokens, weights
from trainformer import Trainer, log_metric
from trainformer.callbacks import EMA, ProgressBar, progress
from trainformer.core.errors import NonFiniteError
from trainformer.run import run_of

pytestmark = pytest.mark.gpu


def make(task, data, **options):
    defaults = {
        "batch_size": 8,
        "max_steps": 24,
        "lr": 1e-2,
        "log": "none",
        "save_best": 0,
        "run_dir": None,
        "log_every": 10,
    }
    return Trainer(task, data, **{**defaults, **options})


class NoSync:
    """Makes CUDA raise on any synchronisation inside a step that is not a log point."""

    def on_step_begin(self, trainer, step):
        quiet = step > 1 and (step + 1) % 10 and step + 1 != trainer.total_steps
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    def on_log(self, trainer, metrics):
        torch.cuda.set_sync_debug_mode("default")

    on_train_end = on_error = lambda self, trainer, *rest: torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize(("task", "data"), [(MeanTask, classes), (TokenTask, tokens)])
def test_no_synchronisation_between_log_points(precision, accumulation, nonfinite, task, data):
    trainer = make(
        task(mlp(dtype=torch.float32)), data(96, dtype=torch.float32), precision=precision, nonfinite=nonfinite,
        accumulation_steps=accumulation, callbacks=[EMA(0.9), NoSync()], batch_size=4,
    )  # fmt: skip
    trainer.fit()
    assert trainer.state.step == 24


def test_neither_the_progress_bar_nor_logged_values_synchronise(monkeypatch):
    """The bar redraws after every step here, and shows losses that have arrived, before the first log point of ten."""
    shown = []

    class Task(MeanTask):
        def train_step(self, batch):
            loss = super().train_step(batch)
            log_metric("twice", 2 * loss)
            return loss

    class Look:
        def on_step_end(self, trainer, step, loss):
            if 2 < step < 10:
                time.sleep(0.05)  # the device is done by then
                shown.append(bar._values.get("train/loss"))

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_UPDATES", 0.0)
    bar = ProgressBar(Console(file=io.StringIO(), force_terminal=True))
    trainer = make(
        Task(mlp(dtype=torch.float32)),
        classes(96, dtype=torch.float32),
        callbacks=[NoSync(), bar, Look()],
        batch_size=4,
    )
    trainer.fit()
    assert len(set(shown)) > 4
    twice, loss = (trainer.state.log_history[-1][name] for name in ("train/twice", "train/loss"))
    assert twice == pytest.approx(2 * loss, rel=1e-5)


def test_the_guard_can_fail():
    class Reads(MeanTask):
        def train_step(self, batch):
            loss = super().train_step(batch)
            loss.item()
            return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        make(Reads(mlp(dtype=torch.float32)), classes(96, dtype=torch.float32), callbacks=[NoSync()]).fit()


def test_auto_is_bf16_on_the_gpu():
    trainer = make(MeanTask(mlp(dtype=torch.float32)), classes(dtype=torch.float32))
    assert run_of(trainer).backend.precision.name == "bf16"
    assert next(trainer.task.model.parameters()).is_cuda


def test_gpu_and_cpu_agree_in_float64():
    cpu, gpu = MeanTask(), MeanTask()
    make(cpu, classes(), device="cpu", precision="no").fit()
    make(gpu, classes(), device="cuda", precision="no").fit()
    assert largest_difference(weights(cpu), {k: v.cpu() for k, v in weights(gpu).items()}) < 1e-9


def test_eight_ones_equal_one_eight_on_the_gpu():
    whole, sliced = TokenTask(), TokenTask()
    make(whole, tokens(), precision="no", max_steps=16).fit()
    make(sliced, tokens(), precision="no", max_steps=16, batch_size=1, accumulation_steps=8).fit()
    assert largest_difference(weights(whole), weights(sliced)) < 1e-10


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_resume_is_bitwise_equal(precision, tmp_path):
    def task():
        return MeanTask(
            torch.nn.Sequential(mlp(4, 32, dtype=torch.float32), torch.nn.Dropout(0.2), mlp(32, 3, dtype=torch.float32))
        )

    data = classes(dtype=torch.float32)
    whole = task()
    make(whole, data, precision=precision).fit()

    class SaveAt:
        def on_step_end(self, trainer, step, loss):
            if step == 9:
                trainer.save(tmp_path / "nine.pt")

    make(task(), data, precision=precision, callbacks=[SaveAt()]).fit()
    torch.manual_seed(7)
    resumed = task()
    make(resumed, data, precision=precision).load(tmp_path / "nine.pt").fit()
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_a_bad_step_does_not_reach_the_weights(optimizer):
    class Bad(MeanTask):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            return super().train_step(batch) * (float("nan") if self.calls == 6 else 1.0)

    data = classes(dtype=torch.float32)
    good, bad = MeanTask(mlp(dtype=torch.float32)), Bad(mlp(dtype=torch.float32))
    make(good, data, max_steps=5, scheduler=None, optimizer=optimizer).fit()
    with pytest.raises(NonFiniteError, match="step 6"):
        make(bad, data, scheduler=None, optimizer=optimizer).fit()
    assert same(weights(good), weights(bad))


def test_batches_arrive_intact_from_the_side_stream():
    """Large batches, many of them: a copy that is read too early, or memory reused too early, would show."""
    seen = []

    class Sums(MeanTask):
        def __init__(self):
            self.model = torch.nn.Linear(1, 1)

        def train_step(self, batch):
            x, y = batch
            seen.append(x.double().sum() - y.double().sum())
            for _ in range(20):
                x = x @ torch.eye(x.shape[1], device=x.device)
            return F.mse_loss(self.model(x[:, :1].float()), y[:, :1].float())

    x = torch.randn(512, 2048)
    make(Sums(), (x, x.clone()), batch_size=64, max_steps=64, precision="no").fit()
    assert max(abs(s.item()) for s in seen) == 0.0


def test_check_reports_cuda_memory():
    report = make(MeanTask(mlp(dtype=torch.float32)), classes(dtype=torch.float32), val_split=0.25).check()
    assert report.ok
    assert report.peak_bytes > 0


def test_image_classification_with_everything_on():
    timm = pytest.importorskip("timm")
    from trainformer.tasks import ImageClassification

    assert timm
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (64, 3, 64, 64), dtype=torch.uint8, generator=g)
    y = torch.arange(64) % 4
    task = ImageClassification("resnet18", pretrained=False, augment="none", mixup=0.2)
    trainer = make(task, (x, y), val_split=0.25, channels_last=True, compile=True, callbacks=[EMA(0.9)], max_steps=12)
    trainer.fit()
    assert all(torch.isfinite(p).all() for p in task.model.parameters())
    assert list(task.model.state_dict()) == list(timm.create_model("resnet18", num_classes=4).state_dict())


def test_running_out_of_memory_for_real():
    """A limit on the device's memory, a batch that does not fit, and the same weights as without the limit."""

    class Hungry(MeanTask):
        def __init__(self):
            torch.manual_seed(0)
            self.model = torch.nn.Linear(8, 4096)

        def train_step(self, batch):
            x, _ = batch
            h = self.model(x)
            square = h[:, :, None] * h[:, None, :]  # 64 MB per sample
            return square.tanh().square().mean()

    def run():
        task = Hungry()
        x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
        trainer = make(task, (x, torch.zeros(128)), batch_size=64, max_steps=3, precision="no", gradient_clip=None)
        trainer.fit()
        return weights(task), run_of(trainer).backend.splitter.pieces

    whole, pieces = run()
    assert pieces == 1
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.04)  # 5.5 GB; a whole batch needs some 12
        split, pieces = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert pieces >= 2
    assert largest_difference(whole, split) < 1e-5


def test_background_saves_from_the_gpu(tmp_path):
    from safetensors.torch import load_file

    seen = {}
    task = MeanTask(mlp(hidden=512, dtype=torch.float32))

    class Note:
        def on_step_end(self, trainer, step, loss):
            if step % 5 == 0:
                seen[step] = {k: v.cpu() for k, v in weights(task).items()}

    make(
        task,
        classes(dtype=torch.float32),
        save_every=5,
        save_last=9,
        save_async=True,
        run_dir=tmp_path,
        callbacks=[Note()],
    ).fit()
    for step, state in seen.items():
        assert same(load_file(tmp_path / f"checkpoints/step_{step:08d}/model.safetensors"), state)
    assert len(seen) == 4
