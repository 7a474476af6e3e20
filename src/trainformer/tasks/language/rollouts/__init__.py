"""Completions sampled from the model that is trained, for tasks that learn from their own output."""
