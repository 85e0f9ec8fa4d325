"""A function as a source: it gives the documents of one slice after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

import xxhash

from forebay.errors import ForebayError, FunctionFailed, SourceInvalid, SourceNeeded
from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit

_MOST_REMEMBERED = 1 << 16
_just_read: dict[tuple["FunctionSource", str], int] = {}  # digests of slices, until they are asked for


@dataclass(frozen=True, slots=True)
class FunctionSource(Source):
    """The documents that an importable function gives for slice numbers 0 to `slices` - 1.

    Each slice is a file of weight 1, `module:name/17`, whose documents are `module:name/17#0` and so on. The function
    must give the same documents for a slice whenever it is asked; `version` tells that it does not any more.
    A cache names the function, and that is all: what a file says is never imported.
    """

    kind: ClassVar[str] = "function"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False  # a source of more slices has more files

    function: str  # module:qualname
    slices: int
    version: str = ""

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "function": self.function, "slices": self.slices, "version": self.version}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "FunctionSource":
        raise SourceNeeded(str(description["function"]), int(description["slices"]))

    def files(self) -> list[SourceFile]:
        return [self._file(number) for number in range(self.slices)]

    def look(self, path: str) -> SourceFile:
        function, _, number = path.rpartition("/")
        if function != self.function or not number.isdecimal() or int(number) >= self.slices:
            raise FileNotFoundError(f"'{path}' is none of the {self.slices:,} slices of '{self.function}'")
        return self._file(int(number))

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter([] if start else [1])

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        """The documents of a slice; its digest is remembered, as it is asked for next."""
        running = xxhash.xxh3_64()
        yield from self._documents(part.file.path, running)
        while len(_just_read) >= _MOST_REMEMBERED:
            _just_read.pop(next(iter(_just_read)))
        _just_read[self, part.file.path] = running.intdigest()

    def glance(self, part: Part) -> Iterable[Sample | Failure]:
        return self._documents(part.file.path, xxhash.xxh3_64())

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """A hash of the documents: of those just read, if they were."""
        remembered = _just_read.pop((self, file.path), None)
        if remembered is not None:
            return remembered
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
            for index, document in enumerate(self._made(number)):
                yield _checked(f"{path}#{index}", index, document, running)
        except ForebayError:
            raise
        except OSError as error:  # it may be over soon: such a chunk is tried again
            raise OSError(f"the function '{self.function}' failed for slice {number}: {error!r}") from error
        except Exception as error:  # it may raise anything
            raise FunctionFailed(self.function, number, repr(error)) from error

    def _made(self, number: int) -> Iterable[object]:
        made: object = _resolve(self.function)(number)
        if isinstance(made, str | bytes) or not isinstance(made, Iterable):
            kind = type(made).__name__
            raise SourceInvalid(
                f"'{self.function}' returned {kind} for slice {number}; return an iterable of documents"
            )
        return made


def function(function: Callable[[int], Iterable[str]], slices: int, version: str = "") -> FunctionSource:
    """The documents of `function(0)`, `function(1)`, … `function(slices - 1)`, in this order.

    Every worker process imports the function by its name, so it must be one of an importable module. A cache grows by a
    source of more slices.
    """
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', repr(function))}"
    problem = _why_not_importable(function, name)
    if problem:
        raise SourceInvalid(f"'{name}' {problem}; define it with `def` at the top of a module that workers can import")
    if slices < 1:
        raise SourceInvalid(f"a function source has at least one slice, not {slices}")
    return FunctionSource(name, slices, version)


def _why_not_importable(function: object, name: str) -> str:
    if name.startswith("__main__:"):
        return "is defined in the script that runs, which worker processes do not import"
    if "<lambda>" in name:
        return "is a lambda, which has no name to import it by"
    if "<locals>" in name:
        return "is defined inside another function"
    try:
        found = _resolve(name)
    except (ImportError, AttributeError, ValueError) as error:
        return f"cannot be imported ({error})"
    return "" if found == function else "is not what its name imports"


@lru_cache(maxsize=64)
def _resolve(name: str) -> Callable[[int], Iterable[str]]:
    module, _, qualname = name.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    resolved: Callable[[int], Iterable[str]] = found
    return resolved


def _checked(sample: str, index: int, document: object, running: Any) -> Sample | Failure:
    """A document, or why it is none; either way it goes into the digest."""
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
