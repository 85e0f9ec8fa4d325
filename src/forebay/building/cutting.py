"""Cut files into the parts of chunks. Compressed files are scanned for sample ends, several at a time."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.pool import ThreadPool

import numpy as np

from forebay.columns import Array
from forebay.source import Part, Source, SourceFile, settling_seconds, source_unreadable

OVERWEIGHT = 1.25  # how far a chunk may go past its weight, unless one part alone does
OnCut = Callable[[int, int, int, int], None]  # files cut so far, files in all, their bytes so far, bytes in all
MOST_THREADS = 8
AHEAD = 2  # streams that are scanned, for each thread


@dataclass(frozen=True, slots=True)
class StreamScan:
    """The result of one pass over a compressed file: its digest and the ends of its samples."""

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


def scan_streams(source: Source, files: Sequence[SourceFile], starts: Mapping[str, int]) -> Iterator[StreamScan | None]:
    """Scans of compressed files in their order, a few ahead in threads: most of the time is decompression.

    None for a file whose sample ends cannot be held. A single file is left to `Source.cuts`, which shows progress.
    """
    if sum(1 for _ in islice((file for file in files if file.stream), 2)) < 2:
        return
    streams = (file for file in files if file.stream and not starts.get(file.path))
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPool(threads) as pool:  # of daemons: a scan cannot be stopped, and one of a large file takes minutes
        ahead = deque(pool.apply_async(_scan, (source, file)) for file in islice(streams, AHEAD * threads))
        while ahead:
            scan = ahead.popleft()
            ahead.extend(pool.apply_async(_scan, (source, file)) for file in islice(streams, 1))
            yield scan.get()


def _scan(source: Source, file: SourceFile) -> StreamScan | None:
    ends = source.sample_ends(file)
    return None if ends is None else StreamScan(_scanned(source, file), ends)


def cut_source(
    source: Source, files: Sequence[SourceFile], weight: int, starts: Mapping[str, int], on_cut: OnCut
) -> Iterator[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out.
    """
    scans = scan_streams(source, files, starts)
    open_chunk: list[Part] = []
    used = passed = 0
    total = sum(file.size for file in files)
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        on_cut(count, len(files), passed, total)
        scan = next(scans, None) if file.stream and not start else None
        if scan is not None:
            scanned, stops = scan.file, scan.cuts(weight - used, weight)
        else:
            show = partial(_show_cut, source, file, on_cut, (count, len(files), passed, total))
            scanned, stops = _cut_file(source, file, source.cuts(file, start, weight - used, weight), show)
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
    """Chunks cut by weight, and further if they have more samples than `most_samples`."""
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
        if open_chunk and not is_cut:  # the rest of a cut chunk begins the next one
            yield open_chunk
            open_chunk, count = [], 0
    if open_chunk:
        yield open_chunk


def _cut_file(
    source: Source, file: SourceFile, cuts: Iterable[int], show: Callable[[int], None]
) -> tuple[SourceFile, Iterator[int]]:
    """A file as it was cut, and where."""
    stops: list[int] = []
    for stop in cuts:
        stops.append(stop)
        show(stop)
    return _scanned(source, file), iter(stops)


def _scanned(source: Source, file: SourceFile) -> SourceFile:
    """A file with its digest; a stream is read twice, and must be the same both times."""
    scanned = source.scanned(file)
    if scanned.digest != file.digest and not source.look(file.path).same_identity(file):
        raise source_unreadable(file.path, "it changed while it was planned")
    return scanned


def _show_cut(source: Source, file: SourceFile, on_cut: OnCut, before: tuple[int, int, int, int], stop: int) -> None:
    """Show how much of a file is cut; the weight of a stream is estimated."""
    done, files, passed, total = before
    whole = max(1, source.weight(file) if file.stream or source.unit == "samples" else file.size)
    on_cut(done, files, passed + file.size * min(stop, whole) // whole, total)


def wait_until_settled(files: Iterable[SourceFile]) -> None:
    """Wait until a further change of any file must change its mtime."""
    now = time.time_ns()
    time.sleep(max((settling_seconds(file.ctime_ns or file.mtime_ns, now) for file in files), default=0.0))
