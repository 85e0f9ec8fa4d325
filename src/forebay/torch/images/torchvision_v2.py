"""Run transforms in the style of torchvision v2 on image, mask and box together.

    cutting = v2.Compose([v2.RandomAffine(10), v2.RandomCrop(384)])
    loader = Loader(cache, global_batch_size=64, threads=0, collate=ImageBatch(cache, transforms=[JointV2(cutting)]))

A transform gets a dict for every image and returns one:

    image   uint8 [3, height, width]
    mask    uint8 [1, height, width], 1 = content, so that the 0 which a transform fills in is padding
    boxes   [1, 4] left, top, right, bottom of the content

With torchvision they are its `Image`, `Mask` and `BoundingBoxes`, without it plain tensors. Filled pixels get the pad
color, and the box of the result is that of its mask.

torchvision draws from torch's global generator. It is seeded here from the coins of each sample, and restored. Threads
share that generator with the training thread, so such a transform needs `Loader(threads=0)` or the worker processes of
a `DataLoader`. A transform that draws from `coins` itself needs neither: see `Canvases`.
"""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from forebay.errors import ForebayError
from forebay.order.coins import Coins
from forebay.torch.images.canvases import Canvases, bounds

Sample = dict[str, Tensor]


class JointV2:
    """Applies a torchvision v2 transform to pixels, mask and box of every image.

    `moves_pixels=False` declares that it changes colors only: columns made from pixels still fit. All images of a
    batch must come out at one size.
    """

    def __init__(
        self, transform: Callable[[Sample], Mapping[str, Tensor]], *, moves_pixels: bool = True, purpose: str = "v2"
    ) -> None:
        self._transform, self._purpose, self.moves_pixels = transform, purpose, moves_pixels

    def __repr__(self) -> str:
        return f"<JointV2 of {type(self._transform).__name__}>"

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases:
        if threading.current_thread() is not threading.main_thread():
            raise ForebayError(
                "a torchvision transform draws from torch's global generator, which this thread shares with training",
                hint="pass threads=0 to the Loader, or use worker processes of a DataLoader",
            )
        pad = torch.tensor(canvases.pad_color, dtype=torch.uint8)[:, None, None]
        pixels, masks = [], []
        for image, word in enumerate(coins.words(self._purpose).tolist()):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(word)  # not `torch.manual_seed`, which seeds GPUs
                changed = self._transform(_sample(canvases, image))
            padded = changed["mask"].as_subclass(Tensor)[0] == 0
            pixels.append(torch.where(padded, pad, changed["image"].as_subclass(Tensor)))
            masks.append(padded)
        if not masks:
            return canvases
        mask = torch.stack(masks)
        return Canvases(torch.stack(pixels), mask, bounds(mask), canvases.pad_color)


def _sample(canvases: Canvases, image: int) -> Sample:
    content = (~canvases.mask[image]).to(torch.uint8)[None]
    left, top, width, height = canvases.box[image].tolist()
    boxes = torch.tensor([[left, top, left + width, top + height]], dtype=torch.float32)
    tensors = _tv_tensors()
    if tensors is None:
        return {"image": canvases.pixels[image], "mask": content, "boxes": boxes}
    return {
        "image": tensors.Image(canvases.pixels[image]),
        "mask": tensors.Mask(content),
        "boxes": tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvases.size),
    }


@cache
def _tv_tensors() -> Any:
    try:
        return import_module("torchvision.tv_tensors")
    except ModuleNotFoundError:
        return None
