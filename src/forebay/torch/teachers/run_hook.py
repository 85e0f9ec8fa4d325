"""Run a model up to one submodule, and return the pooled output of that submodule."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from forebay.columns import Array
from forebay.errors import HookSilent, TeacherUnusable
from forebay.teachers.built_in import Hook
from forebay.teachers.protocol import Batch
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import class_named, load_model


class _Taken(Exception):
    """Ends a forward once the hooked submodule has run."""


class Capture:
    """Hooks a named submodule, to capture its output."""

    def __init__(self, module: nn.Module, submodule: str, model: str) -> None:
        self._model, self._submodule = model, submodule
        self._found: torch.Tensor | None = None
        try:
            part = module.get_submodule(submodule)
        except AttributeError as error:
            names = ", ".join(name for name, _ in list(module.named_children())[:8])
            raise TeacherUnusable(model, f"it has no submodule '{submodule}'; it has {names}, and theirs") from error
        self._handle = part.register_forward_hook(self._take)

    def of(self, batch: Batch, run: Callable[[], object]) -> torch.Tensor:
        """Return the output of the submodule while `run` runs the module on a batch."""
        self._found = None
        with suppress(_Taken):
            run()
        found, self._found = self._found, None
        if found is None:
            raise HookSilent(self._model, self._submodule, batch.ids[0], batch.first_t)
        return found

    def close(self) -> None:
        self._handle.remove()

    def _take(self, part: nn.Module, given: object, out: Any) -> None:
        value = out[0] if isinstance(out, tuple | list) else getattr(out, "last_hidden_state", out)
        self._found = value
        raise _Taken


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


class LoadedHook(HookedModule):
    """A hooked model of transformers or diffusers."""

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
