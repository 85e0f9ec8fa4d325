"""Values read in pieces are the values, and an error of the disk is an exception."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from forebay.errors import Damaged
from forebay.store import LocalStore, MemoryStore
from forebay.store.base import PIECE_BYTES, Missing, Pieces, cut, read_document, sha256_of


class BadSector(LocalStore):
    """A folder on a disk that cannot be read from some byte on."""

    bad = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None or stop > self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(key, start, stop)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 4095, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 77])
def test_every_slice_is_that_of_the_whole_value(tmp_path: Path, size: int) -> None:
    value = os.urandom(size)
    for store in (LocalStore(tmp_path), MemoryStore()):
        store.create("x", [value])
        pieces = Pieces(store, "x")
        assert len(pieces) == size
        assert pieces.sha256 == hashlib.sha256(value).digest() == sha256_of(memoryview(value)) == sha256_of(pieces)
        ends = (0, 1, 8, size // 2, PIECE_BYTES - 1, PIECE_BYTES, size - 1, size, size + 5)
        for start in ends:
            for stop in ends:
                assert pieces[max(0, start) : max(0, stop)] == value[max(0, start) : max(0, stop)]
        assert b"".join(cut(pieces, 0, size)) == value


def test_a_missing_value_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Pieces(LocalStore(tmp_path), "x")


def test_a_value_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("x", [bytes(10_000)])
    pieces = Pieces(store, "x")
    os.truncate(tmp_path / "x", 9_000)
    with pytest.raises(OSError, match="'x' became shorter while it was read"):
        pieces[8_500:9_500]


def test_a_bad_sector_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = BadSector(tmp_path)
    store.create("x", [bytes(10_000)])
    with pytest.raises(OSError, match="Input/output error"):
        sha256_of(Pieces(store, "x"))


def test_a_document_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.base.MAX_DOCUMENT_BYTES", 1 << 20)
    store = MemoryStore()
    store.create("small", [b"{}"])
    store.create("large", [bytes(1 << 20), b"x"])
    assert read_document(store, "small") == b"{}"
    with pytest.raises(Damaged, match="'large'"):
        read_document(store, "large")
    with pytest.raises(Missing):
        read_document(store, "nothing")
