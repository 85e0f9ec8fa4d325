"""The compiled loops against their definition in NumPy, and against arguments whose sizes do not fit."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.kernels import reference

compiled = pytest.importorskip("forebay.kernels._kernels", reason="forebay was installed without a compiler")
BOTH = (compiled, reference)
SEEDS = st.integers(0, 2**32 - 1)


def test_every_compiled_loop_has_a_definition() -> None:
    loops = {name for name in dir(compiled) if not name.startswith("_")}
    assert len(loops) == 13
    assert loops <= set(dir(reference))


@given(st.lists(st.integers(0, 40), max_size=20), SEEDS)
def test_gather_copies_the_items_at_addresses(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory, counts = rng.integers(0, 256, 200).astype(np.uint8), np.array(sizes, np.int64)
    starts = rng.integers(0, 160, len(sizes))
    expected = b"".join(memory[start : start + size].tobytes() for start, size in zip(starts, counts, strict=True))
    for loops in BOTH:
        out = np.zeros(int(counts.sum()), np.uint8)
        loops.gather(out, memory.ctypes.data + starts, counts)
        assert out.tobytes() == expected


@given(st.integers(1, 2**61), st.integers(0, 2**64 - 1), SEEDS)
@example(4097, 0, 0)
def test_permute_is_that_of_the_definition(size: int, key: int, seed: int) -> None:
    highs = int(np.ceil(np.sqrt(size)))
    keys = np.random.default_rng(key).integers(0, 2**63, 6).astype(np.uint64)
    cells = np.random.default_rng(seed).integers(0, size, 50).astype(np.uint64)
    found = [cells.copy() for _ in BOTH]
    for loops, each in zip(BOTH, found, strict=True):
        loops.permute(each, size, highs, -(-size // highs), keys)
    np.testing.assert_array_equal(*found)
    assert (found[0] < size).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(-2, 30), max_size=20))
def test_locate_rows_finds_the_chunk_of_every_row(counts: list[int], rows: list[int]) -> None:
    starts, numbers = np.concatenate([[0], np.cumsum(counts)]), np.array(rows, np.int64)
    for loops in BOTH:
        chunks, within = np.empty_like(numbers), np.empty_like(numbers)
        assert loops.locate_rows(chunks, within, numbers, starts) == all(0 <= row < sum(counts) for row in rows)
        if all(0 <= row < sum(counts) for row in rows):
            assert (starts[chunks] + within == numbers).all()
            assert (within < np.array(counts)[chunks]).all()


class MappedChunks:
    """Chunks of 4 and 2 rows of 12 bytes, in blocks of 2 rows."""

    def __init__(self, *, checked: int = 0b111, size: int = 48, mapped: int = 2) -> None:
        self.rows = [np.arange(12, dtype=np.uint32).reshape(4, 3), np.arange(100, 106, dtype=np.uint32).reshape(2, 3)]
        bases = np.array([each.ctypes.data if at < mapped else 0 for at, each in enumerate(self.rows)])
        blocks = (np.array([0, 2, 3]), np.array([checked], np.uint8), 2)
        self.tables = (bases, np.array([size, 24]), 12, *blocks)

    def read(self, loops: Any, chunks: list[int], within: list[int], starts: list[int] | None = None) -> Any:
        out = np.full((len(chunks), 3 if starts is None else 1), 7, np.uint32)
        firsts = None if starts is None else np.array(starts, np.int64)
        is_read = loops.read_rows(out, np.array(chunks, np.int64), np.array(within, np.int64), firsts, self.tables)
        return out.tolist() if is_read else None


@pytest.mark.parametrize("loops", BOTH)
def test_read_rows_copies_rows_and_parts_of_rows(loops: Any) -> None:
    chunks = MappedChunks()
    assert chunks.read(loops, [1, 0, 0], [1, 3, 0]) == [[103, 104, 105], [9, 10, 11], [0, 1, 2]]
    assert chunks.read(loops, [1, 0], [1, 3], [4, 8]) == [[104], [11]]
    assert chunks.read(loops, [], []) == []


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize(
    ("chunk", "row"), [(0, 4), (0, -1), (1, 2), (2, 0), (-1, 0), (0, 2**62), (0, -(2**63)), (2**62, 0)]
)
def test_read_rows_never_reads_outside_a_chunk(loops: Any, chunk: int, row: int) -> None:
    assert MappedChunks().read(loops, [0, chunk], [0, row]) is None
    for start in (48, -1, 2**62, -(2**62)):
        assert MappedChunks().read(loops, [0, 0], [0, 3], [0, start]) is None


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize(
    ("wrong", "chunk", "row"),
    [
        pytest.param({"mapped": 1}, 1, 0, id="the second chunk is not mapped"),
        pytest.param({"size": 47}, 0, 3, id="the last row ends after the tensor"),
        pytest.param({"checked": 0b101}, 0, 2, id="its block was not checked"),
    ],
)
def test_read_rows_never_reads_rows_that_are_not_mapped_and_checked(
    loops: Any, wrong: dict[str, int], chunk: int, row: int
) -> None:
    assert MappedChunks(**wrong).read(loops, [0, 0], [0, 1]) is not None
    assert MappedChunks(**wrong).read(loops, [0, chunk], [0, row]) is None


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, width] and the lengths of documents, zero-padded."""
    width, documents, rows = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([np.uint16, np.uint32, np.int64]))
    rng = np.random.default_rng(draw(SEEDS))
    tokens = rng.integers(0, 60_000, (rows, width)).astype(dtype)
    cuts = np.sort(rng.integers(0, width + 1, (rows, documents)), axis=1)
    return tokens, np.diff(cuts, axis=1, prepend=0).astype(np.int32)


@given(packed_rows(), st.booleans(), st.integers(0, 7))
def test_pack_tokens_writes_what_the_definition_says(
    case: tuple[np.ndarray, np.ndarray], shifted: bool, outputs: int
) -> None:
    tokens, lengths = case
    written: list[list[np.ndarray | None]] = []
    for loops in BOTH:
        arrays = [np.full(tokens.shape, 7, np.int64) if outputs >> at & 1 else None for at in range(3)]
        assert loops.pack_tokens(tokens, tokens.itemsize, tokens.shape[1], lengths, shifted, *arrays)
        written.append(arrays)
    for mine, theirs in zip(*written, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("width", [511, 512, 513, 1500, 20_000])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_pack_tokens_writes_long_rows_piece_by_piece(width: int, dtype: type[np.unsignedinteger]) -> None:
    tokens = np.random.default_rng(width).integers(1, 60_000, (3, width)).astype(dtype)
    lengths = np.array([[width - 5, 3], [width, 0], [1, width - 1]], np.int32)
    written = [[np.full(tokens.shape, 7, np.int64) for _ in range(3)] for _ in BOTH]
    for loops, arrays in zip(BOTH, written, strict=True):
        assert loops.pack_tokens(tokens, tokens.itemsize, width, lengths, True, *arrays)
    np.testing.assert_array_equal(*written)


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("lengths", [[4, 1], [5, 0], [5, -1], [-1, 4], [2**31 - 1, 2**31 - 1]])
def test_pack_tokens_refuses_documents_that_do_not_fit_their_row(loops: Any, lengths: list[int]) -> None:
    tokens, labels = np.zeros((2, 4), np.uint16), np.full((2, 4), 9, np.int64)
    stored = np.array([[4, 0], lengths], np.int32)
    assert not loops.pack_tokens(tokens, 2, 4, stored, True, None, labels, None)
    assert (labels[1] == 9).all()


def test_pack_tokens_refuses_arrays_of_another_size() -> None:
    tokens, lengths, out = np.zeros((2, 4), np.uint16), np.full((2, 1), 4, np.int32), np.zeros((2, 4), np.int64)
    for bad in (np.zeros((1, 4), np.int64), np.zeros((3, 4), np.int64)):
        with pytest.raises(ValueError, match="another size"):
            compiled.pack_tokens(tokens, 2, 4, lengths, True, bad, None, None)
    for item, width, lens in ((3, 4, lengths), (2, 0, lengths), (2, 3, lengths), (2, 4, np.zeros(3, np.int32))):
        with pytest.raises(ValueError, match="whole rows"):
            compiled.pack_tokens(tokens, item, width, lens, True, out, None, None)


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]:
    """Content, the size of its canvas, and its box."""
    height, width = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    columns, lines = draw(st.integers(1, width)), draw(st.integers(1, height))
    left, top = draw(st.integers(0, width - columns)), draw(st.integers(0, height - lines))
    content = np.random.default_rng(draw(SEEDS)).integers(0, 256, (3, lines, columns)).astype(np.uint8)
    return content, (height, width), (left, top, columns, lines)


@given(placements())
def test_paint_fills_canvas_and_box(case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]) -> None:
    content, size, box = case
    canvases = [np.full((3, *size), 99, np.uint8) for _ in BOTH]
    for loops, canvas in zip(BOTH, canvases, strict=True):
        loops.paint(canvas, size, content, box, (114, 7, 255))
    np.testing.assert_array_equal(*canvases)


@given(placements())
def test_paint_scaled_rounds_as_numpy_does(case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]) -> None:
    content, size, box = case
    canvases = [np.full((3, *size), 99, np.float32) for _ in BOTH]
    values = ((0.1, 0.2, 0.3), (0.017, 0.0175, 0.0171), (-2.1, -2.03, -1.8))
    for loops, canvas in zip(BOTH, canvases, strict=True):
        loops.paint_scaled(canvas, size, content, box, *values)
    np.testing.assert_array_equal(*canvases)


@given(placements())
def test_mirror_reverses_lines(case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]) -> None:
    for loops in BOTH:
        flipped = np.empty_like(case[0])
        loops.mirror(flipped, case[0], case[0].shape[2])
        np.testing.assert_array_equal(flipped, case[0][:, :, ::-1])


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, -1, 4, 4), (1, 0, 4, 4), (0, 1, 4, 4), (0, 0, 5, 4), (0, 0, 4, -4)])
def test_paint_refuses_a_box_outside_the_canvas(box: tuple[int, int, int, int]) -> None:
    canvas, content = np.full((3, 4, 4), 9, np.uint8), np.zeros((3, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="outside the canvas"):
        compiled.paint(canvas, (4, 4), content, box, (1, 2, 3))
    assert (canvas == 9).all()


def test_paint_and_mirror_refuse_other_sizes() -> None:
    canvas, content = np.zeros((3, 4, 4), np.uint8), np.zeros((3, 2, 2), np.uint8)
    for size, box in (((4, 5), (0, 0, 2, 2)), ((4, 4), (0, 0, 2, 3))):
        with pytest.raises(ValueError, match="sizes"):
            compiled.paint(canvas, size, content, box, (1, 2, 3))
        with pytest.raises(ValueError, match="sizes"):
            compiled.paint_scaled(canvas.astype(np.float32), size, content, box, (1, 2, 3), (1, 1, 1), (0, 0, 0))
    with pytest.raises(ValueError, match="same width"):
        compiled.mirror(canvas, content, 2)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=30), st.booleans())
def test_token_places_are_where_tokens_begin(table: list[bytes], numbers: list[int], changed: bool) -> None:
    ids = np.array([each % len(table) for each in numbers], np.uint32)
    skipped = np.array([min(1, len(table[each])) * (at % 3 == 0) for at, each in enumerate(ids)], np.uint8)
    text = b"".join(table[each][skip:] for each, skip in zip(ids.tolist(), skipped.tolist(), strict=True))
    text = text + b"x" if changed else text
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in table])]).astype(np.int64)
    flat = np.frombuffer(b"".join(table), np.uint8)
    places = [np.zeros(len(ids), np.int64) for _ in BOTH]
    for loops, each in zip(BOTH, places, strict=True):
        assert loops.token_places(each, ids, skipped, offsets, flat, text) != changed
    assert changed or (places[0] == places[1]).all()


def test_token_places_never_reads_outside_the_table() -> None:
    offsets, table, text = np.array([0, 2, 3]), b"abc", b"abc"
    for ids, at, skips in (([0, 2], offsets, [0, 0]), ([0, 1], np.array([0, 2, 9]), [0, 0]), ([0, 1], offsets, [3, 0])):
        places = np.zeros(2, np.int64)
        assert not compiled.token_places(places, np.array(ids, np.uint32), np.array(skips, np.uint8), at, table, text)
    with pytest.raises(ValueError, match="one number for each id"):
        compiled.token_places(np.zeros(1, np.int64), np.zeros(2, np.uint32), np.zeros(2, np.uint8), offsets, b"a", b"a")


@given(
    st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(1, 7**size), max_size=200)),
    st.sampled_from([343, 350, 4096, 70_000]),
)
def test_best_fit_takes_the_oldest_of_the_fullest_bins(lengths: list[int], capacity: int) -> None:
    falling = np.sort(np.array(lengths, np.int64))[::-1].copy()
    bins = [np.empty(len(falling), np.int64) for _ in BOTH]
    for loops, each in zip(BOTH, bins, strict=True):
        loops.best_fit(each, falling, capacity)
    np.testing.assert_array_equal(*bins)
    assert (np.bincount(bins[0], falling) <= capacity).all()


@pytest.mark.parametrize("lengths", [[3, 4], [8, 1], [2, 0], [2, -1]])
def test_best_fit_refuses_lengths_that_rise_or_do_not_fit(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="must not rise"):
        compiled.best_fit(np.zeros(2, np.int64), np.array(lengths, np.int64), 7)
    with pytest.raises(ValueError, match="one number for each length"):
        compiled.best_fit(np.zeros(3, np.int64), np.array([2, 1], np.int64), 7)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 4)), max_size=9))
def test_copy_runs_copies_bytes(runs: list[tuple[int, int, int]]) -> None:
    targets, starts, lengths = np.array(runs, np.int64).reshape(-1, 3).T
    outs = [np.zeros(12, np.uint8) for _ in BOTH]
    for loops, out in zip(BOTH, outs, strict=True):
        loops.copy_runs(out, np.arange(1, 13, dtype=np.uint8), *map(np.ascontiguousarray, (targets, starts, lengths)))
    np.testing.assert_array_equal(*outs)


def test_copy_runs_refuses_runs_outside_a_buffer_before_it_writes() -> None:
    out, source = np.zeros(4, np.uint8), np.arange(1, 7, dtype=np.uint8)
    for target, start, length in ((0, 4, 3), (2, 0, 3), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 1 << 62, 2)):
        with pytest.raises(ValueError, match="outside"):
            compiled.copy_runs(out, source, *(np.array([0, each]) for each in (target, start, length)))
    assert not out.any()


@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.sampled_from([-1, 7, 65_535]),
    st.sampled_from([-1, 9]),
    st.sampled_from([np.uint16, np.uint32]),
)
def test_frame_documents_puts_ids_around_documents(lengths: list[int], begin: int, end: int, dtype: type) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ids = (np.arange(offsets[-1]) * 7919 % 65_536).astype(np.uint32)
    framed = [np.zeros(len(ids) + len(lengths) * ((begin >= 0) + (end >= 0)), dtype) for _ in BOTH]
    for loops, out in zip(BOTH, framed, strict=True):
        loops.frame_documents(out, out.itemsize, ids, offsets, begin, end)
    np.testing.assert_array_equal(*framed)


def test_frame_documents_refuses_outputs_that_do_not_fit() -> None:
    out, ids = np.zeros(5, np.uint16), np.arange(1, 4, dtype=np.uint32)
    for item_bytes, offsets, end in ((2, [0, 3], -1), (2, [0, 2], 9), (2, [0, 4], 9), (2, [1, 3], 9), (3, [0, 3], 9)):
        with pytest.raises(ValueError, match="room for the ids"):
            compiled.frame_documents(out, item_bytes, ids, np.array(offsets), -1, end)
    for falling in ([0, 3, 1, 3], [0, -1, 3], [0, 1 << 62, 3], []):
        with pytest.raises(ValueError, match="room for the ids"):
            compiled.frame_documents(out, 2, ids, np.array(falling, np.int64), -1, 9)
    assert not out.any()


_LINES = st.lists(
    st.sampled_from([b"{}", b"{1}", b"\n", b"\r\n", b"}", b"{", b"\r", b"x", b"\n{", b"}\n{"]), max_size=12
)


@given(_LINES.map(b"".join), st.integers(0, 9), st.sampled_from([bytes, bytearray]))
@example(b"\n{", 0, bytes)
@example(b"{}\n{}\r\n{}\n", 0, bytes)
@example(b"x\r\n{}", 0, bytes)
@example(b"{}\n{}", 3, bytes)
def test_line_starts_are_those_of_the_definition(block: bytes, at: int, kind: type) -> None:
    assert compiled.line_starts(kind(block), at) == reference.line_starts(kind(block), at)


@pytest.fixture
def no_switches() -> Iterator[None]:
    """Threads run only while another one has released the interpreter lock by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", ["read_rows", "gather"])
def test_other_threads_run_while_rows_are_read_from_mapped_files(name: str, no_switches: None) -> None:
    """A page may have to be read from disk, even for a few bytes: many parts of no bytes take as long here."""
    nothing, zeros, tables = np.empty(0, np.uint8), np.zeros(500_000, np.int64), MappedChunks().tables
    arguments = {"read_rows": (zeros, zeros, zeros, tables), "gather": (zeros + tables[0][0], zeros)}[name]
    ticks, is_done = [0], threading.Event()

    def tick() -> None:
        while not is_done.wait(1e-4):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    for _ in range(200):  # a busy machine may wake the thread late
        getattr(compiled, name)(nothing, *arguments)
        if ticks[0] > before:
            break
    found = ticks[0]
    is_done.set()
    thread.join()
    assert found > before


def test_buffers_of_another_size_are_refused() -> None:
    one, two, item = np.ones(1, np.int64), np.ones(2, np.int64), np.arange(12, dtype=np.uint8)
    for sizes in (np.array([12, -1]), np.array([12]), np.array([6, 7])):
        with pytest.raises(ValueError, match="exactly the items"):
            compiled.gather(np.empty(12, np.uint8), np.array([item.ctypes.data] * 2), sizes)
    tables = (one, one, 12, np.array([0, 4]), np.ones(1, np.uint8), 1)
    for chunks, within, starts in ((two, one, None), (two, two, one)):
        with pytest.raises(ValueError, match="one item for each row"):
            compiled.read_rows(np.empty(24, np.uint8), chunks, within, starts, tables)
    for at, table in ((1, two), (3, one), (2, 0), (5, 0)):
        with pytest.raises(ValueError, match="one number for each chunk"):
            compiled.read_rows(np.empty(24, np.uint8), two, two, None, (*tables[:at], table, *tables[at + 1 :]))
    for cells, size, highs, lows in (([10], 10, 4, 3), ([0], 13, 4, 3), ([0], 1, 0, 1), ([0], 0, 1, 1)):
        with pytest.raises(ValueError, match="below the size"):
            compiled.permute(np.array(cells, np.uint64), size, highs, lows, np.zeros(6, np.uint64))


WITHOUT = """
import sys
sys.modules["forebay.kernels._kernels"] = None  # as if it had not been built
import json, forebay.kernels
assert not forebay.kernels.IS_COMPILED
from tests.golden.test_golden_batches import CASES, HASHES, hashes
expected = json.loads(HASHES.read_text())
wrong = [name for name in CASES if hashes(CASES[name]()) != expected[name]]
assert not wrong, wrong
"""


@pytest.mark.slow
def test_batches_are_the_golden_ones_without_a_compiler() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, cwd=Path(__file__).parents[2], timeout=600)
