"""Loaders over a tier: the chunks of the next windows are fetched ahead, once, and a node keeps its part."""

import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.builders import wait_until
from tests.helpers.option_pairs import more
from tests.helpers.token_caches import numbers_of, token_cache
from tests.store.far_stores import FarFolder
from torch.utils.data import DataLoader

import forebay as fb
from forebay.errors import StoreRefused, StoreUnavailable
from forebay.feeding.fetch import ChunkAhead, chunks_needed
from forebay.order.window import Window
from forebay.store import LocalStore, open_store
from forebay.store.tiered import TieredStore
from forebay.torch import CacheDataset, Ingredient, Loader, Mixture, Ranks

ROWS, CHUNK = 1000, 10  # 100 chunks
WINDOW = Window(rows=8, chunks=2, lanes=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("far"), ROWS, chunk_rows=CHUNK)


def data_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "layers").glob("tokens.*/0*.safetensors"))


def tiered(root: Path, tier: Path, limit: int | None = None) -> TieredStore:
    return TieredStore(LocalStore(tier), FarFolder(root), limit_bytes=limit)


def loader_of(store: TieredStore, **options: object) -> Loader:
    options = {"global_batch_size": 20, "shuffle": WINDOW, **options}
    return Loader(fb.open_cache(store), **options)


@pytest.mark.slow
def test_a_tier_of_half_the_data_gives_half_of_the_chunks_in_later_epochs(root: Path, tmp_path: Path) -> None:
    for epoch in range(4):  # each in a job that begins anew, with nothing open
        store = tiered(root, tmp_path / "tier", data_bytes(root) // 2)
        loader = loader_of(store, growth="epoch")  # fetches nothing of the next epoch, which may have grown
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
        assert sorted(row for batch in numbers_of(loader) for row in batch) == list(range(ROWS))
        found = store.transfers()
        assert found.hits + found.misses == ROWS // CHUNK, "each chunk is asked for once"
        assert found.bytes_fetched <= data_bytes(root)
        if epoch:
            assert 0.48 <= loader.statistics().hit_rate <= 0.52
            assert 0.48 <= found.bytes_fetched / data_bytes(root) <= 0.52
            assert "tier hit rate" in str(loader.statistics())


def test_a_tier_of_a_nodes_part_makes_later_epochs_free_of_downloads(root: Path, tmp_path: Path) -> None:
    share = data_bytes(root) // 4
    for rank in range(4):
        store = tiered(root, tmp_path / f"tier-{rank}", share + 2 * share // 25)
        loader = loader_of(store, ranks=Ranks(rank, 4))
        numbers_of(loader)
        fetched = store.transfers().bytes_fetched
        assert fetched <= share + 2 * share // 25, "its part, and the chunks at the edges of its lane"
        numbers_of(loader)
        numbers_of(loader)
        loader._fetcher._ahead.stop()
        assert store.transfers().bytes_fetched == fetched


def test_batches_are_those_of_the_cache_without_a_tier(root: Path, tmp_path: Path) -> None:
    far = loader_of(tiered(root, tmp_path / "tier"))
    near = Loader(fb.open_cache(root), global_batch_size=20, shuffle=WINDOW)
    for _ in range(2):
        assert numbers_of(far) == numbers_of(near)


def test_chunks_are_named_in_the_order_and_at_the_place_of_their_first_use(root: Path) -> None:
    cache = fb.open_cache(root)
    loader = Loader(cache, global_batch_size=20, ranks=Ranks(1, 2), shuffle=WINDOW)
    needs = chunks_needed(loader.stream, Ranks(1, 2), (0, 100), lambda epoch: 1000 if epoch < 2 else 0)
    expected = []
    for epoch, start in ((0, 100), (1, 0)):
        seen = set()
        for position in range(start + 1 if start % 2 == 0 else start, 1000, 2):
            row = int(loader.stream.locate(epoch, np.array([position])).rows[0])
            if row // CHUNK not in seen:
                seen.add(row // CHUNK)
                expected.append(((epoch, position), 0, row // CHUNK))
    assert [tuple(need) for need in needs] == expected


def test_no_more_than_the_allowed_bytes_are_fetched_ahead(root: Path, tmp_path: Path) -> None:
    store = tiered(root, tmp_path / "tier")
    cache = fb.open_cache(store)
    stream = Loader(cache, global_batch_size=20, shuffle=WINDOW).stream
    sizes = cache.chunk_bytes(["tokens"])
    ahead = ChunkAhead(stream, ["tokens"], Ranks(0, 1), (0, 0), lambda epoch: ROWS, int(sizes.max()) * 5)
    settle(store, at_least=5)
    first = store.transfers().fetched
    assert 5 <= first <= 8, "the chunk of the first position, and five or a little more ahead"
    ahead.reached((0, 500))
    needed = {row // CHUNK for row in stream.locate(0, np.arange(501)).rows.tolist()}
    settle(store, at_least=len(needed))
    assert len(needed) <= store.transfers().fetched <= len(needed) + 8
    ahead.stop()


def test_fetching_continues_beyond_the_end_of_the_epoch(root: Path, tmp_path: Path) -> None:
    store = tiered(root, tmp_path / "tier", limit=0)
    loader = loader_of(store, fetch_ahead=100_000)
    loader.load_state_dict({**loader.state_dict(), "position": 980})
    numbers_of(loader)
    chunks = {row // CHUNK for row in loader.stream.locate(0, np.arange(980, ROWS)).rows.tolist()}
    settle(store, at_least=len(chunks) + 1)
    assert store.transfers().fetched > len(chunks), "chunks of the next epoch"
    ahead = loader._fetcher._ahead
    next(iter(loader))
    assert loader._fetcher._ahead is ahead


def test_a_small_cache_is_not_gone_through_for_many_epochs_ahead(root: Path, tmp_path: Path) -> None:
    stream = Loader(fb.open_cache(tiered(root, tmp_path / "tier")), global_batch_size=20).stream
    located: list[int] = []

    def end(epoch: int) -> int:
        located.append(epoch)
        return ROWS

    ahead = ChunkAhead(stream, ["tokens"], Ranks(0, 1), (0, 0), end, ahead_bytes=1 << 40)
    for reached in (0, 1):
        ahead.reached((reached, 0))
        limit = time.monotonic() + 60
        while max(located, default=0) < reached + 2 and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.2)
        assert max(located) == reached + 2, "the epoch after the next is located, and not fetched"
    ahead.stop()


class Watched(FarFolder):
    """Notes which thread read a chunk."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.threads: list[str] = []

    def sent(self, key: str, start: int, value: bytes) -> bytes:
        if key.startswith("layers/"):
            self.threads.append(threading.current_thread().name)
        return value


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["pinned", "epoch", "within"])
def test_chunks_are_fetched_ahead_in_every_epoch(root: Path, tmp_path: Path, growth: str) -> None:
    far = Watched(root)
    store = TieredStore(LocalStore(tmp_path / "tier"), far, limit_bytes=0)
    cache = fb.open_cache(store, max_maps=40)  # chunks are closed, and fetched again
    options = {"shuffle": WINDOW, "growth": growth, "threads": 0, "fetch_ahead": 20_000}
    loader = Loader(cache, global_batch_size=20, **options)
    for _ in range(3):
        far.threads.clear()
        for _, number in zip(loader, range(50), strict=True):
            if number < 20:
                time.sleep(0.01)
        wait_until(lambda: any(name.startswith("forebay-fetch") for name in far.threads), seconds=20)


def test_one_missing_copy_is_fetched_ahead(root: Path, tmp_path: Path) -> None:
    numbers_of(loader_of(tiered(root, tmp_path / "tier")))
    sorted((tmp_path / "tier" / "caches").glob("*/chunks/*"))[0].unlink()
    store = tiered(root, tmp_path / "tier")
    loader = loader_of(store)
    assert sorted(row for batch in numbers_of(loader) for row in batch) == list(range(ROWS))
    assert store.transfers().fetched == 1


def settle(store: TieredStore, at_least: int) -> None:
    """Wait until enough is fetched, and then until nothing more is."""
    wait_until(lambda: store.transfers().fetched >= at_least)
    before = -1
    while store.transfers().fetched != before:
        before = store.transfers().fetched
        time.sleep(0.1)


def test_a_mixture_of_a_remote_and_a_local_cache_fetches_only_the_remote_one(root: Path, tmp_path: Path) -> None:
    store = tiered(root, tmp_path / "tier")
    local = token_cache(tmp_path / "local", 50, chunk_rows=10)
    mixture = Mixture.of([Ingredient(fb.open_cache(store), weight=1), Ingredient(fb.open_cache(local), weight=1)])
    loader = Loader(mixture, global_batch_size=10)
    assert len(list(loader)) == 105
    assert store.transfers().fetched <= ROWS // CHUNK


def test_threads_end_with_the_loader(root: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    loader = loader_of(tiered(root, tmp_path / "tier"), fetch_ahead=1)
    next(iter(loader))
    assert {thread.name[:13] for thread in set(threading.enumerate()) - before} >= {"forebay-fetch"}
    del loader
    end = time.monotonic() + 600
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_error_of_the_far_store_is_raised_at_the_batch(root: Path, tmp_path: Path) -> None:
    copied = tmp_path / "far"
    fb.copy(root, copied)
    store = tiered(copied, tmp_path / "tier")
    loader = loader_of(store)
    Path(f"{copied}.offline").touch()
    with pytest.raises(StoreUnavailable, match="cut off"):
        next(iter(loader))


@pytest.mark.parametrize("method", ["fork", *more("spawn", "forkserver")])
def test_workers_of_a_dataloader_read_through_the_tier(root: Path, tmp_path: Path, method: str) -> None:
    store = tiered(root, tmp_path / "tier")
    dataset = CacheDataset(fb.open_cache(store))
    loader = DataLoader(dataset, batch_size=100, num_workers=2, multiprocessing_context=method)
    rows = [row for batch in loader for row in batch["tokens"][:, 0].tolist()]
    assert rows == list(range(ROWS))
    kept = list((tmp_path / "tier" / "caches").glob("*/chunks/*"))
    assert len(kept) == ROWS // CHUNK


@pytest.mark.parametrize("is_filled", [True, False])
def test_a_forked_process_reads_a_bucket_only_through_a_filled_tier(
    root: Path, tmp_path: Path, is_filled: bool
) -> None:
    """The client of a bucket hangs in a process that was forked after its use."""
    far = open_store(f"memory://forked-{is_filled}")
    fb.copy(root, far)
    cache = fb.open_cache(far, tier=tmp_path / "tier")
    cache.read(np.arange(ROWS) if is_filled else [0], ["tokens"])
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=read_all, args=(cache, results))
    child.start()
    rows, problem = results.get(timeout=600)
    child.join(60)
    assert child.exitcode == 0
    assert rows == (list(range(ROWS)) if is_filled else [])
    assert is_filled or "`forebay tier fill`" in problem


def read_all(cache: fb.Cache, results: "multiprocessing.Queue[tuple[list[int], str]]") -> None:
    try:
        results.put((cache.read(np.arange(ROWS), ["tokens"])["tokens"][:, 0].tolist(), ""))
    except StoreRefused as error:
        results.put(([], str(error)))
