"""Bad input is refused with the argument, the expectation, the value and the remedy."""

import pytest
import torch

from sinkformers import marginal_error, sinkhorn, sinkhorn_attention, sinkhorn_limit

SCORES = torch.zeros(2, 5, 7)
Q, K, V = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 6)

SINKHORN = [
    ({"n_iters": 0}, ValueError, r"n_iters must be a whole number ≥ 1 .*; got 0\. The paper uses 3"),
    ({"n_iters": 10**20}, ValueError, r"n_iters must be below 2\*\*63 .*; got a number of 67 bits\. The paper uses 3"),
    ({"n_iters": -3}, ValueError, "n_iters must be .* got -3"),
    ({"n_iters": 2.5}, ValueError, "n_iters must be .* got 2.5"),
    ({"n_iters": True}, ValueError, "n_iters must be .* got True"),
    ({"n_iters": "3"}, TypeError, "n_iters must be .* got '3'"),
    ({"tau": 1.5}, ValueError, r"tau must lie in \[0, 1\] .*; got 1.5"),
    ({"tau": -0.1}, ValueError, r"tau must lie in \[0, 1\] .*; got -0.1"),
    ({"tau": float("nan")}, ValueError, r"tau must lie in \[0, 1\] .*; got nan"),
    ({"tau": "1"}, TypeError, "tau must be a number or a tensor; got '1'"),
    ({"tau": True}, TypeError, "tau must be a number or a tensor; got True"),
    ({"tau": torch.tensor([0.5, 1.5])}, ValueError, r"tau must lie in \[0, 1\] .*; got values from 0.5 to 1.5"),
    ({"tau": torch.tensor([0.5, torch.nan])}, ValueError, r"tau must lie in \[0, 1\]"),
    ({"tau": torch.tensor([1, 0])}, TypeError, r"tau must be float16, .*; got torch.int64.*tau.float\(\)"),
    ({"tau": torch.zeros(3)}, ValueError, r"tau must broadcast to the leading axes = \(2,\); got shape \(3,\)"),
    (
        {"mask": torch.ones(5, 7, dtype=torch.int64)},
        TypeError,
        r"mask must be a boolean .* got torch.int64.*mask.bool\(\)",
    ),
    ({"mask": torch.ones(5, 7)}, TypeError, "mask must be a boolean"),
    ({"mask": [[True]]}, TypeError, "mask must be a boolean tensor.* got list"),
    ({"mask": torch.ones(7, 5) > 0}, ValueError, r"mask must broadcast to scores = \(2, 5, 7\); got shape \(7, 5\)"),
    ({"mask": torch.ones(3, 2, 5, 7) > 0}, ValueError, r"mask must broadcast to .* got shape \(3, 2, 5, 7\)"),
    (
        {"row_mass": torch.full((5,), 0.3)},
        ValueError,
        r"row_mass must sum to 1 .* are 1.5, off by 0.5\. Divide it by row_mass.sum",
    ),
    (
        {"row_mass": torch.tensor([1.5, -0.5, 0, 0, 0])},
        ValueError,
        "row_mass must be non-negative; got values from -0.5",
    ),
    ({"col_mass": torch.full((5,), 0.2)}, ValueError, r"col_mass must broadcast to .* = \(2, 7\); got shape \(5,\)"),
    ({"col_mass": torch.ones(1)}, ValueError, "col_mass must have 7 entries along its last axis; got 1"),
    ({"col_mass": torch.tensor([1, 0, 0, 0, 0, 0, 0])}, TypeError, "col_mass must be float.*got torch.int64"),
    ({"row_mass": torch.full((5,), 0.205).bfloat16()}, ValueError, "row_mass must sum to 1"),
    ({"row_mass": torch.full((5,), torch.nan)}, ValueError, "row_mass must be non-negative"),
    (
        {"row_mass": torch.full((5,), 0.2, requires_grad=True)},
        ValueError,
        r"row_mass gets no gradient.*row_mass.detach\(\); to learn it, write the steps with masses \(docs/core.md\)",
    ),
    (
        {"backend": "cuda"},
        ValueError,
        "backend must be one of 'auto', 'native', 'triton', 'torch', 'reference'; got 'cuda'",
    ),
    (
        {"backend": "triton"},
        NotImplementedError,
        '"triton" cannot serve this call: .*; pip install|are for GPUs',
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), SINKHORN)
def test_sinkhorn(options, kind, message):
    with pytest.raises(kind, match=f"sinkhorn: .*({message})"):
        sinkhorn(SCORES, **options)


@pytest.mark.parametrize(
    ("scores", "kind", "message"),
    [
        (torch.zeros(5), ValueError, r"scores must have at least 2 axes.*got shape \(5,\)"),
        (
            torch.zeros(5, 7, dtype=torch.int64),
            TypeError,
            r"scores must be float16.* got torch.int64.*scores.float\(\)",
        ),
        (torch.zeros(5, 7, dtype=torch.complex64), TypeError, "scores must be .* got torch.complex64"),
        ([[0.0]], TypeError, "scores must be a torch.Tensor; got list"),
    ],
)
@pytest.mark.parametrize("function", [sinkhorn, sinkhorn_limit])
def test_scores(function, scores, kind, message):
    with pytest.raises(kind, match=f"{function.__name__}: {message}"):
        function(scores)


def test_limit():
    for value in (0, 1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"sinkhorn_limit: tol must lie between 0 and 1, .*; got {value}\."):
            sinkhorn_limit(SCORES, tol=value)
    advice = r"must be a whole number ≥ 1 \(the most products with the kernel\); got .*\. Leave it out for 1000\.$"
    for value, kind in ((0, ValueError), (2.5, ValueError), ("9", TypeError), (torch.tensor(9), TypeError)):
        with pytest.raises(kind, match=f"sinkhorn_limit: max_iters {advice}"):
            sinkhorn_limit(SCORES, max_iters=value)


def test_marginal_error():
    with pytest.raises(ValueError, match="marginal_error: weights must have at least 2 axes"):
        marginal_error(torch.zeros(3))
    with pytest.raises(TypeError, match="marginal_error: mask must be a boolean"):
        marginal_error(SCORES, torch.ones(5, 7))


ATTENTION = [
    ({"query": Q[0, 0, 0]}, ValueError, r"query must have at least 2 axes.* got shape \(4,\)"),
    ({"query": Q.double()}, TypeError, "must have one dtype; got torch.float64, torch.float32 and torch.float32"),
    ({"query": Q.long()}, TypeError, r"query must be float16.* got torch.int64"),
    ({"query": None}, TypeError, "query must be a torch.Tensor; got NoneType"),
    ({"query": Q[..., :3]}, ValueError, r"must have the same d; got \(2, 3, 5, 3\) and \(2, 3, 7, 4\)"),
    ({"value": V[..., :6, :]}, ValueError, r"must have the same m; got \(2, 3, 7, 4\) and \(2, 3, 6, 6\)"),
    ({"query": Q.repeat(1, 2, 1, 1)}, ValueError, "leading axes .* must broadcast.* enable_gqa=True"),
    ({"query": Q.repeat(1, 2, 1, 1)[:, :5], "enable_gqa": True}, ValueError, "multiple of those of key and value"),
    ({"query": Q[0, 0], "enable_gqa": True}, ValueError, "enable_gqa=True needs a head axis"),
    ({"query": Q[:1], "enable_gqa": True}, ValueError, "axes before the heads must be equal"),
    (
        {"attn_mask": torch.ones(5, 7, dtype=torch.int64)},
        TypeError,
        r"attn_mask must be a boolean .* attn_mask.bool\(\)",
    ),
    ({"attn_mask": torch.ones(7, 5)}, ValueError, r"attn_mask must broadcast to \(…, n, m\) = \(2, 3, 5, 7\)"),
    ({"query_mask": torch.ones(2, 7) > 0}, ValueError, r"query_mask must broadcast to the tokens = \(2, 3, 5\)"),
    ({"key_mask": torch.ones(3, 7) > 0}, ValueError, "key_mask must broadcast to the tokens"),
    ({"key_mask": torch.ones(2, 7)}, TypeError, "key_mask must be a boolean"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be a number from 0 to 1; got 1.5"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a number from 0 to 1; got '0.1'"),
    ({"cost": "cosine"}, ValueError, "cost must be one of 'dot', 'l2'; got 'cosine'"),
    ({"gradient": "exact"}, ValueError, "gradient must be one of 'unrolled', 'implicit'; got 'exact'"),
    ({"gradient": "implicit", "n_iters": 4}, ValueError, "needs an odd n_iters ≥ 3.*got 4"),
    ({"gradient": "implicit", "n_iters": 1}, ValueError, "needs an odd n_iters ≥ 3.*got 1"),
    ({"gradient": "implicit", "tau": 0}, ValueError, r'gradient="implicit" needs tau in \(0, 1\].*got 0'),
    (
        {"gradient": "implicit", "tau": torch.tensor([0.0, 1, 1])},
        ValueError,
        r"needs tau in \(0, 1\].*values from 0 to 1",
    ),
    ({"gradient": "implicit", "backend": "reference"}, NotImplementedError, "the unrolled gradient only"),
    ({"tau": torch.ones(2)}, ValueError, r"tau must broadcast to the leading axes = \(2, 3\)"),
    ({"is_causal": True}, ValueError, 'needs as many queries as new keys; got 5 and 7.* causal="streaming"'),
    ({"is_causal": True, "n_iters": 1, "attn_mask": torch.ones(5, 7) > 0}, ValueError, "attn_mask or is_causal"),
    ({"backend": "fast"}, ValueError, "backend must be one of"),
    ({"scale": "1"}, TypeError, "scale must be a number; got '1'"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number; got nan"),
]


@pytest.mark.parametrize(("options", "kind", "message"), ATTENTION)
def test_attention(options, kind, message):
    with pytest.raises(kind, match=f"sinkhorn_attention: .*{message}"):
        sinkhorn_attention(**{"query": Q, "key": K, "value": V, **options})


def test_values_are_checked_inside_a_compiled_graph():
    torch._dynamo.reset()
    compiled = torch.compile(lambda c, t: sinkhorn(c, tau=t), fullgraph=True, backend="aot_eager")
    compiled(SCORES, torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"tau must lie in \[0, 1\]"):
        compiled(SCORES, torch.tensor(1.5))


def test_numbers_of_other_libraries_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert sinkhorn(SCORES, n_iters=numpy.int64(3), tau=numpy.float32(0.5)).shape == SCORES.shape
