"""Which images there are below some paths, and what each of them is now.

A folder stands for all images below it, hidden ones left out. Links to folders are followed, except where they lead
back to a folder that they are in.
"""

import errno
import glob
import os
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from forebay.errors import SourceNotFound
from forebay.source import SourceFile
from forebay.sources.image_sidecars import NamesIn, sidecar_of
from forebay.sources.paths import full_path, names_ending

ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")

# Files that cannot be read are samples that fail: what is wrong stands in their etag.
TROUBLES = {
    "symlink-loop": "it is a link that leads back to itself",
    "not-found": "it is a link to nothing",
    "not-a-file": "it is no regular file",
    "unreadable": "there is no permission to read it",
}
_TROUBLE_OF = {
    errno.ELOOP: "symlink-loop",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
}
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
_MARK = "!"  # before a trouble; no etag of a sidecar is without a colon

FolderId = tuple[int, int]
Wanted = Callable[[str], bool]
Found = tuple[str, Container[str]]  # a path, and the names in its folder


def find_images(root: str, patterns: Sequence[str]) -> list[SourceFile]:
    """Every image that a pattern names, once, sorted by name."""
    found: dict[str, SourceFile] = {}
    for pattern in patterns:
        matches = False
        for path, names in _expand(full_path(root, pattern)):
            matches = True
            file = _look(root, os.path.relpath(path, root), names)
            if file is not None:
                found[file.path] = file
        if not matches:
            raise SourceNotFound(full_path(root, pattern), _why_none(full_path(root, pattern)))
    return [found[name] for name in sorted(found)]


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


def _why_none(pattern: str) -> str:
    """What to say where nothing was found: that nothing is there, or that nothing there is called an image."""
    if not os.path.isdir(pattern) and not any(glob.iglob(pattern)):
        return "no file matches"
    return f"no file there ends in {', '.join(ENDINGS)}, in any case"


def _expand(pattern: str) -> Iterator[Found]:
    if os.path.isdir(pattern):
        yield from _below(pattern, is_image)
    elif os.path.lexists(pattern):
        yield pattern, NamesIn(os.path.dirname(pattern))
    else:
        yield from _globbed(pattern)


def _globbed(pattern: str) -> Iterator[Found]:
    meant = _anything if names_ending(pattern) else is_image
    parts = pattern.split(os.sep)
    if "**" in parts:
        at = parts.index("**")
        yield from _through_folders(os.sep.join(parts[:at]), parts[at:], meant)
        return
    for path in glob.iglob(pattern):
        if os.path.isdir(path):
            yield from _below(path, is_image)
        elif meant(path):
            yield path, NamesIn(os.path.dirname(path))


def _through_folders(above: str, pattern: list[str], meant: Wanted) -> Iterator[Found]:
    """What `**` names. Python's own follows links that lead back, again and again."""
    for top in filter(os.path.isdir, glob.iglob(above)):
        for path, names in _below(top, _anything):
            inside = os.path.relpath(path, top).split(os.sep)
            in_named_folder = any(_fits(inside[:count], pattern) for count in range(1, len(inside)))
            if (meant(path) and _fits(inside, pattern)) or (is_image(path) and in_named_folder):
                yield path, names


def _below(top: str, wanted: Wanted) -> Iterator[Found]:
    waiting: list[tuple[str, frozenset[FolderId]]] = [(top, frozenset([_folder_id(top)]))]
    while waiting:
        folder, above = waiting.pop()
        with os.scandir(folder) as scan:
            entries = [entry for entry in scan if not entry.name.startswith(".") and entry.name != "__pycache__"]
        names = {entry.name for entry in entries}
        for entry in entries:
            if _is_folder(entry):
                inside = _folder_id(entry.path)
                if inside not in above:
                    waiting.append((entry.path, above | {inside}))
            elif wanted(entry.name):
                yield entry.path, names


def is_image(name: str) -> bool:
    """Whether a name ends as those of images do, in any case."""
    return name.lower().endswith(ENDINGS)


def _anything(name: str) -> bool:
    return True


def _fits(names: list[str], pattern: list[str]) -> bool:
    """Whether a path is what a glob says, both as lists of names.

    >>> _fits(["cats", "old", "a.png"], ["**", "*.png"]), _fits(["cats", "a.png"], ["**", "dogs"])
    (True, False)
    """
    if not pattern:
        return not names
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or (bool(names) and _fits(names[1:], pattern))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle; whatever is the matter with an image is told when it is looked at
        return False


def _folder_id(path: str) -> FolderId:
    status = os.stat(path)
    return status.st_dev, status.st_ino
