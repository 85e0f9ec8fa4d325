"""LitData from a bucket: its token format, with as many bytes kept on disk as it is allowed."""

from collections.abc import Iterable

import numpy as np
import torch
from harness import BATCH, LENGTH, widened
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming import downloader
from litdata.streaming.writer import BinaryWriter
from remote_harness import main

# Its client of buckets refuses an endpoint without TLS, whatever the environment says.
downloader._OBSTORE_CLIENT_OPTIONS = {**downloader._OBSTORE_CLIENT_OPTIONS, "allow_http": True}

CHUNK_BYTES = 4 << 20


def write(rows: np.ndarray, folder: str) -> None:
    writer = BinaryWriter(folder, chunk_bytes=CHUNK_BYTES, item_loader=TokensLoader(LENGTH))
    for number, row in enumerate(rows):
        writer[number] = torch.from_numpy(row.copy())
    writer.done()
    writer.merge(1)


def opened(url: str, folder: str, limit: int, workers: int) -> Iterable[torch.Tensor]:
    dataset = StreamingDataset(
        url, cache_dir=folder, item_loader=TokensLoader(LENGTH), shuffle=True, drop_last=True, max_pre_download=8,
        **({"max_cache_size": limit} if limit else {}),
    )  # fmt: skip
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, drop_last=True)
    return map(widened, loader)


if __name__ == "__main__":
    main(write, opened)
