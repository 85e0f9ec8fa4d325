"""Run a model up to the submodules that are hooked, and return their outputs, pooled or not.

columns   pixels, box ─ images ┐
          data ─────── prompts ┤                       ┌ hook ─ pooled ─▶ dino_cls
          latents ─ at t, noise┼─▶ the model's forward ┤
          tokens ─── documents ┘                       └ hook ─────────▶ dino_patches ; then the forward ends
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forebay.columns import Array, Ragged
from forebay.errors import ModelUnusable
from forebay.images import ImageRecipe, model_planes
from forebay.images.geometry import Scaling
from forebay.images.recipe import LARGEST_SIZE
from forebay.teachers.batched_forward import requested
from forebay.teachers.hook import Hook, ImageInput, LatentInput
from forebay.teachers.protocol import Batch, TimeDirection, tokenizer_of, unusable
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import class_named, input_like, load_model
from forebay.torch.teachers.run_encoders import Tokens, by_row, document_batches, packed_documents


class _AllHooksRan(Exception):
    """Ends a forward once every hooked submodule has run."""


def not_fired(submodule: str, model: str, batch: Batch) -> ModelUnusable:
    return ModelUnusable(
        f"the hook on '{submodule}' of '{model}' did not fire for {requested(batch.ids[0], batch.first_t)}",
        hint="name a submodule that the model runs",
        sample=batch.ids[0],
    )


def first_output(out: Any) -> Tensor:
    """Return the first tensor of a module's output, or its last hidden state."""
    value: Tensor = out[0] if isinstance(out, tuple | list) else getattr(out, "last_hidden_state", out)
    return value


class Captures:
    """Hooks submodules of a module, by the names of their outputs, to capture these, or what `pick` makes of them.

    captures = Captures(module, {"own": "encoder.layer"}, "my model")
    captures.of(batch, lambda: module(states))["own"]
    """

    def __init__(
        self,
        module: nn.Module,
        submodules: Mapping[str, str],
        model: str,
        pick: Callable[[Any], Tensor] = first_output,
    ) -> None:
        self._model, self._submodules, self._pick = model, submodules, pick
        self._outputs: dict[str, Tensor] = {}
        parts = {name: _submodule(module, path, model) for name, path in submodules.items()}
        self._handles = [part.register_forward_hook(partial(self._take, name)) for name, part in parts.items()]

    def of(self, batch: Batch, run: Callable[[], object]) -> dict[str, Tensor]:
        """Return the outputs of the submodules while `run` runs the module on a batch."""
        self._outputs = {}
        with suppress(_AllHooksRan):
            run()
        captured, self._outputs = self._outputs, {}
        for name, submodule in self._submodules.items():
            if name not in captured:
                raise not_fired(submodule, self._model, batch)
        return captured

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, part: nn.Module, inputs: object, out: Any) -> None:
        if name in self._outputs:
            return
        value = self._pick(out)
        if not isinstance(value, Tensor):
            raise unusable(
                self._model,
                f"its submodule '{self._submodules[name]}' returns a {type(out).__name__} without a tensor in it",
                hint="name one inside of it",
            )
        self._outputs[name] = value
        if len(self._outputs) == len(self._submodules):
            raise _AllHooksRan
        self._outputs[name] = value.clone()  # the rest of the forward may write into it


def _submodule(module: nn.Module, path: str, model: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in list(module.named_children())[:8])
        raise unusable(model, f"it has no submodule '{path}'; it has {names}, and theirs") from error


Pool = Callable[[Tensor], Tensor]
POOLINGS: dict[str, Pool] = {
    "none": lambda out: out,
    "mean": lambda out: out.flatten(1, -2).mean(dim=1),
    "max": lambda out: out.flatten(1, -2).amax(dim=1),
    "spatial_mean": lambda out: out.flatten(2).mean(dim=2),
    "first": lambda out: out[:, 0],
    "last": lambda out: out[:, -1],
}


def pooled(out: Tensor, pooling: str, real: Tensor | None) -> Tensor:
    """Pool an output; `real` is True `(samples, positions)` where a token is not padding, for outputs of every token.

    A sample without any real token gives NaN.
    """
    pool = POOLINGS[pooling]
    if real is None or pooling in ("none", "spatial_mean") or out.dim() < 3 or out.shape[1] != real.shape[1]:
        return pool(out)
    real_rows = [
        row[part] if part.any() else torch.full_like(row[:1], torch.nan) for row, part in zip(out, real, strict=True)
    ]
    return torch.cat([pool(row[None]) for row in real_rows])


def noise_share(batch: Batch, direction: TimeDirection) -> NDArray[np.float32]:
    """Return the share of noise in each sample, 0 to 1."""
    assert batch.t is not None
    return 1 - batch.t if direction == "t0_noise" else batch.t


def mixed(batch: Batch, column: str, share: NDArray[np.float32], per: Literal["bucket", "sample"]) -> Array:
    """Return stored latents, mixed linearly with noise."""
    data = batch.array(column).astype(np.float32)
    wide = share.reshape(-1, *[1] * (data.ndim - 1))
    latents: Array = (1 - wide) * data + wide * batch.noise(data.shape[1:], per=per)
    return latents


def model_timesteps(share: NDArray[np.float32], of_noise: float, of_data: float) -> Tensor:
    """Return the timesteps that a model counts from data to noise, float32 in any compute type."""
    return torch.from_numpy(np.float32(of_data) + share * np.float32(of_noise - of_data))


class LoadedHook:
    """A hooked model of transformers or diffusers."""

    def __init__(self, teacher: Hook, device: str, dtype: str) -> None:
        self._teacher = teacher
        cls = class_named(teacher.architecture, teacher.model)
        self._module: Any = load_model(cls, teacher.model, teacher.weights, device, dtype)
        self._like = input_like(self._module)
        self._points = teacher.hooked()
        self._captures = Captures(self._module, {one.name: one.submodule for one in self._points}, teacher.model)
        self._images = _Images(teacher.images, teacher.image_size) if teacher.images else None
        self._prompts = None
        if teacher.prompts:
            tokenizer = tokenizer_of(teacher.model, teacher.tokenizer)
            self._prompts = Tokens(tokenizer, teacher.prompts.max_length, self._like.device)
        self._fixed = {name: value for name, value in teacher.arguments.items() if not isinstance(value, str)}
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raise for an input that the forward does not name: with `**kwargs` many would ignore it."""
        takes = [name for name in signature(self._module.forward).parameters if name not in ("args", "kwargs")]
        for name in self._teacher.fed_arguments():
            if name not in takes:
                raise unusable(
                    self._teacher.model,
                    f"its forward takes no '{name}', but {', '.join(takes)}",
                    hint="set argument=, mask= or timestep= of the input",
                )

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array | Ragged]:
        if self._teacher.tokens:
            return self._of_documents(batch, self._teacher.tokens.argument, self._teacher.tokens.mask)
        arguments = {**self._fixed, **self._columns(batch)}
        if self._images:
            arguments[self._images.argument] = to_device(self._images.of(batch), self._like)
        if self._teacher.latents:
            arguments |= self._latents(batch, self._teacher.latents)
        real = None
        if self._prompts and self._teacher.prompts:
            tokens = self._prompts(batch.prompts)
            arguments[self._teacher.prompts.argument] = tokens["input_ids"]
            if self._teacher.prompts.mask:
                arguments[self._teacher.prompts.mask] = tokens["attention_mask"]
            real = tokens["attention_mask"].bool()
        captured = self._captures.of(batch, lambda: self._module(**arguments))
        return {one.name: to_numpy(pooled(captured[one.name].float(), one.pooling, real)) for one in self._points}

    def _columns(self, batch: Batch) -> dict[str, Tensor]:
        arguments = {}
        for argument, column in self._teacher.arguments.items():
            if not isinstance(column, str):
                continue
            try:
                arguments[argument] = to_device(batch.array(column), self._like)
            except TypeError as error:
                advice = f"name it in shared=('{column}',) if it is stored once for equal prompts"
                raise unusable(
                    self._teacher.model,
                    f"the column '{column}' for its argument '{argument}' has rows of different lengths",
                    hint=advice,
                ) from error
        return arguments

    def _latents(self, batch: Batch, latents_input: LatentInput) -> dict[str, Tensor]:
        share = noise_share(batch, self._teacher.time_direction)
        latents = (
            mixed(batch, latents_input.column, share, latents_input.noise_per)
            if latents_input.column
            else batch.noise(latents_input.shape, per=latents_input.noise_per)
        )
        times = model_timesteps(share, latents_input.noise_timestep, latents_input.data_timestep)
        return {
            latents_input.argument: to_device(latents, self._like),
            latents_input.timestep: times.to(self._like.device),
        }

    def _of_documents(self, batch: Batch, argument: str, mask: str) -> dict[str, Array | Ragged]:
        """Run every document by itself; pooled outputs are one per document, others are put at their tokens."""
        rows = packed_documents(batch)
        documents = [tokens for row in rows for tokens in row]
        values_of: dict[str, list[Tensor]] = {one.name: [torch.empty(0)] * len(documents) for one in self._points}
        for group, ids, real in document_batches(documents):
            arguments = {**self._fixed, argument: ids.to(self._like.device)}
            if mask:
                arguments[mask] = real.long().to(self._like.device)
            out = self._captures.of(batch, lambda passed=arguments: self._module(**passed))  # type: ignore[misc]
            for one in self._points:
                self._check_positions(out[one.name], ids)
                captured = out[one.name].float().cpu()
                values = captured if one.pooling == "none" else pooled(captured, one.pooling, real)
                for number, at in enumerate(group):
                    values_of[one.name][at] = (
                        values[number][: len(documents[at])] if one.pooling == "none" else values[number]
                    )
        return {one.name: self._by_row(one.pooling, values_of[one.name], rows, batch) for one in self._points}

    def _check_positions(self, out: Tensor, ids: Tensor) -> None:
        if out.dim() < 3 or out.shape[:2] != ids.shape:
            raise unusable(
                self._teacher.model,
                f"a submodule returns {tuple(out.shape)} for {tuple(ids.shape)} tokens",
                hint="with tokens, name one with an output for each",
            )

    def _by_row(
        self, pooling: str, values: Sequence[Tensor], rows: Sequence[Sequence[Array]], batch: Batch
    ) -> Array | Ragged:
        each = by_row(values, rows)
        inner = tuple(values[0].shape[1 if pooling == "none" else 0 :]) if values else ()
        if pooling != "none":
            stacked = [
                to_numpy(torch.stack(list(part))) if part else np.zeros((0, *inner), np.float32) for part in each
            ]
            return Ragged.of(stacked, np.dtype(np.float32), inner)
        filled = np.zeros((len(rows), batch.array("tokens").shape[1], *inner), np.float32)
        for row, part in zip(filled, each, strict=True):
            whole = torch.cat(list(part)) if part else torch.zeros(0, *inner)
            row[: len(whole)] = to_numpy(whole)
        return filled


class _Images:
    """Makes the images that a model gets from stored pixels and boxes."""

    def __init__(self, image_input: ImageInput, size: int) -> None:
        self.argument = image_input.argument
        self._input, self._size = image_input, size
        self._recipe = ImageRecipe(
            size=LARGEST_SIZE, storage=image_input.storage
        )  # the canvas of the cache may have any
        self._scaling = Scaling.of((image_input.mean, image_input.std))

    def of(self, batch: Batch) -> NDArray[np.float32]:
        """Return `(samples, 3, size, size)`."""
        stored, _ = self._input.columns
        how = (self._size, self._input.fit, self._input.resample, self._input.pad_color)
        rows = zip(batch.rows(stored), batch.array("box"), strict=True)
        contents = (self._recipe.unpacked({stored: content, "box": box}) for content, box in rows)
        return self._scaling.apply(np.stack([model_planes(content, *how) for content in contents]))
