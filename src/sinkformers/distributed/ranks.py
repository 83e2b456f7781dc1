"""The collective operations on a process group that attention uses, each named in its error and counted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sinkformers.distributed.traffic import record

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """The processes of a group, in the order in which their tokens follow each other.

    Attributes:
        rank, size: this process within the group, and how many there are.
    """

    def __init__(self, caller: str, group: "ProcessGroup") -> None:
        self.caller, self.group = caller, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, object]) -> "Ranks":
        return self  # a process group cannot be copied

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Name the operation in the error that the process group raises when a process is gone or does not answer."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.caller}: {what} failed on rank {self.rank} of {self.size}. Another process of the group has "
                "ended, or did not get there within the group's timeout: look for the first error among the "
                f"processes. The process group says: {error}"
            ) from error

    def add_(self, x: Tensor, what: str) -> Tensor:
        """Sum `x` over the ranks, in place."""
        return self._reduce_(x, dist.ReduceOp.SUM, what)

    def maximum_(self, x: Tensor, what: str) -> Tensor:
        """Take the maximum of `x` over the ranks, in place."""
        return self._reduce_(x, dist.ReduceOp.MAX, what)

    def _reduce_(self, x: Tensor, how: "dist.ReduceOp.RedOpType", what: str) -> Tensor:
        assert x.is_contiguous()
        if x.numel():
            record(what, 2 * x.nbytes * (self.size - 1) / self.size)
            with self.named(f"the all-reduce of {what}"):
                dist.all_reduce(x, how, group=self.group)
        return x

    def numbers(self, values: Sequence[int], device: torch.device, what: str) -> list[list[int]]:
        """The whole numbers of every rank, by rank."""
        mine = torch.tensor(values, dtype=torch.int64, device=self._device_for_numbers(device))
        every = mine.new_empty(self.size * len(values))
        record(what, mine.nbytes * (self.size - 1))
        with self.named(f"the exchange of {what}"):
            self._all_gather(every, mine)
            return every.view(self.size, -1).tolist()

    def texts(self, text: str, device: torch.device, what: str) -> list[str]:
        """The text of every rank, by rank."""
        encoded = text.encode()
        sizes = [size for (size,) in self.numbers([len(encoded)], device, f"the length of {what}")]
        padded = list(encoded) + [0] * (max(sizes) - len(encoded))
        every = self.numbers(padded, device, what) if padded else [[]] * self.size
        return [bytes(letters[:size]).decode() for letters, size in zip(every, sizes, strict=True)]

    def gather(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """The parts (…, n of this rank, d) of all ranks one after the other, (…, sum of sizes, d).

        In memory the tokens come first, so that no copy is made where all sizes are equal.
        """
        most = max(sizes)
        mine = x.movedim(-2, 0).contiguous()
        mine = F.pad(mine, (0, 0) * (mine.dim() - 1) + (0, most - mine.shape[0]))
        if not mine.numel():
            return x.new_empty(*x.shape[:-2], sum(sizes), x.shape[-1])
        every = mine.new_empty(self.size * most, *mine.shape[1:])
        record(what, mine.nbytes * (self.size - 1))
        with self.named(f"the gathering of {what}"):
            self._all_gather(every, mine)
        if min(sizes) < most:
            parts = every.split(most)
            every = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return every.movedim(0, -2)

    def scatter_sum(self, x: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """This rank's part (…, sizes[rank], d) of the sum of `x` (…, sum of sizes, d) over the ranks."""
        most, mine = max(sizes), sizes[self.rank]
        parts = x.movedim(-2, 0).split(list(sizes))
        padded = [F.pad(part, (0, 0) * (x.dim() - 1) + (0, most - part.shape[0])) for part in parts]
        every = torch.cat(padded)
        if not every.numel():
            return x.new_zeros(*x.shape[:-2], mine, x.shape[-1])
        summed = every.new_empty(most, *every.shape[1:])
        record(what, every.nbytes * (self.size - 1) / self.size)
        with self.named(f"the reduce-scatter of {what}"):
            self._reduce_scatter(summed, every)
        return summed[:mine].movedim(0, -2)

    def _all_gather(self, every: Tensor, mine: Tensor) -> None:
        # Newer releases of torch have another name for it, and warn of the old one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(every, mine, group=self.group)

    def _reduce_scatter(self, mine: Tensor, every: Tensor) -> None:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(mine, every, group=self.group)

    def _device_for_numbers(self, device: torch.device) -> torch.device:
        """The CPU where the group serves it: reading numbers from an accelerator would wait for all that is queued."""
        on_cpu = any(kind.type == "cpu" for kind in self.group._device_types)
        return torch.device("cpu") if on_cpu else device
