"""Rows of chunks that are far away, read by ranges: the right rows, few bytes, and nothing that is not checked."""

import threading
from pathlib import Path

import numpy as np
import pytest
from tests.store.far_stores import FarFolder, Spoiling
from tests.token_caches import token_cache

import forebay as fb
from forebay.feeding import chunk_ahead
from forebay.feeding.chunk_ahead import sparse_cache
from forebay.store import LocalStore
from forebay.store.tiered import TieredStore
from forebay.torch import Loader

CHUNK_ROWS, CHUNKS = 512, 4
COLUMNS = ("tokens", "seq_lens")


class Counting(FarFolder):
    """Counts the bytes of chunks; a whole chunk is sent only when `released` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bytes, self.released = 0, threading.Event()
        self.released.set()

    def sent(self, key: str, start: int, value: bytes) -> bytes:
        if key in self.reads:
            self.bytes += len(value)
            if len(value) == (Path(self.address) / key).stat().st_size and not self.released.wait(60):
                raise AssertionError("the first batch waits for a whole chunk")
        return value


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    return token_cache(folder, CHUNKS * CHUNK_ROWS, chunk_rows=CHUNK_ROWS, sequence_length=256, rows_per_block=4)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_ahead, "LEAST_BYTES", 1)


def remote(far: LocalStore, tmp_path: Path) -> fb.Cache:
    return fb.open_cache(TieredStore(LocalStore(tmp_path / "tier"), far, reserve_bytes=0))


def some_rows(cache: fb.Cache) -> np.ndarray:
    return np.array([3, len(cache) - 1, 5, CHUNK_ROWS + 7, 3])


def assert_same(found: fb.Cache, root: Path, rows: np.ndarray) -> None:
    right, read = fb.open_cache(root).read(rows, COLUMNS), found.read(rows, COLUMNS)
    assert np.array_equal(read["tokens"], right["tokens"])
    assert [each.tolist() for each in read["seq_lens"]] == [each.tolist() for each in right["seq_lens"]]


def test_rows_are_read_with_few_bytes_and_no_whole_chunk(root: Path, tmp_path: Path) -> None:
    far = Counting(root)
    cache = remote(far, tmp_path)
    far.released.clear()
    rows = some_rows(cache)
    found = sparse_cache(cache, rows, COLUMNS)
    assert found is not None
    assert_same(found, root, rows)
    assert 0 < far.bytes < int(cache.chunk_bytes(COLUMNS)[:3].sum()) // 4
    assert cache.store.transfers().bytes_fetched == far.bytes


def test_rows_that_were_not_asked_for_come_from_whole_chunks(root: Path, tmp_path: Path) -> None:
    cache = remote(Counting(root), tmp_path)
    found = sparse_cache(cache, some_rows(cache), COLUMNS)
    assert found is not None
    assert_same(found, root, np.arange(len(cache)))


STRIDES = [pytest.param(997, id="some"), pytest.param(1, id="every", marks=pytest.mark.long)]


@pytest.mark.parametrize("stride", STRIDES)
def test_a_byte_that_flips_on_the_way_is_never_served(root: Path, tmp_path: Path, stride: int) -> None:
    far, rows = Spoiling(root, times=0), np.array([5])
    cache = remote(far, tmp_path)
    met = 0
    for offset in range(0, int(cache.chunk_bytes(COLUMNS)[0]), stride):
        far.offset, far.times = offset, 1
        assert_same(sparse_cache(cache, rows, COLUMNS) or cache, root, rows)
        met += far.times == 0
        cache.store.tier.clean()
        cache = remote(far, tmp_path)
    assert met >= 4


def test_chunks_that_are_here_small_or_wanted_whole_are_not_read_by_ranges(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sparse_cache(fb.open_cache(root), np.array([5]), COLUMNS) is None
    cache = remote(Counting(root), tmp_path)
    assert sparse_cache(cache, np.arange(len(cache)), COLUMNS) is None
    monkeypatch.setattr(chunk_ahead, "LEAST_BYTES", 1 << 30)
    assert sparse_cache(cache, np.array([5]), COLUMNS) is None
    monkeypatch.setattr(chunk_ahead, "LEAST_BYTES", 1)
    cache.open_chunk(0, COLUMNS)
    assert sparse_cache(cache, np.array([5]), COLUMNS) is None


def test_what_a_cache_says_of_its_chunks_does_not_fill_the_memory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's generation may declare any size, and a stranger's chunk one block of all its rows."""
    far = Counting(root)
    cache, row = remote(far, tmp_path), np.array([5])
    declared = int(cache.chunk_bytes(COLUMNS)[0])
    monkeypatch.setattr(chunk_ahead, "MOST_BYTES", declared - 1)
    assert sparse_cache(cache, row, COLUMNS) is None
    assert far.bytes == 0  # nothing was reserved, or fetched
    monkeypatch.setattr(chunk_ahead, "MOST_BYTES", declared)
    head = cache.record("tokens", 0).head_size
    monkeypatch.setattr(chunk_ahead, "MOST_SHARE", 2 * head / declared)
    monkeypatch.setattr(chunk_ahead._Wanted, "estimated_bytes", 0)
    monkeypatch.setattr(chunk_ahead._Wanted, "ranges", lambda wanted, file: [(0, wanted.record.size)])
    assert sparse_cache(cache, row, COLUMNS) is None
    assert far.bytes == head


def test_a_key_asks_for_whole_chunks(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fb.copy(root, tmp_path / "keyed")
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "00" * 32)
    fb.rekey(tmp_path / "keyed")
    cache = remote(Counting(tmp_path / "keyed"), tmp_path)
    assert cache.generation.tagged
    assert sparse_cache(cache, np.array([5]), COLUMNS) is None


def test_a_missing_chunk_is_left_to_its_reader(root: Path, tmp_path: Path) -> None:
    fb.copy(root, tmp_path / "far")
    (tmp_path / "far/layers/tokens/000000.safetensors").unlink()
    cache = remote(FarFolder(tmp_path / "far"), tmp_path)
    assert sparse_cache(cache, np.array([5]), COLUMNS) is None


def test_a_first_batch_does_not_wait_for_whole_chunks(root: Path, tmp_path: Path) -> None:
    far = Counting(root)
    order = {"global_batch_size": 8, "shuffle": "window", "seed": 3}
    loader = Loader(remote(far, tmp_path), **order)
    far.released.clear()
    batches = iter(loader)
    found = [next(batches)]
    far.released.set()
    found += batches
    right = list(Loader(fb.open_cache(root), window=loader.stream.ordering.window, **order))
    assert len(found) == len(right)
    assert all(np.array_equal(one["tokens"], other["tokens"]) for one, other in zip(found, right, strict=True))
