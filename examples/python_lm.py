"""Train a language model from scratch on the source of Python's standard library. Two to three minutes of CPU.

Run with ``make demo-lm``, or ``python examples/python_lm.py`` where trainformer[text] is installed. Nothing is
downloaded. At the end its perplexity is held against models that only count, and it writes some code.
"""

from transformers import LlamaConfig

from trainformer import Trainer
from trainformer.callbacks import TextSamples
from trainformer.data import load_text, train_tokenizer
from trainformer.eval import bigram_perplexity, unigram_perplexity
from trainformer.tasks import CausalLM

PROMPTS = ["def ", "class ", "import "]
LENGTH = 128


def main() -> None:
    tokenizer = train_tokenizer(load_text("python-stdlib"), vocabulary=1024)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    task = CausalLM(config, max_length=LENGTH, tokenizer=tokenizer)
    trainer = Trainer(
        task,
        data="python-stdlib",
        val_data="python-stdlib:test",
        max_steps=1200,
        batch_size=8,
        eval_batch_size=64,
        lr=4e-3,
        eval_every="400steps",
        log_every=100,
        callbacks=[TextSamples("def ", max_new_tokens=40)],
        run_dir="runs/python-lm",
        resume=None,
    )
    trainer.fit()
    metrics = trainer.evaluate()

    train, held_out = (tokens_of(task, name) for name in ("python-stdlib", "python-stdlib:test"))
    print("\nperplexity of files that were held out:")
    print(f"  unigram {unigram_perplexity(train, held_out, len(tokenizer)):7.1f}")
    print(f"  bigram  {bigram_perplexity(train, held_out, len(tokenizer)):7.1f}")
    print(f"  model   {metrics['val/perplexity']:7.1f}   ({metrics['val/bits_per_byte']:.2f} bits per byte)")
    for prompt, text in zip(PROMPTS, task.generate(PROMPTS, max_new_tokens=80, do_sample=True, top_k=20), strict=True):
        print(f"\n{'-' * 20}\n{prompt}{text}")
    print(f"\neverything about this run is in {trainer.run_folder}/")


def tokens_of(task: CausalLM, name: str) -> list[list[int]]:
    """The tokens of a corpus, piece by piece, as the run has them in its cache."""
    return [piece["input_ids"] for piece in task.prepare_dataset(load_text(name), train=False)]


if __name__ == "__main__":
    main()
