"""Python as a source: an iterable, spooled to a file, or a function that returns the documents of a slice."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import msgspec
import xxhash

from forebay.errors import ForebayError, SourceInvalid
from forebay.fields import checked_whole
from forebay.source import Failure, Part, PartDigest, Sample, Samples, Source, SourceFile, Unit
from forebay.sources.jsonl import JsonlSource, jsonl
from forebay.store.base import is_url
from forebay.store.local import write_aside

_PIECE = 1 << 20
_JSON_VALUES = (str, int, float, list, dict, type(None))  # bytes, dates and the like would be written as some text


def documents(
    documents: Iterable[str | Mapping[str, Any]], spool: str | os.PathLike[str], text: str = "text"
) -> JsonlSource:
    """The documents of any iterable: strings, or mappings of which the field `text` is kept.

    They are written to `spool`, a `.jsonl` file that appears once it is complete. The same documents again leave the
    file, and the caches built from it, unchanged; more documents after the same ones can be added to a cache by
    `update`. A file with other content is never overwritten.
    """
    if is_url(os.fspath(spool)):
        raise SourceInvalid(f"documents are spooled to a file, not to the URL '{os.fspath(spool)}'", hint="pass a path")
    path = os.path.abspath(spool)
    if not path.endswith(".jsonl"):
        raise SourceInvalid(f"documents are spooled to a .jsonl file, not to '{spool}'")
    if isinstance(documents, str | bytes | Mapping):
        raise SourceInvalid(
            f"one {type(documents).__name__} is not an iterable of documents", hint="put it into a list"
        )
    source = jsonl(path, text=text)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lines = (_line(document, text, number) for number, document in enumerate(documents))
    aside = write_aside(os.path.dirname(path), lines)
    try:
        _publish(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
    return source


def _line(document: str | Mapping[str, Any], field: str, number: int) -> bytes:
    """A line that reads as the document, or fails for the reason that the document does."""
    if isinstance(document, str):
        fields: dict[str, Any] = {field: document}
    elif isinstance(document, Mapping):
        fields = {field: document[field]} if field in document else {}
    else:
        raise SourceInvalid(
            f"document {number} is {type(document).__name__}; expected a str, or a mapping with '{field}'"
        )
    if not isinstance(fields.get(field), _JSON_VALUES):
        kind = type(fields[field]).__name__
        raise SourceInvalid(f"the field '{field}' of document {number} is {kind}; expected a str")
    try:
        return msgspec.json.encode(fields) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(fields).encode() + b"\n"  # half of a surrogate pair can be written, but not read


def _publish(aside: str, path: str) -> None:
    """Give a written file its name; raise if a file of that name does not begin it."""
    if not os.path.lexists(path):
        os.link(aside, path)
    elif not _continues(aside, path):
        raise SourceInvalid(
            f"'{path}' exists and does not begin these documents",
            hint="delete it, or name another file to spool them to",
        )
    elif os.path.getsize(aside) > os.path.getsize(path):
        os.replace(aside, path)


def _continues(new: str, old: str) -> bool:
    """Whether a file begins with the content of a regular file."""
    if os.path.islink(old) or not os.path.isfile(old):
        return False
    with open(new, "rb") as longer, open(old, "rb") as shorter:
        while piece := shorter.read(_PIECE):
            if longer.read(len(piece)) != piece:
                return False
    return True


@dataclass(frozen=True, slots=True)
class FunctionSource(Source):
    """The documents that an importable function returns for slice numbers 0 to `slices` - 1.

    Each slice is a file of weight 1, `module:name/17`, whose documents are `module:name/17#0` and so on. The function
    must return the same documents for a slice on every call; pass another `version` when it changes. A cache stores
    only the name of the function, and never imports it.
    """

    kind: ClassVar[str] = "function"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False  # a source of more slices has more files

    function: str  # module:qualname
    slices: int
    version: str = ""

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "FunctionSource":
        name, slices = str(description["function"]), int(description["slices"])
        called = f"fb.sources.function({name.replace(':', '.')}, slices={slices})"
        raise SourceInvalid(
            f"the source is the Python function '{name}'; forebay runs no code that only a cache names",
            hint=f"pass it from Python, for instance fb.repair(root, source={called})",
        )

    def files(self) -> list[SourceFile]:
        return [self._file(number) for number in range(self.slices)]

    def look(self, path: str) -> SourceFile:
        function, _, number = path.rpartition("/")
        if function != self.function or not number.isdecimal() or int(number) >= self.slices:
            raise FileNotFoundError(f"'{path}' is not one of the {self.slices:,} slices of '{self.function}'")
        return self._file(int(number))

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter([] if start else [1])

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        running = xxhash.xxh3_64()
        yield from self._documents(part.file.path, running)
        if digest is not None:
            digest.value = running.intdigest()

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """A hash of the documents."""
        running = xxhash.xxh3_64()
        for _ in self._documents(file.path, running):
            pass
        value: int = running.intdigest()
        return value

    def _file(self, number: int) -> SourceFile:
        return SourceFile(path=f"{self.function}/{number}", size=1, etag=self.version)

    def _documents(self, path: str, running: Any) -> Iterator[Sample | Failure]:
        number = int(path.rpartition("/")[2])
        try:
            for index, document in enumerate(self._returned(number)):
                yield _checked(f"{path}#{index}", index, document, running)
        except ForebayError:
            raise
        except OSError as error:  # it may be over soon: such a chunk is tried again
            raise OSError(f"the function '{self.function}' failed for slice {number}: {error!r}") from error
        except Exception as error:  # a function of the user may raise anything
            raise SourceInvalid(
                f"the function '{self.function}' failed for slice {number}: {error!r}",
                hint="fix it and build again",
            ) from error

    def _returned(self, number: int) -> Iterable[object]:
        returned: object = _resolve(self.function)(number)
        if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
            kind = type(returned).__name__
            raise SourceInvalid(
                f"'{self.function}' returned {kind} for slice {number}", hint="return an iterable of documents"
            )
        return returned


def function(function: Callable[[int], Iterable[str]], slices: int, version: str = "") -> FunctionSource:
    """The documents of `function(0)`, `function(1)`, … `function(slices - 1)`, in this order.

    Every worker process imports the function by its name, so it must be one of an importable module. A cache grows by a
    source of more slices.
    """
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', repr(function))}"
    problem = _why_not_importable(function, name)
    if problem:
        raise SourceInvalid(
            f"'{name}' {problem}", hint="define it with `def` at the top of a module that workers can import"
        )
    return FunctionSource(name, checked_whole("slices", slices, 1), version)


def _why_not_importable(function: object, name: str) -> str:
    if name.startswith("__main__:"):
        return "is defined in the script that runs, which worker processes do not import"
    if "<lambda>" in name:
        return "is a lambda, which has no name to import it by"
    if "<locals>" in name:
        return "is defined inside another function"
    try:
        imported = _resolve(name)
    except (ImportError, AttributeError, ValueError) as error:
        return f"cannot be imported ({error})"
    return "" if imported == function else "is not what its name imports"


@lru_cache(maxsize=64)
def _resolve(name: str) -> Callable[[int], Iterable[str]]:
    module, _, qualname = name.partition(":")
    resolved_part: Any = import_module(module)
    for part in qualname.split("."):
        resolved_part = getattr(resolved_part, part)
    resolved: Callable[[int], Iterable[str]] = resolved_part
    return resolved


def _checked(sample: str, index: int, document: object, running: Any) -> Sample | Failure:
    """A document, or its failure; both are hashed into the digest."""
    if not isinstance(document, str):
        kind = type(document).__name__
        running.update(f"\0{kind}\0".encode())
        reason = "null" if document is None else "not-text"
        return Failure(sample, reason, f"document {index}: it is {kind}, not str")
    checked: Sample | Failure = Sample(sample, document)
    try:
        encoded = document.encode()
    except UnicodeEncodeError as error:
        encoded = document.encode("utf-8", "surrogatepass")
        half = f"character {error.start} is half of a surrogate pair"
        checked = Failure(sample, "not-utf8", f"document {index}: {half}")
    running.update(len(encoded).to_bytes(8, "little"))
    running.update(encoded)
    return checked
