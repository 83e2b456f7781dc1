"""Messages between neighbours: each rank sends to the next one and receives from the one before."""

import torch
import torch.distributed as dist
from torch import Tensor

from sinkformers.distributed.ranks import Ranks
from sinkformers.distributed.traffic import record


class Exchange:
    """A message on its way to another rank, and one that is awaited; empty messages are not sent.

    Args:
        sent: to rank `to`, or None to receive only. It must not change before `wait` returns.
        received: a tensor to be filled by rank `source`, or None to send only.
        tag: distinguishes messages that are under way at the same time.
    """

    def __init__(
        self,
        ranks: Ranks,
        sent: Tensor | None,
        received: Tensor | None,
        what: str,
        *,
        to: int | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> None:
        self.ranks, self.what, self.received = ranks, what, received
        to = (ranks.rank + 1) % ranks.size if to is None else to
        source = (ranks.rank - 1) % ranks.size if source is None else source
        operations = []
        if sent is not None and sent.numel():
            record(what, sent.nbytes)
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), group=ranks.group, tag=tag, group_peer=to))
        if received is not None and received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=ranks.group, tag=tag, group_peer=source))
        with ranks.named(f"sending {what} to rank {to} or receiving it from rank {source}"):
            self._under_way = dist.batch_isend_irecv(operations) if operations else []
        self._kept = operations  # a message has to stay in memory until it has arrived

    def wait(self) -> Tensor:
        """Return what was received, once both messages have arrived."""
        with self.ranks.named(f"waiting for {self.what}"):
            for each in self._under_way:
                each.wait()
        self._kept = []
        return torch.empty(0) if self.received is None else self.received
