"""Memory for the tokens of a cache that grows."""

import torch
from torch import Tensor

from sinkformers.core.modes import intercepted


class TokenMemory:
    """Memory with room behind the tokens (…, m, d), so that adding one does not copy the others."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.used = 0

    def append(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the old tokens and the new ones.

        The new ones are written behind the old ones if these are all that was written so far: another cache may share
        the memory and have continued it differently. Where autograd or a transform may hold the old tokens, all are
        copied.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or intercepted((old, new)):
            return torch.cat([old, new], -2)
        (*lead, m, d), total = old.shape, old.shape[-2] + new.shape[-2]
        if self.whole is None or not self._ends_with(old, total):
            self.whole = old.new_empty(*lead, total + total // 8 + 64, d)
            self.whole[..., :m, :] = old
        self.whole[..., m:total, :] = new
        self.used = total
        return self.whole[..., :total, :]

    def _ends_with(self, tokens: Tensor, total: int) -> bool:
        assert self.whole is not None
        continues = self.used == tokens.shape[-2] and self.whole.data_ptr() == tokens.data_ptr()
        fits = total <= self.whole.shape[-2] and self.whole.shape[:-2] == tokens.shape[:-2]
        writable = torch.is_inference_mode_enabled() or not self.whole.is_inference()
        return continues and fits and writable
