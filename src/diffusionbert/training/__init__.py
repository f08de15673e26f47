"""Training: configuration, trainer, checkpoints, run directories and model folders."""
