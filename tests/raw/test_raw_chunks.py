"""Chunks of lines, cut by rows."""

import gzip
from pathlib import Path

import numpy as np
import pytest

import forebay as fb


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_no_raw_chunk_has_more_rows_than_asked_however_long_its_lines_are(tmp_path: Path, suffix: str) -> None:
    """The rows of a chunk bound what a teacher makes in memory; a cut by bytes of text would not."""
    opened = gzip.open if suffix else open
    lengths = [*[400] * 150, *[5] * 700, *[200] * 150]
    for name, part in {"a": lengths[:430], "b": lengths[430:]}.items():
        with opened(tmp_path / f"{name}.txt{suffix}", "wb") as file:
            file.write(b"".join(b"%05d" % number + b"x" * length + b"\n" for number, length in enumerate(part)))
    source = fb.sources.lines(tmp_path / f"a.txt{suffix}", root=str(tmp_path))
    fb.build(tmp_path / "c", source, fb.RawRecipe(chunk_rows=100), workers=0)
    both = fb.sources.lines(tmp_path / f"a.txt{suffix}", tmp_path / f"b.txt{suffix}", root=str(tmp_path))
    fb.update(tmp_path / "c", both, workers=0)
    cache = fb.open_cache(tmp_path / "c")
    assert len(cache) == 1000
    assert np.diff(cache.chunk_starts).max() == 100
    assert len(cache.chunk_numbers) < 25
    assert fb.build(tmp_path / "c", both, fb.RawRecipe(), workers=0).built == 0  # the plan keeps its chunks
