"""Cut a source into chunks."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from forebay.building.trial import OVERWEIGHT
from forebay.cache.segment import Unreadable
from forebay.errors import SourceUnreadable
from forebay.source import Part, Source, SourceFile, settling_seconds
from forebay.store.base import Store
from forebay.store.local import LocalStore

LOOKS = 3  # how often a file that changes while it is cut is looked at again
OnCut = Callable[[int, int, int], None]  # files cut so far, files in all, weight passed so far


def cut_source(
    source: Source,
    files: Sequence[SourceFile],
    weight: int,
    starts: Mapping[str, int],
    on_cut: OnCut,
    unreadable: Unreadable | None = None,
) -> list[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out.
    """
    unreadable = unreadable or Unreadable()
    chunks: list[list[Part]] = []
    open_chunk: list[Part] = []
    used = passed = 0
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        try:
            show = partial(_show_cut, on_cut, count, len(files), passed - start)
            scanned, stops = _cut_unchanged(source, file, start, weight - used, weight, show)
        except SourceUnreadable as error:
            unreadable.take(error, files)
            continue
        passed += stops[-1] - start if stops else 0
        for stop in stops:
            if open_chunk and used + stop - start > OVERWEIGHT * weight:
                chunks.append(open_chunk)
                open_chunk, used = [], 0
            open_chunk.append(Part(scanned, start, stop))
            used += stop - start
            start = stop
            if used >= weight:
                chunks.append(open_chunk)
                open_chunk, used = [], 0
    on_cut(len(files), len(files), passed)
    return [*chunks, open_chunk] if open_chunk else chunks


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
    raise SourceUnreadable(file.path, "it keeps changing while it is planned")


def _show_cut(on_cut: OnCut, done: int, total: int, passed: int, stop: int) -> None:
    on_cut(done, total, passed + stop)


def wait_until_settled(files: Iterable[SourceFile]) -> None:
    """From now on a change shows: it gives a file another time than it was seen with."""
    now = time.time_ns()
    time.sleep(max((settling_seconds(file.ctime_ns or file.mtime_ns, now) for file in files), default=0.0))


def files_apart(store: Store, source: Source) -> list[SourceFile]:
    """The files of a source, but for those of a cache that lies among them: it must not become part of itself."""
    root = source.describe().get("root")
    if not isinstance(store, LocalStore) or root is None:
        return source.files()
    own = os.path.abspath(store.address) + os.sep
    return [file for file in source.files() if not os.path.normpath(os.path.join(root, file.path)).startswith(own)]
