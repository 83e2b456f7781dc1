"""Tasks: data, model, loss and metrics of each kind of experiment, and their common parts."""
