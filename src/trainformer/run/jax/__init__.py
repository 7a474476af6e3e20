"""A session on JAX: its settings, its state components and their files. It imports no torch."""
