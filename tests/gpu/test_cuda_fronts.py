"""The other ways in on a GPU: nothing waits for the device between log points, and resuming is exact there too."""

import pytest
import torch
from hf_toys import Classifier, examples, llama, make, padded, parameters, sequences

from trainformer import hf, mini

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class NoSync(hf.TrainerCallback):
    """Waiting for the device is an error in steps that are not logged, once everything is warm."""

    def on_step_begin(self, args, state, control, **kwargs):
        quiet = state.global_step > 1 and (state.global_step + 1) % args.logging_steps
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    def on_log(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("default")

    on_step_end = on_train_end = on_error = on_log


ON_DEVICE = {"use_cpu": False, "logging_steps": 10, "max_steps": 30}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_hf_does_not_wait_between_log_points(precision, accumulation, tmp_path):
    options = {**ON_DEVICE, **precision, "gradient_accumulation_steps": accumulation, "callbacks": [NoSync()]}
    trainer = make(tmp_path, Classifier(0.1), train=examples(96), **options)
    assert trainer.train().global_step == 30


def test_hf_does_not_wait_with_weights_counted_in_tokens(tmp_path):
    """The numbers of supervised tokens stay on the device."""
    options = {**ON_DEVICE, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}

    def unpadded(made):
        return {name: value for name, value in padded(made).items() if name != "attention_mask"}

    more = {"data_collator": unpadded}
    trainer = make(tmp_path, llama(), train=sequences(96), more=more, callbacks=[NoSync()], **options)
    assert trainer.train().global_step == 30


def test_the_guard_can_fail(tmp_path):
    class Reads(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            next(model.parameters()).sum().item()

    with pytest.raises(RuntimeError, match="synchroniz"):
        make(tmp_path, train=examples(96), callbacks=[NoSync(), Reads()], **ON_DEVICE).train()


class Small(mini.BaseTrainer):
    def build_data_loader(self):
        data = examples(96)
        rows = torch.utils.data.TensorDataset(
            torch.stack([e["x"] for e in data]), torch.stack([e["labels"] for e in data])
        )
        return torch.utils.data.DataLoader(rows, batch_size=8, pin_memory=True)

    def build_model(self):
        return Classifier(0.1).to(self.device)

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def forward(self, input):
        out = self.model(input[0].to(self.device), input[1].to(self.device))
        return out["loss"], {"largest": out["logits"].max()}


class Quiet(mini.BaseHook):
    def on_before_step(self, trainer):
        torch.cuda.set_sync_debug_mode("error" if trainer.step > 3 and (trainer.step + 1) % 10 else "default")

    def on_after_step(self, trainer):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_mini_does_not_wait_between_intervals(precision):
    logged = []

    class Watched(Small):
        def build_hooks(self):
            return [Quiet(), mini.ProgressHook(interval=10), mini.LoggingHook(interval=10), mini.CudaMaxMemoryHook()]

        def log(self, records, dry_run=False):
            logged.append(records)

    trainer = Watched(max_steps=30, mixed_precision=precision, gradient_accumulation_steps=2, grad_clip=1.0)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 30
    assert trainer.device.type == "cuda"
    assert len([r for r in logged if "loss" in r.get("train", {})]) >= 3
    assert trainer.step_info["max_memory"] > 0


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_hf_resumes_bitwise(precision, tmp_path):
    options = {"use_cpu": False, "max_steps": 12, "save_strategy": "steps", "save_steps": 3, **precision}

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_abort_without_save = state.global_step == 8

    whole = make(tmp_path / "whole", Classifier(0.2), **options)
    whole.train()
    make(tmp_path / "cut", Classifier(0.2), callbacks=[Stop()], **options).train()
    again = make(tmp_path / "cut", Classifier(0.2), **options)
    assert again.train(resume_from_checkpoint=True).global_step == 12
    other = parameters(again.model)
    assert all(torch.equal(p, other[name]) for name, p in parameters(whole.model).items())


def test_mini_resumes_bitwise(tmp_path):
    def run(folder, steps):
        class Saving(Small):
            def build_hooks(self):
                return [mini.CheckpointingHook(interval=4, path=tmp_path / folder)]

        torch.manual_seed(5)
        trainer = Saving(max_steps=steps, mixed_precision="fp16")
        trainer.train()
        return trainer

    whole = run("whole", 12)
    run("cut", 8)
    again = run("cut", 12)
    other = parameters(again.model)
    assert all(torch.equal(p, other[name]) for name, p in parameters(whole.model).items())
