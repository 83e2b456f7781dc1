"""One training step on a sequence whose tokens are sharded over processes: `torchrun --nproc-per-node 2 …`.

Any number of processes prints the same loss and the same size of the gradient, up to rounding.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from sinkformers import sequence_parallel, to_sinkformer

TOKENS, DIM = 4096, 64


def step(device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters and the same sequence on every rank
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True, dropout=0.0)
    model = to_sinkformer(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), n_iters=3).to(device)
    x = torch.randn(1, TOKENS, DIM).chunk(size, 1)[rank].to(device)  # this rank's tokens
    with sequence_parallel(dist.group.WORLD):
        loss = model(x).sin().sum()
        loss.backward()
    square = torch.zeros((), device=device)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # each rank has its contribution
        square += parameter.grad.square().sum()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"{size} processes: loss {total.item():.3f}, gradient {square.sqrt().item():.3f}")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        step(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
