"""Pipeline parallelism: `strategy` (schedules and steps), `stages` (cutting a model), `microbatches`, `state`."""

from trainformer.distributed.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
