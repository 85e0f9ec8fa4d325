"""Options that every benchmark takes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    folder: Path  # work folder outside the repository; data that is expensive to make stays there
    text: Path | None  # folder of .jsonl or .jsonl.gz files
    images: Path | None  # folder of photographs
    rounds: int
    is_quick: bool  # sizes that only show that the benchmark runs

    @property
    def environments(self) -> Path:
        return self.folder / "environments"
