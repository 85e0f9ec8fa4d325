"""LitData: images as blocks of its token format, which it maps and copies once, and as tensors, its ordinary way.

Its shuffle deals chunks and mixes within each; there is no global one.
"""

import numpy as np
import torch
from image_harness import BATCH, SHAPE, WORKERS, Epoch, main
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.item_loader import BaseItemLoader
from litdata.streaming.writer import BinaryWriter

CHUNK_BYTES = 64 << 20
VALUES = SHAPE[0] * SHAPE[1] * SHAPE[2]


def write(images: np.ndarray, folder: str) -> None:
    _write(images.reshape(len(images), -1), f"{folder}/blocks", TokensLoader(VALUES))
    _write(images, f"{folder}/tensors", None)


def _write(rows: np.ndarray, folder: str, item_loader: BaseItemLoader | None) -> None:
    writer = BinaryWriter(folder, chunk_bytes=CHUNK_BYTES, item_loader=item_loader)
    for number, row in enumerate(rows):
        writer[number] = torch.from_numpy(row.copy())
    writer.done()
    writer.merge(1)


def configurations(folder: str) -> dict[str, Epoch]:
    blocks = {f"blocks, {workers} workers": loading(f"{folder}/blocks", workers, True) for workers in WORKERS}
    tensors = {f"tensors, {workers} workers": loading(f"{folder}/tensors", workers, False) for workers in WORKERS}
    return blocks | tensors


def loading(folder: str, workers: int, blocks: bool) -> Epoch:
    item_loader = TokensLoader(VALUES) if blocks else None
    dataset = StreamingDataset(folder, item_loader=item_loader, shuffle=True, drop_last=True)
    loader = StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    return lambda: (batch.view(BATCH, *SHAPE) for batch in loader)


if __name__ == "__main__":
    main(write, configurations)
