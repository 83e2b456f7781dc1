"""Two training steps, by one process or by several that share the batch; run by `torchrun … -m` with this module."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sinkformers import to_sinkformer

VALID = torch.arange(7) < torch.tensor([[7], [5], [3], [6], [2], [7]])  # the batch of all processes together


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    return model, model.layers


def bert():
    from tests.conversion.hugging_face_models import build

    model = build("bert").eval()  # for no dropout
    return model, model.encoder.layer


MODELS = {"torch.nn": encoder, "bert": bert}


def loss(kind, model, rows):
    """Return the loss of some rows of the batch: a mean over texts of sums over their tokens."""
    generator = torch.Generator().manual_seed(3)
    if kind == "bert":
        ids = torch.randint(5, 53, VALID.shape, generator=generator)
        out = model(input_ids=ids[rows], attention_mask=VALID[rows].long())
        return (out.last_hidden_state[VALID[rows]].sin().sum() + out.pooler_output.sin().sum()) / len(rows)
    x = torch.randn(*VALID.shape, 24, dtype=torch.float64, generator=generator)
    return model(x[rows], src_key_padding_mask=~VALID[rows])[VALID[rows]].sin().sum() / len(rows)


def wrapped(kind, how):
    """Return a converted model, the same in all processes, with its wrapper."""
    torch.manual_seed(0)
    model, layers = MODELS[kind]()
    to_sinkformer(model, 5, tau="learned")
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def train(kind, how="alone", rank=0, world=1):
    """Return all parameters by name after two steps."""
    model = wrapped(kind, how)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    rows = list(range(rank, len(VALID), world))
    for _ in range(2):
        optimiser.zero_grad()
        loss(kind, model, rows).backward()
        optimiser.step()
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
    return {name.removeprefix("module."): parameter.detach().clone() for name, parameter in whole.items()}


def main(kind, how, folder):
    dist.init_process_group("gloo")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.save({"world": world, "parameters": train(kind, how, rank, world)}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
