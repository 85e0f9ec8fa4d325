"""MosaicML Streaming: images in MDS shards, the global shuffle ("naive") and the default one, which mixes in blocks."""

from collections.abc import Iterator

import numpy as np
import torch
from image_harness import BATCH, SHAPE, WORKERS, Epoch, main, stacked
from torch.utils.data import DataLoader

# streaming imports torchvision, for images only. Beside a CPU build of torch the torchvision of PyPI has no operators,
# and fails where it describes these two.
if not hasattr(torch.ops.torchvision, "nms"):
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

SHARD_BYTES = 64 << 20


def write(images: np.ndarray, folder: str) -> None:
    columns = {"image": f"ndarray:uint8:{','.join(map(str, SHAPE))}"}
    with MDSWriter(out=folder, columns=columns, size_limit=SHARD_BYTES) as writer:
        for image in images:
            writer.write({"image": np.array(image)})


def configurations(folder: str) -> dict[str, Epoch]:
    pairs = [(shuffle, workers) for shuffle in ("naive", "py1e") for workers in WORKERS]
    return {f"{shuffle}, {workers} workers": loading(folder, shuffle, workers) for shuffle, workers in pairs}


def loading(folder: str, shuffle: str, workers: int) -> Epoch:
    def epochs() -> Iterator[torch.Tensor]:
        # A dataset holds shared memory under one name: it is made when it is used.
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=folder, shuffle=True, shuffle_algo=shuffle, batch_size=BATCH)
        loader = DataLoader(
            dataset,
            BATCH,
            num_workers=workers,
            drop_last=True,
            collate_fn=stacked_images,
            persistent_workers=workers > 0,
        )
        while True:
            yield from loader

    return epochs


def stacked_images(samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
    return stacked([sample["image"] for sample in samples])


if __name__ == "__main__":
    main(write, configurations)
