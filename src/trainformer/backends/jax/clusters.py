"""Whether a program is one of several processes, and what `jax.distributed.initialize` has to be told about them.

jax itself finds the coordinator, and on TPUs the processes. But it takes any process inside of a cluster's job for one
of many: a shell on a login node, a batch script that has not called `srun`, a notebook. So several processes are
assumed only where a launcher says that it has started them. Launchers that start one process per machine mean it to use
all GPUs there, where jax would give it a single one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import BadArgument, expected

# Tasks of the step of Slurm, not of the job (SLURM_NTASKS), which a batch script and a shell in it have too.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")  # the last of Kubernetes' indexed jobs
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # of a TPU slice on GKE, separated by commas
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of Slurm's nodes: 2(x3),1 is 2,2,2,1

Environment = Mapping[str, str]


def distributed_options(environment: Environment) -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize`; None for a single process.

    >>> given = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    >>> distributed_options(given)
    {'num_processes': 2, 'process_id': 1, 'cluster_detection_method': 'deactivate'}
    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    >>> distributed_options(step), distributed_options({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
    ({'num_processes': 4, 'process_id': 2}, None)
    >>> distributed_options({"TPU_WORKER_HOSTNAMES": "tpu-0.pod,tpu-1.pod", "TPU_WORKER_ID": "1"})
    {}
    """
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return _with_coordinator(environment)
    for count, rank in zip(_COUNTS, _RANKS, strict=False):
        if count in environment and _integer(environment, count) > 1:
            names = {"num_processes": count, "process_id": rank} if rank in environment else {}
            known = {name: _integer(environment, variable) for name, variable in names.items()}
            return known | _local_devices(environment)
    return {} if _tpu_hosts(environment) > 1 else None


def _with_coordinator(environment: Environment) -> dict[str, Any]:
    """What the user says; else what the launcher says; jax looks for the rest."""
    count = next((name for name in ("JAX_NUM_PROCESSES", *_COUNTS) if name in environment), None)
    rank = next((name for name in ("JAX_PROCESS_ID", *_RANKS) if name in environment), None)
    options: dict[str, Any] = {}
    if count is not None:
        options["num_processes"] = _integer(environment, count)
    if rank is not None:
        options["process_id"] = _integer(environment, rank)
    if len(options) == 2:  # nothing is left to detect, but jax would choose a single GPU in a job of Slurm
        options |= _local_devices(environment) or {"cluster_detection_method": "deactivate"}
    return options


def _local_devices(environment: Environment) -> dict[str, Any]:
    """An equal share of the GPUs that all processes of a machine see, or all that this one alone sees.

    >>> _local_devices({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...     "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    {'local_device_ids': [2, 3]}
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return {}
    place = _place_on_machine(environment)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len([gpu for gpu in visible.split(",") if gpu])
    if place is None or not gpus:
        return {}
    number, count = place
    on_machine = environment.get("SLURM_GPUS_ON_NODE", "")
    is_own = gpus < count or (on_machine.isdecimal() and gpus < int(on_machine))  # bound to this process
    if is_own or count == 1:
        return {"local_device_ids": list(range(gpus))}
    return {"local_device_ids": list(range(number * gpus // count, (number + 1) * gpus // count))}


def _place_on_machine(environment: Environment) -> tuple[int, int] | None:
    """Which of the launched processes on its machine this one is, and how many there are; None if that is unknown."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment and "OMPI_COMM_WORLD_LOCAL_RANK" in environment:
        return _integer(environment, "OMPI_COMM_WORLD_LOCAL_RANK"), _integer(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if not {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID"} <= environment.keys():
        return None
    found = _TASKS.findall(environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [int(count) for count, times in found for _ in range(int(times or 1))]
    node = _integer(environment, "SLURM_NODEID")
    return (_integer(environment, "SLURM_LOCALID"), tasks[node]) if node < len(tasks) else None


def _tpu_hosts(environment: Environment) -> int:
    """The number of hosts of a TPU slice, times that of slices; 1 if no TPU is used."""
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu"):
        return 1
    slices = _integer(environment, "MEGASCALE_NUM_SLICES") if environment.get("MEGASCALE_NUM_SLICES") else 1
    hosts = max(environment.get(name, "").count(",") + 1 for name in _TPU_HOSTS)
    return slices * hosts if slices * hosts > 1 else _hosts_by_metadata()


def _hosts_by_metadata() -> int:
    """The number of hosts of a TPU VM, which Google's metadata server knows. Nothing is asked anywhere else."""
    try:
        from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
        from jax._src.clusters import GceTpuCluster

        is_present = running_in_cloud_tpu_vm and GceTpuCluster.is_env_present()
        return GceTpuCluster.get_process_count() if is_present else 1
    except (ImportError, AttributeError):  # not public: another version of jax may not have it
        return 1


def _integer(environment: Environment, name: str) -> int:
    text = environment[name]
    if not text.strip().isdecimal():
        raise BadArgument(expected(f"the environment variable {name} to be an integer", text))
    return int(text)
