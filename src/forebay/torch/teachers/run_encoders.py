"""Run the encoders: VAE latents of letterboxed images, T5 and CLIP states of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from forebay.columns import Array, Ragged
from forebay.errors import TeacherUnusable
from forebay.images import ImageRecipe
from forebay.teachers.built_in import T5, Clip, Latents
from forebay.teachers.families import VAES, vae_class
from forebay.teachers.protocol import Batch, config_of, model_folder, tokenizer_of
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import LOADING_ERRORS, NO_CODE, class_named, input_like, load_model


class Tokens:
    """Tokenizes prompts to ids of one length, truncated and padded as the tokenizer does."""

    def __init__(self, model: str, length: int, device: torch.device) -> None:
        self._length, self._device = length, device
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(model), local_files_only=True, **NO_CODE)
        except LOADING_ERRORS as error:
            raise TeacherUnusable(
                model, f"its tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}"
            ) from error

    def __call__(self, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        found = self._tokenizer(
            list(prompts), padding="max_length", max_length=self._length, truncation=True, return_tensors="pt"
        )
        return {name: found[name].to(self._device) for name in ("input_ids", "attention_mask")}


class LoadedT5:
    def __init__(self, teacher: T5, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._model = load_model(T5EncoderModel, teacher.model, None, device, dtype)
        self._tokens = Tokens(tokenizer_of(teacher.model, teacher.tokenizer), teacher.max_length, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array | Ragged]:
        tokens = self._tokens(batch.prompts)
        given = tokens if self._teacher.masked else {"input_ids": tokens["input_ids"]}
        states = to_numpy(self._model(**given).last_hidden_state)
        name, mask = self._teacher.name, tokens["attention_mask"].bool().cpu().numpy()
        kept: Array | Ragged = states
        if self._teacher.ragged:
            kept = Ragged.of([row[real] for row, real in zip(states, mask, strict=True)], states.dtype)
        return {f"{name}_states": kept, f"{name}_mask": mask}


class LoadedClip:
    def __init__(self, teacher: Clip, device: str, dtype: str) -> None:
        self._teacher = teacher
        known = config_of(teacher.model).get("architectures") or ()
        if "CLIPTextModelWithProjection" in known and "pooled" in teacher.keeps and not teacher.projected:
            problem = "its pooled output has a projection; pass projected=True (--clip-projected) to apply it"
            raise TeacherUnusable(teacher.model, f"{problem}, or keeps=('states',)")
        family = CLIPTextModelWithProjection if teacher.projected else CLIPTextModel
        self._model = load_model(family, teacher.model, None, device, dtype)
        self._tokens = Tokens(tokenizer_of(teacher.model, teacher.tokenizer), teacher.length, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        name, layer = self._teacher.name, self._teacher.states_layer
        found = self._model(input_ids=self._tokens(batch.prompts)["input_ids"], output_hidden_states=layer != -1)
        pooled = found.text_embeds if self._teacher.projected else found.pooler_output
        states = found.last_hidden_state if layer == -1 else found.hidden_states[layer]
        return {f"{name}_pooled": to_numpy(pooled), f"{name}_states": to_numpy(states)}


class LoadedVae:
    def __init__(self, teacher: Latents, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._images = ImageRecipe(size=teacher.size, storage=teacher.storage)
        kind = vae_class(teacher.vae)
        self._of_videos = VAES[kind].of_videos
        self._vae: Any = load_model(class_named(kind, teacher.vae), teacher.vae, None, device, dtype)
        self._like = input_like(self._vae)
        config = self._vae.config
        self._scale, self._shift = config.get("scaling_factor"), config.get("shift_factor") or 0.0
        self._mean, self._std = (self._per_channel(config.get(name)) for name in ("latents_mean", "latents_std"))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        pixels = self._canvases(batch).astype(np.float32) / 127.5 - 1.0
        images = to_device(pixels, self._like)
        found = self._vae.encode(images.unsqueeze(2) if self._of_videos else images).latent_dist
        latents, std = (part.squeeze(2) if self._of_videos else part for part in (found.mean, found.std))
        if self._teacher.sample == "seeded":
            noise = batch.noise(tuple(latents.shape[1:]), "latents")
            latents = latents + std * to_device(noise, latents)
        return {self._teacher.name: to_numpy(self._scaled(latents.float()))}

    def _scaled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return latents as the VAE's pipelines scale them, in the same order of operations."""
        if self._mean is None or self._std is None:  # SD1.5; with a shift SD3 and Flux
            return torch.mul(latents - self._shift, self._scale)
        if self._scale is None:  # Wan, Qwen-Image
            return torch.mul(latents - self._mean, 1.0 / self._std)
        return torch.mul(latents - self._mean, self._scale).div(self._std)

    def _per_channel(self, numbers: Sequence[float] | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        channels = self._teacher.outputs()[0].shape[0]
        if len(numbers) != channels:
            raise TeacherUnusable(
                self._teacher.vae, f"its latents_mean or latents_std has {len(numbers)} numbers, not {channels}"
            )
        return torch.tensor(numbers, dtype=torch.float32, device=self._like.device).view(1, channels, 1, 1)

    def _canvases(self, batch: Batch) -> NDArray[np.uint8]:
        """Return canvases `(samples, 3, size, size)`: content in its rectangle, the pad color around it."""
        size, stored = self._teacher.size, self._teacher.inputs()[0]
        canvases = np.empty((len(batch), 3, size, size), np.uint8)
        canvases[:] = np.array(self._teacher.pad_color, np.uint8).reshape(3, 1, 1)
        for canvas, content, box, name in zip(canvases, batch.rows(stored), batch.array("box"), batch.ids, strict=True):
            left, top, width, height = box.tolist()
            if (left, top) != ((size - width) // 2, (size - height) // 2):
                problem = f"the box of image '{name}', {box.tolist()}, is not that of a canvas of {size}"
                raise TeacherUnusable(self._teacher.vae, f"{problem}; pass the size that the images were built with")
            canvas[:, top : top + height, left : left + width] = self._images.unpacked({stored: content, "box": box})
        return canvases
