"""A call of the Triton kernels in Triton's interpreter, and what its output and gradients are compared with.

In float32 a kernel may err at most four times as much as the definition does when torch evaluates it in float32; in
half precision at most twice as much as eager SoftMax attention in that dtype. Where the yardstick happens to be nearly
exact, four roundings of the largest number in question are granted, or of 1, the size of the inputs.
"""

import copy
import math
from functools import partial

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from sinkformers import sinkhorn
from sinkformers.attention.call import AttentionCall
from sinkformers.kernels.triton import attention_backward, attention_forward
from sinkformers.kernels.triton.sizes import Tile, candidates, padded_width
from tests import oracle

SEED = 0x1234_5678_9ABC_DEF0


def bfloat16_as_hardware_has_it(monkeypatch):
    """The interpreter keeps bfloat16 as bits: it multiplies those, and cuts float32 off where hardware rounds."""
    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle):
        return cast(builder, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def rounded(self, handle, to):
        if (handle.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, handle, to)
        bits = torch.tensor(handle.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
    monkeypatch.setattr(builder, "cast_impl", rounded)


class Case:
    """Inputs of one call. Sizes are distinct primes, beyond one tile."""

    exact_weights = staticmethod(oracle.batch_weights)
    plain_weights = staticmethod(partial(sinkhorn, backend="reference"))
    form = "passes"  # over tiles; "pairs" of steps in a pass; "head": a head in one program; "blocks" of its rows

    def __init__(self, *lead, n=37, m=43, d=17, e=23, std=1.0, dtype=torch.float32, **options):
        self.lead, self.n, self.m = lead, n, m
        self.q, self.k, self.v, self.d_out = (
            torch.randn(*lead, rows, width).to(dtype) for rows, width in ((n, d), (m, d), (m, e), (n, e))
        )
        self.q *= std
        if self.form == "blocks":  # which are not the tiles of forward: scores that are exact in any order of addition
            self.q, self.k = ((8 * x).round() / 8 for x in (self.q, self.k))
        self.bias = self.entries = self.queries = self.keys = self.tau = None
        self.n_iters, self.l2, self.p, self.scale = 3, False, 0.0, 1 / math.sqrt(d)
        self.__dict__.update(options)
        self.seed = torch.tensor(SEED) if self.p else None

    @property
    def call(self):
        masks = (self.bias, self.entries, self.queries, self.keys, self.tau, self.seed, None)
        return AttentionCall(self.q, self.k, self.v, *masks, self.n_iters, self.scale, self.l2, self.p, False)

    @property
    def masked_bias(self):
        return 0.0 if self.bias is None else torch.finfo(self.bias.dtype).min / 2

    def attend(self):
        """The output, and the gradients of query, key, value, bias and tau."""
        plan = self.plan()
        out, f, excess = attention_forward(self.call, self.masked_bias, plan)
        saved = {"out": out, "f": f, "excess": excess, "needs_bias": self.bias is not None, "plan": plan}
        return out, *attention_backward(self.call, self.masked_bias, d_out=self.d_out, **saved)

    def plan(self):
        """The plan of this form."""
        passes = candidates(self.call)[-1]
        if self.form == "passes":
            return passes
        if self.form == "pairs":
            return passes._replace(pair=Tile(32, padded_width(self.m), 4))
        tile = Tile(padded_width(self.n), padded_width(self.m), 4)
        if self.form == "blocks":
            return passes._replace(head=tile, blocks=tile._replace(rows=32))
        return passes._replace(head=tile, head_gradient=tile)

    def run(self):
        """Output and gradients, None where there is none."""
        *results, d_bias, d_tau = self.attend()
        if d_bias is not None:
            d_bias = d_bias.sum_to_size(self.bias.shape).to(self.bias.dtype)
        return *results, d_bias, d_tau

    def participants(self):
        """One boolean matrix (*lead, n, m)."""
        alive = torch.ones(*self.lead, self.n, self.m, dtype=torch.bool)
        if self.bias is not None:
            alive = alive & (self.bias > torch.finfo(self.bias.dtype).min / 2)
        if self.entries is not None:
            alive = alive & self.entries
        if self.queries is not None:
            alive = alive & self.queries[..., None]
        if self.keys is not None:
            alive = alive & self.keys[..., None, :]
        return alive

    def evaluate(self, weights_of, dtype):
        """The same in torch, differentiated by autograd; masked tokens are zero."""
        alive = self.participants()
        rows, cols = alive.any(-1)[..., None], alive.any(-2)[..., None]
        leaves = [torch.where(a, x, 0).to(dtype) for x, a in ((self.q, rows), (self.k, cols), (self.v, cols))]
        leaves += [
            None if self.bias is None else self.bias.to(dtype),
            self.tau if self.tau is None else self.tau.to(dtype),
        ]
        for leaf in leaves:
            if leaf is not None:
                leaf.requires_grad_()
        q, k, v, bias, tau = leaves
        scores = self.scale * q @ k.mT
        if self.l2:
            scores = scores - 0.5 * self.scale * k.square().sum(-1)[..., None, :]
        if bias is not None:
            scores = scores + torch.where(alive, bias, 0)
        weights = weights_of(scores, n_iters=self.n_iters, mask=alive, tau=1.0 if tau is None else tau)
        if self.p:
            weights = weights * dropped(weights.shape, SEED, self.p).to(dtype)
        out = weights @ v
        d_out = torch.where(rows, self.d_out, 0).to(dtype)
        wanted = [leaf for leaf in leaves if leaf is not None]
        grads = iter(torch.autograd.grad(out, wanted, d_out, allow_unused=True, materialize_grads=True))
        return out, *(None if leaf is None else next(grads) for leaf in leaves)

    def check(self, reach=4, sizes=None):
        got = self.run()
        exact = self.evaluate(self.exact_weights, torch.float64)
        yardstick = self.evaluate(self.plain_weights, torch.float32)
        compare(got, exact, yardstick, reach, sizes)
        return got

    def check_half(self):
        """Half precision errs at most twice as much as eager SoftMax under the same mask."""
        got, exact = self.run(), self.evaluate(self.exact_weights, torch.float64)
        softmax = copy.copy(self)
        softmax.n_iters, softmax.tau, softmax.l2 = 1, None, False
        true = softmax.evaluate(self.exact_weights, torch.float64)
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        scores = (self.scale * (q @ k.mT)).masked_fill(~self.participants(), -torch.inf)
        eager = torch.softmax(scores, -1) @ v
        eager = (eager, *torch.autograd.grad(eager, (q, k, v), self.d_out))
        for name, mine, mine_exact, theirs, theirs_exact in zip("oqkv", got, exact, eager, true, strict=False):
            assert mine.dtype == (torch.float32 if name == "o" else q.dtype)  # backward needs the output unrounded
            error = (mine.to(q.dtype).double() - mine_exact).abs().max()
            allowed = (theirs.double() - theirs_exact).abs().max()
            assert error <= 2 * allowed, (name, error, allowed)


def compare(got, exact, yardstick, reach, sizes=None):
    """`sizes` by name: of what is added up, where it cancels to something smaller."""
    for name, mine, true, theirs in zip(("out", "q", "k", "v", "bias", "tau"), got, exact, yardstick, strict=False):
        assert (mine is None) == (true is None), name
        if mine is None:
            continue
        assert mine.shape == true.shape, name
        error, allowed = ((x.double() - true).abs().max().item() for x in (mine, theirs))
        floor = torch.finfo(mine.dtype).eps * max(1.0, true.abs().max().item(), (sizes or {}).get(name, 0))
        assert error <= reach * max(allowed, floor), (name, error, allowed, floor)


def dropped(shape, seed, p):
    """The multipliers of dropout, entry by entry in Python's integers."""
    word = 2**32 - 1

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & word
        x ^= x >> 15
        x = x * 0x846CA68B & word
        return x ^ x >> 16

    seed %= 2**64
    *lead, n, m = shape
    start = mix(mix(seed & word) ^ seed >> 32)
    heads = [mix(start + head * 0x9E3779B9 & word) for head in range(math.prod(lead))]
    rows = [mix(head + i * 0x85EBCA6B & word) for head in heads for i in range(n)]
    bits = [mix(row + j * 0xC2B2AE35 & word) for row in rows for j in range(m)]
    return (torch.tensor(bits).view(shape) >= math.floor(p * 2**32)).double() / (1 - p)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and "empty" in func.__name__:
            self.size = max(self.size, made.numel())
        return made
