"""Runs as the jobs of a cluster, submitted through submitit."""
