"""A figure that stands for itself, and what it should be."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """`at most` or `at least` a bound; printed like a comparison with a peer is."""

    name: str
    value: float
    sense: Literal["≤", "≥"]
    bound: float
    unit: str = ""
    digits: int = 2
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound if self.sense == "≤" else self.value >= self.bound

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        found = f"{self.value:,.{self.digits}f}{unit}"
        wanted = f"goal {self.sense} {self.bound:,.{self.digits}f}{unit}"
        return f"{self.name:<62} {found:<22} {wanted:<28} {'met' if self.is_met else 'MISSED'}  {self.note}".rstrip()
