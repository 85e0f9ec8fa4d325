"""Files that are one sample each: never cut, never appended to."""

from collections.abc import Iterator
from io import BytesIO

from forebay.errors import SourceChanged
from forebay.source import Failure, Part, SourceFile
from forebay.sources.failures import too_large
from forebay.sources.paths import check_readable, full_path
from forebay.sources.streams import OpenStream, judged_stream_at, stream_at

_PIECE = 1 << 20


def cut_whole(root: str, file: SourceFile, start: int, max_sample_bytes: int) -> Iterator[int]:
    """The end of a file; of a stream, after decompression."""
    check_readable(root, file)
    if start:
        raise SourceChanged(root, {file.path: "grew, but it is one sample and cannot be appended to"})
    if not file.stream:
        yield file.size
        return
    with judged_stream_at(full_path(root, file.path), file, 0, max_sample_bytes) as stream:
        while stream.read(_PIECE):
            pass
        yield stream.position


def read_whole(root: str, part: Part, max_sample_bytes: int, stream_at: OpenStream = stream_at) -> bytes | Failure:
    """All that a file holds, which must be as much as was planned; a failure where that is too much."""
    if part.stop > max_sample_bytes:
        return too_large(part.file.path, part.stop, max_sample_bytes)
    content = _decompressed(root, part, max_sample_bytes, stream_at) if part.file.stream else _stored(root, part)
    if len(content) != part.stop:
        size = f"{len(content):,}" if len(content) < part.stop else f"more than {part.stop:,}"
        how = f"has {size} bytes, {part.stop:,} were planned, and it is one sample"
        raise SourceChanged(root, {part.file.path: how})
    return content


def _stored(root: str, part: Part) -> bytes:
    with open(full_path(root, part.file.path), "rb") as file:
        return file.read(part.stop + 1)


def _decompressed(root: str, part: Part, max_sample_bytes: int, stream_at: OpenStream) -> bytes:
    content = BytesIO()
    with stream_at(full_path(root, part.file.path), part.file, 0, max_sample_bytes) as stream:
        while piece := stream.read(min(_PIECE, part.stop + 1 - content.tell())):
            content.write(piece)
    return content.getvalue()
