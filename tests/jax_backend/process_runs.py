"""Processes of a training on JAX, as tests start them.

Who else takes part is said by the environment, as it would be by a launcher. In the end each process writes what
became of it to ``result-KIND.NUMBER.npz``.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from pathlib import Path

from forking import SERVER

DEVICES = 4  # of all processes together


def start(folder, processes, kind="plain", **options):
    """Start the processes of a run; each has an equal share of the devices, and writes what it says to a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for number in range(processes):
        devices = f"--xla_force_host_platform_device_count={DEVICES // processes}"  # the last word of the flags counts
        own = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}", "JAX_PLATFORMS": "cpu"}
        if processes > 1:
            own |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
            own["JAX_PROCESS_ID"] = str(number)
        process = SERVER.Process(target=live, args=(folder, kind, options, own, folder / f"said-{number}.txt"))
        process.start()
        started.append(process)
    return started


def live(folder: Path, kind: str, options: dict, environment: dict, said: Path) -> None:
    """The whole life of a process that was forked for it; what it says goes to a file."""
    os.environ.update(environment)
    output = os.open(said, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        (exchange if kind == "exchange" else train)(folder, kind, options)
    finally:
        atexit._run_exitfuncs()  # where jax says goodbye to the others; a forked process leaves without it


def ends_of(started, folder):
    """The exit codes. A process that goes on for ever is ended."""
    for process in started:
        process.join(240)
    try:
        return [process.exitcode for process in started]
    finally:
        for number, process in enumerate(started):
            process.kill()
            print(f"-- process {number}:", (folder / f"said-{number}.txt").read_text()[-3000:])


def train(folder: Path, kind: str, options: dict) -> None:
    """Train, evaluate, and write losses, counts and weights. Options that are not read here are arguments."""
    import jax
    import jax_toys
    import numpy as np

    from trainformer.backends.jax.processes import on_every_host
    from trainformer.backends.jax.state import flat, joined

    kinds = {"mean": jax_toys.MeanTrainer, "tokens": jax_toys.TokenTrainer, "rows": rows_trainer()}
    chosen = kinds[options.pop("trainer", "mean")]
    data, waits = options.pop("rows", 64), options.pop("waits", 0.0)
    is_text = chosen is jax_toys.TokenTrainer
    rate = 0.1 if chosen is jax_toys.MeanTrainer else 0.0  # a mask goes by a row's place, which filling up changes
    make = jax_toys.texts if is_text else jax_toys.samples
    given = {"output_dir": str(folder / "run"), "save_strategy": "steps", "save_steps": 4, "optimizer": "adamw"}
    trainer = chosen(
        jax_toys.arguments(**given | options),
        model=jax_toys.llama if is_text else lambda rngs: jax_toys.Mlp(rngs, rate=rate),
        dataset_train=make(data),
        dataset_eval=make(24, seed=1),
        callbacks=[Waits(folder, waits)] if waits else [],
    )
    state = trainer.train()
    if kind == "pretrained":
        trainer.save_pretrained(folder / "saved")
    seen = {"step": trainer.state.step, "samples": trainer.state.samples, "tokens": trainer.state.tokens}
    seen |= {"eval_loss": trainer.eval()["eval_loss"], "losses": jax_toys.losses(trainer)}
    pieces = [len(leaf.sharding.device_set) for _, leaf in flat(state.params) if not leaf.is_fully_replicated]
    weights = {joined(path): np.asarray(leaf) for path, leaf in flat(on_every_host(state.params))}
    np.savez(folder / f"result-{kind}.{jax.process_index()}.npz", divided=len(pieces), **seen, **weights)


def rows_trainer():
    """A trainer whose loss leaves out rows that only fill up a batch."""
    import jax.numpy as jnp
    import optax
    from jax_toys import BaseTrainer, Loss

    class RowsTrainer(BaseTrainer):
        leaves_out_padding = True

        def compute_loss(self, model, batch, key):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
            return Loss(jnp.sum(jnp.where(batch["_valid"], losses, 0.0)), jnp.sum(batch["_valid"]))

    return RowsTrainer


class Waits:
    """Gives a test the time to send a signal, and says when."""

    def __init__(self, folder, seconds):
        self.folder, self.seconds = folder, seconds

    def on_step_end(self, trainer, step, loss):
        if step == 3:
            (self.folder / f"at-step-3.{trainer.processes.rank}").touch()
        time.sleep(self.seconds)


def exchange(folder: Path, kind: str, options: dict) -> None:
    """Write what the processes tell each other."""
    from trainformer.backends.jax.mesh import make_mesh
    from trainformer.backends.jax.processes import Asking, join, peers_on

    join()
    mesh = make_mesh((1, -1, 1, 1))
    peers = peers_on(mesh)
    told = {
        "gather": peers.all_gather_object({"rank": peers.rank}),
        "long": peers.all_gather_object(str(peers.rank) * (3000 * peers.rank)),
    }
    told["broadcast"] = peers.broadcast(f"of {peers.rank}")
    told["parts"] = peers.all_gather_dp(peers.rank + 10)
    told["total"] = peers.all_reduce_sum([1.0, peers.rank])
    told["any"] = peers.any_rank([False, peers.rank == 1, True])
    told["rows"] = [peers.part.index, peers.part.count]
    asking = Asking(mesh)
    told["asking"] = [asking(asks) for asks in (False, peers.rank == 1, False, False, peers.rank == 0, False)]
    try:
        peers.run_on_main(lambda: 1 / 0)
    except Exception as error:
        told["failure"] = f"{type(error).__name__}: {error}"
    (folder / f"told.{peers.rank}.json").write_text(json.dumps(told))
