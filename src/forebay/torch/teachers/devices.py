"""Devices by name, and their memory by the counters of torch's allocators. Needs torch only."""

from typing import Any

import torch

from forebay.teachers.protocol import unusable
from forebay.torch.teachers import default_device


def device_named(name: str) -> torch.device:
    """Return a device by name; "auto" is the GPU, if there is one, else the CPU."""
    if name == "auto":
        return torch.device(default_device())
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise unusable(
            name, f"it is not a device of this machine: {' '.join(str(error).split())[:200]}; 'cpu' always is"
        ) from error
    return device


def device_facts(names: str) -> str:
    """Return the device facts that results depend on: equal bits need the same device."""
    return " and ".join(dict.fromkeys(_facts(device_named(name)) for name in names.split(",")))


def _facts(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


class DeviceMemory:
    """The memory that this process has taken on an accelerator, by the counters of its allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counters: Any = torch.get_device_module(device)

    def reset(self) -> None:
        """Free unused memory, and reset the peak counter."""
        self._counters.empty_cache()
        self._counters.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return int(self._counters.max_memory_reserved(self._device))


def device_memory(name: str) -> DeviceMemory | None:
    """Return the counters of a device; None for one whose memory is that of the process, or that torch lacks."""
    try:
        device = torch.device(name)
        counters: Any = torch.get_device_module(device)
    except RuntimeError:
        return None
    return DeviceMemory(device) if hasattr(counters, "max_memory_reserved") and counters.is_available() else None


def release_device_memory() -> None:
    """Release the memory of deleted models, which the allocator keeps from other processes."""
    if torch.accelerator.is_available():
        cached: Any = torch.get_device_module()
        cached.empty_cache()
