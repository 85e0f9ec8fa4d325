"""What one part of a model gives, taken while the model runs; what comes after that part is not run."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from forebay.errors import HookSilent, TeacherUnusable
from forebay.teachers.protocol import Batch


class _Taken(Exception):
    """Ends a forward once the part that is listened to has spoken."""


class Capture:
    """Listens to a named part of a module."""

    def __init__(self, module: nn.Module, submodule: str, model: str) -> None:
        self._model, self._submodule = model, submodule
        self._found: torch.Tensor | None = None
        try:
            part = module.get_submodule(submodule)
        except AttributeError as error:
            names = ", ".join(name for name, _ in list(module.named_children())[:8])
            raise TeacherUnusable(model, f"it has no part '{submodule}'; it has: {names}, and parts of them") from error
        self._handle = part.register_forward_hook(self._take)

    def of(self, batch: Batch, run: Callable[[], object]) -> torch.Tensor:
        """What the part gives while `run` runs the module on a batch."""
        self._found = None
        with suppress(_Taken):
            run()
        found, self._found = self._found, None
        if found is None:
            raise HookSilent(self._model, self._submodule, batch.ids[0], batch.first_moment)
        return found

    def close(self) -> None:
        self._handle.remove()

    def _take(self, part: nn.Module, given: object, out: Any) -> None:
        value = out[0] if isinstance(out, tuple | list) else getattr(out, "last_hidden_state", out)
        self._found = value
        raise _Taken
