"""A cache is untrusted input: whatever its index files say, verbs give the right rows or an error of ours.

The fault campaign's crafts change one value of one file and seal it again with a right digest. What is read afterwards
must be rows that were built, unless a chunk was forged; anything else must be a `ForebayError`.
"""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.campaign.hostile import craft
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, number_cache, write_lines

import forebay as fb
from forebay.columns import Ragged
from forebay.errors import ForebayError

INDEX = ("documents", "generation", "plan", "constants", "claim", "heartbeat")
FORGED = ("chunk", "values")  # whoever forges a chunk chooses its rows
EXAMPLES = 80


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two layers, updated once."""
    folder = tmp_path_factory.mktemp("hostile")
    root = number_cache(folder, 40)
    write_lines(folder / "raw/z.txt", 40, 30)
    fb.update(root, fb.sources.lines(folder / "raw"), recipe=LineRecipe(), workers=0)
    fb.build(root, None, LengthLayer(), workers=0, max_failures=1.0)
    fb.clean(root, keep_generations=1)
    return root


def rows_of(root: Path) -> list[str]:
    """Every row; a count that is not true is found when rows are read."""
    cache = fb.open_cache(root, layers=["length"])
    read = cache.read(range(min(len(cache), 1000)))
    columns = [
        [value.tobytes() for value in values] if isinstance(values, Ragged) else values.tolist()
        for values in read.values()
    ]
    return [str(row) for row in zip(*columns, strict=True)]


def are_right(found: list[str], built: list[str]) -> bool:
    """Whether rows are rows that were built, in order. A generation without a key may list any part of a cache."""
    return found == [row for row in built if row in set(found)]


VERBS: dict[str, Callable[[Path], object]] = {
    "status": fb.status,
    "info": fb.info,
    "verify": partial(fb.verify, full=True),
    "constants": lambda root: fb.open_cache(root, layers=["length"]).constants("length"),
    "copy": lambda root: fb.copy(root, fb.MemoryStore("copy")),
    "clean": partial(fb.clean, lease_seconds=0, keep_generations=1),
    "repair": partial(fb.repair, recipe=LineRecipe(), workers=0),
}


@pytest.mark.parametrize("name", INDEX + FORGED)
def test_a_hostile_index_gives_the_right_rows_or_an_error_of_ours(tmp_path: Path, built: Path, name: str) -> None:
    rows = rows_of(built)
    for seed in range(EXAMPLES):
        draw, root = random.Random(f"{name} {seed}"), tmp_path / "cache"
        shutil.copytree(built, root)
        cause, verb = craft(name, draw, root, tmp_path), draw.choice(sorted(VERBS))
        for call in (rows_of, VERBS[verb], rows_of):
            with suppress(ForebayError):
                answer = call(root)
                assert call is not rows_of or name in FORGED or are_right(answer, rows), f"{cause}, {verb}"
        shutil.rmtree(root)
