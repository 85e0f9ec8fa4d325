"""MosaicML Streaming from a bucket: MDS shards, its default shuffle, with as many bytes kept on disk as allowed."""

from collections.abc import Iterable

import numpy as np
import peer_mosaic
import torch
from harness import BATCH, widened
from remote_harness import main
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

peer_mosaic.SHARD_BYTES = 4 << 20


def write(rows: np.ndarray, folder: str) -> None:
    peer_mosaic.write(rows, folder)


def opened(url: str, folder: str, limit: int, workers: int) -> Iterable[torch.Tensor]:
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        remote=url, local=folder, shuffle=True, batch_size=BATCH, predownload=64 * BATCH, cache_limit=limit or None
    )
    loader = DataLoader(dataset, BATCH, num_workers=workers, drop_last=True, collate_fn=peer_mosaic.stacked_tokens)
    return map(widened, loader)


if __name__ == "__main__":
    main(write, opened)
