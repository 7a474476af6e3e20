"""Examples for users of mini.trainer, with changed imports, placeholders, devices and step counts.

The one with configurations is in `tests/config/test_config_building.py`.
"""

import re
import signal
from pathlib import Path

import pytest
import torch
from mini_toys import Classifier, batches_of
from torch import nn
from torch.utils.data import TensorDataset

from toys import same, weights
from trainformer.mini import (
    BaseHook,
    BaseTrainer,
    CheckpointingHook,
    CudaMaxMemoryHook,
    EmaHook,
    ImageFileLoggerHook,
    LoggingHook,
    ProgressHook,
    WandbHook,
    map_nested_tensor,
)
from trainformer.mini.utils import key_average


class MyTrainer(BaseTrainer):
    def build_data_loader(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, 784, generator=generator)
        dataset = TensorDataset(x, x[:, :10].argmax(1))
        return torch.utils.data.DataLoader(dataset, batch_size=32)

    def build_model(self):
        model = nn.Sequential(
            nn.Linear(784, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        return model.to(self.device)

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def forward(self, input):
        x, y = input
        x, y = x.to(self.device), y.to(self.device)
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        records = {"accuracy": (logits.argmax(1) == y).float().mean().item()}
        return loss, records


ARGUMENTS = {
    "max_steps": 30,
    "grad_clip": 1.0,
    "max_non_finite_grad_retries": 3,
    "mixed_precision": "bf16",
    "gradient_accumulation_steps": 4,
    "workspace": "./runs/experiment_1",
    "device": "cpu",
}


class MyHookedTrainer(MyTrainer):
    def build_hooks(self):
        return [
            ProgressHook(interval=10, with_records=True),
            CheckpointingHook(interval=1000, path=self.workspace / "checkpoints"),
            LoggingHook(interval=10),
        ]

    def log(self, records, dry_run=False):
        print(f"Step {self.step}: {records}")


def test_quick_tour():
    trainer = MyTrainer(**ARGUMENTS)
    trainer.train()
    assert trainer.step == 30
    assert trainer.step_info["records"][-1]["accuracy"] > 0.5
    assert trainer.workspace == Path("runs/experiment_1")
    made = {path.name for path in trainer.workspace.iterdir()}
    assert made == {"config.json", "log.txt", "metrics.jsonl", "records.jsonl", "status.json"}


def test_quick_tour_with_hooks(capsys):
    trainer = MyHookedTrainer(**ARGUMENTS)
    trainer.train()
    said = capsys.readouterr().out.splitlines()
    logged = [line for line in said if line.startswith("Step ") and ": {" in line]
    assert [line.partition(":")[0] for line in logged] == ["Step 10", "Step 20", "Step 30"]
    written = Path("runs/experiment_1/log.txt").read_text()
    assert re.findall(r"(Step .*): step", written) == ["Step 10/30", "Step 20/30", "Step 30/30"]
    folder = Path("runs/experiment_1/checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint_latest.pt", "checkpoint_step_30.pt"]
    assert (folder / "checkpoint_latest.pt").readlink() == Path("checkpoint_step_30.pt")


def test_state_management():
    def make(steps):
        return MyTrainer(**{**ARGUMENTS, "max_steps": steps, "workspace": None})

    torch.manual_seed(3)
    whole = make(20)
    whole.train()

    torch.manual_seed(3)
    trainer = make(8)
    trainer.train()
    # Save checkpoint
    state = trainer.state_dict()
    torch.save(state, "checkpoint.pt")

    # Resume training
    torch.manual_seed(99)
    trainer = make(20)
    state = torch.load("checkpoint.pt")
    trainer.load_state_dict(state)
    assert trainer.step == 8
    trainer.train()  # continues from the saved step
    assert trainer.step == 20
    assert same(weights(trainer), weights(whole))


def test_built_in_hooks_take_the_documented_arguments(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    ema = EmaHook(
        decay=0.9999,
        update_interval=1,
        device="cpu",
    )
    hooks = [
        CudaMaxMemoryHook(),
        ProgressHook(
            interval=10,
            with_records=True,
            sync=False,
            eta_warmup=10,
        ),
        LoggingHook(
            interval=100,
            sync=True,
        ),
        CheckpointingHook(
            interval=1000,
            keep_previous=2,
            keep_interval=5000,
            path="checkpoints",
            load="latest",
            exit_signals=[signal.SIGTERM, signal.SIGINT],
            exit_code="128+signal",
            exit_wait=60.0,
        ),
        ema,
        WandbHook(
            project="my-project",
            name="experiment-1",
            config={"lr": 1e-3, "batch_size": 32},
            group="some",
        ),
        ImageFileLoggerHook(
            interval=100,
            path="images",
            max_images=8,
        ),
    ]
    trainer = Classifier(3, hooks=hooks)
    trainer.train()
    assert trainer.hooks == hooks
    assert ema.ema_model is not trainer.model
    assert [p.name for p in Path("checkpoints").glob("checkpoint_step_*")] == ["checkpoint_step_3.pt"]


def test_unwrapping():
    trainer = Classifier(2, model=torch.compile(nn.Linear(4, 3).double(), backend="eager"))
    unwrapped = trainer.unwrap(trainer.model)
    assert type(unwrapped) is nn.Linear
    assert unwrapped is trainer.unwrapped_model


def test_custom_hooks(capsys):
    class CustomHook(BaseHook):
        def on_after_step(self, trainer):
            if trainer.step % 100 == 0:
                print(f"Custom hook triggered at step {trainer.step}")

    class Mine(Classifier):
        def build_hooks(self):
            return [CustomHook(), ProgressHook(interval=10)]

    Mine(200).train()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Custom")]
    assert said == ["Custom hook triggered at step 100", "Custom hook triggered at step 200"]


def test_utilities():
    input = {"x": torch.randn(2, 3), "y": [torch.randn(4, 5)]}
    output = map_nested_tensor(lambda t: t.to("meta"), input)
    assert output["x"].device.type == output["y"][0].device.type == "meta"
    assert output["y"][0].shape == (4, 5)

    records = [
        {"loss": 0.5, "metrics": {"acc": 0.9}},
        {"loss": 0.6, "metrics": {"acc": 0.85}},
    ]
    avg = key_average(records)
    assert avg == {"loss": pytest.approx(0.55), "metrics": {"acc": pytest.approx(0.875)}}


def test_log_images_from_anywhere():
    from PIL import Image

    class Drawing(Classifier):
        def forward(self, input):
            pil_image = Image.new("RGB", (4, 2), (255, 0, 0))
            self.log_images({"image_name": pil_image})
            return super().forward(input)

    Drawing(4, hooks=[ImageFileLoggerHook(interval=2, path="images")], batches=batches_of()).train()
    assert sorted(p.name for p in Path("images").iterdir()) == ["image_name_step_2.png", "image_name_step_4.png"]
    with Image.open("images/image_name_step_4.png") as image:
        assert (image.size, image.getpixel((0, 0))) == ((4, 2), (255, 0, 0))
