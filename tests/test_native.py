"""The compiled loops against their numpy twins, bit for bit, and against sizes that do not fit."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack, to_dlpack

from forebay import compiled
from forebay.chat import encoding
from forebay.images.geometry import Scaling
from forebay.masks.documents import LabelStyle, fill_labels, fill_packed, fill_positions
from forebay.order.orders import SORTED, permute
from forebay.read.chunk_maps import ChunkFinder
from forebay.tokens import packing
from forebay.torch.images.canvas import BytePainter, FloatPainter, Painter, mirrored, paint_canvases

native = pytest.importorskip("forebay._native", reason="forebay was installed without a compiler")


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, width] and lengths that fill each row, padding last."""
    width, documents = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    rows = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = rng.integers(0, np.iinfo(dtype).max, (rows, width), dtype, endpoint=True)
    cuts = np.sort(rng.integers(0, width + 1, (rows, documents)), axis=1)
    edges = np.concatenate([np.zeros((rows, 1), np.int64), cuts, np.full((rows, 1), width)], axis=1)
    return tokens, np.diff(edges, axis=1).astype(np.int32)


@given(packed_rows(), st.sampled_from(["shifted", "unshifted"]))
def test_tokens_labels_and_positions_are_those_of_numpy(case: tuple[np.ndarray, np.ndarray], style: LabelStyle) -> None:
    tokens, whole = case
    wide, labels, positions = (np.full(tokens.shape, 7, np.int64) for _ in range(3))
    fill_packed(tokens, whole, style, wide=wide, labels=labels, positions=positions)
    expected_labels, expected_positions = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.int64)
    fill_labels(expected_labels, tokens, whole, style)
    fill_positions(expected_positions, whole)
    np.testing.assert_array_equal(wide, tokens)
    np.testing.assert_array_equal(labels, expected_labels)
    np.testing.assert_array_equal(positions, expected_positions)


def test_only_what_has_an_array_is_written() -> None:
    tokens, whole = np.array([[5, 6, 7]], np.uint16), np.array([[2, 1]], np.int32)
    labels = np.zeros((1, 3), np.int64)
    fill_packed(tokens, whole, "shifted", labels=labels)
    assert labels.tolist() == [[6, -100, -100]]


def addresses(rows: np.ndarray) -> np.ndarray:
    return rows.ctypes.data + np.arange(len(rows)) * rows.strides[0]


@given(packed_rows(), st.booleans(), st.integers(0, 3), st.integers(1, 4))
def test_rows_anywhere_in_memory_are_packed_as_by_numpy(
    case: tuple[np.ndarray, np.ndarray], shifted: bool, further: int, size: int
) -> None:
    tokens, whole = case
    rows, width = tokens.shape
    counts = np.array([max(np.flatnonzero(each), default=-1) + 1 for each in whole[:, :-1]], np.int64)
    order = np.arange(rows)[::-1]
    lengths = whole[order][:, :-1].copy()
    seq_lens = np.full((rows, whole.shape[1] - 1 + further), 9, np.int32)
    stored, wide, labels, positions = np.empty_like(tokens), *(np.full(tokens.shape, 7, np.int64) for _ in range(3))
    batches = [
        tuple(array[at : at + size] for array in (stored, wide, seq_lens, labels, positions))
        for at in range(0, max(1, rows), size)
    ]
    places = (addresses(tokens)[order], tokens.itemsize, width, addresses(lengths), counts[order])
    assert native.pack_rows(*places, shifted, size, batches) == len(batches)
    expected_labels, expected_positions = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.int64)
    fill_labels(expected_labels, tokens[order], whole[order], "shifted" if shifted else "unshifted")
    fill_positions(expected_positions, whole[order])
    np.testing.assert_array_equal(stored, tokens[order])
    np.testing.assert_array_equal(wide, tokens[order])
    np.testing.assert_array_equal(labels, expected_labels)
    np.testing.assert_array_equal(positions, expected_positions)
    np.testing.assert_array_equal(seq_lens, np.pad(lengths, ((0, 0), (0, further))))


@pytest.mark.parametrize("width", [511, 512, 513, 1024, 1500, 20_000])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_that_are_written_piece_by_piece_are_whole(width: int, dtype: type[np.unsignedinteger]) -> None:
    tokens = np.random.default_rng(width).integers(1, 60_000, (3, width)).astype(dtype)
    lengths = np.array([[width - 5, 3], [width, 0], [1, width - 1]], np.int32)
    wide, labels, positions = (np.full(tokens.shape, 7, np.int64) for _ in range(3))
    batch = (None, wide, np.empty((3, 2), np.int32), labels, positions)
    assert native.pack_rows(addresses(tokens), tokens.itemsize, width, addresses(lengths), np.full(3, 2), 1, 3, [batch])
    expected, whole = np.empty_like(labels), np.column_stack([lengths, width - lengths.sum(1)])
    fill_labels(expected, tokens, whole, "shifted")
    np.testing.assert_array_equal(wide, tokens)
    np.testing.assert_array_equal(labels, expected)


@pytest.fixture(params=[0, 1, 3])
def helpers(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compiled calls of this thread, shared with further threads."""
    native.set_helpers(request.param)
    yield native.count_helpers()
    native.set_helpers(0)


class Packed:
    """Rows of 2,048 tokens, and batches of 20 rows to pack them into; some row may have too long documents."""

    def __init__(self, rows: int, wrong: int | None = None) -> None:
        rng = np.random.default_rng(rows)
        self.tokens = rng.integers(0, 60_000, (rows, 2048)).astype(np.uint16)
        self.lengths = rng.integers(0, 1000, (rows, 2)).astype(np.int32)
        if wrong is not None:
            self.lengths[wrong] = 2000
        self.seq_lens = np.empty((rows, 2), np.int32)
        self.written = [np.full((rows, 2048), 7, np.int64) for _ in range(3)]
        wide, labels, positions = self.written
        self.batches = [
            (None, *(array[at : at + 20] for array in (wide, self.seq_lens, labels, positions)))
            for at in range(0, rows, 20)
        ]
        self.places = (addresses(self.tokens), 2, 2048, addresses(self.lengths), np.full(rows, 2), True, 20)

    def expected(self) -> list[np.ndarray]:
        lengths = self.lengths * (self.lengths.sum(1, keepdims=True) <= 2048)
        whole = np.column_stack([lengths, 2048 - lengths.sum(1)])
        labels, positions = np.empty(self.tokens.shape, np.int64), np.empty(self.tokens.shape, np.int64)
        fill_labels(labels, self.tokens, whole, "shifted")
        fill_positions(positions, whole)
        return [self.tokens.astype(np.int64), labels, positions]


def test_helpers_pack_the_same_batches(helpers: int) -> None:
    cases = [Packed(rows) for rows in (1, 19, 20, 21, 90, 333)]
    works = [native.start_packing(*case.places, case.batches) for case in cases]
    for case, work in zip(cases, works, strict=True):
        assert native.finish(work) == native.finish(work) == len(case.batches)
        np.testing.assert_array_equal(case.written, case.expected())
        np.testing.assert_array_equal(case.seq_lens, case.lengths)


def test_helpers_end_at_the_first_batch_that_is_wrong(helpers: int) -> None:
    for wrong in (0, 41, 59, 198):
        case = Packed(200, wrong)
        assert native.pack_rows(*case.places, case.batches) == wrong // 20
        good = slice(0, wrong // 20 * 20)
        for found, expected in zip(case.written, case.expected(), strict=True):
            np.testing.assert_array_equal(found[good], expected[good])


def test_helpers_copy_the_same_items(helpers: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (500, 3001)).astype(np.uint8)
    order = np.random.default_rng(1).permutation(500)
    for count in (0, 1, 21, 22, 500):
        copied = np.zeros((count, 3001), np.uint8)
        work = native.start_gathering(copied, addresses(rows)[order[:count]], 3001)
        assert native.finish(work) is None
        np.testing.assert_array_equal(copied, rows[order[:count]])


def test_work_that_nobody_finishes_holds_its_memory_until_it_ends(helpers: int) -> None:
    for _ in range(50):
        case = Packed(100)
        work = native.start_packing(*case.places, case.batches)
        del case.written, case.batches, case.seq_lens
        del work


def test_threads_share_helpers(helpers: int) -> None:
    def pack(rows: int) -> None:
        native.set_helpers(helpers)
        for _ in range(10):
            case = Packed(rows)
            assert native.pack_rows(*case.places, case.batches) == len(case.batches)
            np.testing.assert_array_equal(case.written, case.expected())
            done.append(rows)

    done: list[int] = []
    threads = [threading.Thread(target=pack, args=(rows,)) for rows in (60, 100, 140)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own(helpers: int) -> None:
    case = Packed(333)
    works = [native.start_packing(*case.places, case.batches) for _ in range(3)]
    child = os.fork()
    if not child:
        later = Packed(90)
        written = [native.finish(work) for work in works]
        written.append(native.finish(native.start_packing(*later.places, later.batches)))
        is_same = np.array_equal(later.written, later.expected()) and np.array_equal(case.written, case.expected())
        os._exit(0 if is_same and written == [17, 17, 17, 5] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [native.finish(work) for work in works] == [17, 17, 17]


FORKED = """
import ctypes, os, sys, time
import numpy as np
held = []
os.register_at_fork(after_in_child=held.clear)  # a library's own hook, which lets go of what a loader had begun
from forebay.compiled import native
native.set_helpers(1)
source, out = np.zeros((64, 1 << 21), np.uint8), np.empty(128 << 20, np.uint8)  # long enough for a helper to begin
places = source.ctypes.data + np.arange(64) * (1 << 21)
fork = {"python": os.fork, "c": ctypes.PyDLL(None).fork}[sys.argv[1]]
held.append(native.start_gathering(out, places, 1 << 21))
time.sleep(0.002)
child = fork()
if not child:
    held.clear()
    later = np.ones(128 << 10, np.uint8)
    native.finish(native.start_gathering(later, places, 1 << 11))
    os._exit(int(later.any()))
native.finish(held[0])
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("fork", ["python", "c"])
def test_a_process_may_be_forked_by_any_library_while_helpers_work(fork: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, fork]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


CUT_SHORT = """
import faulthandler, mmap, os, sys
import numpy as np
from forebay.compiled import native
faulthandler.enable()
with open(sys.argv[1], "w+b") as file:
    file.truncate(64 << 16)
    rows = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8).reshape(64, 1 << 16)
    os.truncate(sys.argv[1], 0)
native.set_helpers(1)
work = native.start_gathering(np.empty(rows.size, np.uint8), rows.ctypes.data + np.arange(64) * (1 << 16), 1 << 16)
while True:  # the helper comes to it
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the signal of Linux")
def test_a_fault_in_a_helper_is_reported_as_one_in_any_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CUT_SHORT, str(tmp_path / "rows")]
    ended = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr


# Whenever a test says so: no thread can be begun, helpers have waited for long, and it is later.
SYSTEM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>
int refuse, refused, waited, later;
typedef int Create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    refused += refuse;
    return refuse ? EAGAIN : ((Create *)dlsym(RTLD_NEXT, "pthread_create"))(thread, how, run, with);
}
int pthread_cond_timedwait(pthread_cond_t *changed, pthread_mutex_t *lock, const struct timespec *until) {
    return waited ? ETIMEDOUT : pthread_cond_wait(changed, lock);
}
time_t time(time_t *unused) { return 1000 + later; }
"""
WITH_SYSTEM = """
import ctypes, os, sys
import numpy as np
from forebay.compiled import native
system = ctypes.CDLL(sys.argv[1])
refuse, refused, waited, later = (ctypes.c_int.in_dll(system, name) for name in "refuse refused waited later".split())
rows = np.random.default_rng(0).integers(0, 256, (500, 3001)).astype(np.uint8)
places = rows.ctypes.data + np.arange(500) * 3001
before = len(os.listdir("/proc/self/task"))
native.set_helpers(2)


def work():
    copied = np.zeros_like(rows)
    native.finish(native.start_gathering(copied, places, 3001))
    assert np.array_equal(copied, rows)
    return helpers()


def helpers():
    return len(os.listdir("/proc/self/task")) - before


"""


@pytest.fixture(scope="module")
def with_system(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Run lines in a process whose threads and clock they control."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("system") / "system.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=SYSTEM, text=True, check=True)

    def run(lines: str) -> None:
        command = [sys.executable, "-c", WITH_SYSTEM + lines, str(library)]
        subprocess.run(command, timeout=600, check=True, env=os.environ | {"LD_PRELOAD": str(library)})

    return run


def test_work_is_done_where_no_thread_can_be_begun(with_system: Callable[[str], None]) -> None:
    """Two seconds later it is tried again, and not at every work."""
    with_system("""
refuse.value = 1
assert [work() for _ in range(50)] == [0] * 50 and refused.value == 1
later.value = 2
assert [work() for _ in range(50)] == [0] * 50 and refused.value == 2
refuse.value = 0
assert [work() for _ in range(50)] == [0] * 50
later.value = 4
assert work() == 2
""")


def test_helpers_that_have_waited_for_long_end_and_others_begin(with_system: Callable[[str], None]) -> None:
    with_system("""
for _ in range(20):
    waited.value = 0
    assert work() == 2
    waited.value = 1
    work()
    while helpers():
        pass
""")


def test_work_of_one_piece_wakes_nobody(helpers: int) -> None:
    source, out = np.arange(32), np.empty(32, np.int64)
    work = native.start_gathering(out, addresses(source.reshape(32, 1)), 8)
    assert np.array_equal(out, source), "it is done at once"
    native.finish(work)


def test_a_content_that_fails_leaves_no_canvas_to_be_painted_later(
    helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, finish = [], native.finish
    monkeypatch.setattr(native, "finish", lambda work: finished.append(finish(work)))
    canvases, content = np.zeros((3, 3, 64, 64), np.uint8), np.full((3, 64, 64), 7, np.uint8)

    def contents() -> Iterator[np.ndarray]:
        yield from (content, content)
        raise OSError("the third is damaged")

    with pytest.raises(OSError, match="third") as caught:
        paint_canvases(BytePainter((0, 0, 0)), canvases, contents(), [(0, 0, 64, 64)] * 3)
    assert (canvases[:2] == 7).all(), "what was begun has ended, while the error is still held"
    assert len(finished) == 2, "and was waited for, however quick helpers are"
    del caught


def test_only_work_can_be_finished() -> None:
    with pytest.raises(ValueError, match="PyCapsule"):
        native.finish(object())


@pytest.mark.parametrize("lengths", [[4, 1], [5, 0], [5, -1], [-1, 4], [2**31 - 1, 2**31 - 1]])
def test_documents_that_do_not_fit_their_row_are_not_packed(lengths: list[int]) -> None:
    tokens, stored = np.zeros((3, 4), np.uint16), np.array([[4, 0], lengths, [4, 0]], np.int32)
    labels, seq_lens, counts = np.full((3, 1, 4), 9, np.int64), np.empty((3, 1, 2), np.int32), np.array([2, 2, 2])
    places = (addresses(tokens), 2, 4, addresses(stored), counts, True, 1)
    batches = [(None, None, lens, each, None) for lens, each in zip(seq_lens, labels, strict=True)]
    assert native.pack_rows(*places, batches) == 1, "the first batch is good"
    assert (labels[1:] == 9).all(), "nothing of the wrong row or behind it is written"
    wide = [(None, np.empty((1, 4), np.int64), lens, None, None) for lens in seq_lens]
    assert native.pack_rows(*places, wide) == 3, "no length is used"


def test_tokens_that_are_not_aligned_are_not_packed() -> None:
    tokens, lengths = np.zeros(9, np.uint8), np.array([[4]], np.int32)
    batch = (None, np.empty((1, 4), np.int64), np.empty((1, 1), np.int32), None, None)
    places = (2, 4, addresses(lengths), np.array([1]), True, 1, [batch])
    first = tokens.ctypes.data + tokens.ctypes.data % 2
    assert native.pack_rows(np.array([first]), *places) == 1
    assert native.pack_rows(np.array([first + 1]), *places) == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_arrays_of_another_size_are_refused(rows: int) -> None:
    tokens, lengths, counts = np.zeros((2, 4), np.uint16), np.full((2, 1), 4, np.int32), np.ones(2, np.int64)
    seq_lens, places = np.empty((2, 1), np.int32), (addresses(tokens), 2, 4, addresses(lengths))
    with pytest.raises(ValueError, match="int64"):
        native.pack_rows(*places, counts, True, 2, [(None, np.zeros((rows, 4), np.int64), seq_lens, None, None)])
    with pytest.raises(ValueError, match="int64"):
        native.pack_rows(*places, counts, True, 2, [(np.zeros((rows, 4), np.uint16), None, seq_lens, None, None)])
    with pytest.raises(ValueError, match=r"int32 \[rows, documents\]"):
        native.pack_rows(*places, counts, True, 2, [(None, None, np.empty(3, np.int32), None, None)])
    empty = (None, None, seq_lens, None, None)
    with pytest.raises(ValueError, match="same rows"):
        native.pack_rows(*places, np.ones(rows, np.int64), True, 2, [empty])
    with pytest.raises(ValueError, match="lengths of each row"):
        native.pack_rows(*places, np.array([1, rows - 2 if rows < 2 else 2]), True, 2, [empty])
    with pytest.raises(ValueError, match="tuple of 5"):
        native.pack_rows(*places, counts, True, 2, [empty[:4]])
    with pytest.raises(ValueError, match="`size` rows each"):
        native.pack_rows(*places, counts, True, 2, [empty] * (rows + 1))
    with pytest.raises(ValueError, match="`size` rows each"):
        native.pack_rows(*places, counts, True, rows - 1 if rows < 2 else -1, [empty])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(-2, 30), max_size=20))
def test_rows_are_found_in_their_chunks_as_by_numpy(counts: list[int], rows: list[int]) -> None:
    finder = ChunkFinder(np.concatenate([[0], np.cumsum(counts)]))
    numbers = np.array(rows, np.int64)
    found = finder.locate(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "native", None)
        expected = finder.locate(numbers)
    assert (found is None) == (expected is None) == any(not 0 <= row < sum(counts) for row in rows)
    if found is not None and expected is not None:
        np.testing.assert_array_equal(found, expected, strict=True)


class TwoChunks:
    """Chunks of 4 and 2 rows of 12 bytes, in blocks of 2 rows; each row also has as many values as its number + 1."""

    def __init__(self, *, checked: int = 0b111, limit: int = 37, mapped: int = 2, values: int = 10) -> None:
        self.rows = [np.arange(12, dtype=np.uint32).reshape(4, 3), np.arange(100, 106, dtype=np.uint32).reshape(2, 3)]
        self.offsets = [np.array([0, 1, 3, 6, 10]), np.array([0, 5, 11])]
        self.blocks = (np.array([0, 2, 3]), np.array([checked], np.uint8), 2)
        self.limits, self.mapped, self.values = np.array([limit, 13], np.uint64), mapped, values

    def bases(self, tensors: list[np.ndarray]) -> np.ndarray:
        return np.array([each.ctypes.data for each in tensors[: self.mapped]] + [0] * (2 - self.mapped))

    def read(self, numbers: list[int]) -> list[list[int]] | None:
        tables = (self.bases(self.rows), self.limits, 12, *self.blocks)
        out = np.full((len(numbers), 3), 7, np.uint32)
        is_read = native.read_rows(out, np.array(numbers, np.int64), np.array([0, 4, 6]), tables)
        return out.tolist() if is_read else None

    def fixed(self, chunks: list[int], within: list[int]) -> list[int] | None:
        tables, found = (self.bases(self.rows), self.limits, 12, *self.blocks), np.zeros(len(chunks), np.int64)
        return found.tolist() if native.fixed_addresses(found, np.array(chunks), np.array(within), tables) else None

    def ragged(self, chunks: list[int], within: list[int]) -> tuple[list[int], list[int]] | None:
        tables = (np.array([10_000, 20_000]), np.array([self.values, 11], np.uint64), 4, *self.blocks)
        edges = (self.bases(self.offsets), np.array([self.limits[0] - 12, 9], np.uint64))
        found, counts = np.zeros(len(chunks), np.int64), np.zeros(len(chunks), np.int64)
        where = (found, np.array(chunks), np.array(within), tables, counts)
        return (found.tolist(), counts.tolist()) if native.ragged_addresses(*where, *edges) else None


def test_rows_are_copied_from_the_addresses_of_their_chunks() -> None:
    assert TwoChunks().read([5, 3, 0, 5]) == [[103, 104, 105], [9, 10, 11], [0, 1, 2], [103, 104, 105]]
    assert TwoChunks().read([]) == []


def test_rows_are_where_their_chunks_have_them() -> None:
    chunks = TwoChunks()
    first, second = chunks.bases(chunks.rows).tolist()
    assert chunks.fixed([1, 0, 0], [1, 3, 0]) == [second + 12, first + 36, first]
    assert chunks.ragged([1, 0, 0], [1, 3, 0]) == ([20_020, 10_024, 10_000], [6, 4, 1])


@pytest.mark.parametrize("row", [-1, 6, 2**62, -(2**63)])
def test_rows_that_no_chunk_has_are_never_read(row: int) -> None:
    assert TwoChunks().read([0, row]) is None
    assert TwoChunks().read([row]) is None


@pytest.mark.parametrize(
    ("chunk", "row"), [(0, 4), (0, -1), (1, 2), (2, 0), (-1, 0), (0, 2**62), (0, -(2**63)), (2**62, 0)]
)
def test_rows_outside_their_chunk_have_no_address(chunk: int, row: int) -> None:
    assert TwoChunks().fixed([0, chunk], [0, row]) is None
    assert TwoChunks().ragged([0, chunk], [0, row]) is None


@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        pytest.param({"mapped": 1}, 4, id="the second chunk is not mapped"),
        pytest.param({"limit": 36}, 3, id="the last row would begin at byte 36"),
        pytest.param({"checked": 0b101}, 2, id="its block was not checked"),
    ],
)
def test_rows_that_are_not_mapped_or_checked_or_out_of_bounds_are_never_read(
    wrong: dict[str, int], number: int
) -> None:
    chunk, within = divmod(number, 4)
    chunks = TwoChunks(**wrong)
    assert chunks.read([0, 1]) is not None
    assert chunks.read([0, number]) is None
    assert chunks.fixed([0, chunk], [0, within]) is None
    assert chunks.ragged([0, chunk], [0, within]) is None


@pytest.mark.parametrize("offsets", [[0, 1, 3, 6, 11], [0, 1, 3, 10, 6], [0, 1, 3, -1, 10], [0, 1, 3, 6, -(2**63)]])
def test_rows_whose_values_are_outside_their_chunk_have_no_address(offsets: list[int]) -> None:
    chunks = TwoChunks()
    assert chunks.ragged([0, 0], [0, 3]) is not None
    chunks.offsets[0] = np.array(offsets)
    assert chunks.ragged([0, 0], [0, 3]) is None


def test_a_buffer_of_another_size_is_refused() -> None:
    rows = np.arange(12, dtype=np.uint32)
    with pytest.raises(ValueError, match="one item for each"):
        native.gather(np.empty(23, np.uint8), np.array([rows.ctypes.data] * 2), 12)
    starts, one, two = np.array([0, 4]), np.ones(1, np.int64), np.ones(2, np.int64)
    tables = (one, one, 12, starts, np.ones(1, np.uint8), 1)
    whole = (two, two, two, tables, two, one, one)
    for read in ((np.empty(23, np.uint8), two, starts), (np.empty(24, np.uint8), two, one)):
        with pytest.raises(ValueError, match="one item for each"):
            native.read_rows(*read, tables)
    for at in (0, 1, 2, 4, 5, 6):
        wrong = (*whole[:at], np.ones(3, np.int64), *whole[at + 1 :])
        with pytest.raises(ValueError, match="one number for each row"):
            native.ragged_addresses(*wrong)
    for at, table in ((1, two), (3, one), (2, 0), (5, 0)):
        with pytest.raises(ValueError, match="one number for each chunk"):
            native.fixed_addresses(two, two, two, (*tables[:at], table, *tables[at + 1 :]))


@given(st.integers(SORTED + 1, 2**61), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
@example(SORTED + 1, 0, 0)
@example(100_000, 1, 1)
def test_a_shuffle_is_that_of_numpy(size: int, key: int, seed: int) -> None:
    indices = np.random.default_rng(seed).integers(0, size, 50)
    found = permute(indices, size, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "native", None)
        np.testing.assert_array_equal(found, permute(indices, size, key), strict=True)


def test_cells_that_no_table_has_are_refused() -> None:
    keys = np.zeros(6, np.uint64)
    for cells, size, highs, lows in (([10], 10, 4, 3), ([0], 13, 4, 3), ([0], 1, 0, 1), ([0], 0, 1, 1)):
        with pytest.raises(ValueError, match="below the size"):
            native.permute(np.array(cells, np.uint64), size, highs, lows, keys)


def test_memory_that_is_lent_is_kept_up_to_a_limit_and_used_again() -> None:
    pool = native.new_pool(1 << 20)
    first = from_dlpack(native.lend(pool, (64, 1024), 0, 64))
    address = first.data_ptr()
    assert (first.shape, first.dtype, address % 64) == ((64, 1024), torch.int64, 0)
    native.lend(pool, (64, 1024), 0, 64)  # nobody makes a tensor of it
    assert native.free_bytes(pool) == 1 << 19
    held = [first]
    del first
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert native.free_bytes(pool) == 1 << 20
    again = [from_dlpack(native.lend(pool, shape, 1, 16)) for shape in ((2, 2, 65_536), (262_144,), (1000, 1000))]
    assert address in [each.data_ptr() for each in again]
    assert [(each.dtype, tuple(each.shape)) for each in again[:2]] == [
        (torch.uint16, (2, 2, 65_536)),
        (torch.uint16, (262_144,)),
    ]
    del again
    assert native.free_bytes(pool) == 1 << 20, "what was returned first is dropped"
    assert from_dlpack(native.lend(pool, (0, 3), 2, 32)).shape == (0, 3)


def test_memory_outlives_its_pool() -> None:
    pool = native.new_pool(1 << 20)
    tensor = from_dlpack(native.lend(pool, (1 << 16,), 0, 64)).fill_(7)
    del pool
    assert int(tensor.sum()) == 7 << 16


@pytest.mark.parametrize("shape", [(-1,), (1 << 40, 1 << 40), (1,) * 9])
def test_a_shape_that_no_memory_has_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a shape must"):
        native.lend(native.new_pool(0), shape, 0, 64)


@pytest.mark.parametrize("stored", [0, 2])
def test_memory_of_batches_ends_before_one_with_too_many_documents(stored: int) -> None:
    pool, counts = native.new_pool(1 << 20), np.array([1, 3, 2, 2, 0])
    made = native.lend_packed(pool, counts, 2, 0, 8, stored, True, False)
    shapes = [[None if each is None else tuple(from_dlpack(each).shape) for each in batch] for batch in made]
    tokens = [[(rows, 8) if bool(stored) == which else None for which in (True, False)] for rows in (2, 2, 1)]
    lengths = [(2, 3), (2, 2), (1, 1)]
    assert shapes == [[*each, lens, (lens[0], 8), None] for each, lens in zip(tokens, lengths, strict=True)]
    assert len(native.lend_packed(pool, counts, 2, 3, 8, stored, True, True)) == 3
    assert len(native.lend_packed(pool, counts[::-1].copy(), 2, 2, 8, stored, True, True)) == 1, (
        "3 documents are too many"
    )
    (nothing,) = native.lend_packed(pool, counts[:0], 2, 4, 8, stored, False, False)
    assert from_dlpack(nothing[2]).shape == (0, 4)
    with pytest.raises(ValueError, match="must have rows"):
        native.lend_packed(pool, counts, 0, 0, 8, stored, True, True)


def test_only_memory_that_was_lent_is_written() -> None:
    tokens, lengths = np.zeros((1, 4), np.uint16), np.array([[4]], np.int32)
    places = (addresses(tokens), 2, 4, addresses(lengths), np.array([1]), True, 1)
    (batch,) = native.lend_packed(native.new_pool(0), np.array([1]), 1, 0, 4, 0, False, False)
    assert native.pack_rows(*places, [batch]) == 1
    assert native.pack_rows(*places, []) == 0, "rows behind the last batch are left alone"
    theirs = to_dlpack(torch.empty((1, 4), dtype=torch.int64))
    with pytest.raises(ValueError, match="must come from"):
        native.pack_rows(*places, [(None, theirs, batch[2], None, None)])
    (wide,) = native.lend_packed(native.new_pool(0), np.array([1]), 1, 0, 5, 0, False, False)
    with pytest.raises(ValueError, match="int64"):
        native.pack_rows(*places, [(None, wide[1], batch[2], None, None)])


def test_without_compiled_code_numpy_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, whole = np.array([[5, 6, 7, 8, 0]], np.uint16), np.array([[3, 1, 1]], np.int32)
    found = []
    for chosen in (compiled.native, None):
        monkeypatch.setattr(compiled, "native", chosen)
        arrays = {name: np.empty((1, 5), np.int64) for name in ("wide", "labels", "positions")}
        fill_packed(tokens, whole, "unshifted", **arrays)
        found.append({name: array.tolist() for name, array in arrays.items()})
    assert found[0] == found[1]


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]:
    """Content, the size of its canvas, and its box."""
    height, width = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    columns, lines = draw(st.integers(1, width)), draw(st.integers(1, height))
    left, top = draw(st.integers(0, width - columns)), draw(st.integers(0, height - lines))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content = rng.integers(0, 256, (3, lines, columns)).astype(np.uint8)
    return content, (height, width), (left, top, columns, lines)


def _painted(
    painter: Painter, case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]], streamed: bool = False
) -> np.ndarray:
    content, size, box = case
    canvas = np.full((3, *size), 99, painter.storage)
    work = painter.paint_canvas(canvas, content, box, streamed=streamed)
    if work is not None:
        native.finish(work)
    return canvas


@given(placements())
def test_canvases_are_those_of_numpy(case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]) -> None:
    for painter in (BytePainter((114, 7, 255)), FloatPainter((114, 7, 255), Scaling.of("imagenet"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "native", None)
            expected = _painted(painter, case)
        for streamed in (False, True):
            np.testing.assert_array_equal(_painted(painter, case, streamed), expected, strict=True)


def test_large_canvases_that_are_streamed_are_those_of_numpy() -> None:
    content = np.random.default_rng(0).integers(0, 256, (3, 301, 1201)).astype(np.uint8)
    for left, width in ((0, 1201), (7, 1300)):
        case = (content, (320, width), (left, 9, 1201, 301))
        for painter in (BytePainter((114, 7, 255)), FloatPainter((114, 7, 255), Scaling.of("imagenet"))):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiled, "native", None)
                expected = _painted(painter, case)
            np.testing.assert_array_equal(_painted(painter, case, streamed=True), expected, strict=True)


@given(placements())
def test_flipped_content_is_that_of_numpy(case: tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]) -> None:
    np.testing.assert_array_equal(mirrored(case[0]), case[0][:, :, ::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "native", None)
        np.testing.assert_array_equal(mirrored(case[0]), case[0][:, :, ::-1])


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, -1, 4, 4), (1, 0, 4, 4), (0, 1, 4, 4), (0, 0, 5, 4), (0, 0, 4, -4)])
def test_a_box_outside_the_canvas_is_refused_before_anything_is_written(box: tuple[int, int, int, int]) -> None:
    canvas, content = np.full((3, 4, 4), 9, np.uint8), np.zeros((3, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="outside the canvas"):
        native.start_painting(canvas, (4, 4), content, box, (1, 2, 3), False)
    assert (canvas == 9).all()


def test_a_canvas_or_content_of_another_size_is_refused() -> None:
    canvas, content = np.zeros((3, 4, 4), np.uint8), np.zeros((3, 2, 2), np.uint8)
    with pytest.raises(ValueError, match="sizes"):
        native.start_painting(canvas, (4, 5), content, (0, 0, 2, 2), (1, 2, 3), False)
    with pytest.raises(ValueError, match="sizes"):
        native.start_painting(canvas, (4, 4), content, (0, 0, 2, 3), (1, 2, 3), False)
    with pytest.raises(ValueError, match="same width"):
        native.mirror(canvas, content, 2)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=30), st.booleans())
def test_places_of_tokens_are_those_of_numpy(table: list[bytes], ids: list[int], changed: bool) -> None:
    found = np.array([each % len(table) for each in ids], np.uint32)
    skipped = np.array([min(1, len(table[each])) * (at % 3 == 0) for at, each in enumerate(found)], np.uint8)
    text = b"".join(table[each][skip:] for each, skip in zip(found.tolist(), skipped.tolist(), strict=True))
    text = text + b"x" if changed else text
    tokens = encoding.TokenBytes(table, frozenset(), np.zeros(len(table), np.bool_), re.compile(""), "never", False)
    mine = encoding.token_places(found, skipped, tokens, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_native_places", None)
        theirs = encoding.token_places(found, skipped, tokens, text)
    assert (mine is None) == (theirs is None) == changed
    if mine is not None:
        np.testing.assert_array_equal(mine, theirs)


def test_tokens_out_of_their_table_are_never_read() -> None:
    offsets, table, text = np.array([0, 2, 3]), b"abc", b"abc"
    for ids, at, skips in (([0, 2], offsets, [0, 0]), ([0, 1], np.array([0, 2, 9]), [0, 0]), ([0, 1], offsets, [3, 0])):
        places = np.zeros(2, np.int64)
        assert not native.token_places(places, np.array(ids, np.uint32), np.array(skips, np.uint8), at, table, text)
    places = np.zeros(2, np.int64)
    assert native.token_places(places, np.array([0, 1], np.uint32), np.zeros(2, np.uint8), offsets, table, text)
    assert places.tolist() == [0, 2]
    with pytest.raises(ValueError, match="one number for each id"):
        native.token_places(np.zeros(1, np.int64), np.zeros(2, np.uint32), np.zeros(2, np.uint8), offsets, table, text)


@given(
    st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(1, 7**size), max_size=200)),
    st.sampled_from([343, 350, 4096, 70_000]),
)
@example([1, 2, 1, 2, 2, 5, 5, 5, 3, 4, 4, 3, 1, 1], 9)
def test_bins_are_those_of_the_loop_in_python(lengths: list[int], capacity: int) -> None:
    mine = packing.pack_best_fit(np.array(lengths, np.int64), capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_native_best_fit", None)
        theirs = packing.pack_best_fit(np.array(lengths, np.int64), capacity)
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("lengths", [[3, 4], [8, 1], [2, 0], [2, -1]])
def test_lengths_that_rise_or_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="must not rise"):
        native.best_fit(np.zeros(2, np.int64), np.array(lengths, np.int64), 7)
    with pytest.raises(ValueError, match="one number for each length"):
        native.best_fit(np.zeros(3, np.int64), np.array([2, 1], np.int64), 7)


def test_runs_outside_of_a_buffer_are_refused_before_anything_is_written() -> None:
    out, source = np.zeros(4, np.uint8), np.arange(1, 7, dtype=np.uint8)
    for target, start, length in ((0, 4, 3), (2, 0, 3), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 1 << 62, 2)):
        runs = (np.array([0, each]) for each in (target, start, length))
        with pytest.raises(ValueError, match="outside"):
            native.copy_runs(out, source, *runs)
    assert not out.any()
    native.copy_runs(out, source, np.array([3, 0]), np.array([0, 4]), np.array([1, 2]))
    assert out.tolist() == [5, 6, 0, 1]


def test_runs_are_copied_alike_with_and_without_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (np.array([3, 0]), np.array([0, 4]), np.array([1, 2]))
    for copy in (native.copy_runs, None):
        monkeypatch.setattr(packing, "_native_copy_runs", copy)
        out = np.zeros(4, np.uint16)
        packing.copy_runs(out, np.arange(1, 7, dtype=np.uint16), *runs)
        assert out.tolist() == [5, 6, 0, 1]


@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.sampled_from([(), (7,), (65_535,)]),
    st.sampled_from([(), (9,)]),
    st.sampled_from([np.uint16, np.uint32]),
)
def test_documents_are_framed_alike_with_and_without_the_compiled_loop(
    lengths: list[int], begin: tuple[int, ...], end: tuple[int, ...], dtype: type
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ids = (np.arange(offsets[-1]) * 7919 % 65_536).astype(np.uint32)
    frame = packing.Frame(begin, end, 1 << 16, np.dtype(dtype))
    mine, mine_lengths = frame.around(ids, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_native_frame", None)
        theirs, their_lengths = frame.around(ids, offsets)
    assert mine.dtype == theirs.dtype == dtype
    np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(mine_lengths, their_lengths)


_LINES = st.lists(
    st.sampled_from([b"{}", b"{1}", b"\n", b"\r\n", b"}", b"{", b"\r", b"x", b"\n{", b"}\n{"]), max_size=12
)


@given(_LINES.map(b"".join), st.integers(0, 9), st.sampled_from([bytes, bytearray]))
@example(b"\n{", 0, bytes)
@example(b"\r\n{", 0, bytes)
@example(b"{}\n{}\r\n{}\n", 0, bytes)
@example(b"{}\nx", 0, bytes)
@example(b"x\n{}", 0, bytes)
@example(b"x\r\n{}", 0, bytes)
@example(b"{}\n{}", 3, bytes)
def test_lines_begin_where_the_loop_in_python_says(block: bytes, at: int, kind: type) -> None:
    jsonl = import_module("forebay.sources.jsonl")  # the package has a function of that name
    mine = jsonl._line_starts(kind(block), at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "native", None)
        theirs = jsonl._line_starts(kind(block), at)
    assert mine == theirs


def test_documents_that_do_not_fit_their_output_are_refused_before_anything_is_written() -> None:
    out, ids = np.zeros(5, np.uint16), np.arange(1, 4, dtype=np.uint32)
    for item_bytes, offsets, end in ((2, [0, 3], -1), (2, [0, 2], 9), (2, [0, 4], 9), (2, [1, 3], 9), (3, [0, 3], 9)):
        with pytest.raises(ValueError, match="room for the ids"):
            native.frame_documents(out, item_bytes, ids, np.array(offsets), -1, end)
    for falling in ([0, 3, 1, 3], [0, -1, 3], [0, 1 << 62, 3], []):
        with pytest.raises(ValueError, match="room for the ids"):
            native.frame_documents(out, 2, ids, np.array(falling, np.int64), -1, 9)
    assert not out.any()
    native.frame_documents(out, 2, ids, np.array([0, 1, 3]), -1, 9)
    assert out.tolist() == [1, 9, 2, 3, 9]


@pytest.mark.skipif(not native.can_decode(), reason="this system has no libzstd: Python's zstandard decodes")
def test_helpers_decode_the_same_blocks_up_to_the_first_bad_one(helpers: int) -> None:
    raw = [np.random.default_rng(at).integers(0, 9, 70 + 997 * at).astype(np.uint8) for at in range(20)]
    frames = [np.frombuffer(zstandard.compress(each.tobytes()), np.uint8).copy() for each in raw]

    def decoded(**wrong: int) -> tuple[int, list[np.ndarray]]:
        outs = [np.zeros(len(each) + wrong.get(f"room_{at}", 0), np.uint8) for at, each in enumerate(raw)]
        cut = [frame[: len(frame) - wrong.get(f"cut_{at}", 0)] for at, frame in enumerate(frames)]
        return native.finish(native.start_decoding(cut, outs)), outs

    count, outs = decoded()
    assert count == 20
    assert all(np.array_equal(*pair) for pair in zip(outs, raw, strict=True))
    for bad in ("cut_7", "room_7"):
        count, outs = decoded(**{bad: 1})
        assert count == 7
        assert all(np.array_equal(*pair) for pair in zip(outs[:7], raw, strict=False))
    assert decoded(room_7=-1)[0] == 7
    half = len(raw[7]) // 2  # two frames that fill the output together are not the block that was stored
    two = zstandard.compress(raw[7][:half].tobytes()) + zstandard.compress(raw[7][half:].tobytes())
    sound = frames[7].tobytes()
    size = len(raw[8]).to_bytes(4, "little")
    old = b"\x27\xb5\x2f\xfd\x80\x50" + size + b"\x40" + size[1::-1] + raw[8].tobytes() + b"\xc0\0\0"  # of zstd 0.7
    assert len(raw[8]) < 1 << 16
    for at, frame in ((7, two), (7, sound + zstandard.compress(b"")), (7, sound + old), (8, old)):
        frames[7:9] = (np.frombuffer(each, np.uint8).copy() for each in (sound, zstandard.compress(raw[8].tobytes())))
        frames[at] = np.frombuffer(frame, np.uint8).copy()
        assert decoded()[0] == at


@pytest.mark.skipif(not native.can_decode(), reason="this system has no libzstd: Python's zstandard decodes")
def test_frames_and_outputs_that_are_being_decoded_stay_in_memory(helpers: int) -> None:
    raw = [np.random.default_rng(at).integers(0, 9, 70_000).astype(np.uint8) for at in range(20)]
    outs = [bytearray(len(each)) for each in raw]
    work = native.start_decoding([zstandard.compress(each.tobytes()) for each in raw], outs)
    with pytest.raises(BufferError):  # it has a buffer that is in use
        outs[0].append(0)
    assert [len(zstandard.compress(bytes(70_000))) for _ in range(20)]  # freed memory would be used again
    assert native.finish(work) == 20
    assert outs == [each.tobytes() for each in raw]
    del work
    abandoned = native.start_decoding([zstandard.compress(each.tobytes()) for each in raw], outs)
    del abandoned  # waits for helpers
    outs[0].append(0)


def test_decoding_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="each frame needs an output"):
        native.start_decoding([b"", b""], [bytearray(1)])
    with pytest.raises((BufferError, TypeError)):  # nothing is written to what cannot be
        native.start_decoding([b"", b""], [bytearray(1), b" "])


def test_rows_outside_of_their_decoded_block_have_no_address() -> None:
    """One chunk of ten rows in blocks of four; the block of rows 4 to 7 is decoded, at place 1."""
    numbers, places, used, seen = np.array([0, 0, 0, 7]), np.array([0, 0, 0, 1]), np.zeros(2, np.int64), bytearray(2)
    offsets = np.arange(0, 33, 3)  # of rows of three values each

    def located(rows: list[int], facts: tuple[int, int, int], edges: int | None = None) -> tuple[object, list[int]]:
        within, out, counts = np.array(rows), np.full(len(rows), 7), np.zeros(len(rows), np.int64)
        table = (numbers, places, np.array([(0, 0, 0), facts]), used, seen)
        ragged = None if edges is None else (counts, np.array([edges]), np.array([72], np.uint64))
        blocks = (np.array([0, 3]), 4, 6)  # its second block is number 7
        arguments = (out, np.zeros_like(within), within, blocks, table, 50, 8, ragged)
        return native.decoded_addresses(*arguments), out.tolist()

    assert located([4, 0, 7, 9], (1000, 4, 4)) == (2, [1000, 0, 1024, 0])
    assert (used.tolist(), list(seen)) == ([0, 52], [0, 1])
    assert located([5], (1000, 12, 12), offsets.ctypes.data) == (0, [1024])
    for rows, facts, edges in (
        ([7], (1000, 4, 3), None),
        ([4], (1000, 5, 3), None),
        ([12], (1000, 4, 4), None),
        ([-1], (1000, 4, 4), None),
        ([7], (1000, 12, 11), offsets.ctypes.data),
        ([5], (1000, 12, 12), 0),  # not mapped
    ):
        assert located(rows, facts, edges)[0] is None
    with pytest.raises(ValueError, match="a power of two"):
        native.decoded_addresses(
            used, used, used, (used, 4, 6), (np.zeros(3), np.zeros(3), np.zeros(6), used, seen), 0, 8, None
        )
