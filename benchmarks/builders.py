"""What many builders on one cache ask of its store: `python -m benchmarks.builders`.

Real processes, each with its own counting store over one folder, share the chunks of one plan. Chunks are tiny, so
that what is counted is the coordination: a listing of up to 1,000 keys counts as one request, as buckets bill it.
Sources are not counted. Generations are allowed every second instead of every minute, so that their growth shows.
"""

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import forebay as fb
from forebay.building import layer_build
from forebay.cli.settings import place_in_plan
from forebay.store import LocalStore
from forebay.store.base import Buffer, Entry, Expected

PAGE = 1000  # keys that one request lists
PUBLISH_SECONDS = 1.0


class CountingStore(LocalStore):
    """A folder that counts what it is asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.counts = {"requests": 0, "read": 0, "written": 0, "listed": 0}

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        self.counts["requests"] += 1
        self.counts["read"] += read
        self.counts["written"] += written

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        value = super().read(key, start, stop)
        self._count(read=len(value))
        return value

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        value = super().view(key, expect=expect)
        self._count(read=len(value))
        return value

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        self._count(written=sum(map(len, data)))
        return super().create(key, data, durable=durable)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        self._count(written=sum(map(len, data)))
        return super().replace(key, data, if_etag=if_etag, durable=durable)

    def entries(self, prefix: str) -> Iterator[Entry]:
        for number, entry in enumerate(super().entries(prefix)):
            self.counts["requests"] += number % PAGE == 0 and number > 0
            self.counts["listed"] += 1
            yield entry
        self.counts["requests"] += 1

    def head(self, key: str) -> Entry | None:
        self._count()
        return super().head(key)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        self._count()
        super().delete(key, if_etag=if_etag)


def run_builder(root: str, lines: str, rank: int, ready: Barrier, results: Any) -> None:
    """One builder, begun when all are ready."""
    layer_build.PUBLISH_SECONDS = PUBLISH_SECONDS
    store = CountingStore(root)
    ready.wait()
    began = time.monotonic()
    place = place_in_plan({"RANK": str(rank)})
    report = fb.build(store, fb.sources.lines(lines), _recipe(), workers=0, begin_at=place, progress=False)
    results.put({**store.counts, "made": report.made, "seconds": time.monotonic() - began})


def _recipe() -> fb.RawRecipe:
    return fb.RawRecipe(chunk_bytes=12, codec="none")


def measure(folder: Path, chunks: int, builders: int) -> dict[str, float]:
    """The sums over all builders of one cache, and what is left of it."""
    folder.mkdir(parents=True)
    lines, root = folder / "lines.txt", folder / "cache"
    lines.write_text("".join(f"line {number:06d}\n" for number in range(chunks)))
    fb.build(root, fb.sources.lines(lines), _recipe(), workers=0, end_chunk=0, progress=False)  # plan once
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(builders), context.Queue()
    arguments = [(str(root), str(lines), rank, ready, results) for rank in range(builders)]
    processes = [context.Process(target=run_builder, args=one) for one in arguments]
    for process in processes:
        process.start()
    found: list[Mapping[str, float]] = [results.get() for _ in processes]
    for process in processes:
        process.join()
    sums = {name: sum(one[name] for one in found) for name in ("requests", "read", "written", "made", "listed")}
    status = fb.status(root, depth="index")
    assert status.complete, status
    left = [path for name in ("claims", "builders") for path in (root / name).rglob("*.*")]
    assert not left, left
    generations = len(list((root / "generations").iterdir()))
    return {**sums, "seconds": max(one["seconds"] for one in found), "generations": generations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--builders", type=int, nargs="+", default=[16])
    parser.add_argument("--folder", help="where caches are built; a temporary folder unless named")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    print("| builders | chunks | made twice | requests per chunk | bytes read per chunk | bytes written per chunk "
          "| generations | seconds |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    try:
        for builders in options.builders:
            for chunks in options.chunks:
                found = measure(folder / f"{builders}-{chunks}", chunks, builders)
                rates = [found[name] / chunks for name in ("requests", "read", "written")]
                cells = [f"{builders}", f"{chunks:,}", f"{int(found['made']) - chunks + 1}", f"{rates[0]:.1f}"]
                cells += [
                    f"{rates[1]:,.0f}",
                    f"{rates[2]:,.0f}",
                    f"{found['generations']:.0f}",
                    f"{found['seconds']:.0f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
