"""Rows of images one by one, without a build: from memory, else from a tier on disk, else made and kept in both.

    images[i] ──▶ L1 memory, bounded in bytes ──▶ L2 LMDB, shared by processes ──▶ decode ──▶ written back to both

A key names a sample as it is now, so that nothing stale is found; a value says whose row it is and carries a checksum,
so that nothing wrong is served. What is not right is counted, reported once, made again and replaced.
"""

import operator
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from forebay.building.begin import resolve_recipe
from forebay.building.planning import SourceListing
from forebay.building.task import open_recipe, open_source, recipe_document, source_document
from forebay.errors import TierDamaged, TierUnusable, is_url
from forebay.fields import as_bytes
from forebay.format.tensors import hmac_key
from forebay.recipe import RowRecipe, check_recipe
from forebay.source import Source, SourceFile
from forebay.tiers.lmdb_tier import MAX_BYTES, QUEUE_BYTES, LmdbTier, open_tier
from forebay.tiers.lookup import MemoryTier, OpenedTiers, Unreadable
from forebay.tiers.tier_samples import CheckSource, TierSamples
from forebay.tiers.tier_value import Row, TierStatistics
from forebay.tiers.tier_writer import WhenFull

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
        """Write what waits, and let go of memory, files and threads; reading again opens them again."""
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
                raise IndexError(f"sample {place} of {count:,} in {self!r}")
        return [place % count for place in places]


def _check_given(source: object, recipe: object, l2: object) -> None:
    if not isinstance(source, Source):
        raise TypeError(f"a source is needed, for instance fb.sources.images('photos'), not {type(source).__name__}")
    if not isinstance(recipe, RowRecipe):
        raise TypeError(f"a recipe of single rows is needed, such as fb.ImageRecipe(), not {type(recipe).__name__}")
    if l2 == "":
        raise ValueError("l2 is empty; give the folder of the tier, or None for none on disk")
    if isinstance(l2, str | os.PathLike) and is_url(os.fspath(l2)):
        raise TierUnusable(os.fspath(l2), "it is a URL, and a tier lies in a folder", "pass the path of a folder")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; {' or '.join(map(repr, get_args(choices)))} is expected")


_known: "weakref.WeakSet[CachedImages]" = weakref.WeakSet()


def _start_in_child() -> None:
    for images in list(_known):
        images._start()


os.register_at_fork(after_in_child=_start_in_child)
