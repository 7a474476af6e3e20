"""What there is on this machine to train with. Whatever goes wrong while looking is written down, not raised."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from trainformer import __version__
from trainformer.checkpointing.tools.summary import in_words
from trainformer.cli.requirements import Requirement, is_met, requirements_of

Problems = list[dict[str, Any]]

_LITTLE_DISK = 5e9  # bytes; a checkpoint of a small language model
_LITTLE_SHARED = 1e9  # batches of several workers; containers begin with 64 MB
_FEW_FILES = 1024  # workers that share tensors keep many files open


def diagnose(imports: bool = False) -> dict[str, Any]:
    """Everything, as plain values. `problems` say what is wrong, whether it is broken, and what to do."""
    problems: Problems = []
    torch = _imported("torch", problems)
    jax = _imported("jax", problems) if _version("jax") else None
    found = {
        "versions": _looked_up(lambda: _versions(torch), {"trainformer": __version__}, "the versions", problems),
        "machine": _machine(problems),
        "devices": [_processor(), *_looked_up(lambda: _accelerators(torch), [], "the devices of torch", problems)],
    }
    found["devices"] += _looked_up(lambda: _of_jax(jax), [], "the devices of jax", problems)
    _compare_devices(found["devices"], problems)
    found["extras"] = _extras(problems)
    if imports and found["extras"]:
        _import_all(problems)
    return {**found, "problems": problems}


def _problem(what: str, do: str = "", broken: bool = False) -> dict[str, Any]:
    return {"what": what, "do": do, "broken": broken}


def _imported(name: str, problems: Problems) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a broken package raises
        what = f"{name} cannot be imported ({type(error).__name__}: {_short(error)})."
        problems.append(_problem(what, f"Install it again: pip install --force-reinstall {name}", broken=True))
        return None


def _looked_up(look: Callable[[], Any], otherwise: Any, what: str, problems: Problems) -> Any:
    try:
        return look()
    except Exception as error:  # drivers raise anything
        problems.append(_problem(f"Looking for {what} failed ({type(error).__name__}: {_short(error)}).", broken=True))
        return otherwise


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- versions and devices ----------------------------------------------------------------------------------


def _versions(torch: Any) -> dict[str, str | None]:
    cudnn = None if torch is None else torch.backends.cudnn.version()
    return {
        "trainformer": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "torch": None if torch is None else torch.__version__,
        "CUDA": None if torch is None else torch.version.cuda,
        "cuDNN": None if cudnn is None else str(cudnn),
        **{name: _version(name) for name in ("jax", "transformers", "timm")},
    }


def _device(name: str, kind: str, memory: str | None = None, **able: bool | None) -> dict[str, Any]:
    return {"device": kind, "name": name, "memory": memory, "bf16": None, "fp8": None, "flash": None} | able


def _processor() -> dict[str, Any]:
    memory = None
    try:
        memory = in_words(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        pass
    return _device(_processor_name(), "cpu", memory)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _accelerators(torch: Any) -> list[dict[str, Any]]:
    """What torch sees. fp8 is computed from compute capability 8.9 on, flash attention from 8.0 on."""
    if torch is None:
        return []
    if torch.backends.mps.is_available():
        return [_device("Apple GPU", "mps")]
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        able = (properties.major, properties.minor)
        nvidia = torch.version.cuda is not None
        flash = torch.backends.cuda.is_flash_attention_available() and able >= (8, 0)
        memory = f"{in_words(free)} free of {in_words(total)}"
        with torch.cuda.device(number):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds = {"bf16": bf16, "fp8": able >= (8, 9) if nvidia else None, "flash": flash if nvidia else None}
        found.append(_device(properties.name, f"cuda:{number}", memory, **kinds))
    return found


def _of_jax(jax: Any) -> list[dict[str, Any]]:
    """What jax sees beside the processor."""
    if jax is None:
        return []
    before = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # only looking: else it takes most of the memory
    try:
        devices = [device for device in jax.devices() if device.platform != "cpu"]
    finally:
        if before is None:
            del os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]
        else:
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = before
    return [_device(device.device_kind, f"jax {device.platform}:{device.id}") for device in devices]


def _compare_devices(devices: list[dict[str, Any]], problems: Problems) -> None:
    kinds = [device["device"] for device in devices]
    has_cuda = any(kind.startswith("cuda") for kind in kinds)
    if not has_cuda and shutil.which("nvidia-smi") and Path("/dev/nvidia0").exists():
        do = "Install a torch that is built for the CUDA version which nvidia-smi shows."
        problems.append(_problem("There is an NVIDIA GPU, but torch does not see it.", do))
    if has_cuda and _version("jax") and not any(kind.startswith("jax") for kind in kinds):
        do = "Training with trainformer.jax runs on the processor. Install jax for it: pip install 'jax[cuda13]'"
        problems.append(_problem("jax does not see the GPU that torch sees.", do))


# -- the machine -------------------------------------------------------------------------------------------


def _machine(problems: Problems) -> dict[str, Any]:
    """What workers and checkpoints need."""
    place = next(path for path in (Path("runs").absolute(), *Path("runs").absolute().parents) if path.exists())
    disk = shutil.disk_usage(place).free
    if disk < _LITTLE_DISK:
        do = "Free some, or let runs be written elsewhere (run_dir)."
        problems.append(_problem(f"There are {in_words(disk)} free for runs in {place}.", do))
    shared = _shared_memory(problems)
    return {
        "processors": _processors(),
        "open files": _open_files(problems),
        "shared memory": None if shared is None else in_words(shared),
        "free for runs": in_words(disk),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    }


def _processors() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _open_files(problems: Problems) -> int | None:
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return None
    if most < _FEW_FILES:
        do = "Workers of the data loader need more: ulimit -n 4096"
        problems.append(_problem(f"A process may open {most} files.", do))
    return most


def _shared_memory(problems: Problems) -> int | None:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return None
    if size < _LITTLE_SHARED:
        do = "Workers of the data loader pass batches through it. In a container: docker run --shm-size=8g"
        problems.append(_problem(f"There are {in_words(size)} of shared memory (/dev/shm).", do))
    return size


# -- packages ----------------------------------------------------------------------------------------------


def _extras(problems: Problems) -> list[dict[str, Any]]:
    """Every extra that the installed package declares, and what of it is missing."""
    try:
        requirements = requirements_of("trainformer")
    except metadata.PackageNotFoundError:
        do = "Install it, so that its requirements are known: pip install trainformer"
        problems.append(_problem("trainformer is imported from a folder and is not installed.", do))
        return []
    for requirement in requirements.pop(None, []):
        if not is_met(requirement):
            do = f"Install it: pip install '{requirement.text}'"
            problems.append(_problem(f"trainformer needs {_state(requirement)}.", do, broken=True))
    extras = []
    for name, needed in sorted(requirements.items()):
        missing = [requirement for requirement in needed if not is_met(requirement)]
        for requirement in missing:
            if _version(requirement.name) is not None:
                do = f"Upgrade it: pip install --upgrade '{requirement.text}'"
                problems.append(_problem(f"The extra {name} needs {_state(requirement)}.", do))
        status = "installed" if not missing else "missing" if len(missing) == len(needed) else "in part"
        install = f"pip install 'trainformer[{name}]'" if missing else ""
        extras.append({"name": name, "status": status, "missing": [r.text for r in missing], "install": install})
    return extras


def _state(requirement: Requirement) -> str:
    version = _version(requirement.name)
    return f"{requirement.text}, but " + ("it is not installed" if version is None else f"{version} is installed")


def _import_all(problems: Problems) -> None:
    """Import what is installed of the extras; one that cannot be imported is broken."""
    modules = metadata.packages_distributions()
    wanted = {
        requirement.name.lower().replace("_", "-")
        for needed in requirements_of("trainformer").values()
        for requirement in needed
    }
    for module, packages in sorted(modules.items()):
        if not module.startswith("_") and any(name.lower().replace("_", "-") in wanted for name in packages):
            _imported(module, problems)
