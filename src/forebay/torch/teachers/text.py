"""States of prompts."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from forebay.columns import Array
from forebay.errors import TeacherUnusable
from forebay.teachers.encoders import T5, Clip
from forebay.teachers.protocol import Batch
from forebay.teachers.weights import model_folder, tokenizer_of
from forebay.torch.teachers.arrays import to_numpy
from forebay.torch.teachers.loading import LOADING_ERRORS, NO_CODE, load_model


class Tokens:
    """Prompts as ids of one length, cut and filled as the tokenizer does."""

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
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        tokens = self._tokens(batch.prompts)
        states = self._model(**tokens).last_hidden_state
        name = self._teacher.name
        return {f"{name}_states": to_numpy(states), f"{name}_mask": tokens["attention_mask"].bool().cpu().numpy()}


class LoadedClip:
    def __init__(self, teacher: Clip, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._model = load_model(CLIPTextModel, teacher.model, None, device, dtype)
        self._tokens = Tokens(tokenizer_of(teacher.model, teacher.tokenizer), teacher.length, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        found = self._model(input_ids=self._tokens(batch.prompts)["input_ids"])
        name = self._teacher.name
        return {f"{name}_pooled": to_numpy(found.pooler_output), f"{name}_states": to_numpy(found.last_hidden_state)}
