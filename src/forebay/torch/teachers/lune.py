"""Lune: the middle of a UNet, averaged over space."""

from collections.abc import Mapping

import torch

from forebay.columns import Array
from forebay.teachers.protocol import Batch
from forebay.teachers.unet import Lune
from forebay.torch.teachers.arrays import to_numpy
from forebay.torch.teachers.capture import Capture
from forebay.torch.teachers.unet import Unet


class LoadedLune:
    def __init__(self, teacher: Lune, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._unet = Unet(teacher, device, dtype)
        self._capture = Capture(self._unet.module, teacher.submodule, teacher.unet)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        middle = self._capture.of(batch, lambda: self._unet.run(batch))  # (samples, channels, height, width)
        return {self._teacher.name: to_numpy(middle.float().mean(dim=(2, 3)))}
