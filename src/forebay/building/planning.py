"""Cut a source into chunks, sized by a trial of the recipe on a sample of it.

Where the samples of compressed files end is found for several files at a time (`StreamScans`), and kept until all is
planned.

`estimate_build` says from the same trial what a build will take.
"""

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from math import ceil
from queue import SimpleQueue
from types import MappingProxyType
from typing import get_args

import msgspec
import numpy as np

from forebay.cache.catalog import read_recipe_document
from forebay.cache.plan import KeptResults, Plan, Unreadable, identity_facts, load_plan, unreadable_note
from forebay.cache.records import Estimate
from forebay.cache.status import find_gaps
from forebay.columns import Array, Codec, Column
from forebay.errors import ForebayError, FunctionFailed, RecipeInvalid, SourceNotFound, SourceUnreadable
from forebay.format.chunk import EncodedChunk, encode_chunk
from forebay.recipe import ChunkTarget, Recipe, Rows, fields_of, fingerprint, hooks_of, identity_of, join_rows
from forebay.source import (
    BatchedSamples,
    Failure,
    Listing,
    Part,
    Reasons,
    Sample,
    SampleBatch,
    Source,
    SourceFile,
    Unit,
    not_read,
    settling_seconds,
)
from forebay.store.base import Store

AHEAD = 2  # streams that are scanned, for each thread
MOST_THREADS = 8
_HEAD = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class StreamScan:
    """What one pass over a compressed file found: the file with its digest, and where its samples end."""

    file: SourceFile
    ends: Array  # uint64, rising

    def cuts(self, first: int, every: int) -> Iterator[int]:
        """What `Source.cuts` finds from the beginning of the file."""
        cut, step, end = 0, first, int(self.ends[-1]) if len(self.ends) else 0
        while cut + step < end:
            found = int(self.ends[np.searchsorted(self.ends, cut + step)])
            if found >= end:
                break
            yield (cut := found)
            step = every
        if end:
            yield end

    def encode(self) -> bytes:
        known = (int(self.file.digest is not None), self.file.digest or 0)
        return np.array(known, _HEAD).tobytes() + self.ends.astype(_HEAD).tobytes()

    @classmethod
    def decode(cls, file: SourceFile, answer: bytes) -> "StreamScan | None":
        if len(answer) < 2 * _HEAD.itemsize or len(answer) % _HEAD.itemsize:
            return None
        known, digest, *_ = (values := np.frombuffer(answer, _HEAD))[:2].tolist()
        ends = values[2:].astype(np.uint64)
        is_sound = bool((ends[1:] > ends[:-1]).all()) and (not len(ends) or bool(0 < ends[0] <= ends[-1] < 1 << 62))
        return cls(msgspec.structs.replace(file, digest=digest if known else None), ends) if is_sound else None


class StreamScans:
    """Scans compressed files in threads, a few ahead of where they are asked for: most of the time is decompression.

    One file alone is left to `Source.cuts`, which shows how far it is. At the end nobody waits for the threads, which
    are daemons: a scan cannot be stopped, and of a large file it takes minutes.
    """

    def __init__(
        self, source: Source, files: Sequence[SourceFile], starts: Mapping[str, int], kept: KeptResults | None
    ) -> None:
        self._source, self._starts, self._kept = source, starts, kept
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._left = (file for file in files if self._is_scanned(file)) if _has_two_streams(files) else iter(())
        self._ahead: deque[tuple[str, Future[StreamScan | None]]] = deque()
        self._work: SimpleQueue[tuple[SourceFile, Future[StreamScan | None]] | None] = SimpleQueue()
        self._keeping, self._is_closed = threading.Lock(), False
        for file in islice(self._left, AHEAD * threads):
            self._submit(file)
        self._threads = min(threads, len(self._ahead))
        for _ in range(self._threads):
            threading.Thread(target=self._run, name="forebay-scan", daemon=True).start()

    def take(self, file: SourceFile) -> StreamScan | None:
        """What was found of the next file; None where it is not scanned, or cannot be held."""
        if not self._ahead or self._ahead[0][0] != file.path:
            return None
        _, future = self._ahead.popleft()
        for following in islice(self._left, 1):
            self._submit(following)
        return future.result()

    def close(self) -> None:
        with self._keeping:  # from now on nobody would remove what is kept
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
        while (given := self._work.get()) is not None and not self._is_closed:
            file, future = given
            try:
                future.set_result(self._scan(file))
            except BaseException as error:  # raised where it is asked for
                future.set_exception(error)

    def _scan(self, file: SourceFile) -> StreamScan | None:
        question = ("sample ends", dict(self._source.describe()), identity_facts(file))
        answer = self._kept.find(*question) if self._kept else None
        known = StreamScan.decode(file, answer) if answer is not None else None
        if known is not None:
            return known
        ends = self._source.sample_ends(file)
        if ends is None:
            return None
        scan = StreamScan(self._source.scanned(file), ends)
        if not self._source.look(file.path).same_identity(file):
            return None  # it changes: `_cut_unchanged` waits for it
        with self._keeping:
            if self._kept and not self._is_closed:
                self._kept.keep(scan.encode(), *question)
        return scan


def _has_two_streams(files: Sequence[SourceFile]) -> bool:
    return sum(1 for _ in islice((file for file in files if file.stream), 2)) == 2


CAP_BYTES = 128 * 1024 * 1024
OVERWEIGHT = 1.25  # how far a chunk may go past its weight, unless one part alone does
DEFAULT_CHUNK_BYTES = 32 * 1024 * 1024
DEFAULT_CHUNK_SAMPLES = 1000
SAMPLE_PLACES = 24
MOST_BUDGETS = 4
TRIAL_BYTES = 96 * 1024 * 1024  # of rows that a trial makes
SPREAD = 4  # places are tried in this many rounds
MOST_FILES_PER_PLACE = 1000
WITHOUT_LOOKUPS = 1.1  # how much more of a stream is read for the same: nothing is looked up in it
SAMPLE_WEIGHT = {"bytes": 4 * 1024 * 1024, "samples": 512}
LITTLE_WEIGHT = {"bytes": 64 * 1024, "samples": 24}  # tried at every place whatever its share of the source
HEADS = 16
HEAD_WEIGHT = {"bytes": 16 * 1024, "samples": 4}


@dataclass(frozen=True, slots=True)
class Trial:
    """What a recipe made of a small part of the source."""

    weight: int
    seconds: float  # to read, make, encode and hash it
    samples: int
    failures: int
    rows: float  # that so much would fill in a large chunk
    raw_bytes: int
    head_bytes: int  # every chunk has a header
    stored_bytes: int  # index and data, which grow with the rows
    made: Rows | None = None
    tried: int = 0  # samples, each counted once: in a small source the places overlap
    reasons: Reasons = field(default_factory=Reasons)  # why samples failed, each counted once

    @property
    def all_failed(self) -> bool:
        return 0 < self.samples <= self.failures

    def scaled(self, amount: float, total: int) -> float:
        """What was counted in the sample, for a source that weighs `total`."""
        return amount / max(1, self.weight) * total


def chunk_weight(target: ChunkTarget, trial: Trial, unit: Unit = "bytes") -> int:
    """What a slice must weigh to come out as large as the recipe wants, and at most 128 MiB."""
    if not trial.rows or not trial.raw_bytes:
        return DEFAULT_CHUNK_BYTES if unit == "bytes" else DEFAULT_CHUNK_SAMPLES
    wanted = (target.bytes or DEFAULT_CHUNK_BYTES) / trial.raw_bytes
    if target.rows is not None:
        wanted = target.rows / trial.rows
    return max(1, int(trial.weight * min(wanted, CAP_BYTES / OVERWEIGHT / trial.raw_bytes)))


def try_readable(
    source: Source,
    files: Sequence[SourceFile],
    recipe: Recipe,
    unreadable: Unreadable,
    budget: int | None = None,
    ranges: Sequence[Part] | None = None,
) -> Trial:
    """`try_recipe` with the files that can be read, or with ranges of them."""
    while True:
        try:
            if ranges is None:
                return try_recipe(source, unreadable.without(files), recipe, budget)
            left = [part for part in ranges if part.file.path not in unreadable.found]
            return _try_places(source, sample_places(source, (), budget or 1, left, True) if left else [], recipe)
        except SourceUnreadable as error:
            unreadable.take(error, files)


def try_recipe(source: Source, files: Sequence[SourceFile], recipe: Recipe, budget: int | None = None) -> Trial:
    """Make rows of a few small parts spread over the source. Those that the recipe fails on are left out.

    The build then says which chunk fails, and makes the others; what is wrong with the recipe itself, or with the
    source, is raised.
    """
    total = sum(map(source.weight, files))
    places = sample_places(source, files, budget or _planning_budget(source, total, recipe), None, budget is not None)
    return _try_places(source, places, recipe)


def try_parts(source: Source, parts: Sequence[Part], recipe: Recipe) -> Trial:
    """`try_recipe` with the beginnings of a few planned parts: what a cache grows by may begin inside a file."""
    piece = ceil(_planning_budget(source, sum(part.weight for part in parts), recipe) / SAMPLE_PLACES)
    streams = {part.file.path: part for part in reversed(parts) if part.file.stream}  # the first part of each
    parts = [part for part in parts if not part.file.stream or part is streams[part.file.path]]
    chosen = np.linspace(0, len(parts) - 1, min(SAMPLE_PLACES, len(parts))).astype(int)
    begun = (_piece_of(source, parts[at], piece) for at in chosen.tolist())
    return _try_places(source, [[part] for part in begun if part is not None], recipe)


def _piece_of(source: Source, part: Part, piece: int) -> Part | None:
    """The beginning of a part that weighs about `piece`, None where no sample begins in it."""
    stop = part.stop if part.weight <= piece else next(source.cuts(part.file, part.start, piece, piece), None)
    return None if stop is None else Part(part.file, part.start, min(stop, part.stop))


def _try_places(source: Source, places: Sequence[Sequence[Part]], recipe: Recipe) -> Trial:
    started = time.perf_counter()
    counts = Counter(part for parts in places for part in parts if part.weight <= _kept_weight(source))
    kept = {part: list[Sample | Failure | SampleBatch]() for part, count in counts.items() if count > 1}
    glances = [TrialSamples(source, parts, kept) for parts in places]
    made = _made(recipe, glances)
    if not made:
        return Trial(1, 0.0, 0, 0, 0.0, 0, 0, 0)
    rows = join_rows([rows for _, rows in made], recipe.columns())
    used = [glance for glance, _ in made]
    samples = sum(glance.count for glance in used)
    failures = [*(failure for glance in used for failure in glance.failures), *rows.failures]
    encoded = _encoded(rows, recipe.columns(), samples)
    encoded.sha256()
    seconds = time.perf_counter() - started
    expected = hooks_of(recipe).rows_from(rows.statistics)
    return Trial(
        weight=max(1, sum(glance.weight for glance in used)),
        seconds=seconds,
        samples=samples,
        failures=len(failures),
        rows=encoded.meta.rows if expected is None else expected,
        raw_bytes=sum(column.nbytes for column in rows.columns.values()),
        head_bytes=len(encoded.buffers[0]),
        stored_bytes=_body_bytes(encoded),
        made=rows,
        tried=len(set[str]().union(*(glance.ids for glance in used))),
        reasons=Reasons({failure.sample: failure for failure in failures}.values()),
    )


def _kept_weight(source: Source) -> int:
    """How large a part may be that is kept for further places; of samples, each may be large."""
    return LITTLE_WEIGHT["bytes"] if source.unit == "bytes" else 0


def _planning_budget(source: Source, total: int, recipe: Recipe) -> int:
    """A few MiB of bytes; of samples, which may be costly to get, a fourth at most."""
    if source.unit == "bytes":
        return SAMPLE_WEIGHT["bytes"]
    most = min(SAMPLE_WEIGHT["samples"], hooks_of(recipe).judged_by or SAMPLE_WEIGHT["samples"])
    return min(most, max(SAMPLE_PLACES, total // 4))


def _made(recipe: Recipe, glances: Sequence["TrialSamples"]) -> list[tuple["TrialSamples", Rows]]:
    """What the recipe makes of each place: what belongs together in the source stays together.

    Places are tried while their rows fit into memory, spread over the source.
    """
    found: dict[int, tuple[TrialSamples, Rows]] = {}
    failed: Exception | None = None
    held = 0
    for at in sorted(range(len(glances)), key=lambda at: (at % SPREAD, at)):
        if held >= TRIAL_BYTES:
            break
        try:
            rows = recipe.make(glances[at])
            found[at] = glances[at], rows
            held += sum(column.nbytes for column in rows.columns.values())
        except FunctionFailed as error:
            failed = error
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything
            failed = error
    made = [found[at] for at in sorted(found)]
    if isinstance(failed, FunctionFailed) and not made:
        raise failed
    if failed is not None and not made:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' fails on all it was tried on: {failed!r}") from failed
    return made


class TrialSamples(BatchedSamples):
    """The samples of some parts, read for an estimate only; a source may have a cheaper way for that.

    Those of parts in `kept` are read once: the places of a small source overlap.
    """

    def __init__(
        self,
        source: Source,
        parts: Sequence[Part],
        kept: Mapping[Part, list[Sample | Failure | SampleBatch]] = MappingProxyType({}),
    ) -> None:
        self.count = 0
        self.ids: set[str] = set()
        self.failures: list[Failure] = []
        self._unit = source.unit
        self._source, self._kept = source, kept
        self._parts = parts

    def _read(self, part: Part) -> Iterable[Sample | Failure | SampleBatch]:
        kept = self._kept.get(part)
        if kept is None:
            return self._source.glance(part)
        kept += [] if kept else self._source.glance(part)
        return kept

    @property
    def weight(self) -> int:
        """What was read: a glance may return fewer samples than a part has, and a slice of a function more."""
        whole = sum(part.weight for part in self._parts)
        return min(self.count, whole) if self._unit == "samples" else whole

    def __iter__(self) -> Iterator[Sample]:
        for found in self.batches():
            if isinstance(found, SampleBatch):
                yield from found.samples()
            else:
                given = [found]
                del found
                yield given.pop()  # no reference to it stays here: it may be large, and the next one is read then

    def batches(self) -> Iterator[Sample | SampleBatch]:
        for part in self._parts:
            for found in self._read(part):
                if isinstance(found, SampleBatch):
                    self.ids.update(f"{part.file.path}:{part.start + at}" for at in range(found.count))
                    self.count += found.count
                    yield found
                    continue
                self.count += 1
                if isinstance(found, Sample):
                    self.ids.add(found.id)
                    given = [found]
                    del found
                    yield given.pop()
                else:
                    self.ids.add(found.sample)
                    self.failures.append(found)


def _encoded(made: Rows, columns: Sequence[Column], samples: int) -> EncodedChunk:
    return encode_chunk(made.columns, tuple(columns), layer="trial", chunk=0, fingerprint="", samples=samples)


def _body_bytes(encoded: EncodedChunk) -> int:
    return encoded.size - len(encoded.buffers[0])


def sample_heads(source: Source, files: Sequence[SourceFile]) -> Iterator[Sample]:
    """The first few samples of a few files spread over the source; planning names files that cannot be read."""
    chosen = {round(at) for at in np.linspace(0, len(files) - 1, min(HEADS, len(files)))}
    for index in sorted(chosen):
        weight = HEAD_WEIGHT[source.unit]
        with suppress(SourceUnreadable):
            stop = next(source.cuts(files[index], 0, weight, weight), None)
            if stop is not None:
                yield from TrialSamples(source, [Part(files[index], 0, stop)])


def sample_places(
    source: Source,
    files: Sequence[SourceFile],
    budget: int,
    ranges: Sequence[Part] | None = None,
    is_fair: bool = False,
) -> list[list[Part]]:
    """A few small parts at each of 24 places, evenly by weight: in files, or in some ranges of files.

    A stream is only read from its beginning: the places in it make one part there, as long as all of them. A place is
    likelier in a large file than in a small one: a fair sample has other files for those that it would take whole.
    """
    if ranges is None:
        weights = np.fromiter(map(source.weight, files), np.int64, len(files))
    else:
        weights = np.array([part.weight for part in ranges], np.int64)

    def nth(index: int) -> Part:
        return Part(files[index], 0, int(weights[index])) if ranges is None else ranges[index]

    ends = np.cumsum(weights)
    piece = ceil(budget / SAMPLE_PLACES)
    found: dict[int, list[int]] = {}  # file -> the offsets of the places in it
    for place in range(SAMPLE_PLACES):
        at = int(ends[-1]) * (2 * place + 1) // (2 * SAMPLE_PLACES)
        index = min(int(np.searchsorted(ends, at, side="right")), len(weights) - 1)
        found.setdefault(index, []).append(at - int(ends[index] - weights[index]))
    places: list[list[Part]] = []
    largest = nth(int(weights.argmax()))
    is_cut = is_fair and largest.weight > piece and _is_cut(source, largest, piece)  # or none is: so it is with images
    wholes = {index for index in found if is_fair and (weights[index] <= piece or not is_cut)}
    for index, offsets in found.items():
        if index not in wholes:
            following = map(nth, range(index, min(index + MOST_FILES_PER_PLACE, len(weights))))
            places += _in_file(source, following, offsets, piece)
    pool = np.flatnonzero(weights <= piece) if is_cut else np.arange(len(weights) if wholes else 0)
    for chosen in _evenly(weights[pool], piece, sum(len(found[index]) for index in wholes)):
        places.append([part for index in pool[chosen].tolist() for part in _piece(source, nth(index), 0, piece)])
    places = [parts for at, parts in enumerate(places) if parts and parts not in places[:at]]
    return _within(places, max(budget, LITTLE_WEIGHT[source.unit]))


def _within(places: list[list[Part]], budget: int) -> list[list[Part]]:
    """The places, or two of them and more up to a few budgets where a source cannot be cut into small parts."""
    weight = sum(part.weight for parts in places for part in parts)
    most = max(2, int(len(places) * MOST_BUDGETS * budget / max(1, weight)))
    if len(places) <= most:
        return places
    return [places[(2 * at + 1) * len(places) // (2 * most)] for at in range(most)]


def _evenly(weights: Array, piece: int, count: int) -> Iterator[Array]:
    """The files of some places: neighbours of about `piece`, at every place as many, so that each file is as likely.

    The first ones of the places are even by size: large and small files may alternate.
    """
    size = min(len(weights), MOST_FILES_PER_PLACE, max(1, round(piece * len(weights) / max(1, int(weights.sum())))))
    by_size = np.argsort(weights, kind="stable")
    for place in range(count):
        first = by_size[(2 * place + 1) * len(weights) // (2 * count)]
        yield np.arange(first, first + size) % len(weights)


def _in_file(source: Source, following: Iterator[Part], offsets: list[int], piece: int) -> Iterator[list[Part]]:
    """The parts of the places that fall into the first of some files or ranges."""
    first = next(following)
    if first.weight <= piece:
        yield _run(source, chain([first], following), piece)
    elif first.file.stream:
        yield _piece(source, first, 0, int(piece * len(offsets) * WITHOUT_LOOKUPS))
    else:
        yield from (_piece(source, first, offset, piece) for offset in offsets)


def _is_cut(source: Source, whole: Part, piece: int) -> bool:
    return whole.file.stream or next(source.cuts(whole.file, whole.start, piece, piece), whole.stop) < whole.stop


def _piece(source: Source, whole: Part, at: int, piece: int) -> list[Part]:
    """One part of about `piece` that begins near `at`, or at the beginning where there is no cut near it."""
    file, start = whole.file, whole.start
    if at and not file.stream:
        edges = list(islice(source.cuts(file, start, at, piece), 2))
        if len(edges) == 2 and edges[0] < whole.stop:
            return [Part(file, edges[0], min(edges[1], whole.stop))]
    stop = next(source.cuts(file, start, piece, piece), None)
    return [] if stop is None else [Part(file, start, stop if file.stream else min(stop, whole.stop))]


def _run(source: Source, following: Iterable[Part], piece: int) -> list[Part]:
    """Whole files, one after the other, that weigh about `piece`: taken as they come, small and large alike."""
    parts: list[Part] = []
    weight = 0
    for whole in following:
        parts += _piece(source, whole, 0, piece)
        weight += parts[-1].weight if parts else 0
        if weight >= piece:
            break
    return parts


LOOKS = 3  # how often a file that changes while it is cut is looked at again
OnCut = Callable[[int, int, int, int], None]  # files cut so far, files in all, their bytes so far, bytes in all


def scratch_folder(store: Store) -> str | None:
    """A folder on the disk that the cache is on, None (the system's choice) where it is on none.

    It is never made for the purpose: a cache that is not there yet will be made in the folder above it.
    """
    root = store.local_path("")
    if root is None:
        return None
    folder = os.path.abspath(root)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def cut_source(
    source: Source,
    files: Sequence[SourceFile],
    weight: int,
    starts: Mapping[str, int],
    on_cut: OnCut,
    unreadable: Unreadable | None = None,
    kept: KeptResults | None = None,
) -> Iterator[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out. `kept` has what a planning that was
    killed found of streams.
    """
    with closing(StreamScans(source, files, starts, kept)) as scans:
        yield from _cut_files(source, files, weight, starts, on_cut, unreadable or Unreadable(), scans)


def _cut_files(
    source: Source,
    files: Sequence[SourceFile],
    weight: int,
    starts: Mapping[str, int],
    on_cut: OnCut,
    unreadable: Unreadable,
    scans: StreamScans,
) -> Iterator[list[Part]]:
    open_chunk: list[Part] = []
    used = passed = 0
    total = sum(file.size for file in files)
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        on_cut(count, len(files), passed, total)
        try:
            scan = scans.take(file)
            if scan is not None:
                scanned, stops = scan.file, list(scan.cuts(weight - used, weight))
            else:
                whole = source.weight(file) if file.stream or source.unit == "samples" else file.size
                show = partial(_show_cut, on_cut, (count, len(files), passed, total), file.size, max(1, whole))
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
    raise SourceUnreadable(file.path, "it keeps changing while it is planned")


def _show_cut(on_cut: OnCut, before: tuple[int, int, int, int], size: int, whole: int, stop: int) -> None:
    """Show how much of a file is cut: as much of its size as of all that it holds, which for a stream is estimated."""
    done, files, passed, total = before
    on_cut(done, files, passed + size * min(stop, whole) // whole, total)


def wait_until_settled(files: Iterable[SourceFile]) -> None:
    """From now on a change shows: it gives a file another time than it was seen with."""
    now = time.time_ns()
    time.sleep(max((settling_seconds(file.ctime_ns or file.mtime_ns, now) for file in files), default=0.0))


def _planned_files(source: Source, plan: Plan) -> Iterator[SourceFile]:
    """The planned files that are there, each looked at by its name."""
    for path, planned in plan.files.items():
        try:
            yield source.look(path)
        except FileNotFoundError:
            continue
        except (OSError, SourceUnreadable):  # a folder in its place, or no permission: whoever compares it says so
            yield planned


class SourceListing:
    """A source and its files, found by one walk, when first asked for.

    It says which files there are, and how each looked at that moment. A plan that is older can be compared with that;
    whatever differs from it, and every file of a newer plan, the source is asked to look at again.
    """

    def __init__(self, source: Source, store: Store | None = None) -> None:
        self.source, self._store = source, store
        self.seconds = 0.0  # that it took

    @cached_property
    def _found(self) -> Listing:
        started = time.perf_counter()
        try:
            if self._store is not None and not self.source.is_walked():
                return Listing(list(_planned_files(self.source, load_plan(self._store))), {})
            return self.source.listing(self._store.address if self._store else "")
        finally:
            self.seconds = time.perf_counter() - started

    @property
    def files(self) -> Sequence[SourceFile]:
        return self._found.files

    @property
    def walked(self) -> Sequence[SourceFile]:
        """The files as they were found; none where the source was not walked."""
        return self.files if self.source.is_walked() else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say about the source: how it reads what was named, and the files that it does not read."""
        left_out = not_read(self._found.left_out)
        return (*self.source.notes(self.walked), *([left_out] if left_out else []))

    @cached_property
    def apart(self) -> Sequence[SourceFile]:
        """The files, but for those of the cache where it lies among them: it must not become part of itself."""
        root, folder = self.source.describe().get("root"), self._store.local_path("") if self._store else None
        if folder is None or root is None:
            return self.files
        own = os.path.abspath(folder) + os.sep
        paths = (os.path.normpath(os.path.join(root, file.path)) for file in self.files)
        if not any(path.startswith(own) for path in paths):
            return self.files
        return [file for file in self.files if not os.path.normpath(os.path.join(root, file.path)).startswith(own)]

    def weight(self) -> int:
        """What all files hold, in the unit of the source."""
        return sum(map(self.source.weight, self.files))


def bytes_by_codec(trial: Trial, recipe: Recipe) -> dict[str, int]:
    """How large the rows of a trial are under each codec, where the recipe leaves the choice."""
    if trial.made is None or "codec" not in fields_of(recipe):
        return {}
    found = {}
    for codec in get_args(Codec):
        columns = [msgspec.structs.replace(column, codec=codec) for column in recipe.columns()]
        found[codec] = _body_bytes(_encoded(trial.made, columns, trial.samples))
    return found


SAMPLED_SHARE = 0.0375  # the rest of 5 % goes into finding where samples begin and end
MOST_SAMPLED = {"bytes": 32 * 1024 * 1024, "samples": 8192}
LONG_WORK_BYTES = 64 * 1024 * 1024
LOOKED_AGAIN = 4  # times that a build looks at every file after it was listed: docs/architecture.md
LONGER_JUDGED = 4  # how many times planning's sample an estimate may read, where a sample takes long
WITH_DUPLICATES = "duplicates are counted as if they stayed: only a build, which reads all, finds out how many they are"


def estimate_build(
    listing: SourceListing,
    recipe: Recipe,
    store: Store | None,
    workers: int,
    skip_unreadable: bool = False,
    said: Sequence[str] = (),
    missing: "MissingChunks | None" = None,
    *,
    started: float,
    starting: float,
) -> Estimate:
    """Sample at most 5 % of the source, but a few whole documents, and scale; `said` are notes of the recipe.

    Of a cache that is begun, what it lacks is sampled, and scaled. From `started` on, the source was listed and the
    recipe resolved, as a build does, and a worker was `starting` until it could begin.
    """
    source, files = listing.source, listing.files
    before = time.perf_counter() - started - starting
    if not files:
        raise SourceNotFound(str(source.describe()))
    unreadable = Unreadable(skip_unreadable)
    unreadable.take_listed(source, files)
    total = _weigh(source, files, unreadable) if missing is None else missing.weight
    most = total * SAMPLED_SHARE if missing is None else min(missing.of_weight * SAMPLED_SHARE, total / 2)
    budget = max(1, min(_most_sampled(source, recipe), int(most)))
    trial = try_readable(source, files, recipe, unreadable, budget, missing.ranges if missing else None)
    shares = total / chunk_weight(recipe.chunk_target(), trial, source.unit) if missing is None else len(missing.chunks)
    chunks = max(1, ceil(shares)) if missing is None else len(missing.chunks)
    heads = chunks * trial.head_bytes
    stored = round(trial.scaled(trial.stored_bytes, total) + heads)
    free = store.free_bytes() if store else None
    reason, _, example = trial.reasons.most_frequent() if trial.failures else ("", 0, "")
    workers = min(workers, max(1, chunks))  # a chunk is made by one
    planning = _planning_seconds(source, files, recipe, trial, total) if missing is None else 0.0
    if missing is None and is_long_work(files):
        starting = max(0.0, starting - planning)  # meanwhile
    looks = LOOKED_AGAIN * listing.seconds * (not source.reads_planned_files and chunks > 0)
    making = trial.scaled(trial.seconds, total) * _share_of_one(shares, workers)
    return Estimate(
        files=len(files),
        source_weight=total,
        unit=source.unit,
        sampled_weight=trial.weight if trial.samples else 0,
        chunks=chunks,
        rows=round(trial.scaled(trial.rows, total)),
        raw_bytes=round(trial.scaled(trial.raw_bytes, total)),
        stored_bytes=stored,
        by_codec={
            codec: round(trial.scaled(size, total) + heads) for codec, size in bytes_by_codec(trial, recipe).items()
        },
        seconds=before + planning + starting + looks + making,
        workers=workers,
        failures=round(trial.scaled(trial.failures, total)),
        statistics=_scaled_statistics(trial, total),
        free_bytes=free,
        fits=free is None or stored <= free,
        failure_reason=reason,
        failure_example=example,
        all_failed=trial.all_failed,
        notes=(
            *said,
            *_notes(recipe, trial),
            *unreadable_note(unreadable.found),
            *listing.notes,
            *([missing.note] if missing else []),
        ),
    )


def is_long_work(files: Iterable[SourceFile]) -> bool:
    """Whether there is enough to do that workers should start while it is planned."""
    return sum(file.size for file in files) >= LONG_WORK_BYTES


def _share_of_one(chunks: float, workers: int) -> float:
    """The share of the work that the busiest worker has: a chunk is made by one.

    >>> _share_of_one(4, workers=2), _share_of_one(3, workers=2), _share_of_one(2.5, workers=2), _share_of_one(0.5, 2)
    (0.5, 0.6666666666666666, 0.6, 1.0)
    """
    whole = int(chunks)
    rounds = whole // workers + (1 if whole % workers else chunks - whole)
    return rounds / chunks if chunks else 0.0


def _planning_seconds(source: Source, files: Sequence[SourceFile], recipe: Recipe, trial: Trial, total: int) -> float:
    """How long planning takes after the source was listed: its own trial, and cutting all files, by a few of them."""
    tried = min(1.0, _planning_budget(source, total, recipe) / trial.weight) * trial.seconds
    if source.unit == "samples":  # of which planning reads no more than was read to weigh them
        return tried
    started, cut, piece = time.perf_counter(), 0, LITTLE_WEIGHT["bytes"]
    for file in files[:: max(1, len(files) // HEADS)]:
        with suppress(SourceUnreadable):
            stop = next(source.cuts(file, 0, piece, piece), 0)
            cut += stop if file.stream else source.weight(file)  # a stream is read to its end
        if cut >= total * SAMPLED_SHARE and file.stream:
            break
    return tried + (time.perf_counter() - started) / cut * total if cut else tried


@dataclass(frozen=True, slots=True)
class MissingChunks:
    """What a begun cache lacks of a range of its chunks."""

    planned: int
    chunks: tuple[int, ...]
    ranges: Sequence[Part]  # of the source, what is next to each other as one
    weight: int
    of_weight: int  # of all that is planned
    is_range: bool

    @property
    def note(self) -> str:
        if self.chunks:
            return f"{len(self.chunks):,} of {self.planned:,} planned chunk(s) are missing: the figures are of them"
        asked = "that were asked for are" if self.is_range else "are"
        return f"nothing is missing: all of the {self.planned:,} planned chunk(s) {asked} present"


def missing_chunks(
    store: Store, recipe: Recipe, layer: str, start: int | None, end: int | None
) -> MissingChunks | None:
    """The chunks of a range that are planned by this recipe and missing; None where it has planned none."""
    kept, plan = read_recipe_document(store, layer), load_plan(store)
    if kept is None or not plan.segments or kept.fingerprint != fingerprint(recipe):
        return None
    (found,) = find_gaps(store, layer)
    chunks = tuple(n for n in found.missing if (start or 0) <= n <= (found.planned if end is None else end))
    ranges: list[Part] = []
    for part in chain.from_iterable(map(plan.parts, chunks)):
        if ranges and ranges[-1].stop == part.start and ranges[-1].file.path == part.file.path:
            part = Part(part.file, ranges.pop().start, part.stop)
        ranges.append(part)
    weight = int(plan.weights[list(chunks)].sum())
    return MissingChunks(found.planned, chunks, ranges, weight, int(plan.weights.sum()), not start is end is None)


def _weigh(source: Source, files: Sequence[SourceFile], unreadable: Unreadable) -> int:
    total = 0
    for file in unreadable.without(files):
        try:
            total += source.weight(file)
        except SourceUnreadable as error:
            unreadable.take(error, files)
    return total


def _notes(recipe: Recipe, trial: Trial) -> tuple[str, ...]:
    notes = [] if identity_of(recipe) is None else [WITH_DUPLICATES]
    if trial.failures:
        reason, count, example = trial.reasons.most_frequent()
        tried = f"{len(trial.reasons):,} of the {trial.tried:,} sample(s) that were tried failed"
        notes.append(f"{tried}, {count:,} as '{reason}' ({example}); {trial.reasons.advice()}")
    return tuple(notes)


def _most_sampled(source: Source, recipe: Recipe) -> int:
    most = MOST_SAMPLED[source.unit]
    enough = hooks_of(recipe).judged_by
    return most if source.unit == "bytes" or enough is None else min(most, LONGER_JUDGED * enough)


def _scaled_statistics(trial: Trial, total: int) -> dict[str, int]:
    """What the recipe counts, for the whole source."""
    counted = trial.made.statistics if trial.made else {}
    return {name: round(trial.scaled(value, total)) for name, value in counted.items() if not isinstance(value, list)}
