"""Rows of images one by one, without a build.

    images[i] ──▶ L1 memory, bounded in bytes ──▶ L2 LMDB, shared by processes ──▶ decode, then stored in both

A row is served only if its sample is still the one it was made from and its bytes match their digest (and HMAC, with
FOREBAY_HMAC_KEY). Any other row is counted, made again and replaced.
"""

import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from forebay.building.layers import resolve_recipe
from forebay.building.listing import SourceListing
from forebay.errors import StoreRefused, choice_error
from forebay.fields import as_bytes
from forebay.format.tensors import hmac_key
from forebay.images.tags import ImageUnreadable
from forebay.recipe import RowRecipe, check_recipe
from forebay.row_cache.lmdb_file import DEFAULT_MAX_BYTES, L2_ERRORS, RowFile, open_row_file
from forebay.row_cache.memory import MemoryRows
from forebay.row_cache.samples import CheckSource, CurrentSample, ListedSamples
from forebay.row_cache.statistics import LookupCounts, RowCacheStatistics
from forebay.row_cache.values import BadRow, Row, StoredRow, decode_row, encode_row
from forebay.source import Source
from forebay.store.base import is_url

Unreadable = Literal["raise", "skip"]
_ROW_OVERHEAD_BYTES = 1600  # six arrays and their dictionary
_FILL_BATCH = 32
_TAGS = "tags"


class CachedImages:
    """The image rows of a source as `recipe.make_row` returns them, read through L1 and L2.

        with fb.CachedImages(fb.sources.images("photos"), fb.ImageRecipe(), l1="256MB", l2="rows/photos") as images:
            images[17], images.read([5, 3, 9]), images.statistics()

    Every process has its own L1; processes with the same `l2` folder share it. Arrays are read-only. It pickles and
    forks: a `DataLoader` worker opens what it needs at its first read. Threads may read at once.

    `unreadable="skip"` omits samples that are not images from `read`; `images[i]` raises `ImageUnreadable`.
    `check_source="open"` trusts that files do not change after the source was listed, where a stat per row costs too
    much. L1 holds uint8 pixels: decoders return 8 bits, and float32 would take four times the memory.
    """

    def __init__(
        self,
        source: Source,
        recipe: RowRecipe,
        l1: int | str = "256MB",
        l2: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        unreadable: Unreadable = "raise",
        check_source: CheckSource = "read",
    ) -> None:
        _check_choice("unreadable", unreadable, Unreadable)
        _check_choice("check_source", check_source, CheckSource)
        _check_arguments(source, recipe, l2)
        check_recipe(recipe)
        self.source = source
        self.recipe, _ = resolve_recipe(None, SourceListing(source), recipe, recipe.kind)
        self.l2 = None if l2 is None else os.path.abspath(l2)
        self._l1_bytes, self._max_bytes, self._unreadable = as_bytes(l1), as_bytes(max_bytes), unreadable
        self._samples = ListedSamples(source, self.recipe, check_source)
        self._opened: _Opened | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __repr__(self) -> str:
        return f"CachedImages({len(self):,} samples, l1={self._l1_bytes:,} bytes, l2={self.l2!r})"

    def __getitem__(self, index: int) -> Row:
        return self._rows([index], "raise")[0]

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def read(self, indices: Sequence[int]) -> list[Row]:
        """Return many rows with one L2 transaction; without unreadable ones, if so chosen."""
        return self._rows(indices, self._unreadable)

    __getitems__ = read  # torch's DataLoader calls it

    def fill(self, on_progress: Callable[[int, int], None] | None = None) -> RowCacheStatistics:
        """Read every sample once, to fill L2 before training; call it again to resume."""
        for start in range(0, len(self), _FILL_BATCH):
            stop = min(start + _FILL_BATCH, len(self))
            self._rows(range(start, stop), "skip")
            if on_progress is not None:
                on_progress(stop, len(self))
        self.flush()
        return self.statistics()

    def statistics(self) -> RowCacheStatistics:
        """Return the counts of this process; a `DataLoader` worker has its own."""
        return self._open().statistics()

    def flush(self) -> None:
        """Wait until L2 is on disk and survives a power cut."""
        opened = self._open()
        if opened.l2 is not None:
            opened.l2.sync()

    def close(self) -> None:
        """Release memory and files; reading again opens them again."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.pid == os.getpid() and opened.l2 is not None:
            opened.l2.sync()
            opened.l2.close()

    def __enter__(self) -> "CachedImages":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def _rows(self, indices: Sequence[int], unreadable: Unreadable) -> list[Row]:
        count = len(self)
        positions = [operator.index(index) for index in indices]
        for position in positions:
            if not -count <= position < count:
                raise IndexError(f"index {position} is out of range for {count:,} samples")
        return self._open().rows([position % count for position in positions], unreadable)

    def _open(self) -> "_Opened":
        opened = self._opened
        if opened is None or opened.pid != os.getpid():  # a forked child opens its own
            with _opening:
                opened = self._opened
                if opened is None or opened.pid != os.getpid():
                    l2 = None if self.l2 is None else open_row_file(self.l2, self._max_bytes)
                    opened = self._opened = _Opened(self._samples, self.recipe, MemoryRows(self._l1_bytes), l2)
        return opened


class _Opened:
    """L1, L2 and the source as one process has them open."""

    def __init__(
        self, samples: ListedSamples, recipe: RowRecipe, l1: "MemoryRows[StoredRow]", l2: RowFile | None
    ) -> None:
        self.pid = os.getpid()
        self.l2 = l2
        self._samples, self._recipe, self._l1 = samples, recipe, l1
        self._columns = {column.name: column for column in recipe.columns() if column.name != _TAGS}
        self._hmac_key = hmac_key()
        self._counts = LookupCounts()
        self._l2_off = ""

    def rows(self, indices: Sequence[int], unreadable: Unreadable) -> list[Row]:
        located = [one for index in indices if (one := self._attempt(self._samples.locate, index, unreadable))]
        wanted = {one.key: one for one in located}
        rows = self._from_memory(wanted)
        stored, replace = self._from_l2({key: one for key, one in wanted.items() if key not in rows})
        rows |= stored
        fresh: dict[bytes, bytes] = {}
        try:
            for key, one in wanted.items():
                if key not in rows and (row := self._attempt(self._make, one, unreadable)) is not None:
                    rows[key] = row
                    if self.l2 is not None and not self._l2_off:
                        fresh[key] = encode_row(one.identity, row, self._hmac_key)
        finally:  # rows made before an unreadable one are stored
            self._write(fresh, replace)
        return [self._recipe.with_tags(rows[one.key]) for one in located if one.key in rows]

    def _attempt(self, function: Callable[[Any], Any], argument: Any, unreadable: Unreadable) -> Any:
        try:
            return function(argument)
        except ImageUnreadable as error:
            self._counts.add_failure(error.reason)
            if unreadable == "raise":
                raise
            return None

    def _from_memory(self, wanted: Mapping[bytes, CurrentSample]) -> dict[bytes, Row]:
        rows: dict[bytes, Row] = {}
        for key, one in wanted.items():
            stored = self._l1.get(key)
            if stored is not None and stored.identity.is_current(one.identity):
                rows[key] = stored.row
        self._counts.add(l1_hits=len(rows))
        return rows

    def _from_l2(self, wanted: Mapping[bytes, CurrentSample]) -> tuple[dict[bytes, Row], set[bytes]]:
        """Return the sound, current rows, and the keys of the others that exist."""
        rows: dict[bytes, Row] = {}
        replace: set[bytes] = set()
        for key, value in self._l2_values(wanted).items():
            try:
                stored = decode_row(value, self._columns, self._hmac_key)
                if stored.identity.path != wanted[key].identity.path:
                    raise BadRow("identity", "it is the row of another sample")
            except BadRow as error:
                replace.add(key)
                path = wanted[key].identity.path
                self._counts.add_bad(error.reason, f"the L2 row of '{path}' is not served: {error.detail}")
                continue
            if not stored.identity.is_current(wanted[key].identity):
                replace.add(key)
                self._counts.add(stale=1)
                continue
            rows[key] = stored.row
            self._l1.put(key, stored, stored.size_bytes + _ROW_OVERHEAD_BYTES)
            self._counts.add(l2_hits=1, l2_read_bytes=stored.size_bytes)
        return rows, replace

    def _l2_values(self, wanted: Mapping[bytes, CurrentSample]) -> dict[bytes, bytes]:
        if self.l2 is None or self._l2_off or not wanted:
            return {}
        try:
            return self.l2.get_many(list(wanted))
        except L2_ERRORS as error:
            self._turn_off(error)
            return {}

    def _make(self, located: CurrentSample) -> Row:
        sample = self._samples.read(located)
        try:
            row = self._recipe.make_row(sample)
            del row[_TAGS]  # `with_tags` adds them, so a new vocabulary decodes nothing
        except ImageUnreadable as error:
            raise ImageUnreadable(error.reason, f"'{sample.id}': {error.detail}") from error
        for array in row.values():
            array.setflags(write=False)  # L1 shares them
        size_bytes = sum(array.nbytes for array in row.values())
        self._l1.put(located.key, StoredRow(located.identity, row, size_bytes), size_bytes + _ROW_OVERHEAD_BYTES)
        self._counts.add(misses=1)
        return row

    def _write(self, fresh: Mapping[bytes, bytes], replace: set[bytes]) -> None:
        if self.l2 is None or not fresh or self._l2_off:
            return
        try:
            written = self.l2.put_many(fresh, replace)
        except L2_ERRORS as error:
            self._turn_off(error)
        else:
            self._counts.add(l2_written=written, l2_written_bytes=sum(map(len, fresh.values())))

    def _turn_off(self, error: Exception) -> None:
        self._l2_off = str(error)
        path = "" if self.l2 is None else self.l2.path
        self._counts.warn_once("off", f"the row cache '{path}' is not used from now on: {error}")

    def statistics(self) -> RowCacheStatistics:
        numbers = self._counts.numbers
        names = ("l1_hits", "l2_hits", "misses", "l2_read_bytes", "l2_written", "l2_written_bytes", "stale")
        return RowCacheStatistics(
            **{name: numbers[name] for name in names},
            l1_rows=len(self._l1),
            l1_bytes=self._l1.bytes,
            l1_evicted=self._l1.evicted,
            bad=dict(self._counts.bad),
            failures=dict(self._counts.failures),
            l2_off=self._l2_off,
        )


def _check_arguments(source: object, recipe: object, l2: object) -> None:
    if not isinstance(source, Source):
        raise TypeError(f"source must be a Source such as fb.sources.images('photos'), not {type(source).__name__}")
    if not isinstance(recipe, RowRecipe):
        raise TypeError(f"recipe must make single rows, such as fb.ImageRecipe(), not {type(recipe).__name__}")
    if l2 == "":
        raise ValueError("l2 is empty; pass a folder, or None")
    if isinstance(l2, str | os.PathLike) and is_url(os.fspath(l2)):
        raise StoreRefused(f"l2 is the URL '{os.fspath(l2)}'", hint="pass a folder on a local disk")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise choice_error(name, value, get_args(choices))


_opening = threading.Lock()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
