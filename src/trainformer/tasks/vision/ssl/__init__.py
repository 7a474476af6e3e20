"""Self-supervised learning: the task, and one module per method."""
