"""Run teachers. Only these modules import diffusers and transformers, and each is imported when it is needed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.torch.teachers.run_hook import Capture, HookedModule
_HOMES = {"Capture": "run_hook", "HookedModule": "run_hook"}
__all__ = ["Capture", "HookedModule"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"forebay.torch.teachers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'forebay.torch.teachers' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
