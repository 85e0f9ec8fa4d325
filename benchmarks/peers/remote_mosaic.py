"""MosaicML Streaming from a bucket: MDS shards, its default shuffle, with as many bytes kept on disk as allowed.

Within a limit it mixes four shards at a time. By default it mixes all of these rows at once, and fetches shards again
for almost every batch: such an epoch does not end within a minute.
"""

from collections.abc import Iterable

import numpy as np
import peer_mosaic
import torch
from harness import BATCH, LENGTH, widened
from remote_harness import main
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

peer_mosaic.SHARD_BYTES = 4 << 20
LIMITED_ROWS = 4 * peer_mosaic.SHARD_BYTES // (2 * LENGTH)


def write(rows: np.ndarray, folder: str) -> None:
    peer_mosaic.write(rows, folder)


def opened(url: str, folder: str, limit: int, workers: int) -> Iterable[torch.Tensor]:
    clean_stale_shared_memory()
    bounds = {
        "cache_limit": limit,
        "shuffle_block_size": LIMITED_ROWS,
        "num_canonical_nodes": 1,
        "predownload": 8 * BATCH,
    }
    bounds = bounds if limit else {}
    dataset = StreamingDataset(
        remote=url, local=folder, shuffle=True, batch_size=BATCH, **{"predownload": 64 * BATCH, **bounds}
    )
    loader = DataLoader(dataset, BATCH, num_workers=workers, drop_last=True, collate_fn=peer_mosaic.stacked_tokens)
    return map(widened, loader)


if __name__ == "__main__":
    main(write, opened)
