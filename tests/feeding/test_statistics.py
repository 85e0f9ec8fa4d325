"""Statistics of a loader: right against injected delays, and small enough to be always on."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.store import LocalStore
from forebay.store.base import Expected
from forebay.torch import Loader, LoaderStatistics

DELAY = 0.04


class SlowStore(LocalStore):
    """A folder whose chunks take long to open, as from a bucket. It measures its own delays."""

    opened, slept = 0, 0.0

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        if key.startswith("layers/tokens.") and "/0" in key:
            self.opened += 1
            self.slept += sleep(DELAY)
        return super().view(key, expect=expect)


class SlowTransform:
    slept = 0.0

    def __call__(self, batch: dict[str, Any], coins: object) -> dict[str, Any]:
        self.slept += sleep(DELAY / 3)
        return batch


def sleep(seconds: float) -> float:
    started = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - started


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return token_cache(tmp_path, 80, chunk_rows=10)  # 8 chunks


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_waits_for_the_store_and_for_gathering_are_counted_once_and_apart(root: Path, threads: int) -> None:
    """A thread that opens a chunk does not gather meanwhile: both together take no longer than it ran."""
    store, transform = SlowStore(root), SlowTransform()
    cache = fb.open_cache(store)
    cache.row_bytes(cache.default_columns)  # opens a chunk
    before, began = store.slept, time.perf_counter()
    loader = Loader(cache, global_batch_size=4, shuffle=None, threads=threads, transform=transform)
    batches = sum(1 for _ in loader)
    found, opening, gathering = loader.statistics(), store.slept - before, transform.slept
    ran = max(1, threads) * (time.perf_counter() - began)
    assert (found.batches, batches, store.opened) == (20, 20, 8)
    assert opening <= found.opening <= ran - gathering
    assert gathering <= found.gathering <= ran - opening
    assert found.waited_tier <= found.waited <= found.seconds + 1e-6
    if threads == 0:  # nothing is made ahead: every delay is waited for
        assert opening <= found.waited_tier <= ran - gathering
        assert opening + gathering <= found.waited <= ran


def test_the_time_of_training_steps_is_not_waiting(root: Path) -> None:
    began = time.perf_counter()
    loader = Loader(fb.open_cache(root), global_batch_size=4, threads=1)
    stepped = sum(sleep(0.02) for _ in loader)
    found, ran = loader.statistics(), time.perf_counter() - began
    assert stepped <= found.seconds <= ran
    assert found.waited <= ran - stepped


def test_a_loader_that_yielded_nothing_has_nothing_to_say(root: Path) -> None:
    loader = Loader(fb.open_cache(root), global_batch_size=4)
    assert loader.statistics() == LoaderStatistics()
    assert str(loader.statistics()) == "no batch was made yet"


def test_statistics_are_json_and_a_file_that_is_replaced(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "statistics-{rank}.json"
    path.parent.mkdir()
    loader = Loader(fb.open_cache(root), global_batch_size=4, statistics_file=path)
    for _ in loader:
        pass
    written = json.loads((tmp_path / "run" / "statistics-0.json").read_text())
    assert written["batches"] >= 1
    assert written["verdict"].startswith("the run waited")
    assert [entry.name for entry in path.parent.iterdir()] == ["statistics-0.json"], "at most once a second, atomically"
    record = msgspec.json.encode(loader.statistics())
    assert msgspec.json.decode(record, type=LoaderStatistics) == loader.statistics()
