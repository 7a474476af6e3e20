"""Search for a good learning rate and augmentation on the digits that scikit-learn carries. A few minutes on a CPU.

Run with ``trainformer sweep examples/sweep_digits.py --method hyperband --n-trials 12 --n-parallel 2``, or as it is,
where trainformer[vision,samples,sweep] is installed. Interrupt it and run it again: it goes on.
"""

from trainformer import Trainer
from trainformer.sweep import choice, log_uniform, sweep
from trainformer.tasks import ImageClassification


@sweep(lr=log_uniform(3e-4, 3e-2), augment=choice("none", "crop"), batch_size=choice(32, 64, 128), epochs=6)
def digits(lr: float, augment: str, batch_size: int, epochs: int) -> float:
    """The best validation accuracy of a short training."""
    trainer = Trainer(
        ImageClassification("test_resnet", pretrained=False, augment=augment),
        data="digits",
        val_split=0.2,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        monitor_metric="val/accuracy",
        monitor_mode="max",
        log="none",
    )
    trainer.fit()
    return trainer.best_metrics["val/accuracy"]


if __name__ == "__main__":
    best = digits.run(method="hyperband", n_trials=6)[0]
    print(f"\nvalidation accuracy {best['metric']:.1%} with {best['config']}")
    print(f"its run is in {best['run']}; all trials: trainformer sweep show digits")
