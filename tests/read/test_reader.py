"""Reading: rows by number in any order, joined over chunks and codecs, each block checked before it is believed."""

import gc
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.format.made import CODECS, column_declared, raw, rows_of
from tests.helpers.cache_files import chunk_path
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.layer_recipes import LineRecipe, flip, layered_cache, number_cache, stored_cache, write_lines
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.columns import DTYPES, Array, Column, Ragged
from forebay.errors import CacheNotFound, ChunkCorrupt, ChunkMissing, NotFound
from forebay.format.chunk_file import ChunkFile

EVERYTHING = [
    *(Column(name=f"{dtype}_{codec}", dtype=dtype, codec=codec, rows_per_block=2) for dtype in DTYPES for codec in ("none", "zstd")),  # type: ignore[arg-type]  # noqa: E501
    *(
        Column(name=f"{'ragged' if ragged else 'fixed'}_{codec}_{level}", dtype="float32", shape=(2, 3), codec=codec, level=level, ragged=ragged, rows_per_block=3)  # type: ignore[arg-type]  # noqa: E501
        for codec, level in CODECS
        for ragged in (True, False)
    ),
]  # fmt: skip
ROWS = [3, 0, 7, 1, 0, 5]  # of each chunk


def built_rows(declared: list[Column], rows: list[int]) -> list[dict[str, Array | Ragged]]:
    return [
        {column.name: rows_of(column, count, 100 * chunk + seed) for seed, column in enumerate(declared)}
        for chunk, count in enumerate(rows)
    ]


def joined_rows(column: Column, chunks: list[dict[str, Array | Ragged]]) -> list[Array]:
    """Every row of a column, one array each."""
    return [values[row] for chunk in chunks for values in [chunk[column.name]] for row in range(len(values))]


def picked(column: Column, chunks: list[dict[str, Array | Ragged]], numbers: list[int]) -> Array | Ragged:
    """What reading some rows is defined as."""
    rows = joined_rows(column, chunks)
    if column.ragged:
        return Ragged.of([rows[number] for number in numbers], column.array_dtype, column.shape)
    every = np.array(rows, column.array_dtype).reshape(len(rows), *column.shape)
    return every[np.array(numbers, np.int64)]


@pytest.fixture(scope="module")
def everything() -> tuple[fb.Cache, list[dict[str, Array | Ragged]]]:
    store = fb.MemoryStore()
    chunks = built_rows(EVERYTHING, ROWS)
    stored_cache(store, EVERYTHING, chunks)
    return fb.open_cache(store), chunks


def test_a_row_has_every_column_and_is_counted_from_both_ends(everything: Any) -> None:
    cache, chunks = everything
    assert len(cache) == sum(ROWS)
    for number in (0, 2, 3, 9, 10, 15, -1, -16):
        row = cache[number]
        assert list(row) == [column.name for column in EVERYTHING]
        for column in EVERYTHING:
            expected = joined_rows(column, chunks)[number]
            assert raw(np.asarray(row[column.name])) == raw(np.asarray(expected)), column.name


@pytest.mark.parametrize("number", [16, -17, 2**70, -(2**70)])
def test_a_row_out_of_range_is_an_index_error_that_names_the_cache(everything: Any, number: int) -> None:
    with pytest.raises(IndexError, match=rf"there is no row {number}; 'memory' has 16 rows"):
        everything[0][number]


@pytest.mark.parametrize("columns", [None, []])
@pytest.mark.parametrize("numbers", [[0, 16], [-1], [3, -1, 2], np.array([2**63], np.uint64)])
def test_reading_rows_that_are_not_there_is_an_index_error(everything: Any, numbers: Any, columns: Any) -> None:
    with pytest.raises(IndexError, match=r"there is no row .*; 'memory' has 16 rows"):
        everything[0].read(numbers, columns)


@pytest.mark.parametrize("numbers", [[0.0], [True, False], [[0, 1]], "ab", 3, [2**70]])
def test_rows_are_whole_numbers_in_one_list(everything: Any, numbers: Any) -> None:
    with pytest.raises(TypeError, match="rows must be a list of integers"):
        everything[0].read(numbers)


@pytest.mark.parametrize(
    "numbers", [[], [0], [15, 0, 15, 15, 3], list(range(16)), list(range(15, -1, -1)), [2, 3, 9, 10, 11]]
)
def test_rows_are_read_in_any_order_with_repeats_whatever_their_type_and_codec(everything: Any, numbers: Any) -> None:
    cache, chunks = everything
    read = cache.read(numbers)
    assert list(read) == [column.name for column in EVERYTHING]
    for column in EVERYTHING:
        assert raw(read[column.name]) == raw(picked(column, chunks, numbers)), column.name


@pytest.mark.slow
@pytest.mark.parametrize("max_maps", [8192, 20, 1])
@pytest.mark.parametrize("numbers", [[], [15, 0, 15, 15, 3, 9, 2, 10], list(range(15, -1, -1))])
def test_views_are_the_rows_that_reading_gives_one_by_one(everything: Any, numbers: list[int], max_maps: int) -> None:
    cache = fb.open_cache(everything[0].store, max_maps=max_maps)
    for column in EVERYTHING:
        views = list(cache.views(numbers, column.name))
        read = cache.read(numbers, [column.name])[column.name]
        assert [raw(view) for view in views] == [raw(read[row]) for row in range(len(numbers))], column.name


def test_views_of_a_ragged_column_are_no_copies_and_outlive_the_cache(tmp_path: Path) -> None:
    column = Column(name="r", dtype="uint8", ragged=True, rows_per_block=1)
    rows = [np.full(5000 + number, number, np.uint8) for number in range(6)]
    chunks = [{"r": Ragged.of(rows[:2], column.array_dtype)}, {"r": Ragged.of(rows[2:], column.array_dtype)}]
    stored_cache(fb.LocalStore(tmp_path), [column], chunks)
    cache = fb.open_cache(tmp_path, max_maps=1)
    views = list(cache.views([5, 0, 3], "r"))
    with pytest.raises(IndexError):
        cache.views([6], "r")
    assert not any(view.flags.writeable for view in views)
    del cache
    gc.collect()
    assert [view.tolist() for view in views] == [rows[5].tolist(), rows[0].tolist(), rows[3].tolist()]
    path = next((tmp_path / "layers").glob("*/000001.safetensors"))
    flip(path, int(ChunkFile(memoryview(path.read_bytes()), "").block_bounds("r")[3]))
    assert views[0][0] != rows[5][0]


class CountingViews(fb.LocalStore):
    """Notes which chunks are opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.chunks: list[str] = []

    def view(self, key: str, *, expect: Any = None) -> memoryview:
        if key.startswith("layers/tokens.") and "/0" in key:
            self.chunks.append(Path(key).name.partition(".")[0])
        return super().view(key, expect=expect)


def test_a_chunk_that_is_read_again_and_again_is_opened_once(tmp_path: Path) -> None:
    store = CountingViews(token_cache(tmp_path, 9, chunk_rows=1))
    cache = fb.open_cache(store, max_maps=4)
    for row in range(9):
        assert cache.read([row, 0], ["tokens"])["tokens"][:, 0].tolist() == [row, 0]
        cache.read([0], ["tokens"])
    assert store.chunks.count("000000") == 1
    assert len(store.chunks) == 9


def test_no_rows_have_the_type_and_shape_of_the_column(everything: Any) -> None:
    read = everything[0].read(np.array([], np.int32), columns=["bfloat16_none", "fixed_zstd_max", "ragged_lz4_fast"])
    assert read["bfloat16_none"].dtype == ml_dtypes.bfloat16
    assert read["fixed_zstd_max"].shape == (0, 2, 3)
    assert read["ragged_lz4_fast"].values.shape == (0, 2, 3)
    assert read["ragged_lz4_fast"].offsets.tolist() == [0]


def test_chunks_come_one_after_the_other_those_without_rows_too(everything: Any) -> None:
    cache, chunks = everything
    seen = list(cache.chunks())
    assert [len(columns["bool_none"]) for columns in seen] == ROWS
    for found, expected in zip(seen, chunks, strict=True):
        for column in EVERYTHING:
            assert raw(found[column.name]) == raw(expected[column.name]), column.name


def test_iterating_gives_every_row_once(everything: Any) -> None:
    cache, chunks = everything
    rows = [row["int64_zstd"] for row in cache]
    assert rows == joined_rows(cache.column("int64_zstd"), chunks)


def test_row_ids_name_chunk_and_row_for_ever(everything: Any) -> None:
    numbers = [0, 3, 9, 10, 15]
    ids = [fb.RowId(0, 0), fb.RowId(2, 0), fb.RowId(2, 6), fb.RowId(3, 0), fb.RowId(5, 4)]
    assert everything[0].row_ids(numbers) == ids


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[Column], list[int], list[int], int, int]:
    declared = [draw(column_declared(name)) for name in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]]))]
    rows = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))  # without a row nothing is published
    total = sum(rows)
    numbers = draw(st.lists(st.integers(0, total - 1), max_size=12))
    return declared, rows, numbers, draw(st.integers(1, 3)), draw(st.sampled_from([0, 20, 1 << 20]))


@settings(max_examples=scaled(150), deadline=None)
@given(caches())
def test_reading_is_fancy_indexing_of_all_rows(case: tuple[list[Column], list[int], list[int], int, int]) -> None:
    declared, rows, numbers, max_maps, memory = case
    store = fb.MemoryStore()
    chunks = built_rows(declared, rows)
    stored_cache(store, declared, chunks)
    cache = fb.open_cache(store, max_maps=max_maps, memory=memory)
    assert len(cache) == sum(rows)
    read = cache.read(numbers)
    for column in declared:
        assert raw(read[column.name]) == raw(picked(column, chunks, numbers))
    assert cache.statistics().bytes <= memory


def test_more_rows_than_one_piece_come_back_in_order(tmp_path: Path) -> None:
    declared = [Column(name="n", dtype="int32"), Column(name="r", dtype="uint8", ragged=True, codec="lz4")]
    chunks = [
        {"n": np.arange(first, first + 500, dtype=np.int32), "r": Ragged.of_bytes([b"x" * (i % 3) for i in range(500)])}
        for first in range(0, 5000, 500)
    ]
    store = fb.LocalStore(tmp_path / "cache")
    stored_cache(store, declared, chunks)
    numbers = np.random.default_rng(0).integers(0, 5000, 9000)
    read = fb.open_cache(store).read(numbers)
    assert np.array_equal(read["n"], numbers)
    assert np.array_equal(read["r"].lengths, numbers % 500 % 3)


def test_an_uncompressed_fixed_column_is_the_mapped_file_itself(tmp_path: Path) -> None:
    store = fb.LocalStore(tmp_path / "cache")
    stored_cache(store, [Column(name="n", dtype="int64")], [{"n": np.arange(1000)}])
    cache = fb.open_cache(store)
    (chunk,) = cache.chunks()
    array = chunk["n"]
    file = cache._readers.maps_of("stored").get(0)
    assert isinstance(file, ChunkFile)
    assert np.shares_memory(array, np.frombuffer(file.view, np.uint8))
    assert not array.flags.writeable
    path = chunk_path(tmp_path / "cache", "stored", 0)
    with open(path, "r+b") as changed:
        changed.seek(-8000, 2)
        changed.write(np.int64(4711).tobytes())
    assert array[0] == 4711


def test_what_was_read_is_the_readers_own(tmp_path: Path) -> None:
    cache = fb.open_cache(number_cache(tmp_path))
    read = cache.read([0, 1])
    read["number"][:] = -1
    assert cache.read([0, 1])["number"].tolist() == [0, 1]


@pytest.mark.parametrize("ragged", [False, True])
def test_rows_of_more_blocks_than_memory_holds_are_read_block_by_block(ragged: bool) -> None:
    store = fb.MemoryStore()
    column = Column(name="n", dtype="int64", codec="zstd", rows_per_block=10, ragged=ragged)
    numbers = np.random.default_rng(0).permutation(2000)[:1000]  # so many are looked for at once
    values = Ragged(np.arange(2000), np.arange(2001)) if ragged else np.arange(2000)
    stored_cache(store, [column], [{"n": values}])
    cache = fb.open_cache(store, memory=800)
    cache.read([0])
    read = cache.read(numbers)["n"]
    assert np.array_equal(read.values if isinstance(read, Ragged) else read, numbers)
    assert cache.statistics().misses <= 1 + 200


@pytest.mark.parametrize(("column", "block"), [("number", 1), ("vector", 1), ("text", 1)])
def test_a_byte_that_changes_after_opening_is_found_on_first_touch(tmp_path: Path, column: str, block: int) -> None:
    root = number_cache(tmp_path)
    cache = fb.open_cache(root)
    assert cache.read([8])["number"].tolist() == [8]  # block 0 of chunk 2 is touched, block 1 is not
    path = chunk_path(root, "numbers", 2)
    file = ChunkFile(memoryview(path.read_bytes()), "")
    start, stop = file.block_bounds(column)[block : block + 2].tolist()
    flip(path, start)
    assert cache.read([8])["number"].tolist() == [8]
    for opened in (cache, cache, fb.open_cache(root)):
        with pytest.raises(ChunkCorrupt):
            list(opened.views([9, 10], column))
        with pytest.raises(ChunkCorrupt) as caught:
            opened.read([9, 10], columns=[column])
        error = caught.value
        assert (error.facts["root"], error.facts["layer"], error.facts["chunk"]) == (str(root), "numbers", 2)
        assert (error.facts["column"], error.facts["block"], error.facts["span"]) == (column, block, (start, stop))
        assert f"block {block} of column '{column}' in chunk 2 of layer 'numbers' in '{root}'" in str(error)
        assert f"forebay repair {root}" in str(error)
    with pytest.raises(ChunkCorrupt):
        list(cache.chunks([column]))


def test_a_chunk_whose_file_is_gone_is_named(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (chunk_path(root, "numbers", 3)).unlink()
    cache = fb.open_cache(root)
    assert cache[0]["number"] == 0
    with pytest.raises(
        ChunkMissing, match=r"the file of chunk 3 of layer 'numbers' .* is missing\nhint: run `forebay repair"
    ):
        cache[12]


@pytest.mark.parametrize("size", [0, 7, 100, 4096, 4200])
def test_a_truncated_chunk_raises_and_says_its_size(tmp_path: Path, size: int) -> None:
    root = number_cache(tmp_path)
    path = chunk_path(root, "numbers", 0)
    path.write_bytes(path.read_bytes()[:size])
    problem = "its file is empty" if size == 0 else rf"its file has {size:,} bytes, 4,348 were published"
    with pytest.raises(ChunkCorrupt, match=problem):
        fb.open_cache(root)[0]


def test_a_pickled_cache_is_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layered_cache(tmp_path, rows=200)
    monkeypatch.chdir(tmp_path)
    cache = fb.open_cache("cache", layers=["length"], memory=1000, max_maps=7)
    cache.read(np.arange(200))
    parcel = pickle.dumps(cache)
    assert len(parcel) < 1000
    monkeypatch.chdir("/")
    again = pickle.loads(parcel)
    assert again.layers == ("numbers", "length")
    assert again.generation.number == cache.generation.number
    assert again.statistics().limit_bytes == 1000
    assert again.statistics().misses == 0
    assert np.array_equal(again.read(np.arange(200))["times"], cache.read(np.arange(200))["times"])
    assert root.exists()


def test_a_pickled_cache_keeps_its_generation(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    cache = fb.open_cache(root)
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert len(fb.open_cache(root)) == 24
    assert len(pickle.loads(pickle.dumps(cache))) == len(cache) == 20


def test_a_cache_in_memory_says_that_it_cannot_travel(everything: Any) -> None:
    with pytest.raises(TypeError, match="lives in one process"):
        pickle.dumps(everything[0])


def test_no_cache_no_generation_no_layer_no_column_each_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        CacheNotFound, match=f"there is no cache at '{tmp_path / 'nowhere'}'\nhint: build one with `forebay build"
    ):
        fb.open_cache(tmp_path / "nowhere")
    with pytest.raises(CacheNotFound):
        fb.open_cache(tmp_path / "nowhere", generation=3)
    root = layered_cache(tmp_path)
    with pytest.raises(CacheNotFound, match="has no generation 7\nhint: finish its build"):
        fb.open_cache(root, generation=7)
    with pytest.raises(NotFound, match=r"(?s)has no layer 'lune'.*it has: length, numbers"):
        fb.open_cache(root, layers=["lune"])
    cache = fb.open_cache(root)
    with pytest.raises(
        NotFound, match=r"has no column 'pixels' \(it has: number, vector, text, length, times, length\.present"
    ):
        cache.read([0], columns=["number", "pixels"])
    with pytest.raises(NotFound, match="it has: length, numbers"):
        cache.constants("sol")
    for path in (root / "generations").iterdir():
        path.unlink()
    with pytest.raises(CacheNotFound, match=f"the cache at '{root}' has no generation"):
        fb.open_cache(root)


@pytest.mark.parametrize(
    ("option", "value"),
    [("memory", -1), ("max_maps", "x"), ("max_maps", 0), ("generation", "newest"), ("generation", -1)],
)
def test_numbers_that_make_no_sense_are_refused_by_name(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{option} must be a whole number of at least \d \(got {value!r}\)"):
        fb.open_cache(tmp_path, **{option: value})
