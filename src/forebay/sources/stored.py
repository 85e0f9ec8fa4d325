"""What holds of a file however its bytes are understood: what it weighs, and the digest of what is stored."""

import msgspec
import xxhash

from forebay.source import SourceFile
from forebay.sources.paths import full_path
from forebay.sources.weights import stream_weight

_HASH_BYTES = 1 << 22


def weigh(root: str, file: SourceFile) -> int:
    """How many bytes a file holds; of a stream, about how many."""
    return stream_weight(full_path(root, file.path), file) if file.stream else file.size


def scanned(root: str, file: SourceFile) -> SourceFile:
    """A stream with its digest, another file as it is."""
    return msgspec.structs.replace(file, digest=digest(root, file, 0, file.size)) if file.stream else file


def digest(root: str, file: SourceFile, start: int, stop: int) -> int:
    """A hash of a range of the stored bytes."""
    running = xxhash.xxh3_64()
    with open(full_path(root, file.path), "rb", buffering=0) as raw:
        raw.seek(start)
        while start < stop and (content := raw.read(min(_HASH_BYTES, stop - start))):
            running.update(content)
            start += len(content)
    value: int = running.intdigest()
    return value
