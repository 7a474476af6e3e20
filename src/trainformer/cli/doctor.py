"""`trainformer doctor`: versions, devices, and what is missing on this machine, with what to do about it.

Whatever goes wrong during the diagnosis is reported as a problem, not raised.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer import __version__
from trainformer.cli.app import Command
from trainformer.cli.output import lines_of, print_json, print_table

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Problems = list[dict[str, Any]]

LOW_DISK = 5e9  # bytes; a checkpoint of a small language model
LOW_SHARED_MEMORY = 1e9  # batches of several workers; containers start with 64 MB
FEW_OPEN_FILES = 1024  # workers that share tensors keep many files open


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    imports = "also import every installed package of the extras, which takes a while"
    parser.add_argument("--imports", action="store_true", help=imports)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if something is broken."""
    if args.json:
        found = diagnose(imports=args.imports)
        print_json(found)
    else:
        found = diagnose(imports=args.imports, show=_print)
    return 1 if any(problem["broken"] for problem in found["problems"]) else 0


def _print(title: str, found: Any) -> None:
    """Print one section, at once: the next one may have to import torch."""
    if title in ("versions", "machine"):
        print("\n".join([title, *lines_of({name: _text(value) for name, value in found.items()}), ""]))
    elif title == "devices":
        print("devices", end="")
        names = list(found[0])
        rows = [[_text(device[name]) for name in names] for device in found]
        print_table(dict.fromkeys(names, "left") | {"name": "fold"}, rows)
    elif title == "extras" and found:  # none if the package is not installed
        print("extras", end="")
        rows = [[extra["name"], extra["status"], ", ".join(extra["missing"]), extra["install"]] for extra in found]
        print_table({"extra": "left", "status": "left", "missing": "fold", "to install": "left"}, rows)
    elif title == "problems":
        for problem in found:
            kind = "broken" if problem["broken"] else "warning"
            print(f"{kind}: {problem['what']} {problem['do']}".rstrip())
        print("something is broken" if any(problem["broken"] for problem in found) else "nothing is broken")
    sys.stdout.flush()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# -- diagnosis --------------------------------------------------------------------------------------------------------


def diagnose(imports: bool = False, show: Callable[[str, Any], None] | None = None) -> dict[str, Any]:
    """Everything, as plain values. `problems` say what is wrong, what to do, and whether it breaks anything.

    `show` receives each section as soon as it is there; torch is imported (for its devices) after the first two.
    """
    problems: Problems = []
    found: dict[str, Any] = {}

    def add(title: str, value: Any) -> None:
        found[title] = value
        if show is not None:
            show(title, value)

    add("machine", _machine(problems))
    add("extras", _extras(problems))
    torch = None if _version("torch") is None else _imported("torch", problems)
    if torch is None and _version("jax") is None:
        do = "Install one: pip install 'trainformer[torch]' or pip install 'trainformer[jax]'"
        problems.append(_problem("Neither torch nor jax is there to train with.", do))
    add("versions", _attempt(lambda: _versions(torch), {"trainformer": __version__}, "the versions", problems))
    devices = [_processor(), *_attempt(lambda: _torch_devices(torch), [], "the devices of torch", problems)]
    if _version("jax") and (len(devices) > 1 or _has_accelerator()):
        jax = _imported("jax", problems)
        devices += _attempt(lambda: _jax_devices(jax), [], "the devices of jax", problems)
    _compare_devices(devices, problems)
    add("devices", devices)
    if imports and found["extras"]:
        _import_all(problems)
    add("problems", problems)
    return found


def _has_accelerator() -> bool:
    """Whether jax may see a device besides the CPU. Without one, importing it (a second) would tell nothing."""
    files = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/accel0", "/dev/vfio/0")  # NVIDIA, AMD, WSL, TPU
    named = os.environ.get("JAX_PLATFORMS", "cpu") not in ("", "cpu")
    return named or sys.platform == "darwin" or any(Path(file).exists() for file in files)


def _size(count: float) -> str:
    from trainformer.checkpointing.tools.summary import in_words

    return in_words(int(count))


def _problem(what: str, do: str = "", broken: bool = False) -> dict[str, Any]:
    return {"what": what, "do": do, "broken": broken}


def _imported(name: str, problems: Problems) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a broken package raises
        what = f"{name} cannot be imported ({type(error).__name__}: {_short(error)})."
        problems.append(_problem(what, f"Install it again: pip install --force-reinstall {name}", broken=True))
        return None


def _attempt(look: Callable[[], Any], fallback: Any, what: str, problems: Problems) -> Any:
    try:
        return look()
    except Exception as error:  # drivers may raise anything
        problems.append(_problem(f"Looking for {what} failed ({type(error).__name__}: {_short(error)}).", broken=True))
        return fallback


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- versions and devices --------------------------------------------------------------------------------------------


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
    memory, name = None, platform.processor() or platform.machine()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        memory = _size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return _device(name, "cpu", memory)


def _torch_devices(torch: Any) -> list[dict[str, Any]]:
    """The devices of torch. fp8 needs compute capability 8.9, flash attention 8.0."""
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
        memory = f"{_size(free)} free of {_size(total)}"
        with torch.cuda.device(number):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds = {"bf16": bf16, "fp8": able >= (8, 9) if nvidia else None, "flash": flash if nvidia else None}
        found.append(_device(properties.name, f"cuda:{number}", memory, **kinds))
    return found


def _jax_devices(jax: Any) -> list[dict[str, Any]]:
    """The devices of jax other than the CPU."""
    if jax is None:
        return []
    before = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # otherwise jax allocates most of the memory
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
    if _version("torch") and not has_cuda and shutil.which("nvidia-smi") and Path("/dev/nvidia0").exists():
        do = "Install a torch build for the CUDA version that nvidia-smi shows."
        problems.append(_problem("There is an NVIDIA GPU, but torch does not see it.", do))
    if has_cuda and _version("jax") and not any(kind.startswith("jax") for kind in kinds):
        do = "Training with trainformer.jax runs on the CPU. Install jax for CUDA: pip install 'jax[cuda13]'"
        problems.append(_problem("jax does not see the GPU that torch sees.", do))


# -- the machine -----------------------------------------------------------------------------------------------------


def _machine(problems: Problems) -> dict[str, Any]:
    place = next(path for path in (Path("runs").absolute(), *Path("runs").absolute().parents) if path.exists())
    disk = shutil.disk_usage(place).free
    if disk < LOW_DISK:
        do = "Free some space, or write runs elsewhere (run_dir)."
        problems.append(_problem(f"There are {_size(disk)} free for runs in {place}.", do))
    shared = most = None
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total
        if shared < LOW_SHARED_MEMORY:
            do = "DataLoader workers pass batches through it. In a container: docker run --shm-size=8g"
            problems.append(_problem(f"There are {_size(shared)} of shared memory (/dev/shm).", do))
    with contextlib.suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = None if limit == resource.RLIM_INFINITY else limit
    if most is not None and most < FEW_OPEN_FILES:
        do = "DataLoader workers need more: ulimit -n 4096"
        problems.append(_problem(f"A process may open {most} files.", do))
    return {
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "open files": most,
        "shared memory": None if shared is None else _size(shared),
        "free for runs": _size(disk),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    }


# -- packages --------------------------------------------------------------------------------------------------------


def _extras(problems: Problems) -> list[dict[str, Any]]:
    """Every extra that the installed package declares, and what of it is missing."""
    try:
        names = metadata.metadata("trainformer").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        do = "Install it, so that its requirements are known: pip install trainformer"
        problems.append(_problem("trainformer is imported from a folder and is not installed.", do))
        return []
    for requirement in requirements_of("trainformer"):
        if not is_met(requirement):
            do = f"Install it: pip install '{_text_of(requirement)}'"
            problems.append(_problem(f"trainformer needs {_state(requirement)}.", do, broken=True))
    extras = []
    for name in sorted(names):
        needed = requirements_of("trainformer", name)
        missing = [requirement for requirement in needed if not is_met(requirement)]
        for requirement in missing:
            if _version(requirement.name) is not None:
                do = f"Upgrade it: pip install --upgrade '{_text_of(requirement)}'"
                problems.append(_problem(f"The extra {name} needs {_state(requirement)}.", do))
        status = "installed" if not missing else "missing" if len(missing) == len(needed) else "in part"
        install = f"pip install 'trainformer[{name}]'" if missing else ""
        extras.append({"name": name, "status": status, "missing": list(map(_text_of, missing)), "install": install})
    return extras


def requirements_of(package: str, extra: str = "") -> list[Requirement]:
    """What an extra of an installed package needs, by its metadata; without an extra, what it always needs."""
    from packaging.requirements import Requirement

    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, metadata.requires(package) or []):
        is_always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_always == bool(extra) or (extra and not requirement.marker.evaluate({"extra": extra})):  # type: ignore[union-attr]
            continue
        is_own = requirement.name.lower() == package
        for each in (r for e in requirement.extras for r in requirements_of(package, e)) if is_own else [requirement]:
            found[_text_of(each)] = each
    return list(found.values())


def is_met(requirement: Requirement) -> bool:
    """Whether a version that will do is installed.

    >>> from packaging.requirements import Requirement
    >>> is_met(Requirement("numpy>=1.0")), is_met(Requirement("numpy>=99")), is_met(Requirement("no-such"))
    (True, False, False)
    """
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _text_of(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _state(requirement: Requirement) -> str:
    version = _version(requirement.name)
    return f"{_text_of(requirement)}, but " + ("it is not installed" if version is None else f"{version} is installed")


def _import_all(problems: Problems) -> None:
    """Import every installed package of the extras; one that cannot be imported is broken."""
    extras = metadata.metadata("trainformer").get_all("Provides-Extra") or []
    needed = {requirement.name for extra in ["", *extras] for requirement in requirements_of("trainformer", extra)}
    wanted = {name.lower().replace("_", "-") for name in needed}
    for module, packages in sorted(metadata.packages_distributions().items()):
        if not module.startswith("_") and any(name.lower().replace("_", "-") in wanted for name in packages):
            _imported(module, problems)


COMMANDS = {"doctor": Command(_add_arguments, _run)}
