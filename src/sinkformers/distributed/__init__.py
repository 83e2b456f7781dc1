"""Processes that share a sequence: their communication, what it sends, and the setting under which models use it."""

from sinkformers.distributed.agreement import Header, agree
from sinkformers.distributed.context import (
    SequenceGroup,
    active_group,
    check_modules,
    refuse_in_parallel,
    sequence_group,
    sequence_parallel,
)
from sinkformers.distributed.exchange import Exchange
from sinkformers.distributed.ranks import Ranks
from sinkformers.distributed.traffic import Workload, bytes_sent, count_traffic

__all__ = [
    "Exchange",
    "Header",
    "Ranks",
    "SequenceGroup",
    "Workload",
    "active_group",
    "agree",
    "bytes_sent",
    "check_modules",
    "count_traffic",
    "refuse_in_parallel",
    "sequence_group",
    "sequence_parallel",
]
