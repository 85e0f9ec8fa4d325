"""Growing: new files, and what was appended to known ones, become new chunks; old rows stay where they are."""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.helpers.cache_files import chunk_key, layer_path
from tests.helpers.layer_recipes import LineRecipe, flip, number_cache, tree, write_lines

import forebay as fb
from forebay.errors import CacheNotFound, ForebayError, RecipeMismatch, SourceChanged, TooManyFailures

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda text: gzip.compress(text, mtime=0),
    ".zst": zstandard.ZstdCompressor().compress,
}


def lines(first: int, count: int) -> bytes:
    return b"".join(b"%06d\n" % number for number in range(first, first + count))


def grown(root: Path, *paths: Path) -> object:
    return fb.update(root, fb.sources.lines(*paths), recipe=LineRecipe(), workers=0)


def numbers(root: Path, generation: int | None = None) -> list[int]:
    cache = fb.open_cache(root, generation=generation)
    return cache.read(np.arange(len(cache)))["number"].tolist()


def test_a_new_file_becomes_new_chunks_and_old_rows_keep_their_ids(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before, pinned = tree(root), fb.open_cache(root)
    ids = pinned.row_ids(np.arange(20))
    write_lines(tmp_path / "raw/0 sorts first.txt", 20, 6)
    report = grown(root, tmp_path / "raw")
    assert (report.built, report.present, report.chunks) == (2, 5, 7)
    cache = fb.open_cache(root)
    assert numbers(root) == list(range(26))
    assert cache.row_ids(np.arange(20)) == ids
    assert cache.row_ids([20, 25]) == [fb.RowId(5, 0), fb.RowId(6, 1)]
    after = tree(root)
    assert {name: after[name] for name in before} == before, "nothing that was there is touched"
    assert pinned.read(np.arange(len(pinned)))["number"].tolist() == list(range(20))
    assert numbers(root, generation=0) == list(range(20))
    assert fb.verify(root, full=True).sound


@pytest.mark.parametrize("suffix", PACK)
def test_a_file_that_only_grew_is_appended(tmp_path: Path, suffix: str) -> None:
    """A plain file by lines, a compressed one by a further member or frame."""
    path = tmp_path / f"raw/a.txt{suffix}"
    path.parent.mkdir()
    path.write_bytes(PACK[suffix](lines(0, 10)))
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(path), LineRecipe(), workers=0)
    before = tree(root / "layers")
    for first in (10, 13):
        with open(path, "ab") as file:
            file.write(PACK[suffix](lines(first, 3)))
        assert grown(root, path).built == 1
        assert numbers(root) == list(range(first + 3))
        assert fb.verify(root, full=True).sound
    assert {name: tree(root / "layers")[name] for name in before} == before
    text = fb.open_cache(root).read([0, 10, 15])["text"]
    assert [bytes(text[row]) for row in range(3)] == [b"000000", b"000010", b"000015"]
    for chunk in sorted((layer_path(root, "numbers")).glob("0*")):
        chunk.unlink()
    assert not fb.repair(root, recipe=LineRecipe(), workers=0).failed
    assert {name: tree(root / "layers")[name] for name in before} == before, "old chunks come out of the grown file too"


def test_growing_by_nothing_changes_nothing(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    report = grown(root, tmp_path / "raw")
    assert (report.built, report.generation) == (0, 0)
    os.utime(tmp_path / "raw/a.txt", ns=(1, 1))
    assert grown(root, tmp_path / "raw").built == 0
    assert tree(root) == before


def test_growing_twice_and_again_is_one_segment_each(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    for number in range(3):
        write_lines(tmp_path / f"raw/c{number}.txt", 20 + 4 * number, 4)
        assert grown(root, tmp_path / "raw").built == 1
        assert grown(root, tmp_path / "raw").built == 0
    assert numbers(root) == list(range(32))
    assert len(list((root / "plan").iterdir())) == 4
    assert fb.info(root).source_files == 5


@pytest.mark.parametrize("position", [0, 35, 69])
def test_a_changed_old_file_is_an_error_that_names_it_and_the_choices(tmp_path: Path, position: int) -> None:
    root = number_cache(tmp_path)
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    flip(tmp_path / "raw/a.txt", position, 1)
    os.utime(tmp_path / "raw/a.txt", ns=(1, 1))
    before = tree(root)
    with pytest.raises(SourceChanged, match=r"(?s)'a\.txt' has other content.*--into NEW --reuse"):
        grown(root, tmp_path / "raw")
    assert tree(root) == before


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("more", [b"9\n000006\n", b"\n000006\n"])
def test_a_file_whose_last_line_was_unfinished_has_changed(tmp_path: Path, suffix: str, more: bytes) -> None:
    path = tmp_path / f"raw/a.txt{suffix}"
    path.parent.mkdir()
    path.write_bytes(PACK[suffix](lines(0, 5) + b"00000"))
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(path), LineRecipe(), workers=0)
    before = tree(root)
    with open(path, "ab") as file:
        file.write(PACK[suffix](more))
    with pytest.raises(
        SourceChanged, match=r"(?s)(last sample was not finished|no line that starts at byte 40).*--reuse"
    ):
        grown(root, path)
    assert tree(root) == before
    assert fb.verify(root, full=True).stale == fb.verify(root).stale


def test_another_folder_can_be_added_and_its_names_are_relative_to_the_first(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    write_lines(tmp_path / "more/deep/a.txt", 20, 4)
    assert grown(root, tmp_path / "more").built == 1
    assert numbers(root) == list(range(24))
    assert fb.verify(root, full=True).sound
    flip(tmp_path / "more/deep/a.txt", 3, 1)
    os.utime(tmp_path / "more/deep/a.txt", ns=(1, 1))
    assert list(fb.verify(root).stale) == ["../more/deep/a.txt"]
    flip(tmp_path / "more/deep/a.txt", 3, 1)
    assert grown(root, tmp_path / "more", tmp_path / "raw").built == 0, "both folders are known by now"


def test_the_first_folder_need_not_be_there_any_more(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    shutil.rmtree(tmp_path / "raw")
    write_lines(tmp_path / "more/c.txt", 20, 4)
    assert grown(root, tmp_path / "more").built == 1
    assert numbers(root) == list(range(24))


def test_growing_makes_what_was_missing_before_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, start_chunk=3)
    assert numbers(root) == list(range(12, 20))
    write_lines(tmp_path / "raw/b.txt", 20, 4)
    assert grown(root, tmp_path / "raw").built == 4
    assert numbers(root) == list(range(24))
    assert numbers(root, generation=0) == list(range(12, 20))


def test_a_grow_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    write_lines(tmp_path / "raw/c.txt", 20, 12)
    grown(root, tmp_path / "raw")
    whole = tree(root / "layers")
    for name in (
        chunk_key(root, "numbers", 6),
        "generations/000001.safetensors",
        "generations/000002.safetensors",
    ):
        (root / name).unlink(missing_ok=True)
    assert grown(root, tmp_path / "raw").built == 1
    assert tree(root / "layers") == whole
    assert numbers(root) == list(range(32))


def test_growing_needs_a_cache_its_own_recipe_and_a_source_of_the_same_kind(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 8)
    source = fb.sources.lines(tmp_path / "raw")
    with pytest.raises(CacheNotFound):
        fb.update(tmp_path / "nowhere", source, recipe=LineRecipe(), workers=0)
    root = number_cache(tmp_path)
    with pytest.raises(RecipeMismatch, match="scale"):
        fb.update(root, source, recipe=LineRecipe(scale=2.0), workers=0)
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    before = tree(root)
    with pytest.raises(ForebayError, match=r"kind 'lines', and this one is of kind 'files'"):
        fb.update(root, fb.sources.files(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert tree(root) == before


def test_files_without_samples_are_not_reported_as_new(tmp_path: Path) -> None:
    raw, root = tmp_path / "raw", tmp_path / "cache"
    write_lines(raw / "a.txt", 0, 4)
    (raw / "empty.txt").write_bytes(b"")
    (raw / "none.txt.gz").write_bytes(gzip.compress(b""))
    source = fb.sources.lines(raw)
    assert fb.build(root, source, LineRecipe(), workers=0).notes == ()
    assert grown(root, raw).notes == ()
    assert fb.build(root, source, LineRecipe(), workers=0).notes == ()
    (raw / "none.txt.gz").write_bytes(gzip.compress(b"000009\n"))
    (raw / "empty.txt").write_bytes(b"000008\n")
    assert fb.verify(root, source=source, full=True).sound
    assert grown(root, raw).rows == 6


def test_a_build_from_part_of_its_files_says_how_many_are_not_there(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    write_lines(tmp_path / "few/a.txt", 0, 10)
    report = fb.build(root, fb.sources.lines(tmp_path / "few"), LineRecipe(), workers=0)
    (note,) = report.notes
    assert note.startswith("1 of 2 planned file(s) are not in the source passed (the first is 'b.txt')")


def test_growing_releases_what_its_recipe_loaded_and_counts_failures_of_all_chunks(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "raw/c.txt").write_bytes(b"x\n" * 3 + b"20\n")
    with pytest.raises(TooManyFailures):
        fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0, max_failures=2)
    with pytest.raises(TooManyFailures):  # nothing is left to make, and there are as many as before
        fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0, max_failures=2)
