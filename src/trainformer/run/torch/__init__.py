"""A session on torch: its settings, data, evaluation, state components and pre-flight."""
