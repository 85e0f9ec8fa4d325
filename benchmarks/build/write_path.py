"""Costs of the index: small chunks, builders that end together, the table of a layer, `--reuse` after an edit."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from tests.helpers.many_chunks import many_chunks
from tests.remote.servers import request, s3_environment, s3_server

import forebay as fb
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result
from forebay.cache.state import Index
from forebay.store import LocalStore
from forebay.store.base import Buffer, Entry, Expected, Store
from forebay.store.object_store import ObjectStore

CASE = "build.write_path"
CHUNK_BYTES = 1000
LINE_BYTES = 100
FILE_BYTES = 100_000_000  # of each source file of `reuse`


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


def measure(options: Options) -> Iterator[Result]:
    quick = options.is_quick
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        yield from small_chunks(folder / "folder", 500 if quick else 100_000, in_bucket=False)
        yield from small_chunks(folder / "bucket", 100 if quick else 10_000, in_bucket=True)
        yield builders_that_end_together(folder / "ending", 4 if quick else 50)
        yield layer_table(folder / "state", 10_000 if quick else 1_000_000)
        yield from reuse_after_an_edit(folder / "reuse", 10 if quick else 10_000)


def small_chunks(folder: Path, count: int, *, in_bucket: bool) -> Iterator[Result]:
    """Time and requests to make chunks of 1 KB in this process."""
    recipe = fb.RawRecipe(chunk_bytes=CHUNK_BYTES, codec="none")
    source = _lines(folder / "lines.txt", count * CHUNK_BYTES)
    with ExitStack() as ending:
        root = str(folder / "cache")
        if in_bucket:
            (folder / "s3").mkdir()
            endpoint = ending.enter_context(s3_server(str(folder / "s3")))
            assert request("PUT", f"{endpoint}/chunks") == 200
            os.environ.update(s3_environment(endpoint))
            root = "s3://chunks/cache"
        store = CountingBucket(root) if in_bucket else CountingFolder(root)
        seconds, report = _timed(lambda: fb.build(store, fb.sources.lines(source), recipe, workers=0, progress=False))
    work = f"{report.chunks:,} chunks of 1 KB into {'an S3 server on loopback' if in_bucket else 'a folder'}"
    yield Result(case=CASE, work=f"{work}: per chunk", unit="ms", ours=1000 * seconds / report.chunks)
    yield Result(case=CASE, work=f"{work}: per chunk", unit="requests", ours=store.requests / report.chunks)


def builders_that_end_together(folder: Path, builders: int) -> Result:
    """Builders that each make one chunk, then publish at the same moment."""
    recipe = fb.RawRecipe(chunk_bytes=CHUNK_BYTES)
    source = _lines(folder / "lines.txt", (builders + 1) * CHUNK_BYTES)
    root = folder / "cache"
    fb.build(root, fb.sources.lines(source), recipe, workers=0, end_chunk=0, progress=False)
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(builders), context.Queue()
    processes = [
        context.Process(target=_end_together, args=(str(root), str(source), chunk, ready, results))
        for chunk in range(1, builders + 1)
    ]
    for process in processes:
        process.start()
    seconds = max(results.get() for _ in processes)
    for process in processes:
        process.join()
    listed = fb.status(root, depth="index").layers[0].listed
    assert listed == builders + 1, listed
    return Result(case=CASE, work=f"{builders} builders that publish together: last one done", unit="s", ours=seconds,
                  at_most=60.0)  # fmt: skip


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


def layer_table(folder: Path, count: int) -> Result:
    """The table of a layer, once its generation and its plan are read; the listing of its files is not counted."""
    files = count // 2
    store = LocalStore(str(many_chunks(folder, count, files, files=files)))
    index = Index.take(store)
    plan, layer = index.plan, index.folder("raw") or ""
    listing, _ = _timed(lambda: sum(1 for _ in store.entries(layer)))
    whole, state = _timed(lambda: index.state("raw"))
    assert int(state.todo.sum()) == len(plan) - files
    return Result(case=CASE, work=f"table of a layer with {len(plan):,} chunks", unit="s",
                  ours=max(0.0, whole - listing), at_most=0.5)  # fmt: skip


def reuse_after_an_edit(folder: Path, megabytes: int) -> Iterator[Result]:
    """Time and bytes written by `--reuse` after one of many source files was edited."""
    data, total = folder / "data", megabytes * 1_000_000
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
    work = f"--reuse of {megabytes:,} MB after one file was edited ({report.built:,} of {report.chunks:,} chunks made)"
    yield Result(case=CASE, work=f"{work}: time", unit="s", ours=seconds)
    yield Result(case=CASE, work=f"{work}: written", unit="MB", ours=store.written / 1e6)


def _lines(path: Path, size: int) -> Path:
    """A file of different lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for number in range(max(1, size // LINE_BYTES)):
            file.write(f"{number:012d}".ljust(LINE_BYTES - 1, "x") + "\n")
    return path


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result
