"""Trains on JAX and uses the command line: run as a program, where torch is not installed."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path
from typing import Any


class Finder(importlib.machinery.PathFinder):
    """Finds installed packages, except for torch and what belongs to it."""

    hidden = ("torch", "torchvision", "timm", "accelerate", "peft")

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.split(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


def hide_torch() -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name in Finder.hidden:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    importlib.metadata.version = version
    usual = importlib.machinery.PathFinder
    sys.meta_path[:] = [Finder if finder is usual else finder for finder in sys.meta_path]


def train(folder: Path) -> None:
    """Two epochs of a small language model and of a classifier, with callbacks, saved and opened again."""
    import numpy as np

    from trainformer.callbacks import (
        EMA,
        CollapseMonitor,
        EarlyStopping,
        GradientMonitor,
        ImageSamples,
        LRFinder,
        LRMonitor,
        ModelCheckpoint,
        OnlineKNN,
        OnlineLinear,
        Profiler,
        TextSamples,
        Throughput,
    )
    from trainformer.data.text.tokenizer import train_tokenizer
    from trainformer.jax import (
        GRPOConfig,
        GRPOTrainer,
        ImageClassificationTrainer,
        MaskedLMTrainer,
        Seq2SeqTrainer,
        SequenceClassificationConfig,
        SequenceClassificationTrainer,
        SFTConfig,
        SFTTrainer,
        TrainingArguments,
    )
    from trainformer.models.jax import T5, BertConfig, DecoderConfig, ViTConfig, load_model

    texts = [{"text": f"{number} and {number} are {2 * number}"} for number in range(16)]
    tokenizer = train_tokenizer(texts, vocabulary=270)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shared: dict[str, Any] = {"total_batch_size": 8, "num_train_epochs": 2, "evaluation_strategy": "epoch"}
    arguments = SFTConfig(
        **shared, output_dir=str(folder / "runs/text"), max_sequence_length=32, cache_dir=str(folder / "tokens")
    )
    callbacks: list[Any] = [EarlyStopping("val/loss", patience=3), ModelCheckpoint(save_top_k=1), EMA(decay=0.5)]
    callbacks += [LRMonitor(), TextSamples(["1 and"], max_new_tokens=2), Throughput(), GradientMonitor(log_every=2)]
    model = DecoderConfig(vocab_size=len(tokenizer), **sizes)
    trainer = SFTTrainer(arguments, model, tokenizer, train_dataset=texts, eval_dataset=texts, callbacks=callbacks)
    trainer.train()
    load_model(trainer.save_pretrained(folder / "saved"))
    arguments = GRPOConfig(total_batch_size=8, max_steps=1, num_generations=2, max_completion_length=4, log="none")
    prompts = [{"prompt": row["text"]} for row in texts]
    options: dict[str, Any] = {
        "train_dataset": prompts,
        "reward_funcs": lambda completions: [len(text) for text in completions],
    }
    GRPOTrainer(arguments.replace(output_dir=str(folder / "runs/grpo")), str(folder / "saved"), **options).train()

    assert all((MaskedLMTrainer, Seq2SeqTrainer, T5))
    labelled = [{"text": text["text"], "label": number % 2} for number, text in enumerate(texts)]
    where = {"output_dir": str(folder / "runs/classes"), "cache_dir": str(folder / "tokens"), "log": "none"}
    arguments = SequenceClassificationConfig(**shared, **where, max_sequence_length=32)
    bert = BertConfig(vocab_size=len(tokenizer), **sizes)
    classes = SequenceClassificationTrainer(arguments, bert, tokenizer, train_dataset=labelled, eval_dataset=labelled)
    classes.train()
    assert classes.predict("2 and 2").shape == (1, 2)

    images = np.random.default_rng(0).integers(0, 255, (16, 8, 8, 1), dtype=np.uint8)
    data = {"image": images, "label": np.arange(16) % 2}
    vit = ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes)
    arguments = TrainingArguments(**shared, output_dir=str(folder / "runs/images"), log="none")
    callbacks = [EMA(), LRFinder(num_steps=10), OnlineKNN(k=2), OnlineLinear(), ImageSamples(n=2), Profiler((2, 2))]
    data_of = {"dataset_train": data, "dataset_eval": data, "callbacks": [*callbacks, CollapseMonitor()]}
    ImageClassificationTrainer(arguments, vit, **data_of).train()


def use_commands(folder: Path) -> None:
    """Commands that need no torch; those that do say so."""
    from trainformer.cli import main
    from trainformer.cli.doctor import diagnose

    run = str(folder / "runs/text")
    found = diagnose()
    assert found["versions"]["torch"] is None
    assert not [problem for problem in found["problems"] if "cannot be imported" in problem["what"]]
    for words in (["runs", "runs"], ["ckpt", "list", run], ["ctl", "list"]):
        assert main(words) == 0, words
    (folder / "lines.txt").write_text("1 and 1 are\n2 and 2 are\n")
    (folder / "texts.jsonl").write_text('{"text": "3 and 3 are 6"}\n' * 8)
    saved = f"--model={folder}/saved"
    for words in (
        ["predict", run, "lines.txt", "--max-new-tokens=3"],
        ["generate", run, "--prompt=1 and 1", "--max-new-tokens=3"],
        ["evaluate", run, "--data", "texts.jsonl"],
        ["export", run, "exported"],
        ["finalize", run, "final"],
        ["train", "--backend=jax", "--task=CausalLM", saved, "--data=texts.jsonl", "--max-steps=1", "--batch-size=8",
         "--max-length=32", "--cache-dir=tokens", "--log=none", "--run-dir=runs/typed"],
        ["resume", "runs/typed", "--max-steps=2"],
        ["evaluate", "runs/typed", "--data", "texts.jsonl"],
        ["predict", str(folder / "runs/images"), "digits", "--out", "digits.jsonl"],
    ):  # fmt: skip
        assert main(words) == 0, words
    assert main(["train", "--task=ImageClassification", "--data=digits"]) == 1


def refuse() -> None:
    """The torch side raises one error, with the command that installs it."""
    import pytest

    import trainformer
    import trainformer.hf
    import trainformer.mini
    import trainformer.tasks
    from trainformer.core import MissingDependency

    for package, name in (
        (trainformer, "Trainer"),
        (trainformer.tasks, "CausalLM"),
        (trainformer.hf, "Trainer"),
        (trainformer.mini, "BaseTrainer"),
    ):
        with pytest.raises(MissingDependency, match=r"pip install 'trainformer\[torch\]'"):
            getattr(package, name)


if __name__ == "__main__":
    hide_torch()
    train(Path.cwd())
    use_commands(Path.cwd())
    refuse()
    assert not {"torch", "torchvision"} & sys.modules.keys()
    print("trained without torch")
