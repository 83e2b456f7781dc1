"""What trains every experiment: the loop, its checkpoints, claims on cells, and what is shown and recorded."""
