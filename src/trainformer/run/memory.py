"""How much memory a process holds, told by the system; what devices hold is known to the sessions on them."""

from __future__ import annotations

import os
import sys


def resident_gb() -> float | None:
    """Memory of this process that is really there, in GB (1e9 bytes); its peak where the system says no more."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
