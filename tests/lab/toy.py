"""A task that trains in a second: two classes of random sequences, one layer of attention."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from sinkformers.lab.workbench.observation import observe
from sinkformers.lab.workbench.task import Recipe
from sinkformers.modules import SelfAttention

RECIPE = Recipe(epochs=3, batch=10, rate=0.01, drops=(2,))


class Net(nn.Module):
    def __init__(self, n_iters, dropout):
        super().__init__()
        self.attention = SelfAttention(6, 2, n_iters=n_iters)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.dropout(x + self.attention(x)).mean(1))


class ToyTask:
    def __init__(self, seed=0, *, n_iters=3, dropout=0.3, size=37, dtype=torch.float32, **recipe):
        self.seed, self.n_iters, self.dropout, self.dtype = seed, n_iters, dropout, dtype
        self.recipe = replace(RECIPE, **recipe)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 5, 6, generator=generator, dtype=dtype)
        self.y = (self.x[:, :, 0].amax(1) > 1).long()

    @property
    def facts(self):
        return {"config": {"n_iters": self.n_iters, "rate": self.recipe.rate}}

    def model(self):
        return Net(self.n_iters, self.dropout).to(self.dtype)

    def batches(self, epoch):
        order = torch.Generator().manual_seed(100 * self.seed + epoch)
        return torch.randperm(len(self.x), generator=order).split(self.recipe.batch)

    def losses(self, model, examples):
        assert len(examples), "no model need take nothing"
        logits = model(self.x[examples])
        loss = F.cross_entropy(logits, self.y[examples], reduction="sum")
        return loss, {"accuracy": (logits.argmax(-1) == self.y[examples]).sum().double()}

    def weight(self, examples):
        return len(examples)

    @torch.no_grad()
    def evaluate(self, model, _accelerator):
        return {"loss": F.cross_entropy(model(self.x), self.y).item()}

    def observe(self, model):
        return observe(model, lambda: model(self.x))
