"""What is computed: the shape of a case, its fixed inputs, and large inputs whose answer a small problem knows."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST_DIRECT = 1024
VALID, BAND = 0.7, 32  # the share of valid entries of a random window, and how far a band reaches
BIAS, TRAINED_BIAS, RANDOM_WINDOW, BAND_WINDOW = "bias", "bias with gradient", "random window", "band window"
TRIANGLE = "triangle"
MASKS = (BIAS, TRAINED_BIAS, RANDOM_WINDOW, BAND_WINDOW, TRIANGLE)


@dataclass(frozen=True)
class Case:
    """Attention on (batch, heads, n, d) in `dtype`, which is the name of a torch dtype.

    `padding` is the share of masked tokens, None for no mask of tokens. `mask` names a mask of the scores: a float bias
    (1, heads, n, n), without or with a gradient of its own, a boolean window (batch, 1, n, n), or the triangle of
    causal attention, which calls get as `is_causal`. With a tolerance `tol` the case is attention at the limit,
    whatever `n_iters` is.
    """

    batch: int
    heads: int
    n: int
    d: int = 64
    n_iters: int = 3
    backward: bool = True
    std: float = 1.0
    padding: float | None = None
    mask: str = ""
    dtype: str = "float32"
    tol: float | None = None

    @property
    def iterations(self) -> int | float:
        """The argument `n_iters` of a call: infinite at the limit."""
        return self.n_iters if self.tol is None else math.inf

    @property
    def is_causal(self) -> bool:
        return self.mask == TRIANGLE

    @property
    def label(self) -> str:
        return f"{self.batch * self.heads} × {self.n}"

    @property
    def entries(self) -> int:
        """The number of scores."""
        return self.batch * self.heads * self.n**2


@dataclass(frozen=True)
class Masks:
    """What a call is given besides its tokens.

    `tokens` (batch, n) is True at valid tokens; `scores` is the `attn_mask` of SDPA.
    """

    tokens: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """Tokens (batch, heads, n, d), the incoming gradient, and the masks."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor | None
    masks: Masks = Masks()

    def at(self, index: Tensor) -> "Inputs":
        """Return the inputs whose token i is the token `index[i]` of these; a mask of the scores cannot be repeated."""
        if self.masks.scores is not None:
            raise ValueError(f"Inputs.at: a mask of the scores needs n ≤ {LARGEST_DIRECT}; got n = {len(index)}.")
        query, key, value = (x[..., index, :].contiguous() for x in (self.query, self.key, self.value))
        grad = None if self.grad is None else self.grad[..., index, :].contiguous()
        tokens = None if self.masks.tokens is None else self.masks.tokens[:, index].contiguous()
        return Inputs(replace(self.case, n=len(index)), query, key, value, grad, Masks(tokens))


def draw(case: Case, seed: int = 0) -> Inputs:
    """Draw standard normal tokens, queries scaled so that the scores have the case's standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.heads, case.n, case.d)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    query, key, value, grad = (x.to(getattr(torch, case.dtype)) for x in (query * case.std, key, value, grad))
    masks = Masks(_token_mask(case), _score_mask(case, generator))
    return Inputs(case, query, key, value, grad if case.backward else None, masks)


def with_known_answer(case: Case) -> tuple[Inputs, Inputs, Tensor]:
    """Return inputs of the case, inputs small enough for the reference, and the index from these to those.

    Tokens that occur c times each share what one of them would get: every output and every gradient of the large
    problem is that of the small one, exactly, at any number of iterations. Causal attention depends on the order of the
    tokens, and is compared as it is.
    """
    most = case.n if case.is_causal else min(case.n, LARGEST_DIRECT)
    small = next(size for size in range(most, 0, -1) if case.n % size == 0)
    base = draw(replace(case, n=small))
    if small == case.n:
        return base, base, torch.arange(small)
    shuffle = torch.randperm(case.n, generator=torch.Generator().manual_seed(1))
    index = torch.arange(small).repeat(case.n // small)[shuffle]
    return base.at(index), base, index


def _token_mask(case: Case) -> Tensor | None:
    if case.padding is None:
        return None
    valid = torch.arange(case.n) < round(case.n * (1 - case.padding))
    return valid.expand(case.batch, -1).contiguous()


def _score_mask(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.mask in (BIAS, TRAINED_BIAS):
        return torch.randn(1, case.heads, case.n, case.n, generator=generator).to(getattr(torch, case.dtype))
    if case.mask == RANDOM_WINDOW:
        return torch.rand(case.batch, 1, case.n, case.n, generator=generator) < VALID
    if case.mask == BAND_WINDOW:
        position = torch.arange(case.n)
        band = (position[:, None] - position).abs() <= BAND
        return band.expand(case.batch, 1, -1, -1).contiguous()
    if case.mask and not case.is_causal:
        raise ValueError(f"Case: mask must be one of {MASKS}; got {case.mask!r}.")
    return None
