"""Image files as samples, each with the metadata of its sidecar."""

import errno
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
import xxhash

from forebay.errors import SourceChanged
from forebay.source import TOO_DEEP, Annotated, Failure, Part, Sample, Source, SourceFile, Unit, is_shallow
from forebay.sources.estimated_size import digest
from forebay.sources.failures import BOM, MAX_IMAGE_BYTES, checked_limit, limit_in, stated_limit, too_large
from forebay.sources.paths import FoundFile, NamesIn, count_left_out, found_files, full_path, named_below, renamed

MOST_BYTES = 1 << 24  # of a sidecar
SIDECAR_SUFFIXES = (".json", ".txt")
_BETWEEN_TAGS = re.compile(r"[,\r\n]")


class SidecarUnreadable(Exception):
    """A sidecar cannot be read or parsed.

    Its text is stored in chunks as the detail of a failure, and is part of digests: rewording it changes bytes.
    """


def sidecar_of(image: str, names: Container[str]) -> str | None:
    """The name of the sidecar of an image in its folder; the first of four candidates that exists.

    >>> sidecar_of("a.jpg", ["a.jpg", "a.json", "a.txt"])
    'a.json'
    """
    stem = os.path.splitext(image)[0]
    candidates = (f"{image}.json", f"{stem}.json", f"{image}.txt", f"{stem}.txt")
    return next((name for name in candidates if name in names), None)


def parse_sidecar(name: str, content: bytes) -> dict[str, Any]:
    """The metadata in a sidecar: a JSON object, or tags separated by commas or newlines.

    >>> parse_sidecar("a.txt", b"cat, looking_left")
    {'tags': ['cat', 'looking_left']}
    """
    try:
        if name.endswith(".txt"):
            return {"tags": [tag for part in _BETWEEN_TAGS.split(content.decode("utf-8-sig")) if (tag := part.strip())]}
        said = msgspec.json.decode(content.removeprefix(BOM), type=dict[str, Any])
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {error}") from error
    except RecursionError as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}") from error
    if not is_shallow(said):
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}")
    return said


ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
# Files that cannot be read are samples that fail; the problem is stored in their etag.
FILE_PROBLEMS = {
    "symlink-loop": "it is a link that leads back to itself",
    "not-found": "it is a link to nothing",
    "not-a-file": "it is not a regular file",
    "unreadable": "there is no permission to read it",
}
_PROBLEM_OF = {
    errno.ELOOP: "symlink-loop",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
}
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_MARK = "!"  # before a problem; the etag of a sidecar always has a colon


def find_images(root: str, patterns: Sequence[str]) -> list[SourceFile]:
    """Every image that a pattern names, once, sorted by name."""
    found = found_files([full_path(root, pattern) for pattern in patterns], ENDINGS)
    looks = (_look(root, os.path.relpath(file.path, root), file.beside) for file in found)
    return sorted((look for look in looks if look is not None), key=lambda look: look.path)


def left_out_beside_images(root: str, patterns: Sequence[str], apart: str) -> Mapping[str, int]:
    """The number of files that are neither images nor sidecars, by suffix."""
    return count_left_out([full_path(root, pattern) for pattern in patterns], ENDINGS, apart, _is_sidecar)


def look_at_image(root: str, name: str) -> SourceFile:
    """Stat one image; raises `FileNotFoundError` if it is gone."""
    file = _look(root, name, NamesIn(os.path.dirname(full_path(root, name))))
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full_path(root, name))
    return file


def problem_with(file: SourceFile) -> str | None:
    """The problem of a file that cannot be read, None if it can."""
    problem = file.etag.removeprefix(_MARK)
    return problem if problem != file.etag and problem in FILE_PROBLEMS else None


class Sidecar(NamedTuple):
    """The sidecar of an image when it was listed."""

    path: str
    problem: str | None


def sidecar_in(file: SourceFile) -> Sidecar | None:
    name, colon, state = file.etag.rpartition(":")
    path = os.path.join(os.path.dirname(file.path), name)
    return Sidecar(path, state if state in FILE_PROBLEMS else None) if colon else None


def touched_ns(file: SourceFile) -> int:
    """The newer modification time of an image and its sidecar."""
    sidecar, state = sidecar_in(file), file.etag.rpartition(":")[2]
    return file.mtime_ns if sidecar is None or sidecar.problem else max(file.mtime_ns, int(state.rpartition("-")[2]))


def stamp(root: str, file: SourceFile) -> str:
    """Ctime and inode of an image and its sidecar, which change even if an edit restores size and mtime."""
    sidecar = sidecar_in(file)
    states = [state_of(full_path(root, path)) for path in (file.path, *([] if sidecar is None else [sidecar.path]))]
    return ",".join(f"{one.st_ctime_ns}:{one.st_ino}" for one in states if isinstance(one, os.stat_result))


def state_of(path: str) -> os.stat_result | str | None:
    """The stat of a file, or its problem; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return "not-found" if os.path.islink(path) else None
        if error.errno not in _PROBLEM_OF:
            raise
        return _PROBLEM_OF[error.errno]
    return status if stat.S_ISREG(status.st_mode) else "not-a-file"


def _look(root: str, name: str, names: Container[str]) -> SourceFile | None:
    path = full_path(root, name)
    state = state_of(path)
    if state is None:
        return None
    if isinstance(state, str):
        return SourceFile(path=name, size=0, etag=f"{_MARK}{state}")
    file = SourceFile(
        path=name,
        size=state.st_size,
        mtime_ns=state.st_mtime_ns,
        ctime_ns=state.st_ctime_ns,
        inode=state.st_ino,
    )
    sidecar = sidecar_of(os.path.basename(name), names)
    if sidecar is None:
        return file
    beside = state_of(os.path.join(os.path.dirname(path), sidecar))
    if beside is None:
        return file
    known = beside if isinstance(beside, str) else f"{beside.st_size}-{beside.st_mtime_ns}"
    return msgspec.structs.replace(file, etag=f"{sidecar}:{known}")


def is_image(name: str) -> bool:
    """Whether a name has the suffix of an image, in any case."""
    return name.lower().endswith(ENDINGS)


def _is_sidecar(file: FoundFile) -> bool:
    """Whether a file may be the sidecar of an image in the same folder."""
    stem, suffix = os.path.splitext(os.path.basename(file.path))
    if suffix not in SIDECAR_SUFFIXES:
        return False
    ends = ("", *ENDINGS, *map(str.upper, ENDINGS))
    return any(is_image(stem + end) and stem + end in file.beside for end in ends)


Labels = Literal["sidecar", "folder"]


@dataclass(frozen=True, slots=True)
class ImageSource(Source):
    """Every image below some paths, named relative to `root`, with the metadata of its sidecar.

    Each file is one sample of weight 1, because rows of images have similar sizes although their files do not. An image
    with a changed sidecar is a changed image. With `labels="folder"` the tag of an image is the name of its folder. A
    file of more than `max_sample_bytes` fails without being read.
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
        is_same_image = (known.size, known.mtime_ns) == (found.size, found.mtime_ns) and not problem_with(found)
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
                continue  # its sample is recorded as a failure

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        image = image_digest(self.root, file)
        sidecar = sidecar_in(file)
        if sidecar is None:
            return image
        try:
            beside = self._stored(sidecar)
        except SidecarUnreadable as error:
            beside = str(error).encode("utf-8", "surrogateescape")
        kind = os.path.splitext(sidecar.path)[1].encode()  # the same bytes mean different things in .json and .txt
        value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + kind + beside)
        return value

    def _check_sidecar(self, file: SourceFile) -> None:
        """Raise `SourceChanged` if the image has another sidecar than planned."""
        planned, found = sidecar_in(file), sidecar_in(self.look(file.path))
        if (planned and planned.path) != (found and found.path):
            how = f"has {_named(found)}, but {_named(planned)} was planned"
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
        if sidecar.problem is not None:
            raise SidecarUnreadable(f"'{name}' is no sidecar: {FILE_PROBLEMS[sidecar.problem]}")
        try:
            with open(full_path(self.root, sidecar.path), "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except PermissionError as error:
            raise SidecarUnreadable(f"'{name}' is no sidecar: {FILE_PROBLEMS['unreadable']}") from error
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
        raise ValueError(f"labels must be 'sidecar' or 'folder' (got {labels!r})")
    return ImageSource(*named_below(paths, root), checked_limit(max_sample_bytes), labels)


def _named(sidecar: Sidecar | None) -> str:
    return "no sidecar" if sidecar is None else f"'{os.path.basename(sidecar.path)}'"


def read_image(root: str, file: SourceFile, max_sample_bytes: int) -> bytes | Failure:
    """The bytes of an image as planned, or a failure if it cannot be read."""
    problem = problem_with(file)
    if problem is not None:
        return Failure(file.path, problem, FILE_PROBLEMS[problem])
    if file.size > max_sample_bytes:
        return too_large(file.path, file.size, max_sample_bytes)
    try:
        with open(full_path(root, file.path), "rb") as stored:
            content = stored.read(file.size + 1)
            size = os.fstat(stored.fileno()).st_size
    except PermissionError as error:
        return Failure(file.path, "unreadable", f"{FILE_PROBLEMS['unreadable']} ({error.strerror})")
    if len(content) != file.size:
        raise SourceChanged(root, {file.path: f"has {size:,} bytes, {file.size:,} were planned"})
    return content


def image_digest(root: str, file: SourceFile) -> int:
    """A hash of the bytes of an image, or of its problem."""
    problem = problem_with(file)
    if problem is None:
        try:
            return digest(root, file, 0, file.size)
        except PermissionError:
            problem = "unreadable"
    value: int = xxhash.xxh3_64_intdigest(problem.encode())
    return value
