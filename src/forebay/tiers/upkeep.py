"""Looking after a tier: what is in it, whether all of it is as it was written, emptying it.

Every step takes a short transaction of its own, so that writers are not held up and no old pages are held.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forebay.cache.records import OnProgress, Progress
from forebay.errors import TierDamaged, TierNotFound, TierUnusable
from forebay.format.tensors import hmac_key
from forebay.tiers.environment import Environment, Kept
from forebay.tiers.lmdb_tier import open_tier
from forebay.tiers.tier_files import alone, count_values, file_bytes, is_tier, remove_files
from forebay.tiers.tier_samples import key_of
from forebay.tiers.tier_value import (
    BadKept,
    BadValue,
    RecipeShare,
    TierClearReport,
    TierSummary,
    TierVerifyReport,
    decode_value,
    peek_value,
)

_HEAD_BYTES = 64 << 10  # no header of ours is longer
_AT_ONCE = 64


def summarize_tier(path: str) -> TierSummary:
    """What a tier holds, by recipe; only the heads of values are read."""
    shares: dict[str, Counter[str]] = {}
    tagged = unreadable = 0
    with _opened(path) as environment:
        dead = environment.dead_readers + environment.let_go_of_dead_readers()
        environment.check()
        for _, size, head, problem in _values(environment, _HEAD_BYTES):
            try:
                if problem:
                    raise BadValue("page", problem)
                identity, is_tagged = peek_value(head)
                share = shares.setdefault(_made_by(identity), Counter())
            except BadValue:
                unreadable += 1
                continue
            tagged += is_tagged
            share.update(values=1, bytes=size)
        figures = environment.figures()
    recipes = [_share(made_by, **counts) for made_by, counts in sorted(shares.items())]
    total = sum(share.bytes for share in recipes)
    return TierSummary(
        path=path,
        bytes=total,
        tagged=tagged,
        dead_readers=dead,
        unreadable=unreadable,
        recipes=tuple(sorted(recipes, key=lambda share: -share.values)),
        **figures,
    )


def verify_tier(path: str, *, on_progress: OnProgress | None = None) -> TierVerifyReport:
    """Check every value: its checksum, its tag where a key is in use, and that it lies under its own name."""
    key, started = hmac_key(), time.monotonic()
    bad: list[BadKept] = []
    values = checked = 0
    with _opened(path, key) as environment:
        environment.check()
        total = environment.figures()["values"]
        for kept in _values(environment, None):
            values, checked = values + 1, checked + len(kept.content)
            problem = _problem(kept, key)
            if problem is not None:
                bad.append(problem)
            if on_progress is not None:
                on_progress(_moment(values, total, checked, started))
    seconds = time.monotonic() - started
    return TierVerifyReport(path=path, values=values, checked_bytes=checked, seconds=seconds, bad=tuple(bad))


def clear_tier(path: str, *, recipe: str | None = None) -> TierClearReport:
    """Remove all that a tier holds, damaged or not: its files where nobody has it open, else its values.

    With a `recipe`, the beginning of a fingerprint as `summarize_tier` has it, only the values of that one.
    """
    if not is_tier(path):
        raise TierNotFound(path)
    if recipe is not None:
        return _clear_recipe(path, recipe)
    values, before = count_values(path), file_bytes(path)
    with alone(path) as is_alone:
        if is_alone:
            remove_files(path)
    if not is_alone:
        with _opened(path) as environment:
            environment.empty()
    return TierClearReport(path=path, removed=values, freed_bytes=before if is_alone else 0, in_use=not is_alone)


def _clear_recipe(path: str, recipe: str) -> TierClearReport:
    """Remove the values of one recipe; the file keeps its size."""
    known: set[str] = set()
    removed = 0
    with _opened(path) as environment:
        environment.check()
        last = b""
        while found := environment.values(last, _AT_ONCE, _HEAD_BYTES):
            last, keys = found[-1].key, []
            for kept in found:
                if kept.problem:
                    raise TierDamaged(path, kept.problem)
                with suppress(BadValue):
                    fingerprint = json.loads(_made_by(peek_value(kept.content)[0]))[0]
                    known.add(fingerprint)
                    keys += [kept.key] if recipe and fingerprint.startswith(recipe) else []
            removed += environment.remove(keys) if keys else 0
    if not removed:
        raise TierUnusable(
            path,
            f"no recipe in it has a fingerprint that begins with '{recipe}'",
            f"`forebay tier stats {path}` lists them: {', '.join(name[:12] for name in sorted(known)) or 'none'}",
        )
    return TierClearReport(path=path, removed=removed, freed_bytes=0, in_use=False)


@contextmanager
def _opened(path: str, key: bytes | None = None) -> Iterator[Environment]:
    tier = open_tier(path, create=False)
    try:
        tier.check_key(key)
        yield tier.environment
    finally:
        tier.close()


def _values(environment: Environment, head_bytes: int | None) -> Iterator[Kept]:
    last = b""
    while found := environment.values(last, _AT_ONCE, head_bytes):
        yield from found
        last = found[-1][0]


def _made_by(identity: bytes) -> str:
    """The recipe and the libraries of a value, in a form that can be counted by."""
    try:
        known = json.loads(identity.partition(b"\n")[0])
        return json.dumps([str(known["fingerprint"]), dict(known["made_with"])], sort_keys=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadValue("format", "its head names no recipe") from error


def _share(made_by: str, values: int, bytes: int) -> RecipeShare:
    fingerprint, made_with = json.loads(made_by)
    return RecipeShare(fingerprint=fingerprint, made_with=made_with, values=values, bytes=bytes)


def _problem(kept: Kept, key: bytes | None) -> BadKept | None:
    try:
        if kept.problem:
            raise BadValue("page", kept.problem)
        identity, _ = decode_value(kept.content, key)
        if key_of(identity) != kept.key:
            raise BadValue("identity", "it lies under the name of another row")
    except BadValue as error:
        return BadKept(key=kept.key.hex(), reason=error.reason, detail=error.detail)
    return None


def _moment(done: int, total: int, checked: int, started: float) -> Progress:
    seconds = time.monotonic() - started
    return Progress(phase="verifying", done=done, total=total, unit="values", read_bytes=checked, seconds=seconds)
