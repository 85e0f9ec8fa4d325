"""What a benchmark measured: one line of the table, one record in the JSON file."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

HEADINGS = ("work", "peer", "equal output", "ours", "peer's", "ratio", "spread", "goal")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A rate next to that of a peer, or (without a peer) a value with a bound."""

    case: str  # the module that measured it: "build.text"
    work: str
    unit: str  # of a rate: "MB/s"; of a value: "ms"
    ours: float
    peer: str = ""
    theirs: float = 0.0
    equal: str = ""  # how the two outputs were compared
    ratios: tuple[float, ...] = ()  # one per round
    at_least: float | None = None  # goal for the ratio
    at_most: float | None = None  # goal for the value

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def is_met(self) -> bool:
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.at_most is None or self.ours <= self.at_most

    @property
    def goal(self) -> str:
        bound = f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}" if self.at_most else ""
        return bound if self.is_met else f"{bound}, missed"

    def cells(self) -> tuple[str, ...]:
        """The values under `HEADINGS`."""
        if not self.peer:
            return (self.work, "", self.equal, number(self.ours, self.unit), "", "", "", self.goal)
        spread = f"{min(self.ratios):.2f}-{max(self.ratios):.2f} ({len(self.ratios)})"
        rates = (number(self.ours, self.unit), number(self.theirs, self.unit))
        return (self.work, self.peer, self.equal, *rates, f"{self.ratio:.2f}", spread, self.goal)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run, with what is needed to repeat it."""

    date: str
    machine: str
    command: str
    versions: dict[str, str]
    results: tuple[Result, ...]


def compared(
    case: str, work: str, peer: str, ours: Sequence[float], theirs: Sequence[float], *, unit: str,
    equal: str = "", at_least: float | None = None,
) -> Result:  # fmt: skip
    """A result from rates that were measured in turn, one of each per round."""
    ratios = tuple(one / other for one, other in zip(ours, theirs, strict=True))
    return Result(
        case=case, work=work, peer=peer, unit=unit, ours=median(ours), theirs=median(theirs), equal=equal,
        ratios=ratios, at_least=at_least,
    )  # fmt: skip


def number(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def markdown(results: Iterable[Result]) -> str:
    """A table as in docs/benchmarks.md."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *(result.cells() for result in results)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
