"""Search the text of all rows, a bounded scan per request: `next` is the first row of the following request."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from forebay.columns import Array, Ragged
from forebay.errors import Damaged, message_of
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.tokens.encoders import in_time, reference_tokenizer
from forebay.viewer.shown_cache import Query, ShownCache
from forebay.viewer.token_rows import NO_TEXT, vocabulary_of

SCAN_SECONDS = 0.5  # of one request
MOST_HITS, MOST_WANTED = 50, 200  # hits of one request, characters of the text
READ_AT_ONCE = 1 << 18  # tokens or bytes
AROUND = 40  # characters that are shown before and after a hit


class Hit(Record, frozen=True, kw_only=True):
    row: int
    before: str
    match: str
    after: str


class SearchResult(Record, frozen=True, kw_only=True):
    hits: tuple[Hit, ...]
    next: int | None  # None at the end of the cache
    rows: int
    notes: tuple[str, ...] = ()  # why some rows were skipped


def search_rows(shown: ShownCache, query: Query) -> SearchResult:
    """The first place of a text in each row from `row` on, ignoring case."""
    cache, row = shown.at(), query.whole("row", 0)
    wanted = query.text("text")[:MOST_WANTED]
    deadline = time.monotonic() + SCAN_SECONDS
    hits: list[Hit] = []
    notes: list[str] = []
    try:
        while wanted and row < len(cache):
            stop = _stop(cache, row)
            try:
                texts = row_texts(cache, np.arange(row, stop))
                hits += [hit for at, text in enumerate(texts, row) for hit in _hit(text, wanted, at)]
            except Damaged as error:
                notes.append(f"rows {row:,} to {stop - 1:,} were skipped: {error.message}")
            row = stop
            if time.monotonic() > deadline or len(hits) >= MOST_HITS:
                break
    except NO_TEXT as error:
        notes, row = [message_of(error)], len(cache)
    following = row if wanted and row < len(cache) else None
    return SearchResult(hits=tuple(hits), next=following, rows=len(cache), notes=tuple(notes[:5]))


def _stop(cache: Cache, row: int) -> int:
    """Where a step ends: at most at the end of its chunk, so that a damaged chunk costs only its own rows."""
    width = max(1, cache.row_bytes(_columns(cache)))
    chunk_end = int(cache.chunk_starts[cache.chunk_positions(np.array([row]))[0] + 1])
    return min(chunk_end, row + max(1, min(4096, READ_AT_ONCE // width)))


def _columns(cache: Cache) -> list[str]:
    """The columns that are searched."""
    if "tokens" in cache.columns:
        return ["tokens", "seq_lens"]
    if "candidates" in cache.columns:
        return ["prompt", "candidates"]
    declared = (cache.column(name) for name in cache.columns)
    return [one.name for one in declared if one.ragged and one.dtype == "uint8" and not one.shape]


def row_texts(cache: Cache, rows: Array) -> list[str]:
    """The text of each row: decoded tokens without padding, or every column of bytes."""
    names = _columns(cache)
    read = cache.read(rows, names)
    if names[:1] not in (["tokens"], ["prompt"]):
        return [
            "\n".join(read[name][at].tobytes().decode("utf-8", "replace") for name in names) for at in range(len(rows))
        ]
    used = list(_used_tokens(read, names))
    vocabulary = vocabulary_of(cache)
    decode = partial(reference_tokenizer(vocabulary).decode_batch, used)
    texts: list[str] = in_time(vocabulary.name, "decode", sum(map(len, used)), decode)
    return texts


def _used_tokens(read: dict[str, Array | Ragged], names: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of rows without padding; of a preference, the prompt and all candidates."""
    first, second = (read[name] for name in names)
    for at in range(len(first)):
        one, other = np.asarray(first[at]), np.asarray(second[at])
        yield one[: int(other.sum())].tolist() if names[0] == "tokens" else [*one.tolist(), *other.tolist()]


def _hit(text: str, wanted: str, row: int) -> list[Hit]:
    at = text.lower().find(wanted.lower())
    if at < 0:
        return []
    stop = at + len(wanted)
    before, after = text[max(0, at - AROUND) : at], text[stop : stop + AROUND]
    return [Hit(row=row, before=before, match=text[at:stop], after=after)]
