"""Training of all experiments: the loop, checkpoints, locks on runs, display and records."""
