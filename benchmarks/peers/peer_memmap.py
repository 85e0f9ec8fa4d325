"""numpy.memmap under torch's DataLoader: row by row as most write it, and batch by batch with `__getitems__`."""

import os

import numpy as np
import torch
from harness import BATCH, WORKERS, Epoch, main, rows_of, widened
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """The file as a dataset of rows; opened in each process when first used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows: np.ndarray | None = None

    def __len__(self) -> int:
        return os.path.getsize(self.path) // 4096

    def opened(self) -> np.ndarray:
        if self.rows is None:
            self.rows = rows_of(self.path)
        return self.rows

    def __getitem__(self, row: int) -> np.ndarray:
        return np.array(self.opened()[row])


class BatchedRows(Rows):
    def __getitems__(self, rows: list[int]) -> np.ndarray:
        return self.opened()[rows]


def write(rows: np.ndarray, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.link(os.path.abspath(rows.base.filename), f"{folder}/rows")


def configurations(folder: str) -> dict[str, Epoch]:
    path = f"{folder}/rows"
    singly = {f"row by row, {workers} workers": loading(Rows(path), workers, None) for workers in WORKERS}
    batched = {f"__getitems__, {workers} workers": loading(BatchedRows(path), workers, as_it_is) for workers in WORKERS}
    return singly | batched


def loading(dataset: Rows, workers: int, collate: object) -> Epoch:
    loader = DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
    )
    return lambda: map(widened, loader)


def as_it_is(batch: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(batch)


if __name__ == "__main__":
    main(write, configurations)
