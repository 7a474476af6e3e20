"""The fork server that tests start processes from. It has imported everything, so a process starts in milliseconds.

Importing torch, jax and transformers takes some ten seconds per process. The server has no threads, so forking is safe,
and it reaps its children. There is one server per test process, so everything it preloads is listed here.
"""

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "numpy.random",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "torch.testing",
        "torchvision",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "trainformer.distributed.failure_detection",
        "trainformer.callbacks",
        "trainformer.hf.trainer",
        "trainformer.tasks",
        "trainformer.trainer",
        # Only modules of jax that do not initialise devices: that happens at the first computation, after the fork.
        "jax.numpy",
        "flax.nnx",
        "optax",
        "trainformer.jax.base_trainer",
        "trainformer.jax.sft",
        "trainformer.checkpointing.jax_files",
    ]
)
