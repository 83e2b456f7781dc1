"""The report of a conversion, `model.sinkformer_report`: what was converted, what was not, and why."""

from dataclasses import dataclass, field

from sinkformers.conversion.tables import html_table

REPORT = "sinkformer_report"  # the attribute of a converted model


@dataclass
class Entry:
    """One attention module of the model."""

    name: str
    kind: str  # the original class name
    adapter: str | None  # the adapter that converted it; None if it stays SoftMax
    reason: str  # why it stays SoftMax
    parameter: str | None = None  # the parameter that tau="learned" added
    calls: dict[str, int] = field(default_factory=dict)  # number of intercepted calls by kind
    causal: str | None = None  # the definition of causal attention, where rows are normalised in order

    @property
    def title(self) -> str:
        return self.name or "(the model itself)"

    def outcome(self) -> str:
        """Return in words what became of the module."""
        text = f"Sinkhorn ({self.adapter})" if self.adapter is not None else f"unchanged: {self.reason}"
        if self.causal is not None:
            text += f", causal: {self.causal}"
        if self.parameter is not None:
            text += f", learns {self.parameter}"
        if self.calls:
            text += "; " + ", ".join(f"{count} × {call}" for call, count in self.calls.items())
        return text


@dataclass(repr=False)
class Report:
    """Every attention module that was found: `converted` and `kept`, by name. Print it, or show it in a notebook."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def converted(self) -> dict[str, Entry]:
        """The entries of the converted modules."""
        return {entry.name: entry for entry in self.entries if entry.adapter is not None}

    @property
    def kept(self) -> dict[str, str]:
        """The modules that were not converted, with the reason."""
        return {entry.name: entry.reason for entry in self.entries if entry.adapter is None}

    @property
    def parameters(self) -> list[str]:
        """The parameters that tau="learned" added, by their names in the model."""
        return [entry.parameter for entry in self.entries if entry.parameter is not None]

    def __str__(self) -> str:
        lines = [f"  {entry.title} [{entry.kind}] {entry.outcome()}" for entry in self.entries]
        return "\n".join([self._summary(), *lines])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = [(entry.title, entry.kind, entry.outcome()) for entry in self.entries]
        return html_table(self._summary(), ("module", "class", "result"), rows)

    def _summary(self) -> str:
        return f"{len(self.converted)} of {len(self.entries)} attention modules converted"
