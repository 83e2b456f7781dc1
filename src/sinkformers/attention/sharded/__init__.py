"""Attention to sequences whose tokens are sharded over the ranks of a process group."""

from sinkformers.attention.sharded.plan import Arguments, plan_in_group

__all__ = ["Arguments", "plan_in_group"]
