"""JPEG files decoded and letterboxed by Pillow under torch's DataLoader with two workers: what most training does.

image_pillow.py read FOLDER SECONDS      FOLDER holds the images themselves; there is nothing to write
"""

import os

import numpy as np
import torch
from image_harness import BATCH, SIZE, Epoch, main
from PIL import Image
from torch.utils.data import DataLoader, Dataset

PAD = (114, 114, 114)
WORKERS = 2
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Letterboxed(Dataset):
    def __init__(self, folder: str) -> None:
        self.paths = [entry.path for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.paths[number]) as file:
            image = file.convert("RGB")
        scale = min(1.0, SIZE / max(image.size))
        width, height = (max(1, round(side * scale)) for side in image.size)
        canvas = Image.new("RGB", (SIZE, SIZE), PAD)
        canvas.paste(
            image.resize((width, height), Image.Resampling.BILINEAR), ((SIZE - width) // 2, (SIZE - height) // 2)
        )
        return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).contiguous()


class Normalised(Letterboxed):
    def __getitem__(self, number: int) -> torch.Tensor:
        return normalized(super().__getitem__(number))


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().div_(255).sub_(MEAN).div_(STD)


def write(images: np.ndarray, folder: str) -> None:
    raise AssertionError("these are the images themselves")


def configurations(folder: str) -> dict[str, Epoch]:
    plain, ready = loading(Letterboxed(folder)), loading(Normalised(folder))
    return {
        "uint8": lambda: plain,
        "float32, normalized by workers": lambda: ready,
        "float32, normalized by the receiver": lambda: map(normalized, plain),
    }


def loading(dataset: Dataset) -> DataLoader:
    return DataLoader(
        dataset, BATCH, shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4
    )


if __name__ == "__main__":
    main(write, configurations)
