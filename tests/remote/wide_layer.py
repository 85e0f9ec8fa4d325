"""Build a cache whose second layer is one large chunk: `python -m tests.remote.wide_layer CACHE MEBIBYTES`.

Prints what was made, and the most memory that this process had, in bytes.
"""

import json
import re
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from benchmarks.numbers import NoiseRecipe, NumberSource

import forebay as fb
from forebay.columns import Column, Columns

KEY = "layers/wide/000000.safetensors"


class WideLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A mebibyte a row."""

    kind: ClassVar[str] = "wide"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("noise",)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="wide", dtype="uint8", shape=(1 << 20,)),)

    def make(self, rows: Columns) -> fb.Rows:
        random = np.random.default_rng(int(np.asarray(rows["noise"]).ravel()[0]))
        return fb.Rows({"wide": random.integers(0, 256, (len(rows["noise"]), 1 << 20), np.uint8)})


def build(root: str, mebibytes: int) -> int:
    fb.build(root, NumberSource(mebibytes), NoiseRecipe(width=1, chunk_rows=mebibytes), workers=0)
    return fb.build(root, None, WideLayer(), workers=0).made


if __name__ == "__main__":
    made = build(sys.argv[1], int(sys.argv[2]))
    # Not `ru_maxrss`, which begins with the memory of the process that started this one.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"made": made, "peak": int(peak[1]) << 10 if peak else 0}))
