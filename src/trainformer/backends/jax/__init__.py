"""JAX: meshes and shardings, the training state, the jitted step, placing batches, state in and out of files.

Nothing here imports torch. Names are taken from their modules, so that importing one does not bring the others.
"""

from trainformer.core.optional import require

for _package in ("jax", "flax", "optax"):
    require(_package, "jax", "to train with JAX")
