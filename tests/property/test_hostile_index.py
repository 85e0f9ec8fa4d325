"""A cache is untrusted input: whatever its index files say, verbs give the right rows or an error of ours.

The fault campaign's crafts change one value of one file and seal it again with a right digest. What is read afterwards
must be rows that were built; anything else must be a `ForebayError`.
"""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from tests.campaign.hostile import craft
from tests.helpers.layer_recipes import write_lines

import forebay as fb
from forebay.columns import Array, Column, Columns, Ragged
from forebay.errors import ForebayError
from forebay.recipe import Rows

CRAFTS = ("documents", "generation", "plan", "constants", "claim", "heartbeat")
EXAMPLES = 80


class Doubled(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer of the length of every sample, twice."""

    kind: ClassVar[str] = "doubled"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("data",)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="length", dtype="int32"),)

    def constants(self) -> dict[str, Array]:
        return {"factor": np.array([2], np.int16)}

    def make(self, rows: Columns) -> Rows:
        data = rows["data"]
        assert isinstance(data, Ragged)
        return Rows({"length": (data.lengths * 2).astype(np.int32)}, statistics={"lengths": [1, 2]})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two layers, updated once."""
    folder = tmp_path_factory.mktemp("hostile")
    root = folder / "cache"
    fb.build(root, fb.sources.lines(write_lines(folder / "raw/a.txt", 0, 40)), fb.RawRecipe(chunk_bytes=700), workers=0)
    fb.update(root, fb.sources.lines(write_lines(folder / "raw/b.txt", 40, 30)), workers=0)
    fb.build(root, None, Doubled(), workers=0)
    fb.clean(root, keep_generations=1)
    return root


def rows_of(root: Path) -> list[Any]:
    """Every row; a count that is not true is found when rows are read."""
    cache = fb.open_cache(root, layers=["doubled"])
    read = cache.read(range(min(len(cache), 1000)))
    columns = [
        [value.tobytes() for value in values] if isinstance(values, Ragged) else values.tolist()
        for values in read.values()
    ]
    return list(zip(*columns, strict=True))


def are_right(found: list[Any], built: list[Any]) -> bool:
    """Whether rows are rows that were built, in order. A generation without a key may list any part of a cache."""
    return found == [row for row in built if row in set(found)]


VERBS: dict[str, Callable[[Path], object]] = {
    "status": fb.status,
    "info": fb.info,
    "verify": partial(fb.verify, full=True),
    "constants": lambda root: fb.open_cache(root, layers=["doubled"]).constants("doubled"),
    "copy": lambda root: fb.copy(root, fb.MemoryStore("copy")),
    "clean": partial(fb.clean, lease_seconds=0, keep_generations=1),
    "repair": partial(fb.repair, workers=0),
}


@pytest.mark.parametrize("name", CRAFTS)
def test_a_hostile_index_gives_the_right_rows_or_an_error_of_ours(tmp_path: Path, built: Path, name: str) -> None:
    rows = rows_of(built)
    for seed in range(EXAMPLES):
        draw, root = random.Random(f"{name} {seed}"), tmp_path / "cache"
        shutil.copytree(built, root)
        cause, verb = craft(name, draw, root, tmp_path), draw.choice(sorted(VERBS))
        for call in (rows_of, VERBS[verb], rows_of):
            with suppress(ForebayError):
                answer = call(root)
                assert call is not rows_of or are_right(answer, rows), f"{cause}, {verb}"
        shutil.rmtree(root)
