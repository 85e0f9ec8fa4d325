"""Index files (generations, plan segments, identities, constants) that end with their own digest and HMAC tag.

header, padded to a multiple of 4096
tensors   widest items first, then by name
.digest   SHA-256 of every byte before it
.hmac     HMAC-SHA256 of every byte before it, only if a key is in use
"""

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.columns import Array
from forebay.errors import ForebayError, FormatTooNew, IndexCorrupt, KeyRefused, NotForebay
from forebay.format.tensors import Header, as_bytes, encode_header, parse_header, tag_of
from forebay.store.base import Buffer

VARIABLE = "FOREBAY_HMAC_KEY"
MIN_BYTES = 16  # of a key to sign with


def hmac_key() -> bytes | None:
    """The key in the environment, None if not set. An empty key is an error: a script may have lost its secret."""
    value = os.environ.get(VARIABLE)
    if value == "":
        raise ForebayError(f"the environment variable {VARIABLE} is set but empty; set it to the key, or unset it")
    return None if value is None else os.fsencode(value)


def short_key_note(key: bytes | None) -> tuple[str, ...]:
    """A warning about a key that is too short."""
    if key is None or len(key) >= MIN_BYTES:
        return ()
    return (
        f"{VARIABLE} has only {len(key)} bytes and is easy to guess; change it with `forebay rekey` to {MIN_BYTES} or "
        f"more",
    )


def tag(key: bytes, buffers: Sequence[Buffer]) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for buffer in buffers:
        code.update(buffer)
    return code.digest()


def same_tag(found: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(found, expected)


MAX_INDEX_BYTES = 8 << 30  # a hundred million source files; a sparse file can have any size


def seal(metadata: dict[str, Any], tensors: Mapping[str, Array], key: bytes | None = None) -> list[Buffer]:
    """Encode an index file, as buffers."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))  # keeps all aligned
    entries = [(name, tag_of(array), array.shape, array.nbytes) for name, array in ordered.items()]
    entries.append((".digest", "U8", (32,), 32))
    if key is not None:
        entries.append((".hmac", "U8", (32,), 32))
    buffers: list[Buffer] = [encode_header(metadata, entries), *map(as_bytes, ordered.values())]
    buffers.append(_sha256(buffers))
    if key is not None:
        buffers.append(tag(key, buffers))
    return buffers


def unseal(
    view: memoryview, root: str, where: str, kind: str, key: bytes | None = None, kinds: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Check the digest, and with a key the tag, of an index file; return its metadata and tensors.

    `kinds` are other types that are accepted.
    """
    header = _checked_header(view, root, where)
    tagged = header.tensors.get(".hmac")
    if tagged is None and key is not None:
        raise KeyRefused(
            root,
            where,
            f"it has no tag, but {VARIABLE} is set; `forebay repair` returns to the newest generation with a valid "
            f"tag, and `forebay rekey` signs a cache that never had a key, if you trust the folder",
        )
    if tagged is not None:
        if key is None:
            raise KeyRefused(root, where, f"it is tagged; set {VARIABLE} to the key it was published with")
        if not same_tag(bytes(view[tagged.start : tagged.stop]), tag(key, [view[: tagged.start]])):
            raise KeyRefused(root, where, f"its tag was not made with the key in {VARIABLE}")
    if header.metadata.get("type") not in (kind, *kinds):
        raise IndexCorrupt(root, where, f"it is a {header.metadata.get('type')}, not a {kind}")
    arrays = {name: tensor.array(view) for name, tensor in header.tensors.items() if not name.startswith(".")}
    return header.metadata, arrays


def is_whole(view: memoryview) -> bool:
    """Whether a file ends with its own digest, in any version of the format."""
    ends = (len(view) - 32, len(view) - 64)  # without a tag, with one
    return any(end > 0 and bytes(view[end : end + 32]) == _sha256([view[:end]]) for end in ends)


def _checked_header(view: memoryview, root: str, where: str) -> Header:
    if len(view) > MAX_INDEX_BYTES:
        raise IndexCorrupt(root, where, f"it has {len(view):,} bytes; an index file has at most {MAX_INDEX_BYTES:,}")
    try:
        header = parse_header(view, where)
    except FormatTooNew:
        raise
    except NotForebay as error:
        raise IndexCorrupt(root, where, error.problem) from error
    digest = header.tensors.get(".digest")
    trailer = [name for name in header.tensors if name.startswith(".")]
    if digest is None or digest.shape != (32,) or list(header.tensors)[-len(trailer) :] != trailer:
        raise IndexCorrupt(root, where, "it does not end with a digest")
    if bytes(view[digest.start : digest.stop]) != _sha256([view[: digest.start]]):
        raise IndexCorrupt(root, where, "its bytes do not match its digest")
    if trailer not in ([".digest"], [".digest", ".hmac"]):
        raise IndexCorrupt(root, where, f"it ends with {trailer}")
    return header


def _sha256(buffers: list[Buffer]) -> bytes:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()
