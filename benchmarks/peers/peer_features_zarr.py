"""zarr-python v3 over a local folder, uncompressed: a row per chunk, or some rows, or shards of rows."""

import os

import numpy as np
import zarr
from feature_harness import BUCKETS, DIM, Pairs, main

LAYOUTS = {
    "row per chunk": {"chunks": (1, BUCKETS, DIM)},
    "8 rows per chunk": {"chunks": (8, BUCKETS, DIM)},
    "row per chunk, sharded": {"chunks": (1, BUCKETS, DIM), "shards": (500, BUCKETS, DIM)},
}


def write(features: np.ndarray, folder: str) -> None:
    for number, layout in enumerate(LAYOUTS.values()):
        array = zarr.create_array(
            store=os.path.join(folder, str(number)), shape=features.shape, dtype="float16", compressors=None, **layout
        )
        array[:] = features


def layouts(folder: str) -> dict[str, Pairs]:
    """Each layout read both ways: whole rows in one call, of which the buckets are taken; or row by row."""
    found = {}
    for number, name in enumerate(LAYOUTS):
        array = zarr.open_array(store=os.path.join(folder, str(number)), mode="r")
        found[f"{name}, whole rows"] = _by_rows(array)
        found[f"{name}, row by row"] = _row_by_row(array)
    return found


def _by_rows(array: zarr.Array) -> Pairs:
    def pairs(rows: np.ndarray, lower: np.ndarray) -> np.ndarray:
        whole = array.oindex[rows]
        return whole[np.arange(len(rows))[:, None], lower[:, None] + np.arange(2)]

    return pairs


def _row_by_row(array: zarr.Array) -> Pairs:
    return lambda rows, lower: np.stack(
        [array[row, low : low + 2] for row, low in zip(rows.tolist(), lower.tolist(), strict=True)]
    )


if __name__ == "__main__":
    main(write, layouts)
