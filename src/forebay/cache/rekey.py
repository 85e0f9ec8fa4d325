"""Changing the key of a cache: its generations are checked, then signed again.

Every generation keeps its number. The newest is signed first; an older one that lists a file which is gone or damaged
cannot be signed and is removed. Chunks never depend on the key, and stay as they are.
"""

import errno
import time
from contextlib import suppress

from forebay.cache.catalog import Snapshot, generation_numbers, layers_of, read_generation
from forebay.cache.claims import is_abandoned, read_claims
from forebay.cache.records import OnProgress, RekeyReport
from forebay.cache.verify import verify_generation
from forebay.errors import Damaged, ForebayError, KeyRefused, NothingPublished
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.tensors import MIN_BYTES, VARIABLE
from forebay.store.base import Missing, Pieces, Store

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
