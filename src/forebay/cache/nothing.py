"""Samples that failed: more than the caller allows, or all of them, with what went wrong most often and an example."""

from collections import Counter

from forebay.cache.published import open_chunk
from forebay.errors import NothingMade, TooManyFailures
from forebay.format.generation import ChunkTable
from forebay.source import Failure
from forebay.store.base import Store

_MOST_MARKS = 300
_ADVICE = {
    "no-text": "name a field that the objects have as the text (text=…, --text …)",
    "not-text": "name another field as the text (text=…, --text …)",
    "null": "name another field as the text (text=…, --text …)",
    "bad-json": "check that the files are JSON lines, one object in each line",
    "not-utf8": "convert the files to UTF-8, or read them as what they are",
    "outside-root": "name the folder that the paths are below (root=…, --root …)",
}


def check_failures(
    root: str, failures: int, samples: int, allowed: int | float | None, expected: int | None = None
) -> None:
    """Raise where more failed than is allowed: a count, or a share of the samples that there are or will be."""
    of = samples if expected is None else expected
    if allowed is not None and failures > (allowed if isinstance(allowed, int) else allowed * of):
        raise TooManyFailures(root, failures, samples, f"{allowed:,}" if isinstance(allowed, int) else f"{allowed:.2%}")


def check_something_made(store: Store, layer: str, table: ChunkTable) -> None:
    """Raise where every sample of a layer failed: there is nothing to train on."""
    failures = int(table.numbers["failures"].sum())
    if failures == 0 or int(table.rows.sum()) or failures < int(table.numbers["samples"].sum()):
        return
    counts: Counter[str] = Counter()
    examples: dict[str, Failure] = {}
    for record in table.records():
        for failure in open_chunk(store, layer, record).failures():
            counts[failure.reason] += 1
            examples.setdefault(failure.reason, failure)
    reason, count = counts.most_common(1)[0]
    raise NothingMade(
        store.address, failures, reason, count, _words(examples[reason]), _advice(store, examples[reason])
    )


def _words(example: Failure) -> str:
    words = f"'{example.sample}': {example.detail}" if example.detail else f"'{example.sample}'"
    return words if len(words) <= _MOST_MARKS else f"{words[:_MOST_MARKS]}…"


def _advice(store: Store, example: Failure) -> str:
    if example.reason == "bad-json" and "`array`" in example.detail:
        return "it looks like one JSON array, not JSON lines: write one object in each line"
    if example.reason == "not-found" and example.detail.startswith("line "):
        return _ADVICE["outside-root"]
    return _ADVICE.get(example.reason, f"see `forebay status {store.address}` for more of them")
