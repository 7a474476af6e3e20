"""The hooks that come with mini: progress, logging, checkpoints, averages of the weights, images, memory."""
