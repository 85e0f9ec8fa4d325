"""Changing the key of a cache: its generations are checked, then signed again.

Every generation keeps its number. The newest is signed first; an older one that lists a file which is gone or damaged
cannot be signed and is removed. Chunks never depend on the key, and stay as they are.
"""

import errno
import time
from collections.abc import Callable

from forebay.cache.claim import is_abandoned, read_claims
from forebay.cache.publish import generation_numbers, layers_of, read_generation
from forebay.cache.records import Progress, RekeyReport
from forebay.cache.verify import verify_generation
from forebay.errors import Damaged, ForebayError, KeyRefused, NothingPublished
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.key import VARIABLE
from forebay.store.base import Missing, Store
from forebay.store.pieces import Pieces

OnProgress = Callable[[Progress], None]
Listed = tuple[str, int, int]  # layer, chunk, revision


def rekey_cache(store: Store, old: bytes | None, new: bytes | None, on_progress: OnProgress) -> RekeyReport:
    """Sign what a cache has published with a new key. Interrupted, it can be run again."""
    started = time.monotonic()
    if new is None:
        raise ForebayError(f"there is no new key; set {VARIABLE}, or name another variable with --new-key-env")
    if old == new:
        raise ForebayError("the old key and the new key are the same; nothing to change")
    _check_nobody_builds(store)
    numbers = generation_numbers(store)
    if not numbers:
        raise NothingPublished(store.address)
    newest = _generation(store, numbers[-1], old, new)
    report = verify_generation(store, newest, [], None, True, on_progress)
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
    tagged, removed = [newest.number], {}
    _sign(store, newest, new)
    for number in reversed(numbers[:-1]):
        problem = _sign_older(store, number, newest, sound, old, new)
        if problem:
            store.delete(layout.generation(number))
            removed[number] = problem
        else:
            tagged.append(number)
    return RekeyReport(
        root=store.address,
        cache_id=newest.document.cache_id,
        generation=newest.number,
        digest=read_generation(store, newest.number, new).digest,
        tagged=tuple(sorted(tagged)),
        removed=dict(sorted(removed.items())),
        checked_bytes=report.checked_bytes,
        seconds=time.monotonic() - started,
    )


def _generation(store: Store, number: int, old: bytes | None, new: bytes) -> Generation:
    """A generation under the old key, or under the new one where an earlier run has signed it."""
    try:
        return read_generation(store, number, new)
    except KeyRefused:
        return read_generation(store, number, old)


def _sign(store: Store, generation: Generation, new: bytes) -> None:
    store.replace(layout.generation(generation.number), generation.encode(new))


def _sign_older(
    store: Store, number: int, newest: Generation, sound: dict[Listed, bytes], old: bytes | None, new: bytes
) -> str:
    """Sign an older generation, once all that it lists is there; else say what is wrong with it."""
    try:
        generation = _generation(store, number, old, new)
    except (KeyRefused, Damaged) as error:
        return str(error)
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
    _sign(store, generation, new)
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
