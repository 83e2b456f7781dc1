"""What is said of a case."""

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """`complaint` is empty where a case passed; `kind` says in a few words what failed, the same for like failures."""

    complaint: str = ""
    kind: str = ""
    witness: tuple[str, list[int], float] | None = None
    """The result, the place in it, and the value expected there."""
    ratios: dict[str, float] = field(default_factory=dict)
    """The error of each result over its tolerance."""

    @property
    def family(self) -> str:
        """What a reduction must keep: any wrong number stands for any other."""
        if self.kind.startswith("crash"):
            return "crash"
        return "wrong" if self.kind.endswith(("wrong", "not finite")) else self.kind
