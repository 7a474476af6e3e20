"""Self-supervised learning: the `SSL` task and its methods."""
