"""Listening to any part of any module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forebay.columns import Array
from forebay.teachers.hook import Hook
from forebay.teachers.protocol import Batch
from forebay.torch.teachers.arrays import to_device, to_numpy
from forebay.torch.teachers.capture import Capture
from forebay.torch.teachers.loading import class_named, load_model

Pool = Callable[[Tensor], Tensor]

POOLINGS: dict[str, Pool] = {
    "none": lambda out: out,
    "mean": lambda out: out.flatten(1, -2).mean(dim=1),
    "max": lambda out: out.flatten(1, -2).amax(dim=1),
    "spatial_mean": lambda out: out.flatten(2).mean(dim=2),
    "first": lambda out: out[:, 0],
    "last": lambda out: out[:, -1],
}


class HookedModule:
    """What a part of a module gives, pooled, under one name.

    `arguments` says how the module is called for a batch; without it, columns go by the names of its arguments.
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
        given = self._given(batch)
        out = self._capture.of(batch, lambda: self._module(**given))
        return {self._name: to_numpy(self._pool(out.float()))}

    def close(self) -> None:
        """Listen no more: the module may live on."""
        self._capture.close()

    def _given(self, batch: Batch) -> Mapping[str, Any]:
        if callable(self._arguments):
            return self._arguments(batch)
        return {name: to_device(batch.array(column), self._like) for name, column in self._arguments.items()}


class LoadedHook(HookedModule):
    """A hook on a model of transformers or diffusers."""

    def __init__(self, teacher: Hook, device: str, dtype: str) -> None:
        cls = class_named(teacher.architecture, teacher.model)
        super().__init__(
            load_model(cls, teacher.model, teacher.weights, device, dtype),
            teacher.submodule,
            teacher.pooling,
            name=teacher.name,
            arguments=teacher.arguments,
            model=teacher.model,
        )
