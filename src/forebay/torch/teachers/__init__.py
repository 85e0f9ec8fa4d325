"""Run teachers. Only these modules import diffusers and transformers, and each is imported when it is needed."""

from typing import TYPE_CHECKING

import torch

from forebay.exports import lazy_exports
from forebay.torch.ranks import local_rank

if TYPE_CHECKING:
    from forebay.torch.teachers.run_hook import Captures as Captures

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)


def default_device() -> str:
    """Return the device that "auto" stands for: the GPU, if there is one, else the CPU.

    With several GPUs, the one with this process's local rank as set by torchrun, else the first.
    """
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_rank() % torch.cuda.device_count()}"
