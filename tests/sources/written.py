"""Files for sources to read, and all that a source gives."""

import gzip
from collections.abc import Callable
from pathlib import Path

import zstandard

from forebay.source import Failure, Sample, Source
from forebay.testing.source import parts_of

STORED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".zst": lambda content: zstandard.compress(content, 1),
}


def write(folder: Path, name: str, content: bytes) -> Path:
    """A file whose name says how it is stored."""
    path = folder / name
    path.write_bytes(STORED[path.suffix if path.suffix in STORED else ""](content))
    return path


def read_all(source: Source, first: int = 1 << 40, every: int = 1 << 40) -> list[Sample | Failure]:
    return [one for part in parts_of(source, first, every) for one in source.read(part)]


def texts(source: Source, first: int = 1 << 40, every: int = 1 << 40) -> list[str]:
    """The documents of a source that has no bad ones."""
    seen = read_all(source, first, every)
    assert not [one for one in seen if isinstance(one, Failure)]
    return [one.data for one in seen if isinstance(one, Sample)]
