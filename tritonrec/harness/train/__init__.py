"""Training in any mode: the loop, evaluation, checkpoints, graceful stops."""
