"""The hot path of feeding training, against the least work that makes the same bytes.

    python -m benchmarks.loader --keep --prepare …      makes the data, once
    python -m benchmarks.hot_path --folder … --prepare  makes images and latents beside it, once
    python -m benchmarks.hot_path --folder …            measures; a minute or two
    python -m benchmarks.hot_path --folder … --processor-time       beside other work: less of it disturbs these figures

Rows of 2048 real GPT-2 tokens, global shuffle, batches of 32, everything in the page cache. Goals: int64 tokens alone
≥ 1.0 × `DataLoader(__getitems__)` over a memmap, in process; tokens, labels and positions ≥ 2 × the same written by
hand over memmaps, ≥ 0.8 × a loop in C that writes the same bytes; `derive="device"` ≥ 0.9 × raw tokens; two threads
≥ 1.6 × one; the training thread is not stalled for more than 1 ms.

Equal work of a loop in C: it reads the same shuffled rows where they are in the mapped files, finds their lengths, and
writes the same tensors, in one thread on both sides: the loader makes each batch when it is asked for (`threads=0`). As
a loader does by default, in a thread of its own that hands batches on, is another line. A loop over few tokens that
stay in the CPU's cache is reported beside it: it reads nothing from memory, which a loader of more rows than fit there
must do.

By wall time, a round beside which other processes took more than a twentieth of a CPU is left out and timed again.
"""

import argparse
import gc
import hashlib
import itertools
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import torch
import zstandard
from torch.utils.data import DataLoader, Dataset

import forebay as fb
from benchmarks.image_data import Images
from benchmarks.loader import BATCH, ROUND_BATCHES, Batches, derived
from benchmarks.measure import ROUNDS, Comparison, compare
from benchmarks.numbers import NumberSource
from benchmarks.prepared import into_memory, prepared
from benchmarks.token_rows import LENGTH, PACKED_BLOCK_ROWS, PlainRows, open_plain
from forebay import compiled
from forebay.columns import Codec
from forebay.feeding.stream import PACKED_COLUMNS
from forebay.torch import ImageBatch, Loader
from forebay.torch.batches import Buffers
from forebay.torch.packed_batch import PackedTargets, batches_in_place

RING = 8  # batches of the loop in C that are alive at once, as in a loader
TICKS_SECONDS = 10.0
PICTURES, LATENTS = 1000, 20_000  # more latents than stay decoded in memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="that of `benchmarks.loader --keep --prepare`")
    parser.add_argument("--processor-time", action="store_true", help="of one thread, the least of many turns")
    parser.add_argument("--prepare", action="store_true", help="make the images and latents, and measure nothing")
    options = parser.parse_args()
    folder = options.folder / "data"
    if options.prepare:
        image_cache(folder)
        latent_caches(folder)
        return
    for part in ("cache-none", "cache-zstd", "plain"):
        into_memory(folder / part)
    cache, plain = fb.open_cache(folder / "cache-none"), open_plain(folder / "plain")
    print(f"{len(cache):,} rows, compiled loops: {compiled.native is not None}")
    how = PROCESSOR if options.processor_time else WALL
    if options.processor_time:
        torch.set_num_threads(1)  # threads that wait for others take time of their processors
    for measured in (small_reads, tokens_alone, by_hand, shuffled_loop_in_c, handed_on, loop_in_c, on_device):
        print(measured(cache, plain, how), flush=True)
    if options.processor_time:
        print(longest_holds(cache), flush=True)
        return
    for alive in (2, RING):
        print(loop_in_two_threads(cache, alive), flush=True)
    packed = fb.open_cache(folder / "cache-zstd")
    alone = {"labels": None, "derive": ()}
    print(decoding_in_two_threads(packed), flush=True)
    pictures, latents = fb.open_cache(image_cache(folder)), latent_caches(folder)
    for part in ("images/cache", *(f"latents-{codec}" for codec in latents)):
        into_memory(folder / part)
    scaled = ImageBatch(pictures, dtype=torch.float32, normalize="imagenet", tags=None)
    for name, one, options in (
        ("tokens alone", cache, alone),
        ("tokens, labels, positions", cache, {}),
        ("zstd, window shuffle, tokens alone", packed, alone),
        ("images of 448 x 448, uint8", pictures, {"collate": ImageBatch(pictures, tags=None)}),
        ("images of 448 x 448, normalised float32", pictures, {"collate": scaled}),
        *((f"latents of 32 KiB, {codec}", fb.open_cache(root), {}) for codec, root in latents.items()),
    ):
        print(two_threads(one, name, options), flush=True)
    pixels = BATCH * 3 * 448 * 448
    for name, values, stored, written in (
        ("int64 tokens", BATCH * LENGTH, np.uint16, np.int64),
        ("images of 448 x 448, uint8", pixels, np.uint8, np.uint8),
        ("images of 448 x 448, float32", pixels, np.uint8, np.float32),
        ("latents of 32 KiB", BATCH * 4 * 64 * 64, np.float16, np.float16),
    ):
        print(bare_copies(name, values, stored, written), flush=True)
    print(longest_holds(cache), flush=True)
    print(stalls(cache), flush=True)
    print(what_binds(cache, plain), flush=True)


@dataclass(frozen=True, slots=True)
class How:
    """How two things are timed."""

    clock: Callable[[], float]
    chosen: Callable[[list[float]], float]
    rounds: int
    batches: int  # of each round
    loading: dict[str, int]  # options of the loader


WALL = How(time.perf_counter, statistics.median, ROUNDS, ROUND_BATCHES, {})
# Other work takes the processor away, which this does not count, and its cache, which the least of many turns had.
PROCESSOR = How(time.process_time, min, 60, 100, {"threads": 0})


class BatchedRows(Dataset[torch.Tensor]):
    def __init__(self, plain: PlainRows) -> None:
        self.rows = plain.tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.rows[rows])


def tokens_alone(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    loader = DataLoader(BatchedRows(plain), BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    theirs = _forever(lambda: (batch.to(torch.int64) for batch in loader))
    return _compare(
        "int64 tokens alone / memmap in a DataLoader",
        _ours(cache, labels=None, derive=(), **how.loading),
        theirs,
        1.0,
        how,
    )


def by_hand(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    theirs = (derived(plain, rows) for rows in _orders(len(plain.tokens)))
    return _compare("tokens, labels, positions / by hand over memmaps", _ours(cache, **how.loading), theirs, 2.0, how)


def shuffled_loop_in_c(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    """One thread on both sides."""
    name = "tokens, labels, positions / a loop in C, equal work, one thread each"
    return _compare(name, _ours(cache, threads=0), _written_in_c(cache), 0.8, how)


def handed_on(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    """Batches that come from the loader's thread, against a loop in C that hands nothing on."""
    name = "the same from the loader's own thread / the loop in C in one thread"
    return _compare(name, _ours(cache), _written_in_c(cache), 0.8, how)


def _written_in_c(cache: fb.Cache) -> Iterator[object]:
    """One thread that reads the loader's rows where they are, in the order of a shuffle, into batches it reuses."""
    native = compiled.native
    assert native is not None
    rows = np.random.default_rng(0).permutation(len(cache))[: len(cache) // BATCH * BATCH]
    placed = list(cache.locate_batches(rows, BATCH, PACKED_COLUMNS))  # the cache stays open: so do its maps
    outs = [[np.empty((BATCH, LENGTH), np.int64) for _ in range(3)] for _ in range(RING)]
    for (tokens, lengths), out in zip(itertools.cycle(placed), itertools.cycle(outs), strict=False):
        batch = (None, out[0], np.empty((BATCH, lengths.most), np.int32), *out[1:])
        native.pack_rows(tokens.addresses, 2, LENGTH, lengths.addresses, lengths.counts, True, BATCH, [batch])
        yield batch


def loop_in_c(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    """One thread, rows that lie one after the other in memory, and lengths that were read before."""
    if compiled.native is None:
        raise SystemExit("the loop in C was not built: install forebay with a compiler")
    native, tokens = compiled.native, np.array(plain.tokens[: 64 * BATCH])
    lengths = [plain.lengths[plain.offsets[row] : plain.offsets[row + 1]] for row in range(len(tokens))]
    padded = np.zeros((len(lengths), max(map(len, lengths))), np.int32)
    for row, each in enumerate(lengths):
        padded[row, : len(each)] = each
    outs = [[np.empty((BATCH, LENGTH), np.int64) for _ in range(3)] for _ in range(RING)]
    seq_lens, counts = np.empty((BATCH, padded.shape[1]), np.int32), np.full(BATCH, padded.shape[1])
    rows = np.arange(len(tokens)).reshape(-1, BATCH)
    places = zip(
        tokens.ctypes.data + rows * tokens.strides[0], padded.ctypes.data + rows * padded.strides[0], strict=True
    )

    def written() -> Iterator[object]:
        for (tokens_at, lengths_at), out in zip(itertools.cycle(places), itertools.cycle(outs), strict=False):
            native.pack_rows(
                tokens_at, 2, LENGTH, lengths_at, counts, True, BATCH, [(None, out[0], seq_lens, *out[1:])]
            )
            yield out

    return _compare(
        "the same / a loop in C over tokens in the CPU's cache", _ours(cache, **how.loading), written(), 0.8, how
    )


def loop_in_two_threads(cache: fb.Cache, alive: int) -> Comparison:
    """The most that two threads can reach: the compiled code alone writes rows of mapped files, 8 batches in a call.

    Neither side makes tensors or passes anything on. `ours` are two threads that write half of the batches each, every
    one into `alive` batches of its own: with many of them, the cache that both CPUs share is too small.
    """
    native = compiled.native
    assert native is not None
    rows = np.random.default_rng(0).permutation(len(cache))[: len(cache) // (RING * BATCH) * RING * BATCH]
    placed = list(cache.locate_batches(rows, RING * BATCH, PACKED_COLUMNS))  # the cache stays open: so do its maps

    def write(turns: int, first: int) -> None:
        outs = [np.empty((3, BATCH, LENGTH), np.int64) for _ in range(alive)] * (RING // alive)
        for number in range(turns):
            tokens, lengths = placed[(first + number) % len(placed)]
            batches = [(None, out[0], np.empty((BATCH, lengths.most), np.int32), *out[1:]) for out in outs]
            native.pack_rows(tokens.addresses, 2, LENGTH, lengths.addresses, lengths.counts, True, BATCH, batches)

    name = f"the compiled code alone, {alive} batches alive in each thread: two threads / one"
    return _by_two_threads(name, write, ROUND_BATCHES // RING, ROUND_BATCHES * BATCH)


def bare_copies(name: str, values: int, stored: type, written: type) -> Comparison:
    """What the memory of this machine can do: numpy copies as many values as a batch has, and widens them.

    Each thread has two batches, and nothing is passed on.
    """
    source = np.ones((1 << 28) // np.dtype(stored).itemsize, stored)

    def copy(turns: int, first: int) -> None:
        outs = [np.empty(values, written) for _ in range(2)]
        for number in range(turns):
            at = (first + number) * values % (len(source) - values)
            np.copyto(outs[number % 2], source[at : at + values])

    turns = max(20, (1 << 30) // (values * np.dtype(written).itemsize)) // 2 * 2
    return _by_two_threads(f"copies of the bytes of {name} by numpy: two threads / one", copy, turns, turns * BATCH)


def _by_two_threads(name: str, work: Callable[[int, int], None], turns: int, rows: int) -> Comparison:
    """Compare two threads that do half of the turns each with one that does all; `work` takes turns and the first."""

    def by_threads(count: int) -> None:
        each = turns // count
        threads = [threading.Thread(target=work, args=(each, at * each)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return compare(
        name, lambda: by_threads(2), lambda: by_threads(1), amount=rows, unit="rows", goal=1.6, undisturbed=True
    )


def decoding_in_two_threads(packed: fb.Cache) -> Comparison:
    """As `loop_in_two_threads`, for zstd: each thread decodes half of the blocks of two chunks into memory it has.

    Memory that is new to a process is cleared page by page, by one thread at a time: blocks that are kept take half as
    long again, and two threads are hardly faster than one.
    """
    files = [packed._layer_maps(packed.generation.base).get(position) for position in range(2)]
    frames = [file.stored_block("tokens", at)[0] for file in files for at in range(len(file.sums("tokens")))]

    def decode(turns: int, first: int) -> None:
        decompressor = zstandard.ZstdDecompressor()
        for frame in frames[first : first + turns]:
            decompressor.decompress(frame)

    amount = len(frames) * PACKED_BLOCK_ROWS
    return _by_two_threads("decoding of zstd blocks alone: two threads / one", decode, len(frames), amount)


def small_reads(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    orders = _orders(len(cache))
    ours, theirs = (
        (read(rows) for rows in orders) for read in (partial(cache.read, columns=["tokens"]), plain.tokens.__getitem__)
    )
    return _compare("cache.read of 32 rows of 4 KiB / memmap[rows]", ours, theirs, 0.7, how)


def on_device(cache: fb.Cache, plain: PlainRows, how: How) -> Comparison:
    """Both with the thread of a loader, which passes on many of these small batches at once."""
    raw = _ours(cache, columns=["tokens"], collate="stored")
    return _compare('`derive="device"` / raw tokens', _ours(cache, derive="device"), raw, 0.9, how)


def two_threads(cache: fb.Cache, name: str, options: dict[str, object]) -> Comparison:
    """Each side has its own decoded blocks."""
    one, two = (_ours(fb.open_cache(cache.root), threads=threads, **options) for threads in (1, 2))
    batches = min(ROUND_BATCHES, max(50, (1 << 30) // (BATCH * cache.row_bytes(cache.default_columns))))
    return _compare(f"{name}: two threads / one", two, one, 1.6, replace(WALL, batches=batches))


class LatentRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Latents of images of 512 x 512, as a VAE's in shape and spread: noise, the same for the same number."""

    kind: ClassVar[str] = "latents"
    revision: ClassVar[int] = 1
    codec: Codec

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="latents", dtype="float16", shape=(4, 64, 64), codec=self.codec),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=1000)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        drawn = [np.random.default_rng(sample.data).standard_normal((4, 64, 64), np.float32) for sample in samples]
        return fb.Rows({"latents": np.array(drawn).astype(np.float16)})


def image_cache(folder: Path) -> Path:
    return Images(folder / "images", None, PICTURES, folder).cache()


def latent_caches(folder: Path) -> dict[Codec, Path]:
    codecs: tuple[Codec, ...] = ("none", "zstd")
    return {
        codec: prepared(
            folder / f"latents-{codec}",
            f"{LATENTS} latents",
            lambda root, codec=codec: fb.build(root, NumberSource(LATENTS), LatentRecipe(codec=codec), workers=0),
        )
        for codec in codecs
    }


def stalls(cache: fb.Cache) -> str:
    """How long a thread that only counts is stopped: one that trains, and one beside another that never pauses.

    The one that trains takes a batch of a loader every 2 ms. The others have a harder life than training has: the other
    thread wants the interpreter's lock again some microseconds after it gave it up, and may have it again before this
    one woke up. The hashing thread has nothing of ours.

    A thread loses its core now and then, to other processes or to those of the machine's host, also while it has the
    lock; no library can prevent that. So it is also said how long the other thread computed while this one waited for
    the lock, and not for a core.
    """

    def load(stop: threading.Event) -> None:
        for _ in _ours(cache, threads=0):
            if stop.is_set():
                return

    def hash_bytes(stop: threading.Event) -> None:
        block = bytes(64 << 10)  # hashed without the lock, as rows are copied without it
        while not stop.is_set():
            hashlib.sha256(block)

    beside = {
        "a loader that makes batches all the time": load,
        "a thread that hashes": hash_bytes,
        "nothing else": threading.Event.wait,
    }
    return "\n".join([_stalls_in_training(cache), *(_stalls_beside(name, work) for name, work in beside.items())])


def _stalls_in_training(cache: fb.Cache) -> str:
    batches = _ours(cache)
    for _ in itertools.islice(batches, 2 * len(cache) // BATCH):  # every block has been checked
        pass
    feed = [thread for thread in threading.enumerate() if thread.name.startswith("forebay-feed")]
    found = ticks(TICKS_SECONDS, feed[-1], lambda: next(batches))
    return _as_line("in a training thread that takes a batch every 2 ms", *found)


def _stalls_beside(name: str, work: Callable[[threading.Event], object]) -> str:
    stop = threading.Event()
    worker = threading.Thread(target=work, args=(stop,))
    worker.start()
    time.sleep(2.0)  # every block has been checked
    found = ticks(TICKS_SECONDS, worker)
    stop.set()
    worker.join()
    return _as_line(f"beside {name}", *found)


def _as_line(where: str, gaps: np.ndarray, stalled: np.ndarray, waited: np.ndarray) -> str:
    late = gaps > 1e-3
    return (
        f"ticking {where}: longest gap {gaps.max() * 1e3:.2f} ms, {late.sum()} gaps over 1 ms in {TICKS_SECONDS:.0f} "
        f"s, {gaps[late].sum() / TICKS_SECONDS:.2%} of the time; longest in which it waited for the lock "
        f"{gaps[waited].max(initial=0) * 1e3:.2f} ms; longest wait for the lock while the other thread computed "
        f"{stalled[waited].max(initial=0) * 1e3:.2f} ms (goal ≤ 1 ms)"
    )


def longest_holds(cache: fb.Cache) -> str:
    """How long a loader holds the interpreter's lock: CPU time between two compiled calls, each of which releases it.

    CPU time does not count what other work on the machine takes, unlike the gaps of a ticking thread.
    """
    native, found, last = compiled.native, [], time.thread_time()

    def noted(call: Callable[..., object]) -> Callable[..., object]:
        def noting(*arguments: object) -> object:
            nonlocal last
            found.append(time.thread_time() - last)
            result = call(*arguments)
            last = time.thread_time()
            return result

        return noting

    calls = ("start_packing", "finish", "permute", "fixed_addresses", "ragged_addresses", "locate_rows", "gather")
    collected: list[int] = []

    def note_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collected.append(info["generation"])

    batches = _ours(cache, threads=0)
    for _ in itertools.islice(batches, 2 * len(cache) // BATCH):  # every block has been checked
        pass
    try:
        compiled.native = SimpleNamespace(**vars(native) | {name: noted(getattr(native, name)) for name in calls})
        gc.callbacks.append(note_collection)
        for _ in itertools.islice(batches, 2 * len(cache) // BATCH):
            pass
    finally:
        gc.callbacks.remove(note_collection)
        compiled.native = native
    held = np.array(found[1:]) * 1e3
    begun = time.thread_time()
    gc.collect()
    whole = time.thread_time() - begun
    return (
        f"a loader holds the lock for at most {held.max():.2f} ms of CPU time at once, median {np.median(held):.3f} "
        f"ms, 99.9 % below {np.quantile(held, 0.999):.2f} ms, over {len(held):,} times (goal ≤ 1 ms); meanwhile Python "
        f"collected garbage {len(collected)} times, {collected.count(2)} times all of it, which takes "
        f"{whole * 1e3:.1f} ms in this process"
    )


def what_binds(cache: fb.Cache, plain: PlainRows) -> str:
    """What a batch of tokens, labels and positions is made of, in one thread: the best of many turns of 64 batches.

    Other work on the machine makes turns longer, and leaves the best of them as it is.
    """
    native = compiled.native
    assert native is not None
    rows = np.random.default_rng(0).permutation(len(cache))[: 64 * BATCH]
    placed = list(cache.locate_batches(rows, BATCH, PACKED_COLUMNS))  # the cache stays open: so do its maps
    near = np.array(plain.tokens[:BATCH])  # 128 KiB
    near_at = near.ctypes.data + np.arange(BATCH) * near.strides[0]
    outs = [[np.empty((BATCH, LENGTH), np.int64) for _ in range(3)] for _ in range(24)]
    seq_lens = [np.empty((BATCH, lengths.most), np.int32) for _, lengths in placed]
    together = [list(cache.locate_batches(rows, size * BATCH, PACKED_COLUMNS)) for size in (1, 2)]
    targets, buffers, nothing = PackedTargets(), Buffers(64 << 20), itertools.repeat({})

    def pack(ring: int, wanted: int, near_rows: bool) -> None:
        for number, (tokens, lengths) in enumerate(placed):
            out = [array if at < wanted else None for at, array in enumerate(outs[number % ring])]
            tokens_at = near_at if near_rows else tokens.addresses
            batch = (None, out[0], seq_lens[number], *out[1:])
            native.pack_rows(tokens_at, 2, LENGTH, lengths.addresses, lengths.counts, True, BATCH, [batch])

    def whole(size: int) -> None:
        for tokens, lengths in together[size - 1]:
            list(batches_in_place(tokens, lengths, BATCH, size, nothing, targets, buffers))

    parts = {
        "call that writes lengths only": lambda: pack(1, 0, True),
        "tokens from the L2 cache, three outputs, 1 batch alive (1.5 MiB)": lambda: pack(1, 3, True),
        "the same, 8 batches alive (12 MiB)": lambda: pack(8, 3, True),
        "the same, 24 batches alive (36 MiB)": lambda: pack(24, 3, True),
        "shuffled rows of mapped files, three outputs, 1 batch alive": lambda: pack(1, 3, False),
        "shuffled rows of mapped files, tokens alone": lambda: pack(1, 1, False),
        "the same with memory and tensors: a whole batch": lambda: whole(1),
        "the same, two batches in one call": lambda: whole(2),
        "locating rows, 64 batches together": lambda: list(cache.locate_batches(rows, BATCH, PACKED_COLUMNS)),
        "cache.read of 32 rows of tokens": lambda: [cache.read(some, ["tokens"]) for some in np.split(rows, 64)],
        "memmap[rows] of 32 rows of tokens": lambda: [plain.tokens[some] for some in np.split(rows, 64)],
    }
    return "\n".join(f"{name:<70} {best_turn(part) / 64 * 1e6:7.2f} µs a batch" for name, part in parts.items())


def best_turn(call: Callable[[], object], turns: int = 300) -> float:
    found = []
    for _ in range(turns):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


STEP_SECONDS = 0.002
Step = Callable[[], object]


def ticks(seconds: float, other: threading.Thread, step: Step | None = None) -> tuple[np.ndarray, ...]:
    """The gaps of a thread that asks for the time again and again; stalls by the other thread; where it waited.

    A thread that waits for the interpreter's lock gives up its core; where it did not, the machine took the core away.
    A stall is as much of a gap as it did not wait for a core, and as the other thread computed in it. A `step` comes
    every 2 ms, and is no gap.
    """
    assert other.ident is not None
    clock, queue = time.pthread_getcpuclockid(other.ident), os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def read() -> tuple[float, int, float, float]:
        return time.perf_counter(), _waits(), time.clock_gettime(clock), _queued(queue)

    found, stalled, waited = [0.0], [0.0], [False]
    last, waits, spent, queued = read()
    stop, due = last + seconds, last + STEP_SECONDS
    while last < stop:
        if step is not None and last > due:
            step()
            last, waits, spent, queued = read()
            due = last + STEP_SECONDS
        now, *facts = read()
        if now - last > 1e-4:
            found.append(now - last)
            stalled.append(max(0.0, min(now - last - (facts[2] - queued), facts[1] - spent)))
            waited.append(facts[0] != waits)
        last, (waits, spent, queued) = now, facts
    os.close(queue)
    return np.array(found), np.array(stalled), np.array(waited)


def _queued(schedstat: int) -> float:
    """Seconds that a thread was ready to run and had no core."""
    return int(os.pread(schedstat, 100, 0).split()[1]) * 1e-9


def _waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _ours(cache: fb.Cache, **options: object) -> Batches:
    loader = Loader(cache, global_batch_size=BATCH, **options)
    return _forever(lambda: loader)


def _forever(epoch: Callable[[], object]) -> Batches:
    while True:
        yield from epoch()


def _orders(rows: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng(0).permutation(rows)[: rows // BATCH * BATCH]
    return itertools.cycle(np.split(order, rows // BATCH))


def _compare(name: str, ours: Iterator[object], theirs: Iterator[object], goal: float, how: How) -> Comparison:
    def take(batches: Iterator[object], count: int = how.batches) -> None:
        for _ in itertools.islice(batches, count):
            pass

    take(ours, 2 * how.batches if how is not PROCESSOR else 2 * ROUND_BATCHES)  # every block is checked by now
    options = {"rounds": how.rounds, "clock": how.clock, "chosen": how.chosen, "undisturbed": how is not PROCESSOR}
    amount = how.batches * BATCH
    return compare(name, lambda: take(ours), lambda: take(theirs), amount=amount, unit="rows", goal=goal, **options)


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main()
