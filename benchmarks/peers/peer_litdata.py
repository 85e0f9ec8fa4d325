"""LitData: its token format with `TokensLoader`, which is its fastest way to rows of one length.

Its shuffle deals chunks and mixes rows within each; there is no global one.
"""

import numpy as np
import torch
from harness import BATCH, LENGTH, WORKERS, Epoch, main, widened
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.writer import BinaryWriter

CHUNK_BYTES = 64 << 20


def write(rows: np.ndarray, folder: str) -> None:
    writer = BinaryWriter(folder, chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader(LENGTH))
    for number, row in enumerate(rows):
        writer[number] = torch.from_numpy(row.copy())
    writer.done()
    writer.merge(1)


def configurations(folder: str) -> dict[str, Epoch]:
    return {f"TokensLoader, {workers} workers": loading(folder, workers) for workers in WORKERS}


def loading(folder: str, workers: int) -> Epoch:
    dataset = StreamingDataset(folder, item_loader=TokensLoader(LENGTH), shuffle=True, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, drop_last=True)
    return lambda: map(widened, loader)


if __name__ == "__main__":
    main(write, configurations)
