"""Teach a small language model to add 1 to a digit, from rewards alone, with GRPO. Half a minute on a laptop's CPU.

First the model learns the form of an answer from text with random results: "3+1=" is followed by some digit and the
end of the text. Then GRPO rewards right answers, of which one in ten is right by chance (9+1 is 0 here). Nothing ever
shows the model a right answer. Run with ``python examples/grpo_digits.py``.
"""

import random
from typing import Any

from transformers import LlamaConfig

from trainformer import Trainer
from trainformer.data import train_tokenizer
from trainformer.tasks import GRPO, CausalLM

PROMPTS = [{"prompt": f"{digit}+1=", "answer": str((digit + 1) % 10)} for digit in range(10)]


def correct(completions: list[str], answer: list[str]) -> list[float]:
    """1 for the right digit, 0 for anything else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def pretrained(max_steps: int, **settings: Any) -> CausalLM:
    """A model that answers with random digits."""
    rng = random.Random(0)
    texts = [{"prompt": row["prompt"], "completion": str(rng.randrange(10))} for row in PROMPTS for _ in range(100)]
    tokenizer = train_tokenizer(["".join(row.values()) for row in texts], vocabulary=280)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    task = CausalLM(config, tokenizer=tokenizer, max_length=16, train_on="completion")
    Trainer(task, texts, max_steps=max_steps, batch_size=32, lr=3e-3, **settings).fit()
    return task


def main(max_steps: int = 60, pretraining_steps: int = 100, seed: int = 0, **settings: Any) -> dict[str, float]:
    settings = {"run_dir": "runs/grpo_digits", "resume": None, "seed": seed, **settings}
    before = pretrained(pretraining_steps, **{**settings, "run_dir": f"{settings['run_dir']}_pretrained"})
    task = GRPO(
        before.model,
        tokenizer=before.text_tokenizer,
        rewards=correct,
        num_generations=16,
        max_completion_length=3,
        num_iterations=4,
        beta=0.06,  # keeps the model from giving up on answers that it has not found yet
    )
    trainer = Trainer(
        task,
        PROMPTS,
        PROMPTS,
        max_steps=max_steps,
        batch_size=10,
        lr=1e-3,
        scheduler="linear",
        warmup_ratio=0.0,
        weight_decay=0.0,
        log_every=10,
        eval_every=20,
        **settings,
    )
    first = trainer.evaluate()["val/reward"]
    trainer.fit()
    found = trainer.evaluate()
    print(f"right answers: {found['val/reward']:.0%} after {max_steps} steps of rewards, {first:.0%} before")
    return found


if __name__ == "__main__":
    main()
