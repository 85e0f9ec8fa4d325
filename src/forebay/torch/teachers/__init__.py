"""Run teachers. Only these modules import diffusers and transformers, and each is imported when it is needed."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from forebay.torch.ranks import local_rank

if TYPE_CHECKING:
    from forebay.torch.teachers.run_hook import Captures
__all__ = ["Captures", "default_device"]


def default_device() -> str:
    """Return the device that "auto" stands for: the GPU, if there is one, else the CPU.

    Of several GPUs it is the one with the number of this process on its machine, as torchrun sets it, or the first.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_rank() % torch.cuda.device_count()}"


def __getattr__(name: str) -> Any:
    if name == "Captures":
        return import_module("forebay.torch.teachers.run_hook").Captures
    raise AttributeError(
        f"module 'forebay.torch.teachers' has no attribute '{name}'", name=name, obj=sys.modules[__name__]
    )


def __dir__() -> list[str]:
    return list(__all__)
