"""What a conversion did, and what it left alone and why: `model.sinkformer_report`."""

from dataclasses import dataclass, field


@dataclass
class Entry:
    """One attention module of the model."""

    name: str
    kind: str  # its class, as its author named it
    adapter: str | None  # who converted it; None where it stays SoftMax
    reason: str  # why it stays SoftMax
    parameter: str | None = None  # the parameter that tau="learned" added
    calls: dict[str, int] = field(default_factory=dict)  # what the adapter for SDPA met at run time, and how often


@dataclass
class Report:
    """Every attention module that was found: `converted` and `kept`, by name. Print it to read it."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def converted(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries if entry.adapter is not None}

    @property
    def kept(self) -> dict[str, str]:
        """Modules that stay as they were, with the reason."""
        return {entry.name: entry.reason for entry in self.entries if entry.adapter is None}

    @property
    def parameters(self) -> list[str]:
        """The parameters that tau="learned" added, by their names in the model."""
        return [entry.parameter for entry in self.entries if entry.parameter is not None]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} of {len(self.entries)} attention modules converted"]
        for entry in self.entries:
            what = f"Sinkhorn ({entry.adapter})" if entry.adapter is not None else f"unchanged: {entry.reason}"
            if entry.parameter is not None:
                what += f", learns {entry.parameter}"
            if entry.calls:
                what += "; " + ", ".join(f"{count} × {call}" for call, count in entry.calls.items())
            lines.append(f"  {entry.name or '(the model itself)'} [{entry.kind}] {what}")
        return "\n".join(lines)
