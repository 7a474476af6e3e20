"""Runs on JAX. Never imports torch."""
