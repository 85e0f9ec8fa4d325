"""Every error that forebay raises. A message names what is wrong, where, what is allowed, and the next step.

ForebayError
├── CacheNotFound        there is no cache at this root
├── NothingPublished     the cache exists but has no published generation
├── LayerNotFound        the cache has no such layer
├── ColumnNotFound       no layer of the cache has such a column
├── LayerIncomplete      a layer lacks chunks that the requested rows need
├── LayerNeeded          a layer cannot be dropped: it is the base, or others were made from it
├── InputIncomplete      a layer cannot be built: a layer that it reads lacks chunks
├── RecipeMismatch       the cache was built by another recipe
├── RecipeInvalid        a field of a recipe is wrong, or it returned what it did not declare
├── UnknownKind          no recipe or source of that kind is installed
├── LibraryMissing       an optional library is needed and not installed
├── TokenizerUnusable    a tokenizer cannot be found, loaded or used as requested
├── TemplateUnusable     a chat template cannot be found, compiled, rendered or trusted with a loss mask
├── EncodersDiffer       the fast encoder returns other ids than the reference tokenizer
├── DocumentTooLong      a document does not fit a row, and the recipe treats that as an error
├── TeacherUnusable      a teacher's weights are missing, or are not those of its model
├── TeacherRaised        a teacher's own code raised an error
├── TeacherOutputInvalid a teacher returned other columns or shapes than it declares
├── HookSilent           the hooked submodule of a model was not run
├── LayerNotTimed        a layer holds no features at timesteps
├── ImageUnreadable      a sample's bytes are not an image that the recipe accepts
├── SettingsInvalid      a settings file has an unknown key or a wrong type
├── Damaged              stored bytes differ from what was published
│   ├── FormatTooNew     a newer forebay wrote it
│   ├── NotForebay       the file is not one of forebay's
│   ├── ChunkCorrupt     bytes of a chunk disagree with their digest
│   ├── ChunkMissing     a generation lists a chunk whose file is missing
│   ├── LayersShareColumn    two layers have a column of one name, so that neither can be read
│   └── IndexCorrupt     a generation, plan, recipe or cache.json disagrees with its digest
├── StoreRefused         a store cannot be opened, or rejects a key
├── StoreUnavailable     a store does not answer, or not in time; a retry may succeed
├── StoreFull            a store has no room for a value
├── BlockTooLarge        a compressed block decodes to more bytes than the caller allows
├── PinMismatch          the cache is not the one that the caller pinned, or is older
├── KeyRefused           a generation is not tagged with the key in use, or needs one
├── OldCacheInvalid      a file is not a teacher cache that torch.save wrote, or holds more than tensors
├── SourceNotFound       no file matches the source
├── SourceInvalid        the arguments do not describe a source
├── SourceNeeded         a cache cannot reopen its source by name; the caller must pass it
├── SourceNotContacted   a cache names a source on another machine, and the user has not allowed contacting it
├── RecipeNotContacted   a cache names a model on the hub, and the user has not allowed contacting it
├── FunctionFailed       a source function raised an exception
├── SourceUnreadable     a file of the source cannot be decompressed or understood
├── SourceChanged        a source file has changed since it was planned
├── SourceMoving         a file of the source keeps changing while it is read
├── HubUnreachable       the Hugging Face hub does not answer, or not in time
├── HubNotFound          the hub has no such repository, revision or file, or not for this user
├── DownloadCorrupt      a download does not match the size or hash that the hub lists
├── CacheNotShared       a worker on another machine does not see the cache
├── SourceNotShared      a worker on another machine does not see the source
├── NotImportable        a worker cannot import the class of a recipe, a source or a store
├── EngineUnusable       a cluster is not there, or its nodes cannot work on the build
├── RangeInvalid         the requested chunks are not in the plan
├── BuildFailed          some chunks could not be built
│   ├── TooManyFailures  more samples failed than the caller allows
│   ├── NothingMade      every sample failed
│   ├── ChunkFailed      every sample of a chunk failed, and the caller did not allow that
│   ├── SourceEmpty      the source has no samples, or they made no row
│   └── WorkersFailed    worker processes exit during start-up
├── StateMismatch        a loader's state belongs to another cache, generation or order
│   └── GenerationGone   the generation of the state is no longer published
├── RanksDisagree        the ranks of a loader would make different batches
├── RanksMissing         some ranks of a loader did not request a batch in time
├── AllTokensIgnored     an image has so little content that no token of it is kept
├── WindowTooLarge       a shuffle window does not fit the memory for decoded blocks
├── LaneMissing          the shuffle of a cache has fewer lanes than the caller names
├── TierNeeded           a loader mixes more of a remote cache than fits in memory
├── SelectionEmpty       no row of the cache is in a split or passes a filter
├── SelectionLost        the file with the bits of a selection is missing
├── TierUnusable         a folder cannot be used as a tier
│   ├── TierNotFound     there is no tier in the folder
│   └── TierDamaged      a tier's LMDB file is corrupt
├── WarmingFailed        some samples could not be read into a tier after several attempts
├── DiskFull             not enough free disk space
└── MemoryTooSmall       the memory limit cannot hold one worker

KeyboardInterrupt
└── BuildStopped         the build was asked to stop
"""

import errno
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches


class ForebayError(Exception):
    """The base class of forebay's errors; the message is one line that ends with the next step.

    Every error pickles: its message and attributes are restored without calling the constructor.
    """

    def __reduce__(self) -> tuple[Callable[..., "ForebayError"], tuple[object, ...]]:
        return _restored, (type(self), self.args, dict(self.__dict__))


def _restored(kind: type[ForebayError], args: tuple[object, ...], attributes: Mapping[str, object]) -> ForebayError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


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
    found = closest(name, known)
    return f"did you mean '{found}'?" if found else f"known: {', '.join(known)}"


def choice_error(option: str, value: object, choices: Sequence[str | None]) -> ValueError:
    """The error for a value that is not one of the choices, with the one that was probably meant.

    >>> str(choice_error("shuffle", "gobal", ("auto", "global", None)))
    "shuffle must be 'auto', 'global' or None (got 'gobal'); did you mean 'global'?"
    """
    *first, last = map(repr, choices)
    listed = f"{', '.join(first)} or {last}" if first else last
    near = closest(str(value), [choice for choice in choices if choice is not None])
    return ValueError(f"{option} must be {listed} (got {value!r})" + (f"; did you mean '{near}'?" if near else ""))


def _there(name: str, known: Sequence[str]) -> str:
    """All names, and the one that was probably meant."""
    near = closest(name, known)
    return f"it has: {', '.join(known) or 'none'}" + (f"; did you mean '{near}'?" if near else "")


class CacheNotFound(ForebayError):
    def __init__(self, root: str) -> None:
        self.root = root
        advice = f"build one with `forebay build … --into {root}`"
        if os.path.isfile(root):
            advice = "it is a file, and a cache is a folder: name the folder that `forebay build … --into` made"
        if root.startswith("memory://"):
            advice = "memory:// holds what this process built itself; name a folder or a bucket"
        super().__init__(f"there is no cache at '{root}'; {advice}")


class NothingPublished(ForebayError):
    def __init__(self, root: str, generation: int | None = None) -> None:
        self.root = root
        self.generation = generation
        what = "no generation" if generation is None else f"no generation {generation}"
        super().__init__(f"the cache at '{root}' has {what}; see `forebay status {root}`, or finish its build first")


class LayerNotFound(ForebayError):
    def __init__(self, root: str, layer: str, known: Sequence[str]) -> None:
        self.root, self.layer, self.known = root, layer, tuple(known)
        super().__init__(f"the cache at '{root}' has no layer '{layer}'; {_there(layer, known)}")


class LayerNeeded(ForebayError):
    def __init__(self, root: str, layer: str, readers: Sequence[str]) -> None:
        self.root, self.layer, self.readers = root, layer, tuple(readers)
        why = "it is the base layer, which decides the rows; delete the cache instead"
        if readers:
            names = ", ".join(f"'{reader}'" for reader in readers)
            made, them = ("layers {} were", "them") if len(readers) > 1 else ("layer {} was", "it")
            why = f"{made.format(names)} made from it; drop or replace {them} as well"
        super().__init__(f"layer '{layer}' of the cache at '{root}' cannot be dropped: {why}")


class ColumnNotFound(ForebayError):
    def __init__(self, root: str, column: str, known: Sequence[str]) -> None:
        self.root, self.column, self.known = root, column, tuple(known)
        super().__init__(f"the cache at '{root}' has no column '{column}'; {_there(column, known)}")


class LayerIncomplete(ForebayError):
    def __init__(self, root: str, layer: str, chunk: int) -> None:
        self.root, self.layer, self.chunk = root, layer, chunk
        super().__init__(
            f"layer '{layer}' of '{root}' has no chunk {chunk} in this generation; finish its build, or open the "
            f"cache with layers=['{layer}'] to see only the rows it has"
        )


class InputIncomplete(ForebayError):
    def __init__(self, root: str, layer: str, read: str, chunks: Sequence[int]) -> None:
        self.root, self.layer, self.read, self.chunks = root, layer, read, tuple(chunks)
        more = f" and {len(chunks) - 1:,} more" if len(chunks) > 1 else ""
        super().__init__(
            f"layer '{layer}' of '{root}' reads layer '{read}', which has no chunk {chunks[0]}{more}; finish the "
            f"build of '{read}' first, or choose a range of chunks that it has"
        )


class RecipeMismatch(ForebayError):
    def __init__(self, root: str, layer: str, changed: Mapping[str, str], is_base: bool = False) -> None:
        self.root, self.layer, self.changed = root, layer, dict(changed)
        differs = ", ".join(f"{name}: {how}" for name, how in changed.items())
        ways = f"(`forebay build {root}`), build into a new root, or delete this one"
        if not is_base:
            again = f"(of a teacher: `forebay build teachers {root}`)"
            ways = f"{again}, replace the layer (`--replace {layer}`, `replace=True`), or build into a new root"
        super().__init__(
            f"layer '{layer}' of the cache at '{root}' was built by another recipe (differs in: {differs}); resume "
            f"with its own recipe {ways}"
        )


class RecipeInvalid(ForebayError):
    """A recipe has an invalid field, or returned something that it did not declare."""


class UnknownKind(ForebayError):
    def __init__(self, what: str, kind: str, known: Sequence[str]) -> None:
        self.what, self.kind, self.known = what, kind, tuple(known)
        super().__init__(
            f"no {what} of kind '{kind}' is installed (known: {', '.join(known)}); install the package that provides "
            f"it, or pass the {what} itself"
        )


class LibraryMissing(ForebayError, ImportError):
    """Also an `ImportError`, as callers expect of a library that is not installed."""

    def __init__(self, library: str, needed_for: str, extra: str) -> None:
        self.library, self.needed_for, self.extra = library, needed_for, extra
        super().__init__(f"'{library}' is not installed but {needed_for} needs it: pip install 'forebay[{extra}]'")


class TokenizerUnusable(ForebayError):
    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"the tokenizer '{name}' cannot be used: {problem}")


class TemplateUnusable(ForebayError):
    def __init__(self, name: str, problem: str) -> None:
        self.name, self.problem = name, problem
        super().__init__(f"the chat template '{name}' cannot be used: {problem}; pass another with --template FILE")


class EncodersDiffer(ForebayError):
    def __init__(self, tokenizer: str, problem: str, planned: bool) -> None:
        self.tokenizer, self.problem, self.planned = tokenizer, problem, planned
        way_out = (
            "install the fastokens version that `forebay info` names, or build a new cache"
            if planned
            else "pass encoder='auto' or encoder='tokenizers'"
        )
        super().__init__(f"{problem} (tokenizer '{tokenizer}'); {way_out}")


class DocumentTooLong(ForebayError):
    def __init__(self, document: str, tokens: int, capacity: int, advice: str = "set long_documents='split'") -> None:
        self.document, self.tokens, self.capacity = document, tokens, capacity
        super().__init__(
            f"document '{document}' has {tokens:,} tokens but a row holds {capacity:,}; raise `sequence_length` or "
            f"{advice}"
        )


class TeacherUnusable(ForebayError):
    def __init__(self, model: str, problem: str) -> None:
        self.model, self.problem = model, problem
        super().__init__(f"the model '{model}' cannot be used: {problem}")


class TeacherRaised(ForebayError):
    def __init__(self, teacher: str, sample: str, moment: float | None, error: Exception) -> None:
        self.teacher, self.sample, self.moment = teacher, sample, moment
        said = " ".join(str(error).split())[:300]
        super().__init__(
            f"teacher '{teacher}' raised {type(error).__name__} on {_asked(sample, moment)}: {said}; check the inputs "
            f"of its model, or pass a smaller batch_size if memory is short"
        )


class TeacherOutputInvalid(ForebayError):
    def __init__(
        self,
        teacher: str,
        column: str,
        sample: str,
        moment: float | None,
        shape: tuple[int, ...] | None,
        expected: tuple[int, ...],
    ) -> None:
        self.teacher, self.column, self.sample, self.moment = teacher, column, sample, moment
        self.shape, self.expected = shape, expected
        returned = f"returned no '{column}'" if shape is None else f"returned '{column}' of shape {shape}"
        super().__init__(
            f"teacher '{teacher}' {returned} for {_asked(sample, moment)}; it declares the shape {expected}"
        )


class HookSilent(ForebayError):
    def __init__(self, model: str, submodule: str, sample: str, moment: float | None) -> None:
        self.model, self.submodule, self.sample, self.moment = model, submodule, sample, moment
        super().__init__(
            f"the hook on '{submodule}' of '{model}' did not fire for {_asked(sample, moment)}; name a submodule "
            f"that the model runs"
        )


def _asked(sample: str, moment: float | None) -> str:
    return f"sample '{sample}'" if moment is None else f"sample '{sample}' at t = {moment:g}"


class LayerNotTimed(ForebayError):
    def __init__(self, root: str, layer: str) -> None:
        self.root, self.layer = root, layer
        super().__init__(
            f"layer '{layer}' of '{root}' holds no features at timesteps; read its columns with `cache.read`, or name "
            f"the layer of a timed teacher"
        )


class ImageUnreadable(ForebayError):
    """Why there is no row: `reason` is a short code and `detail` a sentence, as a recorded failure keeps them."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"the image cannot be used ({reason}): {detail}; fix or remove the file")


class SettingsInvalid(ForebayError):
    def __init__(self, path: str, line: int | None, problem: str) -> None:
        self.path, self.line, self.problem = path, line, problem
        super().__init__(f"{path}{f':{line}' if line else ''}: {problem}")


class Damaged(ForebayError):
    """Stored bytes differ from what was published; `forebay repair` restores them."""


class FormatTooNew(Damaged):
    def __init__(self, where: str, found: object, supported: int) -> None:
        self.where, self.found, self.supported = where, found, supported
        super().__init__(
            f"'{where}' has format version {found}, but this forebay reads up to {supported}; upgrade forebay"
        )


class NotForebay(Damaged):
    def __init__(self, where: str, problem: str) -> None:
        self.where, self.problem = where, problem
        super().__init__(
            f"'{where}' is not a file forebay wrote: {problem}; run `forebay verify`, then `forebay repair`"
        )


class ChunkCorrupt(Damaged):
    def __init__(
        self,
        root: str,
        layer: str,
        chunk: int,
        problem: str,
        *,
        column: str | None = None,
        block: int | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.root, self.layer, self.chunk, self.problem = root, layer, chunk, problem
        self.column, self.block, self.span = column, block, span
        where = f"chunk {chunk} of layer '{layer}' in '{root}'"
        if block is not None:
            where = f"block {block} of column '{column}' in {where}"
        if span is not None:
            where += f" (bytes {span[0]:,} to {span[1]:,})"
        super().__init__(f"{where} is corrupt: {problem}; run `forebay repair {root}`")


class BlockTooLarge(ForebayError):
    def __init__(self, root: str, layer: str, chunk: int, column: str, size: int, limit: int) -> None:
        self.root, self.layer, self.chunk, self.column = root, layer, chunk, column
        self.size, self.limit = size, limit
        super().__init__(
            f"column '{column}' in chunk {chunk} of layer '{layer}' in '{root}' decodes to {size:,} bytes at once, but "
            f"max_block_bytes is {limit:,}; if you trust this cache, pass max_block_bytes={size} to open_cache"
        )


class ChunkMissing(Damaged):
    def __init__(self, root: str, layer: str, chunk: int) -> None:
        self.root, self.layer, self.chunk = root, layer, chunk
        super().__init__(
            f"chunk {chunk} of layer '{layer}' in '{root}' is published but its file is missing; "
            f"run `forebay repair {root}`"
        )


class IndexCorrupt(Damaged):
    def __init__(self, root: str, key: str, problem: str) -> None:
        self.root, self.key, self.problem = root, key, problem
        super().__init__(f"'{key}' of the cache at '{root}' is corrupt: {problem}; run `forebay repair {root}`")


class LayersShareColumn(Damaged):
    def __init__(self, root: str, column: str, first: str, second: str) -> None:
        self.root, self.column, self.first, self.second = root, column, first, second
        super().__init__(
            f"layers '{first}' and '{second}' of the cache at '{root}' both have a column '{column}', which is read by "
            f"its name alone; remove one of them: `{shlex.join(['forebay', 'drop', root, second])}`"
        )


class StoreRefused(ForebayError):
    def __init__(self, address: str, problem: str, advice: str) -> None:
        self.address, self.problem, self.advice = address, problem, advice
        super().__init__(f"'{address}' cannot be used as a store: {problem}; {advice}")


class StoreUnavailable(ForebayError, OSError):
    """Also an `OSError`, because a retry may succeed."""

    errno: int | None = errno.EAGAIN

    def __init__(self, address: str, what: str, cause: str, advice: str = "check the network and try again") -> None:
        self.address, self.what, self.cause, self.advice = address, what, cause, advice
        super().__init__(f"cannot {what} in '{address}': {cause}; {advice}")


class StoreFull(ForebayError, OSError):
    """Also an `OSError`, as a full disk is."""

    errno: int | None = errno.ENOSPC

    def __init__(self, address: str, key: str, problem: str) -> None:
        self.address, self.key, self.problem = address, key, problem
        super().__init__(f"'{address}' has no room for '{key}': {problem}; free some space and try again")


class PinMismatch(ForebayError):
    def __init__(self, root: str, what: str, found: object, expected: object) -> None:
        self.root, self.what, self.found, self.expected = root, what, found, expected
        super().__init__(
            f"the cache at '{root}' is not the one that was pinned: its {what} is {found}, expected {expected}; "
            f"see `forebay info {root}`, then restore the cache that you expect or change the pin"
        )


class KeyRefused(ForebayError):
    def __init__(self, root: str, key: str, problem: str) -> None:
        self.root, self.key, self.problem = root, key, problem
        super().__init__(f"'{key}' of the cache at '{root}' is refused: {problem}")


class OldCacheInvalid(ForebayError):
    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"'{path}' cannot be imported as a teacher cache: {problem}; see docs/guide-teachers.md for the format"
        )


class SourceNotFound(ForebayError):
    def __init__(self, pattern: str, problem: str = "no file matches") -> None:
        self.pattern = pattern
        super().__init__(f"no source at '{pattern}': {problem}; check the path")


class SourceInvalid(ForebayError):
    """The arguments do not describe a source: a function without a name, an unknown format."""


class SourceNeeded(ForebayError):
    def __init__(self, function: str, slices: int) -> None:
        self.function, self.slices = function, slices
        made = f"fb.sources.function({function.replace(':', '.')}, slices={slices})"
        super().__init__(
            f"the source is the Python function '{function}', and forebay runs no code just because a cache names it; "
            f"pass it from Python, for instance fb.repair(root, source={made})"
        )


class SourceNotContacted(ForebayError):
    def __init__(self, root: str, source: str, verb: str) -> None:
        self.root, self.source, self.verb = root, source, verb
        super().__init__(
            f"the source of '{root}' is '{source}', and forebay contacts no machine just because a cache names it; "
            f"allow it with `forebay {verb} {root} --check-source`"
        )


class RecipeNotContacted(ForebayError):
    def __init__(self, root: str, layer: str, repository: str, verb: str) -> None:
        self.root, self.layer, self.repository, self.verb = root, layer, repository, verb
        super().__init__(
            f"the recipe of layer '{layer}' of '{root}' needs '{repository}' from the hub, and forebay contacts no "
            f"machine just because a cache names it; allow it with `forebay {verb} {root} --check-source`"
        )


class FunctionFailed(ForebayError):
    def __init__(self, function: str, number: int, problem: str) -> None:
        self.function, self.number, self.problem = function, number, problem
        super().__init__(f"the function '{function}' failed for slice {number}: {problem}; fix it and build again")


class SourceUnreadable(ForebayError):
    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"cannot read '{path}': {problem}; fix or remove the file, or pass --skip-unreadable to "
            f"build without such files and list them"
        )


class SourceChanged(ForebayError):
    def __init__(self, root: str, files: Mapping[str, str], advice: str = "") -> None:
        self.root, self.files = root, dict(files)
        shown = "; ".join(f"'{path}' {how}" for path, how in list(files.items())[:3])
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        way = advice or f"run `forebay refresh {root}` to rebuild its rows, or restore the old content"
        super().__init__(f"the source of '{root}' has changed: {shown}{more}; {way}")


class SourceMoving(ForebayError):
    """A source changes faster than it can be read; its planned part has not changed."""

    def __init__(self, root: str, files: Sequence[str]) -> None:
        self.root, self.files = root, tuple(files)
        shown = ", ".join(f"'{path}'" for path in self.files[:3])
        more = f" and {len(self.files) - 3} more" if len(self.files) > 3 else ""
        super().__init__(
            f"{shown}{more} kept changing while chunks of '{root}' were built from it; published chunks are not "
            f"affected: run the same command again when nothing writes to the source"
        )


class HubUnreachable(ForebayError, OSError):
    """Also an `OSError`, because a retry may succeed."""

    def __init__(self, endpoint: str, what: str, cause: str) -> None:
        self.endpoint, self.what, self.cause = endpoint, what, cause
        super().__init__(
            f"the hub at {endpoint} returned no usable answer for {what}: {cause}; check the network, name a mirror "
            f"with HF_ENDPOINT, or use local files"
        )


class HubNotFound(ForebayError):
    def __init__(self, what: str, problem: str, advice: str) -> None:
        self.what, self.problem, self.advice = what, problem, advice
        super().__init__(f"cannot get {what} from the Hub: {problem}; {advice}")


class DownloadCorrupt(ForebayError):
    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(
            f"the download of {what} does not match what the hub lists: {problem}; try again later without a proxy or "
            f"mirror, or download it by other means and use local files"
        )


class BuildFailed(ForebayError):
    def __init__(self, root: str, failed: Mapping[int, str]) -> None:
        self.root, self.failed = root, dict(failed)
        shown = "; ".join(f"chunk {chunk}: {reason}" for chunk, reason in list(failed.items())[:3])
        more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
        super().__init__(
            f"{len(failed)} chunk(s) of '{root}' could not be built: {shown}{more}; all others are "
            f"kept: run the same command again to retry"
        )


class TooManyFailures(BuildFailed):
    def __init__(self, root: str, failures: int, samples: int, allowed: str) -> None:
        self.root, self.failed = root, {}
        self.failures, self.samples, self.allowed = failures, samples, allowed
        ForebayError.__init__(
            self,
            f"{failures:,} of {samples:,} samples failed; the limit is {allowed}: see `forebay status {root}` for the "
            "reasons, or raise --max-failures",
        )


class NothingMade(BuildFailed):
    """Every sample failed: of the trial before the build, of what a cache was to grow by, or of the whole source."""

    def __init__(
        self,
        root: str,
        failures: int,
        reason: str,
        count: int,
        example: str,
        advice: str,
        *,
        sampled: bool = False,
        read_like: str = "",
    ) -> None:
        self.root, self.failed = root, {}
        self.failures, self.reason, self.count, self.example = failures, reason, count, example
        what = "sample(s)" if not sampled else f"trial sample(s){' of the new data' if read_like else ''}"
        skip = ", or pass --max-failures 100% to build anyway" if sampled else ""
        after = f"nothing was published at '{root}', so the corrected command can use it"
        if read_like:
            advice = f"the cache reads its source as {read_like}: pass files like that, or build a separate cache"
            skip = ", or pass --max-failures 100% to add these anyway"
            after = f"nothing was added to '{root}'"
        ForebayError.__init__(
            self, f"all {failures:,} {what} failed ({count:,} × {reason}, e.g. {example}); {advice}{skip}; {after}"
        )


class ChunkFailed(BuildFailed):
    """Every sample of a chunk failed, and the caller did not allow that; `after` says what became of the cache."""

    def __init__(
        self, root: str, chunk: int, failures: int, reason: str, count: int, example: str, advice: str, after: str = ""
    ) -> None:
        self.root, self.chunk, self.failures = root, chunk, failures
        self.reason, self.count, self.example, self.advice = reason, count, example, advice
        self.failed = {chunk: f"all {failures:,} samples failed"}
        self.after = after = after or f"the chunks built before are kept at '{root}'"
        ForebayError.__init__(
            self,
            f"all {failures:,} samples of chunk {chunk} failed ({count:,} × {reason}, e.g. {example}); {advice}, or "
            f"pass --max-failures 100% to skip it; {after}",
        )

    def followed_by(self, after: str, advice: str = "") -> "ChunkFailed":
        """The same error, with what became of the cache, and other advice where the command cannot follow this one."""
        facts = (self.failures, self.reason, self.count, self.example, advice or self.advice)
        return ChunkFailed(self.root, self.chunk, *facts, after or self.after)


class RangeInvalid(ForebayError):
    def __init__(self, root: str, start: int, planned: int) -> None:
        self.root, self.start, self.planned = root, start, planned
        super().__init__(f"start_chunk {start} is beyond the plan: '{root}' has {planned:,} chunks, numbered from 0")


class SourceEmpty(BuildFailed):
    """There is nothing to build: the source has no samples, or the recipe made no row from them."""

    def __init__(self, root: str, problem: str, advice: str = "name a source that has samples") -> None:
        self.root, self.failed, self.problem, self.advice = root, {}, problem, advice
        ForebayError.__init__(self, f"nothing to build: {problem}; nothing was published at '{root}', {advice}")


class CacheNotShared(ForebayError):
    """A worker does not see the cache that its builder works on."""

    def __init__(self, root: str, host: str) -> None:
        self.root, self.host = root, host
        super().__init__(
            f"'{root}' on '{host}' is not the cache that the build was started for; build into a bucket, or into a "
            f"folder that every machine mounts at the same path"
        )


class SourceNotShared(ForebayError):
    """A worker cannot read the source that its builder reads."""

    def __init__(self, path: str, host: str, problem: str) -> None:
        self.path, self.host, self.problem = path, host, problem
        super().__init__(
            f"the source file '{path}' cannot be read on '{host}' ({problem}); name a bucket, or a folder that every "
            f"machine mounts at the same path"
        )


class NotImportable(ForebayError, ImportError):
    """A worker cannot import a class by its path."""

    def __init__(self, path: str, module: str, host: str, problem: str) -> None:
        self.path, self.module, self.host, self.problem = path, module, host, problem
        ForebayError.__init__(
            self,
            f"'{path}' cannot be imported on '{host}' ({problem}); make module '{module}' importable by workers: "
            f"install its package, or add its folder to PYTHONPATH",
        )


class EngineUnusable(ForebayError):
    """An engine cannot run chunks here."""

    def __init__(self, engine: str, problem: str, advice: str) -> None:
        self.engine, self.problem, self.advice = engine, problem, advice
        super().__init__(f"the engine '{engine}' cannot be used: {problem}{'; ' if advice else ''}{advice}")


class WorkersFailed(BuildFailed):
    def __init__(self, root: str, reason: str) -> None:
        self.root, self.failed, self.reason = root, {}, reason
        ForebayError.__init__(
            self,
            f"workers for '{root}' exit during start-up ({reason}); see their output above, or build without "
            f"workers (workers=0, --workers 0) to see the cause here",
        )


class BuildStopped(KeyboardInterrupt):
    """Not an `Exception`, so that `except Exception` does not swallow the request to stop."""

    def __init__(self, root: str, done: int, total: int) -> None:
        self.root, self.done, self.total = root, done, total
        super().__init__(
            f"stopped: {done:,} of {total:,} chunks of '{root}' are published and safe; run the same command to resume"
        )

    def __reduce__(self) -> tuple[type["BuildStopped"], tuple[str, int, int], dict[str, object]]:
        return type(self), (self.root, self.done, self.total), self.__dict__


class StateMismatch(ForebayError):
    def __init__(self, root: str, differs: Mapping[str, tuple[object, object]], advice: str = "") -> None:
        self.root, self.differs = root, dict(differs)
        way = advice or "open the cache and make the loader with the old arguments, or start without the state"
        shown = "; ".join(f"{name}: {then} then, {now} now" for name, (then, now) in differs.items())
        super().__init__(f"the state does not belong to this loader over '{root}': {shown}; {way}")


class RanksDisagree(ForebayError):
    """`differs` maps a name to the value of the first rank, another rank that differs, and its value."""

    def __init__(self, differs: Mapping[str, tuple[object, int, object]], first_rank: int = 0) -> None:
        self.differs, self.first_rank = dict(differs), first_rank
        shown = "; ".join(
            f"{name} is {first!r} on rank {first_rank} and {other!r} on rank {rank}"
            for name, (first, rank, other) in differs.items()
        )
        is_opened = not any("generations" in name or "content" in name for name in differs)
        opened = "" if is_opened else "open the same generation on every rank (fb.open_cache(root, generation=…)), "
        super().__init__(
            f"the ranks of this loader would make different batches: {shown}; {opened}make the same loaders with the "
            "same arguments in the same order, and pass rank=0, world_size=1 to a loader that only one rank has"
        )


class RanksMissing(ForebayError):
    """`own` is the rank that raises this; `group` says that ranks of a larger world share the loader."""

    def __init__(
        self, ranks: Sequence[int], world_size: int, seconds: float, own: int | None = None, group: bool = False
    ) -> None:
        self.ranks, self.world_size, self.seconds = list(ranks), world_size, seconds
        world = f"a group of {world_size}" if group else str(world_size)
        named = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world}"
        what = f"waited {seconds:g} s for {named} to iterate this loader"
        if own in self.ranks:
            late = f"rank {own} of {world} iterates this loader too late"
            what = f"{late}: the others waited {seconds:g} s for it and gave up"
        super().__init__(
            f"{what}; every rank must iterate the same loaders in the same order: pass rank=0, world_size=1 to a "
            "loader that only one rank has, or a larger rank_timeout if ranks are slow"
        )


class SelectionEmpty(ForebayError):
    def __init__(self, root: str, rule: str, rows: int, chunks: int, choose: str) -> None:
        self.root, self.rule, self.rows, self.chunks = root, rule, rows, chunks
        super().__init__(
            f"none of the {rows:,} rows in {chunks:,} chunks of '{root}' is in the selection '{rule}'; choose {choose}"
        )


class SelectionLost(ForebayError):
    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"the selection stored in '{path}' is missing; it is removed with the process that made it, so make it "
            f"again here"
        )


class GenerationGone(StateMismatch):
    def __init__(self, root: str, generation: int) -> None:
        self.root, self.generation, self.differs = root, generation, {}
        ForebayError.__init__(
            self,
            f"the state was taken on generation {generation} of '{root}', which no longer exists; restore it from a "
            f"copy, keep generations in use (`forebay clean --keep-generations`), or start without the state",
        )


class AllTokensIgnored(ForebayError):
    def __init__(self, sample: str, box: Sequence[int], patch: int, threshold: float, images: int = 1) -> None:
        self.sample, self.box, self.patch, self.threshold, self.images = sample, tuple(box), patch, threshold, images
        more = f" (and of {images - 1:,} more)" if images > 1 else ""
        super().__init__(
            f"all tokens of the image '{sample}'{more} are ignored: with content of {box[2]} × {box[3]} pixels, "
            f"{threshold:.0%} or more of every patch of {patch} × {patch} is padding; exclude such images with "
            "a selection (selection=collate.large_enough(), or a Where on `box`), choose a smaller patch, or raise the "
            "threshold"
        )


class WindowTooLarge(ForebayError):
    def __init__(self, root: str, rows: int, lanes: int, needed: int, limit: int) -> None:
        self.root, self.rows, self.lanes, self.needed, self.limit = root, rows, lanes, needed, limit
        super().__init__(
            f"a shuffle window of {rows:,} rows in {lanes} lanes of '{root}' needs {needed:,} bytes of decoded blocks, "
            f"but the cache may keep {limit:,}; open it with memory={needed}, or choose a smaller window"
        )


class LaneMissing(ForebayError, ValueError):
    def __init__(self, root: str, lane: int, lanes: int) -> None:
        self.root, self.lane, self.lanes = root, lane, lanes
        super().__init__(f"lanes of '{root}' must be from 0 to {lanes - 1} (got {lane}); it is shuffled in {lanes}")


class TierNeeded(ForebayError):
    def __init__(self, root: str, chunks: int, needed: int, limit: int) -> None:
        self.root, self.chunks, self.needed, self.limit = root, chunks, needed, limit
        super().__init__(
            f"a loader over '{root}' mixes up to {chunks} chunks at a time, {needed:,} bytes, and without a tier it "
            f"may hold {limit:,} in memory; pass tier='/nvme/forebay', a folder on a local disk, to open_cache"
        )


class TierUnusable(ForebayError):
    def __init__(self, path: str, problem: str, advice: str) -> None:
        self.path, self.problem, self.advice = path, problem, advice
        super().__init__(f"'{path}' cannot be used as a tier: {problem}; {advice}")


class TierNotFound(TierUnusable):
    def __init__(self, path: str) -> None:
        listed = shlex.join(["forebay", "tier", "list", path])
        filled = f"forebay warm … --l2 {shlex.quote(path)}"
        advice = f"fill one with `{filled}`; if it keeps chunks of remote caches, run `{listed}`"
        super().__init__(path, "there is no tier of rows in it", advice)


class TierDamaged(TierUnusable):
    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem, f"run `{shlex.join(['forebay', 'tier', 'clear', path])}`")
        self.args = (
            f"the tier '{path}' is damaged ({problem}); {self.advice}: its rows will be rebuilt from the source",
        )


class WarmingFailed(ForebayError):
    def __init__(self, path: str, first: int, last: int, reason: str) -> None:
        self.path, self.first, self.last, self.reason = path, first, last, reason
        super().__init__(
            f"samples {first:,} to {last:,} could not be read into the tier '{path}': {reason}; finished samples are "
            f"kept: run the same command to resume"
        )


class DiskFull(ForebayError):
    def __init__(self, root: str, needed: int, free: int) -> None:
        self.root, self.needed, self.free = root, needed, free
        why = f"about {needed:,} bytes are needed, {free:,} are free"
        if free >= needed:  # a quota, no free inodes, or files that take whole blocks
            why = f"a write failed although {free:,} bytes are free (check the quota and `df -i`)"
        super().__init__(
            f"not enough disk space at '{root}': {why}; published chunks stay valid: free some space and run the same "
            f"command to resume"
        )


class MemoryTooSmall(ForebayError):
    def __init__(self, limit: int, needed: int) -> None:
        self.limit, self.needed = limit, needed
        super().__init__(
            f"a memory limit of {limit:,} bytes cannot hold the build with one worker, which needs about {needed:,}; "
            f"raise --memory-limit or choose smaller chunks in the recipe"
        )
