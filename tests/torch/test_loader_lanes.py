"""Window shuffle over compressed caches: every block is decoded once an epoch, by one rank."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from tests.helpers.token_caches import numbers_of, token_cache

import forebay as fb
from forebay.errors import EngineUnusable
from forebay.feeding.choose_order import suitable_window
from forebay.feeding.stream import CacheStream
from forebay.order.window import Window, lanes_of
from forebay.recipe import ChunkTarget
from forebay.torch import Ingredient, Loader, Mixture, Ranks

BLOCK, CHUNK = 4, 40


def window(**fields: int) -> Window:
    return Window(**{"rows": 12, "unit": BLOCK, "chunks": 3, "lanes": 8, **fields})


def blocks_of(rows: int) -> int:
    """Stored blocks of the columns `tokens` and `seq_lens`."""
    whole, rest = divmod(rows, CHUNK)
    return 2 * (whole * CHUNK // BLOCK + -(-rest // BLOCK))


def decodes(root: Path, world: int, epochs: int = 1, **options: Any) -> list[int]:
    """How often each rank decoded a block, each in its own cache, as in a process of its own."""
    found = []
    for rank in range(world):
        cache = fb.open_cache(root, memory=100_000)
        loader = Loader(cache, global_batch_size=8, drop_last=False, ranks=Ranks(rank, world), **options)
        for _ in range(epochs):
            numbers_of(loader)
        found.append(cache.statistics().misses)
    return found


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 rows: 16 chunks of 10 blocks, 80 rows to each of 8 lanes."""
    return token_cache(tmp_path_factory.mktemp("even"), 640, codec="zstd", chunk_rows=CHUNK, rows_per_block=BLOCK)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("threads", [0, 2])
def test_each_block_is_decoded_once_whatever_the_world_size(even: Path, world: int, threads: int) -> None:
    counts = decodes(even, world, shuffle=window(), threads=threads)
    assert sum(counts) == blocks_of(640)
    assert counts == [blocks_of(640) // world] * world


def test_what_lanes_have_unevenly_costs_less_than_a_unit_per_lane(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 613, codec="zstd", chunk_rows=CHUNK, rows_per_block=BLOCK)
    for world in (1, 2, 4):
        extra = sum(decodes(root, world, shuffle=window())) - blocks_of(613)
        assert 0 <= extra <= 2 * 8 * BLOCK, "at the end, less than a unit of each lane is read by other ranks"


def test_a_global_shuffle_decodes_blocks_many_times_where_memory_is_short(even: Path) -> None:
    cache = fb.open_cache(even, memory=2000)
    numbers_of(Loader(cache, global_batch_size=8, shuffle="global", threads=0))
    assert cache.statistics().misses > 1.5 * blocks_of(640)


def test_a_window_is_decoded_once_in_half_the_memory_of_the_rows(even: Path) -> None:
    decoded = sum(values.nbytes for values in fb.open_cache(even).read(np.arange(640), ["tokens", "seq_lens"]).values())
    cache = fb.open_cache(even, memory=decoded // 2)
    numbers_of(Loader(cache, global_batch_size=8, threads=0, shuffle=window(rows=16, lanes=4)))
    assert cache.statistics().misses == blocks_of(640)


def test_a_window_is_refused_by_the_lanes_that_a_rank_reads(even: Path) -> None:
    row_bytes = fb.open_cache(even).row_bytes(["tokens", "seq_lens"])
    options: dict[str, Any] = {"global_batch_size": 8, "shuffle": window(lanes=6)}
    for lanes, world in ((6, 1), (3, 2), (3, 8), (1, 6)):
        needed = 2 * lanes * 12 * row_bytes
        options |= {"ranks": Ranks(world - 1, world), "global_batch_size": world}
        Loader(fb.open_cache(even, memory=needed), **options)
        with pytest.raises(EngineUnusable, match=f"(?s)12 rows in {lanes} lanes.*open the cache with memory="):
            Loader(fb.open_cache(even, memory=needed - 1), **options)


@pytest.mark.parametrize(("units", "lanes"), [(12, 8), (8, 8), (63, 32), (1, 1)])
def test_fewer_lanes_are_a_power_of_two_so_that_ranks_share_none(
    even: Path, monkeypatch: pytest.MonkeyPatch, units: int, lanes: int
) -> None:
    cache = fb.open_cache(even)
    unit_bytes = BLOCK * cache.row_bytes(["tokens", "seq_lens"])
    monkeypatch.setattr("forebay.feeding.choose_order.WINDOW_BYTES", units * unit_bytes)
    monkeypatch.setattr("forebay.feeding.choose_order.DEFAULT_MEMORY", 2 * units * unit_bytes)
    found = suitable_window(cache, ["tokens", "seq_lens"])
    assert found == Window(rows=units * BLOCK // lanes, unit=BLOCK, lanes=lanes)
    assert len(lanes_of(0, lanes, found.lanes)) == 1


def test_a_window_of_a_mixture_that_memory_cannot_hold_is_refused_at_the_start_and_on_resume(even: Path) -> None:
    def mixed(memory: int, **order: Any) -> Loader:
        parts = [Ingredient(fb.open_cache(even, memory=limit), weight=1) for limit in (100_000, memory)]
        return Loader(Mixture.of(parts, shuffle="window", **order), global_batch_size=8, threads=0)

    whole = mixed(100_000, window=window(rows=64))
    next(iter(whole))
    with pytest.raises(EngineUnusable, match="open the cache with memory="):
        mixed(1000, window=window(rows=64))
    small = mixed(3000, window=window(rows=4, lanes=1))
    with pytest.raises(EngineUnusable, match="a shuffle window of 64 rows"):
        small.load_state_dict(whole.state_dict())


class Wide(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a megabyte, in blocks of eight."""

    kind: ClassVar[str] = "wide"
    revision: ClassVar[int] = 1

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="wide", dtype="uint8", shape=(1 << 20,), codec="zstd", rows_per_block=8),)

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=16)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        return fb.Rows({"wide": np.zeros((sum(1 for _ in samples), 1 << 20), np.uint8)})


def test_large_blocks_are_mixed_in_as_many_lanes_as_stay_decoded(tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_text("x\n" * 128)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "samples.txt"), Wide(), workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    loader = Loader(cache, global_batch_size=8, columns=["row"])
    assert isinstance(loader.stream, CacheStream)
    assert loader.stream.ordering.window is not None
    assert loader.stream.ordering.window.lanes == 8
    assert sorted(row for batch in loader for row in batch["row"].tolist()) == list(range(128))
    assert cache.statistics().misses == 128 // 8
