"""Measurements of the write path, each its own command (run on an idle machine).

python -m benchmarks.write_path chunks  [--count 100000] [--s3]   small chunks into a folder, or a loopback S3 server
python -m benchmarks.write_path ending  [--builders 50]           builders that end together
python -m benchmarks.write_path state   [--count 1000000]         the table of a layer
python -m benchmarks.write_path reuse   [--megabytes 10000]       a new cache after one source file was edited
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from tests.remote.servers import request, s3_environment, s3_server

import forebay as fb
from benchmarks.many_chunks import many_chunks
from benchmarks.tokens_goal import Goal
from forebay.cache.state import Index
from forebay.store import LocalStore
from forebay.store.base import Buffer, Entry, Expected, Store
from forebay.store.object_store import ObjectStore

CHUNK_BYTES = 1000
LINE_BYTES = 100
FILE_BYTES = 100_000_000  # of each source file of `reuse`
MOST_ENDING_SECONDS, MOST_STATE_SECONDS = 60.0, 0.5


class CountingStore(Store):
    """Counts the requests of one process; a listing counts once per 1,000 keys."""

    requests = written = 0

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.requests += 1
        return super().read(key, start, stop)

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        self.requests += 1
        return super().view(key, expect=expect)

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        self._write(data)
        return super().create(key, data, durable=durable)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        self._write(data)
        return super().replace(key, data, if_etag=if_etag, durable=durable)

    def link(self, key: str, other: Store) -> bool:
        self.requests += 1
        return super().link(key, other)

    def entries(self, prefix: str) -> Iterator[Entry]:
        entries = list(super().entries(prefix))
        self.requests += 1 + len(entries) // 1000
        return iter(entries)

    def head(self, key: str) -> Entry | None:
        self.requests += 1
        return super().head(key)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        self.requests += 1
        super().delete(key, if_etag=if_etag)

    def _write(self, data: Sequence[Buffer]) -> None:
        self.requests += 1
        self.written += sum(map(len, data))


class CountingFolder(CountingStore, LocalStore):
    """A folder whose requests are counted."""


class CountingBucket(CountingStore, ObjectStore):
    """A bucket whose requests are counted."""


def measure_chunks(options: argparse.Namespace, folder: Path) -> None:
    """Seconds and requests to make small chunks in this process."""
    recipe = fb.RawRecipe(chunk_bytes=CHUNK_BYTES, codec="none")
    source = _lines(folder / "lines.txt", options.count * CHUNK_BYTES)
    with ExitStack() as ending:
        root = str(folder / "cache")
        if options.s3:
            (folder / "s3").mkdir()
            endpoint = ending.enter_context(s3_server(str(folder / "s3")))
            assert request("PUT", f"{endpoint}/chunks") == 200
            os.environ.update(s3_environment(endpoint))
            root = "s3://chunks/cache"
        store = CountingBucket(root) if options.s3 else CountingFolder(root)
        seconds, report = _timed(lambda: fb.build(store, fb.sources.lines(source), recipe, workers=0, progress=False))
        per_chunk = (
            f"{store.requests / report.chunks:.2f} requests and {1000 * seconds / report.chunks:.2f} ms per chunk"
        )
        print(
            f"{report.chunks:,} chunks into {'a bucket' if options.s3 else 'a folder'}: {seconds:.1f} s, {per_chunk}",
            flush=True,
        )


def measure_ending(options: argparse.Namespace, folder: Path) -> None:
    """Builders that each make one chunk, then publish at the same moment."""
    recipe = fb.RawRecipe(chunk_bytes=CHUNK_BYTES)
    source = _lines(folder / "lines.txt", (options.builders + 1) * CHUNK_BYTES)
    root = folder / "cache"
    planned = fb.build(root, fb.sources.lines(source), recipe, workers=0, end_chunk=0, progress=False)
    assert fb.summarize(root).planned_chunks > options.builders, planned
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(options.builders), context.Queue()
    processes = [
        context.Process(target=_end_together, args=(str(root), str(source), chunk, ready, results))
        for chunk in range(1, options.builders + 1)
    ]
    for process in processes:
        process.start()
    seconds = max(results.get() for _ in processes)
    for process in processes:
        process.join()
    listed = fb.status(root, depth="index").layers[0].listed
    assert listed == options.builders + 1, listed
    print(Goal(f"{options.builders} builders that end together, s", seconds, "≤", MOST_ENDING_SECONDS))


def _end_together(root: str, source: str, chunk: int, ready: Barrier, results: Any) -> None:
    class Waiting(LocalStore):
        """Waits for the other builders before its first claim on publishing."""

        waits = True

        def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
            if key == "claims/publish.json" and self.waits:
                self.waits = False
                ready.wait()
                self.began = time.monotonic()
            return super().create(key, data, durable=durable)

    store, recipe = Waiting(root), fb.RawRecipe(chunk_bytes=CHUNK_BYTES)
    fb.build(store, fb.sources.lines(source), recipe, workers=0, start_chunk=chunk, end_chunk=chunk, progress=False)
    results.put(time.monotonic() - store.began)


def measure_state(options: argparse.Namespace, folder: Path) -> None:
    """The table of a layer, once its generation and its plan are read."""
    files = options.count // 2
    store = LocalStore(str(many_chunks(folder / "many", options.count, files, files=files)))
    index = Index.take(store)
    seconds, plan = _timed(lambda: index.plan)
    keys = [entry.key for entry in store.entries(index.folder("raw") or "")]
    listing, _ = _timed(lambda: sum(1 for _ in store.entries(index.folder("raw") or "")))
    whole, state = _timed(lambda: index.state("raw"))
    assert int(state.todo.sum()) == len(plan) - files, len(keys)
    note = f"plan read in {seconds:.2f} s; listing of {len(keys):,} files {listing:.2f} s, not counted"
    print(Goal(f"LayerState of {len(plan):,} chunks, s", max(0.0, whole - listing), "≤", MOST_STATE_SECONDS, note=note))


def measure_reuse(options: argparse.Namespace, folder: Path) -> None:
    """Seconds and bytes written by `--reuse` after one of many source files was edited."""
    data, total = folder / "data", options.megabytes * 1_000_000
    data.mkdir()
    size = min(FILE_BYTES, max(CHUNK_BYTES, total // 4))
    recipe = fb.RawRecipe(codec="none", chunk_bytes=size // 4)
    for number in range(max(4, total // size)):
        _lines(data / f"{number:05d}.txt", size)
    fb.build(folder / "old", fb.sources.lines(data), recipe, workers=0, progress=False)
    (data / "00001.txt").write_bytes((data / "00001.txt").read_bytes().replace(b"0", b"1", 1))
    store = CountingFolder(str(folder / "new"))
    seconds, report = _timed(
        lambda: fb.build(store, fb.sources.lines(data), recipe, workers=0, reuse=folder / "old", progress=False)
    )
    made = f"{report.made:,} of {report.chunks:,} chunks made"
    print(
        f"--reuse of {total / 1e6:,.0f} MB: {seconds:.1f} s, {store.written / 1e6:,.1f} MB written, {made}", flush=True
    )


def _lines(path: Path, size: int) -> Path:
    """A file of different lines."""
    with open(path, "w") as file:
        for number in range(max(1, size // LINE_BYTES)):
            file.write(f"{number:012d}".ljust(LINE_BYTES - 1, "x") + "\n")
    return path


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where caches are built; a temporary folder unless named")
    verbs = parser.add_subparsers(required=True)
    for name, measure, flags in (
        ("chunks", measure_chunks, {"--count": 100_000}),
        ("ending", measure_ending, {"--builders": 50}),
        ("state", measure_state, {"--count": 1_000_000}),
        ("reuse", measure_reuse, {"--megabytes": 10_000}),
    ):
        verb = verbs.add_parser(name)
        verb.set_defaults(measure=measure)
        for flag, default in flags.items():
            verb.add_argument(flag, type=int, default=default)
        if name == "chunks":
            verb.add_argument("--s3", action="store_true", help="into an S3 server on loopback")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.measure(options, Path(folder))


if __name__ == "__main__":
    main()
