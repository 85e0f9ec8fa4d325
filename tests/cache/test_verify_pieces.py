"""Verifying a disk that is failing, and files that change under it: a report, never a signal."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.cli.running import run
from tests.format.made import encode
from tests.helpers.cache_files import chunk_key, real_key
from tests.helpers.layer_recipes import LineRecipe, number_cache

import forebay as fb
from forebay.columns import DTYPES, Column, Dtype
from forebay.errors import IndexCorrupt
from forebay.format.chunk_file import ChunkFile
from forebay.source import Source
from forebay.store import LocalStore, retries
from forebay.store.base import PIECE_BYTES, Buffer, Missing, Pieces, load_index


class BadSectors(LocalStore):
    """A folder on a disk on which no chunk can be read."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key.startswith("layers/") and "recipe" not in key:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(key, start, stop)


class Counting(LocalStore):
    """A folder that counts the bytes read from it."""

    count = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        read = super().read(key, start, stop)
        Counting.count += len(read)
        assert Counting.count < 64 << 20, "far more is read than the cache has"
        return read


class Shrinking(LocalStore):
    """A folder in which somebody truncates a chunk once its bytes were found right."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        read = super().read(key, start, stop)
        if key.startswith("layers/") and stop is not None and len(read) < stop - start:  # up to its end
            os.truncate(os.path.join(self.address, key), 5000)
        return read


@pytest.mark.parametrize("full", [False, True])
def test_a_bad_sector_is_reported_and_does_not_end_the_process(tmp_path: Path, full: bool) -> None:
    fb.build(tmp_path / "cache", lines_source(tmp_path), fb.RawRecipe(), workers=0)
    report = fb.verify(BadSectors(tmp_path / "cache"), full=full)
    assert [bad.problem for bad in report.bad] == ["it cannot be read: [Errno 5] Input/output error"]
    assert report.bad[0].key == chunk_key(tmp_path / "cache", "raw", 0)


def test_a_file_that_shrinks_while_it_is_verified_is_reported(tmp_path: Path) -> None:
    fb.build(tmp_path / "cache", lines_source(tmp_path), fb.RawRecipe(codec="none"), workers=0)
    (bad,) = fb.verify(Shrinking(tmp_path / "cache"), full=True).bad
    assert (
        bad.problem
        == f"it cannot be read: '{chunk_key(tmp_path / 'cache', 'raw', 0)}' became shorter while it was read"
    )


def lines_source(tmp_path: Path) -> Source:
    (tmp_path / "lines.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(5000)))
    return fb.sources.lines(tmp_path / "lines.txt")


class LargestRead(LocalStore):
    """A folder that remembers how much was read at once."""

    largest = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        read = super().read(key, start, stop)
        self.largest = max(self.largest, len(read))
        return read


@pytest.mark.parametrize("column", ["uint8", "bool"])
def test_a_bad_block_is_found_without_reading_all_of_it_at_once(tmp_path: Path, column: Dtype) -> None:
    store = LargestRead(tmp_path)
    values = np.ones(3 * PIECE_BYTES + 5, DTYPES[column][1])
    declared = Column(name="values", dtype=column, codec="none", rows_per_block=len(values))
    store.create("chunk", encode({"values": values}, [declared]).buffers)
    file = ChunkFile(Pieces(store, "chunk"), "chunk")
    assert file.bad_blocks("values") == []
    start, stop = file.check("values").span(0)
    with open(tmp_path / "chunk", "r+b") as stored:
        stored.seek(stop - 1)
        stored.write(b"\x07")
    file = ChunkFile(Pieces(store, "chunk"), "chunk")
    assert file.bad_blocks("values") == [(0, (start, stop))]
    assert file.check("values").problem(0) == "its bytes do not match their checksum"
    assert store.largest == PIECE_BYTES


class FailingDisk(LocalStore):
    """A folder on a disk on which one file cannot be read, and on which mapping that file would end the process."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self._key = key

    def view(self, key: str, **options) -> memoryview:
        assert key != self._key, "a bad sector of a map is a signal"
        return super().view(key, **options)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key == self._key:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(key, start, stop)

    def replace(self, key: str, data: Sequence[Buffer], **options) -> None:
        super().replace(key, data, **options)
        self._key = "" if key == self._key else self._key


@pytest.mark.parametrize("key", ["generations/000001.safetensors", "plan/000000.safetensors"])
def test_a_bad_sector_of_the_index_is_reported_and_repaired(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "DISK", retries.RetryPolicy(retries=1, first_wait=0))
    source = lines_source(tmp_path)
    fb.build(tmp_path / "cache", source, fb.RawRecipe(chunk_bytes=9000), workers=0, end_chunk=1)
    fb.build(tmp_path / "cache", source, fb.RawRecipe(chunk_bytes=9000), workers=0)
    store = FailingDisk(tmp_path / "cache", key)
    report = fb.verify(store)
    assert [bad.key for bad in report.bad] == [key]
    assert "it cannot be read: Input/output error" in report.bad[0].problem
    assert fb.repair(store, workers=0).failed == {}
    assert fb.verify(store, full=True).sound
    assert len(fb.open_cache(store)) == 5000


def test_an_index_is_never_mapped_before_all_of_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "DISK", retries.RetryPolicy(retries=1, first_wait=0))
    store = LocalStore(tmp_path)
    store.create("small", [bytes(1000)])
    store.create("large", [bytes(PIECE_BYTES), b"end"])
    assert load_index(store, "small") == bytes(1000)
    assert load_index(store, "large") == load_index(store, "large", in_memory=100) == bytes(PIECE_BYTES) + b"end"
    for limit in (0, PIECE_BYTES * 2):
        with pytest.raises(IndexCorrupt, match="it cannot be read: Input/output error"):
            load_index(FailingDisk(tmp_path, "large"), "large", in_memory=limit)
    with pytest.raises(Missing):
        load_index(store, "absent")


def test_a_full_check_takes_the_same_limit_of_a_block_as_reading_does(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    fb.build(root, lines_source(tmp_path), fb.RawRecipe(codec="zstd"), workers=0)
    assert fb.verify(root, full=True).sound
    (bad,) = fb.verify(root, full=True, max_block_bytes=100).bad
    assert "bytes at once, but max_block_bytes is 100; if you trust this cache, pass --max-block-bytes" in bad.problem
    assert run("verify", root, "--full", "--max-block-bytes", "100", "--json", code=1).json["bad"][0]["key"] == bad.key
    assert fb.verify(root, max_block_bytes=100).sound, "only a full check decodes"
    with pytest.raises(ValueError, match="max_block_bytes must be"):
        fb.verify(root, max_block_bytes=0)


@pytest.mark.parametrize("layer", ["layers/numbers", "plan"])
def test_a_sparse_file_of_a_tebibyte_is_refused_by_its_size(tmp_path: Path, layer: str) -> None:
    root = number_cache(tmp_path)
    key = real_key(root, f"{layer}/000000.safetensors")
    os.truncate(root / key, 1 << 40)
    Counting.count = 0
    store = Counting(root)
    report = fb.verify(store)
    assert [bad.key for bad in report.bad] == [key]
    fb.repair(store, source=fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert fb.verify(store).sound
