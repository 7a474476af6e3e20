"""The package itself: lazy imports, the public surface, and no look at the network."""

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "trainformer": "DatasetInfo Loss PipelineConfig PipelineContext Task TaskBase Trainer seed_everything",
    "trainformer.tasks": "DatasetInfo ImageClassification Loss Task TaskBase",
    "trainformer.callbacks": "Callback CallbackList EMA EarlyStopping GradientMonitor LRFinder LRMonitor "
    "ModelCheckpoint ProgressBar Throughput",
    "trainformer.utils": "MemoryRecord count_parameters get_device move_to_device profile_memory seed_everything",
    "trainformer.context": "ConfigSource ConfigValue Lifecycle PipelineConfig PipelineContext ScopedContext StateEntry "
    "UnknownKey record_arguments",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_surface_is_frozen(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(PUBLIC[module].split())
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


@pytest.mark.parametrize(
    "module", ["trainformer.loggers", "trainformer.data", "trainformer.eval", "trainformer.engine"]
)
def test_every_listed_name_exists(module):
    package = importlib.import_module(module)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "module", ["trainformer", "trainformer.tasks", "trainformer.callbacks", "trainformer.loggers", "trainformer.engine"]
)
def test_importing_is_light(module):
    """Neither torch nor anything else that takes seconds is imported before it is used."""
    heavy = "torch", "transformers", "timm", "torchvision", "wandb", "mlflow", "jax", "sklearn"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
