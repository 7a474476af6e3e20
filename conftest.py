"""What all tests and doctests share: no network, one thread, slow tests last, a clean folder for each."""

import os
import signal
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")
# Some virtual machines report AMX and forbid its use: bf16 matrix products then end in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Before jax looks for devices: eight virtual ones. Compiling is most of what its tests do, so it is kept cheap, which
# halves their time, and is kept.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "trainformer-jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

# A shell starts jobs in the background with SIGINT ignored, and so do all processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch

from trainformer.core.secrets import forget_all

if not torch.cuda.is_available():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants some of the GPU's memory, too

# The models are tiny; a second thread costs more than it brings, and far more on a busy machine.
torch.set_num_threads(1)

# A slow machine is not a failure: no deadline per example, and no health check on speed.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")

# They hold fixtures and no examples; looked through for those, those of one name would be taken for one another.
collect_ignore_glob = ["*/conftest.py"]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _in_a_clean_place(tmp_path, tmp_path_factory, monkeypatch):
    """Tests that do not name a folder write to a fresh one, and begin from the same random numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the folder they are started in
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))  # approvals of code
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing on a terminal that calls itself dumb
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    forget_all()  # the secrets of one test are harmless words of the next


@pytest.fixture
def event_files_in_order(monkeypatch):
    """TensorBoard reads files by name, and numbers those of one second without zeros: 10 comes before 9."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
