"""JAX backend: mesh and sharding rules, the train state, jitted steps, batch placement.

Never imports torch. Import names from the submodules, so that one does not pull in the others.
"""

from trainformer.core.optional import require

for _package in ("jax", "flax", "optax"):
    require(_package, "jax", "to train with JAX")
