"""What the command line advises where the source of a cache changed: a command that works."""

from pathlib import Path

import pytest
from PIL import Image
from tests.cli.running import run
from tests.distinct import DistinctRecipe, write_file

import forebay as fb
from forebay.errors import SourceChanged


def test_a_cache_without_duplicates_is_not_advised_to_refresh(tmp_path: Path) -> None:
    root, path = tmp_path / "cache", tmp_path / "raw/a.txt"
    source = fb.sources.lines(write_file(path, [b"one", b"two", b"one"]))
    fb.build(root, source, DistinctRecipe(), workers=0)
    write_file(path, [b"one", b"six", b"one"])
    recipes = {"distinct": DistinctRecipe()}
    for call in (
        lambda: fb.build(root, source, DistinctRecipe(), workers=0),
        lambda: fb.grow(root, source, recipe=DistinctRecipe(), workers=0),
        lambda: fb.refresh(root, source=source, recipes=recipes, workers=0),
    ):
        with pytest.raises(SourceChanged, match=r"'a.txt' has other content.*or build a new cache") as error:
            call()
        assert "forebay refresh" not in str(error.value)
    problem = fb.repair(root, source=source, recipe=DistinctRecipe(), workers=0).failed["a.txt"]
    assert "build a new cache" in problem
    assert "forebay refresh" not in problem
    for verb in ("status", "verify"):
        shown = " ".join(run(verb, root, code=1).out.split())
        assert "next: restore the old files, or build a new cache from the changed source" in shown
        assert run(verb, root, "--json", code=1).json["refreshable"] is False


def test_a_cache_with_duplicates_is_advised_to_refresh(tmp_path: Path) -> None:
    root, path = tmp_path / "cache", tmp_path / "raw/a.txt"
    fb.build(root, fb.sources.lines(write_file(path, [b"one", b"two"])), fb.RawRecipe(), workers=0)
    write_file(path, [b"one", b"six"])
    for verb in ("status", "verify"):
        assert f"next: forebay refresh {root}" in " ".join(run(verb, root, code=1).out.split())
    run("refresh", root)
    run("verify", root)


def test_an_edited_sidecar_and_its_new_tag_are_shown(tmp_path: Path) -> None:
    photos, root = tmp_path / "photos", tmp_path / "cache"
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (9, 9)).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text("cat")
    run("build", "images", photos, "--into", root, "--size", 8, "--workers", 0)
    (photos / "1.txt").write_text("cat, zebra")
    assert "1.txt was edited, added or removed; it describes '1.png'" in " ".join(
        run("status", root, code=1).out.split()
    )
    shown = " ".join(run("refresh", root, "--workers", 0).out.split())
    assert "1.txt was edited, added or removed; it describes '1.png'" in shown
    assert "1 new tag(s) are not in the vocabulary, as 'zebra' of '1.png'" in shown
