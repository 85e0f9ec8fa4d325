"""Cut files into the parts of chunks. Compressed files are scanned for sample ends, several at a time."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue

import numpy as np

from forebay.building.listing import UnreadableFiles
from forebay.columns import Array
from forebay.errors import SourceUnreadable
from forebay.source import Part, Source, SourceFile, settling_seconds, source_unreadable

OVERWEIGHT = 1.25  # how far a chunk may go past its weight, unless one part alone does
LOOKS = 3  # how often a file that changes while it is cut is looked at again
OnCut = Callable[[int, int, int, int], None]  # files cut so far, files in all, their bytes so far, bytes in all
AHEAD = 2  # streams that are scanned, for each thread
MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class StreamScan:
    """The result of one pass over a compressed file: the file with its digest, and where its samples end."""

    file: SourceFile
    ends: Array  # uint64, rising

    def cuts(self, first: int, every: int) -> Iterator[int]:
        """The cuts of `Source.cuts` from the beginning of the file."""
        cut, step, end = 0, first, int(self.ends[-1]) if len(self.ends) else 0
        while cut + step < end:
            following = int(self.ends[np.searchsorted(self.ends, cut + step)])
            if following >= end:
                break
            yield (cut := following)
            step = every
        if end:
            yield end


class StreamScans:
    """Scans compressed files in threads, a few ahead of the cuts: most of the time is decompression.

    A single file is left to `Source.cuts`, which shows progress. The threads are daemons: a scan cannot be stopped,
    and one of a large file takes minutes.
    """

    def __init__(self, source: Source, files: Sequence[SourceFile], starts: Mapping[str, int]) -> None:
        self._source, self._starts = source, starts
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._left = (file for file in files if self._is_scanned(file)) if _has_two_streams(files) else iter(())
        self._ahead: deque[tuple[str, Future[StreamScan | None]]] = deque()
        self._work: SimpleQueue[tuple[SourceFile, Future[StreamScan | None]] | None] = SimpleQueue()
        self._is_closed = False
        for file in islice(self._left, AHEAD * threads):
            self._submit(file)
        self._threads = min(threads, len(self._ahead))
        for _ in range(self._threads):
            threading.Thread(target=self._run, name="forebay-scan", daemon=True).start()

    def take(self, file: SourceFile) -> StreamScan | None:
        """The scan of the next file; None if it is not scanned, or cannot be held."""
        if not self._ahead or self._ahead[0][0] != file.path:
            return None
        _, future = self._ahead.popleft()
        for following in islice(self._left, 1):
            self._submit(following)
        return future.result()

    def close(self) -> None:
        self._is_closed = True
        for _ in range(self._threads):
            self._work.put(None)

    def _is_scanned(self, file: SourceFile) -> bool:
        return file.stream and not self._starts.get(file.path)

    def _submit(self, file: SourceFile) -> None:
        future: Future[StreamScan | None] = Future()
        self._ahead.append((file.path, future))
        self._work.put((file, future))

    def _run(self) -> None:
        while (task := self._work.get()) is not None and not self._is_closed:
            file, future = task
            try:
                future.set_result(self._scan(file))
            except BaseException as error:  # raised by `take`
                future.set_exception(error)

    def _scan(self, file: SourceFile) -> StreamScan | None:
        ends = self._source.sample_ends(file)
        if ends is None:
            return None
        scan = StreamScan(self._source.scanned(file), ends)
        if not self._source.look(file.path).same_identity(file):
            return None  # it changes: `_cut_unchanged` waits for it
        return scan


def _has_two_streams(files: Sequence[SourceFile]) -> bool:
    return sum(1 for _ in islice((file for file in files if file.stream), 2)) == 2


def cut_source(
    source: Source,
    files: Sequence[SourceFile],
    weight: int,
    starts: Mapping[str, int],
    on_cut: OnCut,
    unreadable: UnreadableFiles | None = None,
) -> Iterator[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out.
    """
    with closing(StreamScans(source, files, starts)) as scans:
        yield from _cut_files(source, files, weight, starts, on_cut, unreadable or UnreadableFiles(), scans)


def _cut_files(
    source: Source,
    files: Sequence[SourceFile],
    weight: int,
    starts: Mapping[str, int],
    on_cut: OnCut,
    unreadable: UnreadableFiles,
    scans: StreamScans,
) -> Iterator[list[Part]]:
    open_chunk: list[Part] = []
    used = passed = 0
    total = sum(file.size for file in files)
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        on_cut(count, len(files), passed, total)
        try:
            show = partial(_show_cut, source, file, on_cut, (count, len(files), passed, total))
            scan = scans.take(file)
            if scan is not None:
                scanned, stops = scan.file, list(scan.cuts(weight - used, weight))
            else:
                scanned, stops = _cut_unchanged(source, file, start, weight - used, weight, show)
        except SourceUnreadable as error:
            unreadable.take(error, files)
            continue
        finally:
            passed += file.size
        for stop in stops:
            if open_chunk and used + stop - start > OVERWEIGHT * weight:
                yield open_chunk
                open_chunk, used = [], 0
            open_chunk.append(Part(scanned, start, stop))
            used += stop - start
            start = stop
            if used >= weight:
                yield open_chunk
                open_chunk, used = [], 0
    on_cut(len(files), len(files), total, total)
    if open_chunk:
        yield open_chunk


def limited_chunks(source: Source, chunks: Iterable[list[Part]], most_samples: int | None) -> Iterator[list[Part]]:
    """Chunks as they are cut by weight; those of more samples than `most_samples` are cut further."""
    if most_samples is None or source.unit == "samples":  # whose weight is their number
        yield from chunks
        return
    open_chunk: list[Part] = []
    count, path = 0, ""
    ends: Iterator[int] = iter(())
    for chunk in chunks:
        is_cut = False
        for part in chunk:
            if part.file.path != path:  # a stream is read from its beginning: once, for all of its parts
                path, ends = part.file.path, iter(source.cuts(part.file, part.start, 1, 1))
            start = end = part.start
            while end < part.stop:
                end, count = next(ends, part.stop), count + 1
                if count == most_samples:
                    yield [*open_chunk, Part(part.file, start, end)]
                    open_chunk, count, start, is_cut = [], 0, end, True
            open_chunk += [Part(part.file, start, part.stop)] if start < part.stop else []
        if open_chunk and not is_cut:  # what is left of a chunk that was cut begins the next one
            yield open_chunk
            open_chunk, count = [], 0
    if open_chunk:
        yield open_chunk


def _cut_unchanged(
    source: Source, file: SourceFile, start: int, first: int, every: int, show: Callable[[int], None]
) -> tuple[SourceFile, list[int]]:
    """A file and where it is cut; a stream, which is read twice for that, must be the same both times."""
    for _ in range(LOOKS):
        stops: list[int] = []
        for stop in source.cuts(file, start, first, every):
            stops.append(stop)
            show(stop)
        scanned = source.scanned(file)
        if scanned.digest == file.digest or source.look(file.path).same_identity(file):
            return scanned, stops
        file = source.look(file.path)
        wait_until_settled([file])
    raise source_unreadable(file.path, "it keeps changing while it is planned")


def _show_cut(source: Source, file: SourceFile, on_cut: OnCut, before: tuple[int, int, int, int], stop: int) -> None:
    """Show how much of a file is cut; the weight of a stream is estimated."""
    done, files, passed, total = before
    whole = max(1, source.weight(file) if file.stream or source.unit == "samples" else file.size)
    on_cut(done, files, passed + file.size * min(stop, whole) // whole, total)


def wait_until_settled(files: Iterable[SourceFile]) -> None:
    """Wait until a change would give each file another time than it was seen with."""
    now = time.time_ns()
    time.sleep(max((settling_seconds(file.ctime_ns or file.mtime_ns, now) for file in files), default=0.0))
