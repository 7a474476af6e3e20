"""Control of a run from outside its process: `trainformer ctl`, and the status of run folders.

Owns the address that a run publishes in its folder, the server that listens there, the client, and the reading of run
folders. Imports no torch, so `trainformer ctl` starts fast. `trainformer.run.live_control` carries out requests.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.live.client": ["ControlError", "ask"],
        "trainformer.live.runs": ["RunInfo", "describe", "list_runs"],
    },
)
