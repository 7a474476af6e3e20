"""Multi-process JAX training for tests.

The environment describes the processes, as a launcher would set it. Each process writes its results to
``result-KIND.NUMBER.npz``.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from pathlib import Path

from forking import SERVER

DEVICES = 4  # over all processes
LOWEST_PORT = 65535 - 2**12 + 1  # of those that jax derives from job IDs


def launched_by(launcher, port, number, processes):
    """The environment of a process that a launcher has started on this machine. Its port is derived from a job ID."""
    if launcher == "slurm":
        names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
        values = (processes, processes, number, number)
        step = {"SLURM_JOB_ID": str(port - LOWEST_PORT), "SLURM_STEP_NODELIST": "localhost"}
        return step | {name: str(value) for name, value in zip(names, values, strict=True)}
    if launcher in ("ompi", "ompi5"):
        names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
        values = (processes, number, number, processes)
        job = {"OMPI_MCA_orte_hnp_uri": f"{(port - LOWEST_PORT) * 2**12}.0;tcp://127.0.0.1:34911"}
        job = job if launcher == "ompi" else {}
        return job | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}
    own = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
    return own | {"JAX_PROCESS_ID": str(number)}


def free_port(launcher):
    """One that nothing listens on; launchers have those from `LOWEST_PORT` on."""
    for port in range(LOWEST_PORT + os.getpid() % 4000, 65535) if launcher else (0,):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("no free port")


def start(folder, processes, kind="plain", launcher=None, **options):
    """Start the processes of a run, each with an equal share of the devices and its output in a file."""
    port = free_port(launcher)
    started = []
    for number in range(processes):
        devices = f"--xla_force_host_platform_device_count={DEVICES // processes}"  # the last flag wins
        own = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}", "JAX_PLATFORMS": "cpu"}
        if processes > 1:
            own |= launched_by(launcher, port, number, processes)
        process = SERVER.Process(target=main, args=(folder, kind, options, own, folder / f"output-{number}.txt"))
        process.start()
        started.append(process)
    return started


def main(folder: Path, kind: str, options: dict, environment: dict, output_file: Path) -> None:
    """The main function of a forked process."""
    os.environ.update(environment)
    output = os.open(output_file, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        (exchange if kind == "exchange" else train)(folder, kind, options)
    finally:
        atexit._run_exitfuncs()  # jax disconnects here; a forked process skips it


def exit_codes(started, folder):
    """Wait for the processes; those that hang are killed."""
    for process in started:
        process.join(240)
    try:
        return [process.exitcode for process in started]
    finally:
        for number, process in enumerate(started):
            process.kill()
            print(f"-- process {number}:", (folder / f"output-{number}.txt").read_text()[-3000:])


def train(folder: Path, kind: str, options: dict) -> None:
    """Train, evaluate, and write losses, counts and weights. Other options are arguments."""
    import jax
    import jax_toys
    import numpy as np
    from flax.traverse_util import flatten_dict

    from trainformer.backends.jax.processes import gather_to_host

    kinds = {"mean": jax_toys.MeanTrainer, "tokens": jax_toys.TokenTrainer, "rows": rows_trainer()}
    chosen = kinds[options.pop("trainer", "mean")]
    data, waits = options.pop("rows", 64), options.pop("waits", 0.0)
    if held := options.pop("held", None):
        hold_write(folder, *held)
    is_text = chosen is jax_toys.TokenTrainer
    # A dropout mask depends on the position of a row, which padding changes.
    dropout = 0.1 if chosen is jax_toys.MeanTrainer else 0.0
    make = jax_toys.texts if is_text else jax_toys.samples
    given = {"output_dir": str(folder / "run"), "save_strategy": "steps", "save_steps": 4, "optimizer": "adamw"}
    trainer = chosen(
        jax_toys.arguments(**given | options),
        model=jax_toys.llama if is_text else lambda rngs: jax_toys.Mlp(rngs, rate=dropout),
        dataset_train=make(data),
        dataset_eval=make(24, seed=1),
        callbacks=[SlowSteps(folder, waits)] if waits or held else [],
    )
    state = trainer.train()
    if kind == "pretrained":
        trainer.save_pretrained(folder / "saved")
    seen = {"step": trainer.state.step, "samples": trainer.state.samples, "tokens": trainer.state.tokens}
    seen |= {"eval_loss": trainer.eval()["eval_loss"], "losses": jax_toys.losses(trainer)}
    sharded = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.is_fully_replicated]
    weights = flatten_dict(jax.tree.map(np.asarray, gather_to_host(state.params)), sep="/")
    np.savez(folder / f"result-{kind}.{jax.process_index()}.npz", sharded=len(sharded), **seen, **weights)


def rows_trainer():
    """A trainer whose loss masks padding rows."""
    import jax.numpy as jnp
    import optax
    from jax_toys import BaseTrainer, Loss

    class RowsTrainer(BaseTrainer):
        masks_padding = True

        def compute_loss(self, model, batch, key):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
            return Loss(jnp.sum(jnp.where(batch["_valid"], losses, 0.0)), jnp.sum(batch["_valid"]))

    return RowsTrainer


class SlowSteps:
    """Gives a test time to send a signal, and reports each step."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds

    def on_step_end(self, trainer, step, loss):
        (self.folder / f"at-step-{step}.{trainer.processes.rank}").touch()
        time.sleep(self.seconds)


def hold_write(folder, step, later):
    """The state of a step is written only after a later step has been trained."""
    from trainformer.checkpointing.jax_files import PendingWrite

    finish = PendingWrite.finish

    def hold(self):
        if f"step_{step:08d}" in str(self._folder):
            deadline = time.monotonic() + 200
            while not (folder / f"at-step-{later}.1").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            (folder / f"held-{step}").touch()
        return finish(self)

    PendingWrite.finish = hold


def exchange(folder: Path, kind: str, options: dict) -> None:
    """Write the results of all collectives of the process group."""
    from trainformer.backends.jax.processes import RequestPoll, initialize_distributed, process_group_on
    from trainformer.backends.jax.sharding import make_mesh

    initialize_distributed()
    mesh = make_mesh((1, -1, 1, 1))
    group = process_group_on(mesh)
    results = {
        "gather": group.all_gather_object({"rank": group.rank}),
        "long": group.all_gather_object(str(group.rank) * (3000 * group.rank)),
    }
    results["broadcast"] = group.broadcast(f"of {group.rank}")
    results["parts"] = group.all_gather_dp(group.rank + 10)
    results["total"] = group.all_reduce_sum([1.0, group.rank])
    results["any"] = group.any_rank([False, group.rank == 1, True])
    results["rows"] = [group.shard.index, group.shard.count]
    poll = RequestPoll(mesh)
    results["requests"] = [
        poll(has_request) for has_request in (False, group.rank == 1, False, False, group.rank == 0, False)
    ]
    try:
        group.run_on_main(lambda: 1 / 0)
    except Exception as error:
        results["failure"] = f"{type(error).__name__}: {error}"
    (folder / f"results.{group.rank}.json").write_text(json.dumps(results))
