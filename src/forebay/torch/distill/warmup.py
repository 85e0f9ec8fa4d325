"""The weight of a teacher's loss, which grows from 0 while the student finds its feet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Warmup:
    """`weight · min(1, step / steps)`.

    >>> lune = Warmup(0.1, steps=1000)
    >>> lune(0), lune(500), lune(5000)
    (0.0, 0.05, 0.1)
    """

    weight: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"a warm-up of {self.steps} steps; 0 means none")

    def __call__(self, step: int) -> float:
        return self.weight * min(1.0, step / self.steps) if self.steps else self.weight
