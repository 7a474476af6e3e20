"""The tools behind `trainformer.checkpoint`."""
