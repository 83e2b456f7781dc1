"""A case: everything that describes one call, in plain numbers and strings.

A case is drawn from a seed (`draw.py`), written as a program (`program.py`), judged (`judge.py`) and, where it fails,
reduced (`shrink.py`). The defaults are the simplest choice of each field, which is what a reduction aims at. Fields
that a function does not have are ignored.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# The native kernels are one backend per instruction set.
BACKENDS = ("native:baseline", "native:avx2", "native:avx512", "native:avx512_bf16", "torch", "reference", "auto")


@dataclass(frozen=True)
class Case:
    function: str = "sinkhorn_attention"
    seed: int = 0
    backend: str = "torch"
    threads: int = 1
    workspace: int | None = None
    """Bytes that the native kernels may take for stored scores; None leaves the library's own number."""
    device: str = "cpu"
    """cpu, meta (shapes only), or the name of the one tensor that is on meta, which must be refused."""
    transform: str = "plain"
    vmap_dims: dict[str, int] = field(default_factory=dict)
    """For the vmap transforms: the tensors that have a batch axis, and where."""

    lead: tuple[int, ...] = ()
    n: int = 2
    m: int = 2
    d: int = 1
    e: int = 1
    key_lead: tuple[int, ...] | None = None
    value_lead: tuple[int, ...] | None = None
    groups: int = 1
    """Query heads per key and value head; more than 1 means enable_gqa."""
    dtype: str = "float32"
    std: float = 1.0
    """Standard deviation of the queries, or of the scores."""
    offset: float = 0.0
    """Added to queries and keys."""
    layouts: dict[str, str] = field(default_factory=dict)

    n_iters: int = 1
    tau: float | str = 1.0
    """A number, or the leading axes that a tensor has: "heads", "all", "scalar"."""
    tau_range: tuple[float, float] = (0.0, 1.0)
    scale: float | None = None
    cost: str = "dot"
    gradient: str = "unrolled"
    dropout: float = 0.0
    causal: bool = False
    """is_causal of attention."""
    definition: str = ""
    """Of causal weights: streaming or prefix; "" for plain ones."""
    chunks: tuple[int, ...] = ()
    """The queries of each call with a cache; the gradient is then left out."""
    hub: bool = False

    attn_mask: str | None = None
    """bool, or the dtype of a bias."""
    attn_axes: str = "full"
    """The shape of the mask: full, matrix (n, m), keys (1, m), queries (n, 1), heads (heads, n, m), batch."""
    pattern: str = "random"
    """Of a boolean mask, or of the bias's lowest entries: random, triangle, window, rows, columns, all, none."""
    bias_low: float | str | None = None
    """What stands at the bias's masked entries: "-inf", or a multiple of finfo.min."""
    query_mask: str | None = None
    key_mask: str | None = None
    """random, all or none; suffixed by the axes: ":full" for all leading axes, ":batch" for the first only."""
    row_mass: str | None = None
    col_mass: str | None = None
    nan: bool = False
    """NaN in everything that is masked."""

    module: dict[str, Any] = field(default_factory=dict)
    """Options of a module's constructor and call."""

    def to_json(self) -> str:
        plain = Case()
        return json.dumps({k: v for k, v in asdict(self).items() if v != getattr(plain, k)})

    @staticmethod
    def from_json(text: str) -> "Case":
        values = json.loads(text)
        known = {each.name for each in fields(Case)}
        assert known >= set(values), f"unknown fields: {set(values) - known}"
        for name in ("lead", "key_lead", "value_lead", "tau_range", "chunks"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return Case(**values)

    @property
    def order(self) -> str:
        """The definition that holds: a triangle with more than one step implies one."""
        implied = "streaming" if self.causal and self.n_iters > 1 and self.tau != 0 else ""
        return self.definition or implied

    @property
    def compared_backend(self) -> str:
        """The backend as the library knows it."""
        return self.backend.partition(":")[0]
