"""Checks that all ranks are told where their calls do not fit together, instead of waiting for each other."""

import math

import pytest
import torch
import torch.distributed as dist

from sinkformers import sequence_parallel, sinkhorn_attention

HEADS, D = 2, 5


def tokens(n=4, heads=HEADS, d=D, dtype=torch.float32):
    return torch.randn(1, heads, n, d, dtype=dtype)


def attend(query, key=None, value=None, **options):
    key = query if key is None else key
    return sinkhorn_attention(query, key, key if value is None else value, group=dist.group.WORLD, **options)


def settings_that_differ(rank, _size):
    last = {"n_iters": 5, "tau": 0.5, "scale": 2.0, "dropout_p": 0.25, "cost": "l2"} if rank == 2 else {}
    message = "all ranks of a group must make the same call; got dropout_p = 0.0 on rank 0, 0.0 on rank 1, 0.25 on rank"
    with pytest.raises(ValueError, match=message) as raised:
        attend(tokens(), **last)
    assert all(f"{name} = " in str(raised.value) for name in ("n_iters", "tau", "scale", "cost"))
    attend(tokens())  # the group is as good as new


def shapes_and_dtypes_that_differ(rank, _size):
    with pytest.raises(ValueError, match=r"shape of query = \(1, 3, 'tokens', 5\) on rank 0, \(1, 2, 'tokens', 5\)"):
        attend(tokens(heads=3 if rank == 0 else 2))
    with pytest.raises(ValueError, match=r"dtype = torch.float32 on rank 0, torch.float64 on rank 1"):
        attend(tokens(dtype=torch.float64 if rank == 1 else torch.float32))
    with pytest.raises(ValueError, match=r"kv = gather on rank 0, ring on rank 1"):
        attend(tokens(), kv="ring" if rank == 1 else "gather")
    with pytest.raises(ValueError, match=r"gradients = False on rank 0, True on rank 1"):
        attend(tokens().requires_grad_(rank == 1))
    with pytest.raises(ValueError, match=r"tau = \[0.5\] on rank 0, \[0.25\] on rank 1"):
        attend(tokens(), tau=torch.tensor([0.25 if rank == 1 else 0.5]))


def an_error_on_one_rank(rank, _size):
    """That rank raises its own error, and the others say which rank did."""
    wrong = torch.ones(1, 7, dtype=torch.bool)
    kind, message = (ValueError, "query_mask must broadcast") if rank == 1 else (RuntimeError, "rank 1 of 4 raised Val")
    with pytest.raises(kind, match=message):
        attend(tokens(), query_mask=wrong if rank == 1 else None)


def masks_with_local_columns(rank, _size):
    with pytest.raises(ValueError, match=r"this rank's queries as rows and the keys of all ranks as columns"):
        attend(tokens(3 + rank), attn_mask=torch.ones(3 + rank, 3 + rank, dtype=torch.bool))


def masks_that_order(rank, size):
    n = 3
    mask = torch.ones(size * n, size * n, dtype=torch.bool).tril()[rank * n : (rank + 1) * n]
    with pytest.raises(NotImplementedError, match="attn_mask must not order the tokens"):
        attend(tokens(n), attn_mask=mask)
    assert attend(tokens(n), attn_mask=mask, n_iters=1).isfinite().all()
    assert attend(tokens(n), attn_mask=mask | (torch.arange(size * n) < 5)).isfinite().all()  # a prefix is not seen
    window = (torch.arange(size * n) - torch.arange(rank * n, (rank + 1) * n)[:, None]).abs() < 3
    assert attend(tokens(n), attn_mask=window).isfinite().all()


def what_cannot_be_sharded(_rank, size):
    refused = {
        "backend must be": {"backend": "native"},
        'causal must be "streaming"': {"causal": "prefix", "is_causal": True},
        'takes kv="gather" only': {"is_causal": True, "kv": "ring"},
        "that of the limit": {"is_causal": True, "gradient": "implicit"},
    }
    for message, options in refused.items():
        with pytest.raises((ValueError, NotImplementedError), match=message):
            attend(tokens(), **options)
    with pytest.raises(ValueError, match="as many queries as keys on every rank"):
        attend(tokens(4), tokens(5), is_causal=True)
    with pytest.raises(ValueError, match="kv must be one of 'gather', 'ring'; got 'all'"):
        attend(tokens(), kv="all")
    with pytest.raises(TypeError, match="group must be a process group or a DeviceMesh; got str"):
        sinkhorn_attention(tokens(), tokens(), tokens(), group="world")
    with pytest.raises(ValueError, match="got kv='ring' and no group"):
        sinkhorn_attention(tokens(), tokens(), tokens(), kv="ring")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tokens"))
    with pytest.raises(ValueError, match=r'with 2 dimensions. Pass one of them: mesh\["tokens"\]'):
        sinkhorn_attention(tokens(), tokens(), tokens(), group=mesh)
    assert attend(tokens()).shape == sinkhorn_attention(tokens(), tokens(), tokens(), group=mesh["tokens"]).shape


def tokens_without_heads(rank, size):
    """(n, d) and (batch, n, d), also at the limit, where matrices are numbered."""
    for lead in ((), (3,)):
        whole = torch.randn(*lead, 2 * size, D, dtype=torch.float64)
        part = whole.chunk(size, -2)[rank]
        for options in ({"n_iters": 4}, {"n_iters": math.inf, "tol": 1e-9}, {"n_iters": 3, "cost": "l2", "tau": 0.5}):
            expected = sinkhorn_attention(whole, whole, whole, **options)
            found = attend(part, **options)
            assert (found - expected.chunk(size, -2)[rank]).abs().max() < 1e-8


def tau_of_tokens_without_heads(rank, size):
    """It is one number, whose gradient is this rank's contribution, also where rows are normalised in order."""
    whole, d_out = torch.randn(2, 2 * size, D, dtype=torch.float64)
    for options in ({"n_iters": 3}, {"n_iters": 3, "is_causal": True}, {"n_iters": 5, "causal": "streaming"}):
        tau, own = (torch.tensor(0.4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        sinkhorn_attention(whole, whole, whole, tau=tau, **options).backward(d_out)
        part = whole.chunk(size)[rank]
        attend(part, tau=own, **options).backward(d_out.chunk(size)[rank])
        assert own.grad is not None
        assert tau.grad is not None
        total = own.grad.clone()
        dist.all_reduce(total)
        assert (total - tau.grad).abs() < 1e-9


def masks_that_change_before_the_backward_pass(_rank, size):
    """Autograd notices, as it does on one device."""
    given = {"attn_mask": torch.ones(4, 4 * size, dtype=torch.bool), "key_mask": torch.ones(1, 4, dtype=torch.bool)}
    for causal, name in ((None, "attn_mask"), ("streaming", "attn_mask"), ("streaming", "key_mask")):
        mask = given[name].clone()
        out = attend(tokens().requires_grad_(), causal=causal, **{name: mask})
        mask[0, 1] = False
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def not_a_member(rank, _size):
    group = dist.new_group([0, 1])
    if rank > 1:
        with (
            pytest.raises(ValueError, match="this process is no member of the group"),
            sequence_parallel(group),
        ):
            pass


def nothing_at_all(rank, _size):
    """No keys on any rank, or no queries: an empty sum is 0."""
    query = tokens(3).requires_grad_()
    out = attend(query, tokens(0), tokens(0))
    out.sum().backward()
    assert out.eq(0).all()
    assert query.grad is not None
    assert query.grad.eq(0).all()
    assert attend(tokens(0), tokens(rank)).shape == (1, HEADS, 0, D)


def padding_may_hold_anything(rank, _size):
    query, real = tokens(4), torch.arange(4)[None] < (4, 2, 0, 3)[rank]
    expected = attend(query, query_mask=real, key_mask=real)
    spoiled = query.masked_fill(~real[:, None, :, None], torch.nan).requires_grad_()
    out = attend(spoiled, query_mask=real, key_mask=real)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert spoiled.grad is not None
    assert spoiled.grad.isfinite().all()
    assert spoiled.grad.masked_select(~real[:, None, :, None]).eq(0).all()


def masks_on_some_ranks(rank, _size):
    """A rank without a mask has valid tokens only, as where a model leaves out a mask that hides nothing."""
    query, real = tokens(4), torch.arange(4)[None] < (4, 2, 4, 3)[rank]
    whole = attend(query, query_mask=real, key_mask=real)
    own = {"query_mask": real, "key_mask": real} if rank % 2 else {}
    assert torch.equal(attend(query, **own), whole)
    bias = torch.randn(1, HEADS, 1, 4) if rank == 1 else torch.zeros(1, HEADS, 1, 4)
    assert torch.equal(attend(query, attn_mask=bias if rank == 1 else None), attend(query, attn_mask=bias))


CHECKS = {
    check.__name__: check
    for check in (
        settings_that_differ,
        shapes_and_dtypes_that_differ,
        an_error_on_one_rank,
        masks_with_local_columns,
        masks_that_order,
        what_cannot_be_sharded,
        tokens_without_heads,
        tau_of_tokens_without_heads,
        masks_that_change_before_the_backward_pass,
        not_a_member,
        nothing_at_all,
        padding_may_hold_anything,
        masks_on_some_ranks,
    )
}
