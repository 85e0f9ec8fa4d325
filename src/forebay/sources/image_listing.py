"""Which images there are below some paths, and what each is now; `walker` has the rule for folders and links."""

import errno
import os
import stat
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from forebay.source import SourceFile
from forebay.sources.image_sidecars import SIDECAR_SUFFIXES, sidecar_of
from forebay.sources.paths import full_path
from forebay.sources.walker import FoundFile, NamesIn, count_left_out, found_files

ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")

# Files that cannot be read are samples that fail: what is wrong stands in their etag.
TROUBLES = {
    "symlink-loop": "it is a link that leads back to itself",
    "not-found": "it is a link to nothing",
    "not-a-file": "it is not a regular file",
    "unreadable": "there is no permission to read it",
}
_TROUBLE_OF = {
    errno.ELOOP: "symlink-loop",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
}
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_MARK = "!"  # before a trouble; no etag of a sidecar is without a colon


def find_images(root: str, patterns: Sequence[str]) -> list[SourceFile]:
    """Every image that a pattern names, once, sorted by name."""
    found = found_files([full_path(root, pattern) for pattern in patterns], ENDINGS)
    looks = (_look(root, os.path.relpath(file.path, root), file.beside) for file in found)
    return sorted((look for look in looks if look is not None), key=lambda look: look.path)


def left_out_beside_images(root: str, patterns: Sequence[str], apart: str) -> Mapping[str, int]:
    """How many files of the folders are neither images nor sidecars of images, by suffix."""
    return count_left_out([full_path(root, pattern) for pattern in patterns], ENDINGS, apart, _is_sidecar)


def look_at_image(root: str, name: str) -> SourceFile:
    """One image as it is now; `FileNotFoundError` where it is gone."""
    file = _look(root, name, NamesIn(os.path.dirname(full_path(root, name))))
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full_path(root, name))
    return file


def trouble_with(file: SourceFile) -> str | None:
    """Why a file cannot be read at all, None where it can."""
    trouble = file.etag.removeprefix(_MARK)
    return trouble if trouble != file.etag and trouble in TROUBLES else None


class Sidecar(NamedTuple):
    """The sidecar that an image was looked at with."""

    path: str
    trouble: str | None


def sidecar_in(file: SourceFile) -> Sidecar | None:
    name, colon, state = file.etag.rpartition(":")
    path = os.path.join(os.path.dirname(file.path), name)
    return Sidecar(path, state if state in TROUBLES else None) if colon else None


def touched_ns(file: SourceFile) -> int:
    """When an image, or its sidecar, was written to last."""
    sidecar, state = sidecar_in(file), file.etag.rpartition(":")[2]
    return file.mtime_ns if sidecar is None or sidecar.trouble else max(file.mtime_ns, int(state.rpartition("-")[2]))


def stamp(root: str, file: SourceFile) -> str:
    """Ctime and inode of an image and of its sidecar: content that has another size or time put back changes them."""
    sidecar = sidecar_in(file)
    states = [state_of(full_path(root, path)) for path in (file.path, *([] if sidecar is None else [sidecar.path]))]
    return ",".join(f"{one.st_ctime_ns}:{one.st_ino}" for one in states if isinstance(one, os.stat_result))


def state_of(path: str) -> os.stat_result | str | None:
    """What the system says of a file, or the trouble with it; None where there is nothing of that name."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return "not-found" if os.path.islink(path) else None
        if error.errno not in _TROUBLE_OF:
            raise
        return _TROUBLE_OF[error.errno]
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
    """Whether a name ends as those of images do, in any case."""
    return name.lower().endswith(ENDINGS)


def _is_sidecar(file: FoundFile) -> bool:
    """Whether a file that is not an image may say something about one beside it."""
    stem, suffix = os.path.splitext(os.path.basename(file.path))
    if suffix not in SIDECAR_SUFFIXES:
        return False
    ends = ("", *ENDINGS, *map(str.upper, ENDINGS))
    return any(is_image(stem + end) and stem + end in file.beside for end in ends)
