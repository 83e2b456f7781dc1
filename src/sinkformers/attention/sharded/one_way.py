"""Refuse masks that order the tokens, where each rank has some rows of them."""

import torch

from sinkformers.attention.arguments import CALLER
from sinkformers.attention.sharded.call import ShardedCall, valid_entries


def refuse_one_sided(call: ShardedCall, device: torch.device) -> None:
    """Raise on all ranks where a mask of entries leaves, of the tokens before and after each query, only one side.

    So does a causal mask. Masks that order some of the tokens only are found on one device (`attention/one_way.py`),
    and not here: a rank does not see the rows of the others.
    """
    if not call.any_entry_masks or call.triangle or call.queries_by_rank != call.keys_by_rank:
        return
    before = after = torch.zeros((), dtype=torch.bool, device=device)
    for rows in call.blocks(call.m):
        entries = valid_entries(call, rows, slice(0, call.m), device)
        if entries is None or (1 in entries.shape[-2:] and call.m > 1):  # hides the same tokens from all queries
            return _agree(call, before, before)
        entries = entries.flatten(0, -3).any(0) if entries.dim() > 2 else entries
        first = call.first_row + rows.start
        before, after = before | entries.tril(first - 1).any(), after | entries.triu(first + 1).any()
    return _agree(call, before, after)


def _agree(call: ShardedCall, before: torch.Tensor, after: torch.Tensor) -> None:
    found = torch.stack([before, after]).to(torch.uint8)
    has_before, has_after = call.ranks.maximum_(found, "the sides that masks leave").tolist()
    if has_before != has_after:
        raise NotImplementedError(
            f"{CALLER}: attn_mask must not order the tokens where more than one normalisation is made, since column "
            "sums run over all queries and outputs would depend on tokens that it hides; got one under which tokens "
            'look to one side of the diagonal only, as in a causal mask. Pass causal="streaming", which normalises '
            "rows in order, or allow_one_way_mask=True if that is meant."
        )
