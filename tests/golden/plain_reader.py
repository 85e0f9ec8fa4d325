"""A reader of caches written from docs/format.md alone: it shares no code with forebay."""

import hashlib
import json
from itertools import pairwise

import lz4.block
import ml_dtypes
import numpy as np
import xxhash
import zstandard

DTYPES = {
    "BOOL": "?", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I8": "i1", "I16": "<i2", "I32": "<i4",
    "I64": "<i8", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F32": "<f4", "F64": "<f8",
}  # fmt: skip
TAGS = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "int8": "I8", "int16": "I16",
    "int32": "I32", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read_tensors(file):
    start = 8 + int.from_bytes(file[:8], "little")
    assert start % 4096 == 0
    header = json.loads(file[8:start])
    metadata = json.loads(header.pop("__metadata__")["forebay"])
    assert metadata["format_version"] == (1 if metadata["type"] == "chunk" else 2)
    tensors, end = {}, 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        raw = file[start + entry["data_offsets"][0] : start + end]
        tensors[name] = np.frombuffer(raw, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    assert start + end == len(file)
    return metadata, tensors


def read_chunk(file):
    """Metadata and columns: an array for a fixed column, (values, offsets) for a ragged one."""
    metadata, tensors = read_tensors(file)
    unsealed = canonical({**metadata, "check": ""})
    check = xxhash.xxh3_64_hexdigest(unsealed + tensors[".source"].tobytes() + tensors[".failures"].tobytes())
    assert metadata["check"] == check
    content, columns = xxhash.xxh3_128(), {}
    for column in metadata["columns"]:
        name, rows = column["name"], metadata["rows"]
        dtype = np.dtype(DTYPES[TAGS[column["dtype"]]])
        item = int(np.prod(column["shape"], dtype=np.int64)) * dtype.itemsize
        has_offsets = column["ragged"] or column["index"]
        size = column["rows_per_block"] or (64 if has_offsets else max(1, 65536 // max(1, item)))
        edges = [min(row, rows) for row in range(0, rows + size, size)] if rows else [0]
        offsets = tensors[f"{name}.offsets"] if has_offsets else np.arange(rows + 1)
        stored, pieces = tensors[name].tobytes(), []
        for block, (low, high) in enumerate(pairwise(edges)):
            first, last = int(offsets[low]), int(offsets[high])
            bounds = (first * item, last * item)
            if column["codec"] != "none":
                bounds = tensors[f"{name}.blocks"][block : block + 2].tolist()
            piece = stored[bounds[0] : bounds[1]]
            assert xxhash.xxh3_64_intdigest(piece) == tensors[f"{name}.sums"][block]
            pieces.append(unpack(column["codec"], piece, (last - first) * item))
        values = np.frombuffer(b"".join(pieces), dtype).reshape(int(offsets[-1]), *column["shape"])
        content.update(canonical([name, column["dtype"], column["shape"], column["ragged"], rows]))
        content.update(offsets.tobytes() if has_offsets else b"")
        content.update(values.tobytes())
        columns[name] = (values, offsets) if has_offsets else values
    assert content.hexdigest() == metadata["content"]
    return metadata, columns


def unpack(codec, piece, size):
    if codec == "none" or size == 0:
        return piece if codec == "none" else b""
    raw = lz4.block.decompress(piece, size) if codec == "lz4" else zstandard.decompress(piece)
    assert len(raw) == size
    return raw


def read_generation(file):
    metadata, tensors = read_tensors(file)
    assert metadata["type"] == "generation"
    assert tensors.pop(".digest").tobytes() == hashlib.sha256(file[:-32]).digest()
    return metadata, tensors


def read_layer(open_file, generation, layer):
    """(metadata, columns) of every listed chunk of a layer; `open_file` gives the bytes under a name."""
    metadata, table = generation
    mark = json.loads(metadata["recipes"][layer])["fingerprint"][:16]
    for row, chunk in enumerate(table[f"{layer}.chunk"]):
        file = open_file(f"layers/{layer}.{mark}/{chunk:06d}.safetensors")
        assert len(file) == table[f"{layer}.size"][row]
        head = file[: table[f"{layer}.head_size"][row]]
        assert xxhash.xxh3_128_digest(head) == table[f"{layer}.head"][row].tobytes()
        assert hashlib.sha256(file).digest() == table[f"{layer}.sha256"][row].tobytes()
        metadata, columns = read_chunk(file)
        assert bytes.fromhex(metadata["content"]) == table[f"{layer}.content"][row].tobytes()
        yield metadata, columns
