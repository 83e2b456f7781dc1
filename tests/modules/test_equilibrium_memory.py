"""The memory that `EquilibriumAttention` keeps for the backward pass does not grow with its steps."""

import weakref

import torch

from sinkformers.modules import EquilibriumAttention


def rand(*size):
    return torch.randn(*size, dtype=torch.float64)


def build(pull=0.5, eps=0.8, **options):
    return EquilibriumAttention(6, 3, 5, pull=pull, eps=eps, **options).double()


class Ledger:
    """The bytes of the tensors that autograd saved: the maximum, and at the end."""

    class Entry:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output that is saved would keep its own graph alive

    def __init__(self, call):
        self.held, self.most = weakref.WeakSet(), 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda entry: entry.tensor):
            self.out = call()
        self.last = self.total()

    def pack(self, tensor):
        entry = self.Entry(tensor)
        self.held.add(entry)
        self.most = max(self.most, self.total())
        return entry

    def total(self):
        storages = {entry.tensor.untyped_storage() for entry in self.held}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_memory_does_not_grow_with_the_steps():
    z, ledgers, steps = rand(2, 7, 6).requires_grad_(), [], []
    for pull in (100.0, 1e-3):
        layer = build(pull)
        steps.append(layer(z, return_info=True)[1].steps.min().item())
        ledgers.append(Ledger(lambda layer=layer: layer(z)))
    assert steps[0] >= 2
    assert steps[1] > 2 * steps[0]
    # Input, output, projection and two numbers are kept; while solving, the graphs of two steps.
    assert [ledger.last for ledger in ledgers] == 2 * [8 * (2 * z.numel() + layer.project.weight.numel() + 2)]
    assert ledgers[0].most == ledgers[1].most
