"""Seconds and bytes as people read them."""


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def size(count: float) -> str:
    """In MiB below one GiB, in GiB from there on."""
    return f"{count / 2**20:.1f} MiB" if abs(count) < 2**30 else f"{count / 2**30:.2f} GiB"
