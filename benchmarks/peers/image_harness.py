"""Images that all peers hold alike: 448 × 448 canvases of uint8, planes first, 32 to a batch."""

import os
from functools import partial

import harness
import numpy as np
import torch
from harness import BATCH, WORKERS, Compared, Epoch

__all__ = ["BATCH", "SHAPE", "WORKERS", "Epoch", "images_of", "main", "stacked"]

SIZE = 448
SHAPE = (3, SIZE, SIZE)
BYTES = 3 * SIZE * SIZE


def images_of(path: str) -> np.ndarray:
    return np.memmap(path, np.uint8, "r", shape=(os.path.getsize(path) // BYTES, *SHAPE))


def stacked(images: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images))


def check_images(batch: torch.Tensor) -> None:
    """Whole batches of different images: uint8, or float32 that was normalized."""
    if tuple(batch.shape) != (BATCH, *SHAPE):
        raise AssertionError(f"a batch is {tuple(batch.shape)}, not {(BATCH, *SHAPE)}: this is not what is compared")
    if batch.dtype == torch.uint8:
        in_range = int(batch.max()) > 200
    else:
        in_range = batch.dtype == torch.float32 and -3 < float(batch.min()) < -1 and 1 < float(batch.max()) < 3
    if not in_range or torch.equal(batch[0], batch[1]):
        raise AssertionError("a batch does not hold images")


main = partial(harness.main, compared=Compared(images_of, check_images))
