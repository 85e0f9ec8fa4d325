"""A UNet, and its inputs for a batch of samples at their times."""

from typing import Any

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.errors import TeacherUnusable
from forebay.teachers.protocol import Batch
from forebay.teachers.unet import UnetTeacher
from forebay.torch.teachers.arrays import to_device
from forebay.torch.teachers.loading import load_model

TIMESTEPS = 1000.0


class Unet:
    """The model of a teacher that listens inside a UNet."""

    def __init__(self, teacher: UnetTeacher, device: str, dtype: str) -> None:
        self.teacher = teacher
        self.module: Any = load_model(UNet2DConditionModel, teacher.unet, teacher.weights, device, dtype)
        self._like = next(self.module.parameters())

    def run(self, batch: Batch) -> None:
        """One forward: every sample's latents at its time, with its text."""
        self.module(
            to_device(self._latents(batch), self._like),
            torch.from_numpy(self._noise_share(batch) * np.float32(TIMESTEPS)).to(self._like.device),
            encoder_hidden_states=to_device(batch.array(self.teacher.text), self._like),
            return_dict=False,
        )

    def _latents(self, batch: Batch) -> Array:
        channels, *sides = self.teacher.latent_shape
        if self.teacher.noise == "pure":
            return batch.noise((channels, *sides))
        data = batch.array(self.teacher.latents).astype(np.float32)
        if data.shape[1] != channels:
            raise TeacherUnusable(
                self.teacher.unet,
                f"it takes latents of {channels} channels, and '{self.teacher.latents}' has {data.shape[1]}",
            )
        share = self._noise_share(batch).reshape(-1, 1, 1, 1)
        mixed: Array = (1 - share) * data + share * batch.noise(data.shape[1:])
        return mixed

    def _noise_share(self, batch: Batch) -> NDArray[np.float32]:
        """How much of each sample is noise, 0 to 1. A UNet's timestep 0 is data and 1000 is noise."""
        assert batch.t is not None
        return 1 - batch.t if self.teacher.time_direction == "t0_noise" else batch.t
