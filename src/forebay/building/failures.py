"""Samples that failed: more than the caller allows, or all of them, with what went wrong most often and an example."""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from forebay.cache.catalog import (
    chunk_files,
    layers_of,
    newest_generation,
    open_chunk,
    read_cache_document,
    sound_record,
)
from forebay.cache.claims import read_claims
from forebay.errors import CacheNotFound, NothingMade, SourceEmpty, TooManyFailures
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.source import Failure
from forebay.store import LocalStore
from forebay.store.base import Store

ENOUGH_SAMPLES = 16  # fewer samples that all failed say nothing about the others
_MOST_CHARS = 300
_ADVICE = {
    "no-text": "name a field that the objects have as the text (text=…, --text …)",
    "not-text": "name another field as the text (text=…, --text …)",
    "null": "name another field as the text (text=…, --text …)",
    "bad-json": "check that the files are JSON lines, one object in each line",
    "not-utf8": "convert the files to UTF-8, or read them as what they are",
    "outside-root": "name the folder that the paths are below (root=…, --root …)",
}


class Reasons:
    """Why samples failed: how often each reason, and the first sample of each."""

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}
        for failure in failures:
            self.add(failure)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, failure: Failure) -> None:
        self._counts[failure.reason] += 1
        self._examples.setdefault(failure.reason, failure)

    def most_frequent(self) -> tuple[str, int, str]:
        """The reason that most failures have, how many, and the first sample of them in words."""
        reason, count = self._counts.most_common(1)[0]
        return reason, count, _words(self._examples[reason])

    def advice(self) -> str:
        """What to do about the most frequent reason."""
        reason, _, _ = self.most_frequent()
        example = self._examples[reason]
        if reason == "bad-json" and "`array`" in example.detail:
            return "it looks like one JSON array, not JSON lines: write one object in each line"
        if reason == "not-found" and example.detail.startswith("line "):
            return _ADVICE["outside-root"]
        return _ADVICE.get(reason, "check that the samples are what the recipe reads")


def check_failures(
    root: str, failures: int, samples: int, allowed: int | float | None, expected: int | None = None
) -> None:
    """Raise where more failed than is allowed: a count, or a share of the samples that there are or will be."""
    of = samples if expected is None else expected
    if allowed is not None and failures > (allowed if isinstance(allowed, int) else allowed * of):
        raise TooManyFailures(root, failures, samples, f"{allowed:,}" if isinstance(allowed, int) else f"{allowed:.2%}")


def allows_all(allowed: int | float | None) -> bool:
    """Whether the caller said that every sample may fail: a share of 100 %."""
    return isinstance(allowed, float) and allowed >= 1


def check_something_made(store: Store, layer: str, table: ChunkTable) -> None:
    """Raise where a base layer has no row: there is nothing to train on."""
    samples, failures = (int(table.numbers[name].sum()) for name in ("samples", "failures"))
    if int(table.rows.sum()):
        return
    if not samples:
        raise SourceEmpty(store.address, "the source has no samples")
    if not failures:
        raise SourceEmpty(store.address, f"the recipe made no row of {samples:,} sample(s)")
    reasons = Reasons(one for record in table.records() for one in open_chunk(store, layer, record).failures())
    raise NothingMade(store.address, failures, *reasons.most_frequent(), reasons.advice())


def unbind(store: Store, layer: str) -> bool:
    """Remove what a build of a base layer that made no row has left, so that another command can use the root.

    Nothing is removed where a generation, a row, another layer or another builder's claim is there. Chunks go first
    and `cache.json` last: whatever is left when this is interrupted belongs together.
    """
    try:
        base = read_cache_document(store).base
    except CacheNotFound:
        return False
    if base != layer or layers_of(store) not in ([layer], []) or newest_generation(store) is not None:
        return False
    if any(claim.state == "working" for claim in read_claims(store, layer).values()):
        return False
    files = chunk_files(store, layer)
    records = [sound_record(store, layer, chunk, revision) for chunk, revision in files.items()]
    if any(record is None or record.rows for record in records):
        return False
    prefixes = (layout.layer_folder(layer), layout.claims_folder(layer), layout.PLAN, layout.IDENTITIES)
    keys = [entry.key for prefix in prefixes for entry in store.keys(prefix) if layout.is_known(entry.key, {layer})]
    for key in sorted(keys, key=lambda key: layout.parse_chunk(key) is None or key.startswith(layout.PLAN)):
        store.delete(key)
    store.delete(layout.CACHE)
    if isinstance(store, LocalStore):
        _remove_empty_folders(store, layer)
    return True


def _remove_empty_folders(store: LocalStore, layer: str) -> None:
    """Remove the folders that a build made, each only if nothing is in it; the root may be the user's."""
    inner, outer = (layout.layer_folder(layer), layout.claims_folder(layer)), (layout.LAYERS, layout.CLAIMS)
    for folder in (*inner, *outer, layout.PLAN, layout.IDENTITIES):
        path = os.path.join(store.address, folder).rstrip("/")
        if not os.path.islink(os.path.dirname(path)) or os.path.dirname(path) == store.address:
            with suppress(OSError):
                os.rmdir(path)


def _words(example: Failure) -> str:
    words = f"'{example.sample}': {example.detail}" if example.detail else f"'{example.sample}'"
    return words if len(words) <= _MOST_CHARS else f"{words[:_MOST_CHARS]}…"
