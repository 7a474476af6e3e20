"""Loggers: where the metrics of a run go."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.loggers.base": ["BaseLogger", "LoggerError", "MultiLogger", "NoOpLogger"],
        "trainformer.loggers.console": ["ConsoleLogger"],
        "trainformer.loggers.jsonl": ["JsonlLogger", "read_jsonl"],
        "trainformer.loggers.mlflow": ["MLflowLogger"],
        "trainformer.loggers.registry": ["make_loggers"],
        "trainformer.loggers.tensorboard": ["TensorBoardLogger"],
        "trainformer.loggers.wandb": ["WandbLogger"],
    },
)
