"""Public objects have a repr of one short line; records and caches are tables in a notebook."""

from pathlib import Path
from typing import Any

import numpy as np

import forebay as fb
import forebay.torch
from forebay import chat
from forebay.torch import StoredBatch

BASES = {"RecipeHooks", "View"}


def test_public_objects_have_a_repr_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(90)))
    root, source = str(tmp_path / "cache"), fb.sources.lines(tmp_path / "a.txt")
    built = fb.build(root, source, fb.RawRecipe(chunk_bytes=40), workers=0)
    cache = fb.open_cache(root)
    column: Any = cache.read([0, 1], ["data"])["data"]
    assert repr(cache) == f"<Cache {root!r}, generation 0, 90 rows, raw>"
    assert repr(cache.store) == f"<LocalStore at {root!r}>"
    assert repr(fb.MemoryStore()) == "<MemoryStore at 'memory'>"
    assert repr(cache.generation) == "<Generation 0 with the layers raw>"
    assert repr(column) == "<Ragged of 2 rows, 12 values of uint8>"
    assert repr(fb.Rows({"x": np.zeros((9, 9, 9))})) == "<Rows: 9 rows of x; 0 failures>"
    assert repr(StoredBatch(cache)) == "<StoredBatch of data, id>"
    reports = built, fb.status(root), fb.info(root), fb.verify(root), fb.peek(root), fb.clean(root)
    for shown in (*reports, source, fb.RawRecipe(), cache.column("data"), fb.Failure("a", "b", "c")):
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 500
    assert all("<table>" in record._repr_html_() for record in (*reports, cache))


def test_every_public_class_has_a_repr_of_its_own() -> None:
    public = [getattr(module, name) for module in (fb, forebay.torch, chat) for name in module.__all__]
    own = {one for one in public if isinstance(one, type) and one.__module__.startswith("forebay.")}
    plain = {one.__name__ for one in own if one.__repr__ is object.__repr__ and not getattr(one, "_is_protocol", False)}
    assert plain - BASES == set()
