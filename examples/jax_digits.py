"""Train a small Vision Transformer on JAX, on the handwritten digits that scikit-learn carries. A minute on a CPU.

Run with ``python examples/jax_digits.py`` where trainformer[jax,samples] is installed.
"""

from trainformer.data.builtin import builtin_arrays
from trainformer.data.split import split_dataset
from trainformer.jax import ImageClassificationTrainer, TrainingArguments


def main(output_dir: str = "runs/jax_digits") -> float:
    train, held_out = split_dataset(builtin_arrays("digits"), 0.2, seed=0)
    arguments = TrainingArguments(
        model_name="digits",
        num_train_epochs=20,
        total_batch_size=64,
        eval_batch_size=64,
        learning_rate=2e-3,
        scheduler="cosine",
        warmup_ratio=0.1,
        evaluation_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        output_dir=output_dir,
        resume=None,
    )
    trainer = ImageClassificationTrainer(arguments, dataset_train=train, dataset_eval=held_out, label_smoothing=0.1)
    trainer.train()
    accuracy = trainer.eval()["eval_accuracy"]
    print(f"\nvalidation accuracy {accuracy:.1%}")
    print(f"everything about this run is in {trainer.run_folder}/")
    return accuracy


if __name__ == "__main__":
    main()
