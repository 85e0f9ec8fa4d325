"""Files that are one sample each: never cut, never appended to."""

from collections.abc import Iterator

from forebay.errors import SourceChanged
from forebay.source import Part, SourceFile
from forebay.sources.paths import full_path
from forebay.sources.streams import OpenStream, judged_stream_at, stream_at

_PIECE = 1 << 20


def cut_whole(root: str, file: SourceFile, start: int) -> Iterator[int]:
    """The end of a file; of a stream, after decompression."""
    if start:
        raise SourceChanged(root, {file.path: "grew, but it is one sample and cannot be appended to"})
    if not file.stream:
        yield file.size
        return
    with judged_stream_at(full_path(root, file.path), file, 0) as stream:
        while stream.read(_PIECE):
            pass
        yield stream.position


def read_whole(root: str, part: Part, stream_at: OpenStream = stream_at) -> bytes:
    """All that a file holds, which must be as much as was planned."""
    content = _decompressed(root, part, stream_at) if part.file.stream else _stored(root, part.file.path)
    if len(content) != part.stop:
        how = f"has {len(content):,} bytes, {part.stop:,} were planned, and it is one sample"
        raise SourceChanged(root, {part.file.path: how})
    return content


def _stored(root: str, path: str) -> bytes:
    with open(full_path(root, path), "rb") as file:
        return file.read()


def _decompressed(root: str, part: Part, stream_at: OpenStream) -> bytes:
    with stream_at(full_path(root, part.file.path), part.file, 0) as stream:
        return b"".join(iter(lambda: stream.read(_PIECE), b""))
