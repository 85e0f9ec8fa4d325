"""Statistics of recipes: what cannot be kept or summed is named, and no sum over chunks wraps around."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import forebay as fb
from forebay.columns import Column
from forebay.errors import BuildFailed, RecipeInvalid
from forebay.recipe import ChunkTarget, Rows
from forebay.source import Sample


class Counting(fb.RecipeHooks, msgspec.Struct, frozen=True):
    """Every chunk counts what it was told to."""

    kind: ClassVar[str] = "counting"
    revision: ClassVar[int] = 1
    counted: str

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="length", dtype="int64"),)

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=10)

    def make(self, samples: Iterable[Sample]) -> Rows:
        lengths = np.array([len(sample.data) for sample in samples])
        return Rows({"length": lengths}, (), {"counted": json.loads(self.counted)})


def counted_lines(folder: Path) -> Any:
    (folder / "a.txt").write_text("".join(f"line {number}\n" for number in range(60)))
    return fb.sources.lines(folder / "a.txt")


@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        (1 << 70, "has an integer beyond 64 bits"),
        (float("inf"), "not JSON compliant|not finite"),
        ("many", "cannot be summed"),
        ([[1], [1, 2]], "cannot be summed"),
    ],
)
def test_a_statistic_that_cannot_be_kept_is_named(tmp_path: Path, statistic: Any, message: str) -> None:
    with pytest.raises((RecipeInvalid, BuildFailed), match=message):
        fb.build(tmp_path / "cache", counted_lines(tmp_path), Counting(json.dumps(statistic)), workers=0)


def test_sums_of_statistics_beyond_64_bits_are_floats(tmp_path: Path) -> None:
    report = fb.build(tmp_path / "cache", counted_lines(tmp_path), Counting(json.dumps(1 << 62)), workers=0)
    assert report.chunks > 2
    assert report.statistics["counted"] == pytest.approx(report.chunks * 2.0**62)
