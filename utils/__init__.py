"""What the scripts are told with: processes, the training loop, metrics, checkpoints, the run folder, options."""
