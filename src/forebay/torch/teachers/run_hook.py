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
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from forebay.columns import Array, Ragged
from forebay.errors import HookSilent, TeacherUnusable
from forebay.images import ImageRecipe, model_planes
from forebay.images.geometry import Scaling
from forebay.images.recipe import LARGEST_SIZE
from forebay.teachers.hook import Hook, ImageInput, LatentInput
from forebay.teachers.protocol import Batch, TimeDirection, tokenizer_of
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import class_named, input_like, load_model
from forebay.torch.teachers.run_encoders import Tokens, document_groups, packed_documents, padded


class _AllHooksRan(Exception):
    """Ends a forward once every hooked submodule has run."""


def first_output(out: Any) -> Tensor:
    """Return the first tensor of a module's output, or its last hidden state."""
    value: Tensor = out[0] if isinstance(out, tuple | list) else getattr(out, "last_hidden_state", out)
    return value


class Captures:
    """Hooks submodules of a module, by the names of their outputs, to capture these, or what `pick` makes of them."""

    def __init__(
        self,
        module: nn.Module,
        submodules: Mapping[str, str],
        model: str,
        pick: Callable[[Any], Tensor] = first_output,
    ) -> None:
        self._model, self._submodules, self._pick = model, submodules, pick
        self._found: dict[str, Tensor] = {}
        parts = {name: _submodule(module, path, model) for name, path in submodules.items()}
        self._handles = [part.register_forward_hook(partial(self._take, name)) for name, part in parts.items()]

    def of(self, batch: Batch, run: Callable[[], object]) -> dict[str, Tensor]:
        """Return the outputs of the submodules while `run` runs the module on a batch."""
        self._found = {}
        with suppress(_AllHooksRan):
            run()
        found, self._found = self._found, {}
        for name, submodule in self._submodules.items():
            if name not in found:
                raise HookSilent(self._model, submodule, batch.ids[0], batch.first_t)
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, name: str, part: nn.Module, given: object, out: Any) -> None:
        if name in self._found:
            return
        value = self._pick(out)
        if not isinstance(value, Tensor):
            problem = f"its submodule '{self._submodules[name]}' returns a {type(out).__name__} without a tensor in it"
            raise TeacherUnusable(self._model, f"{problem}; name one inside of it")
        self._found[name] = value
        if len(self._found) == len(self._submodules):
            raise _AllHooksRan
        self._found[name] = value.clone()  # the rest of the forward may write into it


class Capture:
    """Hooks one submodule, to capture its output, or what `pick` makes of it."""

    def __init__(
        self, module: nn.Module, submodule: str, model: str, pick: Callable[[Any], Tensor] = first_output
    ) -> None:
        self._captures = Captures(module, {submodule: submodule}, model, pick)
        self._submodule = submodule

    def of(self, batch: Batch, run: Callable[[], object]) -> Tensor:
        """Return the output of the submodule while `run` runs the module on a batch."""
        return self._captures.of(batch, run)[self._submodule]

    def close(self) -> None:
        self._captures.close()


def _submodule(module: nn.Module, path: str, model: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in list(module.named_children())[:8])
        raise TeacherUnusable(model, f"it has no submodule '{path}'; it has {names}, and theirs") from error


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
    kept = [row[own] if own.any() else torch.full_like(row[:1], torch.nan) for row, own in zip(out, real, strict=True)]
    return torch.cat([pool(row[None]) for row in kept])


class HookedModule:
    """Returns the pooled output of a submodule, under one name.

    `arguments` makes the module's keyword arguments from a batch: a function, or a dict of argument -> column.
    """

    def __init__(
        self,
        module: nn.Module,
        submodule: str,
        pool: Pool | str = "mean",
        *,
        name: str,
        arguments: Callable[[Batch], Mapping[str, Any]] | Mapping[str, str],
        model: str = "module",
    ) -> None:
        self._module = module.eval().requires_grad_(False)
        self._pool = POOLINGS[pool] if isinstance(pool, str) else pool
        self._name = name
        self._arguments = arguments
        self._capture = Capture(self._module, submodule, model)
        self._like = next(iter(module.parameters()), torch.empty(0))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        arguments = self._arguments_for(batch)
        out = self._capture.of(batch, lambda: self._module(**arguments))
        return {self._name: to_numpy(self._pool(out.float()))}

    def close(self) -> None:
        """Remove the hook; the module may be used further."""
        self._capture.close()

    def _arguments_for(self, batch: Batch) -> Mapping[str, Any]:
        if callable(self._arguments):
            return self._arguments(batch)
        return {name: to_device(batch.array(column), self._like) for name, column in self._arguments.items()}


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
            place = tokenizer_of(teacher.model, teacher.tokenizer)
            self._prompts = Tokens(place, teacher.prompts.max_length, self._like.device)
        self._fixed = {name: value for name, value in teacher.arguments.items() if not isinstance(value, str)}
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raise for an input that the forward does not name: with `**kwargs` many would ignore it."""
        takes = [name for name in signature(self._module.forward).parameters if name not in ("args", "kwargs")]
        for name in self._teacher.fed_arguments():
            if name not in takes:
                problem = f"its forward takes no '{name}', but {', '.join(takes)}"
                raise TeacherUnusable(self._teacher.model, f"{problem}; set argument=, mask= or timestep= of the input")

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
        found = self._captures.of(batch, lambda: self._module(**arguments))
        return {one.name: to_numpy(pooled(found[one.name].float(), one.pooling, real)) for one in self._points}

    def close(self) -> None:
        self._captures.close()

    def _columns(self, batch: Batch) -> dict[str, Tensor]:
        found = {}
        for argument, column in self._teacher.arguments.items():
            if not isinstance(column, str):
                continue
            if isinstance(batch.columns[column], Ragged):
                problem = f"the column '{column}' for its argument '{argument}' has rows of different lengths"
                advice = f"name it in shared=('{column}',) if it is stored once for equal prompts"
                raise TeacherUnusable(self._teacher.model, f"{problem}; {advice}")
            found[argument] = to_device(batch.array(column), self._like)
        return found

    def _latents(self, batch: Batch, given: LatentInput) -> dict[str, Tensor]:
        share = noise_share(batch, self._teacher.time_direction)
        latents = (
            mixed(batch, given.column, share, given.noise_per)
            if given.column
            else batch.noise(given.shape, per=given.noise_per)
        )
        times = model_timesteps(share, given.noise_timestep, given.data_timestep)
        return {
            given.argument: to_device(latents, self._like),
            given.timestep: times.to(self._like.device),
        }

    def _of_documents(self, batch: Batch, argument: str, mask: str) -> dict[str, Array | Ragged]:
        """Run every document by itself; pooled outputs are one per document, others are put at their tokens."""
        rows = packed_documents(batch)
        documents = [tokens for row in rows for tokens in row]
        found: dict[str, list[Tensor]] = {one.name: [torch.empty(0)] * len(documents) for one in self._points}
        for group in document_groups([len(tokens) for tokens in documents]):
            ids, real = padded([documents[at] for at in group])
            arguments = {**self._fixed, argument: ids.to(self._like.device)}
            if mask:
                arguments[mask] = real.long().to(self._like.device)
            out = self._captures.of(batch, lambda given=arguments: self._module(**given))  # type: ignore[misc]
            for one in self._points:
                self._check_positions(out[one.name], ids)
                made = out[one.name].float().cpu()
                values = made if one.pooling == "none" else pooled(made, one.pooling, real)
                for place, at in enumerate(group):
                    found[one.name][at] = (
                        values[place][: len(documents[at])] if one.pooling == "none" else values[place]
                    )
        return {one.name: self._by_row(one.pooling, found[one.name], rows, batch) for one in self._points}

    def _check_positions(self, out: Tensor, ids: Tensor) -> None:
        if out.dim() < 3 or out.shape[:2] != ids.shape:
            problem = f"a submodule returns {tuple(out.shape)} for {tuple(ids.shape)} tokens"
            raise TeacherUnusable(self._teacher.model, f"{problem}; with tokens, name one with an output for each")

    def _by_row(
        self, pooling: str, values: Sequence[Tensor], rows: Sequence[Sequence[Array]], batch: Batch
    ) -> Array | Ragged:
        counts = np.cumsum([0, *(len(row) for row in rows)]).tolist()
        each = [values[start:stop] for start, stop in pairwise(counts)]
        inner = tuple(values[0].shape[1 if pooling == "none" else 0 :]) if values else ()
        if pooling != "none":
            stacked = [to_numpy(torch.stack(list(own))) if own else np.zeros((0, *inner), np.float32) for own in each]
            return Ragged.of(stacked, np.dtype(np.float32), inner)
        filled = np.zeros((len(rows), batch.array("tokens").shape[1], *inner), np.float32)
        for row, own in zip(filled, each, strict=True):
            whole = torch.cat(list(own)) if own else torch.zeros(0, *inner)
            row[: len(whole)] = to_numpy(whole)
        return filled


class _Images:
    """Makes the images that a model gets from stored pixels and boxes."""

    def __init__(self, given: ImageInput, size: int) -> None:
        self.argument = given.argument
        self._given, self._size = given, size
        self._recipe = ImageRecipe(size=LARGEST_SIZE, storage=given.storage)  # the canvas of the cache may have any
        self._scaling = Scaling.of((given.mean, given.std))

    def of(self, batch: Batch) -> NDArray[np.float32]:
        """Return `(samples, 3, size, size)`."""
        stored, _ = self._given.columns
        how = (self._size, self._given.fit, self._given.resample, self._given.pad_color)
        rows = zip(batch.rows(stored), batch.array("box"), strict=True)
        contents = (self._recipe.unpacked({stored: content, "box": box}) for content, box in rows)
        return self._scaling.apply(np.stack([model_planes(content, *how) for content in contents]))
