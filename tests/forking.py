"""The server that tests fork processes from: it has imported everything, so that one starts in milliseconds.

Importing torch, jax and transformers anew takes a process some ten seconds. The server has no threads, so forking is
safe, and the processes are its children, so that none stays behind as a zombie. There is one such server for a whole
test process, whoever asks first; so what it imports is listed here and nowhere else.
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
        # Of jax what looks for no devices: it does so at the first computation, in the process that was forked.
        "jax.numpy",
        "flax.nnx",
        "optax",
        "trainformer.jax.base_trainer",
        "trainformer.jax.sft",
        "trainformer.checkpointing.jax_files",
    ]
)
