"""Chunks that lie with every sum and digest right are refused when they are opened, before anything is read by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import start_python
from tests.forged import Change, Draft, forge

import forebay as fb

CODECS = ["none", "lz4", "zstd"]
READ_TWO_ROWS = """
import json, sys
import forebay as fb
cache = fb.open_cache(sys.argv[1])
try:
    print(json.dumps({"rows": [bytes(row).hex() for row in cache.read([5, len(cache) - 1], ["data"])["data"]]}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def built(tmp_path: Path, codec: str, rows: int = 300) -> Path:
    """Chunks of some hundred rows, "row 0", "row 1", …"""
    (tmp_path / "source.txt").write_bytes(b"".join(b"row %d\n" % number for number in range(rows)))
    recipe = fb.RawRecipe(codec=codec, chunk_bytes=1 << 10, rows_per_block=16)  # type: ignore[arg-type]
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), recipe, workers=0)
    return tmp_path / "cache"


def offsets(change: Callable[[Any], None]) -> Change:
    def changed(draft: Draft) -> None:
        numbers = draft.numbers("data.offsets").astype(np.int64)
        change(numbers)
        draft.put("data.offsets", numbers.view(np.uint64))

    return changed


@pytest.mark.parametrize("shift", [5000, -5000])
@pytest.mark.parametrize("codec", CODECS)
def test_a_row_outside_of_its_chunk_is_never_read(tmp_path: Path, codec: str, shift: int) -> None:
    """Row 5 is said to be somewhere before or behind the values of its chunk."""

    def outside(numbers: Any) -> None:
        numbers[5:7] = numbers[-1] + shift, numbers[-1] + shift + 20

    root = built(tmp_path, codec)
    forge(root, offsets(outside))
    process = start_python(["-c", READ_TWO_ROWS, str(root)])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert answer.get("error") == "ChunkCorrupt", f"bytes from elsewhere in memory were served: {answer}"
    assert "the offsets of column 'data' do not rise" in answer["text"]
    assert f"chunk 0 of layer 'raw' in '{root}'" in answer["text"]
