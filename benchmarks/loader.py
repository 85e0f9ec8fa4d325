"""Feeding training: the loader against numpy.memmap in the same process, and against other loaders.

    python -m benchmarks.loader --rows 1000000 --text 'data/*.jsonl.gz'
    python -m benchmarks.loader --keep --prepare …     makes the data; later runs with --keep find it, and only measure

Rows of 2048 real GPT-2 tokens, global shuffle, batches of 32. Goals: raw tokens ≥ 0.7 × fancy indexing of a memmap;
the whole training batch (int64 tokens, labels, positions) ≥ 2 × the same derivation over a memmap and ≥ 4 × the
fastest peer that yields int64 tokens alone; int64 tokens alone ≥ 1 × memmap + DataLoader, ≥ 3 × LitData, ≥ 2 × Hugging
Face Datasets; int64 tokens of a zstd cache, window shuffle, ≥ the fastest peer; `derive="device"` hands out 12 × fewer
bytes of tokens; the first batch in < 0.5 s; at 90 % of an epoch of 100 million rows in < 0.1 s; anonymous memory flat
from 1 to 100 million rows.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

import forebay as fb
from benchmarks.loader_peers import (
    PEERS,
    TOKENIZER,
    Peer,
    PeerFailed,
    Reading,
    environment,
    installed,
    peer_data,
    peer_readings,
    script,
)
from benchmarks.measure import ROUNDS, Comparison, compare
from benchmarks.numbers import NarrowRecipe, NumberSource
from benchmarks.prepared import into_memory, prepared
from benchmarks.token_rows import PlainRows, build_tokens, open_plain, write_plain
from forebay.columns import Codec
from forebay.torch import Loader

BATCH = 32
ROUND_BATCHES = 2000
FLAT_BYTES = 32 << 20
GOALS = {  # of ours over a peer; 1 where none is named
    "tokens, labels, positions": {peer.name: 4.0 for peer in PEERS},
    "int64 tokens": {"LitData": 3.0, "Hugging Face Datasets": 2.0},
}
EVERY_PYTHON_FILE = f"{sysconfig.get_paths()['stdlib']}/**/*.py"

Batches = Iterator[Mapping[str, torch.Tensor]]
Order = Iterator[np.ndarray]
Call = Callable[[], None]


def main() -> None:
    options = _options()
    data = Data(options.folder / "data", options)
    try:
        if options.prepare:
            data.make_all()
        else:
            measure(data, options)
    finally:
        if not options.keep:
            shutil.rmtree(data.folder, ignore_errors=True)


class Data:
    """What is measured: made when it is asked for, unless a former run left it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self._options = options
        self._made_of = f"{options.rows} rows of {options.text}"

    def make_all(self) -> None:
        self.cache("none"), self.cache("zstd"), self.plain()
        for peer in PEERS:
            self.peer(peer)
        self.indexes()

    def cache(self, codec: Codec) -> Path:
        return prepared(
            self.folder / f"cache-{codec}",
            self._made_of,
            lambda root: build_tokens(root, self._stream(), self._options.rows, codec),
        )

    def plain(self) -> Path:
        root = self.cache("none")
        return prepared(self.folder / "plain", self._made_of, lambda place: write_plain(fb.open_cache(root), place))

    def peer(self, peer: Peer) -> Path:
        return peer_data(peer, self.plain() / "tokens", self.folder, self._options.environments)

    def indexes(self) -> dict[int, Path]:
        """Caches of many short rows: a hundredth of them, and all."""
        rows = self._options.index_rows
        return {count: self._index(count) for count in (rows // 100, rows)}

    def _index(self, rows: int) -> Path:
        chunks = NumberSource(rows // NarrowRecipe().chunk_rows)
        return prepared(self.folder / f"index-{rows}", str(rows), lambda root: fb.build(root, chunks, NarrowRecipe()))

    def _stream(self) -> Path:
        python = environment(TOKENIZER, self._options.environments)
        return prepared(
            self.folder / "stream",
            self._options.text,
            lambda place: script(TOKENIZER, python, self._options.text, place),
        )


def measure(data: Data, options: argparse.Namespace) -> None:
    if options.bytes:
        batch_sizes(fb.open_cache(data.cache("none")))
        return
    if options.peers:
        for codec in ("none", "zstd"):
            into_memory(data.cache(codec))
        against_peers(fb.open_cache(data.cache("none")), fb.open_cache(data.cache("zstd")), data, options)
        return
    for folder in (data.cache("none"), data.plain()):
        into_memory(folder)
    cache, plain = fb.open_cache(data.cache("none")), open_plain(data.plain())
    for comparison in (raw_tokens(cache, plain), first_epoch(data.cache("none"), plain), whole_batch(cache, plain)):
        print(comparison, flush=True)
    batch_sizes(cache)
    first_batch(data.cache("none"))
    against_peers(cache, fb.open_cache(data.cache("zstd")), data, options)
    large_index(data.indexes())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    below = Path(os.environ.get("FOREBAY_BENCH_DIR", tempfile.gettempdir())) / "forebay-bench"
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--index-rows", type=int, default=100_000_000, help="of the epoch that is resumed at 90 %%")
    parser.add_argument("--text", default=EVERY_PYTHON_FILE, help="glob of .jsonl, .jsonl.gz or text files")
    parser.add_argument("--seconds", type=float, default=8, help="for each configuration of a peer")
    parser.add_argument("--folder", type=Path, default=below, help="outside the repository; 34 GB for 1 M rows")
    parser.add_argument("--environments", type=Path, default=below / "environments", help="of the peers; 7 GB, kept")
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in PEERS], help="measure against these alone")
    parser.add_argument("--bytes", action="store_true", help="print the bytes of batches, measure nothing")
    parser.add_argument("--keep", action="store_true", help="leave the data there, for the next run")
    parser.add_argument("--prepare", action="store_true", help="make the data, measure nothing")
    return parser.parse_args()


def raw_tokens(cache: fb.Cache, plain: PlainRows) -> Comparison:
    batches, order = (
        _forever(Loader(cache, global_batch_size=BATCH, columns=["tokens"], collate="stored")),
        _endless_order(len(cache)),
    )
    _take(batches, len(cache) // BATCH)  # every block is checked by now
    name = "raw tokens / memmap fancy indexing"
    return _compare(name, lambda: _take(batches), lambda: _gather(plain, order), goal=0.7)


def first_epoch(root: Path, plain: PlainRows) -> Comparison:
    """A whole epoch of a cache that was just opened: every block is checked on the way."""
    order, count = _endless_order(len(plain.tokens)), len(plain.tokens) // BATCH

    def ours() -> None:
        _take(iter(Loader(fb.open_cache(root), global_batch_size=BATCH, columns=["tokens"], collate="stored")), count)

    name = "raw tokens, first epoch, checking / memmap fancy indexing"
    return _compare(name, ours, lambda: _gather(plain, order, count), goal=0.7, batches=count, rounds=3)


def whole_batch(cache: fb.Cache, plain: PlainRows) -> Comparison:
    _check_equal(next(iter(Loader(cache, global_batch_size=BATCH, shuffle=None))), derived(plain, np.arange(BATCH)))
    batches, order = _forever(Loader(cache, global_batch_size=BATCH)), _endless_order(len(cache))

    def theirs() -> None:
        for rows in itertools.islice(order, ROUND_BATCHES):
            derived(plain, rows)

    name = "tokens, labels, positions / the same over memmap"
    return _compare(name, lambda: _take(batches), theirs, goal=2.0)


def derived(plain: PlainRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """A training batch from memmaps as one writes it by hand: flat over the batch, no Python per document."""
    tokens = plain.tokens[rows].astype(np.int64)
    pieces = [plain.lengths[plain.offsets[row] : plain.offsets[row + 1]] for row in rows.tolist()]
    lengths = np.concatenate(pieces).astype(np.int64)
    stops = np.cumsum(lengths)
    labels = np.empty_like(tokens)
    labels.ravel()[:-1] = tokens.ravel()[1:]
    labels.ravel()[stops - 1] = -100
    positions = (np.arange(tokens.size) - np.repeat(stops - lengths, lengths)).reshape(tokens.shape)
    arrays = {"tokens": tokens, "labels": labels, "positions": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in theirs.items():
        if not torch.equal(ours[name], tensor):
            raise AssertionError(f"{name} differ; timing them would compare different things")


def batch_sizes(cache: fb.Cache) -> None:
    """The bytes that the host hands out for the tokens of a batch, and for all of it."""
    loaders = (Loader(cache, global_batch_size=BATCH), Loader(cache, global_batch_size=BATCH, derive="device"))
    whole, sent = ({name: each.nbytes for name, each in next(iter(loader)).items()} for loader in loaders)
    ratio = (sum(whole.values()) - whole["seq_lens"]) / sent["tokens"]
    everything = f"{sum(whole.values()):,} and {sum(sent.values()):,} bytes with seq_lens"
    _tell(f"tokens, labels, positions / tokens of derive='device': {ratio:.1f} × ({everything})", "12 ×", ratio >= 12)


def first_batch(root: Path) -> None:
    seconds = statistics.median(_once(root)["first_seconds"] for _ in range(5))
    _tell(f"first batch of a fresh process, opening included: {seconds:.3f} s", "< 0.5 s", seconds < 0.5)


def against_peers(cache: fb.Cache, packed: fb.Cache, data: Data, options: argparse.Namespace) -> None:
    """Every peer in turn, ours before each of them; then ours over the best of each peer."""
    ours = {
        "tokens, labels, positions": _forever(Loader(cache, global_batch_size=BATCH)),
        "int64 tokens": _forever(Loader(cache, global_batch_size=BATCH, labels=None, derive=())),
        "zstd, window shuffle, int64 tokens": _forever(
            Loader(packed, global_batch_size=BATCH, shuffle="window", labels=None, derive=())
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in ours}
    readings: list[Reading] = []
    for peer in (peer for peer in PEERS if peer.name in (options.peers or [peer.name])):
        for name, batches in ours.items():
            rates[name].append(_rows_per_second(batches))
        try:
            found = list(peer_readings(peer, data.peer(peer), options.environments, options.seconds))
        except PeerFailed as failure:
            print(failure, flush=True)
            continue
        print(f"{peer.name} ({installed(peer, options.environments)})")
        print(*found, sep="\n", flush=True)
        readings += found
    for name in ours:
        _hold_against(name, statistics.median(rates[name]), readings, GOALS.get(name, {}))


def _hold_against(what: str, rate: float, readings: list[Reading], goals: Mapping[str, float]) -> None:
    best = {reading.peer: reading for reading in sorted(readings, key=lambda reading: reading.rows_per_second)}
    for peer, reading in best.items():
        seconds, goal = 1 / reading.rows_per_second, goals.get(peer, 1.0)
        print(Comparison(f"{what} / {peer}", 1 / rate, seconds, 1, "rows", goal), flush=True)


def large_index(indexes: Mapping[int, Path]) -> None:
    """Resume, and memory, at a hundredth of the rows and at all of them."""
    fewer, rows = indexes
    found = {count: _once(root, "tokens") for count, root in indexes.items()}
    seconds = found[rows]["resume_seconds"]
    _tell(f"resume at 90 % of {rows:,} rows: {seconds:.3f} s to the next batch", "< 0.1 s", seconds < 0.1)
    memory = [found[count]["anonymous_bytes"] / 2**20 for count in found]
    grown = found[rows]["anonymous_bytes"] - found[fewer]["anonymous_bytes"]
    what = f"anonymous memory at {fewer:,} and {rows:,} rows: {memory[0]:.0f} and {memory[1]:.0f} MiB"
    _tell(what, "within 32 MiB", grown < FLAT_BYTES)


def _tell(what: str, goal: str, met: bool) -> None:
    print(f"{what}  goal {goal}  {'met' if met else 'MISSED'}", flush=True)


def _once(root: Path, *columns: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loader_once", str(root), *columns]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def _rows_per_second(batches: Batches) -> float:
    _take(batches, ROUND_BATCHES // 4)
    started = time.perf_counter()
    _take(batches)
    return ROUND_BATCHES * BATCH / (time.perf_counter() - started)


def _compare(
    name: str, ours: Call, theirs: Call, goal: float, batches: int = ROUND_BATCHES, rounds: int = ROUNDS
) -> Comparison:
    return compare(name, ours, theirs, amount=batches * BATCH, unit="rows", goal=goal, rounds=rounds)


def _forever(loader: Loader) -> Batches:
    while True:
        yield from loader


def _take(batches: Batches, count: int = ROUND_BATCHES) -> None:
    for _ in itertools.islice(batches, count):
        pass


def _endless_order(rows: int) -> Order:
    """Batches of a permutation that was made before, again and again."""
    order = np.random.default_rng(0).permutation(rows)
    return itertools.cycle(np.split(order[: rows // BATCH * BATCH], rows // BATCH))


def _gather(plain: PlainRows, order: Order, count: int = ROUND_BATCHES) -> None:
    for rows in itertools.islice(order, count):
        torch.from_numpy(plain.tokens[rows])


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main()
