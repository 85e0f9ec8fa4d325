"""The documents of a token cache again: their ids put together from the pieces in its rows, their text from the ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import forebay as fb
from forebay.tokens import load_vocabulary
from forebay.tokens.vocabulary import reference_tokenizer

END_OF_TEXT = 50256
_DECODED_AT_ONCE = 500


def documents(root: Path) -> Iterator[list[np.ndarray]]:
    """The ids of every document, chunk by chunk, in the order of the source."""
    for columns in fb.open_cache(root).chunks():
        yield _documents(columns)


def document_lengths(root: Path) -> list[np.ndarray]:
    """The length of every document in tokens, per chunk."""
    return [np.array([len(ids) for ids in chunk], np.int64) for chunk in documents(root)]


def check_round_trip(root: Path, texts: Iterator[str]) -> int:
    """How many documents there are, once each was found to decode to its text."""
    tokenizer = reference_tokenizer(load_vocabulary("gpt2"))
    count = 0
    for chunk in documents(root):
        for at in range(0, len(chunk), _DECODED_AT_ONCE):
            batch = chunk[at : at + _DECODED_AT_ONCE]
            if any(ids[-1] != END_OF_TEXT for ids in batch):
                raise AssertionError(f"a document after number {count} does not end with the end of text")
            for found in tokenizer.decode_batch([ids[:-1].tolist() for ids in batch], skip_special_tokens=False):
                if found != next(texts, None):
                    raise AssertionError(f"document {count} does not decode to its text")
                count += 1
    left = sum(1 for _ in texts)
    if left:
        raise AssertionError(f"the cache has {count:,} documents; {left:,} more are in the source")
    return count


def _documents(columns: dict[str, Any]) -> list[np.ndarray]:
    tokens, lengths, pieces = columns["tokens"], columns["seq_lens"], columns["documents"].values.astype(np.int64)
    ends = np.cumsum(lengths.values.astype(np.int64))
    used = ends - lengths.values
    row = np.repeat(np.arange(len(tokens)), np.diff(lengths.offsets.astype(np.int64)))
    first = used[lengths.offsets[:-1].astype(np.int64)]
    begins = row * tokens.shape[1] + used - first[row]
    order = np.lexsort((pieces[:, 1], pieces[:, 0]))
    flat = tokens.reshape(-1)
    runs = [flat[begins[at] : begins[at] + lengths.values[at]] for at in order]
    starts = np.flatnonzero(np.diff(pieces[order, 0], prepend=-1))
    return [np.concatenate(runs[a:b]) for a, b in zip(starts, [*starts[1:], len(runs)], strict=True)]
