"""DTensors that are sharded along their tokens: attention takes their parts, and returns a DTensor."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from sinkformers.attention.arguments import CALLER
from sinkformers.attention.plan import Plan


def token_axis_group(tokens: dict[str, Any], others: dict[str, Any]) -> Any:
    """The process group along which query, key and value are sharded by their tokens; raises for other placements."""
    if not all(isinstance(x, DTensor) for x in tokens.values()):
        kinds = ", ".join(type(x).__name__ for x in tokens.values())
        raise TypeError(f"{CALLER}: query, key and value must all be DTensors, or none of them; got {kinds}.")
    for name, x in others.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{CALLER}: beside DTensors, {name} must be a plain tensor of this rank's rows or tokens; got a "
                f"DTensor. Pass {name}.to_local()."
            )
    mesh = tokens["query"].device_mesh
    for name, x in tokens.items():
        _check(name, x, tokens["query"], mesh)
    (dim,) = _sharded_by_tokens(tokens["query"])
    return mesh.get_group(dim)


def _check(name: str, x: DTensor, query: DTensor, mesh: Any) -> None:
    by_tokens = _sharded_by_tokens(x)
    others = [place for dim, place in enumerate(x.placements) if dim not in by_tokens]
    whole = all(
        place.is_replicate() or (isinstance(place, Shard) and place.dim % x.dim() < x.dim() - 2) for place in others
    )
    if len(by_tokens) == 1 and whole and x.placements == query.placements and x.device_mesh == mesh:
        return
    place: Placement = Shard(x.dim() - 2)
    would_do = [place, *x.placements[1:]] if x.device_mesh.ndim > 1 else [place]
    raise ValueError(
        f"{CALLER}: DTensors must be sharded along their tokens on one dimension of one mesh, all three alike, and "
        f"along features on none; got {name} with {tuple(x.placements)} on a mesh of {tuple(x.device_mesh.shape)}. "
        f"This would do: {name}.redistribute(placements={would_do})."
    )


def _sharded_by_tokens(x: DTensor) -> list[int]:
    return [
        dim for dim, place in enumerate(x.placements) if type(place) is Shard and place.dim % x.dim() == x.dim() - 2
    ]


def wrapped(plan: Plan, query: DTensor, value: DTensor) -> Plan:
    """A plan for the local parts of DTensors that returns a DTensor, placed as the query is."""
    shape = (*query.shape[:-1], value.shape[-1])
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, size))

    def run(*arguments: Any) -> Tensor:
        out = plan.function(*arguments)
        where: dict[str, Any] = {"shape": shape, "stride": tuple(strides)}
        return DTensor.from_local(out, query.device_mesh, query.placements, run_check=False, **where)

    return Plan(plan.backend, run, plan.arguments)
