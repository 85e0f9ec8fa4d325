"""Image files as samples, each with what its sidecar says of it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
import xxhash

from forebay.source import Annotated, Failure, Part, Sample, SourceFile, Unit
from forebay.sources.image_sidecars import SidecarUnreadable, parse_sidecar, sidecar_of
from forebay.sources.paths import find_files, full_path, look, named_below, plain_file, renamed
from forebay.sources.stored import digest
from forebay.sources.whole import cut_whole, read_whole

ENDINGS = ("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "tif", "tiff", "avif")
SUFFIXES = tuple(f".{name}" for ending in ENDINGS for name in (ending, ending.upper(), ending.capitalize()))


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Every image below some paths, named relative to `root`, with the metadata of its sidecar."""

    kind: ClassVar[str] = "images"
    unit: ClassVar[Unit] = "bytes"
    files_grow: ClassVar[bool] = False

    root: str
    patterns: tuple[str, ...]

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "root": self.root, "patterns": list(self.patterns)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "ImageSource":
        return cls(description["root"], tuple(description["patterns"]))

    def rebased(self, root: str) -> "ImageSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return [self._with_sidecar(file) for file in find_files(self.root, self.patterns, SUFFIXES)]

    def look(self, path: str) -> SourceFile:
        return self._with_sidecar(look(self.root, path))

    def weight(self, file: SourceFile) -> int:
        return file.size

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_whole(self.root, file, start)

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        content = read_whole(self.root, part)
        try:
            yield Sample(part.file.path, Annotated(content, self._metadata(part.file.path)))
        except SidecarUnreadable as error:
            yield Failure(part.file.path, "bad-sidecar", str(error))

    def annotations(self) -> Iterator[Mapping[str, Any]]:
        for file in self.files():
            try:
                yield self._metadata(file.path)
            except SidecarUnreadable:
                continue  # its sample is a failure, and is recorded

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        image = digest(self.root, file, start, stop)
        sidecar = sidecar_of(self.root, file.path)
        if sidecar is None:
            return image
        value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + self._stored(sidecar))
        return value

    def _metadata(self, path: str) -> dict[str, Any]:
        sidecar = sidecar_of(self.root, path)
        return {} if sidecar is None else parse_sidecar(sidecar, self._stored(sidecar))

    def _stored(self, name: str) -> bytes:
        with open(full_path(self.root, name), "rb") as file:
            return file.read()

    def _with_sidecar(self, file: SourceFile) -> SourceFile:
        sidecar = sidecar_of(self.root, file.path)
        if sidecar is None:
            return plain_file(file)
        status = os.stat(full_path(self.root, sidecar))
        return msgspec.structs.replace(plain_file(file), etag=f"{status.st_size}-{status.st_mtime_ns}")


def images(*paths: str | os.PathLike[str], root: str | None = None) -> ImageSource:
    """The images of some folders (and all below them), globs or paths, with their sidecars.

    >>> images("/data/photos", "/data/more/*.png").patterns
    ('photos', 'more/*.png')
    """
    return ImageSource(*named_below(paths, root))
