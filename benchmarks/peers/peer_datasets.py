"""Hugging Face Datasets: Arrow files of fixed-size lists, whole batches asked for by a shuffled sampler."""

import glob
import os

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from harness import BATCH, LENGTH, WORKERS, Epoch, main, widened
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

FILE_ROWS = 65_536
GROUP_ROWS = 1024


def write(rows: np.ndarray, folder: str) -> None:
    os.makedirs(folder)
    schema = pa.schema({"tokens": pa.list_(pa.uint16(), LENGTH)})
    for first in range(0, len(rows), FILE_ROWS):
        with pa.ipc.new_stream(f"{folder}/{first:09d}.arrow", schema) as stream:
            for start in range(first, min(first + FILE_ROWS, len(rows)), GROUP_ROWS):
                group = rows[start : min(start + GROUP_ROWS, first + FILE_ROWS)]
                stream.write(pa.record_batch([pa.FixedSizeListArray.from_arrays(group.ravel(), LENGTH)], schema=schema))


def configurations(folder: str) -> dict[str, Epoch]:
    dataset = concatenate_datasets([Dataset.from_file(path) for path in sorted(glob.glob(f"{folder}/*.arrow"))])
    formats = {"numpy": from_numpy, "torch": from_torch, "arrow": from_arrow}
    return {
        f"{name} format, {workers} workers": loading(dataset.with_format(name), unpack, workers)
        for name, unpack in formats.items()
        for workers in WORKERS
    }


def loading(dataset: Dataset, unpack: object, workers: int) -> Epoch:
    sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=True)
    loader = DataLoader(dataset, None, sampler=sampler, num_workers=workers, collate_fn=unpack)
    return lambda: map(widened, loader)


def from_numpy(batch: dict[str, np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(batch["tokens"])


def from_torch(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch["tokens"]


def from_arrow(batch: pa.Table) -> torch.Tensor:
    lists = batch["tokens"].combine_chunks()
    return torch.from_numpy(np.array(lists.flatten()).reshape(-1, LENGTH))


if __name__ == "__main__":
    main(write, configurations)
