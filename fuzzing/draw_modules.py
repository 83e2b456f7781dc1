"""Cases of modules: which one, how it is built and called."""

from dataclasses import replace
from random import Random
from typing import Any

from fuzzing.case import Case
from fuzzing.layouts import LAYOUTS

WEIGHTS = {
    "MultiheadAttention": 8,
    "SelfAttention": 3,
    "MAB": 2,
    "SAB": 2,
    "ISAB": 2,
    "PMA": 2,
    "OffsetAttention": 2,
    "InvertibleAttention": 1,
    "EquilibriumAttention": 1,
}


def draw_module(random: Random, case: Case) -> Case:
    """Modules choose their own backend, so that only `auto` is there to be tried."""
    function = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    heads = random.choice((1, 2, 3))
    n, m = (random.choice((1, 2, 3, 5, 8, 13, 17, 29)) for _ in range(2))
    case = replace(case, function=function, backend="auto", lead=(random.choice((1, 2, 3)),), n=n, m=m)
    dtype = random.choices(("float32", "float64", "bfloat16", "float16"), (4, 4, 1, 1))[0]
    tau = 1.0 if random.random() < 0.7 else random.choice((0.0, 0.5, 0.9))
    n_iters, std = random.choice((1, 1, 2, 3, 3, 5, 8, 21)), random.choice((0.3, 1.0, 1.0, 3.0))
    d, e = random.choice((1, 3, 5, 8)), random.choice((1, 2, 4, 7))
    case = replace(case, dtype=dtype, tau=tau, n_iters=n_iters, std=std, d=d, e=e, nan=random.random() < 0.4)
    module: dict[str, Any] = {"heads": heads}
    masked = random.random() < 0.6 and function != "OffsetAttention"
    case = replace(case, query_mask="random" if masked else None, key_mask="random" if random.random() < 0.6 else None)
    if function == "MultiheadAttention":
        case, module = _multihead(random, case, module)
    elif function == "SelfAttention":
        module |= {"tie_qk": random.random() < 0.3, "bias": random.random() < 0.5}
    elif function in ("MAB", "SAB", "ISAB", "PMA"):
        module |= {"norm": random.random() < 0.5, "scale_by": random.choice(("head", "width"))}
        module |= {"points": random.choice((1, 2, 5)), "literal": random.random() < 0.3}
        if function == "PMA":
            case = replace(case, d=heads * random.choice((1, 4)))
    elif function == "OffsetAttention":
        # A batch norm of a single token divides by nothing, and sharp scores by next to it.
        case = replace(
            case, lead=(2,), n=max(n, 5), std=min(std, 1.0), dtype=random.choice(("float32", "float64")), d=min(d, 5)
        )
        if random.random() < 0.3:
            module["port"], case = True, replace(case, n_iters=2, tau=1.0)
    else:
        case = replace(case, dtype=random.choice(("float32", "float64")), std=min(std, 1.0), n=max(1, n))
    layouts = {
        name: random.choice(LAYOUTS) for name in ("query", "key", "value", "x", "y", "w_out") if random.random() < 0.2
    }
    case = replace(case, module=module, layouts=layouts)
    if random.random() < 0.1 and function not in ("InvertibleAttention", "EquilibriumAttention", "OffsetAttention"):
        case = replace(case, transform="checkpoint:not")
    return case


def _multihead(random: Random, case: Case, module: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    case = replace(case, d=module["heads"] * random.choice((1, 2, 4)))
    module |= {"self": random.random() < 0.5, "batch_first": random.random() < 0.5, "bias": random.random() < 0.7}
    module |= {
        "weights": random.random() < 0.5,
        "average": random.random() < 0.5,
        "float_padding": random.random() < 0.2,
    }
    module |= {"add_bias_kv": random.random() < 0.2, "add_zero_attn": random.random() < 0.2}
    if not module["self"] and random.random() < 0.4:
        module |= {"kdim": random.choice((1, 3)), "vdim": random.choice((1, 5))}
    if random.random() < 0.2:
        case = replace(case, lead=())
    if random.random() < 0.4:
        case = replace(case, attn_mask=random.choice(("bool", "bias")), attn_axes=random.choice(("matrix", "heads")))
    return case, module
