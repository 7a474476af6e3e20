"""Train an image classifier on the handwritten digits that scikit-learn carries. Half a minute on a laptop's CPU.

Run with ``make demo``, or ``python examples/digits.py`` where trainformer[vision,samples] is installed.
"""

from trainformer import Trainer
from trainformer.callbacks import EMA
from trainformer.tasks import ImageClassification


def main() -> None:
    trainer = Trainer(
        ImageClassification("test_resnet", pretrained=False, augment="crop"),
        data="digits",
        val_split=0.2,
        epochs=15,
        batch_size=64,
        lr=3e-3,
        callbacks=[EMA(decay=0.98)],
        monitor_metric="val/accuracy",
        monitor_mode="max",
        log_every=50,
        run_dir="runs/digits",
        resume=None,
    )
    trainer.check()
    trainer.fit()
    accuracy, best = trainer.evaluate()["val/accuracy"], trainer.best_metrics["val/accuracy"]
    print(f"\nvalidation accuracy {accuracy:.1%} (best {best:.1%})")
    print(f"everything about this run is in {trainer.run_folder}/")


if __name__ == "__main__":
    main()
