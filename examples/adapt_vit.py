"""The same for vision, without a download: a ViT trained here on MNIST with SoftMax, converted, fine-tuned.

    pip install '.[experiments]'
    python examples/adapt_vit.py --data DIR           # DIR/mnist/train-images-idx3-ubyte.gz and the other three
    python examples/adapt_vit.py --report

For each seed a ViT is trained with SoftMax for three epochs. Every arm goes on from these weights for one more epoch at
a tenth of the rate, as in the paper's translation experiment; SoftMax does so too.
"""

import functools
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sinkformers
import study
from sinkformers.lab.data import load_mnist

PATCH, DIM, DEPTH, HEADS, BATCH, RATE = 7, 64, 4, 4, 100, 1e-3
EPOCHS, MORE = 3, 1
ARMS = {**study.ARMS, "last layer, at once": study.Arm({"n_iters": study.N_ITERS, "select": f"*layers.{DEPTH - 1}.*"})}
Split = tuple[Tensor, Tensor]  # patches (images, tokens, PATCH²) and labels


class ViT(nn.Module):
    """Patches, positions, torch.nn's encoder in pre-LN order, and the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH**2, DIM)
        self.position = nn.Parameter(0.02 * torch.randn((28 // PATCH) ** 2, DIM))
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 10)

    def forward(self, patches: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(patches) + self.position).mean(1))


def read_mnist(data: Path) -> dict[str, Split]:
    images = load_mnist(data)
    sets = {}
    for split, part in (("train", images.train), ("test", images.test)):
        pixels = (part.pixels.float() / 255 - 0.1307) / 0.3081
        sets[split] = (F.unfold(pixels, PATCH, stride=PATCH).mT.contiguous(), part.labels)
    return sets


@torch.no_grad()
def accuracy(model: nn.Module, test: Split) -> float:
    model.eval()
    hits = sum(int((model(x).argmax(-1) == y).sum()) for x, y in zip(*(part.split(500) for part in test), strict=True))
    model.train()
    return hits / len(test[1])


def train(model: nn.Module, data: Split, epochs: int, rate: float, seed: int, schedule: Any) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    order, n_steps, step = torch.Generator().manual_seed(seed), epochs * len(data[1]) // BATCH, 0
    for _ in range(epochs):
        for some in torch.randperm(len(data[1]), generator=order).split(BATCH):
            schedule(model, step, n_steps)
            F.cross_entropy(model(data[0][some]), data[1][some]).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            step += 1


def base(sets: dict[str, Split], out: Path, seed: int) -> ViT:
    """The SoftMax model of a seed, trained by whichever run needs it first; two that do get the same."""
    torch.manual_seed(seed)
    model, file = ViT(), out / f"base-{seed}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model
    train(model, sets["train"], EPOCHS, RATE, seed, study.leave)
    partial = file.with_suffix(f".{time.time_ns()}")
    torch.save(model.state_dict(), partial)
    partial.replace(file)
    return model


def train_run(data: Path, out: Path, arm: str, seed: int) -> dict[str, Any]:
    sets = read_mnist(data)
    model, started = base(sets, out, seed), time.perf_counter()
    result: dict[str, Any] = {}
    if arm == "SoftMax":
        result["unadapted"] = study.unadapted(model, lambda model: accuracy(model, sets["test"]))
        sinkformers.to_transformer(model)
    before = accuracy(model, sets["test"])
    sinkformers.to_sinkformer(model, **ARMS[arm].settings)
    train(model, sets["train"], MORE, RATE / 10, seed + 1000, ARMS[arm].schedule)
    curve = [before, accuracy(model, sets["test"])]
    return {**result, "accuracy": curve, "seconds": time.perf_counter() - started, "tau": study.learned(model)}


def prepare(data: Path, out: Path) -> study.Train:
    load_mnist(data)  # missing files are reported before any worker starts
    return functools.partial(train_run, data, out)


if __name__ == "__main__":
    study.main(__doc__, ARMS, prepare, "runs/adapt-vit")
