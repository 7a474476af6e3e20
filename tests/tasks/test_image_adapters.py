"""Image classifiers with an adapter: only the adapter is trained, saved and loaded, and an export is a plain model."""

import copy

import pytest
import timm
import torch
from peft import PeftModel
from safetensors.torch import load_file

from text_toys import Cut, checkpoint_of
from trainformer import Trainer
from trainformer.adapters import LoRA, PrefixTuning, QLoRA
from trainformer.core.errors import BadArgument
from trainformer.tasks import ImageClassification

VIT = {"depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "img_size": 8}
ADAPTERS = {
    "lora": LoRA(r=2, dropout=0.1),
    "dora": LoRA(r=2, dropout=0.0, use_dora=True),
    "rslora": LoRA(r=2, dropout=0.0, use_rslora=True),
}


def pretrained():
    """A ViT with weights that a name would load, in a module of its own."""
    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, in_chans=1, **VIT)


def classifier(adapter, **options):
    return ImageClassification(pretrained(), adapter=adapter, augment="none", image_size=8, **options)


def run(task, run_dir, callbacks=(), **options):
    defaults = {"max_steps": 8, "batch_size": 32, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0}
    return Trainer(task, "digits", val_split=0.2, run_dir=run_dir, callbacks=list(callbacks), **{**defaults, **options})


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_adapter_and_the_head_alone_are_trained_and_kept(name, tmp_path):
    base = pretrained()
    trainer = run(classifier(ADAPTERS[name]), tmp_path)
    names = [n for n, p in trainer.task.model.named_parameters() if p.requires_grad]
    assert any("lora_" in n for n in names)
    assert all("lora_" in n or "head.modules_to_save" in n for n in names)
    trainer.fit()
    folder = checkpoint_of(trainer)
    kept = load_file(folder / "model.safetensors")
    assert kept.keys() == load_file(folder / "adapter_model.safetensors").keys()
    assert sum(t.numel() for t in kept.values()) < 0.3 * sum(p.numel() for p in base.parameters())
    # Elsewhere: the base, and on it what peft finds in the folder.
    opened = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    images = torch.randn(5, 1, 8, 8)
    ours = trainer.task.model.eval()
    torch.testing.assert_close(opened(images), ours(images))
    assert not torch.allclose(base.eval()(images), ours(images), atol=1e-3)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_a_run_resumes_bitwise(name, tmp_path):
    whole = run(classifier(ADAPTERS[name]), tmp_path / "whole").fit()
    with pytest.raises(KeyboardInterrupt):
        run(classifier(ADAPTERS[name]), tmp_path / "cut", [Cut()]).fit()
    again = run(classifier(ADAPTERS[name]), tmp_path / "cut").fit()
    assert again.state.step == whole.state.step
    for name, p in whole.task.model.state_dict().items():
        assert torch.equal(p, again.task.model.state_dict()[name]), name


def test_a_checkpoint_written_behind_the_run_holds_one_state(tmp_path):
    trainer = run(classifier(ADAPTERS["lora"]), tmp_path, save_async=True, save_every=2, save_last=4).fit()
    folders = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(folders) > 2
    for folder in folders:
        ours, peft = load_file(folder / "model.safetensors"), load_file(folder / "adapter_model.safetensors")
        assert ours.keys() == peft.keys()
        assert all(torch.equal(ours[name], peft[name]) for name in ours)
    # What is written beside the weights is theirs, whatever became of the model since.
    late = tmp_path / "late"
    late.mkdir()
    (late / "model.safetensors").write_bytes((folders[0] / "model.safetensors").read_bytes())
    assert trainer.task.save_assets(late) == ["adapter_config.json", "adapter_model.safetensors"]
    first = load_file(folders[0] / "model.safetensors")
    assert all(
        torch.equal(first[name], tensor) for name, tensor in load_file(late / "adapter_model.safetensors").items()
    )


def test_an_export_is_a_plain_model(tmp_path):
    trainer = run(classifier(ADAPTERS["lora"]), tmp_path).fit()
    weights = torch.load(trainer.export(tmp_path / "plain.pt"), weights_only=True)
    weights = weights.get("model", weights)
    plain = pretrained()
    plain.load_state_dict(weights)
    images = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(plain.eval()(images), trainer.task.model.eval()(images), rtol=1e-4, atol=1e-5)
    assert any("lora_" in n for n, _ in trainer.task.model.named_parameters())  # which is trained on as it was


def test_statistics_of_the_frozen_model_stay(tmp_path):
    task = ImageClassification(
        "test_resnet", pretrained=False, augment="none", adapter=LoRA(r=2, target_modules=["conv2"])
    )
    trainer = run(task, tmp_path, max_steps=3)
    before = {n: b.clone() for n, b in task.model.named_buffers() if "running" in n}
    trainer.fit()
    assert before
    for name, buffer in task.model.named_buffers():
        if name in before:
            assert torch.equal(buffer, before[name]), name


def test_it_learns_digits(tmp_path):
    task = ImageClassification(
        "test_vit", pretrained=False, image_size=16, augment="none", adapter=LoRA(r=8, dropout=0)
    )
    trainer = run(task, tmp_path, max_steps=150, batch_size=64)
    assert trainer.fit().evaluate()["val/accuracy"] > 0.6


def test_what_cannot_be():
    with pytest.raises(BadArgument, match="Use LoRA, which works with any model"):
        ImageClassification("test_vit", adapter=QLoRA())
    with pytest.raises(BadArgument, match=r"kind 'vision'.*Use LoRA"):
        ImageClassification("test_vit", adapter=PrefixTuning())
    with pytest.raises(BadArgument, match="freeze_backbone or adapter, received both"):
        ImageClassification("test_vit", adapter=LoRA(), freeze_backbone=True)
    with pytest.raises(BadArgument, match="adapter to be a LoRA"):
        ImageClassification("test_vit", adapter="lora")
    with pytest.raises(BadArgument, match="no layer_decay with an adapter"):
        run(classifier(LoRA()), "runs/none", layer_decay=0.9)
