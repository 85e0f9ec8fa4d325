"""Copy a cache: a verified copy of the newest generation. Run it again after an interruption.

The copy is signed with the key in use, whichever key the cache was signed with: this is how a key is changed.
"""

import hashlib
import os
import time
from collections.abc import Sequence

from forebay.cache.catalog import generation_numbers, has_sha256, load_generation, read_generation
from forebay.cache.reports import CopyReport, OnProgress, Progress
from forebay.cache.soundness import index_problems
from forebay.cache.state import Index
from forebay.errors import ForebayError, KeyRefused
from forebay.format import layout
from forebay.format.chunk import ChunkRecord, chunk_corrupt, chunk_missing
from forebay.format.generation import Generation
from forebay.format.tensors import VARIABLE, hmac_key
from forebay.store.base import (
    Buffer,
    Missing,
    Pieces,
    Store,
    index_corrupt,
    is_url,
    key_refused,
    load_index,
    naming_full_disk,
    read_document,
)


def copy_cache(
    store: Store, destination: Store, on_progress: OnProgress, *, old_key: bytes | None = None, sign: bool = False
) -> CopyReport:
    """Copy chunk by chunk, each checked on the way; the generation is written last: half a copy cannot be opened.

    `old_key` is the key that the cache is signed with, if it is not the one in use. `sign` allows to sign a cache that
    has no tag: anybody who could write its folder chose its content.
    """
    started = time.monotonic()
    generation = _newest(store, old_key, sign)
    _check_destination(store, destination)
    keys, listed = _document_keys(Index(store, generation)), list(generation.chunks())
    copied, copied_bytes = 0, 0
    with naming_full_disk(destination, lambda: sum(record.size for _, record in listed)):
        _copy_documents(store, destination, generation, keys)
        for done, (folder, record) in enumerate(listed, 1):
            size = _copy_chunk(store, destination, folder, record)
            copied, copied_bytes = copied + (size > 0), copied_bytes + size
            seconds = time.monotonic() - started
            on_progress(
                Progress(phase="copying", done=done, total=len(listed), written_bytes=copied_bytes, seconds=seconds)
            )
        _create_same(destination, layout.generation(generation.number), generation.encode(hmac_key()))
    return CopyReport(
        root=store.address,
        destination=destination.address,
        copied=copied,
        present=len(listed) - copied,
        copied_bytes=copied_bytes,
        generation=generation.number,
        seconds=time.monotonic() - started,
    )


def _newest(store: Store, old_key: bytes | None, sign: bool) -> Generation:
    """The newest generation, read with the key that it is signed with."""
    if sign and hmac_key() is None:
        raise ForebayError("there is no key to sign the copy with", hint=f"set {VARIABLE} to a random key")
    if old_key is None and not sign:
        return load_generation(store)
    number = max(generation_numbers(store), default=None)
    try:
        return read_generation(store, number, None if sign else old_key)
    except KeyRefused as error:
        tried = "no key (--sign)" if sign else "the old key"
        problem = f"it cannot be read with {tried}: {error.message}"
        raise key_refused(store.address, str(error.facts.get("key", "")), problem) from error


def _document_keys(index: Index) -> list[str]:
    """Constants, segments and identities, after checking them against the generation."""
    store, generation = index.store, index.published
    for problem in index_problems(index):
        raise index_corrupt(store.address, problem.key, problem.problem)
    segments = index.plan.segments[: len(generation.plan)]
    keys = [layout.constants(generation.folder(layer)) for layer in generation.constants]
    keys += [layout.plan_segment(segment.number) for segment in segments]
    return keys + [layout.identities(one.number, one.identities) for one in segments if one.identities]


def _copy_documents(store: Store, destination: Store, generation: Generation, keys: Sequence[str]) -> None:
    """The id comes first: it tells another cache apart. Recipes of an earlier copy may have been replaced since."""
    _create_same(destination, layout.CACHE, [generation.cache.encode()])
    for layer, text in generation.recipes.items():
        key, value = layout.recipe(layer), text.encode()
        if not destination.create(key, [value]) and read_document(destination, key) != value:
            destination.replace(key, [value])
    for key in keys:
        _create_same(destination, key, [load_index(store, key)])


def _copy_chunk(store: Store, destination: Store, folder: str, record: ChunkRecord) -> int:
    """The bytes that had to be copied; 0 where the destination has the chunk."""
    key, layer = record.key(folder), layout.layer_of(folder)
    if has_sha256(destination, key, record.sha256, record.size):
        return 0
    try:
        value = read_published(store, key, record)
    except Missing as error:
        raise chunk_missing(store.address, layer, record.chunk) from error
    if value is None:
        raise chunk_corrupt(store.address, layer, record.chunk, "its size or its SHA-256 is not the published one")
    destination.replace(key, [value])
    _check_written(destination, key, record.sha256)
    return record.size


def read_published(store: Store, key: str, record: ChunkRecord) -> bytes | None:
    """Return the bytes of a published chunk; None if they differ. No more is read than was published."""
    value = store.read(key, 0, record.size + 1)
    return value if len(value) == record.size and hashlib.sha256(value).digest() == record.sha256 else None


def _create_same(destination: Store, key: str, value: Sequence[Buffer]) -> None:
    sha256 = hashlib.sha256(b"".join(value)).digest()
    if destination.create(key, value):
        _check_written(destination, key, sha256)
    elif Pieces(destination, key).sha256 != sha256:
        raise ForebayError(
            f"'{destination.address}' holds another cache ('{key}' differs)", hint="copy to an empty folder"
        )


def _check_written(destination: Store, key: str, sha256: bytes) -> None:
    if Pieces(destination, key).sha256 != sha256:
        raise ForebayError(f"'{key}' reads back from '{destination.address}' with other bytes than were written there")


def _check_destination(store: Store, destination: Store) -> None:
    """Raise for a copy onto or into the cache itself, or into a folder with other files."""
    if is_within(destination, store):
        how = "is the cache itself" if is_within(store, destination) else f"lies in the cache at '{store.address}'"
        raise ForebayError(f"'{destination.address}' {how}", hint="copy to a folder outside it")
    for entry in destination.entries(""):
        if not layout.is_known(entry.key):
            raise ForebayError(
                f"'{destination.address}' is not empty (it holds '{entry.key}')",
                hint="copy to an empty folder, or to an earlier copy of the same cache",
            )


def is_within(inner: Store, outer: Store) -> bool:
    """Whether a store lies in the folder of another, or is the same."""
    if is_url(inner.address) and is_url(outer.address):
        return f"{inner.address}/".startswith(f"{outer.address}/")
    inside, around = _real_path(inner), _real_path(outer)
    return inside is not None and around is not None and f"{inside}{os.sep}".startswith(f"{around}{os.sep}")


def _real_path(store: Store) -> str | None:
    folder = store.local_path("")
    return None if folder is None else os.path.realpath(folder)
