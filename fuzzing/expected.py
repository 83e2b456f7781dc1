"""What a call must give: output and every gradient in float64, each with its derived tolerance."""

import torch
from torch import Tensor

from fuzzing.arguments import BATCH
from fuzzing.case import Case
from fuzzing.expected_attention import attention
from fuzzing.expected_operator import marginals, operator
from fuzzing.leaves import Expected, Tensors
from fuzzing.program import ATTENTION


def expect(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    """By name, for the tensors of a program (`results` there)."""
    if not case.transform.startswith("vmap"):
        if case.transform == "jacrev:sum" and case.lead:
            tensors = {**tensors, "w_out": tensors["w_out"][:1].expand(tensors["w_out"].shape)}
        return _one(case, tensors, dropout)
    dims = {name: at for name, at in case.vmap_dims.items() if name in tensors}
    samples = [
        _one(case, {name: x.select(dims[name], i) if name in dims else x for name, x in tensors.items()}, None)
        for i in range(BATCH)
    ]
    joined = {}
    for name in samples[0]:
        values, tolerances = zip(*(sample[name] for sample in samples), strict=True)
        source = name.removeprefix("d_") if name.startswith("d_") else f"w_{name}"
        if source in dims:
            joined[name] = Expected(torch.stack(values, dims[source]), torch.stack(tolerances, dims[source]))
        else:  # the samples' gradients are rounded, then added
            eps = torch.finfo(tensors[source].dtype).eps
            terms = sum(value.abs() for value in values)
            joined[name] = Expected(sum(values), sum(tolerances) + 2 * eps * terms)  # pyright: ignore
    return joined


def _one(case: Case, tensors: Tensors, dropout: Tensor | None) -> dict[str, Expected]:
    if case.function in ATTENTION:
        return attention(case, tensors, dropout)
    if case.function == "marginal_error":
        return marginals(case, tensors)
    return operator(case, tensors)
