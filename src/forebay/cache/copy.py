"""Copying: a verified copy of what the newest generation lists, for backup; it can be interrupted and run again.

Changing the key: generations are checked, then signed again.
Every generation keeps its number. The newest is signed first; an older one that lists a file which is gone or damaged
cannot be signed and is removed. Chunks never depend on the key, and stay as they are.
"""

import errno
import hashlib
import os
import time
from contextlib import suppress
from functools import partial

from forebay.cache.catalog import Snapshot, check_index, generation_numbers, layers_of, load_generation, read_generation
from forebay.cache.claims import is_abandoned, read_claims
from forebay.cache.plan import Plan
from forebay.cache.records import CopyReport, OnProgress, Progress, RekeyReport
from forebay.cache.verify import identity_problems, verify_generation
from forebay.errors import ChunkCorrupt, ChunkMissing, Damaged, ForebayError, IndexCorrupt, KeyRefused, NothingPublished
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import MIN_BYTES, VARIABLE
from forebay.store.base import Missing, Pieces, Store, holds, is_url, load_index, naming_full_disk, read_document


def copy_cache(store: Store, destination: Store, on_progress: OnProgress) -> CopyReport:
    """Copy chunk by chunk, each checked on the way; the generation goes last, so that half a copy cannot be opened."""
    with naming_full_disk(destination, partial(_listed_bytes, store)):
        return _copied(store, destination, on_progress)


def _listed_bytes(store: Store) -> int:
    return sum(int(table.numbers["size"].sum()) for table in load_generation(store).layers.values())


def _copied(store: Store, destination: Store, on_progress: OnProgress) -> CopyReport:
    started = time.monotonic()
    generation = load_generation(store)
    _check_destination(store, destination, generation)
    snapshot = Snapshot(store, generation)
    check_index(snapshot)
    for key in [
        *_index_keys(generation),
        *_identity_keys(snapshot.plan, store, generation),
    ]:  # the id first: it refuses another cache
        _create_same(destination, key, load_index(store, key))
    if holds(store, layout.DATASET):
        destination.replace(layout.DATASET, [read_document(store, layout.DATASET)], durable=False)
    listed = [(layer, record) for layer, table in generation.layers.items() for record in table.records()]
    copied, copied_bytes = 0, 0
    for done, (layer, record) in enumerate(listed):
        size = _copy_chunk(store, destination, layer, record)
        copied += size > 0
        copied_bytes += size
        seconds = time.monotonic() - started
        on_progress(
            Progress(phase="copying", done=done + 1, total=len(listed), written_bytes=copied_bytes, seconds=seconds)
        )
    key = layout.generation(generation.number)
    _create_same(destination, key, load_index(store, key))
    return CopyReport(
        root=store.address,
        destination=destination.address,
        copied=copied,
        present=len(listed) - copied,
        copied_bytes=copied_bytes,
        generation=generation.number,
        seconds=time.monotonic() - started,
    )


def _index_keys(generation: Generation) -> list[str]:
    keys = [layout.CACHE, *map(layout.recipe, generation.recipes), *map(layout.constants, generation.constants)]
    return [*keys, *map(layout.plan_segment, range(len(generation.plan)))]


def _identity_keys(plan: Plan, store: Store, generation: Generation) -> list[str]:
    for problem in identity_problems(store, generation, plan):
        raise IndexCorrupt(store.address, problem.key, problem.problem)
    segments = plan.segments[: len(generation.plan)]
    return [layout.identities(segment.number, segment.identities) for segment in segments if segment.identities]


def _copy_chunk(store: Store, destination: Store, layer: str, record: ChunkRecord) -> int:
    """The bytes that had to be copied; 0 where the destination has the chunk."""
    key = record.key(layer)
    try:
        if Pieces(destination, key).sha256 == record.sha256:
            return 0
    except Missing:
        pass
    try:
        value = read_published(store, key, record)
    except Missing as error:
        raise ChunkMissing(store.address, layer, record.chunk) from error
    if value is None:
        raise ChunkCorrupt(store.address, layer, record.chunk, "its size or its SHA-256 is not the published one")
    destination.replace(key, [value])
    _check_written(destination, key, record.sha256)
    return record.size


def read_published(store: Store, key: str, record: ChunkRecord) -> bytes | None:
    """Return the bytes of a published chunk; None if they differ. No more is read than was published."""
    value = store.read(key, 0, record.size + 1)
    return value if len(value) == record.size and hashlib.sha256(value).digest() == record.sha256 else None


def _create_same(destination: Store, key: str, value: memoryview) -> None:
    sha256 = hashlib.sha256(value).digest()
    if destination.create(key, [value]):
        _check_written(destination, key, sha256)
    elif Pieces(destination, key).sha256 != sha256:
        raise ForebayError(f"'{destination.address}' holds another cache ('{key}' differs); copy to a new place")


def _check_written(destination: Store, key: str, sha256: bytes) -> None:
    if Pieces(destination, key).sha256 != sha256:
        raise ForebayError(f"'{key}' reads back from '{destination.address}' with other bytes than were written there")


def _check_destination(store: Store, destination: Store, generation: Generation) -> None:
    """Refuse a copy of a cache onto or into itself, and into a folder with files that are not of a cache."""
    if is_within(destination, store):
        place = "is the cache itself" if is_within(store, destination) else f"lies in the cache at '{store.address}'"
        raise ForebayError(f"'{destination.address}' {place}; copy to a place outside it")
    layers = set(generation.recipes)
    for entry in destination.entries(""):
        if not layout.is_known(entry.key, layers):
            raise ForebayError(
                f"'{destination.address}' holds '{entry.key}', which is not of a copy of '{store.address}'; copy to a "
                f"new or an empty folder"
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


Listed = tuple[str, int, int]  # layer, chunk, revision


def rekey_cache(store: Store, old: bytes | None, new: bytes | None, on_progress: OnProgress) -> RekeyReport:
    """Sign what a cache has published with a new key. Interrupted, it can be run again."""
    started = time.monotonic()
    if new is None:
        raise ForebayError(f"there is no new key; set {VARIABLE}, or name another variable with --new-key-env")
    if len(new) < MIN_BYTES:
        raise ForebayError(f"the new key has {len(new)} bytes; use at least {MIN_BYTES}, chosen at random")
    if old == b"":
        raise ForebayError("the old key is empty; leave it out for a cache that carries no tag")
    if old == new:
        raise ForebayError("the old key and the new key are the same; nothing to change")
    _check_nobody_builds(store)
    numbers = generation_numbers(store)
    if not numbers:
        raise NothingPublished(store.address)
    newest, is_signed = _generation(store, numbers[-1], old, new)
    report = verify_generation(Snapshot(store, newest, below=""), [], None, True, on_progress)
    if report.bad or report.missing:
        damaged = [
            *(bad.key for bad in report.bad),
            *(f"{layer}: {len(gone)} gone" for layer, gone in report.missing.items()),
        ]
        raise Damaged(
            f"the cache at '{store.address}' is not sound ({damaged[0]}), and a key signs only what is; repair it "
            f"with the key that it has now, then change the key"
        )
    sound = {
        (layer, one.chunk, one.revision): one.sha256
        for layer, table in newest.layers.items()
        for one in table.records()
    }
    signed, already, removed = [], [], {}
    if is_signed:
        already.append(newest.number)
    else:
        _sign(store, newest, new)
        signed.append(newest.number)
    for number in reversed(numbers[:-1]):
        try:
            older, is_signed = _generation(store, number, old, new)
            problem = _problem(store, older, newest, sound)
        except (KeyRefused, Damaged) as error:
            problem = str(error)
        if problem:
            store.delete(layout.generation(number))
            removed[number] = problem
        elif is_signed:
            already.append(number)
        else:
            _sign(store, older, new)
            signed.append(number)
    return RekeyReport(
        root=store.address,
        cache_id=newest.document.cache_id,
        generation=newest.number,
        digest=read_generation(store, newest.number, new).digest,
        digest_before=newest.digest,
        tagged=tuple(sorted([*signed, *already])),
        already=tuple(sorted(already)),
        removed=dict(sorted(removed.items())),
        checked_bytes=report.checked_bytes,
        seconds=time.monotonic() - started,
    )


def _generation(store: Store, number: int, old: bytes | None, new: bytes) -> tuple[Generation, bool]:
    """A generation, and whether it is signed with the new key already, as an earlier run may have done."""
    with suppress(KeyRefused):
        return read_generation(store, number, new), True
    try:
        return read_generation(store, number, old), False
    except KeyRefused as error:
        raise KeyRefused(store.address, error.key, _why_refused(store, number, old)) from error


def _why_refused(store: Store, number: int, old: bytes | None) -> str:
    way_out = "pass the key that the cache has now with --old-key-env or --old-key-file (old_key=…)"
    if old is None:
        return f"it is tagged; {way_out}"
    with suppress(KeyRefused):
        read_generation(store, number, None)
        return "it carries no tag; leave --old-key-env and --old-key-file out to add a key, where you trust the folder"
    return f"its tag was made with neither the old key nor the new one; {way_out}"


def _sign(store: Store, generation: Generation, new: bytes) -> None:
    store.replace(layout.generation(generation.number), generation.encode(new))


def _problem(store: Store, generation: Generation, newest: Generation, sound: dict[Listed, bytes]) -> str:
    """Why an older generation cannot be signed, empty where all that it lists is there."""
    if generation.document.cache_id != newest.document.cache_id:
        return f"it is of another cache (id {generation.document.cache_id})"
    if newest.plan[: len(generation.plan)] != generation.plan:
        return "it lists another plan"
    for layer, table in generation.layers.items():
        if generation.recipes.get(layer) != newest.recipes.get(layer):
            return f"it lists another recipe of layer '{layer}'"
        for record in table.records():
            listed = (layer, record.chunk, record.revision)
            if listed not in sound:
                sound[listed] = _digest(store, layout.chunk(*listed))
            if sound[listed] != record.sha256:
                return f"'{layout.chunk(*listed)}' is not what it lists"
    return ""


def _digest(store: Store, key: str) -> bytes:
    """The SHA-256 of a file, empty where it is gone or damaged; it is not mapped, where a bad sector is a signal."""
    try:
        return Pieces(store, key).sha256
    except (Missing, Damaged):
        return b""
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _check_nobody_builds(store: Store) -> None:
    """A builder with the old key would publish above what is signed with the new one."""
    for layer in layers_of(store):
        for key, claim in read_claims(store, layer).items():
            if claim.state == "working" and not is_abandoned(claim):
                raise ForebayError(
                    f"'{key}' of '{store.address}' says that a builder works on it; wait for it to end, or remove its "
                    f"claim with `forebay clean {store.address}`, then change the key"
                )
