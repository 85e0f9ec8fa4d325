"""Read caches of the old `.pt` format: one `cache.pt`, or a folder of `encodings.pt`, `lune.pt`, `sol.pt`.

    {"name": str,
     "encodings": {"latents": [N, 16, 64, 64], "t5_embeds": [N, 128, 768], "clip_pooled": [N, 768]},
     "lune": {"features": [N, 10, 1280], "t_buckets": [10]},                                            optional
     "sol": {"stats": [N, 10, 4], "spatial": [N, 10, 8, 8], "t_buckets": [10]}}                         optional

They are pickles. Only tensors and plain containers are unpickled (`weights_only`), and tensors are mapped, not read. A
few bytes of pickle can still expand to terabytes or years of work, so entries, index and tensors are first compared
with the size of the file.
"""

import io
import os
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forebay.errors import OldCacheInvalid
from forebay.teachers import timesteps

PARTS: dict[str, tuple[str, ...]] = {
    "encodings": ("latents", "t5_embeds", "clip_pooled"),
    "lune": ("features",),
    "sol": ("stats", "spatial"),
}
BUCKETS = "t_buckets"
_TIMED = ("lune", "sol")  # parts whose second axis is the bucket
_LARGEST_INDEX = 1 << 20  # bytes of pickle; a cache has some 2,000
_LEGACY_PICKLES = 4  # magic number, version, machine, content
_CONTAINERS = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "LIST", "EMPTY_LIST", "FROZENSET"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class OldCache:
    """The tensors of an old cache by part and name, (rows, …) each."""

    path: str
    name: str
    rows: int
    parts: Mapping[str, Mapping[str, Tensor]]

    def buckets(self, part: str) -> tuple[float, ...]:
        """Return the buckets of a part; those of the default grid exactly, not as rounded in the file."""
        written = self.parts[part][BUCKETS]
        usual = torch.tensor(timesteps.BUCKETS, dtype=torch.float64)
        step = torch.finfo(written.dtype).eps
        if written.shape == usual.shape and ((written.double() - usual).abs() <= step * usual).all():
            return timesteps.BUCKETS
        return tuple(written.double().tolist())


def read_old_cache(path: str | os.PathLike[str]) -> OldCache:
    """Open an old cache and check it against the format."""
    path = os.fspath(path)
    found = {_part(file): _loaded(file) for file in part_files(path)} if os.path.isdir(path) else _loaded(path)
    unknown = sorted(map(str, found.keys() - {"name", *PARTS}))
    if unknown:
        raise OldCacheInvalid(path, f"it has the unknown entries {unknown}; known are name, {', '.join(PARTS)}")
    parts = {part: _checked(path, part, found[part]) for part in PARTS if found.get(part) is not None}
    rows = {f"{part}.{name}": len(parts[part][name]) for part in parts for name in PARTS[part]}
    if not any(rows.values()):
        raise OldCacheInvalid(path, f"it has no rows of any of {', '.join(PARTS)}")
    if len(set(rows.values())) > 1:
        raise OldCacheInvalid(path, "its parts have different numbers of rows: " + _listed(rows))
    name = found.get("name") or os.path.basename(path.rstrip("/")).removesuffix(".pt")
    return OldCache(path, str(name), next(iter(rows.values())), parts)


def part_files(path: str) -> list[str]:
    """Return the files of an old cache: itself, or those of its parts in a folder."""
    if not os.path.isdir(path):
        return [path]
    names = [f"{part}.pt" for part in PARTS]
    found = [file for file in (os.path.join(path, name) for name in names) if os.path.exists(file)]
    if not found:
        raise OldCacheInvalid(path, f"the folder has none of {', '.join(names)}; pass the file itself")
    return found


def _part(file: str) -> str:
    return os.path.basename(file).removesuffix(".pt")


def _reason(error: Exception) -> str:
    """Return what torch found, without its advice to open the file anyway."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it names {named[1]}" if named else str(error).strip().partition("\n")[0] or type(error).__name__


def _loaded(path: str) -> dict[str, Any]:
    try:
        _check_archive(path)
        # Files of very old versions of torch are not archives, and cannot be mapped.
        found = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except FileNotFoundError as error:
        raise OldCacheInvalid(path, "there is no such file") from error
    except (OSError, MemoryError, OldCacheInvalid):
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        problem = f"it holds more than tensors, or is not a file of torch.save ({_reason(error)})"
        raise OldCacheInvalid(path, problem) from error
    if not isinstance(found, dict):
        raise OldCacheInvalid(path, f"it holds a {type(found).__name__}, not a dict")
    return found


def _check_archive(path: str) -> None:
    """Raise for a file that unpacks to more than its size, or takes long to unpickle, before torch reads it."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            _check_index(path, io.BytesIO(file.read(_LARGEST_INDEX)), _LEGACY_PICKLES)
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > os.path.getsize(path):
            raise OldCacheInvalid(path, "its entries are compressed or overlap, which torch.save never writes")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                if entry.file_size > _LARGEST_INDEX:
                    raise OldCacheInvalid(path, f"its index is longer than {_LARGEST_INDEX:,} bytes")
                _check_index(path, io.BytesIO(archive.read(entry)), 1)


def _check_index(path: str, pickles: io.BytesIO, count: int) -> None:
    """Raise for a pickle that reuses a list or tuple: a few nested levels of that would take for ever to process."""
    for _ in range(count):
        made: dict[Any, str] = {}  # number in the memo -> the opcode that made its value
        last = ""
        for code, argument, _ in pickletools.genops(pickles):
            if "PUT" in code.name or code.name == "MEMOIZE":
                made[len(made) if argument is None else argument] = last
            elif ("GET" in code.name and made.get(argument) in _CONTAINERS) or code.name == "DUP":
                raise OldCacheInvalid(path, "it uses a list or tuple more than once, which no cache does")
            last = code.name


def _checked(path: str, part: str, found: Any) -> dict[str, Tensor]:
    """Return a part; raise unless it has exactly its tensors, with matching shapes."""
    names = (*PARTS[part], *([BUCKETS] if part in _TIMED else []))
    held = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
    if held != sorted(names):
        raise OldCacheInvalid(path, f"'{part}' holds {held}; {sorted(names)} are expected")
    for name in names:
        if not _is_plain(found[name]):
            raise OldCacheInvalid(path, f"'{part}.{name}' is not a dense tensor of floats with rows")
        if found[name].nbytes > found[name].untyped_storage().nbytes():
            raise OldCacheInvalid(path, f"'{part}.{name}' declares more values than the file holds")
    if part in _TIMED:
        _check_buckets(path, part, found)
    return {name: found[name] for name in names}


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _FLOATS:
        return False
    return value.dim() > 0 and (value.numel() > 0 or len(value) == 0)


def _check_buckets(path: str, part: str, found: Mapping[str, Tensor]) -> None:
    buckets = found[BUCKETS]
    inside = (buckets >= 0) & (buckets <= 1)
    if buckets.dim() != 1 or not len(buckets) or not (buckets.diff() > 0).all() or not inside.all():
        raise OldCacheInvalid(path, f"'{part}.{BUCKETS}' does not rise from bucket to bucket, between 0 and 1")
    for name in PARTS[part]:
        if found[name].dim() < 2 or found[name].shape[1] != len(buckets):
            shape = list(found[name].shape)
            raise OldCacheInvalid(
                path, f"'{part}.{name}' is {shape}; its second axis is not the {len(buckets)} buckets"
            )


def _listed(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in rows.items())
