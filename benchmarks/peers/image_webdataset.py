"""WebDataset: images as raw bytes in tar shards, mixed by its shuffle buffer; it has no global shuffle."""

import glob
import os

import numpy as np
import torch
import webdataset as wds
from image_harness import BATCH, SHAPE, WORKERS, Epoch, main, stacked

SHARD_IMAGES = 128
BUFFER_IMAGES = 256


def write(images: np.ndarray, folder: str) -> None:
    os.makedirs(folder)
    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=SHARD_IMAGES, verbose=0) as shards:
        for number, image in enumerate(images):
            shards.write({"__key__": f"{number:09d}", "pixels": image.tobytes()})


def configurations(folder: str) -> dict[str, Epoch]:
    return {f"{workers} workers": loading(folder, workers) for workers in WORKERS}


def loading(folder: str, workers: int) -> Epoch:
    shards = sorted(glob.glob(f"{folder}/*.tar"))
    # A worker without a shard is an error to webdataset.
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    batches = dataset.shuffle(BUFFER_IMAGES).batched(BATCH, collation_fn=stacked_images, partial=False)
    loader = wds.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


def stacked_images(samples: list[dict[str, bytes]]) -> torch.Tensor:
    return stacked([np.frombuffer(sample["pixels"], np.uint8).reshape(SHAPE) for sample in samples])


if __name__ == "__main__":
    main(write, configurations)
