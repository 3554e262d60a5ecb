"""One training loop for any task, evaluation, checkpoints, run folders, logging and processes."""
