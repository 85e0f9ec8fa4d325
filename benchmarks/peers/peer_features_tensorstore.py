"""TensorStore over zarr v3 arrays, uncompressed: a row or a bucket per chunk, alone or in shards."""

import os

import numpy as np
import tensorstore as ts
from feature_harness import BUCKETS, DIM, Pairs, main, pair_index

# A bucket per chunk without shards would be a file for each of rows × 10: that is no way to keep features.
LAYOUTS = {
    "row per chunk": ((1, BUCKETS, DIM), False),
    "row per chunk, sharded": ((1, BUCKETS, DIM), True),
    "bucket per chunk, sharded": ((1, 1, DIM), True),
}
SHARD_ROWS = 500
WRITTEN_ROWS = 500


def write(features: np.ndarray, folder: str) -> None:
    for number, (chunk, sharded) in enumerate(LAYOUTS.values()):
        store = ts.open(_spec(folder, number, sharded, chunk, len(features)), create=True).result()
        for first in range(0, len(features), WRITTEN_ROWS):
            store[first : first + WRITTEN_ROWS].write(features[first : first + WRITTEN_ROWS]).result()


def layouts(folder: str) -> dict[str, Pairs]:
    found = {}
    for number, name in enumerate(LAYOUTS):
        context = ts.Context({"cache_pool": {"total_bytes_limit": 1 << 30}})  # holds all of it
        kept = {"driver": "file", "path": _path(folder, number)}
        spec = {"driver": "zarr3", "kvstore": kept, "recheck_cached_data": False}
        found[name] = _pairs(ts.open(spec, context=context, read=True).result())
    return found


def _pairs(store: ts.TensorStore) -> Pairs:
    return lambda rows, lower: store[pair_index(rows, lower)].read().result()


def _path(folder: str, number: int) -> str:
    return os.path.join(folder, str(number)) + "/"


def _spec(folder: str, number: int, sharded: bool, chunk: tuple[int, ...], rows: int) -> dict[str, object]:
    whole = [SHARD_ROWS, BUCKETS, DIM]
    inner = {"name": "sharding_indexed", "configuration": {"chunk_shape": list(chunk)}}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": _path(folder, number)},
        "metadata": {
            "shape": [rows, BUCKETS, DIM],
            "data_type": "float16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": whole if sharded else list(chunk)}},
            "codecs": [inner] if sharded else [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }


if __name__ == "__main__":
    main(write, layouts)
