"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> dict[str, Any]:
    """The kind of machine; neither its name nor its paths."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    described = {"cpu": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}
    if device == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
    return described
