"""Grain over ArrayRecord files with one row per group, for random access: threads, or worker processes."""

import glob
import os
from collections.abc import Iterator

import grain
import numpy as np
import torch
from array_record.python.array_record_module import ArrayRecordWriter
from harness import BATCH, WORKERS, Epoch, main, widened

FILE_ROWS = 65_536
THREADS = (0, 1, 2, 16)


def write(rows: np.ndarray, folder: str) -> None:
    os.makedirs(folder)
    for first in range(0, len(rows), FILE_ROWS):
        writer = ArrayRecordWriter(f"{folder}/{first:09d}.array_record", "group_size:1,uncompressed")
        for row in rows[first : first + FILE_ROWS]:
            writer.write(row.tobytes())
        writer.close()


def configurations(folder: str) -> dict[str, Epoch]:
    source = grain.sources.ArrayRecordDataSource(sorted(glob.glob(f"{folder}/*.array_record")))
    batches = (
        grain.MapDataset.source(source).seed(0).shuffle().batch(BATCH, drop_remainder=True, batch_fn=stacked_tokens)
    )
    threaded = {f"{threads} threads": reading(batches, threads, 0) for threads in THREADS}
    return threaded | {f"{workers} workers": reading(batches, 16, workers) for workers in WORKERS[1:]}


def reading(batches: grain.MapDataset, threads: int, workers: int) -> Epoch:
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 0) * 4)

    def epoch() -> Iterator[torch.Tensor]:
        rows = batches.to_iter_dataset(options)
        if workers:
            rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=8))
        return map(widened, rows)

    return epoch


def stacked_tokens(records: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(records), np.uint16).reshape(len(records), -1)


if __name__ == "__main__":
    main(write, configurations)
