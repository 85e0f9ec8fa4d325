"""Rows of images one by one, without a build: from memory, else from a tier on disk, else made and kept in both.

    images[i] ──▶ L1 memory, bounded in bytes ──▶ L2 LMDB, shared by processes ──▶ decode ──▶ written back to both

A key names a sample as it is now, so that nothing stale is found; a value says whose row it is and carries a checksum,
so that nothing wrong is served. What is not right is counted, reported once, made again and replaced.

The tiers as one process has them open: memory, the tier on disk, the source.
"""

import operator
import os
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from forebay.building.begin import resolve_recipe
from forebay.building.planning import SourceListing
from forebay.building.task import open_recipe, open_source, recipe_document, source_document
from forebay.errors import ImageUnreadable, RecipeInvalid, SourceChanged, TierDamaged, TierUnusable, choice_error
from forebay.fields import as_bytes
from forebay.format.tensors import VARIABLE, hmac_key
from forebay.recipe import RowRecipe, check_recipe
from forebay.source import Sample, Source, SourceFile
from forebay.store.base import is_url
from forebay.tiers.lmdb_tier import MAX_BYTES, QUEUE_BYTES, LmdbTier, WhenFull, open_tier
from forebay.tiers.tier_value import (
    BadValue,
    CheckSource,
    Named,
    Row,
    RowNames,
    RowShape,
    Seen,
    TierSamples,
    TierStatistics,
    TierWarning,
    content_of,
    decode_value,
    encode_value,
    key_of,
    seen_in,
)


class LookupCounts:
    def __init__(self, news: Sequence[str] = ()) -> None:
        self.l1_hits = self.l2_hits = self.misses = 0
        self.l2_read_bytes = self.made_bytes = self.compared = 0
        self.bad: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._news = list(news)
        self._lock = threading.Lock()

    def add(
        self,
        *,
        l1_hits: int = 0,
        l2_hits: int = 0,
        misses: int = 0,
        l2_read_bytes: int = 0,
        made_bytes: int = 0,
        compared: int = 0,
    ) -> None:
        with self._lock:
            self.l1_hits += l1_hits
            self.l2_hits += l2_hits
            self.misses += misses
            self.l2_read_bytes += l2_read_bytes
            self.made_bytes += made_bytes
            self.compared += compared

    def count_bad(self, reason: str, words: str) -> None:
        """A value that was not served; the words of the first of each reason are news."""
        with self._lock:
            self.bad[reason] += 1
            if self.bad[reason] == 1:
                self._news.append(words)

    def count_failure(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def news(self) -> list[str]:
        """What was not reported yet."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, []
            return news


V = TypeVar("V")


class MemoryTier(Generic[V]):
    """Values by key; when they would take more than `max_bytes`, those not used for longest are dropped.

    A value that is larger than the whole tier is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted = 0
        self._kept: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> V | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            return
        with self._lock:
            self._forget(key)
            while self.bytes + size_bytes > self.max_bytes:
                self._forget(next(iter(self._kept)))
                self.evicted += 1
            self._kept[key] = (value, size_bytes)
            self.bytes += size_bytes

    def _forget(self, key: bytes) -> None:
        _, size_bytes = self._kept.pop(key, (None, 0))
        self.bytes -= size_bytes


Unreadable = Literal["raise", "skip"]
_ROW_OVERHEAD = 1600  # six arrays and their dict, beside the bytes they show
_ATTEMPTS = 3
_NOT_OURS = "key-needed"  # what is tagged belongs to those who have the key, and is left to them


class OpenedTiers:
    """Looks for rows in memory, then on disk, then makes them and keeps them in both."""

    def __init__(
        self,
        samples: TierSamples,
        recipe: RowRecipe,
        l1: MemoryTier[Row],
        l2: LmdbTier | None,
        *,
        key: bytes | None,
        when_full: WhenFull,
        damage: str = "",
    ) -> None:
        """With `damage`, the tier on disk could not be opened and `l2` is None: every row that it had is made."""
        self.counts = LookupCounts(news=[damage] if damage else [])
        self._damage = damage
        self.l2 = l2
        self._l1 = l1
        self._samples, self._recipe = samples, recipe
        self._names = RowNames(samples, recipe)
        self._shape = RowShape(recipe.stored_columns())
        self._key = key
        self._when_full = when_full

    def rows(self, indices: Sequence[int], unreadable: Unreadable) -> list[Row]:
        """The rows of some samples, in order."""
        named = self._named(indices, unreadable)
        wanted = {one.key: one for one in named}
        rows = {key: row for key, one in wanted.items() if (row := self._l1.get(_l1_key(one))) is not None}
        self.counts.add(l1_hits=len(rows))
        stored, bad = self._read_l2([one for key, one in wanted.items() if key not in rows])
        for key, one in wanted.items():
            if key not in rows:
                try:
                    rows[key] = self._row(one, stored.get(key), bad.get(key))
                except ImageUnreadable as error:
                    self._count_or_raise(error, unreadable)
        self.tell()
        return [dict(rows[one.key]) for one in named if one.key in rows]

    def _named(self, indices: Sequence[int], unreadable: Unreadable) -> list[Named]:
        found: list[Named] = []
        for index in indices:
            try:
                found.append(self._names.named(index))
            except ImageUnreadable as error:
                self._count_or_raise(error, unreadable)
        return found

    def statistics(self) -> TierStatistics:
        counts, l1 = self.counts, self._l1
        read = TierStatistics(
            l1_hits=counts.l1_hits,
            l2_hits=counts.l2_hits,
            misses=counts.misses,
            l1_values=len(l1),
            l1_bytes=l1.bytes,
            l1_evicted=l1.evicted,
            l2_read_bytes=counts.l2_read_bytes,
            made_bytes=counts.made_bytes,
            compared=counts.compared,
            bad=dict(counts.bad),
            failures=dict(counts.failures),
        )
        if self._damage:
            dropped = {self._damage: counts.misses} if counts.misses else {}
            return msgspec.structs.replace(read, dropped=dropped, writing_off=self._damage)
        return read if self.l2 is None else msgspec.structs.replace(read, **self.l2.figures())

    def tell(self) -> None:
        """Warn, once, of what costs time from now on."""
        for line in self.counts.news() + ([] if self.l2 is None else self.l2.news()):
            warnings.warn(line, TierWarning, stacklevel=4)

    def _read_l2(self, missing: Sequence[Named]) -> tuple[dict[bytes, "_Stored"], dict[bytes, str]]:
        """What the tier on disk has, by key; and the keys of what must not be served, and why."""
        found: dict[bytes, _Stored] = {}
        bad: dict[bytes, str] = {}
        if self.l2 is None or not missing:
            return found, bad
        wanted = {one.key: one for one in missing}

        def take(key: bytes, value: bytes) -> None:
            try:
                found[key] = self._decoded(value, key)
            except BadValue as error:
                bad[key] = error.reason
                self.counts.count_bad(error.reason, _words(path, wanted[key], error))

        path = self.l2.path
        self.l2.read_each(list(wanted), take)
        return found, bad

    def _decoded(self, value: bytes, key: bytes) -> "_Stored":
        identity, row = decode_value(value, self._key, self._shape)
        if key_of(identity) != key:
            raise BadValue("identity", "it is the row of another sample, or of another recipe")
        _check_content(row)
        return _Stored(row, seen_in(identity), len(value))

    def _row(self, named: Named, stored: "_Stored | None", bad: str | None) -> Row:
        """The row of what the tier on disk has, if its sample is still what it was."""
        if stored is None or not stored.seen.is_still(named.seen):
            return self._make(named, stored, bad)
        row = self._read_stored(named.file.path, stored.row)
        self.counts.add(l2_hits=1, l2_read_bytes=stored.bytes)
        self._l1.put(_l1_key(named), row, stored.bytes + _ROW_OVERHEAD)
        return row

    def _read_stored(self, sample: str, stored: Row) -> Row:
        try:
            return self._recipe.read_stored(stored)
        except ImageUnreadable as error:
            raise ImageUnreadable(error.reason, f"'{sample}': {error.detail}") from error

    def _make(self, named: Named, old: "_Stored | None", bad: str | None) -> Row:
        """A row made from the source, as it will be read from a tier; from the same bytes, with its old pixels."""
        named, sample, seen = self._read_source(named)
        known = old if old is not None and seen.content is not None and old.seen.content == seen.content else None
        try:
            again = self._recipe.make_stored_again
            made = self._recipe.make_stored(sample) if known is None else again(sample, known.row)
        except ImageUnreadable as error:
            raise ImageUnreadable(error.reason, f"'{sample.id}': {error.detail}") from error
        value = encode_value(self._names.identity(named.number, named.file, seen), made, self._key)
        try:
            stored = self._decoded(value, named.key)
        except BadValue as error:
            raise RecipeInvalid(f"the recipe made a row of '{sample.id}' that is not its own: {error}") from error
        row = self._read_stored(sample.id, stored.row)
        if known is None:
            self.counts.add(misses=1, made_bytes=len(value), compared=int(old is not None))
        else:
            self.counts.add(l2_hits=1, l2_read_bytes=known.bytes, compared=1)
        self._l1.put(_l1_key(named), row, len(value) + _ROW_OVERHEAD)
        if self.l2 is not None and bad != _NOT_OURS:
            self.l2.put(named.key, value, replaces=bool(old or bad), when_full=self._when_full)
        return row

    def _read_source(self, named: Named) -> tuple[Named, Sample, Seen]:
        """A sample under the name that it has while it is read, and what it was then."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return named, *self._read_once(named)
            except SourceChanged:
                named = self._names.named(named.number)
        return named, *self._read_once(named)

    def _read_once(self, named: Named) -> tuple[Sample, Seen]:
        sample = self._samples.read(named.number, named.file)
        if self._samples.stamp(named.file) != named.seen.stamp:
            raise SourceChanged(self._samples.root, {named.file.path: "changes while it is read"})
        return sample, msgspec.structs.replace(named.seen, content=content_of(sample))

    def _count_or_raise(self, error: ImageUnreadable, unreadable: Unreadable) -> None:
        """A sample of which no row can be made is counted, and left out where that is asked for."""
        self.counts.count_failure(error.reason)
        if unreadable == "raise":
            raise error


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row as the tier on disk has it, what its sample was, and how many bytes the value has."""

    row: Row
    seen: Seen
    bytes: int


def _l1_key(named: Named) -> bytes:
    """A row in memory is that of files with one stamp, and of one sidecar."""
    return named.key + f"{named.seen.stamp} {named.seen.etag}".encode("utf-8", "surrogateescape")


def _check_content(row: Row) -> None:
    """The pixels fill their box."""
    pixels = row.get("pixels")
    if pixels is None:
        return
    box = row["box"]
    if pixels.size != 3 * int(box[2]) * int(box[3]):
        raise BadValue("shape", f"it has {pixels.size:,} values for a box of {box[2]} × {box[3]}")


def _words(path: str, named: Named, error: BadValue) -> str:
    what_now = f"set {VARIABLE} to read it" if error.reason == _NOT_OURS else "it is made again and replaced"
    return (
        f"the tier '{path}' has a value for '{named.file.path}' that is not served: {error.detail}; {what_now} "
        f"(`statistics().bad` counts more of them)"
    )


_PLAIN = ("l2", "_l1_bytes", "_max_bytes", "_queue_bytes", "_when_full", "_unreadable")  # attributes that are JSON


class CachedImages:
    """The rows of the images of a source, as `recipe.make_row` gives them, read through two tiers.

        with fb.CachedImages(fb.sources.images("photos"), fb.ImageRecipe(), l1="256MB", l2="tiers/photos") as images:
            images[17], images.read([5, 3, 9]), images.statistics()

    Every process has its own L1; all processes of a machine that name the same `l2` share it. Nobody can write to
    the arrays of a row, as tiers share them. It can be pickled and forked: a worker of a `DataLoader` opens what it
    needs when it first reads, and finds the same samples under the same numbers. Threads may read at once.

    `when_full="drop"` does not wait for the writer, but counts what it could not take. `unreadable="skip"` leaves out
    of `read` what is not an image; `images[i]` raises `ImageUnreadable` in any case. `check_source="open"` trusts
    that no file changes once the source is listed, where looking at each before it is read costs too much.
    """

    _opened: OpenedTiers | None
    _lock: threading.Lock

    def __init__(
        self,
        source: Source,
        recipe: RowRecipe,
        l1: int | str = "256MB",
        l2: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str = MAX_BYTES,
        queue_bytes: int | str = QUEUE_BYTES,
        when_full: WhenFull = "wait",
        unreadable: Unreadable = "raise",
        check_source: CheckSource = "read",
    ) -> None:
        _check_choice("when_full", when_full, WhenFull)
        _check_choice("unreadable", unreadable, Unreadable)
        _check_choice("check_source", check_source, CheckSource)
        _check_given(source, recipe, l2)
        check_recipe(recipe)
        self.source = source
        self.recipe, _ = resolve_recipe(None, SourceListing(source), recipe, recipe.kind)
        self.l2 = None if l2 is None else os.path.abspath(l2)
        self._l1_bytes, self._max_bytes, self._queue_bytes = as_bytes(l1), as_bytes(max_bytes), as_bytes(queue_bytes)
        self._when_full, self._unreadable = when_full, unreadable
        self._samples = TierSamples(source, check_source)
        self._start()

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        return f"<CachedImages of {len(self):,} samples, l1={self._l1_bytes:,} bytes, l2={self.l2!r}>"

    def __getitem__(self, index: int) -> Row:
        return self._open().rows(self._checked([index]), "raise")[0]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def read(self, indices: Sequence[int]) -> list[Row]:
        """Many rows with one look at the tier on disk; without those that are unreadable, if so chosen."""
        return self._open().rows(self._checked(indices), self._unreadable)

    __getitems__ = read  # torch's `DataLoader` asks for a batch so

    def statistics(self) -> TierStatistics:
        """How reading went in this process, since it began to; a worker of a `DataLoader` has its own counts."""
        return self._open().statistics()

    def flush(self) -> None:
        """Wait until every row that was made is on disk for good, or is counted as dropped."""
        opened = self._open()
        if opened.l2 is not None:
            opened.l2.writer.flush()
        opened.tell()

    def close(self) -> None:
        """Write what waits, and release memory, files and threads; reading again opens them again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened.l2 is not None:
            opened.l2.close()
            opened.tell()

    def __enter__(self) -> "CachedImages":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def document(self) -> dict[str, Any]:
        """JSON from which a worker process opens the same samples and tiers."""
        return {
            "source": source_document(self.source),
            "recipe": recipe_document(self.recipe),
            "files": msgspec.to_builtins(list(self._samples.files)),
            "check": self._samples.check,
            "state": {name: vars(self)[name] for name in _PLAIN},
        }

    @classmethod
    def opened(cls, document: Mapping[str, Any]) -> "CachedImages":
        source = open_source(document["source"])
        files = msgspec.convert(document["files"], list[SourceFile])
        images = cls.__new__(cls)
        samples = TierSamples(source, document["check"], files)
        images.__setstate__(
            {**document["state"], "source": source, "recipe": open_recipe(document["recipe"]), "_samples": samples}
        )
        return images

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_opened", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def _start(self) -> None:
        """Nothing is open yet; or not any more, in the child of a fork, whatever its parent was doing."""
        self._opened = None
        self._lock = threading.Lock()
        _known.add(self)

    def _open(self) -> OpenedTiers:
        opened = self._opened
        if opened is not None:
            return opened
        with self._lock:
            if self._opened is None:
                self._opened = self._open_tiers()
            return self._opened

    def _open_tiers(self) -> OpenedTiers:
        l1: MemoryTier[Row] = MemoryTier(self._l1_bytes)
        l2, key, damage = None, hmac_key(), ""
        if self.l2 is not None:
            try:
                l2 = self._open_l2(self.l2, key)
            except TierDamaged as error:
                damage = str(error)
        return OpenedTiers(self._samples, self.recipe, l1, l2, key=key, when_full=self._when_full, damage=damage)

    def _open_l2(self, path: str, key: bytes | None) -> LmdbTier:
        tier = open_tier(path, max_bytes=self._max_bytes, queue_bytes=self._queue_bytes)
        try:
            tier.check_key(key)
        except BaseException:
            tier.close()
            raise
        return tier

    def _checked(self, indices: Sequence[int]) -> list[int]:
        count = len(self)
        places = [operator.index(index) for index in indices]
        for place in places:
            if not -count <= place < count:
                raise IndexError(f"there is no sample {place}; {self!r} has {count:,} samples")
        return [place % count for place in places]


def _check_given(source: object, recipe: object, l2: object) -> None:
    if not isinstance(source, Source):
        raise TypeError(f"a source is needed, for instance fb.sources.images('photos'), not {type(source).__name__}")
    if not isinstance(recipe, RowRecipe):
        raise TypeError(f"a recipe of single rows is needed, such as fb.ImageRecipe(), not {type(recipe).__name__}")
    if l2 == "":
        raise ValueError("l2 is empty; give the folder of the tier, or None for none on disk")
    if isinstance(l2, str | os.PathLike) and is_url(os.fspath(l2)):
        raise TierUnusable(os.fspath(l2), "it is a URL, and a tier is a folder", "pass the path of a folder")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise choice_error(name, value, get_args(choices))


_known: "weakref.WeakSet[CachedImages]" = weakref.WeakSet()


def _start_in_child() -> None:
    for images in list(_known):
        images._start()


os.register_at_fork(after_in_child=_start_in_child)
