"""What training from a remote cache fetches: the estimate is what a real run does."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.token_caches import numbers_of, token_cache
from tests.store.far_stores import FarFolder

import forebay as fb
from forebay.order.window import Window
from forebay.store import LocalStore
from forebay.store.tiered import TieredStore
from forebay.torch import Loader, Ranks

WINDOW = Window(rows=8, chunks=2, lanes=8)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("far"), 600, chunk_rows=10)  # 60 chunks


def tiered(root: Path, tier: Path, limit: int | None = None) -> TieredStore:
    return TieredStore(LocalStore(tier), FarFolder(root), limit_bytes=limit)


def fetched_in(store: TieredStore, epoch: int, ranks: range, world: int) -> int:
    """The bytes that the ranks of one node fetch in an epoch."""
    before = store.transfers().bytes_fetched
    for rank in ranks:
        share = Ranks(rank, world)
        loader = Loader(fb.open_cache(store), global_batch_size=12, shuffle=WINDOW, ranks=share, threads=0)
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
        loader._growing.policy = "epoch"  # fetch nothing of the next epoch
        numbers_of(loader)
    return store.transfers().bytes_fetched - before


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("share", [None, 0.5])
def test_an_estimate_is_what_a_run_fetches(
    root: Path, tmp_path: Path, nodes: int, ranks: int, share: float | None
) -> None:
    cache = fb.open_cache(root)
    whole = fb.estimate_remote(root, nodes=nodes, ranks_per_node=ranks, window=WINDOW)
    limit = None if share is None else int(whole.node_bytes * share)
    found = fb.estimate_remote(root, nodes=nodes, ranks_per_node=ranks, tier_bytes=limit, window=WINDOW)
    world, first, later = nodes * ranks, [], []
    for node in range(nodes):
        store, own = tiered(root, tmp_path / f"tier-{node}", limit), range(node * ranks, (node + 1) * ranks)
        first.append(fetched_in(store, 0, own, world))
        later.append(fetched_in(tiered(root, tmp_path / f"tier-{node}", limit), 1, own, world))
    size = int(cache.chunk_bytes(cache.default_columns).max())
    shared = 0 if share is None else (ranks - 1) * size * 4  # a chunk that passes by two ranks is fetched by each
    assert found.first_epoch_bytes <= max(first) <= found.first_epoch_bytes + shared
    assert abs(max(later) - found.later_epoch_bytes) <= shared + (0 if share is None else size)
    if share is None:
        assert (max(later), found.later_epoch_bytes, found.hit_rate) == (0, 0, 1.0)


def test_a_node_whose_ranks_divide_the_lanes_needs_its_part(root: Path) -> None:
    found = fb.estimate_remote(root, nodes=4, window=WINDOW)
    assert found.bytes / 4 <= found.node_bytes <= found.bytes / 4 + 2 * found.bytes / 60
    assert found.node_chunks in (15, 16, 17)
    assert found.first_epoch_requests == found.node_chunks
    assert found.first_batch_seconds == pytest.approx(3 * 0.02 + found.first_batch_bytes / 125e6)
    assert found.first_batch_chunks <= 8


def test_a_tier_that_was_warmed_for_a_node_needs_no_download(root: Path, tmp_path: Path) -> None:
    seen: list[fb.Progress] = []
    share = {"node": 1, "nodes": 2, "ranks_per_node": 2, "window": WINDOW}
    fill = fb.warm_cache(FarFolder(root), tmp_path / "tier", on_progress=seen.append, **share)
    assert fill.fetched_chunks == fill.chunks < 60
    assert [moment.done for moment in seen] == [*range(1, fill.chunks + 1)]
    assert seen[-1].read_bytes == fill.fetched_bytes
    assert fill.refused_chunks == 0
    assert fetched_in(tiered(root, tmp_path / "tier"), 0, range(2, 4), 4) == 0
    assert fetched_in(tiered(root, tmp_path / "tier"), 0, range(2), 4) > 0


@pytest.mark.parametrize(
    ("share", "problem"),
    [
        ({"node": 2, "nodes": 2}, "node must be from 0 to 1"),
        ({"nodes": 2}, r"nodes=2 needs node=, from 0 to 1; leave out both to fetch all chunks"),
    ],
)
def test_warm_cache_rejects_a_node_that_does_not_exist(root: Path, tmp_path: Path, share: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fb.warm_cache(root, tmp_path / "tier", **share)


def test_warming_fetches_nothing_that_the_tier_does_not_admit(root: Path, tmp_path: Path) -> None:
    fill = fb.warm_cache(FarFolder(root), tmp_path / "tier", tier_bytes=20_000)
    assert fill.fetched_bytes <= 20_000
    assert fill.refused_chunks == fill.chunks - fill.fetched_chunks > 0


@pytest.mark.parametrize("count", ["nodes", "ranks_per_node", "batch_size"])
def test_an_estimate_for_no_node_rank_or_row_is_refused(tmp_path: Path, count: str) -> None:
    with pytest.raises(ValueError, match=rf"{count} must be a whole number of at least 1 \(got 0\)"):
        fb.estimate_remote(tmp_path, **{count: 0})
