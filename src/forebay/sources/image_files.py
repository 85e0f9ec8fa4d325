"""Image files as samples, each with what its sidecar says of it."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import xxhash

from forebay.errors import SourceChanged
from forebay.source import Annotated, Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.failures import MAX_IMAGE_BYTES, checked_limit, limit_in, stated_limit, too_large
from forebay.sources.image_listing import (
    TROUBLES,
    Sidecar,
    find_images,
    left_out_beside_images,
    look_at_image,
    sidecar_in,
    stamp,
    touched_ns,
    trouble_with,
)
from forebay.sources.image_sidecars import MOST_BYTES, SidecarUnreadable, parse_sidecar
from forebay.sources.paths import full_path, named_below, renamed
from forebay.sources.stored import digest

Labels = Literal["sidecar", "folder"]


@dataclass(frozen=True, slots=True)
class ImageSource(Source):
    """Every image below some paths, named relative to `root`, with the metadata of its sidecar.

    Each file is one sample and weighs as much as any other: rows of images are alike in size, their files are not. A
    changed sidecar is a changed image. With `labels="folder"` the tag of an image is the name of its folder below the
    root, in place of the tags of its sidecar. A file of more than `max_sample_bytes`, a film named as a picture, is not
    read.
    """

    kind: ClassVar[str] = "images"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes", "labels")

    root: str
    patterns: tuple[str, ...]
    max_sample_bytes: int = MAX_IMAGE_BYTES
    labels: Labels = "sidecar"

    def describe(self) -> Mapping[str, Any]:
        described: dict[str, Any] = {"kind": self.kind, "root": self.root, "patterns": list(self.patterns)}
        described |= stated_limit(self.max_sample_bytes, MAX_IMAGE_BYTES)
        return described if self.labels == "sidecar" else {**described, "labels": self.labels}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "ImageSource":
        limit = limit_in(description, MAX_IMAGE_BYTES)
        return cls(description["root"], tuple(description["patterns"]), limit, description.get("labels", "sidecar"))

    def rebased(self, root: str) -> "ImageSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return find_images(self.root, self.patterns)

    def left_out(self, apart: str = "") -> Mapping[str, int]:
        return left_out_beside_images(self.root, self.patterns, apart)

    def look(self, path: str) -> SourceFile:
        return look_at_image(self.root, path)

    def touched_ns(self, file: SourceFile) -> int:
        return touched_ns(file)

    def stamp(self, file: SourceFile) -> str:
        return stamp(self.root, file)

    def edited_beside(self, known: SourceFile, found: SourceFile) -> str:
        sidecar = sidecar_in(found) or sidecar_in(known)
        is_same_image = (known.size, known.mtime_ns) == (found.size, found.mtime_ns) and not trouble_with(found)
        return sidecar.path if sidecar is not None and is_same_image and known.etag != found.etag else ""

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter(range(start + 1, 2))

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        file = part.file
        self._check_sidecar(file)
        content = read_image(self.root, file, self.max_sample_bytes)
        if isinstance(content, Failure):
            yield content
            return
        try:
            yield Sample(file.path, Annotated(content, self._metadata(file)))
        except SidecarUnreadable as error:
            yield Failure(file.path, "bad-sidecar", str(error))

    def annotations(self) -> Iterator[Mapping[str, Any]]:
        for file in self.files():
            try:
                yield self._metadata(file)
            except SidecarUnreadable:
                continue  # its sample is a failure, and is recorded

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        image = image_digest(self.root, file)
        sidecar = sidecar_in(file)
        if sidecar is None:
            return image
        try:
            beside = self._stored(sidecar)
        except SidecarUnreadable as error:
            beside = str(error).encode("utf-8", "surrogateescape")
        kind = os.path.splitext(sidecar.path)[1].encode()  # the same bytes say other things in .json and .txt
        value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + kind + beside)
        return value

    def _check_sidecar(self, file: SourceFile) -> None:
        """A row must not be made without a sidecar that came since its image was planned, nor of another one."""
        planned, found = sidecar_in(file), sidecar_in(self.look(file.path))
        if (planned and planned.path) != (found and found.path):
            how = f"has {_named(found)} beside it, {_named(planned)} was planned"
            raise SourceChanged(self.root, {file.path: how})

    def _metadata(self, file: SourceFile) -> dict[str, Any]:
        sidecar = sidecar_in(file)
        said = {} if sidecar is None else parse_sidecar(os.path.basename(sidecar.path), self._stored(sidecar))
        if self.labels == "folder":
            folder = os.path.basename(os.path.dirname(file.path))
            return {**said, "tags": [folder] if folder else []}
        return said

    def _stored(self, sidecar: Sidecar) -> bytes:
        name = os.path.basename(sidecar.path)
        if sidecar.trouble is not None:
            raise SidecarUnreadable(f"'{name}' is no sidecar: {TROUBLES[sidecar.trouble]}")
        try:
            with open(full_path(self.root, sidecar.path), "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except PermissionError as error:
            raise SidecarUnreadable(f"'{name}' is no sidecar: {TROUBLES['unreadable']}") from error
        if len(content) > MOST_BYTES:
            raise SidecarUnreadable(f"'{name}' is no sidecar: it has more than {MOST_BYTES:,} bytes")
        return content


def images(
    *paths: str | os.PathLike[str],
    root: str | None = None,
    labels: Labels = "sidecar",
    max_sample_bytes: int = MAX_IMAGE_BYTES,
) -> ImageSource:
    """The images of some folders (and all below them), globs or paths, with their sidecars.

    `labels="folder"` is for a folder per class, `photos/cat/1.jpg`: the tag of an image is the name of its folder.

    >>> images("/data/photos", "/data/more/*.png").patterns
    ('photos', 'more/*.png')
    """
    if labels not in get_args(Labels):
        raise ValueError(f"labels is {labels!r}; 'sidecar' or 'folder' is expected")
    return ImageSource(*named_below(paths, root), checked_limit(max_sample_bytes), labels)


def _named(sidecar: Sidecar | None) -> str:
    return "no sidecar" if sidecar is None else f"'{os.path.basename(sidecar.path)}'"


def read_image(root: str, file: SourceFile, max_sample_bytes: int) -> bytes | Failure:
    """The bytes of an image as it was planned; a failure where it is one that nobody can read."""
    trouble = trouble_with(file)
    if trouble is not None:
        return Failure(file.path, trouble, TROUBLES[trouble])
    if file.size > max_sample_bytes:
        return too_large(file.path, file.size, max_sample_bytes)
    try:
        with open(full_path(root, file.path), "rb") as stored:
            content = stored.read(file.size + 1)
            size = os.fstat(stored.fileno()).st_size
    except PermissionError as error:
        return Failure(file.path, "unreadable", f"{TROUBLES['unreadable']} ({error.strerror})")
    if len(content) != file.size:
        raise SourceChanged(root, {file.path: f"has {size:,} bytes, {file.size:,} were planned"})
    return content


def image_digest(root: str, file: SourceFile) -> int:
    """A hash of the bytes of an image, or of the trouble with it."""
    trouble = trouble_with(file)
    if trouble is None:
        try:
            return digest(root, file, 0, file.size)
        except PermissionError:
            trouble = "unreadable"
    value: int = xxhash.xxh3_64_intdigest(trouble.encode())
    return value
