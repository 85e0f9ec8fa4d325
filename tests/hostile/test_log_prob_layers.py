"""Layers of log-probs that somebody crafted: a batch is right or refused, before memory is taken for it."""

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from tests.helpers.processes import PythonProcess
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.columns import Array, Column, Columns, Ragged
from forebay.recipe import Rows

ROWS = 6
GUARD_BYTES = 6 << 30  # of addresses: torch alone maps two


class CraftedLogProbs(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs whose counts, values and shapes are those of an attack."""

    kind: ClassVar[str] = "crafted-log-probs"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("tokens",)

    attack: str

    def columns(self) -> tuple[Column, ...]:
        wide = (1 << 28,) if self.attack == "wide and absent" else ()
        counts = "float32" if self.attack == "counts of floats" else "int64"
        return (
            Column(name="ref_logps", dtype="float32", shape=wide, ragged=True, codec="zstd"),
            Column(name="ref_top_logps", dtype="float32", ragged=True),
            Column(name="ref_top_counts", dtype=counts, ragged=True),  # type: ignore[arg-type]
        )

    def make(self, rows: Columns) -> Rows:
        many = len(rows["tokens"])
        labels = [1 for _ in range(many)]
        values: list[Any] = [np.zeros(count, np.float32) for count in labels]
        counts: list[Any] = [np.ones(count, np.int64) for count in labels]
        if self.attack == "one huge count":
            counts[-1] = np.array([1 << 40])
        elif self.attack == "counts that cancel":
            counts[-1] = np.array([1 << 40, -(1 << 40), 1])
        elif self.attack == "one wide label":
            values[-1], counts[-1] = np.zeros(1 << 20, np.float32), np.array([1 << 20] + [0] * 200)
            values[0], counts[0] = np.zeros(200, np.float32), np.ones(200, np.int64)
        elif self.attack == "counts of floats":
            counts = [np.full(count, np.nan, np.float32) for count in labels]
        wide = self.columns()[0].shape
        kind = np.dtype(np.float32 if self.attack == "counts of floats" else np.int64)
        stored: dict[str, Array | Ragged] = {
            "ref_logps": Ragged.of([np.zeros((0, *wide), np.float32)] * many, np.dtype(np.float32), wide),
            "ref_top_logps": Ragged.of(values, np.dtype(np.float32), ()),
            "ref_top_counts": Ragged.of(counts, kind, ()),
        }
        return Rows(stored)


ATTACKS = {
    "one huge count": ("ref_top_logps", "other log-probs than their counts"),
    "counts that cancel": ("ref_top_logps", "other log-probs than their counts"),
    "one wide label": ("ref_top_logps", "the log-probs of a batch would have"),
    "counts of floats": ("ref_top_logps", "'ref_top_counts' does not count the values of labels"),
    "wide and absent": ("ref_logps", "the log-probs of a batch would have"),
}
CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
import forebay as fb
from forebay.torch import Loader, TokenBatch
cache = fb.open_cache(sys.argv[1], layers=["ref"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in Loader(cache, global_batch_size=6, threads=0, collate=TokenBatch(cache, log_probs=[sys.argv[2]])):
        print("read")
except ValueError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_crafted_log_probs_are_refused_in_bounded_memory(tmp_path: Path, attack: str) -> None:
    column, said = ATTACKS[attack]
    root = token_cache(tmp_path, ROWS)
    fb.build_layers(root, {"ref": CraftedLogProbs(attack=attack)})
    process = PythonProcess("-c", CODE, str(root), column, str(GUARD_BYTES))
    out, err = process.communicate()
    assert process.returncode == 0, err
    *lines, grown_kilobytes = out.splitlines()
    assert said in "\n".join(lines)
    assert int(grown_kilobytes) < 512 << 10
