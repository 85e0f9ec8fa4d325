"""The errors that forebay raises: one class per way a program might react. The message is written where it is raised.

ForebayError
├── CacheNotFound        there is no cache, or nothing is published in it
├── NotFound             the cache has no such layer, column, generation, chunk, range, lane or selection
├── RecipeMismatch       the cache was built by another recipe
├── RecipeInvalid        a recipe or a setting is wrong, or a recipe returned what it did not declare
├── LibraryMissing       an optional library or the package of a kind is not installed
├── Damaged              stored bytes differ from what was published
│   ├── FormatTooNew     a newer forebay wrote it
│   ├── ChunkCorrupt     bytes of a chunk disagree with their checksum, or decode to too much
│   ├── ChunkMissing     a generation lists a chunk whose file is missing
│   └── IndexCorrupt     a generation, plan, recipe or cache.json is damaged
├── StoreRefused         a store cannot be opened, or rejects a key
├── KeyRefused           a generation is not signed with the key in use, or needs one
├── StoreUnavailable     a store or the hub does not answer; a retry may succeed
├── StoreFull            a store or disk has no space
├── SourceInvalid        the arguments do not describe a source, or using it needs consent
├── SourceNotFound       no file, repository or revision matches the source
├── SourceUnreadable     a source file or function cannot be read
├── SourceChanged        a source file has changed since it was planned
├── BuildFailed          some chunks could not be built
│   └── TooManyFailures  more samples failed than the caller allows
├── EngineUnusable       workers cannot run the build: cluster, shared folders, imports, memory
├── StateMismatch        a loader's state, pin or ranks do not fit the cache
├── ModelUnusable        a tokenizer, chat template or teacher cannot be used
└── TierUnusable         a folder cannot be used as a tier, or a tier is needed

KeyboardInterrupt
└── BuildStopped         the build was interrupted
"""

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


class ForebayError(Exception):
    """The base class of forebay's errors: what is wrong, one next step, and facts for programs.

    The command line prints `error: MESSAGE` and `hint: HINT`; `--json` carries the facts.
    Every error pickles: its message and attributes are restored without calling the constructor.
    """

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.hint, self.facts = hint, facts

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Callable[..., "ForebayError"], tuple[object, ...]]:
        return _restored, (type(self), self.args, dict(self.__dict__))


def _restored(kind: type[ForebayError], args: tuple[object, ...], attributes: Mapping[str, object]) -> ForebayError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class CacheNotFound(ForebayError):
    pass


class NotFound(ForebayError):
    pass


class RecipeMismatch(ForebayError):
    pass


class RecipeInvalid(ForebayError):
    pass


class LibraryMissing(ForebayError, ImportError):
    """Also an `ImportError`, as callers expect of a library that is not installed."""


class Damaged(ForebayError):
    """Stored bytes differ from what was published; `forebay repair` restores them."""


class FormatTooNew(Damaged):
    pass


class ChunkCorrupt(Damaged):
    pass


class ChunkMissing(Damaged):
    pass


class IndexCorrupt(Damaged):
    pass


class StoreRefused(ForebayError):
    pass


class KeyRefused(ForebayError):
    pass


class StoreUnavailable(ForebayError, OSError):
    """Also an `OSError`, because a retry may succeed."""

    errno: int | None = errno.EAGAIN


class StoreFull(ForebayError, OSError):
    """Also an `OSError`, as a full disk is."""

    errno: int | None = errno.ENOSPC


class SourceInvalid(ForebayError):
    pass


class SourceNotFound(ForebayError):
    pass


class SourceUnreadable(ForebayError):
    pass


class SourceChanged(ForebayError):
    pass


class BuildFailed(ForebayError):
    pass


class TooManyFailures(BuildFailed):
    pass


class EngineUnusable(ForebayError):
    pass


class StateMismatch(ForebayError):
    pass


class ModelUnusable(ForebayError):
    pass


class TierUnusable(ForebayError):
    pass


class BuildStopped(KeyboardInterrupt):
    """Not an `Exception`, so that `except Exception` does not swallow the request to stop."""

    def __init__(self, root: str, done: int, total: int) -> None:
        self.root, self.done, self.total = root, done, total
        super().__init__(
            f"stopped: {done:,} of {total:,} chunks of '{root}' are published and safe; run the same command to resume"
        )

    def __reduce__(self) -> tuple[type["BuildStopped"], tuple[str, int, int], dict[str, object]]:
        return type(self), (self.root, self.done, self.total), self.__dict__


def message_of(error: BaseException) -> str:
    """The message of an error without its hint, for use in another message or a report."""
    return error.message if isinstance(error, ForebayError) else str(error)


def with_hint(error: BaseException) -> str:
    """The message of an error and its hint on one line."""
    hint = error.hint if isinstance(error, ForebayError) else ""
    return f"{message_of(error)}; {hint}" if hint else message_of(error)


def closest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant.

    A slip of three letters ("rwa" for "raw") has a ratio of 0.67; other words ("data", "chat") one below 0.6.

    >>> closest("rwa", ["tokens", "raw"]), closest("data", ["tokens", "chat"])
    ('raw', None)
    """
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.65)), None)


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the name that was probably meant, or at all names.

    >>> nearest("worker", ["workers", "mode"])
    "did you mean 'workers'?"
    """
    meant = closest(name, known)
    return f"did you mean '{meant}'?" if meant else f"known: {', '.join(known)}"


def choice_error(option: str, value: object, choices: Sequence[str | None]) -> ValueError:
    """The error for a value that is not one of the choices, with the one that was probably meant.

    >>> str(choice_error("shuffle", "gobal", ("auto", "global", None)))
    "shuffle must be 'auto', 'global' or None (got 'gobal'); did you mean 'global'?"
    """
    *first, last = map(repr, choices)
    listed = f"{', '.join(first)} or {last}" if first else last
    near = closest(str(value), [choice for choice in choices if choice is not None])
    return ValueError(f"{option} must be {listed} (got {value!r})" + (f"; did you mean '{near}'?" if near else ""))


def not_found(what: str, name: str, root: str, known: Sequence[str]) -> NotFound:
    """The error for a layer or column that a cache does not have, with the one that was probably meant.

    >>> print(not_found("layer", "token", "cache", ["tokens", "latents"]))
    the cache at 'cache' has no layer 'token' (it has: tokens, latents)
    hint: did you mean 'tokens'?
    """
    meant = closest(name, known)
    hint = f"did you mean '{meant}'?" if meant else ""
    listed = ", ".join(known) or "none"
    return NotFound(f"the cache at '{root}' has no {what} '{name}' (it has: {listed})", hint=hint, **{what: name})
