"""Under which process group attention runs: the argument of one call, or `sequence_parallel` for all of them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

KEYS_VALUES = ("gather", "ring")

_checks: list[Callable[[Any], None]] = []
_active: "list[SequenceGroup]" = []  # of the blocks that were entered and not left, the last one counts


class SequenceGroup(NamedTuple):
    """A process group whose ranks hold consecutive parts of each sequence, and how keys and values reach them."""

    group: "ProcessGroup"
    kv: str


def sequence_group(caller: str, group: Any, kv: Any) -> SequenceGroup:
    """Check a process group or a one-dimensional DeviceMesh, of which this process is a member."""
    import torch.distributed as dist

    if kv not in KEYS_VALUES:
        raise ValueError(f"{caller}: kv must be one of {', '.join(map(repr, KEYS_VALUES))}; got {kv!r}.")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: group needs torch.distributed to be initialised. Start the processes with torchrun, and call "
            "torch.distributed.init_process_group first."
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            remedy = f'mesh["{names[-1]}"]' if names else "a mesh with names, mesh_dim_names=…, and mesh[name]"
            raise ValueError(
                f"{caller}: group must be a process group or a DeviceMesh with one dimension, along which the tokens "
                f"are sharded; got one with {group.ndim} dimensions. Pass one of them: {remedy}."
            )
        group = group.get_group()
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{caller}: this process is no member of the group. Call it on the members alone.")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{caller}: group must be a process group or a DeviceMesh; got {type(group).__name__}.")
    return SequenceGroup(group, kv)


@contextmanager
def sequence_parallel(group: "ProcessGroup | DeviceMesh", *, kv: str = "gather") -> Iterator[None]:
    """Let all attention of this library inside a `with` block run on sequences that the ranks of a group share.

    Each rank passes its own tokens to the model; those of rank 0 come first. Attention of converted and of own modules
    then is that of the whole sequences, as with `sinkhorn_attention(…, group=group)`. Modules that cannot do that raise
    an error with the reason, and so does attention that a conversion left SoftMax. A model that was not converted stays
    as it is, and attends to this rank's tokens alone.

    Args:
        group: a process group, or a `DeviceMesh` with one dimension.
        kv: `"gather"` or `"ring"`, as in `sinkhorn_attention`.

    What a model does to each token by itself needs no communication. What depends on the place of a token, such as
    learned positions, has to be given the places within the whole sequence (`position_ids`, in Hugging Face models),
    and a pooling over tokens is one over this rank's tokens. The gradients of parameters are this rank's contributions:
    their sum over the ranks is the gradient of the sum of all losses.

    The setting holds for the whole process, its threads included. Where activations are recomputed in the backward
    pass (`torch.utils.checkpoint`), run that inside the block too.

    Examples:
        >>> import os, torch, torch.distributed as dist, sinkformers
        >>> os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1")
        >>> dist.init_process_group("gloo")
        >>> layer = sinkformers.MultiheadAttention(16, 4, batch_first=True, n_iters=3)
        >>> x = torch.randn(2, 10, 16)  # this rank's tokens
        >>> with sinkformers.sequence_parallel(dist.group.WORLD):
        ...     out, _ = layer(x, x, x, need_weights=False)
        >>> dist.destroy_process_group()
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    entered = sequence_group("sequence_parallel", group, kv)
    _active.append(entered)
    # torch warns that hooks fire once more for a compiled model; this one may.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    hook = register_module_forward_pre_hook(_check)
    try:
        yield
    finally:  # threads may leave their blocks in another order
        hook.remove()
        _active[:] = [each for each in _active if each is not entered]


def check_modules(check: Callable[[Any], None]) -> None:
    """Let `check` be called with every module that is called inside `sequence_parallel`, before its `forward`."""
    _checks.append(check)


def _check(module: Any, _arguments: Any) -> None:
    for check in _checks:
        check(module)


def active_group() -> SequenceGroup | None:
    """The group of the innermost `sequence_parallel`, or None outside."""
    return _active[-1] if _active else None


def refuse_in_parallel(what: str, reason: str) -> None:
    """Raise inside `sequence_parallel`, for a module that would compute something else on a part of a sequence."""
    if _active:
        raise NotImplementedError(f"{what} cannot run inside sequence_parallel: {reason}")
