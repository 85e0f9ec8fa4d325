"""Copying: a verified copy, begun again where it was interrupted."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path, recipe_path
from tests.helpers.layer_recipes import LineRecipe, flip, identities, layered_cache, number_cache, tree, write_lines

import forebay as fb
from forebay.errors import CacheNotFound, ChunkCorrupt, ChunkMissing, ForebayError, IndexCorrupt, StoreFull
from forebay.format.tensors import VARIABLE


def test_a_copy_is_a_cache_of_its_own(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    seen: list[fb.Progress] = []
    report = fb.copy(root, tmp_path / "copy", on_progress=seen.append)
    assert (report.copied, report.present, report.generation) == (10, 0, 1)
    assert report.copied_bytes == sum(path.stat().st_size for path in (root / "layers").rglob("0*"))
    assert [moment.done for moment in seen] == list(range(1, 11))
    copied, whole = tree(tmp_path / "copy"), tree(root)
    assert copied == {name: whole[name] for name in whole if name != "generations/000000.safetensors"}
    assert fb.verify(tmp_path / "copy", full=True).sound
    rows = fb.open_cache(tmp_path / "copy", layers=["length"]).read(np.arange(20))
    assert rows["times"].tolist() == fb.open_cache(root, layers=["length"]).read(np.arange(20))["times"].tolist()


def test_a_file_in_the_place_of_a_copy_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cache.pt").write_text("of the old format")
    with pytest.raises(NotADirectoryError, match=r"(?s)it is a file, and a cache is a folder: '.*cache\.pt'"):
        fb.copy(number_cache(tmp_path), tmp_path / "cache.pt")
    assert (tmp_path / "cache.pt").read_text() == "of the old format"


class Interrupted(Exception):
    pass


def test_an_interrupted_copy_is_no_cache_and_goes_on_when_run_again(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)

    def stop(progress: fb.Progress) -> None:
        if progress.done == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        fb.copy(root, tmp_path / "copy", on_progress=stop)
    with pytest.raises(CacheNotFound):
        fb.open_cache(tmp_path / "copy")
    before = identities(tmp_path / "copy")
    report = fb.copy(root, tmp_path / "copy")
    assert (report.copied, report.present) == (6, 4)
    assert {name: fact for name, fact in identities(tmp_path / "copy").items() if name in before} == before
    assert fb.verify(tmp_path / "copy").sound


def test_copying_again_copies_what_is_new_and_mends_what_is_bad(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.copy(root, tmp_path / "copy")
    flip(chunk_path(tmp_path / "copy", "numbers", 2), 4300)
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    report = fb.copy(root, tmp_path / "copy")
    assert (report.copied, report.present, report.generation) == (2, 4, 1)
    assert tree(tmp_path / "copy/layers") == tree(root / "layers")
    assert fb.verify(tmp_path / "copy").sound


@pytest.mark.parametrize("where", [100, 4300])
def test_a_corrupt_chunk_is_refused_and_nothing_is_published(tmp_path: Path, where: int) -> None:
    root = number_cache(tmp_path)
    flip(chunk_path(root, "numbers", 2), where)
    with pytest.raises(
        ChunkCorrupt, match=r"(?s)chunk 2 of layer 'numbers'.*SHA-256 is not the published one.*forebay repair"
    ):
        fb.copy(root, tmp_path / "copy")
    assert not (chunk_path(tmp_path / "copy", "numbers", 2)).exists()
    with pytest.raises(CacheNotFound):
        fb.open_cache(tmp_path / "copy")


def test_a_missing_chunk_and_a_damaged_index_are_refused(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (chunk_path(root, "numbers", 2)).unlink()
    with pytest.raises(ChunkMissing, match="chunk 2"):
        fb.copy(root, tmp_path / "copy")
    flip(recipe_path(root, "numbers"), 50)
    with pytest.raises(IndexCorrupt, match=r"recipes/numbers\.json"):
        fb.copy(root, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_place_that_holds_another_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    root, other = number_cache(tmp_path / "a"), number_cache(tmp_path / "b")
    before = tree(other)
    with pytest.raises(ForebayError, match=r"holds another cache"):
        fb.copy(root, other)
    assert tree(other) == before


def test_copies_go_between_stores_and_keep_their_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    root = number_cache(tmp_path)
    store = fb.MemoryStore()
    fb.copy(root, store)
    fb.copy(store, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(root)
    assert fb.open_cache(store).generation.tagged


def test_a_cache_is_not_copied_onto_or_into_itself(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "link").symlink_to(root)
    before = tree(root)
    for place, said in (
        (root, "is the cache itself"),
        (tmp_path / "link", "is the cache itself"),
        (root / "backup", "lies in the cache at"),
    ):
        with pytest.raises(ForebayError, match=said):
            fb.copy(root, place)
    assert tree(root) == before


class ChangingStore(fb.MemoryStore):
    """Gives other bytes for a chunk at every second reading."""

    readings = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        value = super().read(key, start, stop)
        if "/000002." not in key:
            return value
        self.readings += 1
        return value if self.readings % 2 else value[:-1] + b"?"

    def view(self, key: str, **options) -> memoryview:
        return memoryview(self.read(key))


def test_what_is_hashed_is_what_is_written(tmp_path: Path) -> None:
    store = ChangingStore()
    for name, value in tree(number_cache(tmp_path)).items():
        store.create(name, [value])
    fb.copy(store, tmp_path / "copy")
    assert fb.verify(tmp_path / "copy", full=True).sound


class FullStore(fb.LocalStore):
    def replace(self, key: str, data: object, **options) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_by_the_destination(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    with pytest.raises(StoreFull, match=f"not enough disk space at '{tmp_path / 'copy'}'"):
        fb.copy(root, FullStore(tmp_path / "copy"))


def test_a_folder_with_other_files_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data.jsonl").write_text("mine")
    with pytest.raises(ForebayError, match=r"data\.jsonl"):
        fb.copy(root, tmp_path / "mine")
    assert tree(tmp_path / "mine") == {"data.jsonl": b"mine"}
