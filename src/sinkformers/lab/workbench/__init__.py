"""What trains every experiment: the loop, its checkpoints, claims on runs, and what is shown and recorded."""
