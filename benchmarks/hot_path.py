"""The hot path of feeding training, against the least work that makes the same bytes.

    python -m benchmarks.loader --keep --prepare …      makes the data, once
    python -m benchmarks.hot_path --folder …            measures; a minute or two

Rows of 2048 real GPT-2 tokens, global shuffle, batches of 32, everything in the page cache. Goals: int64 tokens alone
≥ 1.0 × `DataLoader(__getitems__)` over a memmap, in process; tokens, labels and positions ≥ 2 × the same written by
hand over memmaps, ≥ 0.8 × a loop in C that writes the same bytes; `derive="device"` ≥ 0.9 × raw tokens; two threads
≥ 1.6 × one; the training thread is not stalled for more than 1 ms.
"""

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import forebay as fb
from benchmarks.loader import BATCH, ROUND_BATCHES, Batches, derived
from benchmarks.measure import Comparison, compare
from benchmarks.prepared import into_memory
from benchmarks.token_rows import LENGTH, PlainRows, open_plain
from forebay import compiled
from forebay.feeding.stream import PACKED_COLUMNS
from forebay.torch import Loader
from forebay.torch.batches import Buffers
from forebay.torch.packed_batch import PackedTargets, batch_in_place

RING = 8  # batches of the loop in C that are alive at once, as in a loader
TICKS_SECONDS = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="that of `benchmarks.loader --keep --prepare`")
    folder = parser.parse_args().folder / "data"
    for part in ("cache-none", "plain"):
        into_memory(folder / part)
    cache, plain = fb.open_cache(folder / "cache-none"), open_plain(folder / "plain")
    print(f"{len(cache):,} rows, compiled loops: {compiled.native is not None}")
    for measured in (tokens_alone, by_hand, loop_in_c, on_device):
        print(measured(cache, plain), flush=True)
    for name, options in (("tokens alone", {"labels": None, "derive": ()}), ("tokens, labels, positions", {})):
        print(two_threads(cache, name, options), flush=True)
    print(stalls(cache), flush=True)
    print(what_binds(cache, plain), flush=True)


class BatchedRows(Dataset[torch.Tensor]):
    def __init__(self, plain: PlainRows) -> None:
        self.rows = plain.tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.rows[rows])


def tokens_alone(cache: fb.Cache, plain: PlainRows) -> Comparison:
    loader = DataLoader(BatchedRows(plain), BATCH, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    theirs = _forever(lambda: (batch.to(torch.int64) for batch in loader))
    return _compare("int64 tokens alone / memmap in a DataLoader", _ours(cache, labels=None, derive=()), theirs, 1.0)


def by_hand(cache: fb.Cache, plain: PlainRows) -> Comparison:
    theirs = (derived(plain, rows) for rows in _orders(len(plain.tokens)))
    return _compare("tokens, labels, positions / by hand over memmaps", _ours(cache), theirs, 2.0)


def loop_in_c(cache: fb.Cache, plain: PlainRows) -> Comparison:
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
            native.pack_rows(tokens_at, 2, LENGTH, lengths_at, counts, seq_lens, None, *out, True)
            yield out

    return _compare("tokens, labels, positions / a loop in C that writes them", _ours(cache), written(), 0.8)


def on_device(cache: fb.Cache, plain: PlainRows) -> Comparison:
    raw = _ours(cache, columns=["tokens"])
    return _compare('`derive="device"` / raw tokens', _ours(cache, derive="device"), raw, 0.9)


def two_threads(cache: fb.Cache, name: str, options: dict[str, object]) -> Comparison:
    one, two = (_ours(cache, threads=threads, **options) for threads in (1, 2))
    return _compare(f"{name}: two threads / one", two, one, 1.6)


def stalls(cache: fb.Cache) -> str:
    """How long a thread that only counts is stopped while one other thread makes batches, and while none does."""
    lines = []
    for name, busy in (("a loader in one thread", True), ("nothing else", False)):
        stop = threading.Event()

        def consume(stop: threading.Event = stop) -> None:
            for _ in _ours(cache, threads=0):
                if stop.is_set():
                    return

        worker = threading.Thread(target=consume) if busy else None
        if worker is not None:
            worker.start()
            time.sleep(2.0)  # every block has been checked
        gaps = ticks(TICKS_SECONDS)
        stop.set()
        if worker is not None:
            worker.join()
        late = gaps[gaps > 1e-3]
        lines.append(
            f"ticking beside {name}: longest gap {gaps.max() * 1e3:.2f} ms, {len(late)} gaps over 1 ms in "
            f"{TICKS_SECONDS:.0f} s, {late.sum() / TICKS_SECONDS:.2%} of the time"
        )
    return "\n".join(lines)


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
    targets, buffers = PackedTargets(), Buffers(64 << 20)

    def pack(ring: int, wanted: int, near_rows: bool) -> None:
        for number, (tokens, lengths) in enumerate(placed):
            out = [array if at < wanted else None for at, array in enumerate(outs[number % ring])]
            tokens_at = near_at if near_rows else tokens.addresses
            kept = seq_lens[number]
            native.pack_rows(tokens_at, 2, LENGTH, lengths.addresses, lengths.counts, kept, None, *out, True)

    def whole() -> None:
        for tokens, lengths in placed:
            batch_in_place(tokens, lengths, {}, targets, buffers)

    parts = {
        "call that writes lengths only": lambda: pack(1, 0, True),
        "tokens from the L2 cache, three outputs, 1 batch alive (1.5 MiB)": lambda: pack(1, 3, True),
        "the same, 8 batches alive (12 MiB)": lambda: pack(8, 3, True),
        "the same, 24 batches alive (36 MiB)": lambda: pack(24, 3, True),
        "shuffled rows of mapped files, three outputs, 1 batch alive": lambda: pack(1, 3, False),
        "shuffled rows of mapped files, tokens alone": lambda: pack(1, 1, False),
        "the same with memory and tensors: a whole batch": whole,
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


def ticks(seconds: float) -> np.ndarray:
    """The gaps of a thread that asks for the time again and again."""
    found, last = [], time.perf_counter()
    stop = last + seconds
    while last < stop:
        now = time.perf_counter()
        if now - last > 1e-4:
            found.append(now - last)
        last = now
    return np.array(found or [0.0])


def _ours(cache: fb.Cache, **options: object) -> Batches:
    loader = Loader(cache, global_batch_size=BATCH, **options)
    return _forever(lambda: loader)


def _forever(epoch: Callable[[], object]) -> Batches:
    while True:
        yield from epoch()


def _orders(rows: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng(0).permutation(rows)[: rows // BATCH * BATCH]
    return itertools.cycle(np.split(order, rows // BATCH))


def _compare(name: str, ours: Iterator[object], theirs: Iterator[object], goal: float) -> Comparison:
    def take(batches: Iterator[object]) -> None:
        for _ in itertools.islice(batches, ROUND_BATCHES):
            pass

    amount = ROUND_BATCHES * BATCH
    for _ in range(2):
        take(ours)  # every block is checked by now
    return compare(name, lambda: take(ours), lambda: take(theirs), amount=amount, unit="rows", goal=goal)


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main()
