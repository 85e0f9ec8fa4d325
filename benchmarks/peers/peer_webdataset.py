"""WebDataset: tar shards of raw rows, mixed by its shuffle buffer; it has no global shuffle."""

import glob
import os

import numpy as np
import torch
import webdataset as wds
from harness import BATCH, WORKERS, Epoch, main, widened

SHARD_ROWS = 16_384
BUFFER_ROWS = 4096


def write(rows: np.ndarray, folder: str) -> None:
    os.makedirs(folder)
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=SHARD_ROWS, verbose=0) as shards:
        for number, row in enumerate(rows):
            shards.write({"__key__": f"{number:09d}", "tokens": row.tobytes()})


def configurations(folder: str) -> dict[str, Epoch]:
    return {f"{workers} workers": loading(folder, workers) for workers in WORKERS}


def loading(folder: str, workers: int) -> Epoch:
    shards = sorted(glob.glob(f"{folder}/*.tar"))
    # A worker without a shard is an error to webdataset.
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    batches = dataset.shuffle(BUFFER_ROWS).batched(BATCH, collation_fn=stacked_tokens, partial=False)
    loader = wds.WebLoader(batches, batch_size=None, num_workers=workers)
    return lambda: map(widened, loader)


def stacked_tokens(samples: list[dict[str, bytes]]) -> torch.Tensor:
    joined = b"".join(sample["tokens"] for sample in samples)
    return torch.from_numpy(np.frombuffer(bytearray(joined), np.uint16).reshape(len(samples), -1))


if __name__ == "__main__":
    main(write, configurations)
