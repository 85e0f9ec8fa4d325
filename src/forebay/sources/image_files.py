"""Image files as samples, each with the metadata of its sidecar."""

import errno
import os
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import msgspec
import xxhash

from forebay.file_table import FileTable
from forebay.source import (
    CHANGED_MEANWHILE,
    TOO_DEEP,
    Annotated,
    Failure,
    Listing,
    Part,
    PartDigest,
    Sample,
    Samples,
    SourceFile,
    Unit,
    files_changed,
    is_shallow,
    listing_of,
)
from forebay.sources.bucket_files import entries_of, read_object
from forebay.sources.opening import FILE_PROBLEMS, digest, file_as_it_is, full_path, read_planned, state_of
from forebay.sources.paths import BOM, MAX_IMAGE_BYTES, LocalFiles, checked_limit, look, named_below, too_large
from forebay.sources.walking import NamesIn, PassedOver, WalkedFile, list_objects, suffix_of, walk_files
from forebay.store.base import Entry, is_url

MOST_BYTES = 1 << 24  # of a sidecar
SIDECAR_SUFFIXES = (".json", ".txt")
_BETWEEN_TAGS = re.compile(r"[,\r\n]")
_NOT_IN_ETAGS = re.compile(r"[^0-9A-Za-z._-]")


class SidecarUnreadable(Exception):
    """A sidecar cannot be read or parsed.

    Its text is stored in chunks as the detail of a failure, and is part of digests: rewording it changes bytes.
    """


def sidecar_of(image: str, names: Container[str]) -> str | None:
    """The name of the sidecar of an image in its folder; the first of four candidates that exists.

    >>> sidecar_of("a.jpg", ["a.jpg", "a.json", "a.txt"])
    'a.json'
    """
    return next((name for name in _candidates(image) if name in names), None)


def _candidates(image: str) -> tuple[str, ...]:
    stem = os.path.splitext(image)[0]
    return f"{image}.json", f"{stem}.json", f"{image}.txt", f"{stem}.txt"


def parse_sidecar(name: str, content: bytes) -> dict[str, Any]:
    """The metadata in a sidecar: a JSON object, or tags separated by commas or newlines.

    >>> parse_sidecar("a.txt", b"cat, looking_left")
    {'tags': ['cat', 'looking_left']}
    """
    try:
        if name.endswith(".txt"):
            return {"tags": [tag for part in _BETWEEN_TAGS.split(content.decode("utf-8-sig")) if (tag := part.strip())]}
        metadata = msgspec.json.decode(content.removeprefix(BOM), type=dict[str, Any])
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {error}") from error
    except RecursionError as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}") from error
    if not is_shallow(metadata):
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}")
    return metadata


ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_MARK = "!"  # before a problem, as which a file is a sample that fails; the etag of a sidecar always has a colon


def find_images(root: str, patterns: Sequence[str], apart: str = "") -> Listing:
    """Every image that a pattern names, once, sorted by name, and how many files are neither images nor sidecars."""
    if is_url(root):
        return listing_of(_find_objects, root, tuple(patterns))
    others = PassedOver(apart, _is_sidecar)
    matching = walk_files([full_path(root, pattern) for pattern in patterns], ENDINGS, others)
    images = (_look(root, os.path.relpath(file.path, root), file.names) for file in matching)
    files = FileTable.of(image for image in images if image is not None)
    return Listing(files.by_path(), others.counts())


def _find_objects(root: str, patterns: Sequence[str]) -> Listing:
    """As `find_images`, by the listings alone, which also have the sidecars."""
    sidecars: dict[str, tuple[Entry, bool]] = {}

    def keep_sidecar(name: str, entry: Entry, is_named: bool) -> None:
        if name.endswith(SIDECAR_SUFFIXES):
            sidecars[name] = (entry, is_named or sidecars.get(name, (entry, False))[1])

    listing = list_objects(root, patterns, ENDINGS, decompressed=False, others_named=keep_sidecar)
    files, used = [], set[str]()
    for file in listing.files:
        if file.path in patterns:  # named by itself: its folder was not listed
            files.append(_look_at_object(root, file.path))
            continue
        sidecar = next(((name, sidecars[name][0]) for name in _sidecar_names(file.path) if name in sidecars), None)
        files.append(_as_image(file.path, Entry(file.path, file.size, file.etag), sidecar))
        used.update(name for name in _sidecar_names(file.path) if name in sidecars and sidecars[name][1])
    return Listing(files, Counter(listing.left_out) - Counter(map(suffix_of, used)))


def _look_at_object(root: str, name: str) -> SourceFile:
    names = (name, *_sidecar_names(name))
    image, *candidates = entries_of([full_path(root, each) for each in names])
    if image is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", full_path(root, name))
    sidecar = next(((at, entry) for at, entry in zip(names[1:], candidates, strict=True) if entry is not None), None)
    return _as_image(name, image, sidecar)


def _as_image(name: str, image: Entry, sidecar: tuple[str, Entry] | None) -> SourceFile:
    """An image in a bucket; its etag, `a.json:120-d41d8c+9e107d`, has those of its sidecar and of the image itself."""
    etag = clean_etag(image.etag)
    if sidecar is not None:
        path, entry = sidecar
        etag = f"{os.path.basename(path)}:{entry.size}-{clean_etag(entry.etag)}+{etag}"
    return SourceFile(path=name, size=image.size, etag=etag)


def clean_etag(etag: str) -> str:
    """Return an etag of a storage service that can be a part of a longer one: other characters become `_`."""
    return _NOT_IN_ETAGS.sub("_", etag)


def _sidecar_names(image: str) -> list[str]:
    folder, name = os.path.split(image)
    return [os.path.join(folder, each) for each in _candidates(name)]


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


def stamp(root: str, file: SourceFile) -> str:
    """Ctime and inode of an image and its sidecar, which change even if an edit restores size and mtime.

    Empty for an image in a bucket, whose etag does that.
    """
    if is_url(root):
        return ""
    sidecar = sidecar_in(file)
    states = [state_of(full_path(root, path)) for path in (file.path, *([] if sidecar is None else [sidecar.path]))]
    return ",".join(f"{one.st_ctime_ns}:{one.st_ino}" for one in states if isinstance(one, os.stat_result))


def _look(root: str, name: str, names: Container[str]) -> SourceFile | None:
    path = full_path(root, name)
    state = state_of(path)
    if state is None:
        return None
    if isinstance(state, str):
        return SourceFile(path=name, size=0, etag=f"{_MARK}{state}")
    file = file_as_it_is(name, state)
    sidecar = sidecar_of(os.path.basename(name), names)
    if sidecar is None:
        return file
    sidecar_state = state_of(os.path.join(os.path.dirname(path), sidecar))
    if sidecar_state is None:
        return file
    known = sidecar_state if isinstance(sidecar_state, str) else f"{sidecar_state.st_size}-{sidecar_state.st_mtime_ns}"
    return msgspec.structs.replace(file, etag=f"{sidecar}:{known}")


def _is_sidecar(file: WalkedFile) -> bool:
    """Whether a file may be the sidecar of an image in the same folder."""
    stem, suffix = os.path.splitext(os.path.basename(file.path))
    if suffix not in SIDECAR_SUFFIXES:
        return False
    ends = ("", *ENDINGS, *map(str.upper, ENDINGS))
    return any((stem + end).lower().endswith(ENDINGS) and stem + end in file.names for end in ends)


Labels = Literal["sidecar", "folder"]


@dataclass(frozen=True, slots=True)
class ImageSource(LocalFiles):
    """Every image below some paths, named relative to `root`, with the metadata of its sidecar.

    Each file is one sample of weight 1, because rows of images have similar sizes although their files do not. An image
    with a changed sidecar is a changed image. With `labels="folder"` the tag of an image is the name of its folder. A
    file of more than `max_sample_bytes` fails without being read.
    """

    kind: ClassVar[str] = "images"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes", "labels")

    max_sample_bytes: int = MAX_IMAGE_BYTES
    labels: Labels = "sidecar"

    def listing(self, apart: str = "") -> Listing:
        return find_images(self.root, self.patterns, apart)

    def look(self, path: str) -> SourceFile:
        if is_url(self.root):
            return _look_at_object(self.root, path)
        full = full_path(self.root, path)
        file = _look(self.root, path, NamesIn(os.path.dirname(full)))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full)
        return file

    def touched_ns(self, file: SourceFile) -> int:
        """The newer modification time of an image and its sidecar; 0 in a bucket."""
        sidecar = sidecar_in(file)
        if not file.mtime_ns or sidecar is None or sidecar.problem:
            return file.mtime_ns
        return max(file.mtime_ns, int(file.etag.rpartition("-")[2]))

    def stamp(self, file: SourceFile) -> str:
        return stamp(self.root, file)

    def edited_beside(self, known: SourceFile, current: SourceFile) -> str:
        sidecar = sidecar_in(current) or sidecar_in(known)
        is_same_image = (known.size, known.mtime_ns) == (current.size, current.mtime_ns) and not problem_with(current)
        if is_url(self.root):
            is_same_image = is_same_image and known.etag.rpartition("+")[2] == current.etag.rpartition("+")[2]
        return sidecar.path if sidecar is not None and is_same_image and known.etag != current.etag else ""

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter(range(start + 1, 2))

    @property
    def reads_planned_files(self) -> bool:
        """Objects arrive with their etags. Looking at one would ask for it and for four possible sidecars."""
        return is_url(self.root)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        file = part.file
        if not is_url(self.root) and not preview:
            self.check_beside(file, self.look(file.path))
        content = read_image(self.root, file, self.max_sample_bytes)
        if isinstance(content, Failure):
            yield content
            return
        sidecar = self._sidecar_content(file)
        if digest is not None:
            digest.value = _with_sidecar(xxhash.xxh3_64_intdigest(content), file, sidecar)
        try:
            yield Sample(file.path, Annotated(content, self._metadata(file, sidecar)))
        except SidecarUnreadable as error:
            yield Failure(file.path, "bad-sidecar", str(error))

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        for file in files:
            try:
                yield self._metadata(file, self._sidecar_content(file))
            except SidecarUnreadable:
                continue  # its sample is recorded as a failure

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return _with_sidecar(image_digest(self.root, file), file, self._sidecar_content(file))

    def check_beside(self, planned: SourceFile, current: SourceFile) -> None:
        before, now = sidecar_in(planned), sidecar_in(current)
        if (before and before.path) != (now and now.path):
            how = f"has {_named(now)}, but {_named(before)} was planned"
            raise files_changed(self.root, {planned.path: how})

    def _metadata(self, file: SourceFile, content: "bytes | SidecarUnreadable") -> dict[str, Any]:
        """The metadata of an image from its sidecar."""
        if isinstance(content, SidecarUnreadable):
            raise content
        sidecar = sidecar_in(file)
        metadata = {} if sidecar is None else parse_sidecar(os.path.basename(sidecar.path), content)
        if self.labels == "folder":
            folder = os.path.basename(os.path.dirname(file.path))
            return {**metadata, "tags": [folder] if folder else []}
        return metadata

    def _sidecar_content(self, file: SourceFile) -> "bytes | SidecarUnreadable":
        """The bytes of an image's sidecar (empty without one), or why they cannot be read."""
        sidecar = sidecar_in(file)
        if sidecar is None:
            return b""
        name = os.path.basename(sidecar.path)
        if sidecar.problem is not None:
            return SidecarUnreadable(f"'{name}' is no sidecar: {FILE_PROBLEMS[sidecar.problem]}")
        try:
            size, _, state = file.etag.rpartition(":")[2].partition("+")[0].partition("-")
            planned = SourceFile(sidecar.path, int(size))  # without its time: an equal one may have replaced it
            content = _first_bytes(self.root, planned, MOST_BYTES + 1, state)
        except PermissionError:
            return SidecarUnreadable(f"'{name}' is no sidecar: {FILE_PROBLEMS['unreadable']}")
        if len(content) > MOST_BYTES:
            return SidecarUnreadable(f"'{name}' is no sidecar: it has more than {MOST_BYTES:,} bytes")
        return content


def images(
    *paths: str | os.PathLike[str],
    root: str | None = None,
    labels: Labels = "sidecar",
    max_sample_bytes: int = MAX_IMAGE_BYTES,
) -> ImageSource:
    """The images of some folders (and all below them), globs or paths, on this machine or in a bucket, with sidecars.

    `labels="folder"` is for a folder per class, `photos/cat/1.jpg`: the tag of an image is the name of its folder.

    >>> images("/data/photos", "/data/more/*.png").patterns
    ('photos', 'more/*.png')
    """
    if labels not in get_args(Labels):
        raise ValueError(f"labels must be 'sidecar' or 'folder' (got {labels!r})")
    return ImageSource(*named_below(paths, root), checked_limit(max_sample_bytes), labels)


def _with_sidecar(image: int, file: SourceFile, sidecar_content: "bytes | SidecarUnreadable") -> int:
    """The digest of an image and of its sidecar or manifest line."""
    sidecar = sidecar_in(file)
    if sidecar is None:
        return image
    kind = os.path.splitext(sidecar.path)[1].encode()  # the same bytes mean different things in .json and .txt
    content = (
        sidecar_content
        if isinstance(sidecar_content, bytes)
        else str(sidecar_content).encode("utf-8", "surrogateescape")
    )
    value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + kind + content)
    return value


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
        content = _first_bytes(root, file, file.size + 1, file.etag.rpartition("+")[2])
    except PermissionError as error:
        return Failure(file.path, "unreadable", f"{FILE_PROBLEMS['unreadable']} ({error.strerror})")
    if len(content) != file.size:
        size = look(root, file.path).size
        raise files_changed(root, {file.path: f"has {size:,} bytes, {file.size:,} were planned"})
    return content


def _first_bytes(root: str, file: SourceFile, count: int, etag: str) -> bytes:
    """The first bytes of a file; `SourceChanged` if it is not as planned, or an object has another etag."""
    if not is_url(root):
        return read_planned(full_path(root, file.path), file, count)
    try:
        content, object_etag = read_object(full_path(root, file.path), count)
    except FileNotFoundError as error:
        raise files_changed(root, {file.path: CHANGED_MEANWHILE}) from error
    if clean_etag(object_etag) != etag:
        raise files_changed(root, {file.path: CHANGED_MEANWHILE})
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
