"""Images that the lines of a manifest name, each with what its line says of it."""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import xxhash

from forebay.errors import SourceChanged
from forebay.source import Annotated, Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.failures import MAX_IMAGE_BYTES, checked_limit, limit_in, stated_limit
from forebay.sources.image_files import image_digest, read_image
from forebay.sources.image_lines import ImageLines, Line, manifest_file, open_lines
from forebay.sources.image_listing import TROUBLES, stamp, state_of
from forebay.sources.paths import full_path, refuse_url


@dataclass(frozen=True, slots=True)
class ImageManifestSource(Source):
    """The images of a JSONL manifest, in its order, named relative to `root`; `image` is the field of their paths.

    A line is part of its sample: where the line changes, the image has changed. A line without an image that can be
    read is a failure, named by its place; if the image appears later, it is a new one.
    """

    kind: ClassVar[str] = "image_manifest"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False
    read_by: ClassVar[tuple[str, ...]] = ("image", "max_sample_bytes")

    root: str
    manifest: str  # relative to the root
    image: str = "path"
    max_sample_bytes: int = MAX_IMAGE_BYTES

    def describe(self) -> Mapping[str, Any]:
        described = {"kind": self.kind, "root": self.root, "manifest": self.manifest, "image": self.image}
        return described | stated_limit(self.max_sample_bytes, MAX_IMAGE_BYTES)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "ImageManifestSource":
        limit = limit_in(description, MAX_IMAGE_BYTES)
        return cls(description["root"], description["manifest"], description["image"], limit)

    def files(self) -> list[SourceFile]:
        return [self._planned(line) for line in self._lines().named()]

    def look(self, path: str) -> SourceFile:
        line = self._line_of(path)
        return self._failed(line) if self._is_place(path) else self._image(line)

    def stamp(self, file: SourceFile) -> str:
        return stamp(self.root, file)

    def edited_beside(self, known: SourceFile, found: SourceFile) -> str:
        is_same_image = (known.size, known.mtime_ns) == (found.size, found.mtime_ns) and not self._is_place(found.path)
        return self._place_of(found.path) if is_same_image and known.etag != found.etag else ""

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter(range(start + 1, 2))

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        line = self._line_of(part.file.path)
        if part.file.etag.partition("!")[0] != line.check:
            raise SourceChanged(self.root, {part.file.path: f"has another line in '{self.manifest}' than was planned"})
        if self._is_place(part.file.path):
            yield self._failure(part.file, line)
            return
        content = read_image(self.root, part.file, self.max_sample_bytes)
        if isinstance(content, Failure):
            yield content
        else:
            yield Sample(part.file.path, Annotated(content, line.metadata(self.image)))

    def annotations(self) -> Iterator[Mapping[str, Any]]:
        return (line.metadata(self.image) for line in self._lines().named() if not line.reason)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        line = self._line_of(file.path)
        image = 0 if self._is_place(file.path) else image_digest(self.root, file)
        value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + line.text)
        return value

    def _lines(self) -> ImageLines:
        path = full_path(self.root, self.manifest)
        return open_lines(self.root, path, manifest_file(path), self.image)

    def _line_of(self, path: str) -> Line:
        place = self._place(path)
        line = self._lines().find(path) if place is None else self._lines().at(place)
        if line is None:
            raise FileNotFoundError(errno.ENOENT, f"no line of the manifest '{self.manifest}' names it", path)
        return line

    def _planned(self, line: Line) -> SourceFile:
        """The image of a line, or the line itself where there is none to be read."""
        if line.reason:
            return self._failed(line)
        try:
            return self._image(line)
        except FileNotFoundError:
            return self._failed(line)

    def _image(self, line: Line) -> SourceFile:
        path = full_path(self.root, line.image)
        state = state_of(path)
        if not isinstance(state, os.stat_result):
            raise FileNotFoundError(errno.ENOENT, TROUBLES.get(state or "", os.strerror(errno.ENOENT)), path)
        return SourceFile(
            path=line.image,
            size=state.st_size,
            mtime_ns=state.st_mtime_ns,
            etag=line.check,
            ctime_ns=state.st_ctime_ns,
            inode=state.st_ino,
        )

    def _place_of(self, path: str) -> str:
        return f"{self.manifest}@{self._line_of(path).start}"

    def _failed(self, line: Line) -> SourceFile:
        reason = line.reason or self._trouble(line) or ""
        return SourceFile(path=f"{self.manifest}@{line.start}", size=0, etag=f"{line.check}!{reason}")

    def _trouble(self, line: Line) -> str | None:
        state = state_of(full_path(self.root, line.image))
        return "not-found" if state is None else None if isinstance(state, os.stat_result) else state

    def _failure(self, file: SourceFile, line: Line) -> Failure:
        reason = file.etag.partition("!")[2]
        detail = line.detail or f"line {line.number}: '{line.image}' could not be read when the cache was planned"
        return Failure(file.path, reason, detail)

    def _place(self, path: str) -> int | None:
        found = re.fullmatch(rf"{re.escape(self.manifest)}@(\d+)", path)
        return int(found[1]) if found else None

    def _is_place(self, path: str) -> bool:
        return self._place(path) is not None


def image_manifest(
    path: str | os.PathLike[str],
    *,
    image: str = "path",
    root: str | os.PathLike[str] | None = None,
    max_sample_bytes: int = MAX_IMAGE_BYTES,
) -> ImageManifestSource:
    """The images that a `.jsonl`, compressed or not, names in the field `image`; the rest is metadata.

    Paths are relative to `root`, by default the folder of the manifest, or absolute, and lie below it.

    >>> image_manifest("/data/train.jsonl", image="file_name").root
    '/data'
    """
    for name in (path, *(() if root is None else (root,))):
        refuse_url(name)
    manifest = os.path.abspath(path)
    below = os.path.abspath(root) if root is not None else os.path.dirname(manifest)
    return ImageManifestSource(below, os.path.relpath(manifest, below), image, checked_limit(max_sample_bytes))
