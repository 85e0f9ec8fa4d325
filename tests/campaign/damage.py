"""Every kind of damage to every kind of file: what a disk, a careless script or a wrong copy does to a cache."""

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forebay.store.owners import this_host

Damage = Callable[[random.Random, Path, Path], None]  # draw, the file, the root of another cache


@dataclass(frozen=True, slots=True)
class Done:
    """A damage that was done: its name, the key it was done to, and the kind of file that is."""

    name: str
    key: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} {self.key}"


def cache_files(root: Path) -> list[Path]:
    """Every file of a cache, also what dead builders left, in a fixed order."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def leave_behind(draw: random.Random, root: Path) -> None:
    """What dead builders leave: claims, temporary files, chunks and identities that no generation lists."""
    chunk = next(path for path in sorted((root / "layers").glob("*/[0-9]*.safetensors")))
    layer = chunk.parent.name
    dead = f"{this_host()}-4194300-1"
    (root / "claims" / layer).mkdir(parents=True, exist_ok=True)
    claim = json.dumps({"owner": dead, "host": "here", "pid": 4194300})
    for name in (f"{layer}/000000", f"{layer}/000001", "plan", "publish"):
        (root / "claims" / f"{name}.json").write_text(claim)
    (root / "builders").mkdir(exist_ok=True)
    (root / "builders" / f"{dead}.json").write_text(json.dumps({"beat": 3, "host": "here", "pid": 4194300}))
    for folder in (chunk.parent, root / "generations", root / "plan"):
        (folder / f".tmp-{dead}-{draw.randrange(1 << 32):08x}").write_bytes(chunk.read_bytes()[: draw.randrange(9000)])
    (root / "identities").mkdir(exist_ok=True)
    (root / "identities" / f"000000.{draw.randrange(1 << 64):016x}.safetensors").write_bytes(b"left")


def damage_file(draw: random.Random, root: Path, other: Path) -> Done:
    """Do one damage to one file of a cache, chosen by the draw."""
    files = cache_files(root)
    kinds = sorted({_kind(root, each) for each in files})
    kind = draw.choice(kinds)  # a generation as often as a chunk, though there are fewer
    return damage_one(draw, root, draw.choice([each for each in files if _kind(root, each) == kind]), other)


def damage_one(draw: random.Random, root: Path, path: Path, other: Path) -> Done:
    """Do one damage to this file."""
    name = draw.choice(sorted(DAMAGES))
    key = str(path.relative_to(root))
    done = Done(name, key, _kind(root, path))
    DAMAGES[name](draw, path, other / key)
    return done


def _kind(root: Path, path: Path) -> str:
    parts = path.relative_to(root).parts
    if path.name.startswith(".tmp-"):
        return "leftover"
    if parts[0] != "layers":
        return parts[0]
    return "chunks" if path.stem[:6].isdigit() else path.stem


def _flip(draw: random.Random, path: Path, other: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(draw.choice((1, 1, 1, 8))):
            at = draw.randrange(max(1, size))
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))


def _flip_early(draw: random.Random, path: Path, other: Path) -> None:
    """In the header, where most of what is parsed lies."""
    with path.open("r+b") as file:
        at = draw.randrange(min(700, max(1, path.stat().st_size)))
        file.seek(at)
        byte = file.read(1) or b"\0"
        file.seek(at)
        file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))


def _truncate(draw: random.Random, path: Path, other: Path) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def _empty(draw: random.Random, path: Path, other: Path) -> None:
    os.truncate(path, 0)


def _extend(draw: random.Random, path: Path, other: Path) -> None:
    with path.open("ab") as file:
        file.write(draw.choice((b"\0", b"\n", draw.randbytes(1 + draw.randrange(5000)))))


def _zero_page(draw: random.Random, path: Path, other: Path) -> None:
    size = path.stat().st_size
    start = draw.randrange(0, max(1, size), 4096)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(min(4096, size - start)))


def _noise(draw: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(draw.randbytes(draw.randrange(1, 9000)))


def _delete(draw: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def _neighbor(draw: random.Random, path: Path, other: Path) -> None:
    """The bytes of another file of the same folder."""
    beside = sorted(each for each in path.parent.iterdir() if each.is_file() and each != path)
    if beside:
        path.write_bytes(draw.choice(beside).read_bytes())
    else:
        os.truncate(path, 0)


def _other_cache(draw: random.Random, path: Path, other: Path) -> None:
    """The file of the same name of another cache."""
    path.write_bytes(other.read_bytes() if other.is_file() else b"other")


def _directory(draw: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(draw: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def _fifo(draw: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _stray(draw: random.Random, path: Path, other: Path) -> None:
    """A file beside it whose name is almost one of ours."""
    names = ("0000001.safetensors", "٠٠٠٠٠١.safetensors", "000001.safetensors~", "00000².safetensors", ".DS_Store")
    name = draw.choice((*names, "999999.safetensors", f"copy of {path.name}"))
    if not os.path.lexists(path.parent / name):
        (path.parent / name).write_bytes(path.read_bytes() if draw.random() < 0.5 else b"stray")


def _nested(draw: random.Random, path: Path, other: Path) -> None:
    """A backup of it in a folder beside it."""
    (path.parent / "backup").mkdir(exist_ok=True)
    with suppress(OSError):
        shutil.copy(path, path.parent / "backup" / path.name)


def _newer(draw: random.Random, path: Path, other: Path) -> None:
    """Written by a forebay of the future."""
    content = path.read_bytes()
    for now, then in (
        (b'format_version\\":2', b'format_version\\":9'),
        (b'"format_version": 2', b'"format_version": 9'),
    ):
        content = content.replace(now, then)
    path.write_bytes(content)


DAMAGES: dict[str, Damage] = {
    "flip": _flip,
    "flip-early": _flip_early,
    "truncate": _truncate,
    "empty": _empty,
    "extend": _extend,
    "zero-page": _zero_page,
    "noise": _noise,
    "delete": _delete,
    "neighbor": _neighbor,
    "other-cache": _other_cache,
    "directory": _directory,
    "dangling": _dangling,
    "fifo": _fifo,
    "stray": _stray,
    "nested": _nested,
    "newer": _newer,
}
